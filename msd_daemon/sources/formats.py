"""The readers of formats: what each is called, which files are its own, who opens them.

Built-in readers stand in `BUILT_IN`; others register under the entry point `msd.sources`, by name.
Modules of readers are imported when a source of theirs is opened, so a worker holds only its own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal, Protocol, cast

from federation.model.job import Shard, SourceSpec
from msd_client.contract.errors import ConfigError
from msd_daemon.sources.byte_stream import ByteStream
from msd_daemon.sources.record import RawRecord, ReadMeter
from msd_daemon.stores.data_path import P

ENTRY_POINT = "msd.sources"
PLAIN_FORMATS = frozenset({"jsonl", "parquet", "text", "megatron"})
"""Formats that the loader reads without fields, where a source asks for text or ids alone."""

Columns = tuple[str, ...] | None
"""Names of the fields that are wanted; None: all."""


class SeekableFormat(Protocol):
    """Opens shards whose blocks can be read in any order.

    One whose records have passed the source's `where` already, refused ones as FILTERED, says
    so by an attribute `is_where_judged` that is true.
    """

    def measure(self, shard: Shard) -> tuple[int, int]:
        """Return the blocks of a shard, at least 1, and its records.

        A function of the shard's content and the source's rule alone, never of an index.

        Raises:
            CorruptRecordError: The shard cannot be opened: its header or footer is damaged.
            OSError: It cannot be read.
        """
        ...

    def records(self, shard: Shard, block: int) -> Iterator[RawRecord]:
        """Yield the records of a block, each with `fields` and `place`; damage is a record too.

        A generator that is closed early closes its files.
        """
        ...


class StreamFormat(Protocol):
    """Reads shards from front to end.

    It may also have `at(shard)`, the reader of one shard, and `count_records(shard)`, how many its
    notes say it has: a loss is then told in records.
    """

    def records(self, stream: ByteStream, offset: int) -> Iterator[RawRecord]:
        """Yield the records of a stream, each with `fields`.

        Args:
            stream: Decompressed bytes of the shard from `offset` on.
            offset: Where that is: 0, or the `place` of a record.

        Raises:
            CorruptRecordError: Damage of the stream, after every whole record before it.
        """
        ...

    def is_start(self, before: bytes) -> bool:
        """Tell whether a record can begin behind these last bytes (at most 512) of a stream."""
        ...


Opener = Callable[[SourceSpec, Columns, ReadMeter], "SeekableFormat | StreamFormat"]


@dataclass(frozen=True)
class FormatEntry:
    """One format."""

    name: str
    extensions: tuple[str, ...]
    """With the dot, in lower case; a compression's may follow where it can be compressed."""
    opener: str
    """`module:function`, an Opener; empty for the formats that the loader opens itself."""
    order: Literal["seekable", "streaming", "by_compression"] = "seekable"
    """by_compression: streaming where the shard is compressed as a whole, else seekable."""
    is_compressible: bool = False
    """True where `.gz`, `.zst` and `.xz` around a shard are read."""
    has_fields: bool = True
    is_secondary: bool = False
    """True where such files of a folder are left out if files of other formats lie in it: lists
    and notes beside the data."""
    tokens_field: str = ""
    """Field of ids, where records are nothing else."""
    natural_key: str = ""
    """Field that names a record unless the job gives another."""
    place_name: str = "record"
    """What `RawRecord.place` counts."""
    folder: str = ""
    """`module:function`, DataPath -> list of shards or None: knows folders that are one data set."""
    folder_files: tuple[str, ...] = ()
    """A folder without one of these files is not asked about."""
    describe: str = ""
    """`module:function`, Path -> Shard: of a format whose shards are folders of this machine."""
    companions: str = ""
    """`module:function`, DataPath -> list of further files that a shard consists of."""

    def open(
        self, spec: SourceSpec, columns: Columns, meter: ReadMeter
    ) -> SeekableFormat | StreamFormat:
        """Return the reader of a source."""
        opener = cast(Opener, resolve_name(self.opener))
        return opener(spec, columns, meter)


BUILT_IN: tuple[FormatEntry, ...] = (
    FormatEntry(
        "jsonl",
        (".jsonl", ".ndjson", ".json"),
        "msd_daemon.sources.jsonl_fields:open_jsonl",
        "by_compression",
        is_compressible=True,
        place_name="byte offset",
    ),
    FormatEntry(
        "text",
        (".txt", ".text", ".md", ".rst"),
        "",
        "by_compression",
        is_compressible=True,
        has_fields=False,
        place_name="byte offset",
    ),
    FormatEntry(
        "parquet",
        (".parquet", ".pq"),
        "msd_daemon.sources.parquet_fields:open_parquet",
        place_name="row",
    ),
    FormatEntry(
        "megatron",
        (".bin", ".idx"),
        "",
        has_fields=False,
        companions="msd_daemon.sources.megatron:companion_files",
    ),
    FormatEntry(
        "webdataset",
        (".tar", ".tgz"),
        "msd_daemon.sources.webdataset:open_webdataset",
        "streaming",
        is_compressible=True,
        natural_key="__key__",
        place_name="byte offset",
    ),
    FormatEntry(
        "arrow",
        (".arrow", ".feather", ".ipc"),
        "msd_daemon.sources.arrow_fields:open_arrow",
        place_name="row",
        folder="msd_daemon.sources.arrow_fields:dataset_shards",
        folder_files=("state.json", "dataset_dict.json"),
    ),
    FormatEntry(
        "mds",
        (".mds",),
        "msd_daemon.sources.mds:open_mds",
        folder="msd_daemon.sources.mds:dataset_shards",
        folder_files=("index.json",),
        companions="msd_daemon.sources.mds:companion_files",
    ),
    FormatEntry(
        "litdata",
        (),
        "msd_daemon.sources.litdata:open_litdata",
        folder="msd_daemon.sources.litdata:dataset_shards",
        folder_files=("index.json",),
        companions="msd_daemon.sources.litdata:companion_files",
    ),
    FormatEntry(
        "csv",
        (".csv", ".tsv"),
        "msd_daemon.sources.csv_fields:open_csv",
        "streaming",
        is_secondary=True,
        is_compressible=True,
        place_name="byte offset",
    ),
    FormatEntry(
        "nemo_manifest",
        (),
        "msd_daemon.sources.jsonl_fields:open_nemo_manifest",
        "by_compression",
        is_compressible=True,
        place_name="byte offset",
    ),
    FormatEntry(
        "folder",
        (),
        "msd_daemon.sources.captioned:open_folder",
        natural_key="__key__",
        describe="msd_daemon.sources.folder_listing:describe_folder",
    ),
    FormatEntry(
        "token_file",
        (),
        "msd_daemon.sources.token_file:open_token_file",
        tokens_field="tokens",
        place_name="token",
    ),
)
"""`folder` is files of media with captions beside them; `token_file` raw ids without an index."""


@cache
def all_formats() -> dict[str, FormatEntry]:
    """Return the formats by name, those of installed packages too.

    Raises:
        ConfigError: An installed entry point cannot be loaded or is no FormatEntry.
    """
    # Late: it loads much, and the daemon itself asks for built-in readers alone.
    from importlib.metadata import entry_points

    found = {entry.name: entry for entry in BUILT_IN}
    for point in entry_points(group=ENTRY_POINT):
        try:
            entry = point.load()
        except Exception as error:  # whatever the package raises, it is named
            raise ConfigError(
                f"entry point {ENTRY_POINT}:{point.name} ({point.value}) cannot be loaded: {error}: "
                "mend or remove the package"
            ) from error
        if not isinstance(entry, FormatEntry) or entry.name in found:
            raise ConfigError(
                f"entry point {ENTRY_POINT}:{point.name} ({point.value}) is no FormatEntry of a new "
                "name: mend or remove the package"
            )
        found[entry.name] = entry
    return found


def format_of(name: str) -> FormatEntry:
    """Return a format by name.

    Raises:
        ConfigError: There is none.
    """
    formats = all_formats()
    if name not in formats:
        known = ", ".join(sorted(formats))
        raise ConfigError(f"format {name!r} is unknown: use one of {known}, or install its reader")
    return formats[name]


def is_read_plain(spec: SourceSpec) -> bool:
    """Tell whether the records of a source are read without fields: texts or ids alone."""
    return spec.recipe is None and spec.group is None and spec.format in PLAIN_FORMATS


def reader_module(spec: SourceSpec) -> str:
    """Return the module of a built-in reader that a source needs, empty for those of packages.

    What a package's module does when it is imported is not known: threads of it would not survive
    a fork.
    """
    is_plain = is_read_plain(spec)
    entry = next((entry for entry in BUILT_IN if entry.name == spec.format), None)
    if entry is None:
        return ""
    if is_plain or not entry.opener:
        return f"{__package__}.{entry.name}"
    return entry.opener.partition(":")[0]


def resolve_name(name: str) -> Callable[..., object]:
    """Return the function that `module:function` names.

    Raises:
        ConfigError: There is none.
    """
    module, _, function = name.partition(":")
    try:
        found: Callable[..., object] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{name!r} cannot be loaded: {error}: mend the reader") from error
    return found


def companion_files(entry: FormatEntry, shard: P) -> list[P]:
    """Return the further files that a shard consists of, on this machine or in a store."""
    if not entry.companions:
        return []
    found = resolve_name(entry.companions)(shard)
    assert isinstance(found, list)
    return found


def folder_shards(entry: FormatEntry, folder: P) -> list[P] | None:
    """Return the shards of a folder that is one data set of a format, None where it is none."""
    if not entry.folder or not any((folder / name).is_file() for name in entry.folder_files):
        return None
    found = resolve_name(entry.folder)(folder)
    assert found is None or isinstance(found, list)
    return found
