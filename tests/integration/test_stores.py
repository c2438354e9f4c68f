"""Shards in a real S3 server, through a proxy that counts requests and breaks some of them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

import msd_daemon
from msd_client.contract.errors import CorruptRecordError, MsdError, StoreError, StoreMissingError
from msd_daemon.sources.binary_file import open_binary
from msd_daemon.sources.manifest import resolve_source
from msd_daemon.sources.record import ReadMeter
from msd_daemon.stores import read_object
from msd_daemon.stores.options import EndpointOptions, StoreOptions, configure_stores
from msd_daemon.stores.store import open_store
from tests.conftest import StartNode
from tests.support.faulty_proxy import Fault, FaultyServer, forward_to, running_server
from tests.support.node import run_ranks
from tests.support.s3_server import S3Server, running_s3

SECRET = "wJalrXUtnFEMISECRETKEY"
KEY_ID = "AKIAEXAMPLEKEYID0001"


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with running_s3() as server:
        server.make_bucket("data")
        yield server


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[FaultyServer]:
    with running_server(forward_to(s3.port)) as server:
        yield server


def options_for(proxy: FaultyServer, tmp_path: Path, **fields: object) -> StoreOptions:
    endpoint = EndpointOptions(
        endpoint=proxy.url, access_key_env="TEST_KEY_ID", secret_key_env="TEST_SECRET"
    )
    settings: dict[str, object] = {
        "read_timeout_s": 20.0,
        "deadline_s": 60.0,
        "shared_dir": str(tmp_path / "shared"),
        "endpoints": {"s3": endpoint},
    }
    return StoreOptions(**(settings | fields))  # type: ignore[arg-type]


@pytest.fixture
def options(
    proxy: FaultyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[StoreOptions]:
    monkeypatch.setenv("TEST_KEY_ID", KEY_ID)
    monkeypatch.setenv("TEST_SECRET", SECRET)
    found = options_for(proxy, tmp_path)
    configure_stores(found)
    yield found
    configure_stores(StoreOptions())


def documents(count: int, name: str) -> list[str]:
    return [f"{name} document {i} " + "word " * (i * 7 % 60) for i in range(count)]


def jsonl(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def fill(s3: S3Server, local: Path, prefix: str) -> None:
    """Put the same shards into a local folder and a prefix of the bucket."""
    table = pa.table({"text": documents(900, "parquet")})
    pq.write_table(table, local / "p.parquet", row_group_size=300)
    (local / "a.jsonl").write_bytes(jsonl(documents(2000, "a")))
    (local / "b.jsonl").write_bytes(jsonl(documents(1500, "b")))
    packed = zstandard.ZstdCompressor().compress(jsonl(documents(2500, "c")))
    (local / "c.jsonl.zst").write_bytes(packed)
    s3.put("data", {f"{prefix}/{file.name}": file.read_bytes() for file in local.iterdir()})


def job(place: str) -> dict[str, object]:
    return {
        "seed": 5,
        "tokenizer": {"bytes": True, "eos": "end"},
        "sources": {
            "plain": {"paths": f"{place}/*.jsonl"},
            "packed": {"paths": f"{place}/*.zst"},
            "rows": {"paths": f"{place}/p.parquet"},
        },
        "mixture": {0: {"plain": 2, "packed": 1, "rows": 1}},
        "batch": {"rows": 8, "row_tokens": 1024, "microbatch_rows": 4},
    }


def stream(place: str, steps: int) -> list[list[int]]:
    rows: list[list[int]] = []
    with msd_daemon.inline(job(place)) as reader:
        for step in reader:
            rows += [row.tokens.tolist() for row in step.rows]
            if step.number + 1 == steps:
                return rows
    raise AssertionError("the stream ended")


def broken(kind: str) -> Fault:
    return {
        "503": Fault(503, body=b"<Error><Code>SlowDown</Code></Error>"),
        "429": Fault(429, {"Retry-After": "0"}),
        "reset": Fault(reset_after=700),
        "cut": Fault(cut_after=700),
        "shrunk": Fault(shrink_to=700),
        "stall": Fault(stall_after=700),
        "500": Fault(500, body=b"oops"),
    }[kind]


def test_a_stream_from_s3_is_that_of_the_local_files_with_and_without_faults(
    s3: S3Server, proxy: FaultyServer, options: StoreOptions, tmp_path: Path
) -> None:
    local = tmp_path / "local"
    local.mkdir()
    fill(s3, local, "same")
    want = stream(str(local), 40)
    assert stream("s3://data/same", 40) == want
    kinds = ["503", "reset", "cut", "shrunk", "429", "500"]
    faulty = 0

    def choose(seen: object) -> Fault | None:
        nonlocal faulty
        if seen.number % 3:  # type: ignore[attr-defined]
            return None
        faulty += 1
        return broken(kinds[faulty % len(kinds)])

    configure_stores(options_for(proxy, tmp_path, block_bytes=8192, request_bytes_max=16384))
    proxy.choose = choose
    assert stream("s3://data/same", 40) == want
    assert faulty > 10


@pytest.mark.parametrize("kind", ["503", "429", "reset", "cut", "shrunk", "stall", "500"])
def test_every_fifth_request_broken_loses_no_byte(
    kind: str, s3: S3Server, proxy: FaultyServer, options: StoreOptions, tmp_path: Path
) -> None:
    content = bytes(range(256)) * 1200
    s3.put("data", {"bytes.bin": content})
    small = options_for(
        proxy,
        tmp_path,
        block_bytes=16384,
        request_bytes_max=16384,
        read_timeout_s=0.5 if kind == "stall" else 20.0,
    )
    configure_stores(small)
    proxy.choose = lambda seen: broken(kind) if seen.number % 5 == 1 else None
    meter = ReadMeter()
    with open_binary("s3://data/bytes.bin", meter) as file:
        assert file.read() == content
    assert meter.read_bytes == len(content)
    counts = open_store("s3://data/bytes.bin").counts
    blocks = -(-len(content) // 16384)
    assert counts.requests - counts.retries == 1 + blocks  # each block once, however often tried
    assert counts.retries >= 3


def test_rights_denied_once_are_survived_and_twice_are_told(
    s3: S3Server, proxy: FaultyServer, options: StoreOptions
) -> None:
    s3.put("data", {"once.txt": b"content"})
    proxy.choose = lambda seen: Fault(403) if seen.number == 0 else None
    assert read_object("s3://data/once.txt", 100) == b"content"
    assert len(proxy.requests) == 2
    proxy.choose = lambda seen: Fault(403, body=b"<Code>AccessDenied</Code>" + SECRET.encode())
    with pytest.raises(StoreError, match=r"s3://data/once.txt .*HTTP 403 AccessDenied") as caught:
        read_object("s3://data/once.txt", 100)
    assert len(proxy.requests) == 4
    assert SECRET not in str(caught.value) and "Signature" not in str(caught.value)


def test_a_missing_object_is_told_at_once_with_bucket_and_key(
    proxy: FaultyServer, options: StoreOptions
) -> None:
    with pytest.raises(StoreMissingError, match=r"s3://data/gone\.txt is not there") as caught:
        read_object("s3://data/gone.txt", 100)
    assert isinstance(caught.value, FileNotFoundError)
    assert len(proxy.requests) == 1


def test_an_unbroken_outage_ends_at_the_deadline(
    s3: S3Server, proxy: FaultyServer, options: StoreOptions, tmp_path: Path
) -> None:
    configure_stores(options_for(proxy, tmp_path, deadline_s=0.5))
    proxy.choose = lambda seen: broken("503")
    with pytest.raises(StoreError, match=r"s3://data/x .*HTTP 503 SlowDown.*deadline_s = 0.5"):
        read_object("s3://data/x", 100)


def test_the_rate_is_back_after_throttling(
    s3: S3Server, proxy: FaultyServer, options: StoreOptions, tmp_path: Path
) -> None:
    s3.put("data", {"rate.txt": b"x"})
    store = open_store("s3://data/rate.txt")
    proxy.choose = lambda seen: Fault(503) if seen.number % 5 == 0 else None
    for _ in range(20):
        store.read("rate.txt", 0, 1)
    assert store.counts.throttled == store.counts.retries > 0
    proxy.choose = lambda seen: None
    retries = store.counts.retries
    for _ in range(20):
        store.read("rate.txt", 0, 1)
    assert store.counts.retries == retries  # one request a read again, no wait in between


def test_an_object_that_changed_is_told_by_name(
    s3: S3Server, proxy: FaultyServer, options: StoreOptions
) -> None:
    from msd_daemon.sources.shard_file import open_shard

    s3.put("data", {"change/a.jsonl": jsonl(["one", "two"])})
    (shard,) = resolve_source(["s3://data/change/"], Path("/")).shards
    s3.put("data", {"change/a.jsonl": jsonl(["one", "TWO"])})
    file = open_shard(shard, ReadMeter())
    with pytest.raises(CorruptRecordError, match=r"s3://data/change/a.jsonl has another ETag"):
        file.read_at(0, 10)
    s3.put("data", {"change/a.jsonl": jsonl(["one"])})
    with pytest.raises(CorruptRecordError, match=r"has 16 bytes, the frozen manifest says 32"):
        file.read_at(0, 10)
    file.close()


def test_shards_of_several_pages_cost_one_listing_and_no_request_each(
    s3: S3Server, proxy: FaultyServer, options: StoreOptions
) -> None:
    line = jsonl(["a shard of one document"])
    s3.put("data", {f"many/{i % 3}/shard-{i:05}.jsonl": line for i in range(1100)})
    section = job("s3://data/many") | {
        "sources": {"web": {"paths": "s3://data/many/*/*.jsonl"}},
        "mixture": {0: {"web": 1}},
        "batch": {"rows": 2, "row_tokens": 256, "microbatch_rows": 1},
    }
    with msd_daemon.inline(section) as reader:
        next(iter(reader))
    assert len(proxy.listings()) == 2
    # A step takes 2 x 256 tokens of documents of 24, and windows of 16 shards are read ahead.
    assert len(proxy.reads()) < 200


def test_no_credential_appears_in_a_job_its_state_or_an_error(
    s3: S3Server, proxy: FaultyServer, options: StoreOptions, tmp_path: Path
) -> None:
    from federation.model.job import encode_job
    from msd_daemon.config.resolve import render_resolved_yaml, resolve_job
    from msd_daemon.stores.options import encode_store_options

    local = tmp_path / "local"
    local.mkdir()
    fill(s3, local, "secret")
    resolved = resolve_job(job("s3://data/secret"), tmp_path, "job")
    proxy.choose = lambda seen: Fault(403, body=f"{SECRET} {KEY_ID}".encode())
    with pytest.raises(StoreError) as caught:
        read_object("s3://data/secret/a.jsonl", 100)
    written = [
        repr(encode_job(resolved)),
        render_resolved_yaml(resolved),
        repr(encode_store_options(options)),
        repr(caught.value),
        repr(caught.value.attributes),
        repr(caught.value.__cause__),
    ]
    written += [
        str(path.read_bytes()) for path in (tmp_path / "shared").rglob("*") if path.is_file()
    ]
    for text in written:
        assert SECRET not in text
        assert KEY_ID not in text
        assert "X-Amz" not in text


@pytest.mark.processes
def test_a_daemon_serves_the_local_stream_from_a_throttled_store_and_writes_no_secret(
    s3: S3Server, proxy: FaultyServer, start_node: StartNode, tmp_path: Path
) -> None:
    local = tmp_path / "local"
    local.mkdir()
    fill(s3, local, "node")
    rows = stream(str(local), 20)
    want = [sorted(rows[at : at + 8]) for at in range(0, len(rows), 8)]
    endpoint = f'endpoint = "{proxy.url}", access_key_env = "KEY_ID", secret_key_env = "SECRET"'
    environ = {
        "MSD__STORES__ENDPOINTS": f"{{s3 = {{{endpoint}}}}}",
        "MSD__STORES__CACHE_BYTES": "64Mi",
        "KEY_ID": KEY_ID,
        "SECRET": SECRET,
    }
    proxy.choose = lambda seen: broken("503") if seen.number % 5 == 2 else None
    node = start_node(environ=environ, folder=tmp_path / "node")
    (record,) = run_ranks(node, job("s3://data/node"), {"dp": 1}, 20)
    got = [
        sorted(np.frombuffer(row, np.int32).tolist() for row in record.rows[step])
        for step in record.steps
    ]
    assert got == want
    assert len(proxy.requests) < 60
    for path in (tmp_path / "node").rglob("*"):
        if path.is_file():
            written = path.read_bytes()
            assert SECRET.encode() not in written, path
            assert KEY_ID.encode() not in written, path
    proxy.choose = lambda seen: Fault(403)
    denied = job("s3://data/node") | {"seed": 6}
    with pytest.raises(MsdError, match=r"s3://data/node.* HTTP 403"):
        run_ranks(node, denied, {"dp": 1}, 1)


_READER = """
import sys
from pathlib import Path
from msd_daemon.sources.record import ReadMeter
from msd_daemon.sources.binary_file import open_binary
from msd_daemon.stores.options import configure_stores, decode_store_options
import json, hashlib
configure_stores(decode_store_options(json.loads(sys.argv[1])))
for name in sys.argv[2:]:
    with open_binary(name, ReadMeter()) as file:
        print(hashlib.sha256(file.read()).hexdigest())
"""


def test_processes_share_a_disk_cache(
    s3: S3Server, proxy: FaultyServer, options: StoreOptions, tmp_path: Path
) -> None:
    from msd_daemon.stores.options import encode_store_options

    content = bytes(range(251)) * 2000
    s3.put("data", {"cached.bin": content})
    cache = options_for(
        proxy,
        tmp_path,
        cache_dir=str(tmp_path / "cache"),
        cache_bytes_max=4 << 20,
        block_bytes=65536,
        request_bytes_max=131072,
    )
    argument = json.dumps(encode_store_options(cache))
    command = [sys.executable, "-c", _READER, argument, *["s3://data/cached.bin"] * 2]
    first = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    reads = len(proxy.requests)
    again = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert first.stdout == again.stdout
    assert len(proxy.requests) == reads + 2  # sizes and ETags, asked for as no manifest has them
    assert reads == 2 + 4  # and 8 blocks, two a request, once
