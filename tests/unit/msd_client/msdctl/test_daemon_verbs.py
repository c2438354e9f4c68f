"""Verbs that talk to the daemon: what they send, what they print, and older daemons' gaps."""

import json
from pathlib import Path

import pytest

from msd_client import control
from msd_client.contract.errors import DaemonUnavailableError
from msd_client.msdctl import main

SOURCE = {
    "name": "web",
    "wanted_share": 0.6,
    "token_share": 0.5987,
    "sample_share": 0.25,
    "epoch": 0,
    "dropped_records": 3,
}
JOB = {
    "name": "gpt",
    "state": "serving",
    "step": 12,
    "digest": "ab" * 16,
    "mesh": {"dp": 2, "tp": 2},
    "ranks": 4,
    "tokens": 1_234_567,
    "tokens_per_s": 98_765.4,
    "wait_ratio": 0.011,
    "imbalance": 1.003,
    "fill_ratio": 0.995,
    "ring_ready": 3,
    "ring_slots": 4,
    "pool_used_bytes": 1 << 20,
    "pool_bytes": 1 << 26,
    "sources": [SOURCE],
}
STATUS = {
    "daemon": {
        "version": "0.1.0",
        "pid": 7,
        "uptime_s": 3700,
        "socket": "/run/msd.sock",
        "memory_bytes": 1 << 30,
        "memory_used_bytes": 1 << 29,
        "workers": [{"kind": "loader", "pid": 9, "state": "running", "rss_bytes": 1 << 25}],
    },
    "jobs": [JOB],
}


@pytest.fixture
def daemon(monkeypatch):
    """Stand in for a daemon: records requests, answers from a table."""
    sent = []
    answers = {"status": STATUS, "submit": {"job": "gpt", "digest": "cd"}, "stop": {}}
    answers["mixture"] = {"at_step": 40}

    def request(socket_path, message, **_):
        sent.append((socket_path, message))
        return answers[message["verb"]]

    monkeypatch.setattr(control, "request", request)
    return sent


def test_submit_sends_the_text_as_written(daemon, tmp_path, capsys):
    job = tmp_path / "gpt.yaml"
    job.write_text("seed: 1\n")
    assert main.run(["submit", str(job), "--mesh", "dp=2,tp=2", "--socket", "/s.sock"]) == 0
    ((socket_path, message),) = daemon
    assert socket_path == Path("/s.sock")
    assert message == {
        "verb": "submit",
        "text": "seed: 1\n",
        "base_dir": str(tmp_path),
        "name": "gpt",
        "mesh": {"dp": 2, "tp": 2},
    }
    assert capsys.readouterr().out == "gpt cd\n"


@pytest.mark.parametrize("mesh", ["dp", "dp=0", "dp=x", "dp=2,dp=2", "=3", ""])
def test_malformed_mesh_is_a_usage_fault(daemon, tmp_path, mesh):
    job = tmp_path / "gpt.yaml"
    job.write_text("seed: 1\n")
    assert main.run(["submit", str(job), "--mesh", mesh]) == 2
    assert daemon == []


@pytest.mark.parametrize("content", [None, b"\xff\xfe", b"x" * ((1 << 20) + 1)])
def test_unreadable_job_file_is_a_config_fault(daemon, tmp_path, capsys, content):
    job = tmp_path / "gpt.yaml"
    if content is not None:
        job.write_bytes(content)
    assert main.run(["submit", str(job)]) == 78
    assert str(job) in capsys.readouterr().err
    assert daemon == []


def test_status_shows_memory_ring_and_both_realised_shares(daemon, capsys):
    assert main.run(["status"]) == 0
    out = capsys.readouterr().out
    for part in (
        "512.0 MiB of 1.0 GiB",
        "3 of 4 slots",
        "60.00%",
        "59.87%",
        "25.00%",
        "dp 2 x tp 2",
    ):
        assert part in out


def test_status_of_one_job_and_of_an_unknown_one(daemon, capsys):
    assert main.run(["status", "gpt"]) == 0
    assert "msd-daemon" not in capsys.readouterr().out
    assert main.run(["status", "nope"]) == 4
    assert "known: gpt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "schema", "key"),
    [
        (["status"], "msd.status/1", "daemon"),
        (["jobs"], "msd.jobs/1", "jobs"),
        (["mixture", "show", "gpt"], "msd.mixture/1", "sources"),
        (["top", "--count", "1"], "msd.top/1", "jobs"),
    ],
)
def test_read_verbs_print_one_json_object(daemon, capsys, arguments, schema, key):
    assert main.run([*arguments, "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    document = json.loads(line)
    assert document["schema"] == schema
    assert key in document


def test_answers_without_fields_are_printed_too(daemon, monkeypatch, capsys):
    monkeypatch.setattr(
        control, "request", lambda *_, **__: {"daemon": {}, "jobs": [{"name": "a"}]}
    )
    for arguments in (["status"], ["jobs"], ["top", "--count", "1"], ["mixture", "show", "a"]):
        assert main.run(arguments) == 0
    assert "job a" in capsys.readouterr().out


def test_stop_takes_a_job_or_the_daemon(daemon):
    assert main.run(["stop", "gpt"]) == 0
    assert main.run(["stop", "--daemon"]) == 0
    assert [message for _, message in daemon] == [{"verb": "stop", "job": "gpt"}, {"verb": "stop"}]
    assert main.run(["stop"]) == 2
    assert main.run(["stop", "gpt", "--daemon"]) == 2


def test_mixture_set_sends_weights_and_step(daemon, capsys):
    assert main.run(["mixture", "set", "gpt", "web=4,code=0.5", "--at-step", "40"]) == 0
    assert daemon[0][1] == {
        "verb": "mixture",
        "job": "gpt",
        "weights": {"web": 4.0, "code": 0.5},
        "at_step": 40,
    }
    assert "from step 40" in capsys.readouterr().out
    assert main.run(["mixture", "set", "gpt", "web"]) == 2


def test_top_says_who_waits(daemon, capsys):
    assert main.run(["top", "--count", "2", "--every", "0.1"]) == 0
    assert capsys.readouterr().out.count("gpt: ring full: waits for the trainer") == 2


def test_no_daemon_is_exit_code_3(monkeypatch, capsys):
    def refuse(*_, **__):
        raise DaemonUnavailableError("no daemon answers at /s.sock: start one")

    monkeypatch.setattr(control, "request", refuse)
    assert main.run(["status"]) == 3
    assert "start one" in capsys.readouterr().err
