"""URLs to shards: folders, globs, hidden objects, pairs; hubs and other clouds by their protocols."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import numpy as np
import pytest

import msd_daemon
from msd_client.contract.errors import ConfigError, CorruptRecordError, StoreError
from msd_daemon.config.resolve import resolve_job
from msd_daemon.sources.binary_file import open_binary
from msd_daemon.sources.manifest import expand_paths, resolve_source
from msd_daemon.sources.megatron import MegatronShard
from msd_daemon.sources.record import ReadMeter
from msd_daemon.sources.shard_file import open_shard
from msd_daemon.stores.listing import FolderRule, expand_url
from msd_daemon.stores.options import EndpointOptions, StoreOptions, configure_stores
from tests.support.faulty_proxy import (
    Answer,
    Fault,
    FaultyServer,
    Seen,
    Serve,
    running_server,
    serve_objects,
)
from tests.support.records import open_rows
from tests.unit.msd_daemon.sources.test_mds import sample, write_mds
from tests.unit.msd_daemon.sources.test_megatron import write_megatron

pytest.importorskip("obstore", reason="obstore is not installed (pip install msd[daemon])")

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def serve_bucket(objects: dict[str, bytes], bucket: str = "b") -> Serve:
    """Serve a bucket in the S3 and GCS protocols: reads by path, listings of 1,000 keys."""
    reads = serve_objects(objects)

    def serve(seen: Seen) -> Answer:
        parts = urlsplit(seen.path)
        query = parse_qs(parts.query)
        if "list-type" not in query:
            key = parts.path.removeprefix(f"/{bucket}/")
            return reads(seen._replace(path=f"/{key}"))
        prefix, after = query.get("prefix", [""])[0], query.get("start-after", [""])[0]
        keys = [key for key in sorted(objects) if key.startswith(prefix) and key > after]
        rows = "".join(
            f"<Contents><Key>{key}</Key><Size>{len(objects[key])}</Size>"
            f'<ETag>"{hash(objects[key]) & 0xFFFFFFFF:x}"</ETag>'
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for key in keys[:1000]
        )
        body = f"<ListBucketResult><IsTruncated>false</IsTruncated>{rows}</ListBucketResult>"
        return Answer(200, [("Content-Type", "application/xml")], body.encode())

    return serve


def add_dates(serve: Serve) -> Serve:
    """Give answers the date that obstore wants."""
    date = ("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT")

    def dated(seen: Seen) -> Answer:
        answer = serve(seen)
        return answer._replace(headers=[*answer.headers, date])

    return dated


def configure(tmp_path: Path, **endpoints: EndpointOptions) -> None:
    configure_stores(
        StoreOptions(
            deadline_s=10.0,
            read_timeout_s=2.0,
            shared_dir=str(tmp_path / "shared"),
            endpoints=dict(endpoints),
        )
    )


@pytest.fixture(autouse=True)
def defaults() -> Iterator[None]:
    yield
    configure_stores(StoreOptions())


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[tuple[FaultyServer, dict[str, bytes]]]:
    objects: dict[str, bytes] = {}
    with running_server(serve_bucket(objects)) as server:
        configure(tmp_path, s3=EndpointOptions(endpoint=server.url, is_anonymous=True))
        yield server, objects


Bucket = tuple[FaultyServer, dict[str, bytes]]


def names(paths: list[str], base: Path = Path("/")) -> list[str]:
    return [str(found).removeprefix("s3://b/") for found in expand_paths(paths, base)]


def test_folders_globs_and_keys_give_each_object_once_in_key_order(bucket: Bucket) -> None:
    server, objects = bucket
    for key in ("d/b.jsonl", "d/a.jsonl", "d/e/c.jsonl", "d/.h.jsonl", "d/_t/x.jsonl", "d/README"):
        objects[key] = b"{}\n"
    objects["d/"] = b""
    assert names(["s3://b/d"]) == ["d/a.jsonl", "d/b.jsonl", "d/e/c.jsonl"]
    assert names(["s3://b/d/"]) == names(["s3://b/d"])
    assert names(["s3://b"]) == names(["s3://b/d"])
    assert names(["s3://b/d/*.jsonl"]) == ["d/.h.jsonl", "d/a.jsonl", "d/b.jsonl"]
    assert names(["s3://b/d/**/*.jsonl"]) == sorted(key for key in objects if key.endswith("l"))
    assert names(["s3://b/d/{b,a}.jsonl"]) == ["d/a.jsonl", "d/b.jsonl"]
    assert names(["s3://b/*"]) == names(["s3://b/d"])
    server.requests.clear()
    assert names(["s3://b/d/b.jsonl", "s3://b/d/*"])[:2] == ["d/b.jsonl", "d/.h.jsonl"]
    assert [seen.is_listing for seen in server.requests] == [False, True]
    with pytest.raises(ConfigError, match=r"s3://b/x/\*.jsonl' matches no object"):
        names(["s3://b/x/*.jsonl"])
    with pytest.raises(ConfigError, match="matches no object"):
        names(["s3://b/gone.jsonl"])


def test_unsigned_requests_carry_no_signature(bucket: Bucket) -> None:
    server, objects = bucket
    objects["a.jsonl"] = b"{}\n"
    resolve_source(["s3://b/a.jsonl"], Path("/"))
    assert [seen.path for seen in server.requests] == ["/b/a.jsonl"]
    assert "authorization" not in server.requests[0].headers


def test_a_page_that_fails_is_asked_for_again_alone(bucket: Bucket) -> None:
    server, objects = bucket
    objects.update({f"d/{n:05}.jsonl": b"{}\n" for n in range(2500)})
    server.choose = lambda seen: Fault(503) if seen.number in (0, 2, 3) else None
    assert len(names(["s3://b/d/"])) == 2500
    after = [parse_qs(urlsplit(seen.path).query).get("start-after") for seen in server.requests]
    assert after[1:] == [
        None,
        *[["d/00999.jsonl"]] * 3,
        ["d/01999.jsonl"],
    ]


def test_three_thousand_shards_cost_one_listing_and_no_request_before_the_first_batch(
    bucket: Bucket,
) -> None:
    server, objects = bucket
    line = b'{"text": "a shard of one document"}\n'
    objects.update({f"d/{n % 7}/{n:05}.jsonl": line for n in range(3000)})
    job = {
        "seed": 5,
        "tokenizer": {"bytes": True, "eos": "end"},
        "sources": {"web": {"paths": "s3://b/d/**/*.jsonl"}},
        "mixture": {0: {"web": 1}},
        "batch": {"rows": 2, "row_tokens": 256, "microbatch_rows": 1},
    }
    resolved = resolve_job(job, Path("/"), "job")
    assert len(resolved.sources[0].shards) == 3000
    assert [seen.is_listing for seen in server.requests] == [True] * 4  # the last page is empty
    server.requests.clear()
    with msd_daemon.inline(resolved) as reader:
        step = next(iter(reader))
    assert step.valid_tokens > 400
    # A document has 24 tokens: 22 shards fill the step, the rest is what loaders read ahead.
    assert server.listings() == []
    assert 22 <= len(server.reads()) < 200


def test_fingerprints_come_from_name_size_and_etag_alone(bucket: Bucket) -> None:
    server, objects = bucket
    objects.update({"x/a.jsonl": b"1234\n", "y/a.jsonl": b"1234\n", "z/a.jsonl": b"5678\n"})
    digests = {key: resolve_source([f"s3://b/{key}/"], Path("/")).digest for key in "xyz"}
    assert digests["x"] == digests["y"] != digests["z"]
    assert server.reads() == []


def test_a_megatron_pair_is_read_from_a_store_and_both_halves_are_checked(
    bucket: Bucket, tmp_path: Path
) -> None:
    _, objects = bucket
    write_megatron(tmp_path / "p", [[[1, 2, 3]], [[4, 5]]])
    for file in (tmp_path / "p.bin", tmp_path / "p.idx"):
        objects[f"m/{file.name}"] = file.read_bytes()
    found = [resolve_source([f"s3://b/m/{name}"], Path("/")) for name in ("p", "p.idx", "*", "")]
    assert {manifest.digest for manifest in found} == {found[0].digest}
    (shard,) = found[0].shards
    assert shard.path == "s3://b/m/p.bin"
    opened = MegatronShard(shard, ReadMeter())
    assert opened.document_count == 2
    assert opened.read_tokens(0, 5).tolist() == [1, 2, 3, 4, 5]
    opened.close()
    objects["m/p.idx"] = objects["m/p.idx"][:-1] + b"\x07"
    with pytest.raises(CorruptRecordError, match=r"p.idx has another size or ETag"):
        MegatronShard(shard, ReadMeter())
    del objects["m/p.idx"]
    with pytest.raises(ConfigError, match=r"m/p.idx is not there: p.bin needs it"):
        resolve_source(["s3://b/m/p.bin"], Path("/"), "megatron")


def test_gcs_speaks_its_own_protocol(tmp_path: Path) -> None:
    objects = {"d/a.jsonl": b"0123456789" * 100, "d/b.jsonl": b"{}\n"}
    with running_server(add_dates(serve_bucket(objects))) as server:
        configure(tmp_path, gs=EndpointOptions(endpoint=server.url, is_anonymous=True))
        manifest = resolve_source(["gs://b/d/*.jsonl"], Path("/"))
        assert [shard.path for shard in manifest.shards] == ["gs://b/d/a.jsonl", "gs://b/d/b.jsonl"]
        server.choose = lambda seen: Fault(503) if seen.number % 2 else None
        file = open_shard(manifest.shards[0], ReadMeter())
        assert file.read_at(5, 10) == b"5678901234"
        file.close()
        server.choose = lambda seen: Fault(404)
        with pytest.raises(StoreError, match=r"gs://b/gone is not there \(HTTP 404\)"):
            open_binary("gs://b/gone", ReadMeter())


def test_azure_speaks_its_own_protocol(tmp_path: Path) -> None:
    content = b"0123456789" * 100
    tag = f"{hash(content) & 0xFFFFFFFF:x}"
    rows = (
        "<Blob><Name>d/a.jsonl</Name><Properties>"
        f"<Last-Modified>Wed, 21 Oct 2015 07:28:00 GMT</Last-Modified><Etag>{tag}</Etag>"
        f"<Content-Length>{len(content)}</Content-Length><Content-Type>text</Content-Type><BlobType>BlockBlob</BlobType>"
        "</Properties></Blob>"
    )
    listing = f"<EnumerationResults><Blobs>{rows}</Blobs><NextMarker/></EnumerationResults>"
    reads = add_dates(serve_objects({"acc/c/d/a.jsonl": content}))

    def serve(seen: Seen) -> Answer:
        if seen.is_listing:
            return Answer(200, [("Content-Type", "application/xml")], listing.encode())
        return reads(seen)

    with running_server(serve) as server:
        endpoint = EndpointOptions(f"{server.url}/acc", account="acc", is_anonymous=True)
        configure(tmp_path, az=endpoint)
        manifest = resolve_source(["az://c/d/*"], Path("/"))
        assert [shard.size_bytes for shard in manifest.shards] == [1000]
        file = open_shard(manifest.shards[0], ReadMeter())
        assert file.read_at(995, 10) == b"56789"
        file.close()


def hub_of(files: Mapping[str, bytes]) -> Serve:
    """Serve a dataset repository: its commit, its tree in pages of one file, redirected reads."""

    def oid(content: bytes) -> str:
        return f"{hash(content) & 0xFFFFFFFF:040x}"

    def serve(seen: Seen) -> Answer:
        parts = urlsplit(seen.path)
        if parts.path == "/api/datasets/org/name/revision/main":
            return Answer(200, [], json.dumps({"sha": COMMIT}).encode())
        tree = f"/api/datasets/org/name/tree/{COMMIT}"
        if parts.path.startswith(tree):
            folder = parts.path.removeprefix(tree).lstrip("/")
            page = int(parse_qs(parts.query).get("cursor", ["0"])[0])
            keys = [key for key in sorted(files) if key.startswith(f"{folder}/" if folder else "")]
            entry = {
                "type": "file", "path": keys[page], "size": 130, "oid": "small",
                "lfs": {"oid": oid(files[keys[page]]), "size": len(files[keys[page]])},
            }  # fmt: skip
            entries = [{"type": "directory", "path": "d", "oid": "x", "size": 0}, entry]
            links = []
            if page + 1 < len(keys):
                host = f"http://{seen.headers['host']}"
                links = [("Link", f'<{host}{parts.path}?cursor={page + 1}>; rel="next"')]
            return Answer(200, links, json.dumps(entries).encode())
        prefix = f"/datasets/org/name/resolve/{COMMIT}/"
        if parts.path.startswith(prefix):
            key = unquote(parts.path.removeprefix(prefix))
            moved = [("Location", f"/storage/{key}"), ("X-Linked-Etag", f'"{oid(files[key])}"')]
            return Answer(302, moved, b"")
        stored = {f"storage/{key}": content for key, content in files.items()}
        return serve_objects(stored)(seen)

    return serve


def test_a_hub_is_read_at_the_commit_that_its_branch_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HUB_TOKEN", "hf_secret")
    files = {"d/a.jsonl": b'{"text": "x"}\n' * 50, "d/b.jsonl": b"{}\n", "d/r.md": b"#"}
    with running_server(hub_of(files)) as server:
        configure(tmp_path, hf=EndpointOptions(server.url, token_env="HUB_TOKEN"))
        manifest = resolve_source(["hf://datasets/org/name/d/*.jsonl"], Path("/"))
        assert [shard.path for shard in manifest.shards] == [
            f"hf://datasets/org/name@{COMMIT}/d/a.jsonl",
            f"hf://datasets/org/name@{COMMIT}/d/b.jsonl",
        ]
        assert {seen.headers.get("authorization") for seen in server.requests} == {
            "Bearer hf_secret"
        }
        file = open_shard(manifest.shards[0], ReadMeter())
        assert file.read_at(14, 14) == b'{"text": "x"}\n'
        file.close()
        assert len(expand_url("hf://datasets/org/name/d/a.jsonl", FolderRule(lambda _: True))) == 1


def test_a_data_set_of_a_hub_is_read_as_its_index_says(tmp_path: Path) -> None:
    write_mds(tmp_path / "d", [[sample(n, b"text") for n in range(5)]] * 2, "zstd")
    files = {f"d/{path.name}": path.read_bytes() for path in (tmp_path / "d").iterdir()}
    with running_server(hub_of(files)) as server:
        configure(tmp_path, hf=EndpointOptions(server.url, is_anonymous=True))
        for path in ("hf://datasets/org/name/d/", "hf://datasets/org/name/"):
            manifest = resolve_source([path], Path("/"))
            assert (manifest.format, manifest.compression) == ("mds", "none")
            assert [shard.path for shard in manifest.shards] == [
                f"hf://datasets/org/name@{COMMIT}/d/shard.0000{n}.mds.zstd" for n in range(2)
            ]
            assert [open_rows("mds").measure(shard)[1] for shard in manifest.shards] == [5, 5]


def test_a_listing_that_lies_about_pages_is_refused(tmp_path: Path) -> None:
    def serve(seen: Seen) -> Answer:
        if "/revision/" in seen.path:
            return Answer(200, [], json.dumps({"sha": COMMIT}).encode())
        return Answer(200, [("Link", '<http://evil.example/next>; rel="next"')], b"[]")

    with running_server(serve) as server:
        configure(tmp_path, hf=EndpointOptions(server.url, is_anonymous=True))
        with pytest.raises(StoreError, match="another host"):
            expand_url("hf://datasets/org/name/*.jsonl", FolderRule(lambda _: True))


def test_tokens_of_a_pair_are_little_endian_whatever_the_store(
    bucket: Bucket, tmp_path: Path
) -> None:
    _, objects = bucket
    write_megatron(tmp_path / "q", [[list(range(3000))]])
    for file in (tmp_path / "q.bin", tmp_path / "q.idx"):
        objects[file.name] = file.read_bytes()
    (shard,) = resolve_source(["s3://b/q"], Path("/")).shards
    opened = MegatronShard(shard, ReadMeter())
    np.testing.assert_array_equal(opened.read_tokens(17, 2900), np.arange(17, 2917))
    opened.close()
