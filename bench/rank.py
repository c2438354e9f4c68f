"""One rank of a bench: idle, on a DataLoader, or on msd; driven by its parent over stdin."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

torch.set_num_threads(1)


def say(**words: object) -> None:
    print(json.dumps(words), flush=True)


def pause(what: str) -> None:
    say(at=what)
    if sys.stdin.readline().strip() != "go":
        sys.exit(0)


def drive(stream: Iterator[int], warm: int, count: int) -> None:
    """Take batches until everything runs, then so many between two words of the parent."""
    for _ in range(warm):
        next(stream)
    pause("warm")
    say(tokens=sum(next(stream) for _ in range(count)))
    pause("done")


def torch_tokens(options: argparse.Namespace) -> Iterator[int]:
    from bench.torch_loader import MappedRows, ParquetRows, loader

    paths = [Path(p) for p in json.loads(options.sources)]
    shape = (options.rows, options.row_tokens, options.rank, options.ranks)
    dataset = (
        ParquetRows(paths, Path(options.tokenizer), *shape)
        if options.tokenizer
        else MappedRows(paths, *shape)
    )
    for batch in loader(dataset, options.workers):
        yield batch["tokens"].numel()


def msd_tokens(options: argparse.Namespace) -> Iterator[int]:
    import msd_client

    data = msd_client.connect(
        options.job,
        mesh={"dp": options.ranks},
        rank=options.rank,
        daemon=options.socket,
        deadlines={"next_batch_s": 20.0},
    )
    with data:
        for step in data.train:
            for microbatch in step:
                yield microbatch.tokens.numel()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("idle", "torch", "msd"))
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--rows", type=int, default=0)
    parser.add_argument("--row-tokens", type=int, default=0)
    parser.add_argument("--sources", default="[]")
    parser.add_argument("--tokenizer", default="")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--job", default="")
    parser.add_argument("--socket", default="")
    parser.add_argument("--warm", type=int, default=8)
    parser.add_argument("--count", type=int, default=32)
    options = parser.parse_args()
    if options.kind == "idle":
        import msd_client  # noqa: F401

        pause("warm")
        return
    stream = torch_tokens(options) if options.kind == "torch" else msd_tokens(options)
    drive(stream, options.warm, options.count)


if __name__ == "__main__":
    main()
