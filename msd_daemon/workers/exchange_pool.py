"""A job's pool as the exchange process has it: mapped, with the shapes of its fields and media."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import NamedTuple

from federation.exchange_messages import ParcelTable
from msd_daemon.gather import send_spans, store_bytes
from msd_daemon.shm.fragment_columns import FragmentColumns
from msd_daemon.shm.mapping import map_read_write
from msd_daemon.shm.parcel_layout import ParcelLayout, check_parcel, lay_out


class FieldShape(NamedTuple):
    """A field of the job, as chunks have it."""

    per: str
    """token, or else one value per record."""
    dtype: str


class MediaShape(NamedTuple):
    """A media rule of the job, as chunks have it."""

    unit_values: int
    unit_dtype: str


class PooledFrame:
    """The bytes of a parcel from `begin` to before `end`, where they lie; see `data_links.FrameSource`."""

    def __init__(self, pool: memoryview, layout: ParcelLayout, begin: int, end: int) -> None:
        self._pool = pool
        self._layout = layout
        self._begin = begin
        self._end = end
        lying = layout.lying
        first = int(lying.target.searchsorted(begin, "right")) - 1
        last = int(lying.target.searchsorted(end, "left"))
        self._sources = lying.source[first:last]
        self._nbytes = lying.nbytes[first:last]
        self._skipped = begin - int(lying.target[first])
        """Bytes of the first piece that belong to the frame before."""

    def __len__(self) -> int:
        return self._end - self._begin

    @property
    def pieces(self) -> int:
        """In how many pieces they lie."""
        return len(self._sources)

    def send(self, sock: socket.socket, head: bytes | memoryview, done: int) -> int:
        """See FrameSource."""
        return send_spans(
            sock,
            head,
            self._pool,
            self._layout.own,
            self._sources,
            self._nbytes,
            self._skipped + done,
            len(self) - done,
        )

    def copy(self, done: int, out: memoryview) -> None:
        """See FrameSource."""
        self._layout.gather(self._pool, self._begin + done, out)


class ExchangePool:
    """One mapped pool.

    Args:
        fd: Of its segment; closed here.
        nbytes: Of the pool.
        fields: The job's, in its order.
        media: The job's rules, in their order.

    Raises:
        SegmentUnavailableError: It cannot be mapped.
    """

    def __init__(
        self, fd: int, nbytes: int, fields: Sequence[FieldShape], media: Sequence[MediaShape]
    ) -> None:
        try:
            # On huge pages fragments from all over a pool are gathered a sixth faster.
            self._mapping = map_read_write(fd, nbytes)
        finally:
            os.close(fd)
        self._view = self._mapping.view
        self._fields = fields
        self._media = media

    def holds(self, offset_bytes: int, size_bytes: int) -> bool:
        """Return whether a piece lies in the pool."""
        return 0 <= offset_bytes <= offset_bytes + size_bytes <= len(self._view)

    def lay_out(self, fragments: FragmentColumns, *, has_units: bool) -> ParcelLayout:
        """Return the layout of a parcel of these fragments; see `parcel_layout.lay_out`."""
        return lay_out(self._view, fragments, self._fields, self._media, has_units=has_units)

    def gather(self, layout: ParcelLayout, begin: int, out: memoryview) -> None:
        """Write the bytes of a parcel from `begin` on into `out`."""
        layout.gather(self._view, begin, out)

    def frame(self, layout: ParcelLayout, begin: int, end: int) -> PooledFrame:
        """Return a data frame as it lies in the pool."""
        return PooledFrame(self._view, layout, begin, end)

    def room(self, place: int, size_bytes: int) -> memoryview:
        """Return a piece of the pool to be written."""
        return self._view[place : place + size_bytes]

    def write(self, place: int, data: memoryview) -> None:
        """Copy received bytes into the pool."""
        store_bytes(data, self._view[place : place + len(data)])

    def check(self, offset_bytes: int, size_bytes: int, table: ParcelTable) -> None:
        """Refuse a received parcel that is none; see `parcel_layout.check_parcel`."""
        parcel = self._view[offset_bytes : offset_bytes + size_bytes]
        check_parcel(parcel, table, self._fields, self._media)

    def close(self) -> None:
        """Unmap it."""
        del self._view
        self._mapping.close()
