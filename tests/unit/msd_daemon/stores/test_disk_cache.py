"""The disk cache: its limit, its order of eviction, damage, and many processes at once."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from msd_client.contract.errors import PermissionDeniedError
from msd_daemon.stores.disk_cache import DiskCache

HEAD_BYTES = 20

STORM = """
import fcntl, hashlib, random, sys
from pathlib import Path
from msd_daemon.stores.disk_cache import DiskCache
folder, limit, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
cache, draw = DiskCache(folder, limit), random.Random(seed)
hits = worst = 0
for turn in range(400):
    number = draw.randrange(60)
    content = hashlib.sha256(str(number).encode()).digest() * (100 + number)
    found = cache.get(f"{number:032x}", number)
    if found is None:
        cache.put(f"{number:032x}", number, content)
    else:
        assert found == content
        hits += 1
    if turn % 10 == 0:
        with open(folder / "usage", "rb") as usage:
            fcntl.flock(usage, fcntl.LOCK_EX)  # no block comes or goes while they are summed
            worst = max(worst, sum(path.stat().st_size for path in folder.rglob("*.block")))
print(hits, worst)
"""


def name(number: int) -> str:
    return f"{number:032x}"


def blocks(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.block"))


def bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in blocks(folder))


def age(folder: Path, number: int, seconds: int) -> None:
    (path,) = folder.rglob(f"{name(number)}-*.block")
    os.utime(path, (seconds, seconds))


def test_a_block_comes_back_and_another_does_not(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "c", 1 << 20)
    cache.put(name(1), 7, b"content")
    assert cache.get(name(1), 7) == b"content"
    assert cache.get(name(1), 8) is None
    assert cache.get(name(2), 7) is None
    assert DiskCache(tmp_path / "c", 1 << 20).get(name(1), 7) == b"content"
    assert list((tmp_path / "c" / "filling").iterdir()) == []


def test_the_longest_unused_go_first_and_the_limit_holds(tmp_path: Path) -> None:
    size = 1000
    limit = 5 * (size + HEAD_BYTES)
    cache = DiskCache(tmp_path / "c", limit)
    for number in range(5):
        cache.put(name(number), 0, bytes([number]) * size)
        age(tmp_path / "c", number, 1000 + number)
    assert cache.get(name(0), 0) is not None  # used just now
    cache.put(name(9), 0, b"n" * size)
    assert bytes_of(tmp_path / "c") <= limit
    assert cache.get(name(1), 0) is None
    assert [cache.get(name(n), 0) is not None for n in (0, 2, 3, 4, 9)] == [True] * 5


def test_a_block_over_the_limit_is_not_kept(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "c", 100)
    cache.put(name(1), 0, b"x" * 100)
    assert blocks(tmp_path / "c") == []


@pytest.mark.parametrize("damage", ["cut", "flipped", "longer", "empty", "head"])
def test_damage_is_found_and_removed(tmp_path: Path, damage: str) -> None:
    cache = DiskCache(tmp_path / "c", 1 << 20)
    cache.put(name(1), 0, b"content" * 50)
    (path,) = blocks(tmp_path / "c")
    raw = path.read_bytes()
    path.write_bytes(
        {
            "cut": raw[:-1],
            "flipped": raw[:-5] + bytes([raw[-5] ^ 1]) + raw[-4:],
            "longer": raw + b"x",
            "empty": b"",
            "head": b"X" + raw[1:],
        }[damage]
    )
    assert cache.get(name(1), 0) is None
    assert blocks(tmp_path / "c") == []
    cache.put(name(1), 0, b"content" * 50)
    assert cache.get(name(1), 0) == b"content" * 50


def test_what_dead_fillers_left_is_removed_and_the_living_are_left_alone(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "c", 3000)
    (tmp_path / "c" / "filling" / "dead.1.2").write_bytes(b"half")
    code = (
        "import fcntl, sys\n"
        "file = open(sys.argv[1], 'wb')\n"
        "fcntl.flock(file, fcntl.LOCK_EX)\n"
        "file.write(b'half'); file.flush(); print(flush=True); sys.stdin.read()\n"
    )
    living = tmp_path / "c" / "filling" / "alive.3.4"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(living)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdin is not None
    process.stdout.readline()
    for number in range(4):
        cache.put(name(number), 0, b"x" * 1000)  # the third or fourth makes room
    assert [path.name for path in (tmp_path / "c" / "filling").iterdir()] == ["alive.3.4"]
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def test_a_usage_that_a_crash_left_too_high_is_counted_anew(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "c", 3000)
    cache.put(name(1), 0, b"x" * 1000)
    (tmp_path / "c" / "usage").write_bytes((2990).to_bytes(8, "little"))
    cache.put(name(2), 0, b"y" * 1000)
    assert len(blocks(tmp_path / "c")) == 2
    (tmp_path / "c" / "usage").write_bytes(b"")
    DiskCache(tmp_path / "c", 3000)
    assert int.from_bytes((tmp_path / "c" / "usage").read_bytes(), "little") == 2040


def test_a_disk_that_refuses_makes_it_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = DiskCache(tmp_path / "c", 1 << 20)

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "rename", refuse)
    cache.put(name(1), 0, b"x")
    assert cache.get(name(1), 0) is None
    assert list((tmp_path / "c" / "filling").iterdir()) == []


def test_a_folder_that_others_may_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c").chmod(0o777)
    with pytest.raises(PermissionDeniedError, match="others may write"):
        DiskCache(tmp_path / "c", 1 << 20)


def test_a_storm_of_processes_keeps_limit_and_content(tmp_path: Path) -> None:
    folder, limit = tmp_path / "c", 60_000
    command = [sys.executable, "-c", STORM, str(folder), str(limit)]
    storm = [
        subprocess.Popen([*command, str(seed)], stdout=subprocess.PIPE, text=True)
        for seed in range(4)
    ]
    answers = [process.communicate(timeout=60)[0].split() for process in storm]
    assert [process.returncode for process in storm] == [0] * 4
    assert all(int(hits) > 20 for hits, _ in answers)
    assert max(int(worst) for _, worst in answers) <= limit
    assert bytes_of(folder) <= limit
    assert int.from_bytes((folder / "usage").read_bytes(), "little") == bytes_of(folder)
    assert list((folder / "filling").iterdir()) == []
    for path in blocks(folder):
        number = int(path.name.partition("-")[0], 16)
        content = hashlib.sha256(str(number).encode()).digest() * (100 + number)
        assert path.read_bytes()[HEAD_BYTES:] == content
