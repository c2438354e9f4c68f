"""Resolves the sources of a job: globs to files, format and order class, the frozen manifest.

Asks `sources.manifest` path by path and file by file, so that every fault is told, not the first.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping
from pathlib import Path

from federation.model.job import ErrorPolicy, Shard, ShuffleRule, SourceSpec, manifest_digest
from federation.model.recipe import TokenFileRule
from msd_client.contract.errors import MsdError
from msd_daemon.config.column_check import check_columns, check_names
from msd_daemon.config.faults import Fault, told_fault
from msd_daemon.config.job_file import DefaultsFile, ErrorFile, ShuffleFile, SourceFile
from msd_daemon.sources.formats import format_of
from msd_daemon.sources.manifest import (
    Compression,
    Format,
    ShardPath,
    describe_shard,
    detect_format,
    expand_paths,
    order_class,
)
from msd_daemon.sources.parquet_columns import ColumnKind, wanted_columns
from msd_daemon.sources.wanted_fields import wanted_fields
from msd_daemon.stores.urls import is_url

SHARDS_MAX = 1_000_000
RECORD_BYTES_MAX = 64 << 20

Kind = tuple[Format, Compression]


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
    given = source.format or defaults.format
    files = _expand(path, source.paths, base_dir, given, faults)
    kind = _one_kind(path, files, given, faults)
    if kind is None:
        return None
    file_format, compression = kind
    _check_keys(path, source, file_format, faults)
    shards = _freeze(path, files, kind, faults)
    if shards and not any(shard.size_bytes for shard in shards):
        faults.append(Fault(f"{path}.paths", source.paths, "all files are empty", "give others"))
    tokens_field = _tokens_field(source, defaults, file_format)
    return SourceSpec(
        name=name,
        format=file_format,
        compression=compression,
        order_class=order_class(file_format, compression),
        shards=shards,
        manifest_digest=manifest_digest(shards),
        text_field=source.text or defaults.text or "text",
        text_document=source.document or defaults.document or "file",
        tokens_field=tokens_field,
        key_field=_key_field(source, defaults, file_format),
        is_tokenized=file_format == "megatron" or bool(tokens_field),
        record_bytes_max=source.record_bytes_max or defaults.record_bytes_max or RECORD_BYTES_MAX,
        shuffle=_shuffle_rule(source.shuffle, defaults.shuffle),
        on_error=_error_policy(source.on_error, defaults.on_error),
        at_exhaustion=source.at_exhaustion or defaults.at_exhaustion or "repeat",
        max_epochs=source.max_epochs or defaults.max_epochs,
        hold_out=_given(source.hold_out, defaults.hold_out, 0.0),
        loss_weight=_given(source.loss_weight, defaults.loss_weight, 1.0),
        token_file=_token_file(path, source, defaults, file_format, faults),
        was=source.was or "",
        is_critical=bool(source.critical if source.critical is not None else defaults.critical),
    )


def _token_file(
    path: str, source: SourceFile, defaults: DefaultsFile, kind: Format, faults: list[Fault]
) -> TokenFileRule | None:
    if kind == "token_file":
        rule = TokenFileRule()
        tokens = source.record_tokens or defaults.record_tokens or rule.record_tokens
        eot_id = source.eot_id if source.eot_id is not None else defaults.eot_id
        width = source.token_bytes or defaults.token_bytes or rule.id_bytes
        return TokenFileRule(tokens, eot_id, width)
    for key in ("record_tokens", "eot_id", "token_bytes"):
        value = getattr(source, key)
        if value is not None:
            problem = f"format {kind} has records of its own"
            faults.append(Fault(f"{path}.{key}", value, problem, "remove it"))
    return None


def _given(own: float | None, shared: float | None, default: float) -> float:
    return next(value for value in (own, shared, default) if value is not None)


def _tokens_field(source: SourceFile, defaults: DefaultsFile, kind: Format) -> str:
    """Return the field of ids; a `text` of the source's own goes before a default `tokens`."""
    entry = format_of(kind)
    if not entry.has_fields or entry.tokens_field:
        return entry.tokens_field
    if source.text is not None:
        return source.tokens or ""
    return source.tokens or defaults.tokens or ""


def _key_field(source: SourceFile, defaults: DefaultsFile, kind: Format) -> str:
    entry = format_of(kind)
    return (source.key or defaults.key or entry.natural_key) if entry.has_fields else ""


def _expand(
    path: str, patterns: list[str], base_dir: Path, given: Format | None, faults: list[Fault]
) -> list[ShardPath]:
    """Return the files that the patterns name, each once; faults go to the pattern at fault."""
    found: dict[ShardPath, None] = {}
    is_of_folders = given is not None and bool(format_of(given).describe)
    for index, pattern in enumerate(patterns):
        place = f"{path}.paths[{index}]" if len(patterns) > 1 else f"{path}.paths"
        if "\0" in pattern:
            faults.append(Fault(place, pattern, "holds a NUL", "write a file name"))
            continue
        try:
            files = expand_paths([pattern], base_dir, given)
        except (MsdError, OSError) as error:
            faults.append(told_fault(place, pattern, error))
            continue
        for file in [*files, *_odd_matches(pattern, base_dir)]:
            if file.is_file() or (is_of_folders and isinstance(file, Path) and file.is_dir()):
                found.setdefault(file)
            elif isinstance(file, Path):
                problem = "not a regular file" if file.exists() else "no such file (a dead link?)"
                faults.append(Fault(place, str(file), problem, "mend or remove it"))
    if len(found) > SHARDS_MAX:
        faults.append(
            Fault(
                f"{path}.paths", patterns, f"{len(found)} files, over {SHARDS_MAX}", "merge shards"
            )
        )
    return list(found)


def _odd_matches(pattern: str, base_dir: Path) -> list[Path]:
    """Return what a glob matches that is neither file nor folder: dead links, FIFOs, devices.

    To leave a dead link out silently would be to lose a shard silently.
    """
    if is_url(pattern) or not glob.has_magic(pattern):
        return []
    matches = glob.glob(os.path.join(base_dir, os.path.expanduser(pattern)), recursive=True)
    return [
        Path(match) for match in matches if not os.path.isfile(match) and not os.path.isdir(match)
    ]


def _one_kind(
    path: str, files: list[ShardPath], given: Format | None, faults: list[Fault]
) -> Kind | None:
    """Return format and compression of the files, or None where they have none in common."""
    kinds: dict[Kind, ShardPath] = {}
    count = len(faults)
    for file in files:
        try:
            kinds.setdefault(detect_format(file, given), file)
        except MsdError as error:
            faults.append(told_fault(f"{path}.paths", os.fspath(file), error))
    if len(kinds) > 1:
        (first, one), (second, other) = list(kinds.items())[:2]
        faults.append(
            Fault(
                f"{path}.paths",
                [one.name, other.name],
                f"mixes {_show(first)} and {_show(second)}, a source has one order class",
                "make one source of each kind",
            )
        )
    return next(iter(kinds)) if kinds and len(faults) == count else None


def _show(kind: Kind) -> str:
    file_format, compression = kind
    return file_format if compression == "none" else f"{file_format}.{compression}"


def _check_keys(path: str, source: SourceFile, kind: Format, faults: list[Fault]) -> None:
    """Refuse keys given for this very source that its format has no use for."""
    for key in ("text", "tokens", "key"):
        value = getattr(source, key)
        if value is not None and not format_of(kind).has_fields:
            faults.append(
                Fault(f"{path}.{key}", value, f"format {kind} has no fields", "remove it")
            )
    if source.text is not None and source.tokens is not None:
        faults.append(
            Fault(f"{path}.tokens", source.tokens, "text is given too", "keep one of the two")
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


def check_parquet(path: str, spec: SourceSpec, faults: list[Fault]) -> None:
    """Check that the columns that a source's samples are made of are there.

    Args:
        path: The source's key.
        spec: The source, with its recipe.
        faults: Receives what is wrong.
    """
    if spec.format != "parquet" or not spec.shards:
        return
    if spec.recipe is not None or spec.group is not None:
        names = wanted_fields(spec, ()) or ()
        if spec.recipe is None or spec.recipe.transform is None:
            check_names(path, names, spec.shards[0], faults)
        return
    keys = {ColumnKind.TEXT: "text", ColumnKind.IDS: "tokens", ColumnKind.KEY: "key"}
    wanted = [(f"{path}.{keys[column.kind]}", column) for column in wanted_columns(spec, ())]
    check_columns(wanted, spec.shards[0], faults)


def _freeze(
    path: str, files: list[ShardPath], kind: Kind, faults: list[Fault]
) -> tuple[Shard, ...]:
    shards = []
    for file in files:
        try:
            shards.append(describe_shard(file, *kind))
        except MsdError as error:
            faults.append(told_fault(f"{path}.paths", os.fspath(file), error))
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
