"""Reads hostile shards in a process of its own: format, then paths; a line of JSON for each.

Address space is limited, so that a reader that takes what a file claims is ended, not the machine.
With FLIPS, the path's content is read so many times with some bytes changed each time.
"""

from __future__ import annotations

import json
import os
import random
import resource
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

ADDRESS_BYTES_MAX = 3 << 30
RECORDS_MAX = 100_000
_BYTES = (0, 1, 127, 128, 255)


def read_all(name: str, path: Path) -> dict[str, Any]:
    from msd_client.contract.errors import CorruptRecordError
    from tests.support.records import open_rows, shard_of

    opened = open_rows(name, record_bytes_max=8 << 20)
    shard = shard_of(path)
    error = ""
    try:
        blocks = opened.measure(shard)[0]
    except CorruptRecordError as refusal:
        blocks, error = 1, refusal.message
    counts: Counter[int] = Counter()
    fault = ""
    for block in range(min(blocks, 100)):
        for record in opened.records(shard, block):
            counts[record.status] += 1
            if record.status == 7 and not fault:
                fault = record.fault
            if counts.total() > RECORDS_MAX:
                break
    return {"counts": dict(counts), "fault": fault, "error": error}


def peak_mib() -> int:
    """Return the most memory that this process had, its parent's left out (as ru_maxrss is not)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith("VmHWM"))


def flipped(content: bytes, seed: int) -> bytes:
    chosen = random.Random(seed)
    data = bytearray(content)
    for _ in range(chosen.randint(1, 4)):
        data[chosen.randrange(len(data))] = chosen.choice([*_BYTES, chosen.randrange(256)])
    return bytes(data[: chosen.randrange(1, len(data))]) if chosen.random() < 0.1 else bytes(data)


def main(name: str, flips: int, paths: list[str]) -> None:
    read_all(name, Path(paths[0]))  # libraries are there before the limit is set
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_BYTES_MAX, ADDRESS_BYTES_MAX))
    for path in map(Path, paths):
        if not flips:
            found = read_all(name, path)
            print(json.dumps({"path": str(path), "peak_mib": peak_mib(), **found}), flush=True)
            continue
        content = path.read_bytes()
        with tempfile.TemporaryDirectory() as folder:
            for beside in path.parent.glob("index.json"):
                os.symlink(beside, Path(folder, beside.name))
            for seed in range(flips):
                print(path, seed, file=sys.stderr, flush=True)
                target = Path(folder, path.name)
                target.write_bytes(flipped(content, seed))
                read_all(name, target)
        print(json.dumps({"path": str(path)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
