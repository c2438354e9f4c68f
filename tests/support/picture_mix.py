"""Five sources of images and text without payload: what a planner is told of them."""

from __future__ import annotations

import random

from federation.model.job import BatchRule, CostSpec, ResolvedJob
from msd_client.contract.position import unpack_block_key
from tests.support.marked import TEXT, Atom, image_rule, length_of, marked_spec, marks_of_record
from tests.support.metadata import SourceCorpus, make_job

ROW_TOKENS = 4096
ROW_UNITS = 16384
COST = CostSpec("transformer", 24, 1)
BLOCK_RECORDS = 64
MERGE = 4
"""Patches of a placeholder token."""


def _text(rng: random.Random, least: int, most: int) -> Atom:
    return Atom(TEXT, rng.randint(least, most))


def _picture(rng: random.Random, middle: int, spread: float, least: int, most: int) -> Atom:
    units = int(min(most, max(least, rng.lognormvariate(0, spread) * middle))) // MERGE * MERGE
    return Atom(0, units // MERGE, units, is_trained=False)


def _record(name: str, rng: random.Random) -> list[Atom]:
    match name:
        case "icons":
            return [Atom(0, 64, 256, is_trained=False), _text(rng, 10, 40)]
        case "pages":
            parts = [
                [_text(rng, 60, 400), _picture(rng, 400, 0.6, 64, 1600)]
                for _ in range(rng.randint(2, 5))
            ]
            return [atom for part in parts for atom in part]
        case "photos":
            return [_picture(rng, 700, 0.5, 256, 2304), _text(rng, 20, 120)]
        case "screens":
            return [_picture(rng, 2800, 0.3, 1600, 5000), _text(rng, 200, 800)]
    return [Atom(TEXT, int(min(4000, max(50, rng.lognormvariate(6.3, 1.0)))))]


NAMES = ("icons", "pages", "photos", "screens", "web")


def picture_mix(
    seed: int, batch: BatchRule, blocks: int = 24, weights: list[float] | None = None
) -> tuple[ResolvedJob, list[SourceCorpus]]:
    """Return a job over the sources, and what their loaders say; `web` has no picture."""
    rng = random.Random(seed)
    specs, corpora = [], []
    for name in NAMES:
        spec = marked_spec(name)
        records = [[_record(name, rng) for _ in range(BLOCK_RECORDS)] for _ in range(blocks)]
        lengths = [[length_of([record]) for record in block] for block in records]
        corpus = SourceCorpus(spec, [[(own, [0] * BLOCK_RECORDS) for own in lengths]])
        for number, block in enumerate(records):
            corpus.marks[0, number] = [marks_of_record([record]) for record in block]
        specs.append(spec)
        corpora.append(corpus)
    job = make_job(
        specs,
        batch,
        weights or [1, 3, 2, 2, 12],
        media=(image_rule(ROW_UNITS),),
        cost=COST,
        balance_objective="microbatch",
    )
    return job, corpora


def units_of(corpora: list[SourceCorpus], source: int, block_key: int, index: int) -> int:
    """Return the units of a whole record."""
    place = unpack_block_key(block_key)
    lines = corpora[source].marks[place.window, place.block][index]
    return sum(units for kind, _, _, units in lines if kind >= 0)
