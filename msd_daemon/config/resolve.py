"""Turns what a user wrote into a resolved job, or says everything that is wrong with it at once.

Reads file names and fingerprints, opens the tokenizer for its vocabulary; knows no mesh, node or
worker count. The daemon runs it in a short-lived process (`workers/resolve_main.py`), so that
neither pydantic nor a tokenizer stays in its memory.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from federation.model.cost import CalibrationRule
from federation.model.job import (
    ResolvedJob,
    SampleLimits,
    SlowSourcesRule,
    SourceSpec,
    TokenizerSpec,
    encode_job,
)
from federation.model.media import MediaRule
from federation.model.place_tree import ClientPlaceTree
from msd_client.contract.errors import ConfigError, CorruptRecordError, JobError
from msd_client.contract.paths import default_state_dir
from msd_daemon.config.activation_check import check_activations
from msd_daemon.config.batch_section import batch_bounds, resolve_batch
from msd_daemon.config.cost_section import StepBounds, resolve_cost
from msd_daemon.config.daemon_config import CONTENT_DIR
from msd_daemon.config.encode_section import resolve_encode
from msd_daemon.config.faults import MISSING, Fault
from msd_daemon.config.fields_section import resolve_fields
from msd_daemon.config.job_file import JobFile, ParsedJob, parse_job_file
from msd_daemon.config.loaders_section import resolve_loaders, validation_only
from msd_daemon.config.mixture_section import check_shares, resolve_mixture
from msd_daemon.config.sample_section import resolve_samples
from msd_daemon.config.schedule_section import resolve_hook, resolve_schedule
from msd_daemon.config.source_section import resolve_sources
from msd_daemon.config.strategy_section import check_delay, resolve_strategy
from msd_daemon.config.tokenized_check import check_tokenized
from msd_daemon.config.tokenizer_section import VOCABULARY_UNKNOWN, resolve_tokenizer
from msd_daemon.config.yaml_text import YamlFaultError, plain_map, read_yaml
from msd_daemon.core.ring_plan import stage_spec
from msd_daemon.sources.megatron import MegatronShard
from msd_daemon.sources.record import ReadMeter
from msd_daemon.transforms.tokenizer import token_dtype

FAULTS_SHOWN_MAX = 100


def resolve_job(
    text_or_map: str | Mapping[str, Any],
    base_dir: Path,
    name_default: str = "job",
    store_dir: Path | None = None,
) -> ResolvedJob:
    """Return the resolved job.

    Args:
        text_or_map: YAML text, or the same as a map.
        base_dir: Folder that relative paths start from: that of the job file.
        name_default: Name of a job that gives none: the file's name without suffix.
        store_dir: Where copies of the user's code and lists are kept, by content; default: in the
            state folder.

    Raises:
        JobError: One line per fault: `key.path: value: what is wrong; remedy`.
    """
    try:
        data = read_yaml(text_or_map) if isinstance(text_or_map, str) else plain_map(text_or_map)
    except YamlFaultError as error:
        raise _job_error(name_default, error.faults) from error
    parsed = parse_job_file(data)
    name = parsed.file.name or _name_of(name_default)
    faults = list(parsed.faults)
    if store_dir is None:
        store_dir = default_state_dir(os.environ, os.getuid()) / CONTENT_DIR
    job = _resolve(parsed, base_dir, store_dir, name, faults, data)
    if job is None or faults:
        raise _job_error(name, faults)
    return job


def check_mesh(job: ResolvedJob, mesh: Mapping[str, int]) -> str:
    """Return one line about how a mesh shares the job, or refuse it with the numbers.

    Raises:
        MeshMismatchError: An axis is unknown, or the rows do not divide.
    """
    tree = ClientPlaceTree.from_mesh(mesh)
    count = f"{tree.microbatch_count(job.batch)} microbatches a step each"
    if job.batch.is_varlen:
        count = f"at least {count}, more where segments leave room that none fits"
    return f"{tree.describe()}: {tree.rank_count} ranks, {tree.dp_count} DP groups with {count}"


def render_resolved_yaml(job: ResolvedJob) -> str:
    """Return `resolved.yaml`: every default written out, the order class, manifests and digest."""
    plain = encode_job(job)
    notes = plain.pop("notes")
    head = [f"# {job.name}: the resolved job; {len(notes)} notes"]
    head += [f"# - {note}" for note in notes]
    body = io.StringIO()
    yaml.safe_dump(
        {"digest": job.digest()} | plain, body, sort_keys=False, allow_unicode=True, width=100
    )
    return "\n".join(head) + "\n" + body.getvalue()


def _resolve(
    parsed: ParsedJob,
    base_dir: Path,
    store_dir: Path,
    name: str,
    faults: list[Fault],
    data: dict[str, Any],
) -> ResolvedJob | None:
    file = parsed.file
    notes: list[str] = []
    names = _source_names(parsed, data)
    sources = resolve_sources(
        {} if "sources" in parsed.broken else _known_sources(parsed, names),
        file.defaults,
        base_dir,
        faults,
        notes,
    )
    tokenizer = None
    if "tokenizer" not in parsed.broken:
        tokenizer = resolve_tokenizer(
            file.tokenizer,
            base_dir,
            faults,
            is_needed=any(not source.is_tokenized for source in sources),
        )
    if tokenizer is not None:
        check_tokenized(sources, tokenizer, faults)
        if tokenizer.vocabulary_count == VOCABULARY_UNKNOWN:
            _check_widths(sources, faults)
    media: tuple[MediaRule, ...] = ()
    if not {"batch", "defaults"} & parsed.broken:
        sources, media = resolve_samples(
            file, sources, tokenizer, base_dir, store_dir, faults, notes, parsed.broken
        )
    batch = None
    if "batch" not in parsed.broken:
        batch = resolve_batch(file, tokenizer, faults)
    loaders = (
        resolve_loaders(file, sources, names, faults) if "loaders" not in parsed.broken else ()
    )
    mixture = None
    if not {"mixture", "sources", "loaders"} & parsed.broken:
        apart = validation_only(loaders, sources)
        if file.mixture is not None and file.mixture.schedule is not None:
            mixture = resolve_schedule(
                file.mixture, names, file.steps, base_dir, store_dir, faults, notes, apart=apart
            )
        else:
            mixture = resolve_mixture(file.mixture, names, faults, apart=apart, notes=notes)
        if file.mixture is None and len(names) > 1:
            notes.append("mixture: not given, all sources weigh the same")
        notes += [f"sources.{name}: only for validation, weight 0" for name in sorted(apart)]
    if tokenizer is not None and tokenizer.kind != "none" and tokenizer.eos_id is None:
        notes.append("tokenizer: no token is put after a document (eos: none)")
    step_tokens, row_tokens = batch_bounds(file.batch)
    bounds = StepBounds(-(-step_tokens // row_tokens), row_tokens)
    cost = resolve_cost(file.model, base_dir, bounds, media, faults, notes)
    fields = resolve_fields(file, sources, faults)
    strategy, strategy_call = resolve_strategy(file, base_dir, store_dir, faults)
    encode = resolve_encode(file, has_media=bool(media or faults), faults=faults)
    hook = resolve_hook(file, base_dir, store_dir, faults)
    if batch is not None and not faults:
        batch = replace(batch, encode=encode)
        check_activations(batch, cost, media, faults)
    if faults or tokenizer is None or batch is None or mixture is None:
        return None
    job = ResolvedJob(
        name=name,
        seed=file.seed,
        sources=tuple(_with_token_bytes(source, tokenizer) for source in sources),
        tokenizer=tokenizer,
        batch=batch,
        mixture=mixture,
        cost=cost,
        mixture_hook=hook,
        strategy=strategy,
        strategy_call=strategy_call,
        balance_objective=file.balance_objective,
        steps=file.steps,
        tokens=file.tokens,
        epochs=file.epochs,
        end=file.end,
        fields=fields,
        media=media,
        limits=SampleLimits(**file.limits.model_dump()),
        calibration=_calibration(file),
        slow_sources=_slow_sources(file),
        decoders=_decoders(media),
        loaders=loaders,
        schema_version=file.schema_version,
        stream_version=file.stream,
        notes=tuple(notes),
    )
    _check_slot(job, faults)
    check_shares(job, faults)
    check_delay(job, faults)
    return job


def _calibration(file: JobFile) -> CalibrationRule | None:
    rule = file.calibration
    return None if rule is None else CalibrationRule(rule.every, rule.window, rule.margin)


def _slow_sources(file: JobFile) -> SlowSourcesRule | None:
    rule = file.slow_sources
    return None if rule is None else SlowSourcesRule(rule.after_s, rule.at_most)


def _decoders(media: tuple[MediaRule, ...]) -> str:
    if not media:
        return ""
    from msd_daemon.transforms.media_pipeline import decoder_versions

    return decoder_versions(media)


def _check_widths(sources: tuple[SourceSpec, ...], faults: list[Fault]) -> None:
    """Refuse files of bare ids of which nothing tells how wide they are: any width reads as ids."""
    for source in sources:
        if source.token_file is not None and not source.token_file.id_bytes:
            problem = "there is no tokenizer that tells how wide ids are"
            remedy = "write 2 (uint16, as nanoGPT does) or 4, or give the tokenizer"
            faults.append(Fault(f"sources.{source.name}.token_bytes", MISSING, problem, remedy))


def _with_token_bytes(source: SourceSpec, tokenizer: TokenizerSpec) -> SourceSpec:
    if source.has_masks:
        return source  # its ids carry a mark each
    if source.format != "megatron":
        return replace(source, token_bytes=token_dtype(tokenizer).itemsize)
    try:
        opened = MegatronShard(source.shards[0], ReadMeter())
    except (CorruptRecordError, OSError):
        return source  # a damaged shard is the error policy's, when the draw reaches it
    opened.close()
    return replace(source, token_bytes=opened.dtype.itemsize)


def _name_of(stem: str) -> str:
    """Return a file's stem as a name: other characters become `_`."""
    return re.sub(r"[^A-Za-z0-9_.\-]", "_", stem).lstrip(".-")[:64] or "job"


def _source_names(parsed: ParsedJob, data: dict[str, Any]) -> tuple[str, ...]:
    """Return the names of all sources, broken ones too, sorted.

    The stream must not depend on the order of keys in a file.
    """
    if "sources" in parsed.broken:
        return ()
    return tuple(sorted(data["sources"]))


def _known_sources(parsed: ParsedJob, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: parsed.file.sources[name] for name in names if name in parsed.file.sources}


def _check_slot(job: ResolvedJob, faults: list[Fault]) -> None:
    """Check that one microbatch fits a slot at all; the budget is the daemon's to check."""
    try:
        stage_spec(job, 1, "all")
    except ConfigError as error:
        problem, _, remedy = error.message.rpartition(": ")
        key, value = "microbatch_rows", job.batch.microbatch_rows
        if job.batch.is_varlen:
            key, value = "microbatch_tokens", max(job.batch.row_tokens_values)
            remedy = f"lower batch.{key}"
        faults.append(Fault(f"batch.{key}", value, problem, remedy))


def _job_error(name: str, faults: list[Fault]) -> JobError:
    lines = list(dict.fromkeys(fault.line() for fault in faults))
    shown = lines[:FAULTS_SHOWN_MAX]
    if len(lines) > len(shown):
        shown.append(f"and {len(lines) - len(shown)} more; mend these first")
    count = f"{len(lines)} fault" + ("s" if len(lines) != 1 else "")
    return JobError("\n  ".join([f"job {name!r} has {count}:", *shown]), job=name)
