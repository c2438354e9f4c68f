"""index.json of a LitData folder: which chunks it has, of which leaves, how they are packed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from msd_client.contract.errors import ConfigError, CorruptRecordError
from msd_daemon.sources.mds_index import INDEX, check_name, load_index
from msd_daemon.stores.data_path import P

_READ_LOADERS = ("PyTreeLoader", "TokensLoader")


@dataclass(frozen=True)
class LitDataChunk:
    """What index.json says of a chunk."""

    name: str
    items: int
    raw_bytes: int
    """Of the chunk, unpacked where the file is compressed as a whole."""


@dataclass(frozen=True)
class LitDataIndex:
    """A folder of chunks."""

    chunks: dict[str, LitDataChunk]
    """By the names of their files, in order."""
    leaf_formats: tuple[str, ...]
    tree: str
    compression: str
    """zstd where chunks or samples are compressed; empty where not."""
    level: str
    """What is compressed: chunk, batch or sample."""
    is_tokens: bool


def dataset_shards(folder: P) -> list[P] | None:
    """Return the chunks of a LitData folder in the order of its index.json, None where it is none.

    Raises:
        ConfigError: index.json cannot be read, or its chunks are of a kind that is not.
    """
    path = folder / INDEX
    if not path.is_file():
        return None
    try:
        plain = load_index(str(path))
        if plain is None or not is_litdata(plain):
            return None
        index = _parse(str(path), plain)
    except CorruptRecordError as error:
        raise ConfigError(error.message, path=str(path)) from error
    return [folder / name for name in index.chunks]


def companion_files(path: P) -> list[P]:
    """Return the index.json that a chunk belongs to."""
    return [path.parent / INDEX]


def is_litdata(plain: dict[str, Any]) -> bool:
    """Tell whether the content of an index.json is that of a LitData folder."""
    return isinstance(plain.get("chunks"), list) and isinstance(plain.get("config"), dict)


def read_index(path: str) -> LitDataIndex:
    """Return what an index.json says, a path or URL.

    Raises:
        ConfigError: Its chunks are of a kind that is not read.
        CorruptRecordError: It is no LitData index, or damaged.
        OSError: It cannot be read.
    """
    plain = load_index(path)
    if plain is None or not is_litdata(plain):
        raise CorruptRecordError(f"{path} is no LitData index", shard=path)
    return _parse(path, plain)


def _parse(path: str, plain: dict[str, Any]) -> LitDataIndex:
    config = plain["config"]
    _refuse(path, config)
    try:
        compression = str(config.get("compression") or "").partition(":")[0]
        level = str(config.get("compression_level") or "chunk")
        formats = tuple(str(one) for one in config["data_format"] or ())
        chunks = {one.name: one for one in map(_chunk, plain["chunks"])}
        if compression not in ("", "zstd") or level not in ("chunk", "batch", "sample"):
            raise ValueError(f"compression {compression!r} of {level!r}, only zstd is read")
        is_tokens = config.get("item_loader") == "TokensLoader"
        if is_tokens and len(formats) != 1:
            raise ValueError(f"TokensLoader with {len(formats)} leaves")
        return LitDataIndex(
            chunks, formats, str(config["data_spec"]), compression, level, is_tokens
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptRecordError(
            f"{path} is not as LitData has it ({error!r})", shard=path
        ) from error


def _refuse(path: str, config: dict[str, Any]) -> None:
    loader = config.get("item_loader") or "PyTreeLoader"
    if loader == "ParquetLoader":
        raise ConfigError(f"{path}: its chunks are parquet files: name them with format parquet")
    if loader not in _READ_LOADERS:
        known = " and ".join(_READ_LOADERS)
        raise ConfigError(f"{path}: chunks of {loader!r} are not read, only those of {known}")
    if config.get("encryption"):
        raise ConfigError(f"{path}: its chunks are encrypted, which is not read: decrypt them")


def _chunk(one: dict[str, Any]) -> LitDataChunk:
    name, items, raw_bytes = one["filename"], one["chunk_size"], one["chunk_bytes"]
    check_name(name)
    if type(items) is not int or type(raw_bytes) is not int or min(items, raw_bytes) < 0:
        raise ValueError(f"chunk {name!r} of {items!r} samples and {raw_bytes!r} bytes")
    return LitDataChunk(name, items, raw_bytes)
