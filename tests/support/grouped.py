"""Sources whose samples come in groups, and what planning has to make of them, in plain loops."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from federation.model.chunk import MARK_GROUP, RecordStatus
from federation.model.job import BatchRule, ErrorPolicy, GroupRule, ResolvedJob, SourceSpec
from federation.model.plan import StepPlan
from msd_client.contract.position import BLOCK_MAX, WINDOW_MAX, pack_block_key
from tests.support.marked import (
    TEXT,
    Atom,
    MarkedCorpus,
    Record,
    length_of,
    marked_spec,
    marks_of_record,
)
from tests.support.metadata import SourceCorpus, random_corpus

BY_FIELD, BY_RECORD = GroupRule("field", "pair"), GroupRule("record")
POLICY = ErrorPolicy("skip", 1.0)
Sample = tuple[int, int, int]
"""(index of its record, first token, tokens)."""


class Group(NamedTuple):
    """Samples that stay together."""

    samples: tuple[Sample, ...]
    units: tuple[int, ...]
    """Of each media rule, together."""

    def fits(self, rule: BatchRule, units_max: tuple[int, ...]) -> bool:
        """Tell whether a row of such a batch holds it."""
        multiple = rule.segment_multiple
        places = sum(-(-tokens // multiple) * multiple for _, _, tokens in self.samples)
        return (
            places <= rule.row_tokens
            and len(self.samples) <= rule.row_segments_max
            and all(held <= most for held, most in zip(self.units, units_max, strict=True))
        )


@dataclass
class GroupedCorpus:
    """A corpus and the groups of each of its blocks, by (part, block), in order."""

    corpus: SourceCorpus
    groups: dict[tuple[int, int], list[Group]]

    def of(self, key: int, index: int) -> Group:
        """Return the group that a record's first sample is in."""
        for group in self._block(key):
            if any(index == sample[0] for sample in group.samples):
                return group
        raise AssertionError(f"record {index} of block {key} is in no group")

    def _block(self, key: int) -> list[Group]:
        known = {block: (part, at) for block, part, at in self.corpus.keys(0, 0, 1)}
        return self.groups[known[key & pack_block_key(0, WINDOW_MAX, BLOCK_MAX)]]


def grouped_spec(name: str, rule: GroupRule, shards: int = 1, **options: Any) -> SourceSpec:
    """Return a source of groups; of several samples a record if it groups by record."""
    is_many = options.pop("is_many", rule.by == "record")
    spec = marked_spec(name, shards, is_many=is_many, on_error=POLICY, **options)
    return replace(spec, group=rule)


def grouped_corpus(
    spec: SourceSpec,
    rng: random.Random,
    row_tokens: int,
    units_max: tuple[int, ...] = (),
    bad_ratio: float = 0.0,
) -> GroupedCorpus:
    """Return a corpus of groups, some of which fit into no row."""
    assert spec.group is not None and spec.recipe is not None
    corpus = random_corpus(spec, rng.random(), lambda _: 9, bad_ratio=bad_ratio)  # type: ignore[arg-type]
    found: dict[tuple[int, int], list[Group]] = {}
    for part, blocks in enumerate(corpus.parts):
        for number, (lengths, statuses) in enumerate(blocks):
            is_begun = [
                not place or spec.group.by == "record" or rng.random() < 0.4
                for place in range(len(lengths))
            ]
            records: list[Record] = []
            for place, status in enumerate(statuses):
                many = rng.choice([1, 2, 3, 6]) if spec.recipe.transform is not None else 1
                record = [
                    _random_sample(rng, row_tokens, units_max, has_masks=spec.has_masks)
                    for _ in range(many)
                ]
                if not (part or number) and place < 2:
                    record, statuses[place], is_begun[place] = [[Atom(TEXT, 3)]], 0, True
                elif status:
                    record = []
                    if status == RecordStatus.UNTRAINED:  # has a budget of its own
                        statuses[place] = RecordStatus.EMPTY
                records.append(record)
                lengths[place] = length_of(record)
            corpus.marks[part, number] = [
                [*([] if begins else [(MARK_GROUP, 0, 0, 0)]), *marks_of_record(record)]
                for record, begins in zip(records, is_begun, strict=True)
            ]
            found[part, number] = _groups(records, is_begun, len(units_max))
    return GroupedCorpus(corpus, found)


def _groups(records: list[Record], is_begun: list[bool], kinds: int) -> list[Group]:
    groups: list[tuple[list[Sample], list[int]]] = []
    for index, (record, begins) in enumerate(zip(records, is_begun, strict=True)):
        if begins:
            groups.append(([], [0] * kinds))
        samples, units = groups[-1]
        at = 0
        for sample in record:
            tokens = sum(atom.tokens for atom in sample)
            samples.append((index, at, tokens))
            at += tokens
            for atom in sample:
                if atom.kind != TEXT:
                    units[atom.kind] += atom.units
    return [Group(tuple(samples), tuple(units)) for samples, units in groups if samples]


def _random_sample(
    rng: random.Random, row_tokens: int, units_max: tuple[int, ...], *, has_masks: bool
) -> list[Atom]:
    longest = rng.choice([row_tokens // 8, row_tokens // 2, row_tokens + 9])
    sample = [Atom(TEXT, rng.randint(2, max(2, longest)), 0)]
    if has_masks and rng.random() < 0.5:
        sample.insert(0, Atom(TEXT, rng.randint(1, 4), 0, is_trained=False))
    if units_max and rng.random() < 0.4:
        kind = rng.randrange(len(units_max))
        sample.append(Atom(kind, rng.randint(1, 3), rng.randint(1, max(1, units_max[kind] // 2))))
    return sample


def segments_of_rows(plan: StepPlan) -> list[list[tuple[int, int, int, int, int]]]:
    """Return the segments of each row that has some, in order."""
    rows: dict[int, list[tuple[int, int, int, int, int]]] = {}
    columns = (plan.source, plan.block_key, plan.index, plan.offset, plan.length)
    for row, *segment in zip(*(c.tolist() for c in (plan.row, *columns)), strict=True):
        rows.setdefault(row, []).append(tuple(segment))
    return list(rows.values())


def check_whole_groups(
    plan: StepPlan, corpora: list[GroupedCorpus | MarkedCorpus], job: ResolvedJob
) -> list[tuple[int, int, Group]]:
    """Refuse a step in which a group is torn, and marks that do not say so; return its groups.

    Each is (source, block key, group).
    """
    assert plan.group_begins is not None
    begins = iter(plan.group_begins.tolist())
    found = []
    for row in segments_of_rows(plan):
        waiting = list(row)
        while waiting:
            source, key, index, _, _ = waiting[0]
            corpus = corpora[source]
            if not isinstance(corpus, GroupedCorpus):
                assert next(begins)
                waiting.pop(0)
                continue
            group = corpus.of(key, index)
            if job.sources[source].group == BY_RECORD:
                assert len({sample[0] for sample in group.samples}) == 1
            mine, waiting = waiting[: len(group.samples)], waiting[len(group.samples) :]
            assert mine == [(source, key, *sample) for sample in group.samples]
            assert [next(begins) for _ in mine] == [True] + [False] * (len(mine) - 1)
            found.append((source, key, group))
    assert next(begins, None) is None
    return found
