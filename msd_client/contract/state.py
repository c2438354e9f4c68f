"""The state of a stream after a step, and the difference that one step makes.

`StreamState` after step t describes step t+1. It names records by their position in the order of
their source and holds no mesh, node, loader or chunk: `state_dict()` is its `encode()`. A
`StateDelta` travels with each step; applying the deltas in turn gives the planner's own state,
byte for byte (DESIGN.md section 4). A state says what its columns are called, so that a later
release can add some and still read it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from msd_client.contract.errors import MsdError, ProtocolError, StateMismatchError
from msd_client.contract.narrow import pack_columns, unpack_columns
from msd_client.contract.position import BLOCK_BITS, WINDOW_BITS

Int64Array = npt.NDArray[np.int64]

PROGRESS_COLUMNS = (
    "cursor_block_key",  # block of the last drawn record (see msd_client.contract.position)
    "cursor_index",  # its index in the block's order
    "cursor_offset",  # tokens of it drawn so far; 0 only where nothing was drawn yet
    "record_order",  # records of the source before it, over all epochs, bad ones included
    "lanes_ended",  # streaming: bit k set = lane k gave its last block before the cursor
    "is_exhausted",  # 1 = left the mixture for good
    "drawn_tokens",
    "drawn_samples",
    "delivered_tokens",  # placed in rows of served steps
    "delivered_samples",  # counted at a sample's first token
    "valid_tokens",  # labels other than the ignore label
)
DROPPED_COLUMNS = (
    "empty",
    "held_out",
    "bad_syntax",
    "bad_encoding",
    "field_missing",
    "too_large",
    "unreadable",
    "long_skipped",
    "long_truncated",  # samples that lost their tail, not lost themselves
    "no_label",  # fragments of one token that were left at the end of a stream: nothing to train
    "dropped_tokens",  # of long_skipped, long_truncated and no_label
)
CARRIED_COLUMNS = ("source", "block_key", "index", "offset", "length", "drawn_step")

CURSOR_BLOCK_KEY, CURSOR_INDEX, CURSOR_OFFSET, RECORD_ORDER, LANES_ENDED = range(5)
IS_EXHAUSTED, DRAWN_TOKENS, DRAWN_SAMPLES, DELIVERED_TOKENS, DELIVERED_SAMPLES = range(5, 10)
VALID_TOKENS = 10
DROPPED_TOKENS = len(DROPPED_COLUMNS) - 1

_MAGIC_STATE = b"MSDSTATE"
_MAGIC_DELTA = b"MSDDELTA"
_FORMAT = 1
_CHECKSUM_BYTES = 16
_HEAD_BYTES = 8 + 2 + _CHECKSUM_BYTES
_STATE_BYTES_MAX = 64 << 20


@dataclass(frozen=True, eq=False)
class StreamState:
    """Where a stream stands: the next step and all that later steps are a function of.

    Arrays are int64, read as constants; S is the number of sources.
    """

    stream_version: int
    job_digest: str
    """Of the job that goes on with it; a difference in the shape of steps alone may be adopted."""
    sample_digest: str
    """`part:digest,...` of all that the sequence of samples is a function of: it never changes."""
    step: int
    """The step that will be planned next."""
    event_number: int
    """Events accepted so far."""
    source_names: tuple[str, ...]
    progress: Int64Array
    """Shape (PROGRESS_COLUMNS, S)."""
    dropped: Int64Array
    """Records and tokens passed over, by reason. Shape (DROPPED_COLUMNS, S)."""
    shares: Int64Array
    """Integer weights in force; 0 is never drawn. Shape (S,)."""
    schedule_index: int
    """Points of the job's schedule that already took effect."""
    accumulators: Int64Array
    """Virtual times of the draw rule, one per branch of its share tree. Shape (branches,)."""
    pending_steps: Int64Array
    """Accepted mixture changes that have yet to take effect: their steps. Shape (k,)."""
    pending_shares: Int64Array
    """Their integer weights. Shape (k, S)."""
    carried: Int64Array
    """Drawn fragments that no row holds yet, oldest first. Shape (CARRIED_COLUMNS, n)."""
    faults: Int64Array
    """Faults inside the error window: source and record order. Shape (2, m)."""
    ending: str
    """Why nothing is drawn any more, or empty."""
    stream_digest: bytes
    """sha256 chained over the membership of all steps so far. 32 bytes."""

    @staticmethod
    def initial(
        job_digest: str,
        source_names: tuple[str, ...],
        stream_version: int = 1,
        *,
        sample_digest: str,
    ) -> StreamState:
        """Return the state before the first step of a job."""
        count = len(source_names)
        return StreamState(
            stream_version=stream_version,
            job_digest=job_digest,
            sample_digest=sample_digest,
            step=0,
            event_number=0,
            source_names=source_names,
            progress=np.zeros((len(PROGRESS_COLUMNS), count), np.int64),
            dropped=np.zeros((len(DROPPED_COLUMNS), count), np.int64),
            shares=np.zeros(count, np.int64),
            schedule_index=0,
            accumulators=np.zeros(0, np.int64),
            pending_steps=np.zeros(0, np.int64),
            pending_shares=np.zeros((0, count), np.int64),
            carried=np.zeros((len(CARRIED_COLUMNS), 0), np.int64),
            faults=np.zeros((2, 0), np.int64),
            ending="",
            stream_digest=bytes(32),
        )

    @property
    def cursor_block_key(self) -> Int64Array:
        """Block to seek to, per source. Shape (S,)."""
        return self._column(CURSOR_BLOCK_KEY)

    @property
    def cursor_index(self) -> Int64Array:
        """Record of that block to seek to, per source. Shape (S,).

        It names the last drawn record itself, which always exists: a loader that seeks there
        sends it again and the planner passes over the part that was drawn.
        """
        return self._column(CURSOR_INDEX)

    @property
    def cursor_offset(self) -> Int64Array:
        """Tokens of the cursor's record that were drawn, per source. Shape (S,)."""
        return self._column(CURSOR_OFFSET)

    @property
    def epoch(self) -> Int64Array:
        """Pass that each source is in, from 0. Shape (S,)."""
        return self._column(CURSOR_BLOCK_KEY) >> (WINDOW_BITS + BLOCK_BITS)

    def _column(self, number: int) -> Int64Array:
        column: Int64Array = self.progress[number]
        return column

    def check_job(self, stream_version: int, sample_digest: str) -> None:
        """Refuse a state of another stream version or of other samples.

        A job that differs in the shape of its steps alone has the same samples; see `adopt`.

        Raises:
            StateMismatchError: Version or digest differ; both values are named.
        """
        if self.stream_version != stream_version:
            raise StateMismatchError(
                f"the state is of stream version {self.stream_version}, this daemon plans version "
                f"{stream_version}; use the release that wrote it or start a new stream",
                seen=self.stream_version,
                limit=stream_version,
            )
        if self.sample_digest != sample_digest:
            differing = _differing_parts(self.sample_digest, sample_digest)
            raise StateMismatchError(
                f"the state belongs to another job: {differing} differ; load it into the job that "
                "wrote it, or start a new stream (the shape of steps, ends, labels, fields and error "
                "policies may change)",
                differing=differing,
            )

    def adopt(self, job_digest: str) -> StreamState:
        """Return the state as one of another job of the same samples: steps of another shape."""
        return self if self.job_digest == job_digest else replace(self, job_digest=job_digest)

    def apply(self, delta: StateDelta) -> StreamState:
        """Return the state after the next step, whose delta this is.

        Raises:
            ProtocolError: The delta is not of this state's step, or names what the state lacks.
        """
        if delta.step != self.step + 1:
            raise ProtocolError(
                f"a delta to step {delta.step} cannot follow a state at step {self.step}",
                seen=delta.step,
                limit=self.step + 1,
            )
        progress, dropped = self.progress, self.dropped
        keep = np.ones(self.carried.shape[1], bool)
        try:
            if len(delta.changed):
                progress = progress.copy()
                progress[:, delta.changed] = delta.progress
            if len(delta.dropped_changed):
                dropped = dropped.copy()
                dropped[:, delta.dropped_changed] = delta.dropped
            keep[delta.carried_out] = False
        except IndexError as error:
            raise ProtocolError(f"the delta names what the state lacks: {error}") from error
        return replace(
            self,
            step=delta.step,
            event_number=delta.event_number,
            progress=progress,
            dropped=dropped,
            shares=_newer(delta.shares, self.shares),
            schedule_index=delta.schedule_index,
            accumulators=delta.accumulators,
            pending_steps=_newer(delta.pending_steps, self.pending_steps),
            pending_shares=_newer(delta.pending_shares, self.pending_shares),
            carried=np.concatenate((self.carried[:, keep], delta.carried_in), axis=1),
            faults=_newer(delta.faults, self.faults),
            ending=delta.ending,
            stream_digest=delta.stream_digest,
        )

    def encode(self) -> bytes:
        """Return the state as bytes: framed msgpack of little-endian columns, checksummed."""
        body = {
            "stream": self.stream_version,
            "job": self.job_digest,
            "samples": self.sample_digest,
            "step": self.step,
            "event": self.event_number,
            "sources": list(self.source_names),
            "progress_columns": list(PROGRESS_COLUMNS),
            "progress": _raw(self.progress),
            "dropped_columns": list(DROPPED_COLUMNS),
            "dropped": _raw(self.dropped),
            "shares": _raw(self.shares),
            "schedule": self.schedule_index,
            "accumulators": _raw(self.accumulators),
            "pending_steps": _raw(self.pending_steps),
            "pending_shares": _raw(self.pending_shares),
            "carried_count": self.carried.shape[1],
            "carried": pack_columns(self.carried),
            "faults": _raw(self.faults),
            "ending": self.ending,
            "digest": self.stream_digest,
        }
        return _frame(_MAGIC_STATE, body)

    @staticmethod
    def decode(data: bytes) -> StreamState:
        """Return the state that `encode` wrote.

        Raises:
            StateMismatchError: The bytes are no state, cut short, damaged, of a newer format, or
                count what this release does not know.
        """
        body = _open_frame(_MAGIC_STATE, data, StateMismatchError)
        try:
            names = tuple(str(name) for name in body["sources"])
            count = len(names)
            state = StreamState(
                stream_version=int(body["stream"]),
                job_digest=str(body["job"]),
                sample_digest=str(body["samples"]),
                step=int(body["step"]),
                event_number=int(body["event"]),
                source_names=names,
                progress=_named(body, "progress", PROGRESS_COLUMNS, count),
                dropped=_named(body, "dropped", DROPPED_COLUMNS, count),
                shares=_columns(body["shares"], 1, count)[0],
                schedule_index=int(body["schedule"]),
                accumulators=_columns(body["accumulators"], 1)[0],
                pending_steps=_columns(body["pending_steps"], 1)[0],
                pending_shares=_rows(body["pending_shares"], count),
                carried=unpack_columns(
                    body["carried"], len(CARRIED_COLUMNS), _count(body["carried_count"])
                ),
                faults=_columns(body["faults"], 2),
                ending=str(body["ending"]),
                stream_digest=bytes(body["digest"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise StateMismatchError(f"the state's fields do not fit: {error}") from error
        if len(state.pending_steps) != len(state.pending_shares) or len(state.stream_digest) != 32:
            raise StateMismatchError("the state's columns differ in length")
        return state


@dataclass(frozen=True, eq=False)
class StateDelta:
    """What one step changes; `StreamState.apply` gives the state after it."""

    step: int
    """The step that will be planned next after this one."""
    event_number: int
    changed: Int64Array
    """Sources whose progress changed. Shape (k,)."""
    progress: Int64Array
    """Their new values. Shape (PROGRESS_COLUMNS, k)."""
    dropped_changed: Int64Array
    """Sources whose dropped counts changed. Shape (m,)."""
    dropped: Int64Array
    """Their new values. Shape (DROPPED_COLUMNS, m)."""
    accumulators: Int64Array
    carried_out: Int64Array
    """Indices into the former carried columns of fragments that left. Shape (o,)."""
    carried_in: Int64Array
    """Fragments that joined, at the end. Shape (CARRIED_COLUMNS, i)."""
    stream_digest: bytes
    ending: str
    schedule_index: int
    shares: Int64Array | None = None
    """New integer weights, if they changed."""
    pending_steps: Int64Array | None = None
    """The pending changes, if they changed."""
    pending_shares: Int64Array | None = None
    faults: Int64Array | None = None
    """The error windows, if they changed."""

    def encode(self) -> bytes:
        """Return the delta as bytes, framed and checksummed as a state is."""
        body: dict[str, Any] = {
            "step": self.step,
            "event": self.event_number,
            "changed": _raw(self.changed),
            "progress": _raw(self.progress),
            "dropped_changed": _raw(self.dropped_changed),
            "dropped": _raw(self.dropped),
            "accumulators": _raw(self.accumulators),
            "carried_out": _raw(self.carried_out),
            "carried_in": _raw(self.carried_in),
            "digest": self.stream_digest,
            "ending": self.ending,
            "schedule": self.schedule_index,
        }
        if self.pending_shares is not None:
            body["sources"] = self.pending_shares.shape[1]
        for key in ("shares", "pending_steps", "pending_shares", "faults"):
            value = getattr(self, key)
            if value is not None:
                body[key] = _raw(value)
        return _frame(_MAGIC_DELTA, body)

    @staticmethod
    def decode(data: bytes) -> StateDelta:
        """Return the delta that `encode` wrote.

        Raises:
            ProtocolError: The bytes are no delta, cut short, damaged or of a newer format.
        """
        body = _open_frame(_MAGIC_DELTA, data, ProtocolError)
        try:
            changed = _columns(body["changed"], 1)[0]
            dropped_changed = _columns(body["dropped_changed"], 1)[0]
            return StateDelta(
                step=int(body["step"]),
                event_number=int(body["event"]),
                changed=changed,
                progress=_columns(body["progress"], len(PROGRESS_COLUMNS), len(changed)),
                dropped_changed=dropped_changed,
                dropped=_columns(body["dropped"], len(DROPPED_COLUMNS), len(dropped_changed)),
                accumulators=_columns(body["accumulators"], 1)[0],
                carried_out=_columns(body["carried_out"], 1)[0],
                carried_in=_columns(body["carried_in"], len(CARRIED_COLUMNS)),
                stream_digest=bytes(body["digest"]),
                ending=str(body["ending"]),
                schedule_index=int(body["schedule"]),
                shares=_optional(body, "shares"),
                pending_steps=_optional(body, "pending_steps"),
                pending_shares=_rows(body["pending_shares"], int(body["sources"]))
                if "pending_shares" in body
                else None,
                faults=_columns(body["faults"], 2) if "faults" in body else None,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"the delta's fields do not fit: {error}") from error


def _differing_parts(seen: str, wanted: str) -> str:
    """Return the parts of two sample digests (`part:digest,...`) that are not the same."""
    parts = [dict(item.rpartition(":")[::2] for item in text.split(",")) for text in (seen, wanted)]
    names = sorted(name for name in parts[0] | parts[1] if parts[0].get(name) != parts[1].get(name))
    shown = ", ".join(name or "samples" for name in names[:12])
    return shown + (f" and {len(names) - 12} more" if len(names) > 12 else "")


def _newer(changed: Int64Array | None, former: Int64Array) -> Int64Array:
    return former if changed is None else changed


def _raw(array: Int64Array) -> bytes:
    return array.astype("<i8", copy=False).tobytes()


def _columns(data: bytes, rows: int, columns: int | None = None) -> Int64Array:
    values = np.frombuffer(data, "<i8").astype(np.int64, copy=False)
    if columns is None:
        if len(values) % rows:
            raise ValueError(f"{len(values)} values do not make {rows} columns")
        columns = len(values) // rows
    return values.reshape(rows, columns)


def _named(body: dict[str, Any], key: str, names: tuple[str, ...], count: int) -> Int64Array:
    """Return the columns that this release knows, by name; those that the state lacks are 0.

    Raises:
        StateMismatchError: The state counts something that this release does not know.
    """
    theirs = [str(name) for name in body[f"{key}_columns"]]
    values = _columns(body[key], len(theirs), count)
    if theirs == list(names):
        return values
    found = np.zeros((len(names), count), np.int64)
    for name, column in zip(theirs, values, strict=True):
        if name in names:
            found[names.index(name)] = column
        elif column.any():
            raise StateMismatchError(
                f"the state's {key} column {name!r} is unknown to this release; use the release "
                "that wrote the state, or a later one",
                seen=name,
            )
    return found


def _count(value: object) -> int:
    if not isinstance(value, int) or not 0 <= value <= _STATE_BYTES_MAX:
        raise ValueError(f"{value!r} is no count")
    return value


def _rows(data: bytes, columns: int) -> Int64Array:
    values = np.frombuffer(data, "<i8").astype(np.int64, copy=False)
    return values.reshape(-1, columns) if columns else values.reshape(0, 0)


def _optional(body: dict[str, Any], key: str) -> Int64Array | None:
    return _columns(body[key], 1)[0] if key in body else None


def _frame(magic: bytes, body: dict[str, Any]) -> bytes:
    packed: bytes = msgpack.packb(body, use_bin_type=True)
    checksum = hashlib.blake2b(packed, digest_size=_CHECKSUM_BYTES).digest()
    return b"".join((magic, _FORMAT.to_bytes(2, "little"), checksum, packed))


def _open_frame(magic: bytes, data: bytes, error: type[MsdError]) -> dict[str, Any]:
    name = magic[3:].decode().lower()
    if len(data) < _HEAD_BYTES or bytes(data[:8]) != magic:
        raise error(f"these {len(data)} bytes are no msd {name}: the first bytes differ")
    if len(data) > _STATE_BYTES_MAX:
        raise error(f"a {name} of {len(data)} bytes exceeds {_STATE_BYTES_MAX}")
    form = int.from_bytes(data[8:10], "little")
    if form != _FORMAT:
        raise error(f"the {name} has format {form}, this release reads {_FORMAT}")
    packed = bytes(data[_HEAD_BYTES:])
    if hashlib.blake2b(packed, digest_size=_CHECKSUM_BYTES).digest() != bytes(data[10:_HEAD_BYTES]):
        raise error(f"the {name} is damaged or cut short: its checksum differs")
    try:
        body = msgpack.unpackb(packed, raw=False, strict_map_key=True)
    except (ValueError, msgpack.exceptions.UnpackException) as cause:
        raise error(f"the {name} is no msgpack map: {cause}") from cause
    if not isinstance(body, dict):
        raise error(f"the {name} is no msgpack map")
    return body
