"""Writes bad records out as they lie in their shards: a file each, media beside them, and a manifest."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from federation.model.job import ResolvedJob, SourceSpec, decode_job
from msd_client.contract.errors import MsdError, ResourceError, UsageError
from msd_daemon.descriptors import is_readable
from msd_daemon.sources.media_files import MediaFiles
from msd_daemon.sources.raw_records import find_records
from msd_daemon.sources.record import MediaPath, RawRecord, ReadMeter
from msd_daemon.sources.record_fault import RecordFault

MANIFEST = "manifest.jsonl"
RECORD_BYTES_MAX = 256 << 20
CHILD_S_MAX = 60.0
_SUFFIXES = {"jsonl": ".json", "text": ".txt"}

Listed = Mapping[str, Any]
"""A record of `msdctl bad`."""


@dataclass
class Exported:
    """What became of an export."""

    records: int = 0
    """With a file of their own."""
    unreadable: int = 0
    """Named in the manifest alone."""
    written_bytes: int = 0
    left_out: int = 0
    """Beyond the limit of bytes."""


@dataclass
class _Files:
    """What was written of one record."""

    stem: Path
    files: list[str] = field(default_factory=list)
    size_bytes: int = 0

    def write(self, suffix: str, content: bytes) -> str:
        path = self.stem.with_name(self.stem.name + suffix)
        path.write_bytes(content)
        self.files.append(path.name)
        self.size_bytes += len(content)
        return path.name


def job_of_folder(folder: Path) -> ResolvedJob:
    """Return the job whose `resolved.yaml` lies in a folder.

    Raises:
        UsageError: It is not there, or not one of this release.
    """
    import yaml

    path = folder / "resolved.yaml"
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        plain = yaml.load(path.read_text(encoding="utf-8"), loader)  # noqa: S506 - a safe loader
        plain.pop("digest")
        return decode_job(plain)
    except (OSError, yaml.YAMLError, MsdError, KeyError, AttributeError) as error:
        raise UsageError(
            f"{path} does not say what the job reads ({error}): run this where the daemon runs, as "
            "the user whose job it is"
        ) from error


def export(job: ResolvedJob, listed: list[Listed], out: Path, bytes_max: int) -> Exported:
    """Write records into a folder.

    Args:
        job: The job they are of.
        listed: As `msdctl bad` lists them.
        out: Made, or there and empty.
        bytes_max: Records beyond it are named in the manifest alone.

    Raises:
        UsageError: The folder holds something.
        ResourceError: It can't be written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise UsageError(f"{out} is not empty: name a new folder")
        return _export(job, listed, out, bytes_max)
    except OSError as error:
        raise ResourceError(
            f"--out {out} can't be written: {error.strerror or error}; name another folder, or make room",
            path=str(out),
        ) from error


def _export(job: ResolvedJob, listed: list[Listed], out: Path, bytes_max: int) -> Exported:
    done = Exported()
    numbered = sorted(enumerate(listed), key=lambda one: (one[1]["source"], one[1]["shard"]))
    with (out / MANIFEST).open("w", encoding="utf-8") as manifest:
        for (name, path), group in groupby(numbered, lambda o: (o[1]["source"], o[1]["shard"])):
            for line in _export_shard(job, name, path, list(group), out, bytes_max, done):
                manifest.write(json.dumps(line, ensure_ascii=False) + "\n")
    return done


def _export_shard(
    job: ResolvedJob,
    name: str,
    path: str,
    group: list[tuple[int, Listed]],
    out: Path,
    bytes_max: int,
    done: Exported,
) -> list[dict[str, Any]]:
    lines = [dict(record) | {"files": [], "bytes": 0, "error": ""} for _, record in group]
    wanted = {record["place"] for _, record in group}
    found: set[int] = set()
    problem = "no such record is there any more"
    try:
        spec = job.sources[job.source_index(name)]
        shard = next(shard for shard in spec.shards if shard.path == path)
        for record in find_records(spec, shard, wanted, min(RECORD_BYTES_MAX, bytes_max)):
            for (number, _), line in zip(group, lines, strict=True):
                if line["place"] != record.place or line["files"]:
                    continue
                found.add(record.place)
                stem = out / f"{number:06d}"
                _export_record(spec, path, record, line, stem, bytes_max - done.written_bytes)
                done.written_bytes += line["bytes"]
    except (KeyError, StopIteration):
        problem = "it is of no shard of the job any more"
    except (MsdError, OSError) as error:
        problem = str(error)
    except Exception as error:  # noqa: BLE001 - a reader that is installed may raise anything
        problem = f"{type(error).__name__}: {error}"
    for line in lines:
        if not line["files"]:
            line["error"] = line["error"] or problem
        done.records += bool(line["files"])
        done.unreadable += not line["files"]
        done.left_out += line["error"] == _TOO_MUCH
    return lines


_TOO_MUCH = "left out: over the limit of bytes"


def _export_record(
    spec: SourceSpec, path: str, record: RawRecord, line: dict[str, Any], stem: Path, room: int
) -> None:
    if record.status and not record.raw and not record.fields:
        line["error"] = record.fault or "it has no content"
        return
    if record.size_bytes > room:
        line["error"] = _TOO_MUCH
        return

    def write() -> tuple[list[str], int]:
        files = _Files(stem)
        if record.fields is None:
            files.write(_SUFFIXES.get(spec.format, ".bin"), record.raw)
        else:
            _write_fields(spec, path, record.fields, files)
        return files.files, files.size_bytes

    if line["status"] == "quarantined":
        # To look at it may be what ends a process.
        line["files"], line["bytes"], line["error"] = _in_child(write, stem)
        return
    try:
        line["files"], line["bytes"] = write()
    except RecordFault as fault:
        line["error"] = fault.message


def _write_fields(spec: SourceSpec, path: str, fields: Mapping[str, Any], files: _Files) -> None:
    """Write a record with fields: JSON, with a file for each value that is bytes or lies elsewhere."""
    root = "" if spec.recipe is None else spec.recipe.media_root
    media = MediaFiles(root, RECORD_BYTES_MAX, ReadMeter())

    def told(value: Any, name: str) -> Any:
        if isinstance(value, MediaPath):
            try:
                content = media.read(value, path)
            except (RecordFault, MsdError, OSError) as error:
                return {"path": value.path, "error": getattr(error, "message", str(error))}
            suffix = Path(value.path).suffix
            return {"path": value.path, "file": files.write(f".{name}{suffix}", content)}
        if isinstance(value, (bytes, bytearray, memoryview)):
            return {"file": files.write(f".{name}", bytes(value))}
        if isinstance(value, Mapping):
            return {str(key): told(one, f"{name}.{_plain(str(key))}") for key, one in value.items()}
        if isinstance(value, (list, tuple)):
            return [told(one, f"{name}.{at}") for at, one in enumerate(value)]
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        return value.tolist() if hasattr(value, "tolist") else str(value)

    plain = {str(name): told(fields[name], _plain(str(name))) for name in fields}
    files.write(".json", json.dumps(plain, ensure_ascii=False, indent=1).encode("utf-8", "replace"))


def _plain(name: str) -> str:
    """Return a field's name as part of a file's: nothing that leads elsewhere."""
    kept = "".join(c if c.isalnum() or c in "_-." else "_" for c in name)
    return kept.strip(".")[:64] or "_"


def _in_child(write: Callable[[], tuple[list[str], int]], stem: Path) -> tuple[list[str], int, str]:
    """Write in a process of its own, that may die or hang; return files, bytes and what went wrong."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        status = 1
        faulthandler.disable()  # that it dies is no news
        with contextlib.suppress(BaseException):
            write()
            status = 0
        os._exit(status)
    error = ""
    fd = os.pidfd_open(pid)
    try:
        if not is_readable(fd, CHILD_S_MAX):
            os.kill(pid, signal.SIGKILL)
            error = f"reading it again took longer than {CHILD_S_MAX:g} s"
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    finally:
        os.close(fd)
    if code and not error:
        error = f"reading it again ended the process ({'exit code' if code > 0 else 'signal'} {abs(code)})"
    files = sorted(stem.parent.glob(f"{stem.name}.*"))
    if error:
        for file in files:
            file.unlink()
        return [], 0, error
    return [file.name for file in files], sum(file.stat().st_size for file in files), ""
