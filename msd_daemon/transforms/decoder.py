"""Ids back into text, for people who look at rows; nothing on a batch's way decodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from federation.model.job import TokenizerSpec

Decoder = Callable[[Sequence[int]], str]
"""Turns a run of ids into text; cut characters become U+FFFD, unknown ids `<|id|>`."""


def open_decoder(spec: TokenizerSpec) -> Decoder:
    """Return the decoder of a resolved tokenizer; without one, ids are shown as numbers."""
    if spec.kind == "tiktoken":
        return _tiktoken_decoder(spec)
    if spec.kind == "huggingface":
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(spec.path)
        return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))
    if spec.kind == "bytes":
        return lambda ids: _join(bytes([i]) if i < 256 else _mark(i) for i in ids)
    return lambda ids: " ".join(str(i) for i in ids)


def _tiktoken_decoder(spec: TokenizerSpec) -> Decoder:
    from msd_daemon.transforms.tiktoken_tokenizer import ENCODINGS, read_ranks

    pieces = {rank: token for token, rank in read_ranks(Path(spec.path)).items()}
    pieces |= {i: name.encode() for name, i in ENCODINGS[spec.pattern].special.items()}
    return lambda ids: _join(pieces.get(i) or _mark(i) for i in ids)


def _mark(token_id: int) -> bytes:
    return f"<|{token_id}|>".encode()


def _join(pieces: Iterable[bytes]) -> str:
    return b"".join(pieces).decode("utf-8", "replace")
