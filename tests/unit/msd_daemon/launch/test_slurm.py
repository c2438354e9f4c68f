"""What is asked of Slurm, and what a node of a launch does with it."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from msd_client.contract.errors import ConfigError, DeadlineError, ResourceError
from msd_daemon.launch import node_agent, node_place
from msd_daemon.launch.launch_plan import LaunchPlan
from msd_daemon.launch.meeting import Meeting, NodeNote
from msd_daemon.launch.node_agent import NodeAgent
from msd_daemon.launch.node_place import child_environ, is_free, node_address, runtime_dir
from msd_daemon.launch.slurm import Allocation, find_allocation, srun_command, srun_environ
from msd_daemon.launch.slurm_launch import shared_folder
from msd_daemon.launch.waiting import wait_ready
from tests.support.stand_in_srun import parsed

SLURM = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "n[01-03]", "SLURMD_NODENAME": "n02"}


def plan(**changes: Any) -> LaunchPlan:
    given: dict[str, Any] = {
        "launcher": "slurm", "name": "slurm-77.0", "nodes": ["n01", "n02"], "planners": ["n01"],
        "has_keys": True,
    }  # fmt: skip
    return LaunchPlan(**(given | changes))


def test_the_allocation_is_read_from_the_environment() -> None:
    assert find_allocation(SLURM) == Allocation("77", "0", ["n01", "n02", "n03"])
    again = find_allocation(SLURM | {"SLURM_RESTART_COUNT": "2"})
    assert again.name == "slurm-77.2"
    assert find_allocation({"SLURM_JOB_ID": "7", "SLURM_NODELIST": "a,b"}).nodes == ["a", "b"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"SLURM_JOB_ID": ""}, "runs inside an allocation"),
        ({"SLURM_JOB_NODELIST": ""}, "runs inside an allocation"),
        ({"SLURM_JOB_NODELIST": "n[1"}, "not closed"),
        ({"SLURM_HET_SIZE": "2"}, "2 heterogeneous components"),
    ],
)
def test_what_is_no_allocation_is_refused(changes: dict[str, str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        find_allocation(SLURM | changes)


def test_srun_starts_one_agent_a_node_beside_the_ranks() -> None:
    command = srun_command(find_allocation(SLURM), Path("/h/.msd/x"), ["--export=ALL"])
    assert command[0] == "srun"
    options, agent = parsed(command[1:])
    assert (options["nodes"], options["ntasks"], options["ntasks_per_node"]) == ("3", "3", "1")
    assert options["overlap"] is True
    assert agent[1:] == ["-m", "msd_daemon.launch.node_agent", "--meeting", "/h/.msd/x"]


def test_what_the_script_asked_for_its_ranks_is_not_asked_of_this_step() -> None:
    asked = {
        "SLURM_MEM_PER_CPU": "1", "SLURM_NTASKS_PER_NODE": "8", "SLURM_CPUS_PER_TASK": "4",
        "SLURM_GPUS_PER_TASK": "1", "SLURM_EXPORT_ENV": "NONE", "SLURM_STEP_ID": "1",
    }  # fmt: skip
    kept = SLURM | {"PATH": "/bin", "SLURM_CPUS_ON_NODE": "8"}
    assert srun_environ(kept | asked) == kept


def test_the_shared_folder_is_in_the_home_or_named() -> None:
    assert shared_folder("", {"HOME": "/h"}) == Path("/h/.msd")
    assert shared_folder("/lustre/me", {"HOME": "/h"}) == Path("/lustre/me")
    for given, environ, why in (
        ("rel", {}, "absolute"), ("", {}, "no HOME"), ("/a%N", {}, "pattern"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=why):
            shared_folder(given, environ)


def test_a_socket_path_that_fits_nowhere_is_refused() -> None:
    long = SLURM | {"SLURMD_NODENAME": "n" * 100}
    with pytest.raises(ConfigError, match="above 107 bytes"):
        runtime_dir(long, 1000)
    with pytest.raises(ConfigError, match="neither SLURM_JOB_ID"):
        runtime_dir({}, 1000)


def test_a_state_folder_on_a_network_file_system_is_refused_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_TMPDIR", "/tmp")
    monkeypatch.setattr(node_agent, "file_system_of", lambda _: "lustre")
    agent = NodeAgent(Meeting(tmp_path / "meet"), plan(state_dir=str(tmp_path / "s")), "n02")
    with pytest.raises(
        ConfigError, match="node n02 is on lustre, a network file system, where SQL"
    ):
        agent._prepare_state_dir()
    assert not (tmp_path / "s").exists()


def test_a_node_that_is_none_of_the_launch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'n09' is none of this launch's: n01, n02"):
        NodeAgent(Meeting(tmp_path / "meet"), plan(), "n09")


def test_a_nodes_address_is_that_of_the_interface_its_name_or_the_route(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert node_address(plan(interface="lo"), "n01") == "127.0.0.1"
    assert node_address(plan(has_keys=False), "n01") == "127.0.0.1"
    assert node_address(plan(addresses={"n01": "10.1.1.1"}), "n01") == "10.1.1.1"
    found = ["127.0.1.1"]

    def lookup(*_: Any) -> list[Any]:
        return [(0, 0, 0, "", (address, 0)) for address in found]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    monkeypatch.setattr(node_place, "outward_address", lambda _: "10.9.9.9")
    assert node_address(plan(), "n01") == "10.9.9.9"
    found.append("10.2.2.2")
    assert node_address(plan(), "n01") == "10.2.2.2"
    with pytest.raises(ConfigError, match=r"no interface 'ib7' here; there are .*lo"):
        node_address(plan(interface="ib7"), "n01")


def test_children_have_nothing_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setenv("MSD__DAEMON__SOCKET", "/other.sock")
    monkeypatch.setenv("MSD__MEMORY__MEMORY_BYTES", "1Gi")
    found = child_environ()
    assert "CUDA_VISIBLE_DEVICES" not in found
    assert "MSD__DAEMON__SOCKET" not in found
    assert found["MSD__MEMORY__MEMORY_BYTES"] == "1Gi"


def test_waiting_ends_with_the_first_fault_and_names_it() -> None:
    nodes = ["n01", "n02"]
    notes = {"n01": NodeNote("n01", "ready"), "n02": NodeNote("n02", "ready")}
    assert wait_ready(lambda: notes, nodes, lambda: "", 1.0, "logs") == notes
    notes["n02"] = NodeNote("n02", "failed", error="no room")
    with pytest.raises(ResourceError, match=r"1 nodes failed \(logs\):\n  node n02: no room"):
        wait_ready(lambda: notes, nodes, lambda: "", 1.0, "logs")
    del notes["n02"]
    with pytest.raises(ResourceError, match=r"nodes n02 said nothing \(logs\): srun is gone"):
        wait_ready(lambda: notes, nodes, lambda: "srun is gone", 1.0, "logs")
    notes["n02"] = NodeNote("n02", "starting")
    with pytest.raises(DeadlineError, match=r"after 0 s nodes n02 are starting \(logs\)"):
        wait_ready(lambda: notes, nodes, lambda: "", 0.0, "logs")


def test_a_shared_folder_that_does_not_answer_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    meeting = Meeting(tmp_path / "meet")
    agent = NodeAgent(meeting, plan(), "n02")

    def fails(_: str) -> list[str]:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(meeting, "names", fails)
    assert not agent._is_stopped()
    agent._say("ready")
    monkeypatch.undo()
    meeting.ask_to_stop()
    assert not agent._is_stopped(), "it looks now and then only"
    agent._stop_look_at = 0.0
    assert agent._is_stopped()


def test_a_planners_place_is_free_once_the_one_before_has_left() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        assert not is_free("127.0.0.1", port)
    assert is_free("127.0.0.1", port)
    assert is_free("127.0.0.1", 0)
