"""`msdctl check` reads a few records of every source and runs the user's code on them twice."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from federation.model.chunk import RecordStatus
from msd_client.msdctl import main, verbs
from msd_daemon.config.resolve import resolve_job
from msd_daemon.sources.trial import try_source
from msd_daemon.transforms import open_tokenizer
from tests.support.media_job import media_job, write_media

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(verbs.BUILT_IN, "check", "msd_daemon.verbs.check")
    monkeypatch.setenv("MSD__DAEMON__STATE_DIR", str(tmp_path / "state"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "job"
    made.mkdir()
    return made


def check(folder: Path, job: dict[str, Any], *options: str) -> int:
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    return main.run(["check", str(folder / "job.yaml"), *options])


def text_job(folder: Path, lines: list[Any], **source: Any) -> dict[str, Any]:
    (folder / "a.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return {
        "tokenizer": {"bytes": True},
        "sources": {"a": {"paths": "a.jsonl", **source}},
        "batch": {"rows": 2, "row_tokens": 64},
    }


def records(count: int) -> list[Any]:
    return [{"text": f"text {n}", "n": n} for n in range(count)]


def test_every_modality_is_read_and_said(folder: Path, capsys: Any) -> None:
    write_media(folder)
    job = media_job("text", "chat", "pictures", "sounds", "videos")
    assert check(folder, job) == 0
    out = capsys.readouterr().out
    for name in job["sources"]:
        assert f"read      {name}: 8 of 8 records are samples, " in out
    assert "recipe    chat: chat of messages, trained on assistant" in out
    assert "media     image: 1024 patches a row, 1.5 MiB a microbatch, raster 16 px" in out
    assert "chat      turns are told by rendering beginnings" in out
    assert check(folder, job, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert {one["source"]: one["samples"] for one in document["read"]} == dict.fromkeys(
        job["sources"], 8
    )
    assert document["code"] == []
    assert [rule["microbatch_bytes"] for rule in document["media"]] == [1572864, 1572864, 327680]
    assert document["sources"][1]["recipe"]["image_field"] == "image"


def test_what_is_no_sample_is_counted_and_named(folder: Path, capsys: Any) -> None:
    lines = [*records(3), {"text": None}, "no object", {"text": "", "n": 9}, *records(30)]
    assert check(folder, text_job(folder, lines, where="n is None or n < 20", shuffle=False)) == 0
    out = capsys.readouterr().out
    assert "read      a: 5 of 8 records are samples" in out
    for part in ("1 empty", "1 bad_syntax", "1 field_missing"):
        assert part in out
    assert f"{folder}/a.jsonl: record at byte offset " in out


def test_nothing_is_read_where_nobody_asks(folder: Path, capsys: Any) -> None:
    job = text_job(folder, [{"other": 1}] * 9)
    assert check(folder, job, "--no-read") == 0
    assert "read " not in capsys.readouterr().out
    assert check(folder, job, "--resolved") == 0
    assert yaml.safe_load(capsys.readouterr().out)["sources"][0]["name"] == "a"


def test_a_source_that_gives_nothing_is_refused(folder: Path, capsys: Any) -> None:
    assert check(folder, text_job(folder, [{"other": 1}] * 9), "--json") == 78
    (fault,) = json.loads(capsys.readouterr().out)["faults"]
    assert fault.startswith("sources.a: none of 8 records became a sample; ")
    assert fault.endswith("field 'text' is absent, not a string")


def test_records_that_are_left_out_are_no_faults(folder: Path, capsys: Any) -> None:
    assert check(folder, text_job(folder, records(20), where="n > 100")) == 0
    assert "read      a: 0 of 8 records are samples, 0 tokens, 8 filtered" in (
        capsys.readouterr().out
    )


def test_code_that_is_repeatable_is_told_so(folder: Path, capsys: Any) -> None:
    (folder / "mine.py").write_text("def fn(s, rng): return {'text': s['text'] * rng.integers(3)}")
    assert check(folder, text_job(folder, records(20), transform="mine:fn")) == 0
    out = capsys.readouterr().out
    assert "recipe    a: transform mine:fn" in out
    assert "code      mine:fn: alike twice" in out


def test_code_that_is_not_repeatable_is_refused(folder: Path, capsys: Any) -> None:
    (folder / "mine.py").write_text(
        "import os\ndef fn(s, rng): return {'text': os.urandom(4).hex()}"
    )
    assert check(folder, text_job(folder, records(20), transform="mine:fn"), "--json") == 78
    faults = json.loads(capsys.readouterr().out)["faults"]
    assert [fault.partition(": mine")[0] for fault in faults] == [
        f"mine:fn: record {n}" for n in range(8)
    ]


def test_code_that_fails_on_a_record_is_no_refusal(folder: Path, capsys: Any) -> None:
    (folder / "mine.py").write_text("def fn(s, rng): 1 / (s['n'] - 2); return s")
    job = text_job(folder, records(20), transform="mine:fn", shuffle=False)
    assert check(folder, job) == 0
    out = capsys.readouterr().out
    assert "read      a: 7 of 8 records are samples" in out
    assert "1 transform_failed" in out
    assert "code      mine:fn: alike twice, fails on 1 records" in out
    assert "record 2: mine:fn raised" in out


@pytest.mark.parametrize("modality", ["image", "audio"])
def test_steps_of_media_run_twice_on_pixels_and_waves(
    modality: str, folder: Path, capsys: Any
) -> None:
    write_media(folder)
    name = {"image": "pictures", "audio": "sounds"}[modality]
    job = media_job(name)
    job[modality].insert(-1, {"call": "mine:step"})
    (folder / "mine.py").write_text("def step(array, rng): return array[::-1].copy()")
    assert check(folder, job) == 0
    assert "code      mine:step: alike twice" in capsys.readouterr().out
    (folder / "mine.py").write_text(
        "seen = []\ndef step(array, rng):\n    seen.append(1)\n    return array + type(array.flat[0])(len(seen))"
    )
    assert check(folder, job) == 78
    assert "draw from rng alone" in capsys.readouterr().err


def test_records_of_one_shard_are_read_once(folder: Path) -> None:
    job = text_job(folder, records(3))
    for number in range(20):
        packed = gzip.compress("".join(f"{json.dumps(one)}\n" for one in records(5)).encode())
        (folder / f"{number}.jsonl.gz").write_bytes(packed)
    job["sources"]["many"] = "*.gz"
    resolved = resolve_job(job, folder, "job", folder / "store")
    tokenizer = open_tokenizer(resolved.tokenizer)
    assert try_source(resolved, 0, tokenizer).statuses == {RecordStatus.OK: 3}
    assert try_source(resolved, 1, tokenizer).records == 8
    times = iter([0.0, 0.0, 31.0])
    assert try_source(resolved, 0, tokenizer, now_s=lambda: next(times)).records == 1
