"""Damaged files as sources of a real job: what can be had is served, the rest counts or fails."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import pytest

from msd_client.contract.errors import CorruptRecordError, ErrorBudgetExceededError, MsdError
from msd_client.contract.state import DELIVERED_SAMPLES, DROPPED_COLUMNS, StreamState
from msd_client.msdctl.status_text import job_text
from tests.support.node import Node, running_node
from tests.support.segments import Delivered, documents_of, read_delivered
from tests.support.sources import DATA, needs_data

pytestmark = [needs_data, pytest.mark.processes]

BROKEN = DATA / "broken"

QUESTION = {"text": "question"}
SOURCES: dict[str, tuple[str, dict[str, Any]]] = {
    "bible_cut": ("derived/bible_cut_multiframe.jsonl.zst", {}),
    "shakespeare_cut": ("derived/shakespeare_cut60.jsonl.zst", {}),
    "gsm_cut": ("derived/gsm_cut.jsonl.gz", QUESTION),
    "gsm_bitflip": ("derived/gsm_bitflip.jsonl.gz", QUESTION),
    "gsm_badcrc": ("derived/gsm_badcrc.jsonl.gz", QUESTION),
    "gsm_garbage": ("derived/gsm_trailing_garbage.jsonl.gz", QUESTION),
    "not_gzip": ("derived/not_gzip.jsonl.gz", QUESTION),
    "blank_lines": ("json/blank_lines.jsonl", QUESTION),
    "bom_crlf": ("json/bom_crlf.jsonl", QUESTION),
    "mixed_bad": ("json/mixed_bad_lines.jsonl", QUESTION),
    "no_final_newline": ("json/no_final_newline_cut.jsonl", QUESTION),
    "pretty_array": ("json/pretty_array.json", QUESTION | {"format": "jsonl"}),
    "utf16": ("json/utf16le.jsonl", QUESTION),
    "koi8r": ("text/install.ru.txt.gz", {}),
    "naughty": ("text/blns.txt", {}),
    "parquet_bitflip": ("derived/enwiki_bitflip.parquet", {}),
    "parquet_cut": ("derived/enwiki_cut.parquet", {}),
    "parquet_crc": ("parquet/datapage_v1-corrupt-checksum.parquet", {"text": "a"}),
    "megatron_magic": ("derived/megatron_bad_magic.bin", {}),
    "megatron_short": ("derived/megatron_bin_short.bin", {}),
    "megatron_idx_cut": ("derived/megatron_idx_cut.bin", {}),
    "zstd_bad": ("zstd_bad/off0.bin.zst", {"format": "text"}),
    "zstd_odd": ("zstd_odd_valid/zeroSeq_2B.zst", {"format": "text"}),
    "sound": ("../text/shakespeare.jsonl.zst", {}),
}


def stated(source: str) -> dict[str, Any]:
    rows = json.loads((BROKEN / "expected.json").read_text())
    expected: dict[str, Any] = rows[SOURCES[source][0]]["expected"]
    return expected


def wanted_counts() -> dict[str, tuple[int | None, dict[str, int] | None]]:
    """Return delivered documents and drops by reason, as broken/README.md states them.

    None where the README leaves it open.
    """
    one = {"unreadable": 1}
    before = "full_lines_before_error"
    return {
        "bible_cut": (stated("bible_cut")[before], one),
        "shakespeare_cut": (stated("shakespeare_cut")[before], one),
        "gsm_cut": (stated("gsm_cut")[before], one),
        "gsm_bitflip": (None, None),
        "gsm_badcrc": (stated("gsm_badcrc")["lines"], one),
        "gsm_garbage": (stated("gsm_garbage")["lines"], one),
        "not_gzip": (stated("not_gzip")["rows_if_sniffed"], {}),
        "blank_lines": (stated("blank_lines")["rows"], {}),
        "bom_crlf": (stated("bom_crlf")["rows"], {}),
        "mixed_bad": (stated("mixed_bad")["good"], None),
        "no_final_newline": (stated("no_final_newline")["complete_lines"], {"bad_syntax": 1}),
        "pretty_array": (0, None),
        "utf16": (0, None),
        "koi8r": (0, {"bad_encoding": 1}),
        "naughty": (1, {}),
        "parquet_bitflip": (0, one),
        "parquet_cut": (0, one),
        "parquet_crc": (0, None),
        "megatron_magic": (0, one),
        "megatron_short": (0, one),
        "megatron_idx_cut": (0, one),
        "zstd_bad": (0, one),
        "zstd_odd": (1, {}),
        "sound": (7222, {}),
    }


def broken_job(names: list[str], **changes: Any) -> dict[str, Any]:
    sources = {name: {"paths": str(BROKEN / SOURCES[name][0])} | SOURCES[name][1] for name in names}
    job: dict[str, Any] = {
        "schema": 1,
        "name": "broken",
        "seed": 7,
        "tokenizer": {"bytes": True, "eos": "none"},
        "batch": {"rows": 16, "row_tokens": 1024, "microbatch_rows": 4},
        "defaults": {"on_error": {"policy": "skip", "budget_ratio": 1.0}, "at_exhaustion": "drop"},
        "epochs": 1,
        "sources": sources,
    }
    return job | changes


@pytest.fixture(scope="module")
def skipped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Delivered, dict[str, Any]]:
    """All broken files in one job under skip, read to the end; and its status there."""
    names = sorted(SOURCES)
    keep = [
        names.index(name)
        for name in ("mixed_bad", "gsm_cut", "bible_cut", "gsm_bitflip", "shakespeare_cut")
    ]
    status: dict[str, Any] = {}
    with running_node(tmp_path_factory.mktemp("n")) as node:

        def at_end(data: Any) -> None:
            if data.rank == 0:
                status.update(node.request("status", job="broken")["jobs"][0])

        delivered = read_delivered(node, broken_job(names), {"dp": 2}, keep=keep, at_end=at_end)
    return delivered, status


@dataclass
class Read:
    """What a rank read before its error."""

    rows: list[bytes] = field(default_factory=list)
    steps: int = 0
    error: MsdError | None = None


def read_to_the_error(node: Node, job: dict[str, Any], dp: int) -> list[Read]:
    """Let ranks read until the job fails or ends."""
    reads = [Read() for _ in range(dp)]

    def run(rank: int) -> None:
        read = reads[rank]
        try:
            with node.connect(job, {"dp": dp}, rank) as data:
                for step in data.train:
                    for batch in step:
                        read.rows += [row.tobytes() for row in np.asarray(batch.tokens)]
                    read.steps += 1
        except MsdError as error:
            read.error = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(dp)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), node.log
    return reads


def drops_of(state: StreamState, source: str) -> dict[str, int]:
    column = state.dropped[:, state.source_names.index(source)]
    return {name: int(count) for name, count in zip(DROPPED_COLUMNS, column, strict=True) if count}


@pytest.mark.parametrize("source", sorted(SOURCES))
def test_what_can_be_had_is_delivered_and_the_rest_is_counted(skipped: Any, source: str) -> None:
    state = skipped[0].state
    documents, drops = wanted_counts()[source]
    got = int(state.progress[DELIVERED_SAMPLES, state.source_names.index(source)])
    dropped = drops_of(state, source)
    if documents is not None:
        assert got == documents
    if drops is not None:
        assert dropped == drops


def test_faults_that_the_readme_counts_together(skipped: Any) -> None:
    state = skipped[0].state
    flipped = drops_of(state, "gsm_bitflip")
    lines = int(state.progress[DELIVERED_SAMPLES, state.source_names.index("gsm_bitflip")])
    assert flipped.pop("unreadable") == 1
    assert lines + sum(flipped.values()) == stated("gsm_bitflip")["full_lines_before_error"]
    assert sum(drops_of(state, "mixed_bad").values()) == stated("mixed_bad")["bad"]
    assert set(drops_of(state, "pretty_array")) <= {"bad_syntax", "field_missing"}
    assert set(drops_of(state, "utf16")) <= {"bad_syntax", "bad_encoding"}
    assert set(drops_of(state, "parquet_crc")) <= {"unreadable", "field_missing"} != set()


@pytest.mark.parametrize(
    ("source", "corpus", "count"),
    [
        ("mixed_bad", "gsm8k/train.jsonl", 600),
        ("gsm_cut", "gsm8k/train.jsonl", 1399),
        ("bible_cut", "bible_kjv.jsonl.zst", 346),
        ("shakespeare_cut", "shakespeare.jsonl.zst", 3807),
    ],
)
def test_the_documents_before_the_damage_are_the_right_ones(
    skipped: Any, source: str, corpus: str, count: int
) -> None:
    delivered, _ = skipped
    texts = [text.encode() for text in islice(documents_of(corpus, is_question_alone=True), count)]
    cut = Counter(text[at : at + 1024] for text in texts for at in range(0, len(text), 1024))
    pieces = delivered.pieces[delivered.state.source_names.index(source)]
    got = Counter(
        {
            np.frombuffer(piece, "<i4").astype(np.uint8).tobytes(): count
            for piece, count in pieces.items()
        }
    )
    assert got == cut


def test_status_shows_drops_by_reason(skipped: Any) -> None:
    delivered, status = skipped
    shown = {source["name"]: source["dropped"] for source in status["sources"]}
    assert shown == {source: drops_of(delivered.state, source) for source in SOURCES}
    assert shown["no_final_newline"] == {"bad_syntax": 1}
    lines = job_text(status).splitlines()
    assert sum("no_final_newline" in line and "1 bad_syntax" in line for line in lines) == 1


STEP_TOKENS = 4 * 64


def one_by_one(source: str, on_error: Any, **changes: Any) -> dict[str, Any]:
    """Return a job of one source in the order of its file, whose steps hold 256 tokens of it."""
    rule = {"rows": 4, "row_tokens": 64, "microbatch_rows": 2, "packing": "concat"}
    defaults = {"on_error": on_error, "at_exhaustion": "drop", "shuffle": False}
    return broken_job([source], batch=rule, defaults=defaults, name="failing", **changes)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with running_node(tmp_path_factory.mktemp("n")) as running:
        yield running


def questions() -> bytes:
    """Return what the good lines of mixed_bad hold, one after the other, up to each bad line."""
    return b"".join(
        text.encode()
        for text in islice(documents_of("gsm8k/train.jsonl", is_question_alone=True), 600)
    )


def good_bytes(lines: int) -> int:
    """Return the bytes of the first good lines of mixed_bad."""
    texts = documents_of("gsm8k/train.jsonl", is_question_alone=True)
    return sum(len(text.encode()) for text in islice(texts, lines))


def check_served(reads: list[Read], steps: int) -> None:
    """Every step before the fault came to every rank, with the text of the file in its rows."""
    assert [read.steps for read in reads] == [steps] * len(reads)
    rows = sorted(row for read in reads for row in read.rows)
    text = questions()[: steps * STEP_TOKENS]
    wanted = [
        np.frombuffer(text[at : at + 64], np.uint8).astype("<i4").tobytes()
        for at in range(0, len(text), 64)
    ]
    assert rows == sorted(wanted)


def test_fail_acts_when_the_draw_gets_there_and_on_every_rank(node: Node) -> None:
    reads = read_to_the_error(node, one_by_one("mixed_bad", "fail"), 2)
    first_bad = stated("mixed_bad")["bad_lines"][0]
    check_served(reads, good_bytes(first_bad - 1) // STEP_TOKENS)
    path = str(BROKEN / SOURCES["mixed_bad"][0])
    for read in reads:
        assert isinstance(read.error, CorruptRecordError)
        assert read.error.attributes["source"] == "mixed_bad"
        assert read.error.attributes["index"] == first_bad - 1
        assert (
            f"source mixed_bad: epoch 0, window 0, block 0, record {first_bad - 1} is bad_"
            in read.error.message
        )
        assert path in read.error.message
        assert f"byte offset {offset_of_line(path, first_bad)}" in read.error.message


def offset_of_line(path: str, number: int) -> int:
    with open(path, "rb") as file:
        return sum(len(line) for line in islice(file, number - 1))


def test_the_budget_acts_when_the_draw_gets_there_and_on_every_rank(node: Node) -> None:
    budget = {"policy": "skip", "budget_ratio": 0.01, "window_records": 1000}
    reads = read_to_the_error(node, one_by_one("mixed_bad", budget), 2)
    eleventh = stated("mixed_bad")["bad_lines"][10]
    check_served(reads, good_bytes(eleventh - 11) // STEP_TOKENS)
    for read in reads:
        assert isinstance(read.error, ErrorBudgetExceededError)
        assert read.error.attributes == {
            "source": "mixed_bad", "block_key": 0, "index": eleventh - 1, "seen": 11, "limit": 10
        }  # fmt: skip
        assert str(BROKEN / SOURCES["mixed_bad"][0]) in read.error.message


def test_a_fault_that_the_draw_never_reaches_fails_nothing(node: Node) -> None:
    first_bad = stated("mixed_bad")["bad_lines"][0]
    steps = good_bytes(first_bad - 1) // STEP_TOKENS
    reads = read_to_the_error(node, one_by_one("mixed_bad", "fail", steps=steps), 2)
    assert [read.error for read in reads] == [None, None]
    check_served(reads, steps)


def test_a_source_of_weight_0_fails_nothing(node: Node) -> None:
    job = broken_job(
        ["mixed_bad", "sound"],
        defaults={"on_error": "fail", "at_exhaustion": "drop"},
        mixture={"unit": "tokens", 0: {"sound": 1, "mixed_bad": 0}},
    )
    (read,) = read_to_the_error(node, job, 1)
    assert read.error is None
    assert read.steps > 40


@pytest.mark.parametrize(
    "source",
    ["gsm_cut", "gsm_badcrc", "koi8r", "parquet_bitflip", "parquet_cut", "megatron_magic", "megatron_short",
     "megatron_idx_cut", "zstd_bad"],
)  # fmt: skip
def test_a_damaged_file_under_fail_is_named(node: Node, source: str) -> None:
    (read,) = read_to_the_error(node, one_by_one(source, "fail"), 1)
    assert isinstance(read.error, CorruptRecordError)
    assert f"source {source}" in read.error.message
    assert str((BROKEN / SOURCES[source][0]).with_suffix("")) in read.error.message  # .bin or .idx
    if source in ("gsm_cut", "gsm_badcrc"):
        lines = wanted_counts()[source][0]
        assert lines is not None
        assert read.steps == good_bytes(lines) // STEP_TOKENS
