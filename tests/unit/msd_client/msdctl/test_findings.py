"""msdctl doctor: each finding has its remedy, and small machines are noticed."""

import json
import os
import resource
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from msd_client.msdctl import findings, main

MIB = 1 << 20


@pytest.fixture
def runtime_dir(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    folder.mkdir(mode=0o750)
    monkeypatch.setenv("MSD__DAEMON__RUNTIME_DIR", str(folder))
    monkeypatch.setenv("MSD__DAEMON__STATE_DIR", str(tmp_path / "state"))
    monkeypatch.delenv("MSD__DAEMON__SOCKET", raising=False)
    return folder


def only(check):
    (found,) = check()
    return found


def test_every_finding_that_is_not_well_has_a_remedy(runtime_dir):
    for finding in findings.find_all():
        assert finding.value
        assert finding.remedy or finding.level == "ok", finding


def test_container_default_of_shared_memory_is_recognised(monkeypatch):
    monkeypatch.setattr(
        os, "statvfs", lambda _: SimpleNamespace(f_blocks=64, f_bavail=64, f_frsize=MIB)
    )
    found = only(findings.check_shared_memory)
    assert found.level == "warn"
    assert "container default" in found.remedy
    assert "--shm-size" in found.remedy
    assert "64 MiB is the container default" in found.remedy


def test_roomy_shared_memory_is_well(monkeypatch):
    monkeypatch.setattr(
        os, "statvfs", lambda _: SimpleNamespace(f_blocks=4096, f_bavail=4096, f_frsize=MIB)
    )
    assert only(findings.check_shared_memory).level == "ok"


def test_absent_shared_memory_is_a_warning(monkeypatch):
    def refuse(_):
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(os, "statvfs", refuse)
    assert "memfd" in only(findings.check_shared_memory).remedy


def test_few_file_descriptors_are_a_warning(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 1024))
    files, memlock = findings.check_limits()
    assert files.level == "warn"
    assert "ulimit -n 4096" in files.remedy
    assert memlock.level == "warn"


def test_stale_socket_and_listening_daemon_are_told_apart(runtime_dir):
    assert "not running" in only(findings.check_socket).value
    path = runtime_dir / "msd.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(os.fspath(path))
        server.listen()
        assert only(findings.check_socket).value == f"answers at {path}"
    stale = only(findings.check_socket)
    assert stale.level == "warn"
    assert "killed daemon" in stale.value


def test_another_daemons_socket_may_be_named(runtime_dir, tmp_path):
    path = tmp_path / "other.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(str(path))
        server.listen()
        told = {it.name: it for it in findings.find_all(path)}
        assert told["daemon"].value == f"answers at {path}"
    assert not any("answers" in it.value for it in findings.find_all())


def test_file_in_place_of_the_socket_fails(runtime_dir):
    (runtime_dir / "msd.sock").write_text("")
    assert only(findings.check_socket).level == "fail"


def test_unsafe_runtime_folder_fails(runtime_dir):
    runtime_dir.chmod(0o777)
    assert "others may write" in only(findings.check_socket).remedy


def test_long_socket_path_fails(monkeypatch):
    monkeypatch.setenv("MSD__DAEMON__SOCKET", "/" + "a" * 200)
    assert "107" in only(findings.check_socket).remedy


def test_state_folder_on_a_network_file_system_fails(runtime_dir, monkeypatch):
    monkeypatch.setattr(findings, "file_system_of", lambda path: "nfs4")
    assert only(findings.check_state_dir).level == "fail"


def test_file_system_comes_from_the_longest_mount_above():
    assert findings.file_system_of(Path("/proc/self")) == "proc"
    assert findings.file_system_of(Path("/nonexistent/deep")) == findings.file_system_of(Path("/"))


def test_leftover_names_are_listed(monkeypatch, tmp_path):
    monkeypatch.setattr(findings, "SHM_DIR", str(tmp_path))
    assert only(findings.check_leftovers).level == "ok"
    (tmp_path / "msd-ring-1").write_text("")
    (tmp_path / "other").write_text("")
    found = only(findings.check_leftovers)
    assert found.level == "warn"
    assert found.remedy == f"rm {tmp_path}/msd-ring-1"


def test_json_has_a_schema_and_the_exit_code_follows_failures(runtime_dir, capsys):
    assert main.run(["doctor", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "msd.doctor/1"
    assert document["ok"] is True
    assert {"name", "level", "value", "remedy"} == set(document["findings"][0])
    (runtime_dir / "msd.sock").write_text("")
    assert main.run(["doctor"]) == 1
    assert "FAIL" in capsys.readouterr().out
