"""The plan of one step: which records fill which rows, and who receives each row.

Columns of numpy arrays; `encode` gives a plain header and raw little-endian frames for the wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from msd_client.contract.errors import ProtocolError
from msd_client.contract.state import StateDelta

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

_SEGMENT_COLUMNS = (
    ("source", "<i4"),
    ("block_key", "<i8"),
    ("index", "<i4"),
    ("offset", "<i4"),
    ("length", "<i4"),
    ("row", "<i4"),
    ("column", "<i4"),
)
_ROW_COLUMNS = (
    ("row_dp", "<i4"),
    ("row_microbatch", "<i4"),
    ("row_slot", "<i4"),
    ("row_valid_tokens", "<i4"),
)
_SOURCE_COLUMNS = (
    ("drawn_tokens", "<i8"),
    ("drawn_samples", "<i8"),
    ("placed_tokens", "<i8"),
    ("source_valid_tokens", "<i8"),
    ("source_valid_segments", "<i8"),
    ("dropped_records", "<i8"),
    ("wanted_shares", "<f8"),
)
_CARRIED_OUT_COLUMNS = ("source", "block_key", "index", "offset")
_SCALARS: dict[str, type[int | float | str]] = {
    "step": int,
    "plan_step": int,
    "dp_count": int,
    "microbatch_count": int,
    "microbatch_rows": int,
    "row_tokens": int,
    "valid_tokens": int,
    "valid_segments": int,
    "cost_max": int,
    "cost_mean": float,
    "encoder_cost_max": int,
    "encoder_cost_mean": float,
    "carried_tokens": int,
    "unit": str,
    "broadcast_axes": str,
    "membership_digest": str,
    "stream_digest": str,
}
_SEGMENTS_MAX = 1 << 26
DELTA_FRAME = 4
"""Which of a plan's frames is the state's difference."""


@dataclass(frozen=True, eq=False)
class StepPlan:
    """One step, frozen. Segments are sorted by (row, column); rows are canonical.

    A canonical row's number says nothing of the mesh; `row_dp`, `row_microbatch` and `row_slot`
    place it. n is the number of segments, R of rows, S of sources.
    """

    step: int
    """The trainer's number of the step."""
    plan_step: int
    """The plan's number of it, which names its content; skips leave gaps in these."""
    dp_count: int
    microbatch_count: int
    microbatch_rows: int
    row_tokens: int
    source: Int32Array
    """Source index of each segment. Shape (n,)."""
    block_key: Int64Array
    index: Int32Array
    offset: Int32Array
    """First token of the segment inside its record. Shape (n,)."""
    length: Int32Array
    row: Int32Array
    column: Int32Array
    row_dp: Int32Array
    """Data-parallel group of each canonical row. Shape (R,)."""
    row_microbatch: Int32Array
    row_slot: Int32Array
    """Row of the microbatch. Shape (R,)."""
    row_valid_tokens: Int32Array
    """Labels other than the ignore label. Shape (R,)."""
    valid_tokens: int
    """Global count of the step, the same with and without balancing."""
    valid_segments: int
    """Segments with at least one valid label."""
    drawn_tokens: Int64Array
    """Tokens drawn for this step. Shape (S,)."""
    drawn_samples: Int64Array
    placed_tokens: Int64Array
    """Tokens in the rows of this step. Shape (S,)."""
    source_valid_tokens: Int64Array
    source_valid_segments: Int64Array
    dropped_records: Int64Array
    """Records passed over or cut by this step's draw, all reasons. Shape (S,)."""
    wanted_shares: npt.NDArray[np.float64]
    """Shape (S,), sums to 1."""
    unit: str
    """`tokens`, `samples` or `trained`: what shares are shares of."""
    broadcast_axes: str
    """Axes, joined by commas, whose first rank alone reads; usually empty."""
    cost_max: int
    """Integer cost of the slowest rank."""
    cost_mean: float
    carried_tokens: int
    """Drawn tokens that wait for a later step."""
    membership_digest: str
    """32 hex digits over the canonical rows; no mesh, no placement."""
    stream_digest: str
    """sha256 (64 hex digits) over the former stream digest and this membership."""
    carried_out_columns: Int64Array
    """(source, block_key, index, offset) of fragments that left the carried pool. Shape (4, o)."""
    delta: StateDelta
    delta_bytes: bytes = b""
    """`delta` as it travels, once it was encoded or where it was decoded: nobody does so again."""
    encoder_cost_max: int = 0
    """Where media may be encoded anywhere: cost of the slowest group's encoders, summed over
    microbatches."""
    encoder_cost_mean: float = 0.0
    """The same of the mean group; 0 in all other jobs."""
    encode_dp: Int32Array | None = None
    """Group that encodes the media of each segment, by the job's modalities; -1 where it has none.
    None where media are encoded with their text. Placement, no part of the membership. Shape
    (modalities, n)."""
    group_begins: npt.NDArray[np.bool_] | None = None
    """Which segments begin a group or are in none: those up to the next one lie in the same row.
    None where the job has no groups. Shape (n,)."""

    @property
    def rows(self) -> int:
        """Number of canonical rows."""
        return len(self.row_dp)

    @property
    def fill_ratio(self) -> float:
        """Share of the whole step's cells that hold a token, 0 to 1."""
        rows = self.dp_count * self.microbatch_count * self.microbatch_rows
        return int(self.placed_tokens.sum()) / (rows * self.row_tokens)

    @property
    def imbalance(self) -> float:
        """Cost of the slowest rank over the mean; 1.0 is even."""
        return self.cost_max / self.cost_mean if self.cost_mean else 1.0

    @property
    def encoder_imbalance(self) -> float | None:
        """Cost of the slowest group's encoders over the mean, by microbatch; 1.0 is even.

        None of jobs whose media are encoded with their text.
        """
        if self.encode_dp is None:
            return None
        return self.encoder_cost_max / self.encoder_cost_mean if self.encoder_cost_mean else 1.0

    @property
    def realised_shares(self) -> npt.NDArray[np.float64]:
        """Shares of this step's draw in the mixture's unit; of labels where it is trained tokens.

        Shape (S,).
        """
        counts = {"samples": self.drawn_samples, "trained": self.source_valid_tokens}.get(
            self.unit, self.drawn_tokens
        )
        total = int(counts.sum())
        return counts / total if total else np.zeros(len(counts))

    def carried_in(self) -> list[tuple[int, int, int, int, int]]:
        """Return the fragments that were drawn for this step and are not placed.

        Each is (source, block_key, index, offset, length).
        """
        return _tuples(self.delta.carried_in[:5])

    def carried_out(self) -> list[tuple[int, int, int, int]]:
        """Return the fragments that left the carried pool: (source, block_key, index, offset)."""
        return _tuples(self.carried_out_columns)

    def cursors_after(self) -> list[tuple[int, int, int, int]]:
        """Return what the draw passed: (source, block_key, index, offset) of touched sources.

        `index` is the last record drawn from and `offset` its tokens drawn so far. Nothing before
        that record is needed after this step, apart from carried fragments.
        """
        return self.delta.cursors()

    def row_valid_tokens_by_cell(self, cells: Int64Array, cells_count: int) -> Int64Array:
        """Return the valid tokens of each cell, given the cell of each canonical row."""
        return np.bincount(cells, weights=self.row_valid_tokens, minlength=cells_count).astype(
            np.int64
        )

    def encode(self) -> tuple[dict[str, Any], list[bytes]]:
        """Return a plain header and raw frames; `decode` is the reverse."""
        header: dict[str, Any] = {key: getattr(self, key) for key in _SCALARS}
        header["rows"] = self.rows
        header["segments"] = len(self.source)
        header["sources"] = len(self.drawn_tokens)
        frames = [
            b"".join(
                getattr(self, name).astype(kind, copy=False).tobytes() for name, kind in columns
            )
            for columns in (_SEGMENT_COLUMNS, _ROW_COLUMNS, _SOURCE_COLUMNS)
        ]
        frames.append(self.carried_out_columns.astype("<i8", copy=False).tobytes())
        frames.append(self.encoded_delta())
        if self.group_begins is not None:
            header["has_groups"] = True
            frames.append(self.group_begins.astype("u1", copy=False).tobytes())
        if self.encode_dp is not None:
            frames.append(self.encode_dp.astype("<i4", copy=False).tobytes())
        return header, frames

    def encoded_delta(self) -> bytes:
        """Return `delta` as it travels."""
        return self.delta_bytes or self.delta.encode()

    def with_encoded_delta(self) -> StepPlan:
        """Return the plan with `delta_bytes`, so that journal, slices and messages share them."""
        return self if self.delta_bytes else replace(self, delta_bytes=self.delta.encode())

    @staticmethod
    def decode(header: dict[str, Any], frames: Sequence[bytes | memoryview]) -> StepPlan:
        """Return the plan of a header and its frames; arrays are views of the frames.

        Raises:
            ProtocolError: A field is missing or of the wrong type, or a frame has another size.
        """
        try:
            scalars = {key: _scalar(header, key, kind) for key, kind in _SCALARS.items()}
            counts = [_scalar(header, key, int) for key in ("segments", "rows", "sources")]
        except KeyError as error:
            raise ProtocolError(f"plan header lacks {error}") from error
        has_groups = header.get("has_groups", False) is True
        later = list(frames[5:])
        if len(frames) < 5 or len(later) > 1 + has_groups or len(later) < has_groups:
            raise ProtocolError(
                f"a plan has 5 or 6 frames, one more with groups, these are {len(frames)}"
            )
        group_begins = _group_begins(later.pop(0), counts[0]) if has_groups else None
        columns: dict[str, Any] = {}
        tables = (_SEGMENT_COLUMNS, _ROW_COLUMNS, _SOURCE_COLUMNS)
        for table, count, frame in zip(tables, counts, frames, strict=False):
            columns |= _split_frame(table, count, frame)
        out = frames[3]
        if len(out) % (8 * len(_CARRIED_OUT_COLUMNS)):
            raise ProtocolError(f"the carried frame has {len(out)} bytes")
        carried_out = np.frombuffer(out, "<i8").reshape(len(_CARRIED_OUT_COLUMNS), -1)
        delta_bytes = bytes(frames[4])
        delta = StateDelta.decode(delta_bytes)
        return StepPlan(
            **scalars,
            **columns,
            carried_out_columns=carried_out,
            delta=delta,
            delta_bytes=delta_bytes,
            encode_dp=_encode_dp(later[0], counts[0], scalars["dp_count"]) if later else None,
            group_begins=group_begins,
        )


def _group_begins(frame: bytes | memoryview, segments: int) -> npt.NDArray[np.bool_]:
    found = np.frombuffer(frame, "u1")
    if len(found) != segments or (segments and (found.max() > 1 or not found[0])):
        raise ProtocolError(f"the frame of groups of {segments} segments has {len(found)} bytes")
    return found.astype(np.bool_)


def _encode_dp(frame: bytes | memoryview, segments: int, dp_count: int) -> Int32Array:
    if not segments or not len(frame) or len(frame) % (4 * segments):
        raise ProtocolError(
            f"the frame of encoding groups of {segments} segments has {len(frame)} bytes"
        )
    found = np.frombuffer(frame, "<i4").reshape(-1, segments)
    if int(found.min()) < -1 or int(found.max()) >= dp_count:
        raise ProtocolError(
            f"media are encoded by groups {found.min()} to {found.max()} of {dp_count}"
        )
    return found


def _scalar(header: dict[str, Any], key: str, kind: type) -> Any:
    value = header[key]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ProtocolError(f"plan header: {key} is {type(value).__name__}, not {kind.__name__}")
    return value


def _split_frame(
    table: tuple[tuple[str, str], ...], count: int, frame: bytes | memoryview
) -> dict[str, npt.NDArray[Any]]:
    sizes = [np.dtype(kind).itemsize * count for _, kind in table]
    if not 0 <= count <= _SEGMENTS_MAX or sum(sizes) != len(frame):
        raise ProtocolError(
            f"a plan frame of {count} rows has {len(frame)} bytes, not {sum(sizes)}"
        )
    columns = {}
    start = 0
    for (name, kind), size in zip(table, sizes, strict=True):
        columns[name] = np.frombuffer(frame, kind, count, start)
        start += size
    return columns


def _tuples(columns: Int64Array) -> list[Any]:
    return list(zip(*columns.tolist(), strict=True))
