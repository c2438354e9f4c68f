"""What one microbatch holds: the fields, their types, and where they lie in a slot's payload.

Pure. The daemon derives ring sizes from it before anything starts, a data constructor writes by it,
and a reader learns the convention of labels from it. It never knows jobs, meshes or segments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from msd_client.contract.errors import ConfigError

Labels = Literal["shifted", "aligned"]
Per = Literal["token", "segment", "row"]
Documents = Literal["separate", "joined"]
Extent = Literal["token", "boundary", "segment"]

FIELD_ALIGN_BYTES = 128
"""Every field starts on this boundary (two cache lines, RINGS.md 6a)."""
LARGE_FIELD_BYTES = 1 << 20
LARGE_FIELD_ALIGN_BYTES = 4096
"""Fields of at least LARGE_FIELD_BYTES start on a page, so that a device copy is page-aligned."""
PAYLOAD_BYTES_MAX = (4 << 30) - 4096
"""A slot holds at most 4 GiB, its header page included (RINGS.md 6d)."""


@dataclass(frozen=True)
class FieldMeaning:
    """One line of the public field table."""

    name: str
    dtype: str
    shape: str
    meaning: str


FIELD_TABLE: tuple[FieldMeaning, ...] = (
    FieldMeaning(
        "tokens", "int32 (or int64)", "[rows, length]", "Token ids; `pad_id` in a row's tail."
    ),
    FieldMeaning(
        "labels",
        "int64 (or int32)",
        "[rows, length]",
        "`shifted`: the id of the next token; `aligned`: the id of this token, the model shifts. "
        "`ignore_label` where nothing is trained: joins of separate documents, padding.",
    ),
    FieldMeaning(
        "position_ids",
        "int32",
        "[rows, length]",
        "Position inside the segment, from 0 in every segment (padding is a segment of its own).",
    ),
    FieldMeaning(
        "cu_seqlens",
        "int32",
        "[segments + 1]",
        "Segment boundaries over the flattened rows, exact: 0 first, rows * length last, strictly "
        "increasing; a boundary at every row, a row's padding is a segment of its own.",
    ),
    FieldMeaning(
        "segment_source",
        "int32",
        "[segments]",
        "Index of the source that a segment comes from; -1 for padding.",
    ),
    FieldMeaning(
        "segment_ids",
        "int32",
        "[rows, length]",
        "Number of the segment that a token is in, 0-based in the microbatch, padding included: "
        "the index into `segment_source`. Made on first use.",
    ),
    FieldMeaning("max_seqlen", "int", "", "Tokens of the longest segment, padding included."),
    FieldMeaning("valid_tokens", "int", "", "Labels of this microbatch that are trained."),
    FieldMeaning("rows", "int", "", "Rows of this microbatch."),
    FieldMeaning("step", "int", "", "The trainer's step number, dense from 0."),
    FieldMeaning("plan_step", "int", "", "The planner's step number; skips leave gaps in it."),
    FieldMeaning("microbatch", "int", "", "Number of the microbatch in this rank's step, from 0."),
)


@dataclass(frozen=True)
class UserField:
    """A column of the records that batches carry beside the built-in fields."""

    name: str
    per: Per
    dtype: str
    """numpy name: float32, float64, int32, int64."""
    fill: float
    """Value where no record gives one: padding, added BOS/EOS, sources without fields."""


@dataclass(frozen=True)
class FieldSpec:
    """One array of a microbatch at a fixed place of the payload."""

    name: str
    dtype: str
    """numpy name, little endian: int32, int64, float32."""
    extent: Extent
    """What the entries count: tokens ([rows, row_tokens]), boundaries or segments (ragged)."""
    shape_max: tuple[int, ...]
    offset_bytes: int
    """From the start of the payload."""
    nbytes_max: int


@dataclass(frozen=True)
class BatchSpec:
    """Fields of a microbatch and the conventions behind them; build it with `for_rule`."""

    fields: tuple[FieldSpec, ...]
    rows: int
    row_tokens: int
    segments_max: int
    """Most segments of a microbatch, one padding segment a row included."""
    payload_bytes_max: int
    labels: Labels
    documents: Documents
    ignore_label: int
    pad_id: int

    @classmethod
    def for_rule(
        cls,
        *,
        rows: int,
        row_tokens: int,
        row_segments_max: int,
        token_dtype: str = "int32",  # noqa: S107 - a dtype, no password
        label_dtype: str = "int64",
        labels: str = "shifted",
        documents: str = "separate",
        ignore_label: int = -100,
        pad_id: int = 0,
    ) -> BatchSpec:
        """Return the spec of a microbatch of `rows` rows.

        Args:
            rows: Rows of a microbatch, at least 1.
            row_tokens: Tokens of a row, at least 1.
            row_segments_max: Most segments that packing puts in a row, without its padding.
            token_dtype: int32 or int64.
            label_dtype: int32 or int64.
            labels: shifted or aligned.
            documents: separate or joined.
            ignore_label: Label where nothing is trained.
            pad_id: Token id of padding.

        Raises:
            ConfigError: A number or name is out of range, or a slot would exceed 4 GiB.
        """
        _check_rule(rows, row_tokens, row_segments_max, (token_dtype, label_dtype))
        _check_names(labels, documents)
        row_segments_max = min(row_segments_max, row_tokens)
        # A full row has no padding, so a row of n tokens never has more than n segments.
        segments_max = rows * min(row_segments_max + 1, row_tokens)
        shape = (rows, row_tokens)
        fields = _place(
            (
                ("tokens", token_dtype, "token", shape),
                ("labels", label_dtype, "token", shape),
                ("position_ids", "int32", "token", shape),
                ("cu_seqlens", "int32", "boundary", (segments_max + 1,)),
                ("segment_source", "int32", "segment", (segments_max,)),
            )
        )
        payload_bytes_max = fields[-1].offset_bytes + fields[-1].nbytes_max
        if payload_bytes_max > PAYLOAD_BYTES_MAX:
            raise ConfigError(
                f"a microbatch of {rows} rows x {row_tokens} tokens takes {payload_bytes_max} bytes, "
                f"more than the {PAYLOAD_BYTES_MAX} of a slot: lower batch.microbatch_rows",
                needed_bytes=payload_bytes_max,
                available_bytes=PAYLOAD_BYTES_MAX,
            )
        return cls(
            fields=fields,
            rows=rows,
            row_tokens=row_tokens,
            segments_max=segments_max,
            payload_bytes_max=payload_bytes_max,
            labels="shifted" if labels == "shifted" else "aligned",
            documents="separate" if documents == "separate" else "joined",
            ignore_label=ignore_label,
            pad_id=pad_id,
        )

    def field(self, name: str) -> FieldSpec:
        """Return the field of that name.

        Raises:
            KeyError: The microbatch has no such field.
        """
        for field in self.fields:
            if field.name == name:
                return field
        raise KeyError(name)

    def encode(self) -> dict[str, Any]:
        """Return the spec as plain maps, lists and scalars (what `decode` reads)."""
        tokens, labels = self.field("tokens"), self.field("labels")
        return {
            "rows": self.rows,
            "row_tokens": self.row_tokens,
            "segments_max": self.segments_max,
            "token_dtype": tokens.dtype,
            "label_dtype": labels.dtype,
            "labels": self.labels,
            "documents": self.documents,
            "ignore_label": self.ignore_label,
            "pad_id": self.pad_id,
            "payload_bytes_max": self.payload_bytes_max,
        }

    @classmethod
    def decode(cls, plain: object) -> BatchSpec:
        """Return the spec from its plain form; the places of the fields are computed, not believed.

        Raises:
            ConfigError: A key is missing or unknown, a value has the wrong type or range, or the
                sender lays the fields out differently (`payload_bytes_max` differs).
        """
        if not isinstance(plain, dict) or set(plain) != set(_ENCODED_TYPES):
            raise ConfigError(f"batch spec: expected the keys {sorted(_ENCODED_TYPES)}")
        for key, kind in _ENCODED_TYPES.items():
            if type(plain[key]) is not kind:
                raise ConfigError(f"batch spec: {key} is {plain[key]!r}, expected {kind.__name__}")
        rows, row_tokens = plain["rows"], plain["row_tokens"]
        per_row, rest = divmod(plain["segments_max"], rows) if rows > 0 else (0, 1)
        if rest or not 1 <= per_row <= row_tokens:
            raise ConfigError(f"batch spec: segments_max {plain['segments_max']} for {rows} rows")
        spec = cls.for_rule(
            rows=rows,
            row_tokens=row_tokens,
            row_segments_max=row_tokens if per_row == row_tokens else per_row - 1,
            token_dtype=plain["token_dtype"],
            label_dtype=plain["label_dtype"],
            labels=plain["labels"],
            documents=plain["documents"],
            ignore_label=plain["ignore_label"],
            pad_id=plain["pad_id"],
        )
        if spec.payload_bytes_max != plain["payload_bytes_max"]:
            raise ConfigError(
                f"batch spec: the sender's payload has {plain['payload_bytes_max']} bytes, "
                f"ours {spec.payload_bytes_max}: client and daemon differ in version"
            )
        return spec


_ENCODED_TYPES: dict[str, type] = {
    "rows": int,
    "row_tokens": int,
    "segments_max": int,
    "token_dtype": str,
    "label_dtype": str,
    "labels": str,
    "documents": str,
    "ignore_label": int,
    "pad_id": int,
    "payload_bytes_max": int,
}


def field_table() -> str:
    """Return the table of all fields as Markdown, for the manual."""
    lines = ["| field | dtype | shape | meaning |", "|---|---|---|---|"]
    lines += [f"| `{f.name}` | {f.dtype} | {f.shape} | {f.meaning} |" for f in FIELD_TABLE]
    return "\n".join(lines) + "\n"


def align_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def _place(
    wanted: tuple[tuple[str, str, Extent, tuple[int, ...]], ...],
) -> tuple[FieldSpec, ...]:
    fields = []
    end = 0
    for name, dtype, extent, shape in wanted:
        nbytes = int(np.dtype(dtype).itemsize) * int(np.prod(shape, dtype=np.int64))
        is_large = nbytes >= LARGE_FIELD_BYTES
        offset = align_up(end, LARGE_FIELD_ALIGN_BYTES if is_large else FIELD_ALIGN_BYTES)
        fields.append(FieldSpec(name, dtype, extent, shape, offset, nbytes))
        end = offset + nbytes
    return tuple(fields)


def _check_rule(rows: int, row_tokens: int, row_segments_max: int, dtypes: tuple[str, str]) -> None:
    for key, value in (
        ("rows", rows),
        ("row_tokens", row_tokens),
        ("row_segments_max", row_segments_max),
    ):
        if value < 1:
            raise ConfigError(f"batch spec: {key} is {value}, must be at least 1")
    if rows * row_tokens > np.iinfo(np.int32).max:
        raise ConfigError(
            f"batch spec: {rows} rows x {row_tokens} tokens exceed the int32 range of cu_seqlens"
        )
    for dtype in dtypes:
        if dtype not in ("int32", "int64"):
            raise ConfigError(f"batch spec: dtype {dtype!r} is neither int32 nor int64")


def _check_names(labels: str, documents: str) -> None:
    if labels not in ("shifted", "aligned"):
        raise ConfigError(f"batch spec: labels {labels!r} is neither shifted nor aligned")
    if documents not in ("separate", "joined"):
        raise ConfigError(f"batch spec: documents {documents!r} is neither separate nor joined")
