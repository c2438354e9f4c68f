"""Texts in which only some names of special tokens are special, by Hugging Face's library.

The library recognises every name or none. Here none is, and each true one is replaced before by a
stand-in that the tokenizer gets for it: a token with the same rules about the space around it.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np

from msd_daemon.transforms.special_text import (
    LocatedIds,
    Span,
    special_pattern,
    split_special,
)

_OPEN, _CLOSE = "\ufdd8", "\ufdd9"
"""Noncharacters: no text that is meant for people has them."""


class SpecialStandIns:
    """Encodes texts with spans in which names of special tokens are plain text.

    Args:
        tokenizer: A tokenizer of the library; it is changed.
    """

    def __init__(self, tokenizer: Any) -> None:
        from tokenizers import AddedToken

        added = tokenizer.get_added_tokens_decoder()
        special = {token_id: token for token_id, token in added.items() if token.special}
        self._ids = {token.content: token_id for token_id, token in special.items()}
        self._pattern = special_pattern(self._ids)
        # Not to be guessed by a text; the ids that come out do not depend on it.
        secret = secrets.token_hex(8)
        names = {token_id: f"{_OPEN}{secret}.{token_id}{_CLOSE}" for token_id in special}
        tokenizer.encode_special_tokens = True
        tokenizer.add_tokens(
            [
                AddedToken(
                    names[token_id],
                    single_word=token.single_word,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    normalized=False,
                )
                for token_id, token in special.items()
            ]
        )
        self._names = names
        self._stand_ins = {tokenizer.token_to_id(name): own for own, name in names.items()}
        self._tokenizer = tokenizer

    def encode(self, text: str, plain: Sequence[Span]) -> LocatedIds:
        """Return the ids of a text.

        Args:
            text: The text.
            plain: Spans of characters where names of special tokens are plain text, ascending.
        """
        pieces: list[str] = []
        begins: list[np.ndarray[Any, np.dtype[np.int64]]] = []
        ends: list[np.ndarray[Any, np.dtype[np.int64]]] = []
        for part in split_special(text, self._pattern, self._ids, plain):
            if part.token_id is None:
                pieces.append(text[part.begin : part.end])
                begins.append(np.arange(part.begin, part.end))
                ends.append(begins[-1] + 1)
            else:
                pieces.append(self._names[part.token_id])
                begins.append(np.full(len(pieces[-1]), part.begin))
                ends.append(np.full(len(pieces[-1]), part.end))
        if not pieces:
            pieces, begins, ends = [""], [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        encoding = self._tokenizer.encode("".join(pieces), add_special_tokens=False)
        begin, end = np.concatenate(begins), np.concatenate(ends)
        extents = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        last = np.maximum(extents[:, 1], extents[:, 0] + 1) - 1
        ids = [self._stand_ins.get(token_id, token_id) for token_id in encoding.ids]
        return LocatedIds(np.array(ids, dtype=np.int64), begin[extents[:, 0]], end[last])
