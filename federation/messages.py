"""Messages between a node daemon and the planner.

On the wire a message is a multipart: one msgpack header (kind, job, generation, term, sequence and
the fields of its dataclass), then raw little-endian frames for long integer columns. A header is at
most 1 MiB, all frames together 64 MiB; both are checked before anything is parsed.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from federation.cluster_messages import CLUSTER_KINDS, ClusterMessage
from federation.model.chunk import ChunkMeta, Marks
from federation.model.exports import Export, decode_exports
from federation.model.plan import DELTA_FRAME, StepPlan
from federation.retention import STEPS_KEPT
from msd_client.contract.codec import pack, unpack_map
from msd_client.contract.errors import ConfigError, ProtocolError
from msd_client.contract.plain import decode_plain, encode_flat

HEADER_BYTES_MAX = 16 << 20
FRAMES_BYTES_MAX = 256 << 20
NO_MARKS = -1
"""In place of the number of marks: the chunk has none, nor room for them."""


@dataclass(frozen=True)
class OpenJob:
    """Daemon: plan this job from this state; `state` is an encoded StreamState, empty for new."""

    job: dict[str, Any]
    mesh: list[list[Any]]
    state: bytes
    horizon_steps: int
    journal_path: str
    resume_step: int | None = None
    """Set where a generation goes on after a planner's death: replay the journal up to this step
    (its last generation), ignore `state`."""
    steps_kept: int = STEPS_KEPT
    """Steps that the journal keeps of a generation."""
    forget_after: int | None = None
    """Events of later plan steps that the state does not know are dropped, not played back."""
    rank_nodes: list[int] = field(default_factory=list)
    """In a cluster: node of each rank."""


@dataclass(frozen=True)
class ChunksPublished:
    """Daemon: metadata of chunks, columns in the frames: lengths int32, status uint8 of each record.

    Where chunks have marks two more follow, of those: the count int32 of each record, and the table
    int32 [marks, 4].
    """

    chunks: list[list[Any]]
    """[source, block_key, first_index, records, is_block_end, window_blocks, is_lane_end, fault,
    marks or NO_MARKS]"""


@dataclass(frozen=True)
class StepReleased:
    """Daemon: every rank released all of steps up to and including this one."""

    step: int


@dataclass(frozen=True)
class ChangeMixture:
    """Daemon: weights from a step on; answered by MixtureChanged."""

    request: int
    weights: dict[str, float]
    at: int | None = None
    """The step; None for the first that is possible."""
    kind: Literal["mixture", "hook", "substitute"] = "mixture"
    """What the journal calls the event: asked for by a person, a user's hook's value, or shares that
    others take over from a slow source."""


@dataclass(frozen=True)
class SkipSteps:
    """Daemon: leave plan steps out; answered by SkipAccepted."""

    request: int
    first: int
    end: int


@dataclass(frozen=True)
class RewindStream:
    """Daemon: note that ranks are to go on from a state of a step or before; StreamRewound answers."""

    request: int
    step: int
    skip: list[int] | None = None
    """First and end of plan steps that are left out from then on."""
    forget_after: int | None = None
    """Events of later plan steps are dropped."""


@dataclass(frozen=True)
class StepSeconds:
    """Daemon: how long ranks took for steps."""

    reports: list[list[int]]
    """[step, rank, nanoseconds]"""


@dataclass(frozen=True)
class CloseJob:
    """Daemon: forget the job's generation."""

    reason: str


@dataclass(frozen=True)
class JobOpened:
    """Planner: the job is planned from `step` on; `loads` lists where loaders start."""

    step: int
    cursors: list[list[int]]
    """Per source of the job: [block_key, index]."""
    carried: list[list[int]]
    """Carried fragments: [source, block_key, index, offset, length]."""
    active: list[int]
    """Sources whose weight is above zero now."""
    shares: list[float]
    dropped: list[list[int]]
    """Passed over so far: by reason (msd_client.contract.state.DROPPED_COLUMNS), then source."""
    event_number: int = 0
    """Mixture changes that the planner knows of, also those that its journal alone told it."""
    pending_steps: list[int] = field(default_factory=list)
    """Where those of them take effect that have not yet."""
    pending_shares: list[list[int]] = field(default_factory=list)
    """Integer shares of each source from there on."""
    plan_step: int = 0
    """Of that step, or of the first that is left out before it."""
    pending_skips: list[list[int]] = field(default_factory=list)
    """First and end of plan steps that will be left out."""


@dataclass(frozen=True)
class PlansMade:
    """Planner: consecutive step plans; `counts` frames each (federation.model.plan)."""

    headers: list[dict[str, Any]]
    counts: list[int]
    states: list[list[Any]] = field(default_factory=list)
    """[step, encoded state after it] of every 64th step: clients start their differences there."""
    exports: list[list[list[int]]] = field(default_factory=list)
    """In a cluster, of each plan: [consumer, fragments] of what the node has to give; their columns
    (federation.model.exports) are the plan's last frame, counted with the others. The state's
    difference, frame 4, is alike for all nodes and compressed (pack_delta)."""


@dataclass(frozen=True)
class SourcesStarved:
    """Planner: it can't go on before these sources' next records are known."""

    sources: list[int]


@dataclass(frozen=True)
class MixtureChanged:
    """Planner: journalled; in force from `step` on. `error` is set where it was refused."""

    request: int
    step: int
    shares: list[float] = field(default_factory=list)
    integer_shares: list[int] = field(default_factory=list)
    """As the state has them pending."""
    next_step: int = 0
    """The first step that was not planned yet: differences from there on tell of the change."""
    error: dict[str, Any] | None = None
    plan_step: int = 0
    """Of `step`; what the state has pending."""


@dataclass(frozen=True)
class SkipAccepted:
    """Planner: journalled; these plan steps are left out. `error` is set where it was refused."""

    request: int
    first: int
    end: int
    step: int = 0
    """The trainer's number of the step that comes in place of `first`."""
    next_step: int = 0
    """The first step that was not planned yet."""
    error: dict[str, Any] | None = None


@dataclass(frozen=True)
class StepsSkipped:
    """Planner: plan steps before this one are left out (federation.model.skipped in the frames).

    Told where the planner waits for records in the middle of them: what they passed may go.
    """

    plan_step: int


@dataclass(frozen=True)
class StreamRewound:
    """Planner: the rewind is journalled. `error` is set where it was refused."""

    request: int
    step: int
    plan_step: int = 0
    forgotten: int = 0
    """Events that were dropped."""
    error: dict[str, Any] | None = None


@dataclass(frozen=True)
class JournalStalled:
    """Planner: plans wait until the journal can be written; empty: they go out again."""

    reason: str


@dataclass(frozen=True)
class CalibrationState:
    """Planner: what is known of a job's cost from reported times; after each fit, and at a replay."""

    status: dict[str, Any]
    """As `msdctl status` shows it (federation.planning.calibrator)."""


@dataclass(frozen=True)
class JobEnded:
    """Planner: no step after `last_step` (exclusive) will come."""

    next_step: int
    reason: str
    state: bytes = b""
    """The state behind the end, where it is not the one after the last step: what could be in no
    step is dropped and counted."""


@dataclass(frozen=True)
class JobFailed:
    """Planner: planning stopped with an error (an encoded MsdError)."""

    error: dict[str, Any]
    next_step: int = 0
    """Steps before it are served first; 0: the job ends at once."""


Message = (
    OpenJob
    | ChunksPublished
    | StepReleased
    | ChangeMixture
    | SkipSteps
    | RewindStream
    | StepSeconds
    | CloseJob
    | JobOpened
    | PlansMade
    | SourcesStarved
    | MixtureChanged
    | SkipAccepted
    | StepsSkipped
    | StreamRewound
    | JournalStalled
    | CalibrationState
    | JobEnded
    | JobFailed
    | ClusterMessage
)
KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        OpenJob,
        ChunksPublished,
        StepReleased,
        ChangeMixture,
        SkipSteps,
        RewindStream,
        StepSeconds,
        CloseJob,
        JobOpened,
        PlansMade,
        SourcesStarved,
        MixtureChanged,
        SkipAccepted,
        StepsSkipped,
        StreamRewound,
        JournalStalled,
        CalibrationState,
        JobEnded,
        JobFailed,
        *CLUSTER_KINDS,
    )
}


@dataclass(frozen=True)
class Envelope:
    """A message with its address and fences."""

    job: str
    generation: int
    term: int
    sequence: int
    message: Message
    frames: tuple[bytes, ...] = ()

    def encode(self) -> list[bytes]:
        """Return the frames of the multipart."""
        header = {
            "kind": type(self.message).__name__,
            "job": self.job,
            "generation": self.generation,
            "term": self.term,
            "sequence": self.sequence,
            "body": encode_flat(self.message),
        }
        return [pack(header), *self.frames]


@dataclass(frozen=True)
class _Header:
    kind: str
    job: str
    generation: int
    term: int
    sequence: int
    body: dict[str, Any]


def decode_envelope(frames: Sequence[bytes | memoryview]) -> Envelope:
    """Return the envelope of a multipart.

    Raises:
        ProtocolError: Sizes, kind or fields are not those of the contract.
    """
    if not frames:
        raise ProtocolError("empty multipart")
    total = sum(len(frame) for frame in frames[1:])
    if total > FRAMES_BYTES_MAX:
        raise ProtocolError(f"frames of {total} bytes exceed {FRAMES_BYTES_MAX}")
    try:
        header = decode_plain(_Header, unpack_map(frames[0], bytes_max=HEADER_BYTES_MAX), "header")
        kind = KINDS.get(header.kind)
        if kind is None:
            raise ProtocolError(f"message kind {header.kind!r} is unknown")
        message = decode_plain(kind, header.body, header.kind)
    except ConfigError as error:
        raise ProtocolError(error.message) from error
    return Envelope(
        header.job,
        header.generation,
        header.term,
        header.sequence,
        message,
        tuple(bytes(frame) for frame in frames[1:]),
    )


def decode_parts(
    message: PlansMade, frames: Sequence[bytes]
) -> list[tuple[StepPlan, tuple[Export, ...]]]:
    """Return the plans of a message, or a node's parts of them, with what it has to give.

    Raises:
        ProtocolError: Headers, counts and frames do not belong together.
    """
    found: list[tuple[StepPlan, tuple[Export, ...]]] = []
    at = 0
    for number, (header, count) in enumerate(zip(message.headers, message.counts, strict=True)):
        own = list(frames[at : at + count])
        at += count
        exports: tuple[Export, ...] = ()
        if message.exports:
            if len(own) <= DELTA_FRAME + 1 or number >= len(message.exports):
                raise ProtocolError(f"a node's part of a plan has {len(own)} frames")
            exports = decode_exports(message.exports[number], own.pop())
            own[DELTA_FRAME] = unpack_delta(own[DELTA_FRAME])
        found.append((StepPlan.decode(header, own), exports))
    return found


def pack_delta(delta: bytes) -> bytes:
    """Return a state's difference as it travels between nodes: a tenth of its size."""
    return zlib.compress(delta, 1)


def unpack_delta(packed: bytes) -> bytes:
    """Return a state's difference as it was packed.

    Raises:
        ProtocolError: It is not one, or too large.
    """
    stream = zlib.decompressobj()
    try:
        delta = stream.decompress(packed, FRAMES_BYTES_MAX)
    except zlib.error as error:
        raise ProtocolError(f"a state's difference is not packed: {error}") from error
    if not stream.eof or stream.unused_data:
        raise ProtocolError(f"a packed difference of {len(packed)} bytes is cut, or too large")
    return delta


def encode_chunks(metas: Sequence[ChunkMeta]) -> tuple[ChunksPublished, tuple[bytes, ...]]:
    """Return message and frames that carry these chunks' metadata."""
    rows: list[list[Any]] = [
        [
            meta.source_index,
            meta.block_key,
            meta.first_index,
            len(meta.lengths),
            meta.is_block_end,
            meta.window_blocks,
            meta.is_lane_end,
            meta.fault,
            NO_MARKS if meta.marks is None else len(meta.marks.table),
        ]
        for meta in metas
    ]
    frames = [
        b"".join(meta.lengths.astype("<i4", copy=False).tobytes() for meta in metas),
        b"".join(meta.status.tobytes() for meta in metas),
    ]
    marked = [meta.marks for meta in metas if meta.marks is not None]
    if marked:
        frames += [
            b"".join(part.astype("<i4", copy=False).tobytes() for part in columns)
            for columns in ([it.counts for it in marked], [it.table for it in marked])
        ]
    return ChunksPublished(rows), tuple(frames)


def decode_chunks(message: ChunksPublished, frames: Sequence[bytes]) -> list[ChunkMeta]:
    """Return the metadata of the chunks of a message.

    What marks say is left to the planner, who knows the job (federation.planning.run_marks).

    Raises:
        ProtocolError: Rows and frames do not belong together.
    """
    try:
        lengths_frame, status_frame, *marks_frames = frames
        lengths, status = _Column(lengths_frame, "<i4"), _Column(status_frame, "u1")
        counts_frame, table_frame = marks_frames or (b"", b"")
        counts, table = _Column(counts_frame, "<i4"), _Column(table_frame, "<i4")
        metas = []
        for (
            source,
            block_key,
            first,
            records,
            is_end,
            window_blocks,
            is_lane_end,
            fault,
            marks_count,
        ) in message.chunks:
            marks = None
            if marks_count != NO_MARKS:
                marks = Marks(counts.take(records), table.take(4 * marks_count).reshape(-1, 4))
            metas.append(
                ChunkMeta(
                    source,
                    block_key,
                    first,
                    lengths.take(records),
                    status.take(records),
                    is_end,
                    window_blocks,
                    is_lane_end,
                    fault,
                    marks,
                )
            )
    except (ValueError, TypeError) as error:
        raise ProtocolError(f"chunk metadata is malformed: {error}") from error
    for name, column in (
        ("records", lengths), ("records", status), ("records with marks", counts), ("marks", table)
    ):  # fmt: skip
        if column.rest:
            raise ProtocolError(f"chunk rows list fewer {name} than frames: {column.rest} are left")
    return metas


class _Column:
    """Values of a frame, taken chunk by chunk."""

    def __init__(self, data: bytes, dtype: str) -> None:
        self._values: npt.NDArray[Any] = np.frombuffer(data, dtype)
        self._at = 0

    @property
    def rest(self) -> int:
        """Values that nobody took."""
        return len(self._values) - self._at

    def take(self, count: int) -> npt.NDArray[Any]:
        """Return the next values.

        Raises:
            ValueError: There are not so many.
        """
        if not 0 <= count <= self.rest:
            raise ValueError(f"{count} values are listed, {self.rest} are left")
        self._at += count
        return self._values[self._at - count : self._at]
