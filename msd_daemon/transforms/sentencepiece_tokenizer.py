"""SentencePiece `.model` files; names of control pieces in a document are plain text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from federation.model.job import TokenizerSpec
from msd_client.contract.errors import ConfigError
from msd_daemon.transforms.fingerprint import check_unchanged
from msd_daemon.transforms.special_text import (
    LocatedIds,
    Span,
    join_located,
    one_located,
    special_pattern,
    split_special,
)
from msd_daemon.transforms.tokenizer import Ids, Offsets, join_documents, token_dtype

# ModelProto.normalizer_spec {add_dummy_prefix: false}: a message given twice is merged.
_NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"


def load_processor(path: Path, *, has_dummy_prefix: bool = True) -> Any:
    """Return the library's processor of a model.

    Args:
        path: The model.
        has_dummy_prefix: False: no space is put before the text, whatever the model says.

    Raises:
        ConfigError: It cannot be read or is no model.
    """
    from sentencepiece import SentencePieceProcessor

    processor = SentencePieceProcessor()
    try:
        proto = path.read_bytes()
        processor.LoadFromSerializedProto(proto if has_dummy_prefix else proto + _NO_DUMMY_PREFIX)
    except OSError as error:
        raise ConfigError(
            f"tokenizer {path} cannot be read: {error.strerror}", path=str(path)
        ) from error
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(
            f"tokenizer {path} is no SentencePiece model: {error}", path=str(path)
        ) from error
    return processor


def control_pieces(processor: Any) -> dict[str, int]:
    """Return the ids of a model's control pieces by their text."""
    count = processor.vocab_size()
    return {
        str(processor.id_to_piece(token_id)): token_id
        for token_id in range(count)
        if processor.is_control(token_id)
    }


class SentencePieceTokenizer:
    """A `.model` file, BPE or Unigram.

    Raises:
        ConfigError: The file changed since the job was resolved, or is no model.
    """

    def __init__(self, spec: TokenizerSpec) -> None:
        check_unchanged(spec)
        self._processor = load_processor(Path(spec.path))
        self.spec = spec
        self.dtype = token_dtype(spec)

    def encode_batch(self, texts: Sequence[str]) -> tuple[Ids, Offsets]:
        """Return the ids of documents.

        Raises:
            UnicodeEncodeError: A document has a lone surrogate.
        """
        return join_documents(self.spec, self._encode(list(texts)))

    def _encode(self, texts: list[str]) -> list[Any]:
        if not texts:
            return []
        try:
            found: list[Any] = self._processor.encode_as_numpy(texts, num_threads=1)
        except (RuntimeError, TypeError):
            for text in texts:
                text.encode()  # says which character the library cannot take
            raise
        return found

    @cached_property
    def special_tokens(self) -> Mapping[str, int]:
        """The control pieces: BOS, EOS, `[INST]` and the like."""
        return control_pieces(self._processor)

    @cached_property
    def _pattern(self) -> Any:
        return special_pattern(self.special_tokens)

    @cached_property
    def _inner(self) -> Any:
        return load_processor(Path(self.spec.path), has_dummy_prefix=False)

    def encode_special(self, text: str, plain: Sequence[Span] = ()) -> LocatedIds:
        """Return the ids of a text in which control pieces are written by name.

        The space that a model puts before a text is put at its beginning alone, not behind a
        control piece: as Hugging Face's tokenizers of these models do (`legacy: false`).
        """
        parts = []
        for part in split_special(text, self._pattern, self.special_tokens, plain):
            if part.token_id is not None:
                parts.append(one_located(part))
                continue
            processor = self._inner if part.begin else self._processor
            found = processor.encode(text[part.begin : part.end], return_type="offset_mapping")
            ids = np.array(found["ids"], dtype=np.int64)
            extents = np.array(found["offsets"], dtype=np.int64).reshape(-1, 2) + part.begin
            # Bytes of a character that has no piece: only the last of them has its extent.
            ends = np.maximum(extents[:, 1], extents[:, 0] + 1)
            parts.append(LocatedIds(ids, extents[:, 0], ends))
        return join_located(parts)
