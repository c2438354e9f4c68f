"""Resolves the sources of a job: globs to files, format and order class, the frozen manifest."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from federation.model.job import ErrorPolicy, Shard, ShuffleRule, SourceSpec
from msd_client.contract.errors import MsdError
from msd_daemon.config.faults import Fault
from msd_daemon.config.job_file import DefaultsFile, ErrorFile, ShuffleFile, SourceFile
from msd_daemon.sources.manifest import freeze_shard, manifest_digest

SHARDS_MAX = 1_000_000
RECORD_BYTES_MAX = 64 << 20

Format = Literal["jsonl", "parquet", "text", "megatron"]
Compression = Literal["none", "gz", "zst", "xz"]

_COMPRESSIONS: dict[str, Compression] = {".gz": "gz", ".zst": "zst", ".zstd": "zst", ".xz": "xz"}
_FORMATS: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".rst": "text",
    ".bin": "megatron",
}
_STREAMS: tuple[Format, ...] = ("jsonl", "text")
"""Formats that may be compressed as a whole; the others compress inside."""


@dataclass(frozen=True)
class _Kind:
    format: Format | None
    compression: Compression


def resolve_sources(
    sources: Mapping[str, SourceFile],
    defaults: DefaultsFile,
    base_dir: Path,
    faults: list[Fault],
    notes: list[str],
) -> tuple[SourceSpec, ...]:
    """Return the sources that could be resolved, in the order of their names.

    Args:
        sources: Sections by name.
        defaults: What they share.
        base_dir: Folder that relative paths start from.
        faults: Receives what is wrong.
        notes: Receives what was decided.
    """
    resolved = []
    for name in sorted(sources):
        count = len(faults)
        spec = _resolve_source(name, sources[name], defaults, base_dir, faults)
        if spec is not None and len(faults) == count:
            resolved.append(spec)
            size_bytes = sum(shard.size_bytes for shard in spec.shards)
            notes.append(
                f"sources.{name}: {len(spec.shards)} shards, {size_bytes} bytes, {spec.format}"
                f" {spec.compression}, {spec.order_class}"
            )
    return tuple(resolved)


def _resolve_source(
    name: str, source: SourceFile, defaults: DefaultsFile, base_dir: Path, faults: list[Fault]
) -> SourceSpec | None:
    path = f"sources.{name}"
    files = _expand(path, source.paths, base_dir, faults)
    given = source.format or defaults.format
    kind = _kind_of(path, files, given, faults)
    if kind is None or kind.format is None or not files:
        return None
    if kind.format == "megatron":
        files = _megatron_pairs(path, files, faults)
    _check_keys(path, source, kind.format, faults)
    shards = _freeze(path, files, faults)
    if shards and not any(shard.size_bytes for shard in shards):
        faults.append(Fault(f"{path}.paths", source.paths, "all files are empty", "give others"))
    seekable = kind.compression == "none"
    return SourceSpec(
        name=name,
        format=kind.format,
        compression=kind.compression,
        order_class="seekable" if seekable else "streaming",
        shards=shards,
        manifest_digest=manifest_digest(shards),
        text_field=source.text or defaults.text or "text",
        text_document=source.document or defaults.document or "file",
        is_tokenized=kind.format == "megatron",
        record_bytes_max=source.record_bytes_max or defaults.record_bytes_max or RECORD_BYTES_MAX,
        shuffle=_shuffle_rule(source.shuffle, defaults.shuffle),
        on_error=_error_policy(source.on_error, defaults.on_error),
        at_exhaustion=source.at_exhaustion or defaults.at_exhaustion or "repeat",
        max_epochs=source.max_epochs or defaults.max_epochs,
    )


def _expand(path: str, patterns: list[str], base_dir: Path, faults: list[Fault]) -> list[str]:
    """Return the files that the patterns name, sorted, each once."""
    found: set[str] = set()
    for index, pattern in enumerate(patterns):
        place = f"{path}.paths[{index}]" if len(patterns) > 1 else f"{path}.paths"
        fault = _pattern_fault(pattern)
        if fault:
            faults.append(Fault(place, pattern, *fault))
            continue
        absolute = os.path.join(base_dir, os.path.expanduser(pattern))
        if os.path.isdir(absolute):
            faults.append(
                Fault(place, pattern, "is a folder", f"write {pattern.rstrip('/')}/**/*.jsonl")
            )
            continue
        # A name with [ ] in it is a name first, a pattern second.
        is_name = os.path.lexists(absolute)
        matches = [absolute] if is_name else glob.glob(absolute, recursive=True)
        files = [os.path.normpath(match) for match in matches if not os.path.isdir(match)]
        if not files:
            what = "no file matches" if glob.has_magic(pattern) else "no such file"
            faults.append(
                Fault(place, pattern, f"{what} in {base_dir}", "mend the path or make the file")
            )
        found.update(files)
    if len(found) > SHARDS_MAX:
        faults.append(
            Fault(
                f"{path}.paths", patterns, f"{len(found)} files, over {SHARDS_MAX}", "merge shards"
            )
        )
    return sorted(found, key=os.fsencode)


def _pattern_fault(pattern: str) -> tuple[str, str] | None:
    if "\0" in pattern:
        return "holds a NUL", "write a file name"
    scheme, separator, _ = pattern.partition("://")
    if separator:
        return (
            f"{scheme}:// is not read by this version",
            "copy or mount the data and give its path",
        )
    return None


def _kind_of(
    path: str, files: list[str], given: Format | None, faults: list[Fault]
) -> _Kind | None:
    kinds: dict[_Kind, str] = {}
    for file in files:
        stem, extension = os.path.splitext(file)
        compression = _COMPRESSIONS.get(extension.lower(), "none")
        if compression != "none":
            extension = os.path.splitext(stem)[1]
        if extension == ".idx":
            continue
        kinds.setdefault(_Kind(given or _FORMATS.get(extension.lower()), compression), file)
    for kind, file in kinds.items():
        if kind.format is None:
            faults.append(
                Fault(
                    f"{path}.format",
                    os.path.basename(file),
                    "the extension does not tell the format",
                    "give format: jsonl, parquet, text or megatron",
                )
            )
        elif kind.compression != "none" and kind.format not in _STREAMS:
            faults.append(
                Fault(
                    f"{path}.paths",
                    os.path.basename(file),
                    f"{kind.format} compressed as a whole can't be read block by block",
                    "decompress it, the format compresses inside",
                )
            )
    if len(kinds) > 1:
        first, second = list(kinds.items())[:2]
        faults.append(
            Fault(
                f"{path}.paths",
                [os.path.basename(first[1]), os.path.basename(second[1])],
                f"mixes {_show(first[0])} and {_show(second[0])}, one source has one order class",
                "make one source of each kind",
            )
        )
        return None
    return next(iter(kinds), None)


def _show(kind: _Kind) -> str:
    return f"{kind.format or 'unknown'}" + (
        f" .{kind.compression}" if kind.compression != "none" else ""
    )


def _megatron_pairs(path: str, files: list[str], faults: list[Fault]) -> list[str]:
    """Return the `.bin` of each pair; `.idx` may be named, matched by the glob, or neither."""
    stems = sorted({os.path.splitext(file)[0] for file in files}, key=os.fsencode)
    faults += [
        Fault(
            f"{path}.paths",
            os.path.basename(stem) + suffix,
            "a megatron shard is a pair of .bin and .idx, this one is missing",
            "put it beside the other",
        )
        for stem in stems
        for suffix in (".bin", ".idx")
        if not os.path.isfile(stem + suffix)
    ]
    return [stem + ".bin" for stem in stems]


def _check_keys(path: str, source: SourceFile, kind: Format, faults: list[Fault]) -> None:
    """Refuse keys given for this very source that its format has no use for."""
    if source.text is not None and kind in ("text", "megatron"):
        faults.append(
            Fault(f"{path}.text", source.text, f"format {kind} has no fields", "remove it")
        )
    if source.document is not None and kind != "text":
        faults.append(
            Fault(
                f"{path}.document",
                source.document,
                f"a record of {kind} is one document",
                "remove it, it belongs to format text",
            )
        )


def _freeze(path: str, files: list[str], faults: list[Fault]) -> tuple[Shard, ...]:
    shards = []
    for file in files:
        if os.path.lexists(file) and not os.path.isfile(file):
            faults.append(Fault(f"{path}.paths", file, "not a regular file", "give a file"))
            continue
        try:
            shards.append(freeze_shard(file))
        except OSError as error:
            faults.append(
                Fault(f"{path}.paths", file, f"can't be read: {error.strerror}", "mend its rights")
            )
        except MsdError as error:
            faults.append(Fault(f"{path}.paths", file, error.message, "mend or replace the file"))
    return tuple(shards)


def _shuffle_rule(own: ShuffleFile | None, shared: ShuffleFile | None) -> ShuffleRule:
    given: dict[str, object] = {}
    for section in (shared, own):
        if section is not None:
            given |= section.model_dump(exclude_none=True)
    return ShuffleRule(**given)  # type: ignore[arg-type] # the model has checked names and types


def _error_policy(own: ErrorFile | None, shared: ErrorFile | None) -> ErrorPolicy:
    given: dict[str, object] = {}
    for section in (shared, own):
        if section is not None:
            given |= section.model_dump(exclude_none=True)
    return ErrorPolicy(**given)  # type: ignore[arg-type] # the model has checked names and types
