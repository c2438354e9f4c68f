"""Where the record begins that damage of a stream cost, told along with the error."""

from __future__ import annotations

from msd_client.contract.errors import CorruptRecordError

_NAME = "record_place"


def mark_place(error: CorruptRecordError | OSError, place: int) -> None:
    """Note where the record begins that an error of its stream cost; the first note stays."""
    error.__dict__.setdefault(_NAME, place)


def marked_place(error: CorruptRecordError | OSError) -> int | None:
    """Return what was noted, None where nothing was."""
    place: int | None = error.__dict__.get(_NAME)
    return place
