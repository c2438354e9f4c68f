"""The units under a systemd that runs: start, reload, kill, hang, late network, stop under load."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.support.booted import BINARIES, Booted, booted_system, needs_booted
from tests.support.node import wait_until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

DAEMON = "msd-daemon.service"
SOCKET = "/run/msd/msd.sock"

TRAINER = """
import sys, msd_client
job = {
    "schema": 1, "name": "load", "seed": 3, "tokenizer": {"bytes": True, "eos": "end"},
    "batch": {"rows": 8, "row_tokens": 256, "microbatch_rows": 2},
    "sources": {"web": "/srv/texts/*.jsonl"}, "mixture": {"unit": "tokens", 0: {"web": 1}},
}
with msd_client.connect(job, mesh={"dp": 1}, rank=0, daemon="/run/msd/msd.sock", as_="numpy") as data:
    for step in data.train:
        for batch in step:
            pass
        print(step.number, flush=True)
"""


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Booted]:
    if why := needs_booted():
        pytest.skip(why)
    with booted_system(tmp_path_factory.mktemp("boot")) as found:
        found.run(
            f"{BINARIES}/msdctl", "install-service", "daemon", "planner", "--binaries", BINARIES
        )
        lines = "".join(
            json.dumps({"text": f"{n} " + "word " * (n % 50)}) + "\n" for n in range(500)
        )
        found.run("mkdir", "-p", "/srv/texts")
        found.write("/srv/texts/a.jsonl", lines)
        yield found


@pytest.fixture
def daemon(system: Booted) -> Iterator[Booted]:
    """A system whose daemon runs with the configuration as it was installed."""
    system.run("cp", "/etc/msd/daemon.toml", "/etc/msd/daemon.toml.first")
    system.run("systemctl", "start", DAEMON, is_checked=False)
    assert state(system)["ActiveState"] == "active", system.log_of(DAEMON)
    yield system
    system.run("systemctl", "stop", DAEMON, is_checked=False)
    system.run("mv", "/etc/msd/daemon.toml.first", "/etc/msd/daemon.toml")
    system.run("systemctl", "reset-failed", is_checked=False)


def state(system: Booted) -> dict[str, str]:
    return system.unit(
        DAEMON, "ActiveState", "SubState", "Result", "MainPID", "StatusText", "ExecMainStatus",
        "NRestarts",
    )  # fmt: skip


def msdctl(system: Booted, *arguments: str) -> str:
    return system.run(f"{BINARIES}/msdctl", *arguments, "--socket", SOCKET)


def test_it_starts_reloads_and_its_stop_under_load_leaves_nothing(daemon: Booted) -> None:
    found = json.loads(msdctl(daemon, "status", "--json"))["daemon"]
    assert str(found["pid"]) == state(daemon)["MainPID"]
    assert daemon.run("stat", "-c", "%U %a", SOCKET).split() == ["msd", "660"]
    daemon.write("/etc/msd/daemon.toml", "[workers]\nspares = 0\n")
    daemon.run("systemctl", "reload", DAEMON)
    wait_until(lambda: "workers.spares" in daemon.log_of(DAEMON), "the reload")
    # A rank that reads all the time; steps are told by lines, so none is waited for by time.
    with daemon.start(*daemon.python("-c", TRAINER)) as trainer:
        try:
            assert trainer.stdout is not None
            for _ in range(3):
                line = trainer.stdout.readline()
                assert line.strip().isdecimal(), line + trainer.stdout.read()
            assert "1 jobs" in json.dumps(state(daemon)) or msdctl(daemon, "jobs")
            daemon.run("systemctl", "stop", DAEMON)
        finally:
            trainer.kill()
            trainer.communicate(timeout=30)
    ended = state(daemon)
    assert (ended["ActiveState"], ended["Result"], ended["ExecMainStatus"]) == (
        "inactive", "success", "0"
    )  # fmt: skip
    assert daemon.run("ls", "/dev/shm").split() == []
    left = daemon.run("ps", "-o", "pid=,args=", "-u", "msd", is_checked=False)
    assert left.strip() == ""


@pytest.mark.soak
def test_one_that_is_killed_or_hangs_is_started_again(daemon: Booted) -> None:
    first = state(daemon)["MainPID"]
    daemon.run("kill", "-9", first)
    wait_until(lambda: state(daemon)["ActiveState"] == "active", "the next one")
    second = state(daemon)["MainPID"]
    assert second != first
    daemon.run("mkdir", "-p", "/run/systemd/system/msd-daemon.service.d")
    daemon.write(
        "/run/systemd/system/msd-daemon.service.d/quick.conf",
        "[Service]\nWatchdogSec=3\nTimeoutAbortSec=2\n",
    )
    daemon.run("systemctl", "daemon-reload")
    daemon.run("systemctl", "restart", DAEMON)
    third = state(daemon)["MainPID"]
    daemon.run("kill", "-STOP", third)
    wait_until(
        lambda: state(daemon)["ActiveState"] == "active" and state(daemon)["MainPID"] != third,
        "the watchdog", 60,
    )  # fmt: skip
    assert "atchdog" in daemon.run("journalctl", "-u", DAEMON, "--no-pager")


@pytest.mark.soak
def test_twenty_restarts_do_not_end_in_the_start_limit(daemon: Booted) -> None:
    for _ in range(20):
        daemon.run("systemctl", "restart", DAEMON)
    assert state(daemon)["ActiveState"] == "active"
    assert daemon.run("ls", "/dev/shm").split() == []


@pytest.mark.soak
def test_a_network_that_is_late_is_waited_for(daemon: Booted) -> None:
    keys = "/etc/msd/keys"
    for name in ("n1", "planner"):
        daemon.run(f"{BINARIES}/msdctl", "keys", "--keys-dir", keys, "generate", name)
    daemon.run("chown", "-R", "msd:", keys)
    daemon.write(
        "/etc/msd/daemon.toml",
        f'[federation]\nnode = "n1"\nplanners = ["planner.late.test:7533"]\nkeys_dir = "{keys}"\n'
        'listen = "%late0:7711"\n',
    )
    daemon.write(
        "/etc/msd/planner.toml", f'name = "planner"\nkeys_dir = "{keys}"\nlisten = "*:7533"\n'
    )
    daemon.run("systemctl", "restart", DAEMON, is_checked=False)
    wait_until(lambda: int(state(daemon)["NRestarts"]) >= 7, lambda: str(state(daemon)), 90)
    assert state(daemon)["Result"] != "start-limit-hit"
    daemon.run("ip", "link", "add", "late0", "type", "bridge")
    daemon.run("ip", "address", "add", "198.18.9.1/24", "dev", "late0")
    daemon.run("ip", "link", "set", "late0", "up")
    wait_until(lambda: state(daemon)["ActiveState"] == "active", lambda: daemon.log_of(DAEMON), 30)
    wait_until(lambda: "waits for a planner" in state(daemon)["StatusText"], "the status")
    assert "waits for a planner" in msdctl(daemon, "status")
    daemon.run("systemctl", "start", "msd-planner.service", is_checked=False)
    planner = daemon.unit("msd-planner.service", "ActiveState")["ActiveState"]
    assert planner == "active", daemon.log_of("msd-planner.service")
    daemon.run("sh", "-c", "echo 127.0.0.1 planner.late.test >> /etc/hosts")
    wait_until(lambda: "waits" not in msdctl(daemon, "status"), lambda: daemon.log_of(DAEMON), 15)
    daemon.run("systemctl", "stop", "msd-planner.service")
    assert daemon.unit("msd-planner.service", "Result")["Result"] == "success"


def test_a_fault_of_the_configuration_is_told_once(daemon: Booted) -> None:
    daemon.write("/etc/msd/daemon.toml", "[workers]\nspares = -1\n")
    daemon.run("systemctl", "restart", DAEMON, is_checked=False)
    wait_until(lambda: state(daemon)["ActiveState"] == "failed", lambda: str(state(daemon)))
    assert state(daemon)["ExecMainStatus"] == "78"
    assert "workers.spares" in daemon.log_of(DAEMON)


def test_stopped_by_its_own_verb_it_stays_stopped(daemon: Booted) -> None:
    msdctl(daemon, "stop", "--daemon")
    wait_until(lambda: state(daemon)["ActiveState"] == "inactive", lambda: str(state(daemon)))
    assert state(daemon)["Result"] == "success"


OWN = """
import os, sys, msd_client
name = sys.argv[1]
job = {
    "schema": 1, "name": name, "seed": 3, "tokenizer": {"bytes": True, "eos": "end"}, "steps": 2,
    "batch": {"rows": 4, "row_tokens": 256, "microbatch_rows": 2},
    "sources": {"own": f"/srv/{name}/*.jsonl"}, "mixture": {"unit": "tokens", 0: {"own": 1}},
}
try:
    with msd_client.connect(job, mesh={"dp": 1}, rank=0, daemon="/run/msd/msd.sock", as_="numpy") as data:
        for step in data.train:
            for batch in step:
                text = bytes(batch.tokens[batch.tokens < 256].astype("uint8"))
    print("read", b"secret of alice" in text)
except Exception as error:
    print(type(error).__name__, error, os.getgroups())
"""


def as_user(system: Booted, user: str, *arguments: str) -> str:
    return system.run("runuser", "-u", user, "--", *system.python("-c", OWN, *arguments))


def test_a_daemon_of_many_users_reads_for_each_with_his_own_rights(system: Booted) -> None:
    """alice's 0600 file: neither bob's job nor the daemon's user gets it, hers does."""
    for user in ("alice", "bob"):
        system.run("useradd", "--system", "--groups", "msd", user)
        system.run("mkdir", "-p", f"/srv/{user}")
    lines = "".join(json.dumps({"text": f"secret of alice {n}"}) + "\n" for n in range(200))
    system.write("/srv/alice/a.jsonl", lines)
    system.run("chown", "-R", "alice:", "/srv/alice")
    system.run("chmod", "600", "/srv/alice/a.jsonl")
    system.run("ln", "-s", "/srv/alice/a.jsonl", "/srv/bob/b.jsonl")
    gid = system.run("id", "-g", "msd").strip()
    system.run("cp", "/etc/msd/daemon.toml", "/etc/msd/daemon.toml.first")
    system.write("/etc/msd/daemon.toml", f"[access]\nallow_gids = [{gid}]\n")
    try:
        system.run("systemctl", "start", DAEMON)
        said = as_user(system, "alice", "alice")
        assert "PermissionDeniedError" in said, said
        assert "--many-users" in said
        system.run(f"{BINARIES}/msdctl", "install-service", "--many-users", "--binaries", BINARIES)
        system.run("systemctl", "restart", DAEMON)
        said = as_user(system, "alice", "alice")
        assert "read True" in said, said + system.log_of(DAEMON)
        # His own link to her file, and the path itself.
        for name in ("bob", "alice"):
            said = as_user(system, "bob", name)
            assert "read" not in said.split("\n")[-2].split()[:1], said
            assert "ermission denied" in said, said
    finally:
        system.run("systemctl", "stop", DAEMON, is_checked=False)
        system.run("rm", "-rf", "/etc/systemd/system/msd-daemon.service.d")
        system.run("systemctl", "daemon-reload")
        system.run("mv", "/etc/msd/daemon.toml.first", "/etc/msd/daemon.toml")
