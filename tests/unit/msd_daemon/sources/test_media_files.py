"""Media in files of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from federation.model.chunk import RecordStatus
from msd_daemon.shm.mark_page import InFlight
from msd_daemon.sources.media_files import MediaFiles, MissingMediaError
from msd_daemon.sources.record import MediaPath, ReadMeter
from msd_daemon.sources.record_fault import RecordFault


class Clock(InFlight):
    """Notes when a record's time stands still."""

    __slots__ = ("told",)

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def leave(self) -> None:
        self.told.append("leave")

    def back(self) -> None:
        self.told.append("back")


def test_waiting_for_a_file_is_no_time_of_the_record(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"abc")
    clock, meter = Clock(), ReadMeter()
    files = MediaFiles("", 8, meter, clock)
    assert files.read(MediaPath("a.png"), str(tmp_path / "s.jsonl")) == b"abc"
    with pytest.raises(MissingMediaError):
        files.read(MediaPath("b.png"), str(tmp_path / "s.jsonl"))
    assert clock.told == ["leave", "back"] * 2
    assert meter.read_bytes == 3


def test_paths_start_at_the_root_and_large_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "a.png").write_bytes(bytes(9))
    files = MediaFiles(str(tmp_path / "root"), 8, ReadMeter())
    with pytest.raises(RecordFault) as caught:
        files.read(MediaPath("a.png"), "/elsewhere/s.jsonl")
    assert caught.value.status == RecordStatus.TOO_LARGE
    assert files.locate(MediaPath("/abs.png"), "/x") == "/abs.png"
    assert MediaFiles("s3://b/d/", 8, ReadMeter()).locate(MediaPath("x"), "/x") == "s3://b/d/x"
    with pytest.raises(RecordFault):
        files.read(MediaPath("."), "/x")
