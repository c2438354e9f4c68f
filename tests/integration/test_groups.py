"""Groups on real daemons: pairs and rollouts come whole, in one row, on any mesh, from any state."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import msd_daemon
from tests.support.node import Node, run_ranks, running_node, write_job

pytestmark = pytest.mark.processes

ROW_TOKENS, STEPS = 256, 14
ROLLOUTS = """
def several(sample, rng):
    count = 1 + sample["number"] % 4
    return [{**sample, "text": sample["text"].replace("|0|", f"|{n}|")} for n in range(count)]
"""


def text_of(group: str, member: int, length: int) -> str:
    return f"<{group}|{member}|" + "x" * length + ">"


class Files:
    """Shards of pairs in two formats, of prompts and of plain text, and the groups in them."""

    def __init__(self, folder: Path) -> None:
        rng = random.Random(4)
        self.members: dict[str, list[str]] = {}
        """Texts of each group."""
        self.broken = 0
        for shard in range(2):
            lines: list[str] = []
            for row in self._pairs(rng, f"j{shard}", 260):
                lines.append(json.dumps(row))
                if rng.random() < 0.02:
                    lines.append('{"text": "half')
                    self.broken += 1
            (folder / f"pairs{shard}.jsonl").write_text("\n".join(lines) + "\n")
            rows = self._pairs(rng, f"p{shard}", 200)
            table = pa.Table.from_pylist(rows)
            pq.write_table(table, folder / f"pairs{shard}.parquet", row_group_size=41)
        prompts = []
        for number in range(300):
            group, length = f"r{number}", rng.randint(0, 30)
            prompts.append({"text": text_of(group, 0, length), "number": number})
            self.members[group] = [text_of(group, n, length) for n in range(1 + number % 4)]
        text = "".join(json.dumps(row) + "\n" for row in prompts)
        (folder / "prompts.jsonl").write_text(text)
        plain = [{"text": text_of(f"t{n}", 0, rng.randint(0, 400))} for n in range(300)]
        (folder / "plain.jsonl").write_text("".join(json.dumps(row) + "\n" for row in plain))
        (folder / "lab.py").write_text(ROLLOUTS)
        self.folder = folder

    def _pairs(self, rng: random.Random, name: str, count: int) -> list[dict[str, Any]]:
        rows = []
        for number in range(count):
            group = f"{name}-{number}"
            lengths = [rng.randint(0, 70) for _ in range(rng.choice([1, 2, 2, 2, 3, 5]))]
            self.members[group] = [text_of(group, n, size) for n, size in enumerate(lengths)]
            rows += [{"text": text, "pair": group} for text in self.members[group]]
        return rows

    def job(self, batch: dict[str, Any], **changes: Any) -> dict[str, Any]:
        shuffle = {"block_bytes": 2048, "window_records": 16}
        pairs = {"group": {"field": "pair"}, "shuffle": shuffle, "on_error": {"budget_ratio": 1}}
        return {
            "name": "groups",
            "seed": 6,
            "tokenizer": {"bytes": True},
            "batch": batch,
            "sources": {
                "lines": {"paths": str(self.folder / "pairs*.jsonl"), **pairs},
                "rows": {"paths": str(self.folder / "pairs*.parquet"), **pairs},
                "rollouts": {
                    "paths": str(self.folder / "prompts.jsonl"),
                    "transform": "lab:several",
                    "group": "record",
                },
                "plain": str(self.folder / "plain.jsonl"),
            },
        } | changes


BEST_FIT = {"rows": 8, "row_tokens": ROW_TOKENS, "microbatch_rows": 2, "segment_multiple": 4}
VARLEN = {
    "packing": "varlen",
    "step_tokens": 2048,
    "microbatch_tokens": ROW_TOKENS,
    "row_segments_max": 8,
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("groups"))


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Node]]:
    """Daemons by their count of loader workers."""
    with (
        running_node(tmp_path_factory.mktemp("g1"), "--loader-workers", "1") as one,
        running_node(tmp_path_factory.mktemp("g2"), "--loader-workers", "2") as two,
    ):
        yield {1: one, 2: two}


class Reading:
    """What ranks were given: texts by step, group by group; every batch is checked as it comes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.steps: dict[int, Counter[tuple[str, ...]]] = defaultdict(Counter)
        self.states: dict[int, dict[str, bytes]] = {}

    def read(self, data: Any, step: Any) -> None:
        for batch in step:
            self.take(step.number, batch)
        if data.rank == 0:
            self.states[step.number + 1] = data.train.state_dict()

    def take(self, step: int, batch: Any) -> None:
        tokens = np.asarray(batch.tokens).reshape(-1)
        group = np.asarray(batch.segment_group).tolist()
        source = np.asarray(batch.segment_source).tolist()
        starts = np.asarray(batch.cu_seqlens_padded).tolist()
        lengths = np.diff(batch.cu_seqlens).tolist()
        assert len(group) == len(source)
        found: dict[int, list[str]] = {}
        rows: dict[int, set[int]] = {}
        for number, (mine, of) in enumerate(zip(group, source, strict=True)):
            assert (mine < 0) == (of < 0)
            if mine >= 0:
                text = bytes(tokens[starts[number] : starts[number] + lengths[number]].tolist())
                found.setdefault(mine, []).append(text.decode())
                rows.setdefault(mine, set()).add(starts[number] // ROW_TOKENS)
        assert list(found) == list(range(len(found)))
        assert all(len(held) == 1 for held in rows.values()), "a group stands in two rows"
        with self._lock:  # ranks are threads
            self.steps[step].update(tuple(texts) for texts in found.values())

    def check_whole(self, members: dict[str, list[str]]) -> set[str]:
        """Refuse a group that is not whole; return those that came."""
        seen: set[str] = set()
        for texts in (texts for step in self.steps.values() for texts in step):
            if not texts[0].startswith("<"):
                continue  # a later piece of a long plain document
            name = texts[0][1:].split("|")[0]
            if not name.startswith("t"):
                assert list(texts) == members[name]
                seen.add(name)
        return seen


def read(node: Node, job: Path, mesh: dict[str, int], steps: int | None, **options: Any) -> Reading:
    reading = Reading()
    run_ranks(node, job, mesh, steps, read_step=reading.read, **options)
    return reading


def write(files: Files, job: dict[str, Any]) -> Path:
    """Write a job beside the transform that it names."""
    return write_job(files.folder / "job.yaml", job)


@pytest.mark.parametrize("batch", [BEST_FIT, VARLEN], ids=["best_fit", "varlen"])
def test_groups_come_whole_on_any_mesh_from_any_state(
    nodes: dict[int, Node], files: Files, batch: dict[str, Any]
) -> None:
    job = write(files, files.job(batch))
    whole = read(nodes[2], job, {"dp": 2}, STEPS)
    seen = whole.check_whole(files.members)
    assert {name[0] for name in seen} == {"j", "p", "r"}
    assert any(len(files.members[name]) > 3 for name in seen)
    for dp, workers, cut in ((4, 1, 5), (1, 2, 9)):
        later = read(nodes[workers], job, {"dp": dp}, STEPS - cut, state=whole.states[cut])
        assert later.steps == {n: texts for n, texts in whole.steps.items() if n >= cut}
        assert later.states[STEPS] == whole.states[STEPS]
    with msd_daemon.inline(job, dp=2) as stream:
        inline = Reading()
        for step in stream:
            if step.number == STEPS:
                break
            for rank in range(2):
                for made in step.microbatches(rank):
                    inline.take(step.number, made)
    assert inline.steps == whole.steps


def test_an_epoch_holds_every_group_once_and_counts_the_others(
    nodes: dict[int, Node], files: Files
) -> None:
    job = files.job(BEST_FIT, epochs=1, mixture={0: {"lines": 2, "rows": 1}})
    reading = read(nodes[2], write(files, job), {"dp": 2}, None)
    seen = reading.check_whole(files.members)
    counts = Counter(texts for step in reading.steps.values() for texts in step.elements())
    assert set(counts.values()) == {1}
    sizes = {
        name: sum(-(-len(text) // 4) * 4 for text in texts) for name, texts in files.members.items()
    }
    wanted = {name for name, size in sizes.items() if name[0] in "jp" and size <= ROW_TOKENS}
    assert seen == wanted
    assert any(name[0] in "jp" and name not in wanted for name in sizes), "none is too long"


def test_validation_never_has_one_side_of_a_pair(nodes: dict[int, Node], files: Files) -> None:
    job = files.job(BEST_FIT, epochs=1, mixture={0: {"lines": 1, "rows": 1}})
    for name in ("lines", "rows"):
        job["sources"][name]["hold_out"] = 0.3
    job["loaders"] = {"val": {"from": ["lines", "rows"], "rows": 4, "part": "held_out"}}
    held = Reading()

    def at_end(data: Any) -> None:
        for step in data.val.once():
            for batch in step:
                held.take(step.number, batch)

    training = Reading()
    run_ranks(nodes[1], write(files, job), {"dp": 1}, None, read_step=training.read, at_end=at_end)
    seen, kept = training.check_whole(files.members), held.check_whole(files.members)
    assert seen and kept
    assert not seen & kept
