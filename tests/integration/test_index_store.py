"""Nodes share the indexes of shards through a folder or a bucket (E19)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from msd_client.contract.errors import ConfigError
from msd_daemon.sources.index import IndexStore
from msd_daemon.sources.index_build import build_index
from msd_daemon.stores.options import (
    EndpointOptions,
    StoreOptions,
    check_store_options,
    configure_stores,
)
from tests.support.s3_server import running_s3
from tests.support.sources import compress, json_lines, make_loader, make_spec, read_stream

TEXTS = [f"text {n} " * 40 for n in range(2000)]


@pytest.fixture
def configured(tmp_path: Path) -> Iterator[StoreOptions]:
    yield StoreOptions(shared_dir=str(tmp_path / "limits"))
    configure_stores(StoreOptions())


def share(tmp_path: Path) -> None:
    """Build an index on one node, take it on another, and read on from its middle."""
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(compress(json_lines(TEXTS), "zst", pieces=6))
    spec = make_spec([path])
    shard = spec.shards[0]
    here, there = tmp_path / "here", tmp_path / "there"
    assert IndexStore(there, spec).load(shard) is None
    built = build_index(spec, 0, here)
    assert built is not None
    taken = IndexStore(there, spec).load(shard)
    assert taken is not None
    assert (taken.records, taken.starts.tolist()) == (built.records, built.starts.tolist())
    assert taken.seek_points == built.seek_points
    assert [file.name for file in there.iterdir()] == [file.name for file in here.iterdir()]
    whole = read_stream(make_loader(spec))
    assert read_stream(make_loader(spec, index_dir=there)) == whole


def test_a_shared_folder(tmp_path: Path, configured: StoreOptions) -> None:
    configure_stores(replace(configured, index_store=str(tmp_path / "shared")))
    share(tmp_path)


def test_a_bucket(
    tmp_path: Path, configured: StoreOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    with running_s3() as server:
        server.make_bucket("indexes")
        endpoint = EndpointOptions(endpoint=f"http://127.0.0.1:{server.port}", region="us-east-1")
        configure_stores(
            replace(configured, index_store="s3://indexes/msd", endpoints={"s3": endpoint})
        )
        share(tmp_path)


def test_a_place_that_does_not_answer_costs_nothing_but_the_index(
    tmp_path: Path, configured: StoreOptions
) -> None:
    endpoint = EndpointOptions(endpoint="http://127.0.0.1:9", region="us-east-1")
    configure_stores(
        replace(
            configured,
            index_store="s3://indexes/msd",
            endpoints={"s3": replace(endpoint, is_anonymous=True)},
            deadline_s=0.3,
        )
    )
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(compress(json_lines(TEXTS[:600]), "zst", pieces=2))
    spec = make_spec([path])
    assert build_index(spec, 0, tmp_path / "here") is not None


@pytest.mark.parametrize("place", ["https://host/indexes", "hf://datasets/x", "relative/folder"])
def test_places_that_are_not_written_are_refused(place: str) -> None:
    with pytest.raises(ConfigError, match=r"stores\.index_store"):
        check_store_options(StoreOptions(index_store=place))
