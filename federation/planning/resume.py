"""A state goes on in a job that was changed since: what changed, what class it is of, what becomes of it.

Pure (EXPERIENCE.md E15). `neutral` changes no sample (paths, shapes of steps, budgets); `journalled`
takes effect with the next step (weights; sources that came, went or were renamed by `was`); `refused`
would change what the state's positions mean (seed, tokenizer, packing, a source's files) and needs
that its key is accepted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from federation.model.job import ResolvedJob
from federation.model.mixture import (
    MixtureTimeline,
    group_paths,
    remaining_shares,
    untrained_sources,
)
from federation.planning.growth import (
    SOURCE_PART,
    digest_parts,
    grown_job,
    growth_columns,
    part_of,
)
from federation.planning.sampling import fragment_amount_max, placed_tokens
from federation.planning.share_tree import ShareTree
from msd_client.contract.errors import StateMismatchError
from msd_client.contract.position import BLOCK_BITS, EPOCH_MAX, WINDOW_BITS
from msd_client.contract.state import (
    CURSOR_BLOCK_KEY,
    CURSOR_INDEX,
    CURSOR_OFFSET,
    IS_EXHAUSTED,
    LANES_ENDED,
    RECORD_ORDER,
    StreamState,
)

Int64Array = npt.NDArray[np.int64]
ChangeClass = Literal["neutral", "journalled", "refused"]

_EPOCH_SHIFT = WINDOW_BITS + BLOCK_BITS
_NEUTRAL = (
    "batch", "cost", "limits", "calibration", "slow_sources", "strategy", "balance_objective", "steps", "tokens", "end",
    "fields", "decoders", "name",
)  # fmt: skip
"""Where nothing of them stands in the sample digest, they move no sample."""
_SHOWN_CHARACTERS = 80


@dataclass(frozen=True)
class JobChange:
    """One difference between the job of a state and the job that is to go on with it."""

    key: str
    """`seed`, `mixture`, `sources.web`: what an accepted key is called."""
    change_class: ChangeClass
    text: str
    """What is different and what becomes of it, one line for people."""

    def __str__(self) -> str:
        return f"{self.change_class}: {self.key}: {self.text}"


@dataclass(frozen=True)
class Adapted:
    """A state as one of another job."""

    state: StreamState
    changes: tuple[JobChange, ...]
    job: ResolvedJob
    """The job that goes on: where shards were appended, its sources say from which pass on."""


def adapt_state(
    state: StreamState,
    job: ResolvedJob,
    *,
    accept: Collection[str] = (),
    old_job: ResolvedJob | None = None,
) -> Adapted:
    """Return a state as one of `job`, with what is different between the two jobs.

    Args:
        state: Of the same stream version.
        job: The job that goes on.
        accept: Keys of refused changes that are meant.
        old_job: The state's own job, where it is known: differences then show both values.

    Raises:
        StateMismatchError: The stream version differs, or a change is refused: all of them are
            named, with the keys that accept them.
    """
    state.check_version(job.stream_version)
    if old_job is not None and old_job.sample_digest() != state.sample_digest:
        old_job = None
    was, now = digest_parts(state.sample_digest), digest_parts(job.sample_digest())
    new_of = _renamed(state, job)
    job, appended = grown_job(state, job, new_of, old_job)
    changes = _neutral_changes(old_job, job)
    for key in sorted(was.keys() | now.keys()):
        if not key.startswith(SOURCE_PART) and was.get(key) != now.get(key):
            changes.append(_change_of_part(key, old_job, job))
    kept = {name for name in state.source_names if name in new_of}
    touched = {
        new_of[name]
        for name in sorted(kept)
        if was.get(SOURCE_PART + name) != part_of(job.sources[job.source_index(new_of[name])], name)
    }
    for name, (epoch, count) in appended.items():
        touched.discard(name)
        text = f"{count} shards appended: they take part from its pass {epoch} on"
        changes.append(JobChange(SOURCE_PART + name, "journalled", text))
    changes += _source_changes(state, job, new_of, touched, old_job)
    refused = [change for change in changes if change.change_class == "refused"]
    missing = [change for change in refused if change.key not in accept]
    if missing:
        lines = "\n  ".join(str(change) for change in changes)
        keys = ", ".join(repr(change.key) for change in missing)
        raise StateMismatchError(
            f"the state belongs to a job that was changed since:\n  {lines}\nload it into the job "
            f"that wrote it, start a new stream, or accept the refused changes: "
            f"msd_client.connect(..., accept=[{keys}]) or MSD_ACCEPT="
            + ",".join(change.key for change in missing),
            differing=", ".join(change.key for change in missing),
        )
    is_reordered = any(change.key == "seed" for change in refused)
    is_recut = any(change.key in ("tokenizer", "media") for change in refused)
    restarted = set(range(len(job.sources))) if is_reordered else set()
    restarted |= {job.source_index(name) for name in touched}
    made = _remapped(state, job, new_of, old_job)
    if is_recut:
        made = _behind_begun_records(made)
    made = _at_next_pass(made, restarted)
    if any(change.key == "epochs" for change in refused):
        made = _unexhausted(made)
    made = replace(
        made,
        job_digest=job.digest(),
        sample_digest=job.sample_digest(),
        growth=growth_columns(job),
    )
    return Adapted(made, tuple(changes), job)


# -- what changed ----------------------------------------------------------------------------------


def _renamed(state: StreamState, job: ResolvedJob) -> dict[str, str]:
    """Return the new name of each old source that is still there."""
    old_names, parts = set(state.source_names), digest_parts(state.sample_digest)
    new_of = {source.name: source.name for source in job.sources if source.name in old_names}
    for source in job.sources:
        if source.name in old_names or not source.was:
            continue
        if source.was in old_names - new_of.keys():
            new_of[source.was] = source.name
            continue
        for name in sorted(old_names - new_of.keys()):  # it was renamed more than once
            if parts.get(SOURCE_PART + name) == part_of(source, name):
                new_of[name] = source.name
                break
    return new_of


def _change_of_part(key: str, old_job: ResolvedJob | None, job: ResolvedJob) -> JobChange:
    if key == "mixture":
        return JobChange(key, "journalled", "other weights hold from the next step on")
    fate = {
        "seed": "each source goes on with its next pass, in the new order; carried fragments are left",
        "tokenizer": "records that were begun, and carried fragments, are left",
        "media": "records that were begun, and carried fragments, are left",
        "batch": "packing, long or segment_multiple: carried fragments go into rows of the new kind",
        "epochs": "sources that had ended go on where passes are left",
    }.get(key, "")
    values = ""
    if old_job is not None:
        old, new = _value(old_job, key), _value(job, key)
        values = f"{old} -> {new}; " if old != new else ""
    return JobChange(key, "refused", f"{values}where accepted, {fate}")


def _value(job: ResolvedJob, key: str) -> str:
    if key == "batch":
        batch = job.batch
        return f"{batch.packing}, long {batch.long}, segment_multiple {batch.segment_multiple}"
    if key == "tokenizer":
        known = job.tokenizer
        return f"{known.kind} {known.fingerprint[:12]} of {known.vocabulary_count} ids"
    if key == "media":
        return ", ".join(rule.modality for rule in job.media) or "none"
    return str(getattr(job, key))[:_SHOWN_CHARACTERS]


def _neutral_changes(old_job: ResolvedJob | None, job: ResolvedJob) -> list[JobChange]:
    """Return what is different and moves no sample; known only where the old job is."""
    if old_job is None:
        return []
    changes = []
    for key in _NEUTRAL:
        old, new = getattr(old_job, key), getattr(job, key)
        if key == "batch":
            same = {k: getattr(new, k) for k in ("packing", "long", "segment_multiple")}
            old = replace(old, **same)
        if old != new:
            shown = f"{old} -> {new}" if len(f"{old}{new}") < _SHOWN_CHARACTERS else "other values"
            changes.append(JobChange(key, "neutral", shown))
    places = {s.name: [shard.path for shard in s.shards] for s in old_job.sources}
    for source in job.sources:
        paths = places.get(source.name)
        if paths is not None and paths != [shard.path for shard in source.shards]:
            text = f"{len(source.shards)} shards moved"
            if [s.fingerprint for s in source.shards] == _prints(old_job, source.name):
                changes.append(JobChange(f"{SOURCE_PART}{source.name}", "neutral", text))
    return changes


def _prints(job: ResolvedJob, name: str) -> list[str]:
    return [shard.fingerprint for shard in job.sources[job.source_index(name)].shards]


def _source_changes(
    state: StreamState,
    job: ResolvedJob,
    new_of: Mapping[str, str],
    touched: Collection[str],
    old_job: ResolvedJob | None,
) -> list[JobChange]:
    changes = []
    old_of = {new: old for old, new in new_of.items()}
    for place, name in enumerate(state.source_names):
        if name in new_of:
            continue
        carried = state.carried[:, state.carried[0] == place]
        left = f", {int(carried[4].sum())} carried tokens are left" if carried.shape[1] else ""
        hint = _same_files(old_job, name, job, old_of)
        changes.append(JobChange(SOURCE_PART + name, "journalled", f"removed{left}{hint}"))
    for source in job.sources:
        key = SOURCE_PART + source.name
        if source.name not in old_of:
            changes.append(JobChange(key, "journalled", "added, from its beginning"))
        elif source.name in touched:
            text = "its files, format, order or how samples are made of it; where accepted, it "
            changes.append(JobChange(key, "refused", text + "goes on with its next pass"))
        elif old_of[source.name] != source.name:
            text = f"renamed, it was {old_of[source.name]}: it goes on where that stood"
            changes.append(JobChange(key, "journalled", text))
    return changes


def _same_files(
    old_job: ResolvedJob | None, name: str, job: ResolvedJob, old_of: Mapping[str, str]
) -> str:
    """Return a hint where an added source has the files of a removed one."""
    if old_job is None:
        return ""
    prints = _prints(old_job, name)
    for source in job.sources:
        if source.name not in old_of and [s.fingerprint for s in source.shards] == prints:
            return f"; {source.name} has the same files: write `was: {name}` there to go on in them"
    return ""


# -- what becomes of the state ---------------------------------------------------------------------


def _remapped(
    state: StreamState, job: ResolvedJob, new_of: Mapping[str, str], old_job: ResolvedJob | None
) -> StreamState:
    """Return the state with the columns of the new job's sources, weights of its mixture."""
    names = tuple(source.name for source in job.sources)
    mixture_part = digest_parts(state.sample_digest).get("mixture")
    is_mixed_anew = mixture_part != digest_parts(job.sample_digest()).get("mixture")
    if names == state.source_names and not is_mixed_anew:
        return state
    place_of = {name: place for place, name in enumerate(names)}
    new_place = [
        place_of[new_of[name]] if name in new_of else -1 for name in state.source_names
    ]  # by old place
    kept = [old for old, new in enumerate(new_place) if new >= 0]
    targets = [new_place[old] for old in kept]

    def columns(old: Int64Array) -> Int64Array:
        made = np.zeros((*old.shape[:-1], len(names)), np.int64)
        made[..., targets] = old[..., kept]
        return made

    def rows(old: Int64Array) -> Int64Array:
        places = np.array(new_place, np.int64)
        stays = places[old[0]] >= 0 if old.shape[1] else np.zeros(0, bool)
        made = old[:, stays].copy()
        if made.shape[1]:
            made[0] = places[made[0]]
        return made

    pending = columns(state.pending_shares)
    is_any = pending.any(axis=1)
    made = replace(
        state,
        source_names=names,
        progress=columns(state.progress),
        dropped=columns(state.dropped),
        shares=columns(state.shares),
        pending_steps=state.pending_steps[is_any],
        pending_shares=pending[is_any],
        carried=rows(state.carried),
        faults=rows(state.faults),
    )
    if not state.step and not state.shares.any():
        return made  # nothing was drawn: the first step takes the schedule's
    ahead = _residuals(state, old_job)
    timeline = MixtureTimeline(job.mixture, names, untrained_sources(job))
    index = timeline.passed(0, state.plan_step, placed_tokens(state))
    shares = timeline.shares(index)
    exhausted = made.progress[IS_EXHAUSTED].astype(bool)
    active = remaining_shares(shares, exhausted, group_paths(job.mixture, names))
    times = np.zeros(0, np.int64)
    if active.any():
        tree = ShareTree(active, fragment_amount_max(job))
        residuals = [0] * len(names)
        for old, new in zip(kept, targets, strict=True):
            residuals[new] = ahead[old] if active[new] else 0
        times = tree.times_of(residuals)
    return replace(made, shares=shares, schedule_index=index, accumulators=times)


def _residuals(state: StreamState, old_job: ResolvedJob | None) -> list[int]:
    """Return how far each old source is ahead of its share; 0 where that can't be told."""
    groups = None
    if old_job is not None:
        groups = group_paths(old_job.mixture, state.source_names)
    active = remaining_shares(state.shares, state.progress[IS_EXHAUSTED].astype(bool), groups)
    nothing = [0] * len(state.source_names)
    if not active.any():
        return nothing
    tree = ShareTree(active, 1)
    if tree.branch_count != len(state.accumulators):
        return nothing
    return tree.residuals(state.accumulators)


def _behind_begun_records(state: StreamState) -> StreamState:
    """Return the state behind the records at its cursors, nothing carried: lengths are others now."""
    progress = state.progress.copy()
    is_begun = progress[CURSOR_OFFSET] > 0
    progress[CURSOR_INDEX, is_begun] += 1
    progress[RECORD_ORDER, is_begun] += 1
    progress[CURSOR_OFFSET] = 0
    return replace(state, progress=progress, carried=state.carried[:, :0])


def _at_next_pass(state: StreamState, places: Collection[int]) -> StreamState:
    """Return the state with some sources at the beginning of their next pass.

    Raises:
        StateMismatchError: One is in its last possible pass.
    """
    if not places:
        return state
    progress = state.progress.copy()
    chosen = np.array(sorted(places), np.int64)
    has_begun = progress[CURSOR_OFFSET, chosen] > 0
    has_begun |= progress[CURSOR_BLOCK_KEY, chosen] > 0
    epoch = (progress[CURSOR_BLOCK_KEY, chosen] >> _EPOCH_SHIFT) + has_begun
    if (epoch > EPOCH_MAX).any():
        raise StateMismatchError(f"a source is in its pass {EPOCH_MAX}, the last that is possible")
    progress[CURSOR_BLOCK_KEY, chosen] = epoch << _EPOCH_SHIFT
    progress[CURSOR_INDEX, chosen] = 0
    progress[CURSOR_OFFSET, chosen] = 0
    progress[LANES_ENDED, chosen] = 0
    progress[RECORD_ORDER, chosen] += has_begun
    stays = ~np.isin(state.carried[0], chosen)
    return replace(state, progress=progress, carried=state.carried[:, stays])


def _unexhausted(state: StreamState) -> StreamState:
    progress = state.progress.copy()
    progress[IS_EXHAUSTED] = 0
    return replace(state, progress=progress, ending="", accumulators=np.zeros(0, np.int64))
