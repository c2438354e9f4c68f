"""What ranks were given, document piece by document piece, and what reference tokenizers make of
the handed corpora."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import lzma
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from msd_client.contract.state import StreamState
from msd_client.joined_job import Data
from msd_client.step import Step
from msd_daemon.transforms import describe_tokenizer, open_tokenizer
from tests.support.node import Node, run_ranks
from tests.support.sources import DATA

TEXT = DATA / "text"


@dataclass
class Delivered:
    """What the batches of a run held, all DP groups together."""

    tokens: Counter[int] = field(default_factory=Counter)
    """By source index."""
    pieces: dict[int, Counter[bytes]] = field(default_factory=dict)
    """Segments by source index, as int32 bytes, of the sources that were asked for."""
    cells: int = 0
    padding: int = 0
    last_step_padding: int = 0
    steps: int = 0
    state: StreamState | None = None

    @property
    def fill(self) -> float:
        """Share of all cells that hold a document."""
        return 1 - self.padding / self.cells


def read_delivered(
    node: Node,
    job: Any,
    mesh: Mapping[str, int],
    steps: int | None = None,
    *,
    keep: Iterable[int] = (),
    **options: Any,
) -> Delivered:
    """Let one rank per DP group read a job and add up what it was given.

    Args:
        node: A running daemon.
        job: Job map or file.
        mesh: A mesh of dp alone, so that no row is counted twice.
        steps: How many, None for all.
        keep: Sources whose segments are kept.
        options: For `run_ranks`.
    """
    kept = frozenset(keep)
    parts = [Delivered(pieces={source: Counter() for source in kept}) for _ in range(mesh["dp"])]

    def read(data: Data, step: Step) -> None:
        part = parts[data.rank]
        before = part.padding
        for batch in step:
            _add(part, batch, kept)
            del batch
        part.last_step_padding = part.padding - before
        part.steps += 1
        part.state = StreamState.decode(data.train.state_dict()["msd"])

    run_ranks(node, job, mesh, steps, read_step=read, **options)
    total = parts[0]
    for part in parts[1:]:
        assert part.steps == total.steps
        assert part.state is not None
        assert total.state is not None
        assert part.state.encode() == total.state.encode()
        total.tokens += part.tokens
        total.cells += part.cells
        total.padding += part.padding
        total.last_step_padding += part.last_step_padding
        for source, pieces in part.pieces.items():
            total.pieces[source] += pieces
    return total


def _add(part: Delivered, batch: Any, kept: frozenset[int]) -> None:
    bounds = np.asarray(batch.cu_seqlens)
    source = np.asarray(batch.segment_source)
    tokens = np.asarray(batch.tokens).reshape(-1)
    sums = np.bincount(source + 1, weights=np.diff(bounds)).astype(np.int64)
    part.cells += tokens.size
    part.padding += int(sums[0])
    part.tokens.update(
        {place - 1: int(count) for place, count in enumerate(sums) if place and count}
    )
    for number in np.flatnonzero(np.isin(source, list(kept))).tolist():
        piece = tokens[bounds[number] : bounds[number + 1]].tobytes()
        part.pieces[int(source[number])][piece] += 1


def documents_of(name: str, *, is_question_alone: bool = False) -> Iterator[str]:
    """Yield the texts of a handed corpus with Python's own readers, in file order.

    Args:
        name: As in expected.json.
        is_question_alone: Of gsm8k, leave the answers away.
    """
    path = TEXT / name
    row = expected_texts()[name]
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        yield from pq.read_table(path, columns=[row["text_field"]])[0].to_pylist()
        return
    if path.suffix == ".txt":
        yield path.read_text(encoding="utf-8")
        return
    for line in _plain_bytes(path).splitlines():
        record = json.loads(line)
        if name.startswith("gsm8k"):
            yield record["question"] + ("" if is_question_alone else "\n" + record["answer"])
        else:
            yield record[row["text_field"]]


def _plain_bytes(path: Path) -> bytes:
    data = path.read_bytes()
    if path.suffix == ".gz":
        return gzip.decompress(data)
    if path.suffix == ".xz":
        return lzma.decompress(data)
    if path.suffix == ".zst":
        reader = zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True)
        return reader.read()
    return data


@cache
def expected_texts() -> dict[str, dict[str, Any]]:
    """Return the rows of expected.json whose formats this release reads; empty without the data."""
    path = TEXT / "expected.json"
    if not path.exists():
        return {}
    rows: dict[str, dict[str, Any]] = json.loads(path.read_text())
    return {name: row for name, row in rows.items() if not name.endswith((".arrow", ".feather"))}


def pieces_of(names: Iterable[str], row_tokens: int) -> Counter[bytes]:
    """Return the pieces that documents are delivered in, from a plain reading of the files.

    The ids are checked against the digest that tiktoken itself gave (expected.json).

    Args:
        names: Corpora of one source.
        row_tokens: Longer documents are cut here.
    """
    tokenizer = open_tokenizer(
        describe_tokenizer(DATA / "tokenizers" / "o200k_base.tiktoken", eos="none")
    )
    pieces: Counter[bytes] = Counter()
    for name in names:
        ids, offsets = tokenizer.encode_batch(list(documents_of(name)))
        ids = np.asarray(ids).astype("<i4")
        digest = hashlib.sha256(ids.tobytes()).hexdigest()
        assert digest == expected_texts()[name]["tokens_u32le_sha256"]["o200k_base"], name
        for start, end in itertools.pairwise(offsets.tolist()):
            for cut in range(start, end, row_tokens):
                pieces[ids[cut : min(cut + row_tokens, end)].tobytes()] += 1
    return pieces
