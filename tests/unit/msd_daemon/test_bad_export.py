"""Bad records written out as they lie."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

import msd_daemon.bad_export as bad_export
from msd_client.contract.errors import ResourceError, UsageError
from msd_daemon.bad_export import export, job_of_folder
from msd_daemon.config.resolve import render_resolved_yaml, resolve_job
from msd_daemon.sources import raw_records
from msd_daemon.sources.record import RawRecord

ROOT = Path(__file__).parents[3]
GOOD = '{"text": "fine"}'
LINES = ['{"text": "a"}', '{"bad', '{"text": null}', '{"text": "' + "x" * 5000 + '"}', GOOD]


def job(base: Path, **source: Any):
    return resolve_job(
        {
            "name": "j",
            "tokenizer": {"bytes": True},
            "batch": {"rows": 4, "row_tokens": 64},
            "sources": {"a": source},
        },
        base,
    )


def listed(path: Path, place: int, status: str = "bad_syntax") -> dict[str, Any]:
    return {"source": "a", "shard": str(path), "place": place, "status": status, "text": "t"}


def manifest(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "manifest.jsonl").read_text().splitlines()]


@pytest.fixture
def lines(tmp_path: Path) -> tuple[Path, list[int]]:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(LINES) + "\n")
    return path, [sum(len(line) + 1 for line in LINES[:n]) for n in range(len(LINES))]


def test_lines_come_as_they_lie_also_too_long_ones(tmp_path, lines):
    path, places = lines
    one = job(tmp_path, paths=str(path), record_bytes_max=1000)
    wanted = [listed(path, places[n]) for n in (2, 1)] + [listed(path, places[3], "too_large")]
    done = export(one, wanted, tmp_path / "out", 1 << 20)
    assert [(tmp_path / "out" / f"00000{n}.json").read_text() for n in range(3)] == [
        LINES[2], LINES[1], LINES[3],
    ]  # fmt: skip
    assert vars(done) == {
        "records": 3, "unreadable": 0, "left_out": 0,
        "written_bytes": sum(len(LINES[n]) for n in (1, 2, 3)),
    }  # fmt: skip
    told = manifest(tmp_path / "out")
    assert [(line["place"], line["files"], line["error"]) for line in told] == [
        (places[2], ["000000.json"], ""),
        (places[1], ["000001.json"], ""),
        (places[3], ["000002.json"], ""),
    ]


def test_bytes_are_bounded_and_what_is_gone_is_said(tmp_path, lines):
    path, places = lines
    one = job(tmp_path, paths=str(path))
    wanted = [listed(path, places[2]), listed(path, 99_999), listed(tmp_path / "other.jsonl", 0)]
    done = export(one, [*wanted, listed(path, places[3])], tmp_path / "out", 1000)
    assert (done.records, done.unreadable, done.written_bytes) == (1, 3, len(LINES[2]))
    errors = {line["place"]: line["error"] for line in manifest(tmp_path / "out")}
    assert errors[99_999] == "no such record is there any more"
    assert errors[0] == "it is of no shard of the job any more"
    assert "longer than record_bytes_max" in errors[places[3]]


def test_a_folder_that_holds_something_is_left_alone(tmp_path, lines):
    with pytest.raises(UsageError, match="is not empty"):
        export(job(tmp_path, paths=str(lines[0])), [], tmp_path, 1)


def test_members_of_a_tar_are_files_beside_the_record(tmp_path):
    path = tmp_path / "s.tar"
    with tarfile.open(path, "w") as tar:
        for name, content in (("k1.jpg", b"no jpeg"), ("k1.txt", b"a caption"), ("k2.txt", b"b")):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    one = job(tmp_path, paths=str(path), text="txt")
    done = export(one, [listed(path, 0, "undecodable")], tmp_path / "out", 1 << 20)
    assert done.records == 1
    (line,) = manifest(tmp_path / "out")
    assert line["files"][-1] == "000000.json"
    fields = json.loads((tmp_path / "out" / "000000.json").read_text())
    assert (tmp_path / "out" / fields["jpg"]["file"]).read_bytes() == b"no jpeg"
    assert sorted(line["files"]) == sorted(p.name for p in (tmp_path / "out").glob("000000.*"))


def test_rows_of_parquet_have_all_their_columns(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    path = tmp_path / "a.parquet"
    table = pa.table(
        {"text": ["a", None, "c"], "score": [1.5, 2.5, 3.5], "raw": [b"x", b"y", b"z"]}
    )
    pq.write_table(table, path, row_group_size=2)
    one = job(tmp_path, paths=str(path))
    export(one, [listed(path, 1, "field_missing")], tmp_path / "out", 1 << 20)
    fields = json.loads((tmp_path / "out" / "000000.json").read_text())
    assert (fields["text"], fields["score"]) == (None, 2.5)


def test_a_name_never_leads_out_of_the_folder(tmp_path, lines, monkeypatch):
    fields = {"../../x": b"1", "/etc/y": [b"2", {"..": b"3"}], "": b"4", "n" * 500: b"5"}

    def records(*_: object):
        yield RawRecord(7, b"", 0, "", None, (), fields, 5)

    monkeypatch.setattr(bad_export, "find_records", records)
    export(job(tmp_path, paths=str(lines[0])), [listed(lines[0], 7)], tmp_path / "out", 1 << 20)
    (line,) = manifest(tmp_path / "out")
    assert len(line["files"]) == 6
    assert all((tmp_path / "out" / name).is_file() for name in line["files"])
    assert line["bytes"] == sum((tmp_path / "out" / name).stat().st_size for name in line["files"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "out"]


class Bomb(dict):
    def __getitem__(self, name: str) -> Any:
        os.abort()


def export_a_bomb(folder: Path) -> None:
    """Export two quarantined records, of which the first kills who reads it."""

    def records(*_: object):
        yield RawRecord(7, b"", 0, "", None, (), Bomb(text="x"), 5)
        yield RawRecord(8, b"", 0, "", None, (), {"text": "fine"}, 5)

    bad_export.find_records = records
    path = folder / "a.jsonl"
    path.write_text(GOOD + "\n")
    wanted = [listed(path, place, "quarantined") for place in (7, 8)]
    done = export(job(folder, paths=str(path)), wanted, folder / "out", 1 << 20)
    assert (done.records, done.unreadable) == (1, 1), vars(done)


def test_a_quarantined_record_that_kills_again_costs_its_own_process(tmp_path):
    # In a process of its own, as the verb is: this one may have threads, which a fork would lose.
    program = (
        "import sys, pathlib\n"
        "from tests.unit.msd_daemon.test_bad_export import export_a_bomb\n"
        "export_a_bomb(pathlib.Path(sys.argv[1]))\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, check=True)
    told = manifest(tmp_path / "out")
    assert told[0]["error"] == "reading it again ended the process (signal 6)"
    assert told[1]["files"] == ["000001.json"]


def test_token_ids_are_not_written(tmp_path, lines):
    spec = job(tmp_path, paths=str(lines[0])).sources[0]
    import dataclasses

    spec = dataclasses.replace(spec, format="megatron")
    with pytest.raises(UsageError, match="token ids"):
        list(raw_records.find_records(spec, spec.shards[0], {0}, 1 << 20))


def test_the_job_is_read_back_from_its_folder(tmp_path, lines):
    one = job(tmp_path, paths=str(lines[0]), on_error="quarantine")
    (tmp_path / "resolved.yaml").write_text(render_resolved_yaml(one))
    again = job_of_folder(tmp_path)
    assert again.digest() == one.digest()
    assert again.sources[0].on_error.policy == "quarantine"
    with pytest.raises(UsageError, match="does not say what the job reads"):
        job_of_folder(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["/proc/x", "file/below"])
def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    out = tmp_path / name
    (tmp_path / "a.jsonl").write_text(GOOD)
    own = job(tmp_path, paths="a.jsonl")
    with pytest.raises(ResourceError, match=f"--out {out} can't be written: .*; name another"):
        export(own, [], out, 1 << 20)
