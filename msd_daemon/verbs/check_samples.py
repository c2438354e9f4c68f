"""What `msdctl check` says of samples: recipes, media, what becomes of a few records, user code."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from federation.model.chunk import RecordStatus
from federation.model.job import ResolvedJob
from federation.model.media import MediaRule
from federation.model.recipe import SampleRecipe, UserCall
from msd_client.contract.errors import JobError
from msd_client.contract.plain import encode_plain
from msd_client.msdctl.output import format_size
from msd_daemon.sources.trial import Trial, try_source
from msd_daemon.transforms import open_tokenizer
from msd_daemon.transforms.user_check import CallFinding, compare_calls

Comparisons = dict[UserCall, list[CallFinding]]


def try_sources(job: ResolvedJob) -> list[Trial]:
    """Read a few records of every source.

    Raises:
        ConfigError: A recipe's list, template or code is not what the job was resolved with.
        StoreError: A store does not answer.
    """
    tokenizer = open_tokenizer(job.tokenizer)
    return [try_source(job, index, tokenizer) for index in range(len(job.sources))]


def compare_user_code(trials: Iterable[Trial]) -> Comparisons:
    """Run each of the user's functions twice on what it was given.

    A source of which a record was quarantined is left out: each would take its limit again.

    Raises:
        ConfigError: A function cannot be called at all.
    """
    given: dict[UserCall, list[Any]] = {}
    for trial in trials:
        if not trial.statuses[RecordStatus.QUARANTINED]:
            for call, values in trial.given.items():
                given.setdefault(call, []).extend(values)
    return {call: compare_calls(call, values) for call, values in given.items()}


def refuse_faults(job: ResolvedJob, trials: Iterable[Trial], compared: Comparisons) -> None:
    """Refuse a job that a source gives nothing for, or whose code is not repeatable.

    Raises:
        JobError: One line per fault.
    """
    lines = [
        f"sources.{trial.source}: none of {trial.records} records became a sample; "
        f"{trial.faults[0] if trial.faults else 'mend the source'}"
        for trial in trials
        if trial.is_broken
    ]
    lines += [
        f"{call.call}: {finding.line}"
        for call, findings in compared.items()
        for finding in findings
        if finding.is_difference
    ]
    if lines:
        count = f"{len(lines)} fault" + ("s" if len(lines) != 1 else "")
        raise JobError("\n  ".join([f"job {job.name!r} has {count}:", *lines]), job=job.name)


def trial_lines(trials: Iterable[Trial], compared: Comparisons) -> Iterator[str]:
    """Yield for people what became of the records, and of the user's code."""
    for trial in trials:
        parts = [f"{trial.samples} of {trial.records} records are samples, {trial.tokens} tokens"]
        parts += [f"{count} {name}" for name, count in _other_statuses(trial).items()]
        yield f"read      {trial.source}: {', '.join(parts)}"
        yield from (f"          {fault}" for fault in trial.faults)
    for call, findings in compared.items():
        said = "alike twice" if not findings else f"alike twice, fails on {len(findings)} records"
        yield f"code      {call.call}: {said}"
        yield from (f"          {finding.line}" for finding in findings)


def trial_maps(trials: Iterable[Trial], compared: Comparisons) -> dict[str, Any]:
    """Return the same for JSON."""
    return {
        "read": [
            {
                "source": trial.source,
                "records": trial.records,
                "samples": trial.samples,
                "tokens": trial.tokens,
                "others": _other_statuses(trial),
                "faults": trial.faults,
            }
            for trial in trials
        ],
        "code": [
            {"call": call.call, "digest": call.digest, "lines": [f.line for f in findings]}
            for call, findings in compared.items()
        ],
    }


def _other_statuses(trial: Trial) -> dict[str, int]:
    return {
        status.name.lower(): count
        for status, count in sorted(trial.statuses.items())
        if status != RecordStatus.OK
    }


def sample_lines(job: ResolvedJob) -> Iterator[str]:
    """Yield the recipes and the media of a job for people."""
    for source in job.sources:
        if source.recipe is not None:
            yield f"recipe    {source.name}: {', '.join(_steps(source.recipe))}"
        if source.group is not None:
            what = f"neighbours of one {source.group_field}" if source.group_field else "a record"
            yield f"group     {source.name}: samples of {what} stay in one row"
    for rule in job.media:
        yield f"media     {rule.modality}: {_media_text(rule, job.batch.microbatch_rows)}"


def media_maps(job: ResolvedJob) -> list[dict[str, Any]]:
    """Return the media rules for JSON, with the bytes that a microbatch has room for."""
    return [
        encode_plain(rule) | {"microbatch_bytes": rule.microbatch_bytes(job.batch.microbatch_rows)}
        for rule in job.media
    ]


def _media_text(rule: MediaRule, rows: int) -> str:
    units = "frames" if rule.modality == "audio" else "patches"
    size = format_size(rule.microbatch_bytes(rows))
    parts = [f"{rule.row_units_max} {units} a row, {size} a microbatch"]
    pictures = rule.image or rule.video
    if pictures is not None:
        patches = pictures.patches
        parts.append(f"{patches.layout} {patches.patch} px, merge {patches.merge}")
        parts.append(f"resize {pictures.resize.policy}")
    parts.append(f"{rule.unit_values} {rule.unit_dtype} each")
    if rule.step is not None:
        parts.append(f"step {rule.step.call}")
    return ", ".join(parts)


def _steps(recipe: SampleRecipe) -> Iterator[str]:
    """Yield the steps of a recipe in their order."""
    if recipe.where:
        yield f"where {recipe.where}"
    if recipe.exclude is not None:
        yield f"exclude by {recipe.exclude.by}"
    if recipe.transform is not None:
        yield f"transform {recipe.transform.call}"
    if recipe.template:
        yield f"template {recipe.template!r}"
    if recipe.chat is not None:
        yield f"chat of {recipe.chat.messages_field}, trained on {recipe.chat.train_on}"
    if recipe.interleave is not None:
        rule = recipe.interleave
        yield f"{rule.layout} of {rule.texts_field} and {rule.images_field}"
    for modality in ("image", "video", "audio"):
        name = getattr(recipe, f"{modality}_field")
        if name:
            yield f"{modality} of {name}"
    if recipe.media_root:
        yield f"media below {recipe.media_root}"
    if recipe.fim is not None:
        yield f"fill-in-the-middle at {recipe.fim.rate:g}"
