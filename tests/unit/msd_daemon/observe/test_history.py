"""History files: bounded, readable whatever a power cut left, and written off the loop."""

from __future__ import annotations

import json
import os
from pathlib import Path

from msd_daemon.observe import history
from msd_daemon.observe.history import HOUR_S, HistoryFiles, HistoryWriter

T = 500_000 * HOUR_S


def records(*seconds: float) -> list[dict[str, float]]:
    return [{"at": T + second} for second in seconds]


def test_what_was_written_is_read_by_its_time(tmp_path: Path):
    files = HistoryFiles(tmp_path / "h")
    files.append(records(1, 2, HOUR_S + 5))
    files.append(records(HOUR_S + 6))
    found = [record["at"] - T for record in files.read(T + 2, T + HOUR_S + 5)]
    assert found == [2, HOUR_S + 5]
    assert [oct(path.stat().st_mode & 0o777) for path in (tmp_path / "h").iterdir()] == [
        "0o600"
    ] * 2
    assert list(HistoryFiles(tmp_path / "none").read(0, T * 2)) == []


def test_broken_lines_and_strange_files_are_passed_over(tmp_path: Path):
    files = HistoryFiles(tmp_path)
    files.append(records(1))
    path = tmp_path / f"{T // HOUR_S}.jsonl"
    with path.open("ab") as file:
        file.write(b'{"at": 5' + b"\n[1]\n\xff\n" + json.dumps({"at": T + 9}).encode() + b"\n")
        file.write(b'{"at": 17969')
    (tmp_path / "x.jsonl").write_text("{}")
    (tmp_path / "notes").write_text("mine")
    assert [record["at"] - T for record in files.read(T, T + HOUR_S)] == [1, 9]


def test_a_day_and_a_size_are_kept(tmp_path: Path, monkeypatch):
    files = HistoryFiles(tmp_path)
    for hour in range(30):
        files.append(records(hour * HOUR_S))
    assert len(os.listdir(tmp_path)) == 25
    monkeypatch.setattr(history, "FOLDER_BYTES_MAX", 40)
    files.append(records(31 * HOUR_S))
    assert len(os.listdir(tmp_path)) <= 3
    assert f"{T // HOUR_S + 31}.jsonl" in os.listdir(tmp_path)


def test_a_writer_writes_what_waits_before_it_ends(tmp_path: Path):
    writer = HistoryWriter(HistoryFiles(tmp_path))
    for record in records(*range(20)):
        writer.put(record)
    writer.close()
    assert len(list(HistoryFiles(tmp_path).read(T, T + HOUR_S))) == 20
    assert writer.dropped_total == 0


def test_a_disk_that_fails_costs_its_records_and_nobody_else(tmp_path: Path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("")
    writer = HistoryWriter(HistoryFiles(blocked / "below"))
    for record in records(1, 2, 3):
        writer.put(record)
    writer.close()
    assert caplog.text.count("history is not written") == 1
