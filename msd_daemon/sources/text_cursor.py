"""A block of raw records, tokenized window by window."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, Self

import numpy as np

from federation.model.job import FieldRule
from msd_daemon.sources.block_cursor import Pace, Places, RawWindow, WindowCursor
from msd_daemon.sources.chunk_draft import TokenDtype
from msd_daemon.sources.encoded import EncodedRecords
from msd_daemon.sources.order import spread_groups
from msd_daemon.sources.record import RawRecord
from msd_daemon.sources.record_guard import ShardGuard


class Encoder(Protocol):
    """Turns raw records of a source into tokens."""

    @property
    def dtype(self) -> TokenDtype:
        """Of the tokens."""
        ...

    @property
    def fields(self) -> tuple[FieldRule, ...]:
        """User fields whose values the records carry."""
        ...

    @property
    def guard(self) -> ShardGuard:
        """Of the shard that the records lie in."""
        ...

    @property
    def encode_records_max(self) -> int | None:
        """Records that are encoded at once; None: a whole window."""
        ...

    @property
    def pace(self) -> Pace:
        """Of the source."""
        ...

    def at(self, path: str, place_name: str = "byte offset", key: int = 0, epoch: int = 0) -> Self:
        """Return the same encoder for the records of a block of a shard.

        Args:
            path: The shard's.
            place_name: What `RawRecord.place` counts.
            key: Of all that is drawn at random for records of the block.
            epoch: Of the block.
        """
        ...

    def encode(self, records: list[RawRecord]) -> EncodedRecords:
        """Return the records' tokens, in their order."""
        ...


def text_cursor(
    windows: Iterator[RawWindow],
    window_order: Callable[[int, int], Places],
    encoder: Encoder,
) -> WindowCursor[RawWindow]:
    """Return the cursor of a block of raw records.

    Args:
        windows: The block's windows; the last one says so.
        window_order: Gives the order of a window: (window number, records), or groups.
        encoder: Turns records into tokens.
    """

    def encode(window: RawWindow, places: Places) -> EncodedRecords:
        return encoder.encode([window.records[place] for place in places.tolist()])

    def order(number: int, window: RawWindow) -> Places:
        is_continuing = np.array([record.is_continuing for record in window.records], np.bool_)
        if not is_continuing.any():
            return window_order(number, window.count)
        is_continuing[0] = False  # the rest of a group that has windows of its own
        groups = window.count - int(np.count_nonzero(is_continuing))
        return spread_groups(window_order(number, groups), is_continuing)

    return WindowCursor(
        encoder.guard.reading(windows),
        order,
        encode,
        encoder.dtype,
        encoder.fields,
        encoder.encode_records_max,
        encoder.pace,
    )
