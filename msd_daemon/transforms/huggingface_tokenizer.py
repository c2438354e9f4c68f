"""Hugging Face `tokenizer.json` by the tokenizers library; no special tokens of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from federation.model.job import TokenizerSpec
from msd_client.contract.errors import ConfigError
from msd_daemon.transforms.fingerprint import file_fingerprint
from msd_daemon.transforms.tokenizer import Ids, Offsets, join_documents, token_dtype


class HuggingFaceTokenizer:
    """A tokenizer.json; its truncation and padding are switched off.

    Raises:
        ConfigError: The file changed since the job was resolved, or the library refuses it.
    """

    def __init__(self, spec: TokenizerSpec) -> None:
        from tokenizers import Tokenizer as LibraryTokenizer

        path = Path(spec.path)
        if spec.fingerprint and file_fingerprint(path) != spec.fingerprint:
            raise ConfigError(
                f"tokenizer {path} is not the file the job was resolved with: submit the job anew",
                path=str(path),
            )
        try:
            self._tokenizer = LibraryTokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(
                f"tokenizer {path} cannot be loaded: {error}", path=str(path)
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.spec = spec
        self.dtype = token_dtype(spec)

    def encode_batch(self, texts: Sequence[str]) -> tuple[Ids, Offsets]:
        """Return the ids of documents."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return join_documents(
            self.spec, (np.array(encoding.ids, dtype=np.int32) for encoding in encodings)
        )
