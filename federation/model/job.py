"""The resolved job: every default written out, manifests frozen, no mesh, node or worker count.

`msd_daemon.config` makes it from what a user wrote; planner, loaders and constructors read it.
It travels as plain msgpack maps; its digest stands in every state (DESIGN.md P2, E2).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, Literal

import msgpack

from msd_client.contract.plain import decode_plain, encode_plain

STREAM_VERSION = 1

Unit = Literal["tokens", "samples"]
Packing = Literal["best_fit", "concat", "padded"]
LongPolicy = Literal["split", "truncate", "skip"]
Exhaustion = Literal["repeat", "stop", "drop"]


@dataclass(frozen=True)
class Shard:
    """One file of a source as the frozen manifest has it."""

    path: str
    size_bytes: int
    fingerprint: str
    """sha256 (hex, 32 digits) over size and the first and last 64 KiB; not mtime, not path."""


@dataclass(frozen=True)
class ErrorPolicy:
    """What a bad record costs: `skip` within a budget over a sliding window, or `fail` at once."""

    policy: Literal["skip", "fail"] = "skip"
    budget_ratio: float = 0.001
    window_records: int = 10_000


@dataclass(frozen=True)
class ShuffleRule:
    """The order of a source; see DESIGN.md section 4."""

    is_shuffled: bool = True
    window_shards: int = 16
    window_records: int = 256
    window_bytes: int = 512 * 1024
    interleave: int = 4
    block_bytes: int = 1 << 20
    """Byte range of a block of a seekable byte-addressed format (JSONL, text)."""
    block_records: int = 4096
    """Most records of a block of a seekable record-addressed format (`.bin/.idx`)."""
    stream_block_records: int = 256


@dataclass(frozen=True)
class SourceSpec:
    """One source, resolved."""

    name: str
    format: Literal["jsonl", "parquet", "text", "megatron"]
    compression: Literal["none", "gz", "zst", "xz"]
    order_class: Literal["seekable", "streaming"]
    shards: tuple[Shard, ...]
    manifest_digest: str
    text_field: str = "text"
    text_document: Literal["file", "blank_line"] = "file"
    is_tokenized: bool = False
    """True for `.bin/.idx`: ids are taken as they lie, no tokenizer, no BOS/EOS is added."""
    token_bytes: int = 4
    """Bytes of an id in chunks, 2 or 4: the width of the `.bin`, or what the vocabulary needs."""
    record_bytes_max: int = 64 << 20
    shuffle: ShuffleRule = ShuffleRule()
    on_error: ErrorPolicy = ErrorPolicy()
    at_exhaustion: Exhaustion = "repeat"
    max_epochs: int | None = None


@dataclass(frozen=True)
class TokenizerSpec:
    """How text becomes ids: which file, and which ids are put around a document."""

    kind: Literal["huggingface", "tiktoken", "bytes", "none"]
    path: str = ""
    fingerprint: str = ""
    pattern: str = ""
    """tiktoken only: name of the split pattern (o200k_base, cl100k_base, r50k_base)."""
    vocabulary_count: int = 256
    bos_id: int | None = None
    eos_id: int | None = None
    library: str = ""
    """Library name and version that encodes, e.g. `tiktoken 0.14.0`."""


@dataclass(frozen=True)
class BatchRule:
    """Shape and packing of a step: `rows` rows of `row_tokens` tokens, whatever the mesh."""

    rows: int
    row_tokens: int
    microbatch_rows: int = 1
    packing: Packing = "best_fit"
    long: LongPolicy = "split"
    labels: Literal["shifted", "aligned"] = "shifted"
    ignore_label: int = -100
    documents: Literal["separate", "joined"] = "separate"
    pad_id: int = 0
    row_multiple: int = 1
    segment_multiple: int = 1
    row_segments_max: int = 64
    """Most segments of a row; packing obeys it, so that slots have a known size."""
    token_dtype: Literal["int32", "int64"] = "int32"  # noqa: S105 - a dtype
    label_dtype: Literal["int32", "int64"] = "int64"


@dataclass(frozen=True)
class MixturePoint:
    """Weights from a step (or a token count) on; normalised at use, 0 is never drawn."""

    start: int
    weights: dict[str, float]
    start_unit: Literal["steps", "tokens"] = "steps"


@dataclass(frozen=True)
class MixtureSchedule:
    """Piecewise-constant weights; the unit says what a share is a share of."""

    unit: Unit
    points: tuple[MixturePoint, ...]


@dataclass(frozen=True)
class CostSpec:
    """Transformer FLOPs of a segment of n tokens: linear * n + quadratic * n * n (integers)."""

    kind: Literal["transformer", "tokens"] = "tokens"
    linear: int = 1
    quadratic: int = 0


@dataclass(frozen=True)
class ResolvedJob:
    """All that the content of the stream is a function of (with the journalled events)."""

    name: str
    seed: int
    sources: tuple[SourceSpec, ...]
    tokenizer: TokenizerSpec
    batch: BatchRule
    mixture: MixtureSchedule
    cost: CostSpec = CostSpec()
    strategy: str = "balanced"
    balance_objective: Literal["step", "microbatch"] = "step"
    steps: int | None = None
    tokens: int | None = None
    epochs: int | None = None
    schema_version: int = 1
    stream_version: int = STREAM_VERSION
    notes: tuple[str, ...] = field(default=())
    """Human lines about what resolution decided; not part of the digest."""

    def source_index(self, name: str) -> int:
        """Return the index of a source by name.

        Raises:
            KeyError: No source has that name.
        """
        for index, source in enumerate(self.sources):
            if source.name == name:
                return index
        raise KeyError(name)

    def digest(self) -> str:
        """Return 32 hex digits over all that the stream is a function of: not name, paths, notes.

        A moved file with equal content gives an equal digest, and so does a renamed job.
        """
        plain = encode_job(self)
        plain.pop("notes")
        plain.pop("name")
        for source in plain["sources"]:
            for shard in source["shards"]:
                shard.pop("path")
        plain["tokenizer"].pop("path")
        packed = msgpack.packb(_sorted(plain), use_bin_type=True)
        return hashlib.sha256(packed).hexdigest()[:32]


def encode_job(job: ResolvedJob) -> dict[str, Any]:
    """Return the job as plain maps, lists and scalars."""
    plain: dict[str, Any] = encode_plain(job)
    return plain


def decode_job(plain: object) -> ResolvedJob:
    """Return the job from its plain form, refusing unknown keys and wrong types.

    Raises:
        ConfigError: A key is unknown or missing, or a value has the wrong type.
    """
    return decode_plain(ResolvedJob, plain, "job")


def _sorted(value: object) -> object:
    if isinstance(value, dict):
        return [[key, _sorted(value[key])] for key in sorted(value)]
    if isinstance(value, list):
        return [_sorted(item) for item in value]
    return value
