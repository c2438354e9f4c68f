"""Verbs that talk to the daemon: what they send, what they print, and older daemons' gaps."""

import copy
import json
from pathlib import Path

import pytest

from msd_client import control
from msd_client.contract.errors import DaemonUnavailableError
from msd_client.msdctl import main
from msd_client.msdctl.job_argument import parse_mesh
from msd_client.msdctl.status_text import calibration_lines, job_text, ring_line
from msd_client.msdctl.top import add_rates

PROCESS = {"role": "loader", "pid": 9, "cpu_s": 1.5, "memory": {"pss_anon": 1 << 25}}
SOURCES = [
    {"name": "web", "wanted": 0.6, "drawn_tokens": 600, "drawn_samples": 1, "dropped_records": 3},
    {"name": "code", "wanted": 0.4, "drawn_tokens": 400, "drawn_samples": 3, "dropped_records": 0},
]
RING = {"dp_group": 0, "slots": 4, "free": 1, "ready": 3, "bytes": 1 << 22, "segment": "shm"}
JOB = {
    "name": "gpt",
    "id": "aa",
    "state": "serving",
    "digest": "ab" * 16,
    "mesh": [["dp", 2], ["tp", 2]],
    "ranks": [{"rank": rank, "pid": rank + 100, "dp_group": rank // 2} for rank in range(4)],
    "waiting_for_ranks": [],
    "workers": [PROCESS],
    "generation": 1,
    "step_planned": 14,
    "step_released": 12,
    "tokens": 1_234_567,
    "fill": 0.995,
    "imbalance": 1.003,
    "imbalance_last": 1.002,
    "mixture_unit": "tokens",
    "sources": SOURCES,
    "pool": {"capacity_bytes": 1 << 26, "free_bytes": 1 << 25, "chunks": 7, "revocations": 0},
    "rings": [RING, RING | {"dp_group": 1, "ready": 0, "free": 4}],
}
STATUS = {
    "daemon": {
        "version": "0.1.0",
        "pid": 7,
        "uptime_s": 3700.5,
        "cpu_s": 2.0,
        "memory": {"pss_anon": 1 << 24},
        "socket": "/run/msd.sock",
        "memory_budget_bytes": 1 << 30,
        "clients": 4,
        "processes": [PROCESS | {"role": "planner"}],
    },
    "jobs": [JOB],
}
JOBS = {"jobs": [{"name": "gpt", "state": "serving", "digest": "ab", "uid": 0, "ranks": 4}]}


@pytest.fixture
def daemon(monkeypatch):
    """Stand in for a daemon: records requests, answers from a table."""
    sent = []
    answers = {
        "status": STATUS,
        "jobs": JOBS,
        "submit": {"name": "gpt", "digest": "cd", "resolved_yaml": "digest: cd\n"},
        "stop": {"job": "gpt", "state": "stopped"},
        "shutdown": {"pid": 7},
        "mixture": {"job": "gpt", "step": 40, "weights": {}},
        "rewind": {"job": "gpt", "step": 5, "was_running": True, "forgotten": 0, "state": b"s"},
    }

    def request(socket_path, message, **_):
        sent.append((socket_path, message))
        return copy.deepcopy(answers[message["verb"]])

    monkeypatch.setattr(control, "request", request)
    return sent


def test_submit_sends_the_text_as_written(daemon, tmp_path, capsys):
    job = tmp_path / "gpt.yaml"
    job.write_text("seed: 1\n")
    assert main.run(["submit", str(job), "--socket", "/s.sock"]) == 0
    ((socket_path, message),) = daemon
    assert socket_path == Path("/s.sock")
    assert message == {
        "verb": "submit",
        "text": "seed: 1\n",
        "base_dir": str(tmp_path),
        "name": "gpt",
    }
    assert capsys.readouterr().out == "gpt cd\n"
    assert main.run(["submit", str(job), "--resolved"]) == 0
    assert capsys.readouterr().out == "digest: cd\n"


@pytest.mark.parametrize("mesh", ["dp", "dp=0", "dp=x", "dp=2,dp=2", "=3", "", "dp=-1"])
def test_malformed_mesh_says_the_form(mesh):
    with pytest.raises(ValueError, match="; write dp=2,tp=2"):
        parse_mesh(mesh)


def test_mesh_keeps_the_order_of_its_axes():
    assert list(parse_mesh("tp=2, dp=4").items()) == [("tp", 2), ("dp", 4)]


@pytest.mark.parametrize("content", [None, b"\xff\xfe", b"x" * ((1 << 20) + 1)])
def test_unreadable_job_file_is_a_config_fault(daemon, tmp_path, capsys, content):
    job = tmp_path / "gpt.yaml"
    if content is not None:
        job.write_bytes(content)
    assert main.run(["submit", str(job)]) == 78
    assert str(job) in capsys.readouterr().err
    assert daemon == []


def test_status_shows_budget_rings_and_both_realised_shares(daemon, capsys):
    assert main.run(["status"]) == 0
    out = capsys.readouterr().out
    for part in (
        "1.0 GiB for pools and rings",
        "3 of 4 slots ready",
        "60.00%",
        "25.00%",
        "dp 2 * tp 2",
        "32.0 MiB of 64.0 MiB",
        "ring 1  0 of 4 slots ready, 4.0 MiB shm: empty, the loader is the slower side",
        "up 1 h 1 min",
    ):
        assert part in out


def test_encoders_imbalance_is_shown_where_the_job_has_some():
    assert "encoders" not in job_text(JOB)
    text = job_text(JOB | {"encoder_imbalance": 1.012, "encoder_imbalance_last": 1.5})
    assert "  encoders' imbalance 1.012 (last 1.5)" in text


def test_full_ring_means_the_trainer_and_names_the_last_rank():
    line = ring_line(RING | {"free": 0, "ready": 4, "last_reader": 3})
    assert line.endswith("full, the trainer is the slower side (last to release: rank 3)")


def test_a_state_that_cannot_be_written_rewinds_nothing(daemon, tmp_path, capsys):
    arguments = ["rewind", "gpt", "--to", "5", "--skip", "7:9", "--state"]
    assert main.run([*arguments, str(tmp_path / "no" / "folder")]) == 1
    assert "nothing was rewound: give a path that can be written" in capsys.readouterr().err
    ((_, message),) = daemon
    assert (message["state_only"], message["wants_state"]) == (True, True)
    daemon.clear()
    assert main.run([*arguments, str(tmp_path / "s")]) == 0
    assert (tmp_path / "s").read_bytes() == b"s"
    (_, asked), (_, done) = daemon
    assert asked["state_only"]
    assert done == {
        "verb": "rewind", "job": "gpt", "clear": False, "to": 5, "forget_after": None, "skip": [7, 9],
    }  # fmt: skip
    daemon.clear()
    assert main.run([*arguments[:4], "--state", str(tmp_path / "t"), "--state-only"]) == 0
    assert len(daemon) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["skip", "gpt", "--steps", "{0}:{0}1"],
        ["skip", "gpt", "--steps", "5:{}"],
        ["skip", "gpt", "--steps", "²:5"],
        ["mix", "gpt", "web=1", "--at", "{}"],
        ["rewind", "gpt", "--to", "{}"],
        ["rewind", "gpt", "--to", "5", "--forget-after", "{}"],
        ["rewind", "gpt", "--to", "5", "--skip", "10:{}"],
        ["lineage", "gpt", "--step", "{}"],
        ["lineage", "gpt", "--step", "1", "--generation", "{}"],
        ["verify", "gpt", "--steps", "1:{}"],
        ["verify", "gpt", "--steps", "1:2", "--generation", "{}"],
        ["find", "gpt", "web", "key", "--generation", "{}"],
        ["start-state", "job.yaml", "--consumed", "web=5samples", "-o", "f", "--step", "{}"],
        ["graph", "job.yaml", "--step", "{}"],
    ],
)
def test_numbers_that_no_step_has_are_refused(daemon, capsys, arguments):
    for number in (2**62 + 1, 2**63 - 1, 2**64, 10**30):
        assert main.run([part.format(number) for part in arguments]) == 2
        assert capsys.readouterr().err
        assert daemon == []


def test_events_that_wait_are_shown(daemon, monkeypatch, capsys):
    waiting = {
        "waiting_mixtures": [{"plan_step": 4000, "shares": {"web": 0.75, "code": 0.25}}],
        "waiting_skips": [[4100, 4103]],
    }
    monkeypatch.setattr(control, "request", lambda *_, **__: {"jobs": [JOB | waiting]})
    lines = (
        "to come: from plan step 4,000 on shares web 0.75, code 0.25",
        "to come: plan steps 4,100 to 4,102 are left out",
    )
    for verb in (["status", "gpt"], ["mixture", "show", "gpt"]):
        assert main.run(verb) == 0
        out = capsys.readouterr().out
        assert all(line in out for line in lines), out
    assert main.run(["mixture", "show", "gpt", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {key: told[key] for key in waiting} == waiting


def test_status_of_one_job_asks_for_it(daemon, capsys):
    assert main.run(["status", "gpt"]) == 0
    assert daemon[0][1] == {"verb": "status", "job": "gpt"}
    assert "msd-daemon" not in capsys.readouterr().out


def test_ranks_that_are_waited_for_are_named(daemon, monkeypatch, capsys):
    waiting = {"name": "gpt", "state": "joining", "waiting_for_ranks": list(range(20))}
    monkeypatch.setattr(control, "request", lambda *_, **__: {"jobs": [waiting]})
    assert main.run(["status", "gpt"]) == 0
    assert "waits for ranks 0, 1, 2" in (out := capsys.readouterr().out)
    assert "and 4 more" in out


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


def test_mixture_adds_both_realised_shares(daemon, capsys):
    assert main.run(["mixture", "show", "gpt", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [source["token_share"] for source in document["sources"]] == [0.6, 0.4]
    assert [source["sample_share"] for source in document["sources"]] == [0.25, 0.75]
    assert document["unit"] == "tokens"


def test_answers_without_fields_are_printed_too(daemon, monkeypatch, capsys):
    bare = {"daemon": {}, "jobs": [{"name": "a", "sources": [{"name": "web"}], "rings": [{}]}]}
    monkeypatch.setattr(control, "request", lambda *_, **__: copy.deepcopy(bare))
    for arguments in (["status"], ["jobs"], ["top", "--count", "1"], ["mixture", "show", "a"]):
        assert main.run(arguments) == 0
    assert "job a" in capsys.readouterr().out


def test_stop_takes_a_job_or_the_daemon(daemon):
    assert main.run(["stop", "gpt"]) == 0
    assert main.run(["stop", "--daemon"]) == 0
    sent = [message for _, message in daemon]
    assert sent == [{"verb": "stop", "job": "gpt"}, {"verb": "shutdown"}]
    assert main.run(["stop"]) == 2
    assert main.run(["stop", "gpt", "--daemon"]) == 2
    assert len(daemon) == 2


def test_mix_is_short_for_mixture_set_and_takes_a_step(daemon, capsys):
    for verb in (["mix"], ["mixture", "set"]):
        assert main.run([*verb, "gpt", "web=4,code=2", "--at", "5000"]) == 0
    weights = {"web": 4.0, "code": 2.0}
    sent = {"verb": "mixture", "job": "gpt", "weights": weights, "at": 5000}
    assert [message for _, message in daemon] == [sent, sent]
    assert main.run(["mix", "gpt", "web=4", "--at", "-1"]) == 2


def test_mixture_set_sends_weights(daemon, capsys):
    assert main.run(["mixture", "set", "gpt", "web=4,code=0.5"]) == 0
    weights = {"web": 4.0, "code": 0.5}
    assert daemon[0][1] == {"verb": "mixture", "job": "gpt", "weights": weights}
    assert "from step 40" in capsys.readouterr().out
    for malformed in ("web", "web=x", "web=1,web=2"):
        assert main.run(["mixture", "set", "gpt", malformed]) == 2
    assert len(daemon) == 1


def test_top_shows_the_rate_between_two_looks():
    last = {}
    first, second = copy.deepcopy(STATUS), copy.deepcopy(STATUS)
    second["jobs"][0]["tokens"] += 1000
    add_rates(first, last, 10.0)
    add_rates(second, last, 12.0)
    assert "tokens_per_s" not in first["jobs"][0]
    assert second["jobs"][0]["tokens_per_s"] == 500


def test_no_daemon_is_exit_code_3(monkeypatch, capsys):
    def refuse(*_, **__):
        raise DaemonUnavailableError("no daemon answers at /s.sock: start one")

    monkeypatch.setattr(control, "request", refuse)
    assert main.run(["status"]) == 3
    assert "start one" in capsys.readouterr().err


def test_a_calibration_without_a_fit_is_the_analytical_cost():
    state = {"parts": ["linear"], "relative": [1.0], "since_step": None, "fits": 0}
    (line,) = calibration_lines(state | {"reports_received": 12, "last_fit": None})
    assert line == "  cost analytical; 12 reports, 0 fits"
    fit = {"step": 9, "relative": [1.0], "observations": 80, "is_accepted": False}
    lines = calibration_lines(state | {"fits": 1, "last_fit": fit})
    assert lines[1].startswith("  last fit at step 9 of 80 times: not taken, error - beside -")
    assert lines[-1].split() == ["linear", "1", "1", "1"]


def test_a_generation_says_how_long_ranks_waited_and_what_lay_in_the_pool():
    assert "first batch" not in job_text(JOB)
    times = {"generation": 2, "join_to_first_batch_ms": 48.25, "start_to_first_batch_ms": 40.0}
    text = job_text(JOB | times | {"taken_over": {"records": 0, "carried": 0, "used_bytes": 0}})
    assert "generation 2: first batch 48.25 ms after the last rank joined, 40 ms" in text
    assert "all was read anew" in text
    taken = {"chunks": 5, "records": 2813, "used_bytes": 1 << 20, "carried": 5}
    assert "2,813 records and 5 carried fragments" in job_text(JOB | times | {"taken_over": taken})


def test_a_held_slot_is_not_shown_as_ready():
    line = ring_line(RING | {"free": 3, "ready": 0, "held": 1})
    assert line.startswith("ring 0  0 of 4 slots ready, 1 held, ")
    assert "empty, the loader is the slower side" in line
