"""How many samples a tar should have, as other tools' notes beside it say: Energon and wids.

Only for messages about what damage cost: the stream never depends on them (E2). All of them are
hostile and may be stale, so anything odd is no answer.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from msd_daemon.stores.urls import is_url

_NOTE_BYTES_MAX = 32 << 20
_WIDS_FILES_MAX = 16
_PARENTS_MAX = 5
_YAML_COUNT = re.compile(r"""^\s+["']?(.+?)["']?\s*:\s*(\d{1,15})\s*$""")


def count_samples(path: str) -> int | None:
    """Return the samples of a tar by the notes beside it, None where none says.

    Energon: `.nv-meta/.info.json` (or `.info.yaml`, older) in the tar's folder or above it, whose
    `shard_counts` names the tar from there. wids: a `*.json` in the tar's folder whose `shardlist`
    names it.
    """
    if is_url(path):
        return None
    shard = Path(path)
    count = _energon_count(shard)
    return _wids_count(shard) if count is None else count


def _energon_count(shard: Path) -> int | None:
    for root in list(shard.parents)[:_PARENTS_MAX]:
        name = shard.relative_to(root).as_posix()
        notes = _read_note(root / ".nv-meta" / ".info.json")
        if notes is not None:
            counts = _parse(notes).get("shard_counts")
            return _count(counts.get(name)) if isinstance(counts, dict) else None
        notes = _read_note(root / ".nv-meta" / ".info.yaml")
        if notes is not None:
            return _yaml_count(notes, name)
    return None


def _yaml_count(notes: bytes, name: str) -> int | None:
    for line in notes.decode(errors="replace").splitlines():
        found = _YAML_COUNT.match(line)
        if found and found[1] == name:
            return int(found[2])
    return None


def _wids_count(shard: Path) -> int | None:
    try:
        notes = sorted(shard.parent.glob("*.json"))
    except OSError:
        return None
    for note in notes[:_WIDS_FILES_MAX]:
        content = _read_note(note)
        if content is None or b'"shardlist"' not in content:
            continue
        shards = _parse(content).get("shardlist")
        found = _named(shards if isinstance(shards, list) else [], shard)
        if found is not None:
            return found
    return None


def _named(shards: list[Any], shard: Path) -> int | None:
    """Return the count of the only entry of a list whose URL ends with a tar's name."""
    entries = [
        entry
        for entry in shards
        if isinstance(entry, dict) and str(entry.get("url", "")).rsplit("/", 1)[-1] == shard.name
    ]
    return _count(entries[0].get("nsamples")) if len(entries) == 1 else None


def _count(value: object) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _parse(content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _read_note(path: Path) -> bytes | None:
    try:
        if not path.is_file():  # a pipe would never end
            return None
        with path.open("rb") as file:
            content = file.read(_NOTE_BYTES_MAX + 1)
    except (OSError, ValueError):
        return None
    return content if len(content) <= _NOTE_BYTES_MAX else None
