"""Reading over HTTP from servers that behave, and from those that do not."""

from __future__ import annotations

import io
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from msd_client.contract.errors import ConfigError, CorruptRecordError, StoreError
from msd_daemon.sources.binary_file import BinaryFile, open_binary
from msd_daemon.sources.manifest import resolve_source
from msd_daemon.sources.record import ReadMeter
from msd_daemon.sources.shard_file import open_path, open_shard
from msd_daemon.stores import read_object
from msd_daemon.stores.options import StoreOptions, configure_stores
from msd_daemon.stores.store import open_store
from tests.support.faulty_proxy import Answer, Fault, FaultyServer, running_server, serve_objects

CONTENT = random.Random(7).randbytes(100_003)


@pytest.fixture(autouse=True)
def options(tmp_path: Path) -> Iterator[StoreOptions]:
    found = StoreOptions(
        read_timeout_s=0.4,
        deadline_s=20.0,
        block_bytes=4096,
        request_bytes_max=16384,
        memory_bytes_max=1 << 20,
        shared_dir=str(tmp_path / "shared"),
    )
    configure_stores(found)
    yield found
    configure_stores(StoreOptions())


@pytest.fixture
def server() -> Iterator[FaultyServer]:
    with running_server(serve_objects({"d/a.bin": CONTENT, "empty.txt": b""})) as found:
        yield found


def test_any_range_is_that_of_a_file(server: FaultyServer, tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(CONTENT)
    meters = ReadMeter(), ReadMeter()
    local = open_path(str(tmp_path / "a.bin"), meters[0])
    remote = open_path(f"{server.url}/d/a.bin", meters[1])
    draw = random.Random(11)
    places = [(draw.randrange(110_000), draw.randrange(20_000)) for _ in range(200)]
    for offset, count in [(0, 0), (0, 200_000), (100_002, 5), (100_003, 5), (4095, 2), *places]:
        assert remote.read_at(offset, count) == local.read_at(offset, count)
    assert meters[0] == meters[1]
    assert remote.size_bytes == len(CONTENT)
    local.close()
    remote.close()
    remote.close()


def test_a_python_file_object_behaves_as_one(server: FaultyServer) -> None:
    draw = random.Random(3)
    with open_binary(f"{server.url}/d/a.bin", ReadMeter()) as file, io.BytesIO(CONTENT) as want:
        for _ in range(100):
            place, count = draw.randrange(len(CONTENT)), draw.randrange(9000)
            assert file.seek(place) == want.seek(place)
            assert file.read(count) == want.read(count)
            assert file.tell() == want.tell()
        assert file.seek(-5, os.SEEK_END) == want.seek(-5, os.SEEK_END)
        buffer = bytearray(8)
        assert file.readinto(buffer) == 5
        assert buffer[:5] == CONTENT[-5:]
        assert file.read() == b""
        assert file.seek(-3, os.SEEK_CUR) == len(CONTENT) - 3
        assert file.readall() == CONTENT[-3:]
        with pytest.raises(ValueError, match="before the file's beginning"):
            file.seek(-1)
        assert (file.size(), file.readable(), file.seekable()) == (len(CONTENT), True, True)
    assert file.closed
    with pytest.raises(ValueError, match="closed"):
        file.read(1)


def test_an_empty_object_has_no_bytes(server: FaultyServer) -> None:
    assert read_object(f"{server.url}/empty.txt", 10) == b""
    with open_binary(f"{server.url}/empty.txt", ReadMeter()) as file:
        assert file.read() == b""


def test_a_whole_object_over_its_limit_is_refused_after_one_request(server: FaultyServer) -> None:
    with pytest.raises(CorruptRecordError, match="has 100003 bytes, at most 1000 are read"):
        read_object(f"{server.url}/d/a.bin", 1000)
    assert len(server.requests) == 1
    assert read_object(f"{server.url}/d/a.bin", 1 << 20) == CONTENT


def test_a_sequential_read_takes_few_requests_and_an_advised_one_takes_no_more(
    server: FaultyServer,
) -> None:
    manifest = resolve_source([f"{server.url}/d/a.bin"], Path("/"), "text")
    server.requests.clear()
    file = open_shard(manifest.shards[0], ReadMeter())
    file.advise(20_000, 10_000)
    assert file.read_at(20_000, 100) == CONTENT[20_000:20_100]
    assert file.read_at(20_100, 9_900) == CONTENT[20_100:30_000]
    file.close()
    assert [seen.range for seen in server.requests] == ["bytes=16384-32767"]


def test_a_server_without_ranges_is_refused_where_it_would_send_more(tmp_path: Path) -> None:
    objects = {"big.bin": CONTENT, "small.bin": CONTENT[:1]}
    with running_server(serve_objects(objects, knows_ranges=False)) as server:
        with pytest.raises(StoreError, match=r"big.bin cannot be read: .*byte ranges"):
            open_path(f"{server.url}/big.bin", ReadMeter())
        assert read_object(f"{server.url}/small.bin", 100) == CONTENT[:1]


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        (Answer(206, [("Content-Range", "bytes 7-106/1000")], b"x" * 100), "asked for"),
        (Answer(206, [("Content-Range", "nonsense")], b"x" * 100), "does not say which"),
        (Answer(206, [], b"x" * 100), "does not say which"),
        (Answer(206, [("Content-Range", "bytes 0-99/1000")], b"x" * 99), "99 bytes of the 100"),
        (Answer(302, [("Location", "/loop")], b""), "over 5 redirects"),
        (Answer(302, [("Location", "file:///etc/passwd")], b""), "no HTTP URL"),
    ],
)
def test_answers_that_contradict_the_request_are_never_bytes(
    answer: Answer, match: str, tmp_path: Path
) -> None:
    configure_stores(StoreOptions(deadline_s=0.3, shared_dir=str(tmp_path / "shared")))
    with running_server(lambda _: answer) as server:
        store = open_store(f"{server.url}/x")
        with pytest.raises(StoreError, match=match):
            store.read("x", 0, 100)


def test_credentials_do_not_follow_to_another_host() -> None:
    from msd_daemon.stores.http_client import HttpClient

    with running_server(lambda _: Answer(200, [], b"body")) as target:
        moved = Answer(307, [("Location", f"{target.url}/there"), ("X-Linked-Etag", '"abc"')], b"")
        with running_server(lambda _: moved) as first:
            client = HttpClient(5, 5)
            reply = client.get(f"{first.url}/here", {"Authorization": "Bearer secret"})
            client.close()
            assert bytes(reply.body) == b"body"
            assert reply.linked_etag == '"abc"'
            assert first.requests[0].headers["authorization"] == "Bearer secret"
        assert "authorization" not in target.requests[0].headers


def test_braces_name_shards_and_globs_are_refused() -> None:
    objects = {f"s-{n:02}.jsonl": b'{"text": "x"}\n' * n for n in range(1, 12)}
    with running_server(serve_objects(objects)) as server:
        manifest = resolve_source([server.url + "/s-{08..11}.jsonl"], Path("/"))
        assert [shard.path for shard in manifest.shards] == [
            f"{server.url}/s-{number}.jsonl" for number in ("08", "09", "10", "11")
        ]
        assert [shard.size_bytes for shard in manifest.shards] == [112, 126, 140, 154]
        assert len(server.requests) == 4
        with pytest.raises(ConfigError, match="a web server cannot be listed"):
            resolve_source([server.url + "/s-*.jsonl"], Path("/"))
        with pytest.raises(StoreError, match=r"s-99.jsonl is not there"):
            resolve_source([server.url + "/s-99.jsonl"], Path("/"))


def test_another_host_keeps_its_rate_while_one_throttles(server: FaultyServer) -> None:
    with running_server(serve_objects({"b.bin": CONTENT[:10]})) as calm:
        server.choose = lambda seen: Fault(503) if seen.number < 4 else None
        first, second = open_store(f"{server.url}/d/a.bin"), open_store(f"{calm.url}/b.bin")
        first.read("d/a.bin", 0, 10)
        for _ in range(10):
            second.read("b.bin", 0, 10)
        assert first.counts.retries == 4
        assert second.counts.retries == second.counts.throttled == 0
        assert len(calm.requests) == 10


def test_a_failing_read_keeps_its_own_error_through_a_library(server: FaultyServer) -> None:
    file: BinaryFile = open_binary(f"{server.url}/d/a.bin", ReadMeter())
    server.choose = lambda seen: Fault(404)
    with pytest.raises(StoreError):
        file.read(10)
    assert isinstance(file.failure, StoreError)
    file.close()
