"""What a tokenizer is to a source loader: texts in, one flat array of ids out."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from federation.model.job import TokenizerSpec
from msd_client.contract.errors import ConfigError
from msd_daemon.transforms.special_text import LocatedIds, Span, locate_bytes

Ids = npt.NDArray[np.int32] | npt.NDArray[np.uint16]
Offsets = npt.NDArray[np.int64]


class Tokenizer(Protocol):
    """Turns documents into ids, with BOS and EOS as the job says."""

    @property
    def spec(self) -> TokenizerSpec:
        """What the job says of it: how many ids there are, which are put around a document."""
        ...

    @property
    def dtype(self) -> np.dtype[np.uint16] | np.dtype[np.int32]:
        """Narrowest dtype that holds every id; chunks store tokens in it."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> tuple[Ids, Offsets]:
        """Return the ids of documents.

        Args:
            texts: Documents without lone surrogates.

        Returns:
            All ids in order, shape (tokens,), of `dtype`, and where each document begins, shape
            (documents + 1,). An empty document has no ids, not even BOS and EOS.
        """
        ...

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Ids of the special tokens by their text; what `encode_special` recognises."""
        ...

    def encode_special(self, text: str, plain: Sequence[Span] = ()) -> LocatedIds:
        """Return the ids of a text in which special tokens are written by name.

        Nothing is put around it. Tokens that a Hugging Face file adds without calling them special
        (`<think>`) are recognised everywhere, in `plain` and in `encode_batch` too.

        Args:
            text: A text without lone surrogates.
            plain: Spans of characters where names of special tokens are plain text, ascending,
                without overlap.
        """
        ...


def token_dtype(spec: TokenizerSpec) -> np.dtype[np.uint16] | np.dtype[np.int32]:
    """Return the narrowest dtype for the ids of a tokenizer."""
    ids = (spec.vocabulary_count - 1, spec.bos_id or 0, spec.eos_id or 0)
    return np.dtype(np.uint16) if max(ids) < 1 << 16 else np.dtype(np.int32)


def join_documents(
    spec: TokenizerSpec, documents: Iterable[npt.NDArray[np.generic]]
) -> tuple[Ids, Offsets]:
    """Put BOS and EOS around documents and lay them one after the other."""
    before = [] if spec.bos_id is None else [np.array([spec.bos_id], dtype=np.int32)]
    after = [] if spec.eos_id is None else [np.array([spec.eos_id], dtype=np.int32)]
    around = len(before) + len(after)
    parts: list[npt.NDArray[np.generic]] = []
    ends = [0]
    for ids in documents:
        if len(ids):
            parts += (*before, ids, *after)
            ends.append(ends[-1] + len(ids) + around)
        else:
            ends.append(ends[-1])
    tokens: Ids = np.empty(ends[-1], dtype=token_dtype(spec))
    if parts:
        np.concatenate(parts, out=tokens, casting="unsafe")
    return tokens, np.array(ends, dtype=np.int64)


def open_tokenizer(spec: TokenizerSpec) -> Tokenizer:
    """Load a tokenizer; to be called in the process that encodes, after it was forked.

    Raises:
        ConfigError: The file is not what the job was resolved with, or cannot be loaded.
    """
    # One worker is one core: the library's own threads would only fight over it.
    os.environ.setdefault("RAYON_NUM_THREADS", "1")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if spec.kind == "tiktoken":
        from msd_daemon.transforms.tiktoken_tokenizer import TiktokenTokenizer

        return TiktokenTokenizer(spec)
    if spec.kind == "sentencepiece":
        from msd_daemon.transforms.sentencepiece_tokenizer import SentencePieceTokenizer

        return SentencePieceTokenizer(spec)
    if spec.kind in {"huggingface", "bpe_files", "clip"}:
        from msd_daemon.transforms.huggingface_tokenizer import HuggingFaceTokenizer

        return HuggingFaceTokenizer(spec)
    if spec.kind == "bytes":
        return BytesTokenizer(spec)
    return NoTokenizer(spec)


class BytesTokenizer:
    """Bytes of the UTF-8 text as ids 0 to 255."""

    def __init__(self, spec: TokenizerSpec) -> None:
        self.spec = spec
        self.dtype = token_dtype(spec)

    def encode_batch(self, texts: Sequence[str]) -> tuple[Ids, Offsets]:
        """Return the ids of documents."""
        return join_documents(
            self.spec, (np.frombuffer(text.encode(), dtype=np.uint8) for text in texts)
        )

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """None: BOS and EOS have no text."""
        return {}

    def encode_special(self, text: str, plain: Sequence[Span] = ()) -> LocatedIds:  # noqa: ARG002
        """Return the bytes of a text; no name is special."""
        ids = np.frombuffer(text.encode(), dtype=np.uint8)
        return locate_bytes(text, 0, ids, np.ones(len(ids), dtype=np.int64))


class NoTokenizer:
    """Stands where every source is tokenized already."""

    def __init__(self, spec: TokenizerSpec) -> None:
        self.spec = spec
        self.dtype = token_dtype(spec)

    def encode_batch(self, texts: Sequence[str]) -> tuple[Ids, Offsets]:
        """Refuse text.

        Raises:
            ConfigError: There is text and nothing that could encode it.
        """
        if texts:
            raise _no_tokenizer()
        return np.zeros(0, dtype=self.dtype), np.zeros(1, dtype=np.int64)

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """None."""
        return {}

    def encode_special(self, text: str, plain: Sequence[Span] = ()) -> LocatedIds:  # noqa: ARG002
        """Refuse text.

        Raises:
            ConfigError: Always.
        """
        raise _no_tokenizer()


def _no_tokenizer() -> ConfigError:
    return ConfigError("the job has a text source and tokenizer kind 'none': name a tokenizer file")
