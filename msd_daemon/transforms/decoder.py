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
    if spec.kind == "sentencepiece":
        return _sentencepiece_decoder(spec)
    if spec.kind in {"huggingface", "bpe_files", "clip"}:
        from msd_daemon.transforms.huggingface_tokenizer import load_library_tokenizer

        tokenizer = load_library_tokenizer(spec.kind, Path(spec.path))
        return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))
    if spec.kind == "bytes":
        return lambda ids: _join(bytes([i]) if i < 256 else _mark(i) for i in ids)
    return lambda ids: " ".join(str(i) for i in ids)


def _sentencepiece_decoder(spec: TokenizerSpec) -> Decoder:
    from msd_daemon.transforms.sentencepiece_tokenizer import load_processor

    processor = load_processor(Path(spec.path))
    count = processor.vocab_size()

    def decode(ids: Sequence[int]) -> str:
        """Decode runs of text; control pieces, which the library leaves out, by their names."""
        parts: list[str] = []
        run: list[int] = []
        for token_id in [*ids, -1]:
            if 0 <= token_id < count and not processor.is_control(token_id):
                run.append(token_id)
                continue
            if run:
                parts.append(str(processor.decode(run)))
                run = []
            if token_id >= 0:
                is_known = token_id < count
                parts.append(processor.id_to_piece(token_id) if is_known else f"<|{token_id}|>")
        return "".join(parts)

    return decode


def _tiktoken_decoder(spec: TokenizerSpec) -> Decoder:
    from msd_daemon.transforms.tiktoken_tokenizer import ENCODINGS, read_ranks

    pieces = {rank: token for token, rank in read_ranks(Path(spec.path)).items()}
    pieces |= {i: name.encode() for name, i in ENCODINGS[spec.pattern].special.items()}
    return lambda ids: _join(pieces.get(i) or _mark(i) for i in ids)


def _mark(token_id: int) -> bytes:
    return f"<|{token_id}|>".encode()


def _join(pieces: Iterable[bytes]) -> str:
    return b"".join(pieces).decode("utf-8", "replace")
