"""A reader of lines whose records are decoded when they are looked at, by a decoder that may end its process.

Installed for a test's daemon as the format `bombs` (see `install_bombs`). A line is `NUMBER KIND`;
what KIND does when the record is looked at:

    fine     its text is <NUMBER>
    abort    os.abort()
    hang     waits for ever
    kill     kill -9 of its own process, like the kernel that is out of memory
    late     os.abort() when its field `score` is looked at, behind all texts of its window
    reader   os.abort() of the reader itself, before there is a record
    once     kill -9 at the first look of all, fine afterwards
    leak     keeps 2 MiB of its process for ever
    broken   a fault that every reader would tell: UNREADABLE

Whoever looks at a record writes its number into the file MSD_TEST_LOOKS names. With MSD_TEST_TAME
set all bombs are `broken`: what the stream must be.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from msd_daemon.sources.formats import FormatEntry
from msd_daemon.sources.record import RawRecord

LEAKED: list[bytes] = []
BOMBS = ("abort", "hang", "kill", "late")


class LazyFields(Mapping):
    def __init__(self, number: str, kind: str) -> None:
        self.number, self.kind = number, kind

    def __getitem__(self, name: str) -> str | float | None:
        if name == "score":
            return os.abort() if self.kind == "late" else 1.0
        if name != "text":
            raise KeyError(name)
        looks = Path(os.environ["MSD_TEST_LOOKS"])
        is_first = f"{self.number}\n" not in (looks.read_text() if looks.exists() else "")
        with looks.open("a") as file:
            file.write(f"{self.number}\n")
        if self.kind == "abort":
            os.abort()
        if self.kind == "leak":
            LEAKED.append(b"x" * (2 << 20))
        if self.kind == "hang":
            threading.Event().wait()
        if self.kind == "kill" or (self.kind == "once" and is_first):
            os.kill(os.getpid(), signal.SIGKILL)
        return f"<{self.number}>"

    def __iter__(self) -> Iterator[str]:
        return iter(("text", "score"))

    def __len__(self) -> int:
        return 2


class BombLines:
    def __init__(self, spec, _columns, _meter) -> None:
        self.rows = spec.shuffle.block_records

    def measure(self, shard) -> tuple[int, int]:
        count = len(Path(shard.path).read_text().splitlines())
        return max(1, -(-count // self.rows)), count

    def records(self, shard, block) -> Iterator[RawRecord]:
        lines = Path(shard.path).read_text().splitlines()
        begin = block * self.rows
        for place, line in enumerate(lines[begin : begin + self.rows], begin):
            number, kind = line.split()
            if kind == "reader":
                os.abort()
            is_broken = kind == "broken" or (kind in BOMBS and "MSD_TEST_TAME" in os.environ)
            key = f"k{number}".encode()
            if is_broken:
                yield RawRecord(place, b"", 7, "it is broken", key)
            else:
                yield RawRecord(place, b"", 0, "", key, (), LazyFields(number, kind), 8)


ENTRY = FormatEntry("bombs", (".bombs",), "bomb_format:BombLines", place_name="line")


def install_bombs(site: Path) -> dict[str, str]:
    """Install the format into a folder; return what a daemon's environment needs of it."""
    from tests.support.sources import ROOT

    info = site / "msd_bombs-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: msd-bombs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[msd.sources]\nbombs = bomb_format:ENTRY\n")
    (site / "bomb_format.py").write_text(Path(__file__).read_text())
    return {
        "PYTHONPATH": f"{site}{os.pathsep}{ROOT}",
        "MSD_TEST_LOOKS": str(site.parent / "looks"),
    }
