"""States made of counts, against those of runs that drew just as much, and the streams behind them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import msd_daemon
from msd_client.contract.errors import ConfigError, DataError, SourceExhaustedError
from msd_client.contract.state import (
    CURSOR_BLOCK_KEY,
    DRAWN_SAMPLES,
    DRAWN_TOKENS,
    LANES_ENDED,
    StreamState,
)
from msd_daemon.history.start_state import parse_consumed
from msd_daemon.sources import loader as loader_module
from tests.support.ledger import Corpus
from tests.support.sources import compress

STEPS = 34
FAULTY = [b"{broken", b'{"text": ""}', b'{"other": 1}', b'{"text": "\xff"}']


def write_sources(folder: Path) -> dict[str, Any]:
    """Write small sources of several kinds, with records that are no samples."""
    rng = np.random.default_rng(2)

    def lines(name: str, count: int, *, faulty: bool) -> bytes:
        found = []
        for number in range(count):
            text = f"{name} {number} " + "abc " * int(rng.integers(0, 40))
            found.append(json.dumps({"id": f"{name}-{number}", "text": text}).encode())
            if faulty and number % 9 == 0:
                found.append(FAULTY[number % len(FAULTY)])
        return b"\n".join(found)

    for shard in range(3):
        (folder / f"plain-{shard}.jsonl").write_bytes(lines(f"p{shard}", 20, faulty=True))
        packed = compress(lines(f"z{shard}", 25, faulty=shard == 1), "zst")
        (folder / f"zst-{shard}.jsonl.zst").write_bytes(packed)
        texts = [f"row {shard} {row} " + "x" * int(rng.integers(0, 200)) for row in range(30)]
        pq.write_table(
            pa.table({"text": texts}), folder / f"rows-{shard}.parquet", row_group_size=8
        )
    return {
        "plain": {"paths": "plain-*.jsonl", "on_error": "skip", "hold_out": 0.2, "key": "id"},
        "zst": "zst-*.jsonl.zst",
        "rows": "rows-*.parquet",
    }


def job_of(folder: Path, **changes: Any) -> dict[str, Any]:
    batch = {"rows": 8, "row_tokens": 128, "microbatch_rows": 2} | changes.pop("batch", {})
    return {
        "seed": 8,
        "tokenizer": {"bytes": True, "eos": "end"},
        "sources": write_sources(folder),
        "batch": batch,
        "defaults": {
            "on_error": {"policy": "skip", "budget_ratio": 1.0},
            "shuffle": {"block_bytes": 1024, "stream_block_records": 8, "window_shards": 2},
        },
    } | changes


@pytest.mark.parametrize("unit", ["tokens", "samples"])
@pytest.mark.parametrize("long", ["split", "skip", "truncate"])
def test_a_source_stands_where_a_run_stood_that_drew_as_much(
    tmp_path: Path, long: str, unit: str
) -> None:
    job = job_of(tmp_path, batch={"long": long})
    checked = epochs = 0
    with msd_daemon.inline(job, base_dir=tmp_path) as stream:
        for _ in itertools.islice(stream, STEPS):
            run = StreamState.decode(stream.state_dict()["msd"])
            column = DRAWN_TOKENS if unit == "tokens" else DRAWN_SAMPLES
            counts = dict(zip(run.source_names, run.progress[column].tolist(), strict=True))
            consumed = {name: f"{count}{unit}" for name, count in counts.items()}
            made = StreamState.decode(
                msd_daemon.state_from_counts(job, consumed, step=run.step, base_dir=tmp_path)["msd"]
            )
            for source in range(len(counts)):
                if (
                    unit == "samples"
                    and made.progress[DRAWN_TOKENS, source] != (run.progress[DRAWN_TOKENS, source])
                ):
                    continue  # the run stands inside a sample
                rows = [*range(CURSOR_BLOCK_KEY, LANES_ENDED + 1), DRAWN_TOKENS, DRAWN_SAMPLES]
                assert made.progress[rows, source].tolist() == run.progress[rows, source].tolist()
                assert made.dropped[:, source].tolist() == run.dropped[:, source].tolist()
                assert faults_of(made, source) == faults_of(run, source)
                checked += 1
                epochs = max(epochs, int(run.epoch[source]))
    assert checked > STEPS
    assert epochs >= 2


def faults_of(state: StreamState, source: int) -> list[int]:
    return state.faults[1][state.faults[0] == source].tolist()


def test_whole_passes_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(tmp_path)
    job["sources"] = {"rows": job["sources"]["rows"]}
    records = []
    take = loader_module.SourceLoader.next_chunk

    def counting(self: Any, size: int) -> Any:
        draft = take(self, size)
        records.append(len(draft.meta.lengths))
        return draft

    monkeypatch.setattr(loader_module.SourceLoader, "next_chunk", counting)
    made = {}
    for samples in (90 * 7 + 11, 90 * 7, 11):
        records.clear()
        state = msd_daemon.state_from_counts(job, {"rows": {"samples": samples}}, base_dir=tmp_path)
        made[samples] = StreamState.decode(state["msd"])
        assert made[samples].progress[DRAWN_SAMPLES, 0] == samples
        assert sum(records) <= 2 * 90
    assert made[90 * 7 + 11].epoch[0] == 7
    assert made[90 * 7].epoch[0] == 6
    # As one that went through every pass: what a run of whole documents drew.
    job["batch"] = {"rows": 30, "row_tokens": 4096, "microbatch_rows": 2, "packing": "padded"}
    with msd_daemon.inline(job, base_dir=tmp_path) as stream:
        for _ in itertools.islice(stream, 21):
            pass
        run = StreamState.decode(stream.state_dict()["msd"])
    assert run.progress[DRAWN_SAMPLES, 0] == 630
    state = msd_daemon.state_from_counts(job, {"rows": "630samples"}, base_dir=tmp_path)
    long_way = StreamState.decode(state["msd"])
    assert np.array_equal(long_way.progress[:5], run.progress[:5])
    assert np.array_equal(long_way.progress[6:], run.progress[6:])


def test_tokens_are_cut_inside_a_document(tmp_path: Path) -> None:
    corpus = Corpus({"one": [[100, 100, 100], [100, 100, 100]]})
    job = {
        "tokenizer": {"vocabulary": corpus.vocabulary},
        "sources": corpus.write_tokens(tmp_path / "d"),
        "batch": {"rows": 1, "row_tokens": 64, "microbatch_rows": 1, "packing": "concat"},
        "defaults": {"shuffle": False},
        "epochs": 1,
    }
    state = msd_daemon.state_from_counts(job, {"one": "230tokens"}, step=4)
    assert StreamState.decode(state["msd"]).progress[DRAWN_TOKENS, 0] == 230
    with msd_daemon.inline(job, state=state) as stream:
        steps = list(stream)
    assert steps[0].number == 4
    given = np.concatenate([row.tokens for step in steps for row in step.rows])
    wanted = [*range(int(corpus.firsts[2]) + 30, int(corpus.firsts[2]) + 100)]
    for document in range(3, 6):
        wanted += range(int(corpus.firsts[document]), int(corpus.firsts[document]) + 100)
    assert sorted(given[given > 0].tolist()) == wanted


@pytest.mark.parametrize("kind", ["", "zst"])
def test_a_sequential_loaders_position_is_gone_on_with(tmp_path: Path, kind: str) -> None:
    """The first documents of each source, in the order of its files, never come; all others do."""
    rng = np.random.default_rng(4)
    lengths = {
        name: [rng.integers(1, 60, 20).tolist() for _ in range(3)] for name in ("a", "b", "c")
    }
    corpus = Corpus(lengths)
    job = {
        "tokenizer": {"file": str(tmp_path / "d" / "tokenizer.json")},
        "sources": corpus.write_texts(tmp_path / "d", dict.fromkeys(lengths, kind)),
        "batch": {"rows": 4, "row_tokens": 64, "microbatch_rows": 2, "packing": "concat"},
        "defaults": {"shuffle": False},
        "epochs": 1,
    }
    consumed = {"a": 23, "b": 0, "c": 59}
    state = msd_daemon.state_from_counts(
        job, {name: {"samples": count} for name, count in consumed.items()}
    )
    pieces: dict[str, list[tuple[int, int]]] = {name: [] for name in lengths}
    with msd_daemon.inline(job, state=state) as stream:
        for step in stream:
            for row in step.rows:
                for segment in row.segments:
                    tokens = row.tokens[segment.column : segment.column + segment.length]
                    piece = corpus.piece_of(tokens)
                    pieces[piece.source] += [
                        (piece.document, piece.offset + at) for at in range(piece.length)
                    ]
    for name, shards in lengths.items():
        documents = [length for shard in shards for length in shard]
        wanted = [
            (number, at)
            for number, length in enumerate(documents)
            if number >= consumed[name]
            for at in range(length)
        ]
        assert sorted(pieces[name]) == wanted
        first = [document for document, offset in pieces[name] if not offset]
        assert first[:3] == [number for number, _ in dict.fromkeys((n, 0) for n, _ in wanted)][:3]


def test_counts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    job["sources"] = {"rows": {"paths": "rows-*.parquet", "max_epochs": 2}}
    with pytest.raises(SourceExhaustedError, match="all its passes hold 180: give at most 180"):
        msd_daemon.state_from_counts(job, {"rows": "181samples"}, base_dir=tmp_path)
    for passes in ("180samples", "0tokens"):
        assert msd_daemon.state_from_counts(job, {"rows": passes}, base_dir=tmp_path)
    with pytest.raises(ConfigError, match="no source 'other'"):
        msd_daemon.state_from_counts(job, {"other": "1samples"}, base_dir=tmp_path)
    for given in (
        "12",
        "12documents",
        {"samples": -1},
        {"samples": 1, "tokens": 2},
        {},
        "1.5samples",
    ):
        with pytest.raises(ConfigError, match="write 12345samples"):
            parse_consumed("rows", given)
    assert parse_consumed("rows", "1.5Btokens").count == 1_500_000_000
    job = job_of(tmp_path)
    job["sources"]["plain"] = {"paths": "plain-*.jsonl", "on_error": "fail"}
    with pytest.raises(DataError, match=r"plain-\d.jsonl"):
        msd_daemon.state_from_counts(job, {"plain": "50samples"}, base_dir=tmp_path)
