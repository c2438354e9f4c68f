"""Special tokens in a text: where they stand, and what lies between them.

Shared by tokenizers whose library knows special tokens not at all or only in a fixed way.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Longs = npt.NDArray[np.int64]
Span = tuple[int, int]
"""[begin, end) in characters."""


class LocatedIds(NamedTuple):
    """Ids of a text and the characters that each stands for; all int64, shape (tokens,)."""

    ids: Longs
    begins: Longs
    """First character. Tokens that share a character (bytes of one) all point at it."""
    ends: Longs
    """Behind the last character, more than `begins`."""


class SpecialPart(NamedTuple):
    """A run of a text: one special token, or text without any."""

    begin: int
    end: int
    token_id: int | None


def special_pattern(texts: Iterable[str]) -> re.Pattern[str] | None:
    """Return what finds special tokens, the longest one first; None where there are none."""
    longest_first = sorted((text for text in texts if text), key=lambda text: (-len(text), text))
    if not longest_first:
        return None
    return re.compile("|".join(re.escape(text) for text in longest_first))


def split_special(
    text: str,
    pattern: re.Pattern[str] | None,
    special: Mapping[str, int],
    plain: Sequence[Span] = (),
) -> Iterator[SpecialPart]:
    """Yield the parts of a text in order, none empty.

    Args:
        text: The text.
        pattern: Of `special_pattern`.
        special: Ids by text.
        plain: Spans in which no special token is looked for, ascending, without overlap.
    """
    begin = at = 0
    spans = iter(plain)
    span = next(spans, None)
    while pattern is not None and (found := pattern.search(text, at)) is not None:
        while span is not None and span[1] <= found.start():
            span = next(spans, None)
        if span is not None and span[0] < found.end():
            at = max(span[1], found.start() + 1)
            continue
        if found.start() > begin:
            yield SpecialPart(begin, found.start(), None)
        yield SpecialPart(found.start(), found.end(), special[found.group()])
        begin = at = found.end()
    if begin < len(text):
        yield SpecialPart(begin, len(text), None)


def join_located(parts: Sequence[LocatedIds]) -> LocatedIds:
    """Return the ids of all parts."""
    if not parts:
        nothing = np.zeros(0, dtype=np.int64)
        return LocatedIds(nothing, nothing, nothing)
    ids, begins, ends = zip(*parts, strict=True)
    return LocatedIds(np.concatenate(ids), np.concatenate(begins), np.concatenate(ends))


def one_located(part: SpecialPart) -> LocatedIds:
    """Return a special token as ids."""
    assert part.token_id is not None
    return LocatedIds(
        np.array([part.token_id], dtype=np.int64),
        np.array([part.begin], dtype=np.int64),
        np.array([part.end], dtype=np.int64),
    )


def locate_bytes(text: str, begin: int, ids: npt.NDArray[np.generic], sizes: Longs) -> LocatedIds:
    """Return ids with their characters, of a tokenizer that cuts the UTF-8 of a text in pieces.

    Args:
        text: What was encoded.
        begin: Where it begins in the whole text.
        ids: Its ids. Shape (tokens,).
        sizes: Bytes of each token, at least 1, together those of the text. Shape (tokens,).
    """
    ends = np.cumsum(sizes, dtype=np.int64)
    begins = ends - sizes
    if text.isascii():
        return LocatedIds(ids.astype(np.int64), begins + begin, ends + begin)
    raw = np.frombuffer(text.encode(), dtype=np.uint8)
    character = np.cumsum((raw & 0xC0) != 0x80, dtype=np.int64) - 1
    return LocatedIds(
        ids.astype(np.int64), character[begins] + begin, character[ends - 1] + 1 + begin
    )
