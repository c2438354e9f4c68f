"""The files of a folder of media that are a shard: their names and sizes, kept small in memory.

A shard is a folder with all below it: images, sounds, videos, captions of the same name, or a
metadata file that names them. Hidden files, links to folders and other kinds of files are no part
of it. Its size is that of its files together; its fingerprint is over names, sizes, and the edges
of the metadata file.
"""

from __future__ import annotations

import bisect
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from federation.model.job import Shard
from msd_client.contract.errors import ConfigError, CorruptRecordError
from msd_daemon.sources.manifest import FINGERPRINT_EDGE_BYTES

FILES_MAX = 1 << 18
"""Of one folder; larger ones are several shards: listing so many takes 90 MiB for a moment."""
METADATA_NAMES = ("metadata.jsonl", "metadata.csv")
"""As Hugging Face's imagefolder and audiofolder have them; the first that is there counts."""

_KINDS = {
    "image": "jpg jpeg png webp gif bmp tif tiff avif ppm",
    "audio": "wav flac mp3 ogg opus m4a aac",
    "video": "mp4 webm mkv mov avi m4v",
    "text": "txt caption",
    "json": "json",
}
_KIND_OF = {f".{suffix}": kind for kind, suffixes in _KINDS.items() for suffix in suffixes.split()}
MEDIA_KINDS = frozenset({"image", "audio", "video"})


class NamedFile(NamedTuple):
    """A file of a folder."""

    stem: bytes
    """Its name from the folder on, without its extension."""
    suffix: bytes
    """The extension with its dot, as it is written."""
    size_bytes: int

    @property
    def name(self) -> bytes:
        """Its name from the folder on."""
        return self.stem + self.suffix

    @property
    def kind(self) -> str:
        """What it holds, by its extension."""
        return file_kind(self.suffix)


@dataclass(frozen=True)
class Listing:
    """The files of a folder, in the order of (stem, extension)."""

    size_bytes: int
    fingerprint: str
    metadata: str
    """Name of the metadata file, empty where there is none."""
    names: bytes
    ends: npt.NDArray[np.int64]
    """Of each stem and each suffix in `names`. Shape (2 * files,)."""
    sizes: npt.NDArray[np.int64]
    groups: npt.NDArray[np.int64]
    """First file of each record and, at the end, the file count. Shape (records + 1,)."""

    @property
    def records(self) -> int:
        """Stems that have a file of media."""
        return len(self.groups) - 1

    def files(self, record: int) -> list[NamedFile]:
        """Return the files of a record."""
        first = int(self.groups[record])
        stem = self._file(first).stem
        found: list[NamedFile] = []
        for number in range(first, len(self.sizes)):
            file = self._file(number)
            if file.stem != stem:
                break
            found.append(file)
        return found

    def find(self, name: bytes) -> NamedFile | None:
        """Return a file by its name from the folder on, None where it is none of the shard's."""
        wanted = os.path.splitext(name)
        places = range(len(self.sizes))
        number = bisect.bisect_left(places, wanted, key=lambda place: self._file(place)[:2])
        if number < len(places):
            file = self._file(number)
            if file[:2] == wanted:
                return file
        return None

    def _file(self, number: int) -> NamedFile:
        begin = int(self.ends[2 * number - 1]) if number else 0
        middle, end = int(self.ends[2 * number]), int(self.ends[2 * number + 1])
        return NamedFile(self.names[begin:middle], self.names[middle:end], int(self.sizes[number]))


def file_kind(suffix: bytes) -> str:
    """Return what a file of an extension holds, empty where it is no part of a shard."""
    return _KIND_OF.get(suffix.decode(errors="replace").lower(), "")


def describe_folder(folder: Path) -> Shard:
    """Return a folder as a shard.

    Raises:
        ConfigError: It cannot be read, has no file of media, or too many files.
    """
    try:
        listing = list_folder(str(folder))
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read: {error.strerror}", path=str(folder)) from error
    if not listing.records and not listing.metadata:
        raise ConfigError(f"{folder} holds no image, sound or video", path=str(folder))
    return Shard(str(folder), listing.size_bytes, listing.fingerprint)


def open_listing(shard: Shard) -> Listing:
    """Return the files of a shard, as the manifest froze them.

    Raises:
        ConfigError: It has too many files.
        CorruptRecordError: Files were added, taken away or changed in size.
        OSError: It cannot be read.
    """
    listing = list_folder(shard.path)
    if (listing.size_bytes, listing.fingerprint) != (shard.size_bytes, shard.fingerprint):
        raise CorruptRecordError(
            f"{shard.path} has {len(listing.sizes)} files of {listing.size_bytes} bytes that are "
            f"not those of the frozen manifest, which has {shard.size_bytes} bytes: restore the "
            "folder or submit the job anew",
            shard=shard.path,
            byte_offset=0,
        )
    return listing


def list_folder(folder: str) -> Listing:
    """Return the files of a folder that are part of a shard.

    Raises:
        ConfigError: There are more than FILES_MAX.
        OSError: It cannot be read.
    """
    files: list[NamedFile] = []
    for file in _walk(os.fsencode(folder)):
        files.append(file)
        if len(files) > FILES_MAX:
            raise ConfigError(
                f"{folder} has over {FILES_MAX} files: name the folders below it as shards",
                path=folder,
            )
    files.sort()
    metadata = next((name for name in METADATA_NAMES if _has(files, name)), "")
    digest = hashlib.sha256()
    for file in files:
        digest.update(len(file.name).to_bytes(4, "little") + file.name)
        digest.update(file.size_bytes.to_bytes(8, "little"))
    if metadata:
        _add_edges(digest, os.path.join(folder, metadata))
    parts = [part for file in files for part in file[:2]]
    sizes = np.array([file.size_bytes for file in files], dtype=np.int64)
    return Listing(
        int(sizes.sum()),
        digest.hexdigest()[:32],
        metadata,
        b"".join(parts),
        np.cumsum([len(part) for part in parts], dtype=np.int64),
        sizes,
        np.array([*_group(files), len(files)], dtype=np.int64),
    )


def _walk(root: bytes) -> Iterator[NamedFile]:
    waiting = [b""]
    while waiting:
        inside = waiting.pop()
        with os.scandir(os.path.join(root, inside) if inside else root) as entries:
            for entry in entries:
                if entry.name.startswith(b"."):
                    continue
                name = inside + entry.name
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(name + b"/")
                    continue
                stem, suffix = os.path.splitext(name)
                is_metadata = name.decode(errors="replace") in METADATA_NAMES
                if (is_metadata or file_kind(suffix)) and entry.is_file():
                    yield NamedFile(stem, suffix, entry.stat().st_size)


def _has(files: list[NamedFile], name: str) -> bool:
    return any(file.name == name.encode() for file in files)


def _group(files: list[NamedFile]) -> Iterator[int]:
    """Yield the first file of each stem that has a file of media."""
    first, has_media = 0, False
    for number, file in enumerate(files):
        if file.stem != files[first].stem:
            if has_media:
                yield first
            first, has_media = number, False
        has_media = has_media or file.kind in MEDIA_KINDS
    if has_media:
        yield first


def _add_edges(digest: hashlib._Hash, path: str) -> None:
    with open(path, "rb") as file:
        digest.update(file.read(FINGERPRINT_EDGE_BYTES))
        file.seek(max(0, os.fstat(file.fileno()).st_size - FINGERPRINT_EDGE_BYTES))
        digest.update(file.read(FINGERPRINT_EDGE_BYTES))
