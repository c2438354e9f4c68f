"""Data sets that are folders, tars and tables in a real S3 server: the tokens of equal local files."""

from __future__ import annotations

import csv
import io
import json
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pyarrow as pa
import pytest

import msd_daemon
from msd_client.contract.errors import (
    ConfigError,
    CorruptRecordError,
    MsdError,
    StoreMissingError,
)
from msd_daemon.config.resolve import resolve_job
from msd_daemon.sources.manifest import resolve_source
from msd_daemon.sources.record import ReadMeter
from msd_daemon.sources.shard_file import open_shard
from msd_daemon.stores.options import EndpointOptions, StoreOptions, configure_stores
from tests.support.faulty_proxy import FaultyServer, forward_to, running_server, serve_objects
from tests.support.s3_server import S3Server, running_s3
from tests.unit.msd_daemon.sources import test_litdata, test_mds

TEXTS = [f"document {n} " + "word " * (n * 7 % 40) for n in range(300)]


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with running_s3() as server:
        server.make_bucket("data")
        yield server


@pytest.fixture
def proxy(s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    monkeypatch.setenv("TEST_KEY_ID", "AKIAEXAMPLE")
    monkeypatch.setenv("TEST_SECRET", "secret")
    with running_server(forward_to(s3.port)) as server:
        endpoint = EndpointOptions(
            endpoint=server.url, access_key_env="TEST_KEY_ID", secret_key_env="TEST_SECRET"
        )
        shared = str(tmp_path / "shared")
        configure_stores(StoreOptions(shared_dir=shared, endpoints={"s3": endpoint}))
        yield server
        configure_stores(StoreOptions())


def write_mds(folder: Path, packed_as: str = "") -> None:
    samples = [test_mds.sample(n, text.encode()) for n, text in enumerate(TEXTS)]
    test_mds.write_mds(folder, [samples[:90], samples[90:200], samples[200:]], packed_as)


def write_litdata(folder: Path) -> None:
    folder.mkdir()
    items = [test_litdata.item(n, text.encode()) for n, text in enumerate(TEXTS)]
    chunks = {"b.bin": test_litdata.chunk(items[:120]), "a.bin": test_litdata.chunk(items[120:])}
    test_litdata.write(folder, chunks, [120, 180])


def write_saved(folder: Path) -> None:
    """Write what `save_to_disk` does, and a cached table that is no shard of it."""
    folder.mkdir()
    parts = {"data-0.arrow": TEXTS[:100], "data-1.arrow": TEXTS[100:], "cache-1.arrow": ["wrong"]}
    for name, texts in parts.items():
        table = pa.table({"text": texts})
        with (
            pa.OSFile(str(folder / name), "wb") as file,
            pa.ipc.new_stream(file, table.schema) as writer,
        ):
            writer.write_table(table)
    files = [{"filename": name} for name in list(parts)[:2]]
    (folder / "state.json").write_text(json.dumps({"_data_files": files}))
    (folder / "dataset_info.json").write_text("{}")


def write_tars(folder: Path) -> None:
    folder.mkdir()
    for number in range(3):
        with tarfile.open(folder / f"{number:03}.tar", "w") as tar:
            for n in range(number, len(TEXTS), 3):
                member = tarfile.TarInfo(f"{n:05}.txt")
                member.size = len(TEXTS[n])
                tar.addfile(member, io.BytesIO(TEXTS[n].encode()))


def write_tables(folder: Path) -> None:
    folder.mkdir()
    for number in range(2):
        with (folder / f"{number}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["id", "text"])
            writer.writerows([n, TEXTS[n]] for n in range(number, len(TEXTS), 2))


KINDS: dict[str, tuple[Callable[[Path], None], str]] = {
    "mds": (write_mds, "mds"),
    "mds_zstd": (lambda folder: write_mds(folder, "zstd"), "mds"),
    "litdata": (write_litdata, "litdata"),
    "saved": (write_saved, "arrow"),
    "tars": (write_tars, "webdataset"),
    "tables": (write_tables, "csv"),
}


def put(s3: S3Server, folder: Path, prefix: str) -> None:
    files = [path for path in folder.rglob("*") if path.is_file()]
    s3.put("data", {f"{prefix}/{path.relative_to(folder)}": path.read_bytes() for path in files})


def job(place: str, **source: object) -> dict[str, object]:
    return {
        "seed": 5,
        "tokenizer": {"bytes": True, "eos": "end"},
        "sources": {
            "one": {"paths": place, "text": "txt" if "tars" in place else "text", **source}
        },
        "batch": {"rows": 4, "row_tokens": 512, "microbatch_rows": 4},
        "epochs": 1,
    }


def rows_of(section: dict[str, object]) -> list[list[int]]:
    with msd_daemon.inline(section) as reader:
        return [row.tokens.tolist() for step in reader for row in step.rows]


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_folder_in_a_store_gives_the_tokens_of_a_local_one(
    kind: str, s3: S3Server, proxy: FaultyServer, tmp_path: Path
) -> None:
    write, name = KINDS[kind]
    local = tmp_path / kind
    write(local)
    put(s3, local, kind)
    resolved = resolve_job(job(f"s3://data/{kind}/"), Path("/"), "job")
    assert resolved.sources[0].format == name
    # One page of a listing, and the bytes of the data set's index once: each format asks for its size.
    assert len(proxy.listings()) == 1
    asked = [urlsplit(seen.path).path for seen in proxy.reads()]
    index = {"mds": "index.json", "litdata": "index.json", "arrow": "state.json"}.get(name)
    assert set(asked) == ({f"/data/{kind}/{index}"} if index else set())
    assert len(asked) <= 3
    want = rows_of(job(str(local)))
    assert sum(len(row) for row in want) >= sum(len(text) + 1 for text in TEXTS)
    assert rows_of(job(f"s3://data/{kind}")) == want
    assert rows_of(job(f"s3://data/{kind}", format=name)) == want
    assert rows_of(job(str(local), format=name)) == want


def test_shards_by_glob_know_their_index_and_what_changed_is_told(
    s3: S3Server, proxy: FaultyServer, tmp_path: Path
) -> None:
    write_mds(tmp_path / "d", "zstd")
    put(s3, tmp_path / "d", "glob/d")
    found = resolve_source(["s3://data/glob/d/*.mds.zstd"], Path("/"))
    assert (found.format, found.compression, len(found.shards)) == ("mds", "none", 3)
    whole = resolve_source(["s3://data/glob/*"], Path("/"))
    assert whole.digest == found.digest == resolve_source(["s3://data/glob"], Path("/")).digest
    text = (tmp_path / "d" / "index.json").read_bytes()
    s3.put("data", {"glob/d/index.json": text + b" "})
    changed = resolve_source(["s3://data/glob"], Path("/"))
    own = [shard.fingerprint.partition("-") for shard in (found.shards[0], changed.shards[0])]
    assert own[0][0] == own[1][0] and own[0][2] != own[1][2]
    shard = found.shards[0]
    s3.put("data", {shard.path.removeprefix("s3://data/"): b"x" * shard.size_bytes})
    with pytest.raises(CorruptRecordError, match=r"shard.00000.mds.zstd has another ETag"):
        open_shard(shard, ReadMeter()).read_at(0, 10)


def test_what_a_data_set_lacks_is_named(s3: S3Server, proxy: FaultyServer, tmp_path: Path) -> None:
    write_mds(tmp_path / "d")
    (tmp_path / "d" / "shard.00001.mds").unlink()
    put(s3, tmp_path / "d", "lacks")
    with pytest.raises(StoreMissingError, match=r"s3://data/lacks/shard.00001.mds is not there"):
        resolve_source(["s3://data/lacks"], Path("/"))
    s3.put("data", {"alone/shard.00000.mds": (tmp_path / "d" / "shard.00000.mds").read_bytes()})
    with pytest.raises(
        ConfigError, match=r"alone/index.json is not there: shard.00000.mds needs it"
    ):
        resolve_source(["s3://data/alone/shard.00000.mds"], Path("/"))
    with pytest.raises(ConfigError, match="shards of folder are folders of this machine"):
        resolve_source(["s3://data/alone"], Path("/"), "folder")


def test_lists_beside_the_data_are_left_out_as_of_a_local_folder(
    s3: S3Server, proxy: FaultyServer, tmp_path: Path
) -> None:
    s3.put("data", {"mixed/a.jsonl": b'{"text": "x"}\n', "mixed/list.csv": b"id\n1\n"})
    found = resolve_source(["s3://data/mixed"], Path("/"))
    assert [shard.path for shard in found.shards] == ["s3://data/mixed/a.jsonl"]
    s3.put("data", {"lists/one.csv": b"text\nx\n"})
    assert resolve_source(["s3://data/lists"], Path("/")).format == "csv"


def test_a_data_set_on_a_web_server_is_found_by_its_index(tmp_path: Path) -> None:
    write_mds(tmp_path / "d")
    files = {f"d/{path.name}": path.read_bytes() for path in (tmp_path / "d").iterdir()}
    with running_server(serve_objects(files)) as server:
        configure_stores(StoreOptions(shared_dir=str(tmp_path / "shared")))
        try:
            want = rows_of(job(str(tmp_path / "d")))
            assert rows_of(job(f"{server.url}/d/")) == want
            with pytest.raises(MsdError, match="a folder, a web server cannot be listed"):
                resolve_job(job(f"{server.url}/nothing/"), Path("/"), "job")
        finally:
            configure_stores(StoreOptions())
