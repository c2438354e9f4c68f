"""index.json of an MDS folder: which shards it has, of which columns, how they are packed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from msd_client.contract.errors import ConfigError, CorruptRecordError
from msd_daemon.sources.mds_values import MdsColumn
from msd_daemon.sources.record import ReadMeter
from msd_daemon.sources.shard_file import open_path
from msd_daemon.stores.data_path import P

INDEX = "index.json"
_INDEX_BYTES_MAX = 256 << 20
_VERSION = 2
COMPRESSIONS = ("br", "bz2", "gz", "snappy", "zstd")


@dataclass(frozen=True)
class MdsFile:
    """One file of a shard, raw or compressed."""

    name: str
    """Relative to the folder of index.json."""
    size_bytes: int
    hashes: tuple[tuple[str, str], ...]
    """(algorithm, hex digits)."""


@dataclass(frozen=True)
class MdsShard:
    """What index.json says of a shard."""

    columns: tuple[MdsColumn, ...]
    samples: int
    compression: str
    """Name of the algorithm, without its level; empty where there is none."""
    raw: MdsFile
    packed: MdsFile | None


def dataset_shards(folder: P) -> list[P] | None:
    """Return the shards of an MDS folder in the order of its index.json, None where it is none.

    A shard is its raw file where that is there, else its compressed one. Of a folder of streams
    name each stream's own folder.

    Raises:
        ConfigError: index.json cannot be read, or is of another version or format.
    """
    path = folder / INDEX
    if not path.is_file():
        return None
    try:
        plain = load_index(str(path))
        if plain is None or not is_mds(plain):
            return None
        shards = _parse(str(path), plain)
    except CorruptRecordError as error:
        raise ConfigError(error.message, path=str(path)) from error
    return [_chosen(folder, shard) for shard in shards]


def companion_files(path: P) -> list[P]:
    """Return the index.json that a shard belongs to."""
    return [path.parent / INDEX]


def read_index(path: str) -> dict[str, MdsShard]:
    """Return the shards of an index.json, a path or URL, by the names of their files.

    Raises:
        CorruptRecordError: It is no MDS index, or damaged.
        OSError: It cannot be read.
    """
    plain = load_index(path)
    if plain is None or not is_mds(plain):
        raise _fault(path, "is no MDS index")
    found: dict[str, MdsShard] = {}
    for shard in _parse(path, plain):
        found[shard.raw.name] = shard
        if shard.packed is not None:
            found[shard.packed.name] = shard
    return found


def _chosen(folder: P, shard: MdsShard) -> P:
    raw = folder / shard.raw.name
    if shard.packed is None or raw.is_file():
        return raw
    return folder / shard.packed.name


def is_mds(plain: dict[str, Any]) -> bool:
    """Tell whether the content of an index.json is that of an MDS folder."""
    return isinstance(plain.get("shards"), list)


def load_index(path: str) -> dict[str, Any] | None:
    """Return the object in an index.json, a path or URL; None where it holds something else.

    Raises:
        CorruptRecordError: It is no JSON, or too large.
        OSError: It cannot be read.
    """
    file = open_path(path, ReadMeter())
    try:
        if file.size_bytes > _INDEX_BYTES_MAX:
            raise _fault(path, f"has {file.size_bytes} bytes, at most {_INDEX_BYTES_MAX} are read")
        plain = json.loads(file.read_at(0, file.size_bytes))
    except (ValueError, RecursionError) as error:
        raise _fault(path, f"is no JSON ({str(error)[:100]})") from error
    finally:
        file.close()
    return plain if isinstance(plain, dict) else None


def _parse(path: str, plain: dict[str, Any]) -> list[MdsShard]:
    if plain.get("version") != _VERSION:
        raise _fault(path, f"is of version {plain.get('version')!r}, only {_VERSION} is read")
    known: dict[str, tuple[MdsColumn, ...]] = {}
    found: list[MdsShard] = []
    for number, one in enumerate(plain["shards"]):
        try:
            found.append(_shard(one, known))
        except (KeyError, TypeError, ValueError) as error:
            raise _fault(path, f"describes shard {number} wrongly ({error!r})") from error
    return found


def _shard(one: dict[str, Any], known: dict[str, tuple[MdsColumn, ...]]) -> MdsShard:
    if one["version"] != _VERSION or one["format"] != "mds":
        raise ValueError(f"format {one['format']!r} version {one['version']!r}")
    described = (one["column_names"], one["column_encodings"], one["column_sizes"])
    key = json.dumps(described)
    if key not in known:  # nearly always one for all shards
        rows = zip(*described, strict=True)
        known[key] = tuple(MdsColumn(str(n), str(e), _count(s or 0)) for n, e, s in rows)
    compression = str(one["compression"] or "").partition(":")[0]
    packed = _file(one["zip_data"]) if one.get("zip_data") else None
    if compression and compression not in COMPRESSIONS:
        raise ValueError(f"compression {compression!r}, read are {', '.join(COMPRESSIONS)}")
    if bool(compression) != (packed is not None):
        raise ValueError("compression and zip_data contradict each other")
    return MdsShard(known[key], _count(one["samples"]), compression, _file(one["raw_data"]), packed)


def check_name(name: str) -> str:
    """Return the name of a file below a data set's folder.

    Raises:
        ValueError: It leads elsewhere.
    """
    parts = PurePosixPath(name).parts
    if not parts or PurePosixPath(name).is_absolute() or ".." in parts or "\0" in name:
        raise ValueError(f"{name!r} is no file of the folder")
    return name


def _file(one: dict[str, Any]) -> MdsFile:
    name = check_name(one["basename"])
    hashes = tuple((str(k), str(v).lower()) for k, v in sorted((one.get("hashes") or {}).items()))
    return MdsFile(name, _count(one["bytes"]), hashes)


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def _fault(path: str, what: str) -> CorruptRecordError:
    return CorruptRecordError(f"{path} {what}", shard=path)
