"""A planner that takes over: what it says first, and what it does not do before it was told."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from federation import journal_place, planner_service
from federation.journal_files import journal_error
from federation.messages import (
    ChangeMixture,
    CloseJob,
    Envelope,
    JobFailed,
    JobOpened,
    Message,
    MixtureChanged,
    OpenJob,
    PlansMade,
    SourcesStarved,
    StepReleased,
    decode_envelope,
    encode_chunks,
)
from federation.model.job import BatchRule, encode_job
from federation.model.plan import StepPlan
from federation.planning.kept_chunks import KeptChunks
from msd_client.contract.codec import pack
from tests.support.metadata import FakeLoader, initial_state, make_job, make_spec, random_corpus

HORIZON = 4


class Planner:
    """A planner in a thread, and the daemon's end of its wire."""

    def __init__(self, folder: Path, term: int) -> None:
        self._link, self._theirs = socket.socketpair()
        self._thread = threading.Thread(target=planner_service.run, args=(self._theirs,))
        self._thread.start()
        endpoint = f"ipc://{folder}/p{term}.sock"
        order = pack({"endpoint": endpoint, "term": term})
        self._link.sendall(len(order).to_bytes(4, "little") + order)
        assert self._link.recv(1) == b"r"
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.RCVTIMEO, 20_000)
        self._socket.connect(endpoint)
        self._sequence = 0
        self._generation = 1

    def send(self, message: Message, frames: tuple[bytes, ...] = ()) -> None:
        envelope = Envelope("j", self._generation, 0, self._sequence, message, frames)
        self._sequence += 1
        self._socket.send_multipart(envelope.encode())

    def next(self, kind: type[Any]) -> Any:
        """Return the next message, which must be of a kind."""
        envelope = decode_envelope(self._socket.recv_multipart())
        assert isinstance(envelope.message, kind), envelope.message
        if kind is not PlansMade:
            return envelope.message
        at, plans = 0, []
        for header, count in zip(envelope.message.headers, envelope.message.counts, strict=True):
            plans.append(StepPlan.decode(header, envelope.frames[at : at + count]))
            at += count
        return plans

    def asks_nothing(self) -> None:
        """See that a request is the next thing it answers: it planned nothing, starved of nothing."""
        self.send(ChangeMixture(9, {"nobody": 1.0}))
        assert self.next(MixtureChanged).error is not None

    def close(self) -> None:
        self._link.close()
        self._socket.close(linger=0)
        self._context.term()
        self._thread.join(20)
        self._theirs.close()
        assert not self._thread.is_alive()


class Daemon:
    """Feeds planners one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        spec = make_spec("a", 4, "streaming", interleave=2)
        self.job = make_job([spec, make_spec("b", 2)], BatchRule(4, 16))
        self.kept = KeptChunks(self.job.sources)
        self.loaders = [
            FakeLoader(random_corpus(own, 3, lambda rng: rng.randint(1, 9), 2, 6), number)
            for number, own in enumerate(self.job.sources)
        ]
        self.next_step = 0

    def open(self, planner: Planner, *, is_resumed: bool) -> JobOpened:
        planner.send(
            OpenJob(
                encode_job(self.job), [["dp", 1]],
                b"" if is_resumed else initial_state(self.job).encode(), HORIZON,
                str(self.folder / "journal.db"), self.next_step if is_resumed else None,
            )
        )  # fmt: skip
        opened = planner.next(JobOpened)
        assert opened.step == self.next_step
        return opened

    def tell_kept(self, planner: Planner) -> None:
        message, frames = encode_chunks(list(self.kept.chunks()))
        planner.send(message, frames)

    def feed(self, planner: Planner, chunks: int) -> None:
        for _ in range(chunks):
            for loader in self.loaders:
                meta = loader.next_chunk()
                assert meta is not None
                self.kept.add(meta)
        self.tell_kept(planner)

    def take(self, plans: list[StepPlan]) -> None:
        assert [plan.step for plan in plans] == list(
            range(self.next_step, self.next_step + len(plans))
        )
        self.next_step += len(plans)
        for plan in plans:
            self.kept.forget(plan.cursors_after())


@pytest.fixture
def daemon(tmp_path):
    return Daemon(tmp_path)


@pytest.fixture
def planners(tmp_path) -> Iterator[Any]:
    made: list[Planner] = []

    def start() -> Planner:
        made.append(Planner(tmp_path, len(made) + 1))
        return made[-1]

    yield start
    for planner in made:
        planner.close()


def test_planners_that_die_one_after_the_other_stay_within_one_horizon(daemon, planners):
    planner = planners()
    daemon.open(planner, is_resumed=False)
    planner.next(SourcesStarved)
    daemon.feed(planner, 60)
    daemon.take(planner.next(PlansMade))
    assert daemon.next_step == HORIZON
    for _ in range(3):
        planner = planners()
        daemon.open(planner, is_resumed=True)
        planner.asks_nothing()
        daemon.tell_kept(planner)
        planner.asks_nothing()
        planner.send(StepReleased(-1))  # ranks hold all that is planned
        planner.asks_nothing()
    planner.send(StepReleased(1))
    daemon.take(planner.next(PlansMade))
    assert daemon.next_step == HORIZON + 2


def test_a_planner_that_takes_over_says_what_it_lacks_once_it_was_told(daemon, planners):
    planner = planners()
    daemon.open(planner, is_resumed=False)
    starved = planner.next(SourcesStarved)
    assert starved.sources
    again = planners()
    daemon.open(again, is_resumed=True)
    again.asks_nothing()
    again.send(StepReleased(-1))
    assert again.next(SourcesStarved) == starved
    daemon.feed(again, 60)
    daemon.take(again.next(PlansMade))
    assert daemon.next_step == HORIZON


def test_a_change_that_was_journalled_and_not_told_is_in_the_next_planners_first_word(
    daemon, planners
):
    planner = planners()
    opened = daemon.open(planner, is_resumed=False)
    assert (opened.event_number, opened.pending_steps) == (0, [])
    planner.next(SourcesStarved)
    planner.send(ChangeMixture(1, {"a": 1.0, "b": 3.0}, 2))
    told = planner.next(MixtureChanged)
    again = planners()
    opened = daemon.open(again, is_resumed=True)
    assert (opened.event_number, opened.pending_steps) == (1, [told.step])
    assert opened.pending_shares == [told.integer_shares]


@pytest.mark.parametrize("content", ["the same", "other"])
def test_steps_planned_again_behind_a_restart_are_compared_with_the_journal(
    daemon, planners, caplog, content
):
    """Nobody holds the former ones, so the run goes on where they differ; it is told, once."""
    planner = planners()
    daemon.open(planner, is_resumed=False)
    planner.next(SourcesStarved)
    daemon.feed(planner, 60)
    former = planner.next(PlansMade)
    planner.send(CloseJob("restart"))
    rng_seed = 0 if content == "the same" else 5
    for number, own in enumerate(daemon.job.sources):
        corpus = random_corpus(own, 3 + rng_seed, lambda rng: rng.randint(1, 9), 2, 6)
        daemon.loaders[number] = FakeLoader(corpus, number)
    daemon.kept = KeptChunks(daemon.job.sources)
    daemon.open(planner, is_resumed=False)
    planner.next(SourcesStarved)
    daemon.feed(planner, 60)
    again = planner.next(PlansMade)
    told = [record for record in caplog.records if "comes out otherwise" in record.getMessage()]
    if content == "the same":
        assert [p.stream_digest for p in again] == [p.stream_digest for p in former]
        assert not told
    else:
        assert [p.stream_digest for p in again] != [p.stream_digest for p in former]
        assert len(told) == 1


def refuse(monkeypatch: Any, number: int, times: int) -> list[int]:
    """Have the system refuse the next openings of a journal."""
    real, seen = journal_place.open_journal, []

    def open_journal(path: Path, **options: Any) -> Any:
        if len(seen) < times:
            seen.append(number)
            cause = OSError(number, os.strerror(number))
            raise journal_error(path, cause) from cause
        return real(path, **options)

    monkeypatch.setattr(journal_place, "open_journal", open_journal)
    return seen


def test_a_generation_that_begins_waits_for_room_on_its_disk(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(planner_service, "RETRY_MS", 5)
    seen = refuse(monkeypatch, errno.ENOSPC, 3)
    planner, daemon = Planner(tmp_path, 1), Daemon(tmp_path)
    try:
        daemon.open(planner, is_resumed=False)
        assert len(seen) == 3
    finally:
        planner.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
def test_it_does_not_wait_for_ever_nor_for_rights(
    tmp_path: Path, monkeypatch: Any, number: int
) -> None:
    monkeypatch.setattr(planner_service, "RETRY_MS", 5)
    if number == errno.ENOSPC:
        monkeypatch.setattr(planner_service, "OPEN_WAIT_S", 0.05)
    seen = refuse(monkeypatch, number, 10**6)
    planner, daemon = Planner(tmp_path, 1), Daemon(tmp_path)
    try:
        planner.send(
            OpenJob(
                encode_job(daemon.job), [["dp", 1]], initial_state(daemon.job).encode(), HORIZON,
                str(tmp_path / "journal.db"), None,
            )
        )  # fmt: skip
        error = planner.next(JobFailed).error
        assert error["code"] == "resource.journal"
        assert "make room on its disk" in error["message"]
        assert len(seen) > 1 if number == errno.ENOSPC else len(seen) == 1
    finally:
        planner.close()
