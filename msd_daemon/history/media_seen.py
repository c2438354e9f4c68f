"""The images, videos and sounds of records that a replay has read: where they stand, not what they show."""

from __future__ import annotations

from collections.abc import Sequence

from federation.model.job import ResolvedJob
from msd_daemon.inline_media import items_of_records
from msd_daemon.sources.chunk_draft import ChunkDraft
from msd_daemon.sources.loader import SourceLoader

Item = tuple[int, int, tuple[int, int, int]]
"""First placeholder token in its record, placeholder tokens, grid."""
ItemsByRule = tuple[tuple[Item, ...], ...]


class MediaSeen:
    """Items by record; sees the chunks that a replay reads, reads again what a state carried.

    Args:
        job: The resolved job.
    """

    def __init__(self, job: ResolvedJob) -> None:
        self._known: list[dict[tuple[int, int], ItemsByRule]] = [{} for _ in job.sources]

    def keep(self, draft: ChunkDraft) -> None:
        """Take in a chunk."""
        first = draft.meta.first_index
        self._keep(draft, range(first, first + len(draft.meta.lengths)))

    def of(
        self, source: int, block_key: int, index: int, loaders: Sequence[SourceLoader]
    ) -> ItemsByRule:
        """Return the items of a record, by media rule; none where its source has none."""
        known = self._known[source]
        if (block_key, index) not in known:
            self._keep(loaders[source].fetch(block_key, [index]), range(index, index + 1))
        return known[block_key, index]

    def forget(self, source: int, cursor: tuple[int, int], kept: set[tuple[int, int]]) -> None:
        """Forget the records before a cursor, but for those to keep."""
        known = self._known[source]
        for place in [place for place in known if place < cursor and place not in kept]:
            del known[place]

    def _keep(self, draft: ChunkDraft, indices: range) -> None:
        meta = draft.meta
        items = items_of_records(draft.media, len(indices))
        for index, by_rule in zip(indices, items, strict=True):
            self._known[meta.source_index][meta.block_key, index] = tuple(
                tuple((item.begin, item.tokens, item.grid) for item in own) for own in by_rule
            )
