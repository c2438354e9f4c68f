"""The frozen list of a source's shards: which files, in which order, with which fingerprints."""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Literal, cast

from federation.model.job import Shard, manifest_digest
from msd_client.contract.errors import ConfigError
from msd_daemon.sources.byte_stream import GZIP_MAGIC, XZ_MAGIC
from msd_daemon.sources.formats import (
    all_formats,
    companion_files,
    folder_shards,
    format_of,
    resolve_name,
)
from msd_daemon.sources.remote_shards import (
    FolderRule,
    RemoteObject,
    describe_remote,
    expand_url,
)
from msd_daemon.sources.zstd_stream import is_zstd
from msd_daemon.stores.data_path import P
from msd_daemon.stores.urls import is_url, parse_url

Format = str
OrderClass = Literal["seekable", "streaming"]
Compression = Literal["none", "gz", "zst", "xz"]
ShardPath = Path | RemoteObject

FINGERPRINT_EDGE_BYTES = 64 * 1024

_COMPRESSIONS: dict[str, Compression] = {
    ".gz": "gz",
    ".gzip": "gz",
    ".tgz": "gz",
    ".zst": "zst",
    ".zstd": "zst",
    ".xz": "xz",
}
_WHOLE_NAMES = frozenset({".tgz"})
"""Compressions whose extension tells the format too."""
_UNSUPPORTED = frozenset({".bz2", ".lz4", ".br", ".7z", ".zip", ".lzma", ".z"})
_TEXTS = frozenset({"jsonl", "text", "csv", "nemo_manifest"})
"""Formats that no magic number begins, so that a wrong name is told by another format's."""


@dataclass(frozen=True)
class SourceManifest:
    """What the paths of a source turned out to be."""

    format: Format
    compression: Compression
    order_class: OrderClass
    shards: tuple[Shard, ...]
    digest: str
    """sha256 (hex, 32 digits) over sizes and fingerprints, in order; paths are left out."""


def resolve_source(
    paths: Sequence[str], base: Path, source_format: Format | None = None
) -> SourceManifest:
    """Expand the paths of a source and fingerprint its shards.

    Args:
        paths: Files, globs (`**` too) and folders; relative ones are taken from `base`.
        base: Folder of the job file.
        source_format: Overrules the file extensions.

    Raises:
        ConfigError: A path matches nothing, formats or compressions are mixed, or a file's first
            bytes contradict its name.
    """
    files = expand_paths(paths, base, source_format)
    kinds = {file: detect_format(file, source_format) for file in files}
    distinct = sorted(set(kinds.values()))
    if len(distinct) > 1:
        shown = "; ".join(
            f"{kind}/{compression}: {next(f for f in files if kinds[f] == (kind, compression))}"
            for kind, compression in distinct
        )
        raise ConfigError(
            f"shards of one source must have one format and compression, found {shown}: "
            "make two sources of them"
        )
    kind, compression = distinct[0]
    shards = tuple(describe_shard(file, kind, compression) for file in files)
    return SourceManifest(
        kind,
        compression,
        order_class(kind, compression),
        shards,
        manifest_digest(shards),
    )


def order_class(kind: Format, compression: Compression) -> OrderClass:
    """Return how the shards of a format can be read, decided by format and name alone (E2)."""
    order = format_of(kind).order
    if order == "by_compression":
        return "seekable" if compression == "none" else "streaming"
    return order


def expand_paths(
    paths: Sequence[str], base: Path, source_format: Format | None = None
) -> list[ShardPath]:
    """Return the files that paths stand for: each once, sorted by path inside each entry.

    Raises:
        ConfigError: A path matches no file.
    """
    found: dict[ShardPath, None] = {}
    for path in paths:
        for file in _expand_path(path, base, source_format):
            found.setdefault(file)
    if not found:
        raise ConfigError("a source needs at least one path")
    return list(found)


def _expand_path(path: str, base: Path, source_format: Format | None) -> list[ShardPath]:
    if path.startswith("file://"):
        path = f"/{parse_url(path).key}"
    elif is_url(path):
        return _expand_remote(path, source_format)
    full = base / Path(path).expanduser()
    is_of_folders = source_format is not None and bool(format_of(source_format).describe)
    if is_of_folders:
        files = [Path(name) for name in sorted(glob.glob(str(full), recursive=True))]
        files = [folder for folder in files if folder.is_dir()]
    elif full.is_dir():
        files = _expand_folder(full, source_format)
    elif full.exists():
        files = [full]
    elif full.with_name(full.name + ".idx").is_file():
        files = [full.with_name(full.name + ".bin")]  # a Megatron prefix
    else:
        names = glob.glob(str(full), recursive=True)
        matches = [Path(name) for name in sorted(names, key=os.fsencode)]
        files = [file for file in matches if file.is_file()]
        for folder in (match for match in matches if match.is_dir()):
            if "**" not in path:
                files += _expand_folder(folder, source_format)
    if not files:
        raise ConfigError(f"path {path!r} matches no file (looked at {full})", path=str(full))
    shards: list[Path] = list(dict.fromkeys(_shard_path(file) for file in files))
    for shard in shards:
        _check_name(shard)
    return [*shards]


def _check_name(path: Path) -> None:
    """Refuse a path that no message, state or journal can hold.

    Raises:
        ConfigError: It is not UTF-8.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        shown = os.fsencode(path).decode(errors="backslashreplace")
        raise ConfigError(
            f"the path of {shown} is not UTF-8: rename it, a job names its files in UTF-8",
            path=shown,
        ) from error


def _expand_remote(url: str, source_format: Format | None) -> list[ShardPath]:
    if source_format is not None and format_of(source_format).describe:
        raise ConfigError(
            f"path {url!r}: shards of {source_format} are folders of this machine: copy them, or "
            "pack the files as tar (webdataset)"
        )
    is_any = source_format is not None and not format_of(source_format).extensions

    def is_wanted(name: str) -> bool:
        kind = _named_format(Path(name))
        return is_any or (kind is not None and source_format in {None, kind})

    def is_secondary(name: str) -> bool:
        kind = _named_format(Path(name))
        return source_format is None and kind is not None and format_of(kind).is_secondary

    entries = [entry for entry in all_formats().values() if source_format in {None, entry.name}]
    marks = frozenset(name for entry in entries for name in entry.folder_files)
    rule = FolderRule(is_wanted, is_secondary, marks, lambda path: dataset_of(path, source_format))
    return list(expand_url(url, rule))


def _expand_folder(folder: Path, source_format: Format | None) -> list[Path]:
    """Return the data files below a folder (`lang=de/part-0.parquet` too), hidden ones left out."""
    files: list[Path] = []
    secondary: list[Path] = []
    is_any = source_format is not None and not format_of(source_format).extensions
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith((".", "_"))]
        found = dataset_of(Path(parent), source_format)
        if found is not None:
            files += found[1]
            continue
        for name in names:
            if name.startswith((".", "_")):
                continue
            kind = _named_format(Path(name))
            if not is_any and (kind is None or source_format not in {None, kind}):
                continue
            is_beside = source_format is None and kind is not None and format_of(kind).is_secondary
            (secondary if is_beside else files).append(Path(parent, name))
    return sorted(files or secondary, key=os.fsencode)


def dataset_of(folder: P, source_format: Format | None = None) -> tuple[Format, list[P]] | None:
    """Return format and shards of a folder that is one data set, None where it is none."""
    for entry in all_formats().values():
        if source_format in {None, entry.name}:
            shards = folder_shards(entry, folder)
            if shards is not None:
                return entry.name, shards
    return None


@lru_cache(maxsize=64)
def _format_of_folder(folder: Path) -> tuple[Format, frozenset[Path]]:
    found = dataset_of(folder)
    return ("", frozenset()) if found is None else (found[0], frozenset(found[1]))


def _data_set_of(file: ShardPath) -> Format:
    """Return the format of the data set that a file is a shard of, empty where it is of none."""
    if isinstance(file, RemoteObject):
        return file.format
    of_folder, shards = _format_of_folder(file.parent)
    return of_folder if file in shards else ""


def _shard_path(file: Path) -> Path:
    return file.with_suffix(".bin") if file.suffix == ".idx" else file


def _split_name(file: ShardPath) -> tuple[str, Compression, bool]:
    """Return a file's data extension, its compression, and whether that is one we read."""
    suffixes = [suffix.lower() for suffix in file.suffixes[-2:]]
    if not suffixes:
        return "", "none", True
    if suffixes[-1] in _WHOLE_NAMES:
        return suffixes[-1], _COMPRESSIONS[suffixes[-1]], True
    if suffixes[-1] in _COMPRESSIONS:
        inner = suffixes[-2] if len(suffixes) > 1 else ""
        return inner, _COMPRESSIONS[suffixes[-1]], True
    return suffixes[-1], "none", suffixes[-1] not in _UNSUPPORTED


def _named_format(file: ShardPath) -> Format | None:
    extension, _, is_readable = _split_name(file)
    return _by_extension().get(extension) if is_readable else None


@cache
def _by_extension() -> dict[str, Format]:
    formats = all_formats().values()
    return {extension: entry.name for entry in formats for extension in entry.extensions}


def detect_format(
    file: ShardPath, source_format: Format | None = None
) -> tuple[Format, Compression]:
    """Return the format and compression of a file, by its extensions and first bytes.

    A `.gz` file that is none is left as it is: its reader goes by the first bytes.

    Raises:
        ConfigError: The extension is unknown or names a compression that is not read, or the first
            bytes contradict it.
    """
    extension, compression, is_readable = _split_name(file)
    kind = source_format or _by_extension().get(extension)
    of_folder = _data_set_of(file)
    if of_folder and source_format in {None, of_folder}:
        return of_folder, "none"  # how it is compressed stands in the data set's own index
    if not is_readable:
        raise ConfigError(
            f"{file} is compressed as {extension}: only .gz, .zst and .xz are read", path=str(file)
        )
    if kind is None:
        known = " ".join(sorted(_by_extension()))
        raise ConfigError(
            f"{file} has an unknown extension {extension!r}: name the format, or use one of {known}",
            path=str(file),
        )
    if compression != "none" and not format_of(kind).is_compressible:
        raise ConfigError(f"{file} is a compressed {kind} file: unpack it", path=str(file))
    if isinstance(file, Path):  # an object is known by its name: no request for each (E19)
        _check_magic(file, kind, compression)
    return kind, compression


def _check_magic(file: Path, kind: Format, compression: Compression) -> None:
    if compression != "none" or kind not in {*_TEXTS, "parquet"}:
        return
    head = _read_head(file)
    if kind == "parquet":
        if head and not head.startswith((b"PAR1", b"PARE")):
            raise ConfigError(
                f"{file} is no parquet file: it starts with {head[:4]!r}, not PAR1", path=str(file)
            )
        return
    for name, is_that in (
        ("gzip", head.startswith(GZIP_MAGIC)),
        ("xz", head == XZ_MAGIC),
        ("zstd", is_zstd(head)),
        ("parquet", head.startswith(b"PAR1")),
    ):
        if is_that:
            raise ConfigError(
                f"{file} is {name} by its first bytes and {kind} by its name: rename it",
                path=str(file),
            )


def _read_head(file: Path) -> bytes:
    try:
        with file.open("rb") as opened:
            return opened.read(len(XZ_MAGIC))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}", path=str(file)) from error


def describe_shard(file: ShardPath, kind: Format, compression: Compression) -> Shard:
    """Return a shard with size and fingerprint; of a Megatron pair both files count.

    Raises:
        ConfigError: A file cannot be read.
    """
    del compression  # a shard is its bytes, whatever they are
    if isinstance(file, RemoteObject):
        return describe_remote(file, kind)
    entry = format_of(kind)
    if entry.describe:
        return cast("Shard", resolve_name(entry.describe)(file))
    parts = [file, *companion_files(entry, file)]
    digest = hashlib.sha256()
    size_bytes = 0
    for part in parts:
        part_bytes = _add_edges(digest, part)
        if part is file:
            size_bytes = part_bytes
    return Shard(str(file), size_bytes, digest.hexdigest()[:32])


def _add_edges(digest: hashlib._Hash, file: Path) -> int:
    """Add a file's size and its first and last 64 KiB to a digest; returns its size."""
    try:
        with file.open("rb") as opened:
            size_bytes = os.fstat(opened.fileno()).st_size
            digest.update(size_bytes.to_bytes(8, "little"))
            digest.update(opened.read(FINGERPRINT_EDGE_BYTES))
            opened.seek(max(0, size_bytes - FINGERPRINT_EDGE_BYTES))
            digest.update(opened.read(FINGERPRINT_EDGE_BYTES))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}", path=str(file)) from error
    return size_bytes
