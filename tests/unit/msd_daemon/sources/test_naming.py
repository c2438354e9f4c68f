"""Records that are named stand where records that are read stand, with their keys, in every format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from msd_client.contract.position import pack_block_key
from msd_daemon.config.resolve import resolve_job
from msd_daemon.sources.loader import open_source_loader
from msd_daemon.transforms import open_tokenizer
from tests.support.ledger import write_pair
from tests.support.sources import compress

RECORDS = 60
KEY_LENGTH = 4


def write(folder: Path, kind: str) -> dict[str, Any]:
    """Write two shards whose records begin with the four letters of their key; return the source."""
    rng = np.random.default_rng(1)
    for shard in range(2):
        keys = [f"{shard}{number:03d}" for number in range(RECORDS)]
        texts = [key + "." * int(rng.integers(0, 300)) for key in keys]
        path = folder / f"{shard}"
        if kind in ("jsonl", "zst"):
            lines = [
                json.dumps({"id": key, "text": text}).encode()
                for key, text in zip(keys, texts, strict=True)
            ]
            data = b"\n".join([*lines[:7], b"{broken", b"", *lines[7:]])
            if kind == "zst":
                path.with_suffix(".jsonl.zst").write_bytes(compress(data, "zst"))
            else:
                path.with_suffix(".jsonl").write_bytes(data)
        elif kind == "bin":
            ids = [list(text.encode()) for text in texts]
            flat = np.array([one for text in ids for one in text])
            write_pair(path, flat, [len(text) for text in ids], "<u2")
        else:
            columns: dict[str, Any] = {"id": keys, "text": texts}
            if kind == "ids":
                columns = {"id": keys, "tokens": [list(text.encode()) for text in texts]}
            if kind == "half" and shard:
                del columns["id"]
            pq.write_table(pa.table(columns), path.with_suffix(".parquet"), row_group_size=23)
    source: dict[str, Any] = {"paths": "*", "key": "id"}
    if kind == "ids":
        source["tokens"] = "tokens"
    if kind == "bin":
        source = {"paths": "*.bin"}
    if kind == "where":
        source["where"] = "id != '0003'"
    return source


@pytest.mark.parametrize("kind", ["jsonl", "zst", "rows", "half", "ids", "bin", "where"])
def test_names_are_those_of_the_records_that_a_run_reads(tmp_path: Path, kind: str) -> None:
    source = write(tmp_path, kind)
    job = resolve_job(
        {
            "tokenizer": {"vocabulary": 256} if kind in ("ids", "bin") else {"bytes": True},
            "sources": {"s": source},
            "batch": {"rows": 2, "row_tokens": 64, "microbatch_rows": 1},
            "defaults": {
                "shuffle": {
                    "block_bytes": 2048,
                    "window_records": 9,
                    "window_bytes": 1500,
                    "stream_block_records": 11,
                }
            },
        },
        tmp_path,
    )
    tokenizer = open_tokenizer(job.tokenizer)
    reading = open_source_loader(job, 0, tokenizer)
    naming = open_source_loader(job, 0, tokenizer, is_naming=True)
    names: dict[tuple[int, int], tuple[str, int | None, int, str]] = {}
    while (draft := naming.next_chunk(4096)) is not None:
        key = draft.meta.block_key
        if key >= pack_block_key(2, 0, 0):
            break
        assert [number for number, _ in draft.bad] == list(range(len(draft.meta.lengths)))
        for number, bad in draft.bad:
            block = naming.shard_block(key)
            place = (key, draft.meta.first_index + number)
            names[place] = (bad.shard, block, bad.place, bad.key)
    seen = 0
    while (draft := reading.next_chunk(4096)) is not None:
        key = draft.meta.block_key
        if key >= pack_block_key(2, 0, 0):
            break
        tokens = np.concatenate(draft.payload) if draft.payload else np.zeros(0, np.int32)
        at = 0
        for number, length in enumerate(draft.meta.lengths.tolist()):
            record = bytes(tokens[at : at + KEY_LENGTH].astype(np.uint8).tolist()).decode()
            at += length
            shard, block, place, name = names.pop((key, draft.meta.first_index + number))
            if not length:
                assert kind in ("jsonl", "zst", "where")
                continue
            seen += 1
            assert Path(shard).name[0] == record[0]
            if kind == "bin":
                assert (name, place) == ("", int(record[1:]))
            elif kind == "half" and record[0] == "1":
                assert name == ""
            else:
                assert name == record
            if kind in ("rows", "half", "ids", "where"):
                assert block is not None
                assert block * 23 + place == int(record[1:])
    assert not names
    assert seen == 4 * RECORDS - 2 * (kind == "where")
    picked = naming.fetch(pack_block_key(1, 0, 0), [0])
    assert [number for number, _ in picked.bad] == [0]
    reading.close()
    naming.close()
