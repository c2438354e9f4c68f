"""Eight formats and modalities in one job: exactly once, one stream, whatever serves it (P1-P5).

What real daemons deliver is compared token by token, label by label and item by item (its units,
grid and places) with what the records that the test wrote have to become, and with the
uninterrupted run, to the byte.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import msd_daemon
from msd_client.contract.errors import AvailabilityError
from msd_client.contract.state import StreamState
from msd_daemon.config.resolve import resolve_job
from tests.integration.test_digest import least_pool_bytes
from tests.support.media_corpus import MadeSource, corpus_job
from tests.support.media_ledger import MediaLedger, read_media
from tests.support.media_oracle import PayloadOracle, Segment
from tests.support.media_oracle_steps import MediaOracle, row_digest
from tests.support.media_writers import write_corpus
from tests.support.node import Node, running_node

pytestmark = pytest.mark.processes

StartNode = Callable[..., Node]
STEPS = 56
"""More than a pass of every source, whatever the seed makes of them: the longest has about 5,000 tokens,
of which a step draws a hundred."""
SEED = int(os.environ.get("MSD_TEST_SEED") or random.SystemRandom().randrange(1 << 30))


@dataclass
class Case:
    """Sources, a job over them, and what one pass over each source has to deliver."""

    folder: Path
    sources: list[MadeSource]
    payload: PayloadOracle
    job: dict[str, Any]
    pieces: dict[str, Counter[Segment]]
    fates: dict[str, dict[str, int]]
    """Drops of one pass by reason."""

    @property
    def epoch(self) -> Counter[Segment]:
        return sum(self.pieces.values(), Counter())


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    print(f"MSD_TEST_SEED={SEED}")
    folder = tmp_path_factory.mktemp("formats")
    sources, _ = write_corpus(folder, SEED)
    job = corpus_job(folder, sources)
    resolved = resolve_job(job, folder, store_dir=folder / "store")
    oracle = PayloadOracle(job, resolved.media)
    pieces, fates = {}, {}
    for source in sources:
        pieces[source.name], fates[source.name] = oracle.epoch(source)
    return Case(folder, sources, oracle, job, pieces, fates)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """One daemon for every test that does not care which."""
    with running_node(tmp_path_factory.mktemp("n"), "--loader-workers", "2") as running:
        yield running


@pytest.fixture(scope="module")
def whole(node: Node, case: Case) -> MediaLedger:
    """The uninterrupted run, on four ranks."""
    return read_media(node, case.job, {"dp": 4}, STEPS)


@pytest.fixture(scope="module")
def rows(whole: MediaLedger) -> dict[int, list[bytes]]:
    return whole.rows()


def check_rows(found: MediaLedger, rows: dict[int, list[bytes]]) -> None:
    for step, own in found.rows().items():
        assert own == rows[step], f"step {step} holds other rows (MSD_TEST_SEED={SEED})"


def check_states(found: MediaLedger, whole: MediaLedger) -> None:
    for step, state in found.states.items():
        assert state == whole.states[step], f"state after {step} steps (MSD_TEST_SEED={SEED})"


# ---- P1: what is delivered -----------------------------------------------------------------------


@pytest.mark.parametrize("dp", [1, 2])
def test_one_epoch_delivers_every_piece_once_and_counts_what_is_dropped(
    node: Node, case: Case, dp: int
) -> None:
    job = case.job | {"name": "once", "epochs": 1}
    ledger = read_media(node, job, {"dp": dp}, None)
    delivered = ledger.segments()
    missing, extra = case.epoch - delivered, delivered - case.epoch
    assert not missing, (Counter(piece.source for piece in missing.elements()), SEED)
    assert not extra, (Counter(piece.source for piece in extra.elements()), SEED)
    assert ledger.drops() == case.fates
    last = StreamState.decode(ledger.states[max(ledger.states)])
    assert last.carried.shape[1] == 0
    assert last.ending == "every source of the mixture is exhausted"


@pytest.mark.parametrize("long", ["truncate", "skip"])
def test_documents_longer_than_a_row_lose_what_the_policy_says(
    node: Node, case: Case, long: str
) -> None:
    job = case.job | {"name": long, "epochs": 1, "batch": case.job["batch"] | {"long": long}}
    ledger = read_media(node, job, {"dp": 2}, None)
    wanted = {source.name: case.payload.epoch(source, long) for source in case.sources}
    assert ledger.segments() == sum((pieces for pieces, _ in wanted.values()), Counter())
    assert ledger.drops() == {name: drops for name, (_, drops) in wanted.items()}
    assert wanted["pages"][1][f"long_{'truncated' if long == 'truncate' else 'skipped'}"] > 5


def test_the_corpus_has_what_it_should(case: Case) -> None:
    reasons = set().union(*case.fates.values())
    assert reasons >= {
        "bad_syntax", "empty", "excluded", "field_missing", "filtered", "held_out", "undecodable",
        "unreadable", "untrained",
    }  # fmt: skip
    for name in ("captions", "chats", "hub", "pages", "speech"):
        assert any(piece.items for piece in case.pieces[name]), name
    cut = [piece for piece in case.pieces["pages"] if piece.items and piece.tokens[-1] != 5]
    assert len(cut) > 10  # documents cut at images


def test_every_epoch_delivers_the_same_pieces_in_another_order(
    case: Case, whole: MediaLedger
) -> None:
    delivered = whole.segments()
    epochs = StreamState.decode(whole.states[STEPS]).epoch
    assert epochs.min() >= 1, epochs  # all rolled over
    for index, source in enumerate(case.sources):
        own = {piece: n for piece, n in delivered.items() if piece.source == source.name}
        passes = int(epochs[index]) + 1
        assert own.keys() <= case.pieces[source.name].keys(), source.name
        for piece, count in case.pieces[source.name].items():
            # Of the pass before the last, what is carried may be owed still.
            assert count * (passes - 2) <= own.get(piece, 0) <= count * passes


GROUPS = (
    ("captions", "chats", "hub", "pages", "speech"),
    ("mds", "pages", "qa", "saved", "speech"),
)
"""The oracle's draw knows five sources; together these are all eight."""


@pytest.mark.parametrize("names", GROUPS, ids="-".join)
def test_every_step_holds_just_the_rows_that_the_rules_say(
    node: Node, case: Case, names: tuple[str, ...]
) -> None:
    sources = [source for source in case.sources if source.name in names]
    job = corpus_job(case.folder, sources, name="some")
    found = read_media(node, job, {"dp": 2}, 40)
    rows = found.rows()
    for step in MediaOracle(job, sources, case.payload).steps(40):
        wanted = sorted(row_digest(row.segments) for row in step.rows)
        assert rows[step.number] == wanted, f"step {step.number} (MSD_TEST_SEED={SEED})"
        assert found.valid_tokens[step.number] == step.valid_tokens


# ---- P2: one stream ------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 4])
def test_worker_counts_change_no_byte(
    start_node: StartNode, case: Case, whole: MediaLedger, workers: int
) -> None:
    node = start_node("--loader-workers", str(workers))
    found = read_media(node, case.job, {"dp": 4}, 30)
    check_states(found, whole)
    wanted = whole.bytes_of()
    assert found.bytes_of() == {key: wanted[key] for key in found.bytes_of()}


@pytest.mark.parametrize("dp", [1, 2])
def test_another_mesh_gets_the_same_rows(
    node: Node, case: Case, whole: MediaLedger, rows: dict[int, list[bytes]], dp: int
) -> None:
    found = read_media(node, case.job, {"dp": dp}, 24)
    check_rows(found, rows)
    check_states(found, whole)


def test_indexes_change_nothing(
    start_node: StartNode,
    tmp_path: Path,
    case: Case,
    whole: MediaLedger,
    rows: dict[int, list[bytes]],
) -> None:
    node = start_node(folder=tmp_path / "n")
    index = tmp_path / "n" / "state" / "index"
    for _ in range(2):  # cold, warm
        found = read_media(node, case.job, {"dp": 1}, 20)
        check_rows(found, rows)
        check_states(found, whole)
    assert list(index.iterdir())
    shutil.rmtree(index)
    found = read_media(node, case.job, {"dp": 1}, 20)
    check_rows(found, rows)
    check_states(found, whole)


def test_a_reader_in_one_process_gives_the_same_batches(case: Case, whole: MediaLedger) -> None:
    mine = {(one.step, one.rank, one.number): one for one in whole.microbatches}
    with msd_daemon.inline(case.job, dp=4) as stream:
        for step in itertools.islice(stream, 12):
            for rank in range(4):
                for number, batch in enumerate(step.microbatches(rank)):
                    given = mine[step.number, rank, number]
                    for name in ("tokens", "labels", "position_ids", "cu_seqlens"):
                        assert np.array_equal(given.fields[name], getattr(batch, name)), name
                    for modality, arrays in given.media.items():
                        for name in ("patches", "cu_seqlens", "places", "cu_places", "segments"):
                            wanted = getattr(batch.media[modality], name)
                            assert np.array_equal(arrays[name], wanted), (modality, name)
            assert stream.state_dict() == whole.state(step.number + 1)


# ---- P3: restores --------------------------------------------------------------------------------


def parted_documents(whole: MediaLedger, pieces: Counter[Segment]) -> list[int]:
    """Return steps before which a long document was delivered in part."""
    steps: dict[int, set[int]] = {}
    firsts = {piece.tokens: piece for piece in pieces}
    for one in whole.microbatches:
        for _, segment in one.segments(whole.names):
            if segment.tokens in firsts and segment.source == "pages":
                words = [token for token in segment.tokens if token >= 16]
                if words:
                    steps.setdefault(words[0], set()).add(one.step)
    ordered = sorted(steps.items())
    return sorted(
        {
            later
            for (_, former_steps), (_, later_steps) in itertools.pairwise(ordered)
            for former in former_steps
            for later in later_steps
            if former < later <= former + 2
        }
    )


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Node]]:
    """Daemons by their count of loader workers: partitions lie elsewhere on each."""
    with (
        running_node(tmp_path_factory.mktemp("one"), "--loader-workers", "1") as one,
        running_node(tmp_path_factory.mktemp("three"), "--loader-workers", "3") as three,
    ):
        yield {1: one, 3: three}


@pytest.mark.parametrize(
    "cuts", [4, pytest.param(40, marks=[pytest.mark.soak, pytest.mark.timeout(900)])]
)
def test_restores_at_random_steps_go_on(
    nodes: dict[int, Node],
    case: Case,
    whole: MediaLedger,
    rows: dict[int, list[bytes]],
    cuts: int,
) -> None:
    rng = random.Random(SEED)
    parted = parted_documents(whole, case.pieces["pages"])
    parted = [step for step in parted if 0 < step < STEPS - 6]
    assert parted
    for cut in [*rng.choices(range(1, STEPS - 6), k=cuts), *rng.choices(parted, k=cuts // 2)]:
        workers, dp = rng.choice([1, 3]), rng.choice([1, 2, 4])
        print(f"restore at {cut}: {workers} workers, dp {dp} (MSD_TEST_SEED={SEED})")
        found = read_media(nodes[workers], case.job, {"dp": dp}, 6, state=whole.state(cut))
        assert found.steps == list(range(cut, cut + 6))
        check_rows(found, rows)
        check_states(found, whole)


def test_a_restored_epoch_ends_as_an_uninterrupted_one(node: Node, case: Case) -> None:
    job = case.job | {"name": "cut", "epochs": 1}
    cut = random.Random(SEED + 1).randrange(3, 12)
    print(f"cut at {cut} (MSD_TEST_SEED={SEED})")
    begun = read_media(node, job, {"dp": 2}, cut)
    ended = read_media(node, job, {"dp": 1}, None, state=begun.state(cut))
    assert begun.segments() + ended.segments() == case.epoch
    assert ended.drops() == case.fates


# ---- P5, P6: a pool without room, kills ----------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 4])
def test_a_pool_without_room_to_read_ahead_changes_nothing(
    start_node: StartNode,
    case: Case,
    whole: MediaLedger,
    rows: dict[int, list[bytes]],
    workers: int,
) -> None:
    pool_bytes = least_pool_bytes(case.job, 2)
    environ = {"MSD__MEMORY__POOL_BYTES": str(pool_bytes), "MSD__PLANNER__HORIZON_STEPS": "2"}
    node = start_node("--loader-workers", str(workers), environ=environ)
    pools: list[dict[str, Any]] = []

    def look(_data: Any) -> None:
        pools.append(node.request("status", job="formats")["jobs"][0]["pool"])

    found = read_media(node, case.job, {"dp": 2}, 24, at_end=look)
    check_rows(found, rows)
    check_states(found, whole)
    assert pools[0]["capacity_bytes"] == pool_bytes
    print(f"{workers} workers, {pool_bytes} bytes: {pools[0]['revocations']} chunks revoked")


def test_a_killed_loader_changes_nothing(
    start_node: StartNode,
    case: Case,
    whole: MediaLedger,
    rows: dict[int, list[bytes]],
) -> None:
    rng = random.Random(SEED + 2)
    node = start_node("--loader-workers", "2")
    moments = set(rng.sample(range(2, 30), 3))
    print(f"kills behind steps {sorted(moments)} (MSD_TEST_SEED={SEED})")
    found = MediaLedger(sorted(case.job["sources"]))
    done, told = 0, 0

    def kill(data: Any, step: Any) -> None:
        part.append((step.number + 1, data.train.state_dict()))
        if data.rank == 0 and step.number in moments:
            moments.discard(step.number)
            node.child("msd-loader").kill()

    while done < 32:
        part: list[tuple[int, dict[str, bytes]]] = []
        state = whole.state(done) if done else None
        try:
            found = read_media(node, case.job, {"dp": 2}, 32 - done, state=state, on_step=kill)
        except AvailabilityError as error:
            told += 1
            print(f"told: {error}")
            assert told <= 3
            for number, own in part:
                assert own == whole.state(number)
            done = max((number for number, _ in part), default=done)
            continue
        check_rows(found, rows)
        check_states(found, whole)
        done = 32
    assert not moments
