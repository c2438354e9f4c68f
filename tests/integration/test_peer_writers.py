"""Shards that the peers' own writers made are read back exactly (MosaicML, LitData, datasets)."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from msd_client.contract.errors import ConfigError
from msd_daemon.sources.arrow_folder import dataset_shards
from msd_daemon.sources.record import MediaPath
from tests.support import peer_rows as rows
from tests.support.peers import peers_python
from tests.support.records import (
    fields_of,
    open_rows,
    read_folder,
    read_rows,
    shard_of,
    small_blocks,
)
from tests.support.sources import ROOT

needs_peers = pytest.mark.skipif(
    peers_python() is None,
    reason="the peers' environment is not there: python tests/support/peers.py .venv-peers",
)
pytestmark = [needs_peers, pytest.mark.timeout(300)]


def written(folder: Path, what: str) -> Path:
    script = ROOT / "tests/support/peer_writer.py"
    subprocess.run(
        [str(peers_python()), str(script), str(folder), what], check=True, capture_output=True
    )
    return folder


@pytest.fixture(scope="module")
def mds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("mds"), "mds")


@pytest.fixture(scope="module")
def litdata(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("litdata"), "litdata")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("datasets"), "datasets")


def assert_equal(found: Any, expected: Any) -> None:
    if isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype
        assert found.tolist() == expected.tolist()
        assert found.shape == expected.shape
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_equal(found[key], value)
    else:
        assert found == expected
        assert type(found) is type(expected)


@pytest.mark.parametrize("compression", ["none", "zstd", "gz", "bz2", "br", "snappy"])
def test_mds_of_every_compression_and_encoding(mds: Path, compression: str) -> None:
    found = fields_of(read_folder("mds", mds / compression, shuffle=small_blocks(7)))
    assert len(found) == 50
    for number, fields in enumerate(found):
        expected = rows.mds_row(number)
        expected["str_decimal"] = str(expected["str_decimal"])
        assert_equal(fields, expected)


def test_pickled_mds_columns_are_refused_or_left_out(mds: Path) -> None:
    path = mds / "pickled" / "shard.00000.mds"
    with pytest.raises(ConfigError, match="column 'x' is pickled"):
        open_rows("mds", [path])
    assert fields_of(read_rows("mds", path, ("y",))) == [{"y": 3}]


@pytest.mark.parametrize("layout", ["plain", "batch", "sample", "chunk"])
def test_litdata_of_every_layout(litdata: Path, layout: str) -> None:
    found = fields_of(read_folder("litdata", litdata / layout, shuffle=small_blocks(11)))
    assert len(found) == 300
    for number, fields in enumerate(found):
        assert_equal(fields, rows.litdata_row(number))


@pytest.mark.parametrize("layout", ["rows", "rows_zstd"])
def test_litdata_of_nested_rows(litdata: Path, layout: str) -> None:
    found = fields_of(read_folder("litdata", litdata / layout, shuffle=small_blocks(100)))
    assert found == [rows.nested_row(number) for number in range(1000)]


def test_litdata_of_packed_lists_and_maps(litdata: Path) -> None:
    found = fields_of(read_folder("litdata", litdata / "mixed"))
    assert len(found) == 20
    for number, fields in enumerate(found):
        assert_equal(fields, rows.mixed_row(number))


def test_litdata_of_tokens(litdata: Path) -> None:
    found = fields_of(read_folder("litdata", litdata / "tokens"))
    assert [fields["tokens"].tolist() for fields in found] == [
        list(range(n + 1)) for n in range(40)
    ]


def test_pickled_litdata_fields_are_refused_or_left_out(litdata: Path) -> None:
    path = litdata / "pickled" / "chunk-0-0.bin"
    with pytest.raises(ConfigError, match="'pickle' is pickled"):
        open_rows("litdata", [path])
    assert fields_of(read_rows("litdata", path, ("y",))) == [{"y": n} for n in range(4)]


def test_a_saved_dataset_and_a_shuffled_one(saved: Path) -> None:
    found = fields_of(read_folder("arrow", saved / "saved"))
    assert [fields["id"] for fields in found] == list(range(3000))
    for number in (0, 1, 2, 49, 2999):
        expected = rows.dataset_row(number)
        scores = found[number].pop("scores")
        assert scores.tolist() == expected.pop("scores")
        assert found[number] == expected
    shuffled = [fields["id"] for fields in fields_of(read_folder("arrow", saved / "shuffled"))]
    assert sorted(shuffled) == list(range(3000))
    assert shuffled != list(range(3000))


def test_a_folder_of_splits_names_them(saved: Path) -> None:
    with pytest.raises(ConfigError, match="holds the splits train, test: name the folder of one"):
        dataset_shards(saved / "splits")
    assert len(read_folder("arrow", saved / "splits" / "test")) == 3000


def test_images_of_a_dataset_in_parquet_and_arrow(saved: Path) -> None:
    parquet = saved / "train-00000-of-00001.parquet"
    found = fields_of(read_rows("parquet", parquet))
    assert found == fields_of(read_folder("arrow", saved / "pictures"))
    assert [fields["image"] for fields in found] == [
        None if n == 0 else b"x" * n for n in range(10)
    ]
    assert not isinstance(found[1]["image"], MediaPath)
    assert open_rows("parquet", [parquet]).measure(shard_of(parquet)) == (1, 10)
