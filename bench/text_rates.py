"""A process of the text bench: a tokenizer's own batch rate and the loader's, in turn.

    python -m bench.text_rates --job job.yaml --rounds 5 < texts.json

The library gets the texts in batches as large as a record window, on one thread, by its call for
batches (tiktoken's `encode_ordinary_batch`, Hugging Face's `encode_batch_fast`); tiktoken's faster
call for one text is measured beside it. The loader does what it does in a loader worker: reads and decompresses shards,
cuts lines, takes the text out of the JSON, tokenizes, and writes chunks into memory as the pool's.
Both are counted in CPU seconds of the process; one JSON object is written.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from federation.model.job import ResolvedJob
from msd_daemon.config.resolve import resolve_job
from msd_daemon.sources.loader import SourceLoader, open_source_loader
from msd_daemon.transforms.tokenizer import open_tokenizer

BATCH = 256
CHUNK_BYTES = 1 << 20


Encode = Callable[[list[str]], int]
"""Texts in, their number of tokens out."""


def library_calls(job: ResolvedJob) -> tuple[Encode, Encode]:
    """Return the library's own call for a batch, and the fastest that it has for one thread."""
    path = Path(job.tokenizer.path)
    if job.tokenizer.kind == "tiktoken":
        import tiktoken

        from msd_daemon.transforms.tiktoken_tokenizer import ENCODINGS, read_ranks

        known = ENCODINGS[job.tokenizer.pattern]
        encoding = tiktoken.Encoding(
            name="bench",
            pat_str=known.split,
            mergeable_ranks=read_ranks(path),
            special_tokens=dict(known.special),
        )

        def by_batch(texts: list[str]) -> int:
            return sum(map(len, encoding.encode_ordinary_batch(texts, num_threads=1)))

        def one_by_one(texts: list[str]) -> int:  # the batch call makes lists, this one arrays
            return sum(len(encoding.encode_to_numpy(text, disallowed_special=())) for text in texts)

        return by_batch, one_by_one
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))

    def by_tokenizers(texts: list[str]) -> int:
        found = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return sum(len(encoding.ids) for encoding in found)

    return by_tokenizers, by_tokenizers


def library_pass(encode: Encode, texts: list[str]) -> tuple[int, float]:
    """Return tokens of all texts and the CPU seconds they took."""
    begun = time.process_time()
    tokens = sum(encode(texts[at : at + BATCH]) for at in range(0, len(texts), BATCH))
    return tokens, time.process_time() - begun


def loader_pass(loader: SourceLoader, memory: memoryview, records: int) -> tuple[int, float]:
    """Return tokens of one epoch and the CPU seconds they took."""
    begun = time.process_time()
    left, tokens = records, 0
    while left > 0:
        draft = loader.next_chunk(CHUNK_BYTES * 7 // 8)
        assert draft is not None
        size_bytes = draft.encoded_bytes()
        draft.write_into(memory[:size_bytes])
        left -= len(draft.meta.lengths)
        tokens += draft.payload_tokens
    return tokens, time.process_time() - begun


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", type=Path, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    options = parser.parse_args()
    texts: list[str] = json.load(sys.stdin)
    job = resolve_job(options.job.read_text(), options.job.parent)
    batch, fastest = library_calls(job)
    loader = open_source_loader(job, 0, open_tokenizer(job.tokenizer))
    loader.seek(0, 0)
    memory = memoryview(bytearray(64 << 20))
    rounds: list[dict[str, Any]] = []
    for number in range(options.rounds + 1):
        own, own_s = library_pass(batch, texts)
        fastest_s = own_s if fastest is batch else library_pass(fastest, texts)[1]
        ours, ours_s = loader_pass(loader, memory, len(texts))
        if ours != own:
            raise SystemExit(f"the loader gave {ours} tokens, the library {own}")
        if number:  # the first round warms caches of both
            rounds.append(
                {"tokens": own, "library_s": own_s, "fastest_s": fastest_s, "loader_s": ours_s}
            )
    print(json.dumps(rounds))


if __name__ == "__main__":
    main()
