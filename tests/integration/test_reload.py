"""A running daemon reads daemon.toml again: what it takes, what it names, and what faults change."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from msd_client.contract.errors import ConfigError
from tests.support.node import Node, run_ranks, text_job, wait_until
from tests.support.other_user import OTHER_UID, as_other_user, needs_root

pytestmark = pytest.mark.processes

StartNode = Callable[..., Node]


def test_a_reload_takes_what_it_can_and_names_the_rest(
    start_node: StartNode, tmp_path: Path
) -> None:
    config = tmp_path / "daemon.toml"
    config.write_text("[workers]\nspares = 0\n")
    node = start_node("--config", str(config))
    config.write_text(
        '[daemon]\nlog_level = "debug"\n[workers]\nspares = 2\n[federation]\nplanners = ["tcp://a:1"]\n'
    )
    changed = node.request("reload")["changed"]
    assert changed == {
        "now": ["daemon.log_level"],
        "next job": ["workers.spares"],
        "restart": ["federation"],
    }
    spares: list[int] = []

    def look(_data: object, step: object, _record: object) -> None:
        wait_until(
            lambda: node.request("status")["jobs"][0]["standby"]["spares"] == 2, "two spares"
        )
        spares.append(2)

    run_ranks(node, text_job(tmp_path), {"dp": 1}, 1, on_step=look)
    assert spares == [2]
    assert node.request("reload")["changed"] == {
        "now": [],
        "next job": [],
        "restart": ["federation"],
    }


def test_sighup_reloads_and_faults_change_nothing(start_node: StartNode, tmp_path: Path) -> None:
    config = tmp_path / "daemon.toml"
    config.write_text("")
    address = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(address)
        manager.settimeout(20)
        node = start_node("--config", str(config), environ={"NOTIFY_SOCKET": address})
        assert manager.recv(4096) == b"READY=1"
        config.write_text("[workers]\nspares = -3\n")
        node.process.send_signal(signal.SIGHUP)
        while not (told := manager.recv(4096)).startswith(b"RELOADING=1\nMONOTONIC_USEC="):
            assert told.startswith(b"STATUS=")
        while (told := manager.recv(4096)) != b"READY=1":
            assert told.startswith(b"STATUS=")
    wait_until(lambda: "nothing is changed" in node.log, "the refusal", 10)
    assert "workers.spares" in node.log
    with pytest.raises(ConfigError, match=r"workers\.spares"):
        node.request("reload")
    assert node.request("ping")["pid"] == node.process.pid


@needs_root
def test_another_user_may_not_ask_for_it(start_node: StartNode, tmp_path: Path) -> None:
    config = tmp_path / "daemon.toml"
    config.write_text(f"[access]\nallow_uids = [{OTHER_UID}]\n")
    node = start_node("--config", str(config))
    code = (
        "try:\n    request(SOCKET, {'verb': 'reload'})\n"
        "except PermissionError as error:\n    print('refused', error)\n"
    )
    assert "refused" in as_other_user(code, node)
