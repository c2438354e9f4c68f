"""H24: lines and tars in a store that throttles, resets, cuts and stalls, through a whole node."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from msd_client.contract.errors import StoreError
from msd_daemon.config.resolve import resolve_job
from tests.conftest import StartNode
from tests.support.faulty_proxy import Fault, FaultyServer, Seen, forward_to, running_server
from tests.support.media_corpus import (
    MadeSource,
    Maker,
    Record,
    corpus_job,
    text_of,
    write_tokenizer,
)
from tests.support.media_ledger import MediaLedger, read_media
from tests.support.media_oracle import PayloadOracle, Segment
from tests.support.media_writers import write_captions
from tests.support.node import Node
from tests.support.s3_server import S3Server, running_s3

pytestmark = pytest.mark.processes

FAULTS: dict[str, Fault] = {
    "503": Fault(503, body=b"<Error><Code>SlowDown</Code></Error>"),
    "429": Fault(429, {"Retry-After": "0"}),
    "reset": Fault(reset_after=700),
    "cut": Fault(cut_after=700),
    "shrunk": Fault(shrink_to=700),
    "stall": Fault(stall_after=700),
}


class Stored:
    """Tars and lines in a bucket, the same beside them on disk, and what an epoch delivers."""

    def __init__(self, folder: Path, s3: S3Server) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        maker = Maker(11)
        captions = write_captions(folder, maker, 60)
        lines = [Record(f"l{n}", [maker.words(40)]) for n in range(120)]
        self.write_lines(lines)
        self.sources = [
            captions, MadeSource("lines", {"paths": str(folder / "lines-*.jsonl")}, [lines]),
        ]  # fmt: skip
        write_tokenizer(folder / "tokenizer.json", maker.vocabulary)
        (folder / "template.jinja").write_text("")
        s3.put("data", {path.name: path.read_bytes() for path in folder.glob("*-*.*")})

    def write_lines(self, records: list[Record]) -> None:
        for number in range(3):
            own = records[number::3]
            texts = [json.dumps({"text": text_of(record.parts[0])}) for record in own]  # type: ignore[arg-type]
            (self.folder / f"lines-{number}.jsonl").write_text("\n".join(texts) + "\n")

    def job(self, place: str, **changes: Any) -> dict[str, Any]:
        job = corpus_job(self.folder, self.sources, epochs=1)
        del job["chat"], job["audio"], job["placeholder"]["audio"]
        del job["batch"]["microbatch_frames"]
        sources = {
            "captions": self.sources[0].section | {"paths": f"{place}/captions-*.tar"},
            "lines": {"paths": f"{place}/lines-*.jsonl"},
        }
        return job | {"sources": sources} | changes

    def epoch(self) -> Counter[Segment]:
        job = self.job(str(self.folder))
        resolved = resolve_job(job, self.folder, store_dir=self.folder / "store")
        oracle = PayloadOracle(job, resolved.media)
        return sum((oracle.epoch(source)[0] for source in self.sources), Counter())


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with running_s3() as server:
        server.make_bucket("data")
        yield server


@pytest.fixture(scope="module")
def stored(s3: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Stored:
    return Stored(tmp_path_factory.mktemp("stored"), s3)


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[FaultyServer]:
    with running_server(forward_to(s3.port)) as server:
        yield server


@pytest.fixture(scope="module")
def wanted(stored: Stored) -> Counter[Segment]:
    return stored.epoch()


def start(start_node: StartNode, proxy: FaultyServer, workers: int, **settings: str) -> Node:
    """Start a daemon that reads the bucket through the proxy, a few KiB a request."""
    endpoint = f'endpoint = "{proxy.url}", access_key_env = "KEY_ID", secret_key_env = "SECRET"'
    environ = {
        "MSD__STORES__ENDPOINTS": f"{{s3 = {{{endpoint}}}}}",
        "MSD__STORES__BLOCK_BYTES": "4Ki",
        "MSD__STORES__REQUEST_BYTES": "8Ki",
        "KEY_ID": "AKIAEXAMPLEKEYID0001",
        "SECRET": "wJalrXUtnFEMISECRETKEY",
    } | settings
    return start_node("--loader-workers", str(workers), environ=environ)


def every(count: int, fault: Fault) -> Callable[[Seen], Fault | None]:
    """Return what breaks every so manieth read."""
    lock, seen = threading.Lock(), [0]

    def choose(request: Seen) -> Fault | None:
        if request.is_listing:
            return None
        with lock:
            seen[0] += 1
            return fault if seen[0] % count == 1 else None

    return choose


@pytest.mark.parametrize("kind", FAULTS)
def test_no_sample_is_lost_repeated_or_cut(
    start_node: StartNode,
    proxy: FaultyServer,
    stored: Stored,
    wanted: Counter[Segment],
    kind: str,
) -> None:
    settings = {"MSD__STORES__READ_TIMEOUT_S": "0.3"} if kind == "stall" else {}
    node = start(start_node, proxy, 2, **settings)
    proxy.choose = every(5, FAULTS[kind])
    ledger = read_media(node, stored.job("s3://data"), {"dp": 2}, None)
    delivered = ledger.segments()
    assert not wanted - delivered
    assert not delivered - wanted
    assert "unreadable" not in ledger.drops()["captions"]
    assert not ledger.drops()["lines"]
    broken = len(proxy.reads()) // 5
    assert broken > 10, f"{len(proxy.reads())} reads"
    print(f"{kind}: {len(proxy.reads())} reads, {broken} of them broken")


def test_another_job_keeps_flowing_while_the_store_is_out(
    start_node: StartNode, proxy: FaultyServer, stored: Stored, wanted: Counter[Segment]
) -> None:
    """One source's storm stops no other: local rows flow, and the storm's end is its own."""
    node = start(start_node, proxy, 2)
    is_over = threading.Event()
    steps: list[int] = []

    def choose(request: Seen) -> Fault | None:
        return None if request.is_listing or is_over.is_set() else FAULTS["503"]

    proxy.choose = choose
    found: list[MediaLedger] = []

    def read_remote() -> None:
        note = lambda _data, step: steps.append(step.number)  # noqa: E731
        job = stored.job("s3://data", name="remote")
        found.append(read_media(node, job, {"dp": 1}, None, on_step=note))

    thread = threading.Thread(target=read_remote)
    thread.start()
    try:
        while not proxy.reads():
            thread.join(0.01)
        local = read_media(node, stored.job(str(stored.folder), name="local"), {"dp": 1}, None)
        assert not steps
    finally:
        is_over.set()
        thread.join(60)
    assert not thread.is_alive()
    assert local.segments() == wanted
    assert found[0].segments() == wanted
    assert found[0].rows() == local.rows()


def test_rows_from_a_store_are_those_of_local_files(
    start_node: StartNode, proxy: FaultyServer, stored: Stored
) -> None:
    node = start(start_node, proxy, 1)
    proxy.choose = every(4, FAULTS["503"])
    remote = read_media(node, stored.job("s3://data", name="remote"), {"dp": 1}, None)
    local = read_media(node, stored.job(str(stored.folder), name="local"), {"dp": 1}, None)
    assert remote.rows() == local.rows()


@pytest.mark.parametrize("pattern", ["captions-", "lines-"])
def test_a_storm_without_end_names_bucket_and_key(
    start_node: StartNode, proxy: FaultyServer, stored: Stored, pattern: str
) -> None:
    node = start(start_node, proxy, 1, MSD__STORES__DEADLINE_S="1.0")
    proxy.choose = lambda seen: FAULTS["503"] if f"/{pattern}" in seen.path else None
    with pytest.raises(StoreError, match=rf"s3://data/{pattern}\d\..* HTTP 503 SlowDown"):
        read_media(node, stored.job("s3://data"), {"dp": 1}, None)
