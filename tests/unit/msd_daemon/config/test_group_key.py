"""The key `group` of a source: how it is written, and what is refused when it is."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from federation.model.job import GroupRule, ResolvedJob
from msd_client.contract.errors import ConfigError
from msd_daemon.config.resolve import resolve_job


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    line = json.dumps({"text": "one", "pair": 1}) + "\n"
    (tmp_path / "a.jsonl").write_text(line)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(line.encode()))
    (tmp_path / "a.txt").write_text("one\n")
    pq.write_table(pa.table({"text": ["one"], "pair": [1]}), tmp_path / "a.parquet")
    (tmp_path / "lab.py").write_text("def two(sample, rng):\n    return [sample, sample]\n")
    return tmp_path


def resolved(folder: Path, source: dict[str, Any], **batch: Any) -> ResolvedJob:
    job = {
        "tokenizer": {"bytes": True},
        "batch": {"rows": 2, "row_tokens": 16} | batch,
        "sources": {"a": source},
    }
    return resolve_job(job, folder, "job", folder / "store")


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_a_field_names_the_group_of_plain_records(folder: Path, name: str) -> None:
    job = resolved(folder, {"paths": name, "group": {"field": "pair"}})
    assert job.sources[0].group == GroupRule("field", "pair")
    assert job.sources[0].group_field == "pair"
    assert job.sources[0].recipe is None
    assert job.has_groups


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.txt"])
def test_a_record_is_a_group_where_a_transform_makes_several_samples(
    folder: Path, name: str
) -> None:
    job = resolved(folder, {"paths": name, "transform": "lab:two", "group": "record"})
    assert job.sources[0].group == GroupRule("record")
    assert job.sources[0].group_field == ""


@pytest.mark.parametrize(
    ("source", "batch", "told"),
    [
        ({"paths": "a.jsonl", "group": "pair"}, {}, r"sources\.a\.group"),
        ({"paths": "a.jsonl", "group": {"key": "pair"}}, {}, r"sources\.a\.group"),
        ({"paths": "a.jsonl", "group": "record"}, {}, r"sources\.a\.group: .*no transform"),
        (
            {"paths": "a.jsonl.gz", "group": {"field": "pair"}},
            {},
            r"sources\.a\.group\.field: \"pair\": jsonl gz is read as a stream",
        ),
        (
            {"paths": "a.txt", "group": {"field": "pair"}},
            {},
            r"sources\.a\.group\.field: \"pair\": format text has no fields",
        ),
        ({"paths": "a.parquet", "group": {"field": "pear"}}, {}, "pear"),
        (
            {"paths": "a.jsonl", "group": {"field": "pair"}},
            {"packing": "padded"},
            r"batch\.packing: \"padded\": a group needs one row",
        ),
        (
            {"paths": "a.jsonl", "group": {"field": "pair"}},
            {"row_tokens": {0: 16, 9: 8}},
            r"batch\.row_tokens: .*groups cannot be cut",
        ),
    ],
)
def test_what_does_not_fit_is_a_fault_of_its_key(
    folder: Path, source: dict[str, Any], batch: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        resolved(folder, source, **batch)
