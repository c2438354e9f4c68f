"""A folder of saved states, for trainers without a checkpoint library of their own.

    states = StateFolder("run/states")
    saved = states.newest()
    if saved is not None:
        data.train.load_state_dict(saved.state)
    ...
    states.save(data.train.state_dict(), step=step.number + 1)

A save is on the disk when it returns, and a kill at any moment leaves the saves before it as they
were: a file is written beside its place, synced, renamed, and its folder synced. Several ranks may
save one step together, each its own part; such a set counts once all of its parts are whole.

File: magic (8 bytes), format (u16), length of the head (u32), BLAKE2b-256 of all other bytes, head
(JSON: step, part, parts, run, entries as [name, bytes]), the entries' bytes. Little-endian.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import secrets
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from msd_client.contract.errors import ConfigError, ResourceError, UsageError

log = logging.getLogger(__name__)

_MAGIC = b"MSDSAVED"
_FORMAT = 1
_HEAD = struct.Struct("<8sHI32s")
_HEAD_BYTES_MAX = 16 << 20
_NAME = re.compile(
    r"step-(?P<step>\d{12,})\.part-(?P<part>\d+)-of-(?P<parts>\d+)\.(?P<run>[0-9a-f]{8})\.state"
)
_PARTIAL = re.compile(r"\.step-(?P<step>\d{12,})\..*\.partial")


@dataclass(frozen=True)
class SavedState:
    """A complete saved step."""

    step: int
    parts: tuple[dict[str, bytes], ...]
    """What each participant saved, by part."""
    skipped: tuple[str, ...] = ()
    """Newer saves that could not be taken, and why: each was logged as a warning."""

    @property
    def state(self) -> dict[str, bytes]:
        """Return part 0: a loader's state is equal on all ranks, any part fits every rank."""
        return self.parts[0]


class StateFolder:
    """States of one run in a folder of their own. Several processes may use it at once.

    Args:
        path: The folder; made where it is missing.
        keep: How many complete steps to keep, at least 1. Older ones are removed by saves of part 0.

    Raises:
        UsageError: `keep` is below 1.
        ConfigError: The path is no folder and none can be made there.
    """

    def __init__(self, path: str | os.PathLike[str], *, keep: int = 3) -> None:
        if keep < 1:
            raise UsageError(f"StateFolder: keep is {keep}: keep at least 1 step")
        self.path = Path(path)
        self.keep = keep
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise ConfigError(
                f"state folder {self.path} can't be made, a file is in its way: give the path of a "
                "folder",
                path=str(self.path),
            ) from error
        except OSError as error:
            raise ConfigError(
                f"state folder {self.path} can't be made: {error.strerror or error}",
                path=str(self.path),
            ) from error

    def save(
        self,
        state: Mapping[str, bytes],
        *,
        step: int,
        part: int = 0,
        parts: int = 1,
        run: str = "",
    ) -> Path:
        """Save a state; it is on the disk when this returns.

        Args:
            state: What to save, bytes by name, like `data.train.state_dict()`.
            step: Completed steps; `newest` goes by it.
            part: Which part of the step's save this is, from 0.
            parts: How many parts make it complete.
            run: Names the run where several save parts, equal on all of them and new at each start
                (a launcher's run id and restart count): parts of two runs are never mixed.

        Returns:
            The file.

        Raises:
            UsageError: An argument is none; or the folder holds a later step than this one, which
                `newest` would go on with: call `forget_after` first.
            ResourceError: The folder can't be written, or the disk is full. Nothing is left behind.
        """
        _check_arguments(state, step, part, parts)
        name = _Name(step, part, parts, _run_key(run))
        if part == 0:
            self._check_order(step)
        path = self.path / str(name)
        partial = self.path / f".{name}.{secrets.token_hex(8)}.partial"
        try:
            _write(partial, _encode(state, step, part, parts, run))
            os.replace(partial, path)
            _sync_folder(self.path)
        except BaseException as error:
            with contextlib.suppress(OSError):
                partial.unlink()
            if not isinstance(error, OSError):
                raise
            raise ResourceError(
                f"state of step {step} can't be saved in {self.path}: {error.strerror or error}: free "
                "space, or give a folder that may be written",
                path=str(self.path),
                step=step,
            ) from error
        if part == 0:
            self._remove_old()
        return path

    def newest(self) -> SavedState | None:
        """Return the newest step that was saved whole, None where there is none.

        Newer saves that are damaged, or lack parts, are passed over; each is logged as a warning
        that names the file and what is wrong with it, and stands in `skipped`.

        Raises:
            ResourceError: The folder can't be read.
        """
        skipped: list[str] = []
        for found in self._sets():
            parts, faults = _read_set(self.path, found)
            if not faults:
                return SavedState(found.step, parts, tuple(skipped))
            for fault in faults:
                log.warning("state of step %d passed over: %s", found.step, fault)
            skipped += faults
        return None

    def forget_after(self, step: int) -> None:
        """Remove what was saved of later steps: the run went back to this one and goes on anew."""
        for text in self._names():
            name = _parse(text)
            if name is not None and name.step > step:
                self._remove(text)

    def _check_order(self, step: int) -> None:
        latest = next(
            (
                found.step
                for found in self._sets()
                if found.step > step
                and self._is_whole(found)
                and not _read_set(self.path, found)[1]  # `newest` passes over damaged ones, too
            ),
            -1,
        )
        if latest > step:
            raise UsageError(
                f"StateFolder.save: {self.path} holds step {latest}, later than this step {step}: a "
                f"restart would go on with that one. If the run went back on purpose, call "
                f"forget_after({step}) once, or give it a folder of its own",
                latest=latest,
                step=step,
            )

    def _names(self) -> list[str]:
        try:
            return os.listdir(self.path)
        except OSError as error:
            raise ResourceError(
                f"state folder {self.path} can't be read: {error.strerror or error}",
                path=str(self.path),
            ) from error

    def _sets(self) -> list[_Set]:
        """Return what belongs together by name, the newest step first, ended or not."""
        made: dict[tuple[int, int, str], list[int]] = {}
        for text in self._names():
            name = _parse(text)
            if name is not None:
                made.setdefault((name.step, name.parts, name.run), []).append(name.part)
        sets = [_Set(*key, tuple(sorted(parts))) for key, parts in made.items()]
        return sorted(sets, key=lambda s: (s.step, self._written_ns(s)), reverse=True)

    def _written_ns(self, found: _Set) -> int:
        times = []
        for name in found.names():
            with contextlib.suppress(OSError):
                times.append(os.stat(self.path / str(name)).st_mtime_ns)
        return max(times, default=0)

    def _remove_old(self) -> None:
        """Remove complete steps beyond `keep`, and what failed saves left before the newest one.

        What is newer than the newest complete step may be a save of another rank that goes on now.
        """
        complete = 0
        newest = -1
        for found in self._sets():
            is_whole = self._is_whole(found)
            if is_whole:
                complete += 1
                newest = max(newest, found.step)
            if complete > self.keep or (not is_whole and found.step < newest):
                for name in found.names():
                    self._remove(str(name))
        for text in self._names():
            match = _PARTIAL.fullmatch(text)
            if match is not None and int(match["step"]) < newest:
                self._remove(text)

    def _is_whole(self, found: _Set) -> bool:
        """Return True where all parts are there, as long as they should be."""
        return not found.lacks() and all(
            _has_its_size(self.path / str(name)) for name in found.names()
        )

    def _remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):  # another rank was faster
            try:
                os.unlink(self.path / name)
            except PermissionError as error:
                log.warning("old state %s stays: %s", self.path / name, error.strerror)


@dataclass(frozen=True)
class _Name:
    """What a file's name says."""

    step: int
    part: int
    parts: int
    run: str

    def __str__(self) -> str:
        return f"step-{self.step:012d}.part-{self.part}-of-{self.parts}.{self.run}.state"


@dataclass(frozen=True)
class _Set:
    """Files of one step and run."""

    step: int
    parts: int
    run: str
    present: tuple[int, ...]

    def names(self) -> Iterator[_Name]:
        for part in self.present:
            yield _Name(self.step, part, self.parts, self.run)

    def lacks(self) -> tuple[int, ...]:
        return tuple(sorted(set(range(self.parts)) - set(self.present)))


def _parse(text: str) -> _Name | None:
    match = _NAME.fullmatch(text)
    if match is None:
        return None
    name = _Name(int(match["step"]), int(match["part"]), int(match["parts"]), match["run"])
    return name if name.part < name.parts and str(name) == text else None


def _run_key(run: str) -> str:
    return hashlib.blake2b(run.encode(), digest_size=4).hexdigest()


def _check_arguments(state: Mapping[str, bytes], step: int, part: int, parts: int) -> None:
    if step < 0:
        raise UsageError(f"StateFolder.save: step is {step}: count completed steps from 0")
    if not 0 <= part < parts:
        raise UsageError(f"StateFolder.save: part {part} of {parts} does not exist")
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, bytes | bytearray | memoryview):
            raise UsageError(
                f"StateFolder.save: entry {name!r} is {type(value).__name__}: values are bytes, names "
                "are text"
            )


def _encode(
    state: Mapping[str, bytes], step: int, part: int, parts: int, run: str
) -> list[bytes | memoryview]:
    values = [memoryview(value).cast("B") for value in state.values()]
    entries = [[name, len(value)] for name, value in zip(state, values, strict=True)]
    head = json.dumps(
        {"step": step, "part": part, "parts": parts, "run": run, "entries": entries}
    ).encode()
    digest = _digest(len(head))
    digest.update(head)
    for value in values:
        digest.update(value)
    return [_HEAD.pack(_MAGIC, _FORMAT, len(head), digest.digest()), head, *values]


def _digest(head_bytes: int) -> hashlib.blake2b:
    """Return the checksum begun with all of the fixed head but the checksum itself."""
    digest = hashlib.blake2b(digest_size=32)
    digest.update(_HEAD.pack(_MAGIC, _FORMAT, head_bytes, bytes(32)))
    return digest


def _write(path: Path, pieces: list[bytes | memoryview]) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        for piece in pieces:
            rest = memoryview(piece)
            while rest:
                rest = rest[os.write(fd, rest) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _read_set(folder: Path, found: _Set) -> tuple[tuple[dict[str, bytes], ...], list[str]]:
    """Return the parts, and what is wrong with them: complete where nothing is."""
    parts: list[dict[str, bytes]] = []
    faults: list[str] = []
    for name in found.names():
        try:
            parts.append(_read(folder / str(name), name))
        except (OSError, ValueError) as error:
            faults.append(f"{folder / str(name)}: {error}")
    lacks = found.lacks()
    if lacks:
        shown = ", ".join(map(str, lacks[:16]))
        faults.append(
            f"{folder / str(next(found.names()))}: parts {shown} of {found.parts} were not saved"
        )
    return tuple(parts), faults


def _has_its_size(path: Path) -> bool:
    """Return True where a file is as long as its head says; its bytes are not looked at."""
    try:
        with path.open("rb") as file:
            fixed = file.read(_HEAD.size)
            head_bytes = (
                min(_HEAD.unpack(fixed)[2], _HEAD_BYTES_MAX) if len(fixed) == _HEAD.size else 0
            )
            _, entries, begin = _read_head(fixed + file.read(head_bytes))
        return os.stat(path).st_size == begin + sum(size for _, size in entries)
    except (OSError, ValueError):
        return False


def _read_head(data: bytes) -> tuple[dict[str, object], list[tuple[str, int]], int]:
    """Return the head, the entries' names and bytes, and where the first one begins.

    Raises:
        ValueError: It is none; the message says why.
    """
    if len(data) < _HEAD.size:
        raise ValueError(f"cut short: {len(data)} bytes")
    magic, form, head_bytes, _ = _HEAD.unpack_from(data)
    if magic != _MAGIC:
        raise ValueError("no saved state: the first bytes differ")
    if form != _FORMAT:
        raise ValueError(f"format {form}, this release reads {_FORMAT}")
    begin = _HEAD.size + head_bytes
    if len(data) < begin:
        raise ValueError(f"cut short: {len(data)} bytes, its head alone takes {begin}")
    try:
        head = json.loads(data[_HEAD.size : begin])
        entries = [(str(name), int(size)) for name, size in head["entries"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError("damaged: its head can't be read") from error
    return head, entries, begin


def _read(path: Path, name: _Name) -> dict[str, bytes]:
    """Return a file's entries.

    Raises:
        OSError: It can't be read.
        ValueError: It is damaged, or not what its name says.
    """
    data = path.read_bytes()
    head, entries, begin = _read_head(data)
    size = begin + sum(size for _, size in entries)
    digest = _digest(begin - _HEAD.size)
    digest.update(memoryview(data)[_HEAD.size :])
    is_same = digest.digest() == _HEAD.unpack_from(data)[3]
    if size != len(data):
        raise ValueError(
            f"{'cut short' if len(data) < size else 'too long'}: {len(data)} bytes of {size}"
        )
    if not is_same:
        raise ValueError("damaged: its checksum differs")
    inside = _Name(head["step"], head["part"], head["parts"], _run_key(str(head["run"])))  # type: ignore[arg-type]
    if inside != name:
        raise ValueError(f"renamed: it was saved as {inside}")
    state = {}
    for entry, length in entries:
        state[entry] = data[begin : begin + length]
        begin += length
    return state
