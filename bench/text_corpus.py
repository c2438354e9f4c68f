"""Texts and tokenizers for the text bench: those of the test data where they are there, else made."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import zstandard

from bench.corpus import document_lengths

DATA = Path(os.environ.get("MSD_TEST_DATA", Path(__file__).parents[2] / "shared" / "data"))
FILES = ("python_docs", "code_rust", "bible_kjv", "debian_install_guide")
"""Documentation in English, code, old English, many languages."""
SHARDS = 4
VOCABULARY = 8192


def make_shards(folder: Path, bytes_max: int, data: Path = DATA) -> tuple[list[Path], list[str]]:
    """Write texts as SHARDS files of JSON lines in zstd; return the paths and the texts.

    Args:
        folder: Where they are written.
        bytes_max: Bytes of UTF-8 in all.
        data: Folder of the test data.
    """
    texts = list(real_texts(data / "text", bytes_max)) or list(made_texts(bytes_max))
    paths = []
    for number in range(SHARDS):
        path = folder / f"texts-{number}.jsonl.zst"
        lines = (json.dumps({"text": text}, ensure_ascii=False) for text in texts[number::SHARDS])
        raw = "".join(f"{line}\n" for line in lines).encode()
        path.write_bytes(zstandard.ZstdCompressor(level=3).compress(raw))
        paths.append(path)
    return paths, texts


def real_texts(folder: Path, bytes_max: int) -> Iterator[str]:
    """Give texts of the test data, an equal share of bytes of each file."""
    for name in FILES:
        path = folder / f"{name}.jsonl.zst"
        if not path.is_file():
            continue
        left = bytes_max // len(FILES)
        reader = zstandard.ZstdDecompressor().stream_reader(path.open("rb"), closefd=True)
        for line in io.TextIOWrapper(reader, "utf-8"):
            text = json.loads(line)["text"]
            left -= len(text.encode())
            if left < 0:
                break
            yield text


def made_texts(bytes_max: int) -> Iterator[str]:
    """Give texts of made words whose counts fall as those of a language (Zipf)."""
    rng = np.random.default_rng(7)
    sounds = ["ka", "lo", "min", "ter", "un", "sha", "re", "vi", "on", "est", "al", "pro"]
    words = ["".join(rng.choice(sounds, int(rng.integers(1, 5)))) for _ in range(20_000)]
    for length in document_lengths(rng, bytes_max // 6).tolist():
        picked = np.minimum(rng.zipf(1.3, length), len(words)) - 1
        yield " ".join(words[n] for n in picked.tolist()) + ".\n"


def tokenizers(folder: Path, texts: list[str], data: Path = DATA) -> dict[str, Path]:
    """Return tokenizer files by name; a small BPE is trained where the test data has none."""
    known = {
        "gpt2_hf": data / "tokenizers" / "gpt2_hf_tokenizer.json",
        "o200k": data / "tokenizers" / "o200k_base.tiktoken",
        "cl100k": data / "tokenizers" / "cl100k_base.tiktoken",
    }
    found = {name: path for name, path in known.items() if path.is_file()}
    return found or {
        "trained_hf": train(folder / "tokenizer.json", texts),
        "bytes_tiktoken": write_ranks(folder / "cl100k_base.tiktoken", folder / "tokenizer.json"),
    }


def train(path: Path, texts: list[str]) -> Path:
    """Train a byte-level BPE on the first texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts[:2000], trainer)
    tokenizer.save(str(path))
    return path


def write_ranks(path: Path, trained: Path) -> Path:
    """Write a trained BPE as a tiktoken rank file: bytes first, then tokens as they were merged."""
    import base64

    from tokenizers.pre_tokenizers import ByteLevel

    vocabulary = json.loads(trained.read_text(encoding="utf-8"))["model"]["vocab"]
    letters = byte_letters(sorted(ByteLevel.alphabet()))
    tokens = [bytes([n]) for n in range(256)]
    for token in sorted(vocabulary, key=lambda one: vocabulary[one]):
        raw = bytes(letters[letter] for letter in token)
        if len(raw) > 1:
            tokens.append(raw)
    lines = [base64.b64encode(raw) + b" %d\n" % rank for rank, raw in enumerate(tokens)]
    path.write_bytes(b"".join(lines))
    return path


def byte_letters(alphabet: list[str]) -> dict[str, int]:
    """Return the byte that each letter of byte-level BPE stands for (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {chr(byte): byte for byte in plain}
    letters |= {chr(256 + number): byte for number, byte in enumerate(others)}
    assert sorted(letters) == alphabet
    return letters
