"""Reads a job's journal beside the planner that writes it, or long after: any kept step's state.

Opened read-only; SQLite's WAL lets one write while others read. The state before a step follows from
the newest snapshot at or before it and the differences up to it, so the time does not grow with the
run's length.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from federation.journal import SCHEMA_VERSION
from federation.model.job import ResolvedJob, decode_job
from federation.model.place_tree import ClientPlaceTree
from federation.planning.calibrator import EVENT_KIND as CALIBRATION
from federation.stream_events import REWIND
from msd_client.contract.codec import unpack_map
from msd_client.contract.errors import (
    JournalDamagedError,
    JournalUnavailableError,
    MsdError,
    NotFoundError,
    ProtocolError,
    ResourceError,
    StateMismatchError,
)
from msd_client.contract.state import StateDelta, StreamState

PAGE_STEPS = 256


class KeptSteps(NamedTuple):
    """A generation and the steps of it that can be planned again."""

    generation: int
    first: int
    """Oldest kept step."""
    end: int
    """One behind the last planned step."""

    def __str__(self) -> str:
        steps = f"steps {self.first} to {self.end - 1}" if self.end > self.first else "no step"
        return f"generation {self.generation}: {steps}"


class DamagedRow(NamedTuple):
    """A row of the journal that can't be used."""

    generation: int
    step: int
    what: str


class JournalledStep(NamedTuple):
    """What the journal holds of a step."""

    step: int
    delta: StateDelta
    digest: str


class JournalledEvent(NamedTuple):
    """An event in the journal, in force from a plan step on."""

    number: int
    generation: int
    """That accepted it."""
    step: int
    kind: str
    body: bytes
    event_number: int
    """As states count; 0 of calibration."""
    dropped_by: str | None
    """Who dropped it since, for states that come back to before it."""


@dataclass(frozen=True)
class Generation:
    """What a generation was planned from."""

    number: int
    job: ResolvedJob
    tree: ClientPlaceTree
    calibrations: tuple[JournalledEvent, ...]
    """Events that changed where rows go, and no more; oldest first."""


class JournalReader:
    """One journal, open for reading; close it, or use it in a `with`.

    Args:
        path: Of the journal.

    Raises:
        JournalUnavailableError: It can't be opened.
        ResourceError: It is of another schema.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at_rest = False
        """True where no writer was there as it was opened: SQLite takes no lock then, and looks for
        no log, so what is read is looked at again where one came meanwhile."""
        self._seen = (0, 0)
        try:
            self._db = self._opened()
            row = self._db.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone()
        except (sqlite3.Error, OSError) as error:
            raise JournalUnavailableError(
                f"journal {path} can't be read: {error}; run this where the daemon runs, as the user "
                "whose job it is",
                path=str(path),
            ) from error
        if row is None or row[0] != str(SCHEMA_VERSION):
            self._db.close()
            raise ResourceError(
                f"journal {path} has schema {row and row[0]}, this release reads {SCHEMA_VERSION}: "
                "use the release that wrote it",
                path=str(path),
            )

    @property
    def path(self) -> Path:
        """Where it lies."""
        return self._path

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def kept(self) -> list[KeptSteps]:
        """Return all generations with what is kept of them, newest first."""
        rows = self._rows(
            "SELECT g.generation, g.first_step, "
            "(SELECT min(step) FROM steps s WHERE s.generation = g.generation), "
            "(SELECT max(step) FROM steps s WHERE s.generation = g.generation) "
            "FROM generations g ORDER BY g.generation DESC"
        )
        found = []
        for generation, first_step, oldest, newest in rows:
            if oldest is None:
                found.append(KeptSteps(generation, first_step, first_step))
                continue
            # Steps go one by one, snapshots later: what leads nowhere counts for nothing.
            ((snapshot,),) = self._rows(
                "SELECT min(step) FROM snapshots WHERE generation = ? AND step >= ?",
                generation,
                oldest,
            )
            first = newest + 1 if snapshot is None else snapshot
            found.append(KeptSteps(generation, first, max(first, newest + 1)))
        return found

    def holding(self, step: int, generation: int | None = None) -> KeptSteps:
        """Return the newest generation that holds a step, or the one that is named.

        Raises:
            NotFoundError: It is not planned yet, or not kept any more; what is kept is named.
        """
        kept = self.kept()
        for entry in kept:
            if entry.first <= step < entry.end and generation in (None, entry.generation):
                return entry
        shown = "; ".join(map(str, kept)) or "nothing"
        what = f"step {step}"
        if generation is not None:
            kept = [entry for entry in kept if entry.generation == generation]
            what += f" of generation {generation}"
        end = max((entry.end for entry in kept), default=0)
        fate = "is not planned yet" if kept and step >= end else "is not kept any more"
        if generation is not None and not kept:
            fate = "is of no generation that is kept"
        raise NotFoundError(
            f"{what} {fate}; the journal keeps {shown}: name a step of these",
            step=step,
            first=min((entry.first for entry in kept), default=0),
            end=end,
        )

    def newest_job(self) -> tuple[str, str]:
        """Return the name and digest of the job that the newest generation was planned from.

        Raises:
            NotFoundError: No generation was begun.
            JournalDamagedError: It is damaged.
        """
        rows = self._rows(
            "SELECT body, digest FROM generations JOIN jobs ON digest = job_digest "
            "ORDER BY generation DESC LIMIT 1"
        )
        if not rows:
            raise NotFoundError(f"{self._path} holds no generation yet")
        try:
            return str(unpack_map(zlib.decompress(rows[0][0]))["name"]), str(rows[0][1])
        except (MsdError, zlib.error, KeyError) as error:
            raise self._damaged("its job", error) from error

    def generation(self, number: int) -> Generation:
        """Return what a generation was planned from.

        Raises:
            NotFoundError: It is not kept.
            JournalDamagedError: What is kept of it is damaged.
        """
        rows = self._rows(
            "SELECT mesh, body FROM generations JOIN jobs ON digest = job_digest "
            "WHERE generation = ?",
            number,
        )
        if not rows:
            raise NotFoundError(f"generation {number} is not in {self._path}", generation=number)
        mesh, body = rows[0]
        try:
            job = decode_job(unpack_map(zlib.decompress(body)))
            tree = ClientPlaceTree.from_mesh(dict(unpack_map(mesh)["mesh"]))
        except (MsdError, zlib.error, KeyError, TypeError, ValueError) as error:
            raise self._damaged(f"job of generation {number}", error) from error
        fits = tuple(it for it in self._events(number) if it.kind == CALIBRATION)
        return Generation(number, job, tree, fits)

    def accepted(
        self, generation: int, after: int, up_to: int, *, with_dropped: bool = False
    ) -> list[JournalledEvent]:
        """Return the events of the stream, oldest first, by which a generation went between two states.

        Those that it accepted itself, and those of generations before it that held again as it began:
        all but what had been dropped by then. Of a rewind the journal says when that was; of
        `forget_events_after` it does not, these count as dropped unless `with_dropped`.

        Args:
            generation: Whose.
            after: Event number of the state before.
            up_to: Event number of the state behind.
            with_dropped: Take also what may have been dropped before.
        """
        events = [it for it in self._events(generation, is_own=False) if it.event_number]
        by_number = {
            it.event_number: it for it in events
        }  # later rows: numbers begin anew at times
        rewinds = [it for it in events if it.kind == REWIND]
        found = []
        for event in by_number.values():
            if not after < event.event_number <= up_to:
                continue
            is_own = event.generation == generation or event.dropped_by is None
            if is_own or with_dropped or not _was_dropped(event, rewinds):
                found.append(event)
        return sorted(found, key=lambda event: event.event_number)

    def _events(self, generation: int, *, is_own: bool = True) -> list[JournalledEvent]:
        """Return the events that were accepted in a generation, or up to it, by row."""
        known = {row[1] for row in self._rows("PRAGMA table_info(events)")}
        numbered = "event_number, dropped_by" if "event_number" in known else "0, NULL"
        rows = self._rows(
            f"SELECT number, generation, step, kind, body, {numbered} FROM events "  # noqa: S608
            f"WHERE generation {'=' if is_own else '<='} ? ORDER BY number",
            generation,
        )
        return [JournalledEvent(*row) for row in rows]

    def state_before(self, step: int, generation: int) -> StreamState:
        """Return the state from which a step follows; `step` may be the one behind the last.

        Raises:
            NotFoundError: The journal keeps no way to it.
            JournalDamagedError: A row on that way is damaged; it is named.
        """
        rows = self._rows(
            "SELECT step, state FROM snapshots WHERE generation = ? AND step <= ? "
            "ORDER BY step DESC LIMIT 1",
            generation,
            step,
        )
        if not rows:
            self.holding(step, generation)
            raise NotFoundError(f"the journal has no snapshot before step {step}", step=step)
        at, body = rows[0]
        try:
            state = StreamState.decode(bytes(body))
        except StateMismatchError as error:
            raise self._damaged(f"snapshot of step {at}, generation {generation}", error) from error
        for journalled in self.steps(at, step, generation):
            state = self.follow(state, journalled, generation)
        if state.step != step:
            raise NotFoundError(
                f"the journal lacks step {state.step} of generation {generation}, so step {step} "
                "can't be planned again: name another generation or a later step",
                step=state.step,
            )
        return state

    def follow(
        self, state: StreamState, journalled: JournalledStep, generation: int
    ) -> StreamState:
        """Return the state after a step.

        Raises:
            JournalDamagedError: The row does not fit the state before it.
        """
        if journalled.step != state.step:
            return state
        try:
            return state.apply(journalled.delta)
        except MsdError as error:
            raise self._damaged(
                f"step {journalled.step}, generation {generation}", error
            ) from error

    def steps(self, first: int, end: int, generation: int) -> Iterator[JournalledStep]:
        """Yield what is journalled of the steps [first, end), in order.

        Raises:
            JournalDamagedError: A row is damaged.
        """
        for page in range(first, end, PAGE_STEPS):
            # A page at a time: a read that is open for long keeps the writer's log from being cut.
            for step, delta, digest in self._rows(
                "SELECT step, delta, digest FROM steps WHERE generation = ? AND step >= ? "
                "AND step < ? ORDER BY step",
                generation,
                page,
                min(page + PAGE_STEPS, end),
            ):
                try:
                    yield _journalled(step, delta, digest)
                except (MsdError, TypeError) as error:
                    raise self._damaged(f"step {step}, generation {generation}", error) from error

    def damage(self, first: int, end: int, generation: int) -> Iterator[DamagedRow]:
        """Yield what is damaged of the rows that the steps [first, end) follow from.

        Snapshots from the last one before them on, and the differences behind it; steps that lack.
        """
        rows = self._rows(
            "SELECT step, state FROM snapshots WHERE generation = ? AND step < ? AND step >= "
            "(SELECT max(step) FROM snapshots WHERE generation = ? AND step <= ?) ORDER BY step",
            generation,
            end,
            generation,
            first,
        )
        at = first
        for number, (step, state) in enumerate(rows):
            at = step if number == 0 else at
            try:
                StreamState.decode(bytes(state))
            except (MsdError, TypeError) as error:
                yield DamagedRow(generation, step, f"snapshot before step {step}: {error}")
        for step, delta, digest in self._rows(
            "SELECT step, delta, digest FROM steps WHERE generation = ? AND step >= ? AND step < ? "
            "ORDER BY step",
            generation,
            at,
            end,
        ):
            for missing in range(at, step):
                yield DamagedRow(generation, missing, f"step {missing} is missing")
            at = step + 1
            try:
                _journalled(step, delta, digest)
            except (MsdError, TypeError) as error:
                yield DamagedRow(generation, step, f"step {step}: {error}")

    def snapshots(self, generation: int) -> list[int]:
        """Return the steps that have a snapshot of the state before them, ascending."""
        return [
            int(step)
            for (step,) in self._rows(
                "SELECT step FROM snapshots WHERE generation = ? ORDER BY step", generation
            )
        ]

    def next_snapshot(self, step: int, generation: int) -> int | None:
        """Return the step of the first snapshot behind a step, None where there is none."""
        ((found,),) = self._rows(
            "SELECT min(step) FROM snapshots WHERE generation = ? AND step > ?", generation, step
        )
        return None if found is None else int(found)

    def _damaged(self, what: str, error: Exception) -> JournalDamagedError:
        return JournalDamagedError(
            f"journal {self._path}: {what} is damaged: {error}; steps behind the next snapshot and "
            "before it can still be read",
            path=str(self._path),
        )

    def _opened(self) -> sqlite3.Connection:
        """Return a connection that leaves no file beside a journal that nobody writes."""
        if not self._path.is_file():
            raise FileNotFoundError(f"{self._path} is not there")
        uri = self._path.resolve().as_uri()
        self._seen = self._stamp()
        log = self._path.with_name(self._path.name + "-wal")
        if log.exists():
            return sqlite3.connect(f"{uri}?mode=ro", uri=True, timeout=5.0)
        self._at_rest = True
        return sqlite3.connect(f"{uri}?mode=ro&immutable=1", uri=True)

    def _stamp(self) -> tuple[int, int]:
        status = self._path.stat()
        return status.st_mtime_ns, status.st_size

    def _is_written_now(self) -> bool:
        """True where a planner opened a journal that was read as one at rest."""
        log = self._path.with_name(self._path.name + "-wal")
        return self._at_rest and (log.exists() or self._stamp() != self._seen)

    def _rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        try:
            try:
                rows = self._db.execute(sql, values).fetchall()
            except sqlite3.Error:
                if not self._is_written_now():
                    raise
            else:
                if not self._is_written_now():
                    return rows
            self._db.close()
            self._at_rest = False
            self._db = self._opened()
            return self._db.execute(sql, values).fetchall()
        except (sqlite3.Error, OSError) as error:
            raise self._damaged("a table", error) from error


def _journalled(step: int, delta: bytes, digest: str) -> JournalledStep:
    """Return a row of a step.

    Raises:
        ProtocolError: It is damaged, or contradicts itself.
    """
    decoded = StateDelta.decode(bytes(delta))
    if decoded.step != step + 1 or decoded.stream_digest.hex() != digest:
        raise ProtocolError(
            f"its difference leads to step {decoded.step}, digest {decoded.stream_digest.hex()}; the "
            f"row says step {step + 1}, digest {digest}"
        )
    return JournalledStep(step, decoded, digest)


def _was_dropped(event: JournalledEvent, rewinds: list[JournalledEvent]) -> bool:
    """Return True where an event was dropped by a rewind among these, or by none that is known."""
    for rewind in rewinds:
        step = int(unpack_map(rewind.body)["step"])
        if rewind.number > event.number and event.dropped_by == f"rewind to {step}":
            return True
    return not (event.dropped_by or "").startswith("rewind to ")
