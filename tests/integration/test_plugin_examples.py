"""The examples of docs/transforms.md, installed from a temporary folder, do what the page says."""

from __future__ import annotations

import re
import shutil
import sqlite3
import tomllib

import numpy as np
import pytest
from pydantic import TypeAdapter

from federation.model.chunk import RecordStatus
from federation.user_copy import read_copy
from msd_daemon.config.resolve import resolve_job
from msd_daemon.config.transform_file import Transform
from msd_daemon.config.user_code import resolve_user_call
from msd_daemon.sources import manifest
from msd_daemon.sources.formats import all_formats, format_of
from msd_daemon.sources.loader import SourceLoader
from msd_daemon.sources.record import ReadMeter
from msd_daemon.transforms import open_tokenizer
from msd_daemon.transforms.user_check import check_user_call
from msd_daemon.transforms.user_process import open_user_call
from tests.support.sources import ROOT

pytestmark = pytest.mark.processes

PLUGINS = ROOT / "examples" / "plugins"


def forget_formats():
    all_formats.cache_clear()
    manifest._by_extension.cache_clear()


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Install the example package as pip would, into a folder that is on sys.path for a test."""
    project = tomllib.loads((PLUGINS / "pyproject.toml").read_text())
    site = tmp_path / "site"
    info = site / "msd_plugins_example-1.0.dist-info"
    info.mkdir(parents=True)
    name, version = project["project"]["name"], project["project"]["version"]
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = []
    for group, points in project["project"]["entry-points"].items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines))
    for module in project["tool"]["setuptools"]["py-modules"]:
        shutil.copy(PLUGINS / f"{module}.py", site)
    monkeypatch.syspath_prepend(str(site))
    forget_formats()
    yield site
    forget_formats()


def resolved(written, base_dir, store_dir):
    faults = []
    section = TypeAdapter(Transform).validate_python(written)
    rule = resolve_user_call("s.transform", section, base_dir, store_dir, faults)
    assert [fault.line() for fault in faults] == []
    return rule


def opened(rule):
    return open_user_call(rule, memory_bytes_max=1 << 30, sample_s_max=60)


def words(count):
    return " ".join(f"w{number}" for number in range(count))


def test_a_transform_beside_the_job_file(tmp_path):
    shutil.copy(PLUGINS / "ocrlab.py", tmp_path)
    written = {"call": "ocrlab:clean", "options": {"drop": 0.5}}
    rule = resolved(written, tmp_path, tmp_path / "store")
    with opened(rule) as process:
        (one,) = process.call({"text": words(100), "id": 7}, 1)
        assert one["id"] == 7
        assert 30 < len(one["text"].split()) < 70
        assert process.call({"text": words(100), "id": 7}, 1) == [one]
        assert process.call({"text": " "}, 1) == []
    with opened(resolved("ocrlab:clean", tmp_path, tmp_path / "store")) as process:
        halves = [len(half["text"].split()) for half in process.call({"text": words(1001)}, 1)]
        assert halves == [500, 501]
    assert check_user_call(rule, [{"text": words(n)} for n in range(8)]) == []


def test_a_step_of_images(tmp_path):
    shutil.copy(PLUGINS / "ocrlab.py", tmp_path)
    with opened(resolved("ocrlab:jitter", tmp_path, tmp_path / "store")) as process:
        pixels = np.full((4, 6, 3), 100, np.uint8)
        factor = np.random.Generator(np.random.Philox(key=3)).uniform(0.8, 1.2)
        assert (
            process.call_array(pixels, 3).tolist() == np.full((4, 6, 3), int(100 * factor)).tolist()
        )


@pytest.mark.usefixtures("installed")
def test_an_installed_transform_by_name(tmp_path):
    rule = resolved({"use": "clean", "drop": 0.5}, tmp_path, tmp_path / "store")
    assert rule.call == "ocrlab:clean"
    # It is found by way of this process alone, so the transform's process gets a copy.
    assert sorted(read_copy(rule).files) == ["ocrlab.py"]
    with opened(rule) as process:
        (one,) = process.call({"text": words(100)}, 1)
        assert 30 < len(one["text"].split()) < 70


@pytest.fixture
def base(tmp_path):
    """Return a base with 10 samples, two rows of which were removed."""
    path = tmp_path / "a.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE samples (text TEXT, score REAL)")
        rows = [(f"text {number}", number / 2) for number in range(12)]
        connection.executemany("INSERT INTO samples VALUES (?, ?)", rows)
        connection.execute("DELETE FROM samples WHERE rowid IN (2, 11)")
    connection.close()
    return path


JOB = """
tokenizer: {bytes: true}
batch: {rows: 4, row_tokens: 64}
sources: {a: {paths: a.sqlite, shuffle: {is_shuffled: false, block_records: 5}}}
"""


@pytest.mark.usefixtures("installed")
def test_a_reader_gives_blocks_of_records(base):
    source = resolve_job(JOB, base.parent).sources[0]
    assert (source.format, source.order_class) == ("sqlite", "seekable")
    reader = format_of("sqlite").open(source, None, ReadMeter())
    shard = source.shards[0]
    assert reader.measure(shard) == (3, 10)
    blocks = [[record.place for record in reader.records(shard, block)] for block in range(3)]
    assert blocks == [[1, 3, 4, 5], [6, 7, 8, 9, 10], [12]]
    (last,) = reader.records(shard, 2)
    assert (last.fields, last.fields_bytes) == ({"text": "text 11", "score": 5.5}, 7)


@pytest.mark.usefixtures("installed")
def test_a_source_of_the_reader_is_loaded(base):
    job = resolve_job(JOB, base.parent)
    tokenizer = open_tokenizer(job.tokenizer)
    loader = SourceLoader(job.sources[0], 0, tokenizer, job.seed, 0, 1, None, job.fields)
    try:
        payloads = [loader.next_chunk(1 << 16).payload for _ in range(3)]
    finally:
        loader.close()
    text = b"".join(bytes(part.astype(np.uint8)) for parts in payloads for part in parts).decode()
    assert text == "".join(f"text {number}" for number in range(12) if number not in (1, 10))


@pytest.mark.usefixtures("installed")
def test_damage_of_a_file_is_one_record(base):
    source = resolve_job(JOB, base.parent).sources[0]
    base.write_bytes(b"no base at all" * 100)
    reader = format_of("sqlite").open(source, None, ReadMeter())
    (record,) = reader.records(source.shards[0], 0)
    assert record.status == RecordStatus.UNREADABLE
    assert "a.sqlite: file is not a database: mend or remove it" in record.fault


def test_the_page_shows_the_files():
    page = (ROOT / "docs" / "transforms.md").read_text()
    blocks = re.findall(r"```(?:python|toml)\n(.*?)```", page, re.DOTALL)
    sources = [path.read_text() for path in PLUGINS.iterdir() if path.is_file()]
    assert len(blocks) == 5
    for block in blocks:
        assert any(block.strip() in source for source in sources), block
