"""Whole documents that a replay in one process holds: until no later step can ask for them."""

from __future__ import annotations

import numpy as np

from msd_daemon.inline_media import items_of_part, items_of_records
from msd_daemon.inline_rows import Piece, Tokens
from msd_daemon.sources.chunk_draft import ChunkDraft
from msd_daemon.sources.loader import SourceLoader


class ReadDocuments:
    """The documents of one source that were read and may still be asked for.

    Args:
        loader: Of the source.
        are_per_token: Of each user field of the job, whether it has a value per token.
    """

    def __init__(self, loader: SourceLoader, are_per_token: tuple[bool, ...]) -> None:
        self._loader = loader
        self._are_per_token = are_per_token
        self._known: dict[tuple[int, int], Piece] = {}
        """Whole records."""

    def seek(self, block_key: int, index: int) -> None:
        """Go on from a position, and forget what is known."""
        self._loader.seek(block_key, index)
        self._known.clear()

    def keep(self, draft: ChunkDraft) -> None:
        """Keep the records of a chunk that was read on."""
        first = draft.meta.first_index
        self._keep(draft, range(first, first + len(draft.meta.lengths)))

    def piece(self, block_key: int, index: int, offset: int, length: int) -> Piece:
        """Return a part of a record; one that a state carried is read again."""
        if (block_key, index) not in self._known:
            self._keep(self._loader.fetch(block_key, [index]), range(index, index + 1))
        tokens, values, items = self._known[block_key, index]
        part = slice(offset, offset + length)
        pairs = zip(self._are_per_token, values, strict=False)
        return Piece(
            tokens[part],
            tuple(v[part] if is_token else v for is_token, v in pairs),
            items_of_part(items, offset, length),
        )

    def forget(self, cursor: tuple[int, int], keep: set[tuple[int, int]]) -> None:
        """Drop the records before a cursor, but for those to keep."""
        for key in [key for key in self._known if key < cursor and key not in keep]:
            del self._known[key]

    def _keep(self, draft: ChunkDraft, indices: range) -> None:
        parts = draft.payload
        tokens: Tokens = np.concatenate(parts) if parts else np.zeros(0, np.int32)
        items = items_of_records(draft.media, len(indices))
        start = 0
        for number, (index, length) in enumerate(
            zip(indices, draft.meta.lengths.tolist(), strict=True)
        ):
            whole, one = slice(start, start + length), slice(number, number + 1)
            values = tuple(
                values[whole if is_token else one].copy()
                for is_token, values in zip(self._are_per_token, draft.values, strict=False)
            )
            record = Piece(tokens[whole].copy(), values, items[number])
            self._known[draft.meta.block_key, index] = record
            start += length
