"""Pipeline stages and context-parallel ranks of one real daemon (BUGS.md H10, E8)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import msd_daemon
from federation.model.place_tree import ClientPlaceTree
from msd_client.contract.errors import MeshMismatchError, UsageError
from msd_client.joined_job import Data
from tests.support.node import DEADLINES, Node, text_job, wait_until

pytestmark = pytest.mark.processes

MESH = {"pp": 4, "dp": 1, "tp": 2}
STEPS = 60
MICROBATCHES = 4


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return text_job(
        tmp_path_factory.mktemp("data"),
        batch={"rows": 8, "row_tokens": 128, "microbatch_rows": 2, "row_multiple": 4},
    )


@pytest.fixture
def node(start_node, tmp_path):
    """A daemon whose rings have two slots (H10's depth)."""
    path = tmp_path / "daemon.toml"
    path.write_text("[memory]\nring_slots = 2\n")
    return start_node("--config", str(path))


@dataclass
class Seen:
    """What a rank got: by step, its microbatches."""

    tokens: dict[int, list[np.ndarray]] = field(default_factory=dict)
    labels: dict[int, list[np.ndarray]] = field(default_factory=dict)
    bounds: dict[int, list[np.ndarray]] = field(default_factory=dict)
    positions: dict[int, list[np.ndarray]] = field(default_factory=dict)
    valid_tokens: dict[int, int] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    state: dict[str, bytes] = field(default_factory=dict)


def read(data: Data, seen: Seen, steps: int, between: Callable[[int], None] | None = None) -> None:
    number = 0
    for step in data.train:
        for batch in step:
            if between is not None:
                between(number)
            number += 1
            seen.names |= set(batch)
            for name in ("tokens", "labels"):
                if name in batch:
                    getattr(seen, name).setdefault(step.number, []).append(batch[name].copy())
            seen.bounds.setdefault(step.number, []).append(batch.cu_seqlens.copy())
            seen.positions.setdefault(step.number, []).append(batch.position_ids.copy())
            del batch
        seen.valid_tokens[step.number] = step.valid_tokens
        if step.number + 1 == steps:
            seen.state = data.train.state_dict()
            return


def run(
    node: Node,
    job: Any,
    mesh: Mapping[str, int],
    act: Callable[[int, Data, Seen], None],
    ranks: list[int] | None = None,
) -> dict[int, Seen]:
    """Let ranks act, each in a thread of its own with a connection of its own."""
    tree = ClientPlaceTree.from_mesh(mesh)
    seen = {rank: Seen() for rank in (range(tree.rank_count) if ranks is None else ranks)}
    errors: list[BaseException] = []
    all_done = threading.Barrier(len(seen))

    def live(rank: int) -> None:
        try:
            with node.connect(job, mesh, rank) as data:
                act(rank, data, seen[rank])
                all_done.wait(60)  # nobody leaves early: a goodbye would free its slots
        except BaseException as error:  # noqa: BLE001 - handed to the test
            errors.append(error)
            all_done.abort()

    threads = [threading.Thread(target=live, args=(rank,)) for rank in seen]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), node.log
    errors = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)] or errors
    if errors:
        errors[0].add_note(node.log[-4000:])
        raise errors[0]
    return seen


def check_first_and_last(seen: dict[int, Seen]) -> None:
    first, last = seen[0], seen[6]
    assert len(first.tokens) == len(last.labels) == STEPS
    assert seen[1].tokens.keys() == first.tokens.keys()
    for step in range(STEPS):
        for number in range(MICROBATCHES):
            tokens, labels = first.tokens[step][number], last.labels[step][number]
            assert np.array_equal(seen[1].tokens[step][number], tokens)
            trained = labels[:, :-1] != -100
            assert np.array_equal(labels[:, :-1][trained], tokens[:, 1:][trained])
            assert np.array_equal(first.bounds[step][number], last.bounds[step][number])
    assert first.valid_tokens == last.valid_tokens
    assert first.state == last.state == seen[7].state


@pytest.mark.parametrize("are_middle_ranks_joined", [True, False])
def test_middle_stages_that_never_fetch_hold_nobody_up(node, job, are_middle_ranks_joined):
    def act(rank, data, seen):
        if rank not in (2, 3, 4, 5):
            read(data, seen, STEPS)
        elif rank == 2:
            wait_until(lambda: bool(running(node)), "the others to begin")
            with pytest.raises(UsageError, match="middle pipeline stage"):
                data.train.state_dict()

    ranks = None if are_middle_ranks_joined else [0, 1, 6, 7]
    seen = run(node, job, MESH, act, ranks)
    check_first_and_last(seen)
    assert seen[0].names >= {"tokens", "position_ids", "cu_seqlens"}
    assert "labels" not in seen[0].names
    assert "tokens" not in seen[6].names


def running(node: Node) -> list[dict[str, Any]]:
    return [job for job in node.request("status")["jobs"] if job["state"] == "running"]


class Pace:
    """Keeps stages as near to each other as a pipeline does."""

    def __init__(self, ranks: list[int], lead: int) -> None:
        self._counts = dict.fromkeys(ranks, 0)
        self._lead = lead
        self._changed = threading.Condition()

    def went_on(self, rank: int) -> None:
        """Count a microbatch of a later stage."""
        with self._changed:
            self._counts[rank] += 1
            self._changed.notify_all()

    def wait(self, number: int) -> None:
        """Wait, on the first stage, until the others are near enough to microbatch `number`."""
        with self._changed:
            assert self._changed.wait_for(
                lambda: min(self._counts.values()) > number - self._lead, timeout=60
            )


def test_middle_stages_that_fetch_get_metadata_only_and_do_not_block(node, job):
    pace = Pace([2, 3, 4, 5], lead=8)

    def act(rank, data, seen):
        if rank in (4, 5):  # after the others: what their ring retains lets them catch up
            wait_until(lambda: bool(running(node)), "the others to begin")
        between = pace.wait if rank in (0, 1) else lambda _: pace.went_on(rank)
        read(data, seen, STEPS, between if rank < 6 else None)

    seen = run(node, job, MESH, act)
    check_first_and_last(seen)
    for rank in (2, 3, 4, 5):
        assert not seen[rank].tokens
        assert not seen[rank].labels
        assert seen[rank].valid_tokens == seen[0].valid_tokens
        assert seen[rank].state == seen[0].state
        for step in range(STEPS):
            for number in range(MICROBATCHES):
                same = [
                    np.array_equal(mine[step][number], first[step][number])
                    for mine, first in (
                        (seen[rank].bounds, seen[0].bounds),
                        (seen[rank].positions, seen[0].positions),
                    )
                ]
                assert same == [True, True], (rank, step, number)


def test_a_middle_stage_that_comes_after_its_beginning_is_gone_is_refused(node, job):
    def act(rank, data, seen):
        if rank in (0, 1, 6, 7):
            read(data, seen, STEPS)
        elif rank == 3:
            wait_until(lambda: published(node) > 2 * 64, "more slots than are retained")
            with pytest.raises(UsageError, match=r"rank 3 .*middle pipeline stage.* too late"):
                read(data, seen, 1)

    check_first_and_last(run(node, job, MESH, act))


def published(node: Node) -> int:
    return max((ring["published"] for job in running(node) for ring in job["rings"]), default=0)


def read_to(data: Data, seen: Seen, steps: int, between: Callable[[], None]) -> None:
    """Read on until `steps` steps are done."""
    for step in data.train:
        for batch in step:
            between()
            for name in ("tokens", "labels"):
                if name in batch:
                    getattr(seen, name).setdefault(step.number, []).append(batch[name].copy())
            del batch
        if step.number + 1 == steps:
            return


def test_the_first_stage_runs_six_microbatches_ahead_and_a_validation_pass_comes_between(
    node, tmp_path
):
    job = text_job(
        tmp_path,
        batch={"rows": 8, "row_tokens": 128, "microbatch_rows": 2},
        defaults={"hold_out": 0.2, "key": "id"},
        loaders={"val": {"from": ["s0", "s2"]}},
    )
    ahead = [threading.Semaphore(0) for _ in range(2)]
    passes: dict[int, list[np.ndarray]] = {}

    def act(rank, data, seen):
        """1F1B's warm-up: the last stage asks for its first microbatch six after the first stage."""
        lane = ahead[rank % 2]
        if rank in (0, 1):
            read_to(data, seen, STEPS // 2, lane.release)
            lane.release(6)  # the schedule drains at its end
            passes[rank] = [b.tokens.copy() for step in data.val.once() for b in step]
            read_to(data, seen, STEPS, lambda: None)
        elif rank in (6, 7):
            assert all(lane.acquire(timeout=60) for _ in range(5))
            read_to(data, seen, STEPS // 2, lambda: _acquired(lane))
            passes[rank] = [b.labels.copy() for step in data.val.once() for b in step]
            read_to(data, seen, STEPS, lambda: None)

    seen = run(node, job, MESH, act)
    assert len(seen[0].tokens) == len(seen[6].labels) == STEPS
    assert [t.tobytes() for t in passes[0]] == [t.tobytes() for t in passes[1]]
    assert len(passes[0]) == len(passes[6]) > 0
    with msd_daemon.inline(job) as stream:
        for _ in range(STEPS):
            step = stream.next_step()
            for number, batch in enumerate(step.microbatches(0)):
                assert np.array_equal(seen[0].tokens[step.number][number], batch.tokens)
                assert np.array_equal(seen[6].labels[step.number][number], batch.labels)


def _acquired(semaphore: threading.Semaphore) -> None:
    assert semaphore.acquire(timeout=60)


def test_all_stages_load_a_state_and_go_on_though_the_last_one_comes_late(node, job):
    mesh = {"pp": 2, "tp": 1}
    states: dict[int, dict[str, bytes]] = {}
    both_loaded = threading.Barrier(2)
    first_has_begun = threading.Event()

    def act(rank, data, seen):
        read_to(data, seen, 5, lambda: None)
        states[rank] = data.train.state_dict()
        read_to(data, seen, 12, lambda: None)
        both_loaded.wait(30)  # a trainer's ranks agree to go back
        data.train.load_state_dict(states[rank])
        again = Seen()
        if rank == 1:
            assert first_has_begun.wait(60)
        read_to(data, again, 12, first_has_begun.set)
        name = "labels" if rank else "tokens"
        before = getattr(seen, name)
        for step, arrays in getattr(again, name).items():
            assert all(map(np.array_equal, arrays, before[step])), step
        assert sorted(getattr(again, name)) == list(range(5, 12))

    run(node, job, mesh, act)
    assert states[0] == states[1]


@pytest.mark.parametrize(
    "mesh",
    [
        {"dp": 2, "cp": 2},
        {"cp": 2, "tp": 2, "dp": 2},
        {"tp": 2, "pp": 2, "cp": 2},
        {"dp_replicate": 2, "cp": 2, "dp_shard": 2},
    ],
    ids="-".join,
)
@pytest.mark.parametrize("layout", ["zigzag_row", "zigzag_document", "contiguous"])
def test_axes_in_any_order_give_each_rank_its_slice(start_node, tmp_path, mesh, layout):
    node = start_node()
    job = text_job(
        tmp_path,
        batch={
            "rows": 8, "row_tokens": 128, "microbatch_rows": 2, "segment_multiple": 4,
            "cp_layout": layout,
        },
    )  # fmt: skip
    tree = ClientPlaceTree.from_mesh(mesh)
    slices: dict[tuple[int, int, int], dict[str, np.ndarray]] = {}
    places: dict[tuple[int, int, int], np.ndarray] = {}
    told: dict[tuple[int, int], tuple[int, float]] = {}

    def act(rank, data, seen):
        for step in data.train:
            told[step.number, rank] = (step.valid_tokens, step.loss_scale("mean"))
            for batch in step:
                key = (step.number, batch.microbatch, rank)
                names = [n for n in ("tokens", "labels", "position_ids") if n in batch]
                slices[key] = {name: batch[name].copy() for name in names}
                places[key] = np.array(batch.cp_places)
                del batch
            if step.number == 5:
                return

    run(node, job, mesh, act)
    with msd_daemon.inline(job, dp=tree.dp_count) as stream:
        steps = [stream.next_step() for _ in range(6)]
    for (number, microbatch, rank), arrays in slices.items():
        whole = steps[number].microbatches(tree.dp_group(rank))[microbatch]
        where = places[number, microbatch, rank]
        assert where.shape == (2, 128 // tree.cp_count)
        for name, array in arrays.items():
            assert np.array_equal(array, getattr(whole, name).reshape(-1)[where]), (rank, name)
    # Known before the first microbatch, alike on every peer; no token counts twice (H11).
    factor = tree.dp_count * tree.cp_count
    assert told == {
        (number, rank): (steps[number].valid_tokens, factor / steps[number].valid_tokens)
        for number in range(6)
        for rank in range(tree.rank_count)
    }
    for number in range(6):
        for group in range(tree.dp_count):
            peers = [r for r in range(tree.rank_count) if tree.dp_group(r) == group]
            union = {tree.cp_rank(r): places[number, 0, r] for r in peers}
            joined = np.sort(np.concatenate([p.ravel() for p in union.values()]))
            assert np.array_equal(joined, np.arange(2 * 128))


def test_a_cp_degree_that_does_not_fit_is_refused_with_the_numbers(start_node, tmp_path):
    node = start_node()
    job = text_job(tmp_path, batch={"rows": 8, "row_tokens": 120, "microbatch_rows": 2})
    with pytest.raises(MeshMismatchError, match=r"cp 16 .* row_tokens 120"):
        node.connect(job, {"cp": 16}, 0, deadlines=DEADLINES)
