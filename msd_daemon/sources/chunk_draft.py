"""A chunk before it has a place in the pool: columns and token arrays of a run of records."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from federation.model.chunk import ChunkMeta
from msd_daemon.shm.chunk_header import FLAG_BLOCK_END, FLAG_LANE_END
from msd_daemon.shm.chunk_layout import encode_chunk_columns, encoded_bytes
from msd_daemon.shm.field_layout import ValueArray
from msd_daemon.shm.media_layout import MediaColumn, media_blocks, media_sizes
from msd_daemon.sources.bad_record import Numbered

Tokens = npt.NDArray[np.int32] | npt.NDArray[np.uint16]
TokenDtype = np.dtype[np.uint16] | np.dtype[np.int32]


@dataclass
class ChunkDraft:
    """Records of one block, ready to be written into the pool once.

    The token arrays may be views of buffers that live as long as the draft.
    """

    meta: ChunkMeta
    dtype: TokenDtype
    """Of the tokens in the pool; the parts may be wider."""
    payload: list[Tokens] = field(default_factory=list)
    """Token arrays in the records' order; together as long as all lengths."""
    index: npt.NDArray[np.int32] | None = None
    """Index in the block of each record, where they are not consecutive (fetched ones)."""
    values: tuple[ValueArray, ...] = ()
    """Of each field of the job, per token or per record; none where the source carries none."""
    media: tuple[MediaColumn, ...] = ()
    """Of each media rule of the job; none where the source has no media."""
    bad: Numbered = field(default_factory=list)
    """Its bad records by their number in the chunk."""

    @property
    def payload_tokens(self) -> int:
        """Tokens of all records."""
        return int(self.meta.lengths.sum(dtype=np.int64))

    def encoded_bytes(self) -> int:
        """Return the bytes that `write_into` needs."""
        return encoded_bytes(
            len(self.meta.lengths),
            self.payload_tokens * self.dtype.itemsize,
            has_index=self.index is not None,
            blocks=[
                *(array.nbytes for array in self.values),
                *media_blocks(len(self.meta.lengths), media_sizes(self.media)),
            ],
        )

    def write_into(self, view: memoryview) -> None:
        """Write the chunk at the start of a view.

        Raises:
            ChunkCorruptError: The view is shorter than `encoded_bytes()`, or media do not add up.
        """
        meta = self.meta
        offsets = np.zeros(len(meta.lengths) + 1, dtype=np.int64)
        np.cumsum(meta.lengths, out=offsets[1:])
        flags = FLAG_BLOCK_END if meta.is_block_end else 0
        if meta.is_lane_end:
            flags |= FLAG_LANE_END
        payload = encode_chunk_columns(
            view,
            token_bytes=self.dtype.itemsize,
            source_index=meta.source_index,
            block_key=meta.block_key,
            first_index=meta.first_index,
            flags=flags,
            window_blocks=meta.window_blocks,
            offsets=offsets,
            status=meta.status,
            index=self.index,
            values=self.values,
            media=self.media,
        )
        if len(payload):
            target = np.frombuffer(payload, dtype=self.dtype)
            np.concatenate(self.payload, out=target, casting="unsafe")
