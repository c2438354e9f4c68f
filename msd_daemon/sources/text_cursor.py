"""A block of raw records, tokenized window by window."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from msd_daemon.sources.block_cursor import Places, RawWindow, WindowCursor
from msd_daemon.sources.encoded import EncodedRecords
from msd_daemon.sources.record_encoder import RecordEncoder


def text_cursor(
    windows: Iterator[RawWindow],
    window_order: Callable[[int, int], Places],
    encoder: RecordEncoder,
) -> WindowCursor[RawWindow]:
    """Return the cursor of a block of raw records.

    Args:
        windows: The block's windows; the last one says so.
        window_order: Gives the order of the records of a window: (window number, records).
        encoder: Turns records into tokens.
    """

    def encode(window: RawWindow, places: Places) -> EncodedRecords:
        return encoder.encode([window.records[place] for place in places.tolist()])

    return WindowCursor(windows, window_order, encode, encoder.dtype, encoder.fields)
