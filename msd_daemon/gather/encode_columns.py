"""Which media a microbatch's ranks encode, and who encodes those of its text. Pure columns, no payload.

A microbatch is the rows of one data-parallel group at one index. Where media may be encoded
anywhere, its ranks encode those of other groups' rows at the same index, and get embeddings for
their own placeholder tokens from other groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from msd_daemon.gather.segment_columns import SEGMENT_BYTES, SegmentColumns

_COUNT_BYTES = 8


@dataclass(frozen=True, slots=True)
class EncodeColumns:
    """Of one microbatch."""

    encode_dp: npt.NDArray[np.int32]
    """Group that encodes the media of each of the microbatch's own segments, -1 where it has none.
    Shape (modalities, segments)."""
    encoded: tuple[SegmentColumns, ...]
    """Of each modality the segments whose media are encoded here, sorted by (group, row, column) of
    their text: `row` is group * rows + row in that group's microbatch."""

    def encode(self) -> bytes:
        """Return the groups, then for each modality a count and its columns, little endian."""
        parts = [self.encode_dp.astype("<i4", copy=False).tobytes()]
        for columns in self.encoded:
            parts += [columns.count.to_bytes(_COUNT_BYTES, "little"), columns.encode()]
        return b"".join(parts)

    @classmethod
    def decode(
        cls, buffer: bytes | memoryview, segments: int, modalities: int, offset: int
    ) -> EncodeColumns:
        """Return views of what lies in `buffer` from byte `offset` on.

        Args:
            buffer: Of a task.
            segments: Segments of the microbatch.
            modalities: Of the job.
            offset: First byte.

        Raises:
            ValueError: The buffer is too short.
        """
        own_bytes = 4 * modalities * segments
        if offset + own_bytes > len(buffer):
            raise ValueError(
                f"encoding groups of {segments} segments need {own_bytes} bytes from {offset} on, "
                f"the task has {len(buffer)}"
            )
        encode_dp = np.frombuffer(buffer, "<i4", modalities * segments, offset)
        offset += own_bytes
        encoded = []
        for _ in range(modalities):
            if offset + _COUNT_BYTES > len(buffer):
                raise ValueError(f"the task of {len(buffer)} bytes ends before byte {offset}")
            count = int.from_bytes(buffer[offset : offset + _COUNT_BYTES], "little", signed=True)
            offset += _COUNT_BYTES
            encoded.append(SegmentColumns.decode(buffer, count, offset))
            offset += count * SEGMENT_BYTES
        return cls(encode_dp.reshape(modalities, segments), tuple(encoded))
