"""What a tokenizer is to a source loader: texts in, one flat array of ids out."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from federation.model.job import TokenizerSpec
from msd_client.contract.errors import ConfigError

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
    if spec.kind == "huggingface":
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
            raise ConfigError(
                "the job has a text source and tokenizer kind 'none': name a tokenizer file"
            )
        return np.zeros(0, dtype=self.dtype), np.zeros(1, dtype=np.int64)
