"""What names a bad record: its shard, its place in it, its key, and what is wrong with it."""

from __future__ import annotations

from dataclasses import dataclass

KEY_SHOWN_MAX = 200


@dataclass(frozen=True, slots=True)
class BadRecord:
    """One record that is no sample though it was to be one."""

    text: str
    """What is wrong, for people; names shard and place too."""
    shard: str = ""
    """Path of its shard."""
    place_name: str = "record"
    """What `place` counts."""
    place: int = -1
    """Where it begins in its shard: a byte offset, a row, a document."""
    key: str = ""
    """What names it, as far as that is text; empty where nothing does."""


Numbered = list[tuple[int, BadRecord]]
"""(number of the record in its run, record), ascending."""


def shown_key(key: bytes | None) -> str:
    """Return a record's key for people."""
    return "" if not key else key[:KEY_SHOWN_MAX].decode("utf-8", "replace")
