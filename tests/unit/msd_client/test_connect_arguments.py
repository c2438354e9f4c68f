"""Arguments that are none are refused before anything is sent, with what to write."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import msd_client
from msd_client.arguments import saved_bytes
from msd_client.contract.errors import (
    ConfigError,
    MeshMismatchError,
    StateMismatchError,
    UsageError,
)
from msd_client.joined_job import Data, JoinRequest, MixtureStep, ValidationLoader, job_fields
from msd_client.loader import TrainLoader
from msd_client.mesh import find_place

NOWHERE = "/nonexistent/msd.sock"


@pytest.mark.parametrize("rank", ["1", 1, np.int64(1)])
def test_a_rank_may_come_as_the_launchers_text(rank: Any) -> None:
    assert find_place({"dp": 2}, rank, {}).rank == 1
    assert type(find_place({"dp": 2}, rank, {}).rank) is int


@pytest.mark.parametrize("rank", ["", "-1", " 1", "one", "1.0", "²", True, 1.0, b"1", [1]])
def test_another_rank_is_refused(rank: Any) -> None:
    with pytest.raises(MeshMismatchError, match="write a whole number"):
        find_place({"dp": 2}, rank, {})


@pytest.mark.parametrize("daemon", [None, 5, b"/x"])
def test_a_daemon_is_a_path_or_auto(daemon: Any) -> None:
    with pytest.raises(UsageError, match="write a socket path, or 'auto'"):
        msd_client.connect({}, mesh={"dp": 1}, rank=0, daemon=daemon)


BAD_NUMBERS = [0, -1, "5", None, True, float("nan"), float("inf"), 10**400, [1]]


@pytest.mark.parametrize("value", BAD_NUMBERS)
def test_a_deadline_is_a_positive_number(value: Any) -> None:
    with pytest.raises(UsageError, match=r"next_batch_s is .*write seconds"):
        msd_client.connect("job", rank=0, daemon=NOWHERE, deadlines={"next_batch_s": value})


@pytest.mark.parametrize("value", [5, "next_batch_s=1", [("next_batch_s", 1)]])
def test_deadlines_are_a_map(value: Any) -> None:
    with pytest.raises(UsageError, match="write seconds, like"):
        msd_client.connect("job", rank=0, daemon=NOWHERE, deadlines=value)


@pytest.mark.parametrize("value", [1, 0.5, np.float32(2)])
def test_good_deadlines_come_as_far_as_the_daemon(value: Any) -> None:
    with pytest.raises(msd_client.errors.DaemonUnavailableError):
        msd_client.connect("job", rank=0, daemon=NOWHERE, deadlines={"join_s": value})


@pytest.mark.parametrize("job", [None, 5, b"job.yaml", ["job.yaml"]])
def test_what_is_no_job_is_refused(job: Any) -> None:
    with pytest.raises(UsageError, match="pass the path of a job file"):
        msd_client.connect(job, rank=0, daemon=NOWHERE)


@pytest.mark.parametrize(
    ("value", "named"),
    [(Path("a.jsonl"), r"Path.*str\(path\)"), ({1, 2}, "set"), (np.int64(3), r"int64.*int\(count\)")],
)  # fmt: skip
def test_a_dict_job_that_json_cannot_hold_is_refused(value: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        job_fields({"sources": {"a": value}})


def test_keys_and_circles_that_json_cannot_hold_are_refused() -> None:
    circle: dict[str, Any] = {}
    circle["sources"] = circle
    for job in ({"sources": {(1, 2): "a"}}, circle):
        with pytest.raises(ConfigError, match="can't be written as JSON"):
            job_fields(job)


def test_a_job_file_of_other_bytes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(b"name: \xff\n")
    with pytest.raises(ConfigError, match="UTF-8"):
        job_fields(path)


def test_a_good_dict_travels_as_it_is() -> None:
    job = {"seed": 1, "sources": {"a": ["x"]}, "mixture": {0: {"a": 1e-5}}}
    assert json.loads(job_fields(job)["text"]) == {**job, "mixture": {"0": {"a": 1e-5}}}


class Answers:
    """A session that keeps what it is asked for."""

    def __init__(self, ok: dict[str, Any]) -> None:
        self.ok, self.asked = ok, {}

    def request(self, verb: str, timeout_s: float, **fields: Any) -> Any:
        self.asked = fields
        self.body = {"ok": self.ok}
        return self


@pytest.fixture
def data() -> Data:
    """Return a joined job whose daemon is not there."""
    answers: Any = Answers({"step": 7, "known_from": 5})
    joined = {
        "job": "small", "digest": "d" * 64, "sample_digest": "s" * 64, "sources": ["a", "b"],
        "dp_group": 1, "dp_count": 2, "stage": "all", "cp_rank": 0, "cp_count": 1,
        "loss_weights": [], "deadlines": {}, "stream_version": 1, "loaders": ["val"], "session": "s",
    }  # fmt: skip
    request = JoinRequest(find_place({"dp": 2}, 1, {}), None, "numpy", False, {})
    return Data(
        request, answers, TrainLoader(answers, joined, 1, "numpy", is_copying=False), joined
    )


@pytest.mark.parametrize("weights", ["a=1", None, 5, [("a", 1)], {1: 1}])
def test_weights_are_numbers_by_name(data: Data, weights: Any) -> None:
    with pytest.raises(UsageError, match="write numbers by source"):
        data.set_mixture(weights)


@pytest.mark.parametrize("weight", ["1", None, True, 1j, 10**400])
def test_a_weight_is_a_number(data: Data, weight: Any) -> None:
    with pytest.raises(UsageError, match="weight of 'b'"):
        data.set_mixture({"a": 1, "b": weight})


def test_a_mixture_tells_from_when_states_know(data: Data) -> None:
    step = data.set_mixture({"a": np.float32(0.5), "b": 2})
    assert (step, step.known_from) == (7, 5)
    assert isinstance(step, int)
    assert data._session.asked["weights"] == {"a": 0.5, "b": 2.0}
    assert type(data._session.asked["weights"]["a"]) is float
    assert pickle.loads(pickle.dumps(step)).known_from == 5
    data._session.ok.pop("known_from")
    assert data.set_mixture({"a": 1}).known_from == 7
    assert data.set_mixture({"a": 1}, at=np.int64(9)).known_from == 7
    for at in (True, 1.5, "9", -1, 10**30, 10**5000, 1 << 63):
        with pytest.raises(UsageError, match="write the number of a step"):
            data.set_mixture({"a": 1}, at=at)
    assert MixtureStep(3).known_from == 3


@pytest.mark.parametrize("losses", [5, None, "web=1", [("a", 1.0)]])
def test_losses_are_a_map(data: Data, losses: Any) -> None:
    data.train._next_number = 1
    with pytest.raises(UsageError, match=r"report_loss: losses is .*write numbers by source"):
        data.train.report_loss(losses)
    with pytest.raises(UsageError, match=r"a source is 3 \(int\)"):
        data.train.report_loss({3: 1.0})  # type: ignore[dict-item]


@pytest.mark.parametrize("loss", ["x", "1", b"1", None, [1.0], 1j, 10**400, np.ones(2)])
def test_a_loss_is_a_number(data: Data, loss: Any) -> None:
    data.train._next_number = 1
    with pytest.raises(UsageError, match=r"report_loss: loss of 'b' is .*write numbers by source"):
        data.train.report_loss({"a": 1, "b": loss})


def test_losses_without_a_meaning_are_left_to_be_left_out(data: Data) -> None:
    data.train._next_number = 1
    given: dict[str, Any] = {"a": np.array(0.5), "b": float("inf"), "c": True, "d": np.True_}
    data.train.report_loss(given)
    losses = data.train._session.asked["losses"]  # type: ignore[attr-defined]
    assert losses["a"] == 0.5
    assert not any(np.isfinite(losses[name]) for name in "bcd")


def test_what_is_joined_shows_what_it_is(data: Data) -> None:
    assert repr(data) == "Data('small', rank 1, loaders train, val)"
    assert repr(data.train) == (
        "TrainLoader('small', rank 1, dp_group 1 of 2, stage all, at step 0)"
    )


@pytest.mark.parametrize("take", [pickle.dumps, copy.deepcopy])
def test_what_is_joined_stays_in_its_process(data: Data, take: Any) -> None:
    assert isinstance(data.val, ValidationLoader)
    for held in (data, data.train, data.val):
        with pytest.raises(UsageError, match=r"connect\(\)"):
            take(held)


@pytest.mark.parametrize("value", ["abc", 5, None, 1.5, [1, -2], [300], ["a"], {"a": b""}])
def test_a_state_that_is_no_bytes_is_refused(value: Any) -> None:
    with pytest.raises(StateMismatchError, match="give the bytes that state_dict"):
        saved_bytes(value)


@pytest.mark.parametrize(
    "value", [b"ab", bytearray(b"ab"), memoryview(b"ab"), np.frombuffer(b"ab", np.uint8), [97, 98]]
)
def test_a_state_may_be_whatever_a_checkpoint_makes_of_its_bytes(value: Any) -> None:
    assert saved_bytes(value) == b"ab"


@pytest.mark.parametrize("keys", [["nope"], ["seed", "source.web"], ["sources."], ["sources"]])
def test_a_key_that_no_change_has_is_refused(keys: list[str], monkeypatch: Any) -> None:
    with pytest.raises(UsageError, match=r"there are seed, tokenizer, .* and sources\.NAME"):
        msd_client.connect("job", rank=0, daemon=NOWHERE, accept=keys)
    monkeypatch.setenv("MSD_ACCEPT", ",".join(keys))
    with pytest.raises(UsageError, match="MSD_ACCEPT"):
        msd_client.connect("job", rank=0, daemon=NOWHERE)


def test_a_job_file_of_another_encoding_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "j\udcff.yaml"
    path.write_text("{}")
    for job in (path, str(path)):
        with pytest.raises(ConfigError, match="the name of the job file is not UTF-8"):
            job_fields(job)
    folder = tmp_path / "\udcfe"
    folder.mkdir()
    (folder / "j.yaml").write_text("{}")
    with pytest.raises(ConfigError, match="the folder of the job file is not UTF-8"):
        job_fields(folder / "j.yaml")
    with pytest.raises(ConfigError, match="the name of the job is not UTF-8"):
        job_fields("\udcff")
