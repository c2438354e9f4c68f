"""tiktoken rank files: encode_ordinary semantics, so special-token texts are plain text."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from federation.model.job import TokenizerSpec
from msd_client.contract.errors import ConfigError
from msd_daemon.transforms.fingerprint import check_unchanged
from msd_daemon.transforms.special_text import (
    LocatedIds,
    Longs,
    Span,
    join_located,
    locate_bytes,
    one_located,
    special_pattern,
    split_special,
)
from msd_daemon.transforms.tokenizer import Ids, Offsets, join_documents, token_dtype


@dataclass(frozen=True)
class Encoding:
    """What a rank file does not say: how text is split first, and the special tokens."""

    split: str
    ranks_count: int
    special: Mapping[str, int]


_R50K_SPLIT = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
_CL100K_SPLIT = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|"""
    r"""\s++$|\s*[\r\n]|\s+(?!\S)|\s"""
)
_O200K_WORD = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_O200K_TAIL = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K_SPLIT = "|".join(
    (
        f"{_O200K_WORD}*{_O200K_TAIL}+{_CONTRACTION}",
        f"{_O200K_WORD}+{_O200K_TAIL}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

# The split patterns and special ids that tiktoken publishes (tiktoken_ext/openai_public.py); there
# they stand inside functions that download the rank files.
ENCODINGS: Mapping[str, Encoding] = MappingProxyType(
    {
        "o200k_base": Encoding(
            _O200K_SPLIT, 199_998, {"<|endoftext|>": 199_999, "<|endofprompt|>": 200_018}
        ),
        "cl100k_base": Encoding(
            _CL100K_SPLIT,
            100_256,
            {
                "<|endoftext|>": 100_257,
                "<|fim_prefix|>": 100_258,
                "<|fim_middle|>": 100_259,
                "<|fim_suffix|>": 100_260,
                "<|endofprompt|>": 100_276,
            },
        ),
        "p50k_base": Encoding(_R50K_SPLIT, 50_280, {"<|endoftext|>": 50_256}),
        "r50k_base": Encoding(_R50K_SPLIT, 50_256, {"<|endoftext|>": 50_256}),
        "gpt2": Encoding(_R50K_SPLIT, 50_256, {"<|endoftext|>": 50_256}),
    }
)


def read_ranks(path: Path) -> dict[bytes, int]:
    """Return the ranks of a `.tiktoken` file: one base64 token and its rank a line.

    Raises:
        ConfigError: A line is not that.
        OSError: The file cannot be read.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise ConfigError(
                f"{path} line {number} is no `base64 rank` pair: not a tiktoken rank file",
                path=str(path),
            ) from None
    if not ranks:
        raise ConfigError(f"{path} holds no ranks: not a tiktoken rank file", path=str(path))
    return ranks


def vocabulary_count(encoding: Encoding, ranks: Mapping[bytes, int]) -> int:
    """Return one more than the largest id."""
    return max([*ranks.values(), *encoding.special.values()]) + 1


class TiktokenTokenizer:
    """Byte-pair encoding by tiktoken's engine.

    Raises:
        ConfigError: The file changed since the job was resolved, or its pattern is unknown.
    """

    def __init__(self, spec: TokenizerSpec) -> None:
        import tiktoken

        check_unchanged(spec)
        encoding = ENCODINGS.get(spec.pattern)
        if encoding is None:
            raise ConfigError(
                f"tokenizer pattern {spec.pattern!r} is none of {', '.join(ENCODINGS)}"
            )
        self.spec = spec
        self.dtype = token_dtype(spec)
        self._encoding = tiktoken.Encoding(
            name=spec.pattern,
            pat_str=encoding.split,
            mergeable_ranks=read_ranks(Path(spec.path)),
            special_tokens=dict(encoding.special),
        )
        self._special = dict(encoding.special)
        self._pattern = special_pattern(self._special)
        self._sizes: Longs | None = None

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Those of the encoding."""
        return self._special

    def encode_batch(self, texts: Sequence[str]) -> tuple[Ids, Offsets]:
        """Return the ids of documents."""
        return join_documents(self.spec, self._documents(texts))

    def _documents(self, texts: Sequence[str]) -> Iterator[npt.NDArray[np.generic]]:
        encode = self._encoding.encode_to_numpy
        for text in texts:
            yield encode(text, disallowed_special=())

    def encode_special(self, text: str, plain: Sequence[Span] = ()) -> LocatedIds:
        """Return the ids of a text in which special tokens are written by name."""
        if self._sizes is None:
            self._sizes = self._token_sizes()
        parts = []
        for part in split_special(text, self._pattern, self._special, plain):
            if part.token_id is not None:
                parts.append(one_located(part))
                continue
            piece = text[part.begin : part.end]
            ids = self._encoding.encode_to_numpy(piece, disallowed_special=())
            parts.append(locate_bytes(piece, part.begin, ids, self._sizes[ids]))
        return join_located(parts)

    def _token_sizes(self) -> Longs:
        """Return the bytes of each token by its id."""
        ranks = self._encoding._mergeable_ranks  # the map that it was made of
        sizes = np.zeros(max(ranks.values()) + 1, dtype=np.int64)
        for token, rank in ranks.items():
            sizes[rank] = len(token)
        return sizes
