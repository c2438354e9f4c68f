"""A digest of what a step's rows hold: token ids, field values, media; not only which records."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from federation.model.job import ResolvedJob
from federation.model.plan import StepPlan
from msd_daemon.inline_documents import ReadDocuments
from msd_daemon.inline_rows import Piece
from msd_daemon.sources.chunk_draft import ChunkDraft
from msd_daemon.sources.loader import SourceLoader

_KEPT_WITHOUT_LOADERS = "chunks come from loaders that were told of"


class StepContent:
    """Digests steps by the chunks that a replay reads."""

    def __init__(self) -> None:
        self._documents: list[ReadDocuments] = []

    def read_from(self, job: ResolvedJob, loaders: Sequence[SourceLoader]) -> None:
        """Take the loaders of a replay; those of one before it are forgotten."""
        are_per_token = tuple(field.per == "token" for field in job.fields)
        self._documents = [ReadDocuments(loader, are_per_token) for loader in loaders]

    def keep(self, draft: ChunkDraft) -> None:
        """Take in a chunk."""
        assert self._documents, _KEPT_WITHOUT_LOADERS
        self._documents[draft.meta.source_index].keep(draft)

    def digest(self, plan: StepPlan) -> str:
        """Return sha256 (64 hex digits) over the segments of a step by canonical row and column.

        Of each segment row, column, length, its ids as little-endian int32 (with the bit that keeps
        a token out of the loss), the values of user fields, and of each of its images, videos and
        sounds first token, tokens, grid and values.
        """
        found = hashlib.sha256()
        lines = zip(
            *(
                column.tolist()
                for column in (
                    plan.source, plan.block_key, plan.index, plan.offset, plan.length, plan.row,
                    plan.column,
                )
            ),
            strict=True,
        )  # fmt: skip
        for source, key, index, offset, length, row, column in lines:
            piece = self._documents[source].piece(key, index, offset, length)
            found.update(np.array((row, column, length), "<i4").tobytes())
            _add(found, piece)
        return found.hexdigest()

    def forget(self, cursors: Sequence[Sequence[int]], carried: Sequence[Sequence[int]]) -> None:
        """Forget the documents before the cursors, but for those of carried fragments."""
        kept: list[set[tuple[int, int]]] = [set() for _ in self._documents]
        for source, key, index, *_ in carried:
            kept[source].add((key, index))
        for documents, own, cursor in zip(self._documents, kept, cursors, strict=True):
            documents.forget((cursor[0], cursor[1]), own)


def _add(found: hashlib._Hash, piece: Piece) -> None:
    found.update(piece.tokens.astype("<i4", copy=False).tobytes())
    for values in piece.values:
        found.update(np.ascontiguousarray(values).tobytes())
    for own in piece.items:
        for item in own:
            found.update(np.array((item.begin, item.tokens, *item.grid), "<i4").tobytes())
            found.update(np.ascontiguousarray(item.data).tobytes())
