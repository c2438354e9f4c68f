"""Resolves `loaders`: the validation streams of a job and what they read."""

from __future__ import annotations

from dataclasses import replace

from federation.model.job import LoaderRule, Part, SourceSpec
from msd_daemon.config.batch_file import BatchFile, ramp_start
from msd_daemon.config.faults import Fault
from msd_daemon.config.job_file import JobFile, LoaderFile
from msd_daemon.config.mixture_groups import weighted_names

TRAIN = "train"
RESERVED_NAMES = frozenset({"close", "rank", "set_mixture", "loaders"})
"""Attributes of a joined job (`msd_client.Data`)."""


def resolve_loaders(
    file: JobFile, sources: tuple[SourceSpec, ...], names: tuple[str, ...], faults: list[Fault]
) -> tuple[LoaderRule, ...]:
    """Return the validation streams in the order of their names.

    Args:
        file: The job.
        sources: Its sources, as far as they could be resolved.
        names: The names of all, broken ones too.
        faults: Receives what is wrong.
    """
    held = {source.name: source.hold_out for source in sources}
    weighted = _weighted(file)
    rows, step_tokens = _first(file.batch.rows), _first(file.batch.step_tokens)
    rules = []
    for name in sorted(file.loaders):
        loader = file.loaders[name]
        if name == TRAIN:
            if loader.model_fields_set:
                faults.append(
                    Fault("loaders.train", "keys", "takes none", "what it trains on is the job's")
                )
            continue
        if name in RESERVED_NAMES or not name.isidentifier():
            faults.append(
                Fault(f"loaders.{name}", name, "can't be an attribute", "choose another name")
            )
        _check_size(name, loader, file.batch, faults)
        rows_step = file.batch.microbatch_rows
        if loader.rows is not None and loader.rows % rows_step:
            faults.append(
                Fault(
                    f"loaders.{name}.rows",
                    loader.rows,
                    f"is no multiple of batch.microbatch_rows {rows_step}",
                    "make it one",
                )
            )
        rule = _resolve(name, loader, names, held, weighted, faults)
        rules.append(
            replace(
                rule,
                rows=loader.rows or rows,
                step_tokens=loader.step_tokens or step_tokens,
            )
        )
    return tuple(rules)


def _first(values: dict[str, int]) -> int:
    """Return the first value of a schedule; 0 where the packing has none."""
    return next((value for key, value in values.items() if ramp_start(key).start == 0), 0)


def _check_size(name: str, loader: LoaderFile, batch: BatchFile, faults: list[Fault]) -> None:
    """Refuse a step in rows where steps are tokens, and the other way round."""
    key, right = ("rows", "step_tokens") if batch.is_varlen else ("step_tokens", "rows")
    value = getattr(loader, key)
    if value is not None:
        problem = f"packing {batch.packing} has no such size"
        faults.append(Fault(f"loaders.{name}.{key}", value, problem, f"write {right}"))


def _weighted(file: JobFile) -> frozenset[str]:
    """Return the sources that the mixture names with a weight above 0 at some point."""
    points = {} if file.mixture is None else file.mixture.points
    return frozenset(name for named in points.values() for name in weighted_names(named))


def validation_only(
    loaders: tuple[LoaderRule, ...], sources: tuple[SourceSpec, ...]
) -> frozenset[str]:
    """Return the sources that validation reads whole: they are no part of the default mixture."""
    read = {name for loader in loaders if loader.part == "all" for name in loader.sources}
    return frozenset(source.name for source in sources if source.name in read)


def _resolve(
    name: str,
    loader: LoaderFile,
    names: tuple[str, ...],
    held: dict[str, float],
    weighted: frozenset[str],
    faults: list[Fault],
) -> LoaderRule:
    read = tuple(loader.sources or ())
    unknown = [source for source in read if source not in names]
    if unknown or not read:
        faults.append(
            Fault(
                f"loaders.{name}.from",
                ", ".join(unknown) or "nothing",
                "no source has this name" if unknown else "names no source",
                f"write one of {', '.join(names)}",
            )
        )
    if loader.part is None and not any(held.get(source) for source in read):
        trained = [source for source in read if source in weighted and held.get(source) == 0]
        if trained:
            verb, them = ("is", "it") if len(trained) == 1 else ("are", "them")
            holds = "holds" if len(trained) == 1 else "hold"
            faults.append(
                Fault(
                    f"loaders.{name}.from",
                    ", ".join(trained),
                    f"{', '.join(trained)} {verb} trained on and {holds} nothing out",
                    f"give {them} hold_out, or write part: all",
                )
            )
    part: Part = loader.part or ("held_out" if any(held.get(s) for s in read) else "all")
    if part == "held_out":
        whole = [source for source in read if held.get(source) == 0]
        if whole:
            faults.append(
                Fault(
                    f"loaders.{name}.part",
                    part,
                    f"{', '.join(whole)} holds nothing out",
                    "give it hold_out, or write part: all",
                )
            )
    return LoaderRule(name, tuple(sorted(set(read))), part, steps=loader.steps)
