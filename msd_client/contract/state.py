"""The state of a stream after a step, and the difference that one step makes.

`StreamState` after step t describes step t+1. It names records by their position in the order of
their source and holds no mesh, node, loader or chunk: `state_dict()` is its `encode()`. A
`StateDelta` travels with each step; applying the deltas in turn gives the planner's own state,
byte for byte (DESIGN.md section 4). A state says what its columns are called, so that a later
release can add some and still read it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from msd_client.contract.errors import ProtocolError, StateMismatchError
from msd_client.contract.narrow import pack_columns, unpack_columns
from msd_client.contract.position import BLOCK_BITS, WINDOW_BITS
from msd_client.contract.skips import no_skips
from msd_client.contract.state_bytes import (
    checked_count,
    frame,
    int_columns,
    int_rows,
    named_columns,
    open_frame,
    optional_row,
    raw_bytes,
)
from msd_client.contract.step_numbers import STEP_MAX

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
    "no_label",  # fragments without a label that were left at the end of a stream
    "filtered",
    "excluded",
    "transformed_away",
    "untrained",
    "undecodable",
    "transform_failed",
    "quarantined",
    "skipped",  # samples that began in steps that were left out
    "dropped_tokens",  # of long_skipped, long_truncated, no_label and of steps that were left out
    "skipped_tokens",  # the last of these: schedules by tokens count them as placed
)
CARRIED_COLUMNS = ("source", "block_key", "index", "offset", "length", "drawn_step")
"""Of every job. Some jobs carry more of their fragments, see `StreamState.carried_columns`."""

CURSOR_BLOCK_KEY, CURSOR_INDEX, CURSOR_OFFSET, RECORD_ORDER, LANES_ENDED = range(5)
IS_EXHAUSTED, DRAWN_TOKENS, DRAWN_SAMPLES, DELIVERED_TOKENS, DELIVERED_SAMPLES = range(5, 10)
VALID_TOKENS = 10
DROPPED_TOKENS = DROPPED_COLUMNS.index("dropped_tokens")
SKIPPED_SAMPLES = DROPPED_COLUMNS.index("skipped")
SKIPPED_TOKENS = DROPPED_COLUMNS.index("skipped_tokens")

_SKIP_DROPPED = (SKIPPED_SAMPLES, SKIPPED_TOKENS)
_LATER_DROPPED = (*range(DROPPED_COLUMNS.index("filtered"), SKIPPED_SAMPLES), *_SKIP_DROPPED)
"""Columns that the first release had not: written only where one of them counts something, those of
skips only where there was a skip."""
_FIRST_DROPPED_COLUMNS = tuple(
    name for place, name in enumerate(DROPPED_COLUMNS) if place not in _LATER_DROPPED
)
_CARRIED_COLUMNS_MAX = 16
_MAGIC_STATE = b"MSDSTATE"
_MAGIC_DELTA = b"MSDDELTA"


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
    """Drawn fragments that no row holds yet, oldest first. Shape (carried_columns, n)."""
    faults: Int64Array
    """Faults inside the error window: source and record order; ~order of records without a trained
    token. Shape (2, m)."""
    ending: str
    """Why nothing is drawn any more, or empty."""
    stream_digest: bytes
    """sha256 chained over the membership of all steps so far. 32 bytes."""
    carried_columns: tuple[str, ...] = CARRIED_COLUMNS
    """Names of the columns of `carried`: CARRIED_COLUMNS, then those that the job has beside them
    (federation.planning.extra_rows). Where nothing is carried they say nothing and aren't written.
    """
    growth: Int64Array = field(default_factory=lambda: np.zeros((3, 0), np.int64))
    """Sources whose shards became more: source, pass, shards from that pass on, ascending; written
    only where there is one. Shape (3, g)."""
    skipped_steps: int = 0
    """Plan steps left out so far. Not written where it is 0."""
    pending_skips: Int64Array = field(default_factory=no_skips)
    """Plan steps that will be left out: first and end of each run, ascending and apart. Shape
    (k, 2). Not written where there is none."""

    @property
    def plan_step(self) -> int:
        """The plan step that will be planned next, to be served or to be left out."""
        return self.step + self.skipped_steps

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

    def cursor_places(self) -> list[list[int]]:
        """Return where loaders have to start, per source: [block key, index]."""
        places: list[list[int]] = self.progress[[CURSOR_BLOCK_KEY, CURSOR_INDEX]].T.tolist()
        return places

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
        self.check_version(stream_version)
        if self.sample_digest != sample_digest:
            differing = _differing_parts(self.sample_digest, sample_digest)
            raise StateMismatchError(
                f"the state belongs to another job: {differing} differ; load it into the job that "
                "wrote it, or start a new stream (the shape of steps, ends, labels, fields and error "
                "policies may change)",
                differing=differing,
            )

    def check_version(self, stream_version: int) -> None:
        """Refuse a state of another stream version.

        Raises:
            StateMismatchError: Both versions are named.
        """
        if self.stream_version != stream_version:
            raise StateMismatchError(
                f"the state is of stream version {self.stream_version}, this daemon plans version "
                f"{stream_version}; use the release that wrote it or start a new stream",
                seen=self.stream_version,
                limit=stream_version,
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
        carried, carried_columns = self.carried, self.carried_columns
        keep = np.ones(carried.shape[1], bool)
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
        carried = carried[:, keep]
        if delta.carried_in.shape[1]:
            if not carried.shape[1]:
                carried = np.zeros((len(delta.carried_columns), 0), np.int64)
                carried_columns = delta.carried_columns
            if carried_columns != delta.carried_columns:
                raise ProtocolError(
                    f"the delta carries {', '.join(delta.carried_columns)}, the state "
                    f"{', '.join(carried_columns)}"
                )
            carried = np.concatenate((carried, delta.carried_in), axis=1)
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
            carried=carried,
            carried_columns=carried_columns,
            faults=_newer(delta.faults, self.faults),
            ending=delta.ending,
            stream_digest=delta.stream_digest,
            skipped_steps=delta.skipped_steps,
            pending_skips=_newer(delta.pending_skips, self.pending_skips),
        )

    def encode(self) -> bytes:
        """Return the state as bytes: framed msgpack of little-endian columns, checksummed."""
        dropped_columns, dropped = _counted(self.dropped)
        carried = self.carried if self.carried.shape[1] else self.carried[: len(CARRIED_COLUMNS)]
        body = {
            "stream": self.stream_version,
            "job": self.job_digest,
            "samples": self.sample_digest,
            "step": self.step,
            "event": self.event_number,
            "sources": list(self.source_names),
            "progress_columns": list(PROGRESS_COLUMNS),
            "progress": raw_bytes(self.progress),
            "dropped_columns": list(dropped_columns),
            "dropped": raw_bytes(dropped),
            "shares": raw_bytes(self.shares),
            "schedule": self.schedule_index,
            "accumulators": raw_bytes(self.accumulators),
            "pending_steps": raw_bytes(self.pending_steps),
            "pending_shares": raw_bytes(self.pending_shares),
            "carried_count": carried.shape[1],
            "carried": pack_columns(carried),
            "faults": raw_bytes(self.faults),
            "ending": self.ending,
            "digest": self.stream_digest,
        }
        _name_carried(body, self.carried_columns, carried)
        if self.growth.shape[1]:
            body["growth"] = raw_bytes(self.growth)
        if self.skipped_steps:
            body["skipped_steps"] = self.skipped_steps
        if len(self.pending_skips):
            body["pending_skips"] = raw_bytes(self.pending_skips)
        return frame(_MAGIC_STATE, body)

    @staticmethod
    def decode(data: bytes) -> StreamState:
        """Return the state that `encode` wrote.

        Raises:
            StateMismatchError: The bytes are no state, cut short, damaged, of a newer format, or
                count what this release does not know.
        """
        body = open_frame(_MAGIC_STATE, data, StateMismatchError)
        try:
            names = tuple(str(name) for name in body["sources"])
            count = len(names)
            carried_columns = _carried_columns(body)
            state = StreamState(
                stream_version=int(body["stream"]),
                job_digest=str(body["job"]),
                sample_digest=str(body["samples"]),
                step=int(body["step"]),
                event_number=int(body["event"]),
                source_names=names,
                progress=named_columns(
                    body, "progress", PROGRESS_COLUMNS, count, StateMismatchError
                ),
                dropped=named_columns(body, "dropped", DROPPED_COLUMNS, count, StateMismatchError),
                carried_columns=carried_columns,
                shares=int_columns(body["shares"], 1, count)[0],
                schedule_index=int(body["schedule"]),
                accumulators=int_columns(body["accumulators"], 1)[0],
                pending_steps=int_columns(body["pending_steps"], 1)[0],
                pending_shares=int_rows(body["pending_shares"], count),
                carried=unpack_columns(
                    body["carried"], len(carried_columns), checked_count(body["carried_count"])
                ),
                faults=int_columns(body["faults"], 2),
                ending=str(body["ending"]),
                stream_digest=bytes(body["digest"]),
                growth=int_columns(body.get("growth", b""), 3),
                skipped_steps=int(body.get("skipped_steps", 0)),
                pending_skips=int_rows(body.get("pending_skips", b""), 2),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise StateMismatchError(f"the state's fields do not fit: {error}") from error
        for what in ("step", "skipped_steps", "event_number", "schedule_index"):
            if not 0 <= getattr(state, what) <= STEP_MAX:
                raise StateMismatchError(
                    f"the state's {what} is {getattr(state, what)}: it is from 0 to {STEP_MAX}"
                )
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
    """Fragments that joined, at the end. Shape (carried_columns, i)."""
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
    carried_columns: tuple[str, ...] = CARRIED_COLUMNS
    """Names of the columns of `carried_in`, as in a state; not written where nothing joined."""
    skipped_steps: int = 0
    """As in the state after it."""
    pending_skips: Int64Array | None = None
    """The pending skips, if they changed."""

    def cursors(self) -> list[tuple[int, int, int, int]]:
        """Return (source, block key, index, tokens drawn of that record) of sources that changed."""
        picked = self.progress[[CURSOR_BLOCK_KEY, CURSOR_INDEX, CURSOR_OFFSET]]
        return list(zip(self.changed.tolist(), *picked.tolist(), strict=True))

    def encode(self) -> bytes:
        """Return the delta as bytes, framed and checksummed as a state is."""
        dropped_columns, dropped = _counted(self.dropped)
        joined = self.carried_in
        joined = joined if joined.shape[1] else joined[: len(CARRIED_COLUMNS)]
        body: dict[str, Any] = {
            "step": self.step,
            "event": self.event_number,
            "changed": raw_bytes(self.changed),
            "progress": raw_bytes(self.progress),
            "dropped_changed": raw_bytes(self.dropped_changed),
            "dropped": raw_bytes(dropped),
            "accumulators": raw_bytes(self.accumulators),
            "carried_out": raw_bytes(self.carried_out),
            "carried_in": raw_bytes(joined),
            "digest": self.stream_digest,
            "ending": self.ending,
            "schedule": self.schedule_index,
        }
        if len(dropped_columns) > len(_FIRST_DROPPED_COLUMNS):
            body["dropped_columns"] = list(dropped_columns)
        _name_carried(body, self.carried_columns, joined)
        if self.pending_shares is not None:
            body["sources"] = self.pending_shares.shape[1]
        if self.skipped_steps:
            body["skipped_steps"] = self.skipped_steps
        for key in ("shares", "pending_steps", "pending_shares", "faults", "pending_skips"):
            value = getattr(self, key)
            if value is not None:
                body[key] = raw_bytes(value)
        return frame(_MAGIC_DELTA, body)

    @staticmethod
    def decode(data: bytes) -> StateDelta:
        """Return the delta that `encode` wrote.

        Raises:
            ProtocolError: The bytes are no delta, cut short, damaged or of a newer format.
        """
        body = open_frame(_MAGIC_DELTA, data, ProtocolError)
        try:
            changed = int_columns(body["changed"], 1)[0]
            dropped_changed = int_columns(body["dropped_changed"], 1)[0]
            carried_columns = _carried_columns(body)
            return StateDelta(
                step=int(body["step"]),
                event_number=int(body["event"]),
                changed=changed,
                progress=int_columns(body["progress"], len(PROGRESS_COLUMNS), len(changed)),
                dropped_changed=dropped_changed,
                dropped=named_columns(
                    {"dropped_columns": _FIRST_DROPPED_COLUMNS} | body,
                    "dropped",
                    DROPPED_COLUMNS,
                    len(dropped_changed),
                    ProtocolError,
                ),
                accumulators=int_columns(body["accumulators"], 1)[0],
                carried_out=int_columns(body["carried_out"], 1)[0],
                carried_in=int_columns(body["carried_in"], len(carried_columns)),
                carried_columns=carried_columns,
                stream_digest=bytes(body["digest"]),
                ending=str(body["ending"]),
                schedule_index=int(body["schedule"]),
                shares=optional_row(body, "shares"),
                pending_steps=optional_row(body, "pending_steps"),
                pending_shares=int_rows(body["pending_shares"], int(body["sources"]))
                if "pending_shares" in body
                else None,
                faults=int_columns(body["faults"], 2) if "faults" in body else None,
                skipped_steps=int(body.get("skipped_steps", 0)),
                pending_skips=int_rows(body["pending_skips"], 2)
                if "pending_skips" in body
                else None,
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


def _counted(dropped: Int64Array) -> tuple[tuple[str, ...], Int64Array]:
    """Return names and rows of the dropped columns that are written."""
    left_out: tuple[int, ...] = ()
    if not dropped[list(_LATER_DROPPED)].any():
        left_out = _LATER_DROPPED
    elif not dropped[list(_SKIP_DROPPED)].any():
        left_out = _SKIP_DROPPED
    names = tuple(name for place, name in enumerate(DROPPED_COLUMNS) if place not in left_out)
    return names, np.delete(dropped, left_out, axis=0) if left_out else dropped


def _name_carried(body: dict[str, Any], columns: tuple[str, ...], carried: Int64Array) -> None:
    if len(carried) > len(CARRIED_COLUMNS):
        body["carried_columns"] = list(columns[len(CARRIED_COLUMNS) :])


def _carried_columns(body: dict[str, Any]) -> tuple[str, ...]:
    names = [str(name) for name in body.get("carried_columns", ())]
    columns = (*CARRIED_COLUMNS, *names)
    if len(columns) > _CARRIED_COLUMNS_MAX or len(set(columns)) < len(columns):
        raise ValueError(f"{len(columns)} columns of carried fragments, or a name twice")
    return columns
