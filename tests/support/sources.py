"""Sources made of small files, and their whole stream as plain tuples."""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import json
import lzma
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import zstandard

from federation.model.job import FieldRule, ShuffleRule, SourceSpec
from msd_daemon.sources.chunk_draft import ChunkDraft
from msd_daemon.sources.loader import SourceLoader
from msd_daemon.sources.manifest import Format, resolve_source
from msd_daemon.transforms import Tokenizer, describe_tokenizer, open_tokenizer

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("MSD_TEST_DATA", ROOT.parent / "shared" / "data"))

needs_data = pytest.mark.skipif(
    not (DATA / "text" / "expected.json").exists(),
    reason="the handed data is not there (MSD_TEST_DATA, default ../shared/data)",
)

IN_ORDER = ShuffleRule(is_shuffled=False)


class Placed(NamedTuple):
    """A record at its place in the stream."""

    block_key: int
    index: int
    status: int
    tokens: tuple[int, ...]


def byte_tokenizer() -> Tokenizer:
    return open_tokenizer(describe_tokenizer(None, kind="bytes", eos="none"))


def make_spec(
    paths: Iterable[Path], source_format: Format | None = None, **fields: object
) -> SourceSpec:
    manifest = resolve_source([str(path) for path in paths], ROOT, source_format)
    spec = SourceSpec(
        "source",
        manifest.format,
        manifest.compression,
        manifest.order_class,
        manifest.shards,
        manifest.digest,
        is_tokenized=manifest.format == "megatron",
    )
    if fields.get("tokens_field"):
        fields.setdefault("is_tokenized", True)
    return dataclasses.replace(spec, **fields)


def make_loader(
    spec: SourceSpec,
    part: int = 0,
    parts: int = 1,
    index_dir: Path | None = None,
    tokenizer: Tokenizer | None = None,
    fields: tuple[FieldRule, ...] = (),
) -> SourceLoader:
    tokenizer = tokenizer or byte_tokenizer()
    return SourceLoader(spec, 3, tokenizer, 17, part, parts, index_dir, fields)


def id_tokenizer(vocabulary: int = 1 << 20) -> Tokenizer:
    """Return what stands for a tokenizer where every source is tokenized already."""
    return open_tokenizer(describe_tokenizer(None, kind="none", vocabulary=vocabulary))


def placed(draft: ChunkDraft) -> list[Placed]:
    meta = draft.meta
    tokens = np.concatenate([np.zeros(0, np.int64), *draft.payload]).astype(np.int64)
    ends = np.cumsum(meta.lengths)
    assert len(tokens) == (ends[-1] if len(ends) else 0)
    index = draft.index
    if index is None:
        index = np.arange(meta.first_index, meta.first_index + len(meta.lengths))
    return [
        Placed(meta.block_key, int(at), int(status), tuple(tokens[end - length : end].tolist()))
        for at, status, end, length in zip(index, meta.status, ends, meta.lengths, strict=True)
    ]


def read_chunks(
    loader: SourceLoader, payload_bytes_max: int = 1 << 20, epochs: int = 1
) -> list[ChunkDraft]:
    """Return the chunks up to the end of an epoch."""
    drafts: list[ChunkDraft] = []
    while (draft := loader.next_chunk(payload_bytes_max)) is not None:
        if draft.meta.block_key >> 48 >= epochs:
            break
        drafts.append(draft)
    return drafts


def read_stream(
    loader: SourceLoader, payload_bytes_max: int = 1 << 20, epochs: int = 1
) -> list[Placed]:
    drafts = read_chunks(loader, payload_bytes_max, epochs)
    return [record for draft in drafts for record in placed(draft)]


def texts_of(records: Iterable[Placed]) -> list[str]:
    return [bytes(record.tokens).decode() for record in records if record.status == 0]


def statuses_of(records: Iterable[Placed]) -> dict[int, int]:
    found: dict[int, int] = {}
    for record in records:
        found[record.status] = found.get(record.status, 0) + 1
    return found


def json_lines(texts: Iterable[str]) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def compress(data: bytes, kind: str, pieces: int = 1) -> bytes:
    """Return data as several members, frames or streams one after the other."""
    cuts = [len(data) * piece // pieces for piece in range(pieces + 1)]
    parts = [data[start:end] for start, end in itertools.pairwise(cuts)]
    pack = {
        "gz": lambda part: gzip.compress(part, mtime=0),
        "xz": lzma.compress,
        "zst": zstandard.ZstdCompressor(write_checksum=True).compress,
    }[kind]
    return b"".join(pack(part) for part in parts)


def write_megatron(prefix: Path, documents: list[list[list[int]]], dtype: str = "<u2") -> Path:
    """Write a pair of documents, each a list of sequences; returns the bin's path."""
    sequences = [sequence for document in documents for sequence in document]
    sizes = np.array([len(sequence) for sequence in sequences], dtype="<i4")
    width = np.dtype(dtype).itemsize
    pointers = np.cumsum([0, *sizes[:-1].astype(np.int64) * width])[: len(sizes)].astype("<i8")
    entries = np.cumsum([0, *[len(document) for document in documents]]).astype("<i8")
    flat = np.array([token for sequence in sequences for token in sequence], dtype=dtype)
    path = prefix.with_suffix(".bin")
    path.write_bytes(flat.tobytes())
    code = {"u1": 1, "i1": 2, "<i2": 3, "<i4": 4, "<i8": 5, "<u2": 8}[dtype]
    head = b"MMIDIDX\x00\x00" + (1).to_bytes(8, "little") + bytes((code,))
    counts = len(sizes).to_bytes(8, "little") + len(entries).to_bytes(8, "little")
    columns = sizes.tobytes() + pointers.tobytes() + entries.tobytes()
    prefix.with_suffix(".idx").write_bytes(head + counts + columns)
    return path
