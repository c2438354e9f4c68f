"""Tokenizers of Hugging Face's library: tokenizer.json, GPT-2 pairs, CLIP; nothing put around."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from federation.model.job import TokenizerSpec
from msd_client.contract.errors import ConfigError
from msd_daemon.transforms.fingerprint import check_unchanged
from msd_daemon.transforms.special_stand_ins import SpecialStandIns
from msd_daemon.transforms.special_text import LocatedIds, Span
from msd_daemon.transforms.tokenizer import Ids, Offsets, join_documents, token_dtype


def load_library_tokenizer(kind: str, path: Path) -> Any:
    """Return the library's tokenizer of a file; its truncation and padding are switched off.

    Args:
        kind: `huggingface`, `bpe_files` or `clip`.
        path: The file that the job names.

    Raises:
        ConfigError: The library refuses it.
    """
    from tokenizers import Tokenizer as LibraryTokenizer

    from msd_daemon.transforms.bpe_files import build_clip, build_pair

    builders = {"bpe_files": build_pair, "clip": build_clip}
    if kind in builders:
        return builders[kind](path)
    try:
        tokenizer = LibraryTokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"tokenizer {path} cannot be loaded: {error}", path=str(path)) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def added_special_tokens(tokenizer: Any) -> dict[str, int]:
    """Return the ids of the tokens that a file adds and calls special, by their text."""
    added = tokenizer.get_added_tokens_decoder().items()
    return {token.content: token_id for token_id, token in added if token.special}


class HuggingFaceTokenizer:
    """A tokenizer that Hugging Face's library runs.

    Raises:
        ConfigError: The file changed since the job was resolved, or the library refuses it.
    """

    def __init__(self, spec: TokenizerSpec) -> None:
        check_unchanged(spec)
        self._tokenizer = load_library_tokenizer(spec.kind, Path(spec.path))
        self.spec = spec
        self.dtype = token_dtype(spec)

    def encode_batch(self, texts: Sequence[str]) -> tuple[Ids, Offsets]:
        """Return the ids of documents."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return join_documents(
            self.spec, (np.array(encoding.ids, dtype=np.int32) for encoding in encodings)
        )

    @cached_property
    def special_tokens(self) -> Mapping[str, int]:
        """The tokens that the file adds and calls special."""
        return added_special_tokens(self._tokenizer)

    @cached_property
    def _stand_ins(self) -> SpecialStandIns:
        path = Path(self.spec.path)
        return SpecialStandIns(load_library_tokenizer(self.spec.kind, path))

    def encode_special(self, text: str, plain: Sequence[Span] = ()) -> LocatedIds:
        """Return the ids of a text in which special tokens are written by name."""
        if plain:
            return self._stand_ins.encode(text, plain)
        return located(self._tokenizer.encode(text, add_special_tokens=False))


def located(encoding: Any) -> LocatedIds:
    """Return ids and characters of the library's encoding of a text."""
    ids = np.array(encoding.ids, dtype=np.int64)
    extents = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
    return LocatedIds(ids, extents[:, 0], np.maximum(extents[:, 1], extents[:, 0] + 1))
