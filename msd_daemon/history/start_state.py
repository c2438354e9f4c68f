"""A state in mid-stream from another loader's count: what it consumed of each source never comes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path

from federation.model.chunk import ChunkMeta
from federation.model.job import ResolvedJob, SourceSpec
from federation.planning.epochs import epochs_max
from federation.planning.mid_stream import Consumed, MidStream, SourcePoint, state_at
from msd_client.contract.errors import ConfigError
from msd_client.contract.state import (
    DRAWN_SAMPLES,
    DRAWN_TOKENS,
    DROPPED_TOKENS,
    StreamState,
)
from msd_client.contract.step_numbers import STEP_MAX
from msd_daemon.config.units import parse_count
from msd_daemon.given_job import GivenJob, given_job
from msd_daemon.history.record_search import source_number
from msd_daemon.sources.loader import open_source_loader
from msd_daemon.transforms import open_tokenizer
from msd_daemon.transforms.tokenizer import Tokenizer

CHUNK_BYTES = 1 << 20
UNITS = ("samples", "tokens")
Tell = Callable[[str, int, int], None]
"""Is told (source, samples, tokens) of what was gone through."""
GivenCount = str | Mapping[str, object]
"""`12345samples`, `1.5Btokens`, `{"samples": 12345}` or `{"tokens": "1.5B"}`."""


def parse_consumed(source: str, given: GivenCount) -> Consumed:
    """Return how much of a source was consumed.

    Args:
        source: Its name, for the error.
        given: As people write it.

    Raises:
        ConfigError: It is no count of samples or tokens.
    """
    items = list(given.items()) if isinstance(given, Mapping) else []
    if isinstance(given, str):
        text = given.strip()
        items = [(unit, text.removesuffix(unit)) for unit in UNITS if text.endswith(unit)]
    try:
        if len(items) != 1:
            raise ValueError("it has no unit" if not items else "it has several units")
        ((unit, value),) = items
        if unit not in UNITS:
            raise ValueError(f"unit {unit!r}")
        count = parse_count(value.strip() if isinstance(value, str) else value)
        if count < 0:
            raise ValueError(f"{count}")
        return Consumed(count, "samples" if unit == "samples" else "tokens")
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"consumed of {source}: {given!r} is no count ({error}): write 12345samples, 1.5Btokens, "
            'or {"samples": 12345}',
            source=source,
        ) from error


def state_from_counts(
    job: GivenJob,
    consumed: Mapping[str, GivenCount],
    *,
    step: int = 0,
    base_dir: str | os.PathLike[str] | None = None,
) -> dict[str, bytes]:
    """Return a state in mid-stream, to give to `load_state_dict`.

    Walks each source in msd's own order from its beginning to the count, over the ends of passes,
    and sets the cursor there; samples are what msd trains on: bad, filtered, empty and over-long
    ones (`long: skip`) are passed over and counted as in a run. With `shuffle: false` the order is
    that of the files, as another sequential loader has it. Nothing is carried, and the mixture
    begins anew.

    Args:
        job: Path of a job file, a job as a dict, or a resolved job.
        consumed: By source `12345samples` or `1.5Btokens`; sources that lack stand at their start.
        step: The step that follows.
        base_dir: Folder that relative paths start from; None takes that of the job file, or the
            current one.

    Raises:
        ConfigError: The job is refused, or a count is none, or of no source of the job.
        SourceExhaustedError: A source's passes hold less than was consumed of it.
        DataError: What a draw would meet on the way: a fault under `fail`, a spent error budget.
    """
    resolved = given_job(job, base_dir, "state_from_counts")
    return {"msd": start_state(resolved, consumed, step).encode()}


def start_state(
    job: ResolvedJob,
    consumed: Mapping[str, GivenCount],
    step: int = 0,
    index_dir: Path | None = None,
    tell: Tell = lambda *_: None,
) -> StreamState:
    """Return the state of `state_from_counts`.

    Args:
        job: The resolved job.
        consumed: As there.
        step: The step that follows.
        index_dir: Where indexes are kept, None for none.
        tell: Told of what was gone through.
    """
    if not 0 <= step <= STEP_MAX:
        raise ConfigError(f"step is {step}: write the number of a step, from 0 to {STEP_MAX}")
    counts = {
        source_number(job, name): parse_consumed(name, given) for name, given in consumed.items()
    }
    tokenizer = open_tokenizer(job.tokenizer)
    points = {
        source: _point(job, source, count, step, tokenizer, index_dir, tell)
        for source, count in counts.items()
        if count.count
    }
    return state_at(job, step, points)


def summary(state: StreamState) -> list[dict[str, int | str]]:
    """Return for each source its pass, and the samples, tokens and drops before the cursor."""
    return [
        {
            "source": name,
            "epoch": int(state.epoch[source]),
            "samples": int(state.progress[DRAWN_SAMPLES, source]),
            "tokens": int(state.progress[DRAWN_TOKENS, source]),
            "dropped_records": int(state.dropped[:DROPPED_TOKENS, source].sum()),
        }
        for source, name in enumerate(state.source_names)
    ]


def _point(
    job: ResolvedJob,
    source: int,
    consumed: Consumed,
    step: int,
    tokenizer: Tokenizer,
    index_dir: Path | None,
    tell: Tell,
) -> SourcePoint:
    spec = job.sources[source]
    loader = open_source_loader(job, source, tokenizer, index_dir=index_dir, is_lengths_only=True)

    def read() -> ChunkMeta | None:
        draft = loader.next_chunk(CHUNK_BYTES)
        return None if draft is None else draft.meta

    with closing(loader):
        walk = MidStream(job, source, step)
        for whole_pass in _go(walk, consumed, read, spec, tell):
            limit = epochs_max(job, source)
            passes = _passes_to_skip(spec, consumed, whole_pass)
            if limit is not None and passes >= limit:
                passes = 0  # too few: what all passes hold is to be told
            if passes:
                walk = MidStream(job, source, step, whole_pass.behind(passes))
                loader.seek(*walk.cursor)
                for _ in _go(walk, consumed, read, spec, tell):
                    pass
                break
        return walk.point


def _go(
    walk: MidStream,
    consumed: Consumed,
    read: Callable[[], ChunkMeta | None],
    spec: SourceSpec,
    tell: Tell,
) -> Iterator[SourcePoint]:
    for told in walk.go(consumed, read):
        if told is not None:
            yield told
            continue
        progress = walk.point.progress
        tell(spec.name, int(progress[DRAWN_SAMPLES]), int(progress[DRAWN_TOKENS]))


def _passes_to_skip(spec: SourceSpec, consumed: Consumed, whole: SourcePoint) -> int:
    """Return behind how many whole passes the count lies, where all are alike; the rest is above 0."""
    if spec.recipe is not None or spec.growth:
        return 0  # what is drawn at random, or appended, makes passes differ
    column = DRAWN_SAMPLES if consumed.unit == "samples" else DRAWN_TOKENS
    per_pass = int(whole.progress[column])
    return (consumed.count - 1) // per_pass if per_pass else 0
