"""The job of a validation stream: what a `loaders` entry makes of the training job (E13). Pure."""

from __future__ import annotations

from dataclasses import replace

from federation.model.job import (
    BatchRule,
    LoaderRule,
    MixturePoint,
    MixtureSchedule,
    ResolvedJob,
    varlen_rows,
)
from msd_client.contract.errors import NotFoundError


def validation_job(job: ResolvedJob, name: str) -> ResolvedJob:
    """Return the job whose one pass is the validation stream `name`.

    Every record of its sources' part comes once, in the order of the files; the last step is padded.
    Nothing depends on the mesh, or on how far training came.

    Raises:
        NotFoundError: The job has no such loader.
    """
    rule = _rule(job, name)
    sources = tuple(
        replace(
            source,
            part=rule.part,
            shuffle=replace(source.shuffle, is_shuffled=False),
            at_exhaustion="drop",
            max_epochs=None,
            is_critical=False,  # a pass is short, and is read again where it breaks off
        )
        for source in job.sources
        if source.name in rule.sources
    )
    weights = {source.name: 1.0 for source in sources}
    return replace(
        job,
        name=f"{job.name}.{name}",
        sources=sources,
        mixture=MixtureSchedule("tokens", (MixturePoint(0, weights),)),
        batch=_batch(job.batch, rule),
        steps=rule.steps,
        tokens=None,
        epochs=1,
        strategy="balanced" if job.strategy_call is not None else job.strategy,
        strategy_call=None,
        mixture_hook=None,
        slow_sources=None,
        end="pad",
        loaders=(),
        calibration=None,
    )


def _batch(batch: BatchRule, rule: LoaderRule) -> BatchRule:
    step_tokens = rule.step_tokens or batch.step_tokens
    rows = varlen_rows(step_tokens, batch.row_tokens) if batch.is_varlen else rule.rows
    return replace(
        batch,
        rows=rows or batch.rows,
        step_tokens=step_tokens,
        rows_ramp=(),
        row_tokens_ramp=(),
        step_tokens_ramp=(),
    )


def _rule(job: ResolvedJob, name: str) -> LoaderRule:
    for rule in job.loaders:
        if rule.name == name:
            return rule
    names = ", ".join(rule.name for rule in job.loaders) or "none"
    raise NotFoundError(f"job {job.name!r} has no loader {name!r}; its loaders: {names}")
