"""Records with samples, masks and media, atom by atom, and what planning has to make of them.

Everything here is worked out token by token in plain loops: the yardstick for columns.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from federation.model.chunk import MARK_SAMPLE, MARK_UNTRAINED
from federation.model.job import SourceSpec
from federation.model.media import MediaRule
from federation.model.recipe import ChatRule, SampleRecipe, UserCall
from tests.support.metadata import SourceCorpus, make_spec, random_corpus

TEXT = -1
CALL = UserCall("m:f", "python", "folder", "0" * 32)


class Atom(NamedTuple):
    """A stretch of text, which may be cut anywhere, or an item of media, which may not."""

    kind: int
    """TEXT, or the number of a media rule."""
    tokens: int
    units: int = 0
    is_trained: bool = True


Sample = list[Atom]
Record = list[Sample]


class Fragment(NamedTuple):
    """What a row gets of a sample."""

    offset: int
    length: int
    is_first: bool
    """True where a sample begins."""
    trained: int
    """2 * trained tokens + 1 if the first one is."""
    units: tuple[int, ...]


class Lost(NamedTuple):
    """A sample that is not drawn whole."""

    offset: int
    """Drawn tokens of its record behind which it counts."""
    reason: str
    tokens: int


def image_rule(row_units_max: int, modality: str = "image") -> MediaRule:
    """Return a rule of which planning reads but the cap."""
    return MediaRule(modality, 12, "uint8", row_units_max, 7)


def marked_spec(name: str, shards: int = 1, order_class: str = "seekable", **options) -> SourceSpec:
    """Return a source with masks unless told not to, of several samples a record if `is_many`."""
    call = CALL if options.pop("is_many", False) else None
    chat = ChatRule() if options.pop("has_masks", True) else None
    recipe = SampleRecipe(chat=chat, transform=call)
    return make_spec(name, shards, order_class, recipe=recipe, **options)


def tokens_of(record: Record) -> list[tuple[int, Atom]]:
    """Return (sample, atom) of every token."""
    return [
        (number, atom)
        for number, sample in enumerate(record)
        for atom in sample
        for _ in range(atom.tokens)
    ]


def marks_of_record(record: Record) -> list[tuple[int, int, int, int]]:
    """Return the marks of a record as a loader sends them."""
    lines, at = [], 0
    for sample in record:
        if at:
            lines.append((MARK_SAMPLE, at, 0, 0))
        for atom in sample:
            if atom.kind != TEXT:
                lines.append((atom.kind, at, atom.tokens, atom.units))
            elif not atom.is_trained:
                lines.append((MARK_UNTRAINED, at, atom.tokens, 0))
            at += atom.tokens
    return lines


def length_of(record: Record) -> int:
    """Return the tokens of a record."""
    return sum(atom.tokens for sample in record for atom in sample)


def cut_record(
    record: Record, row_tokens: int, units_max: tuple[int, ...], long: str
) -> tuple[list[Fragment], list[Lost]]:
    """Return the fragments of a record, and the samples that are not drawn whole."""
    fragments: list[Fragment] = []
    lost: list[Lost] = []
    begin = 0
    for sample in record:
        pieces = _pieces(sample, begin, row_tokens, units_max)
        end = begin + sum(atom.tokens for atom in sample)
        if len(pieces) > 1 and long == "skip":
            lost.append(Lost(end + 1, "long_skipped", end - begin))
            pieces = []
        elif len(pieces) > 1 and long == "truncate":
            kept = pieces[0].offset + pieces[0].length
            lost.append(Lost(kept, "long_truncated", end - kept))
            pieces = pieces[:1]
        fragments += pieces
        begin = end
    return fragments, lost


def _pieces(
    sample: Sample, begin: int, row_tokens: int, units_max: tuple[int, ...]
) -> list[Fragment]:
    bits: list[Atom] = []
    for atom in sample:
        if atom.kind == TEXT:
            bits += [Atom(TEXT, 1, 0, atom.is_trained)] * atom.tokens
        else:
            bits.append(atom)
    pieces: list[list[Atom]] = [[]]
    for bit in bits:
        held = pieces[-1]
        tokens = sum(other.tokens for other in held)
        units = sum(other.units for other in held if other.kind == bit.kind)
        is_over = bit.kind != TEXT and units + bit.units > units_max[bit.kind]
        if tokens + bit.tokens > row_tokens or is_over:
            pieces.append([])
        pieces[-1].append(bit)
    fragments: list[Fragment] = []
    at = begin
    for piece in pieces:
        trained = sum(bit.kind == TEXT and bit.is_trained for bit in piece)
        is_first_trained = piece[0].kind == TEXT and piece[0].is_trained
        units = tuple(
            sum(bit.units for bit in piece if bit.kind == kind) for kind in range(len(units_max))
        )
        length = sum(bit.tokens for bit in piece)
        fragments.append(Fragment(at, length, at == begin, 2 * trained + is_first_trained, units))
        at += length
    return fragments


def random_record(
    rng: random.Random,
    row_tokens: int,
    units_max: tuple[int, ...],
    *,
    is_many: bool = False,
    has_masks: bool = True,
) -> Record:
    """Return a record whose items fit a row each, often longer than a row as a whole."""
    return [
        _random_sample(rng, row_tokens, units_max, has_masks=has_masks)
        for _ in range(rng.choice([1, 1, 2, 5]) if is_many else 1)
    ]


def _random_sample(
    rng: random.Random, row_tokens: int, units_max: tuple[int, ...], *, has_masks: bool
) -> Sample:
    sample: Sample = []
    for _ in range(rng.choice([1, 2, 3, 8])):
        if units_max and rng.random() < 0.4:
            kind = rng.randrange(len(units_max))
            tokens = rng.choice(
                [1, rng.randint(1, row_tokens), rng.randint(1, row_tokens // 4 + 1)]
            )
            units = rng.choice([units_max[kind], rng.randint(1, units_max[kind])])
            sample.append(Atom(kind, tokens, units if rng.random() < 0.3 else units // 4 + 1))
        else:
            tokens = rng.choice([1, rng.randint(1, 10), row_tokens, rng.randint(1, 2 * row_tokens)])
            sample.append(Atom(TEXT, tokens, 0, not has_masks or rng.random() < 0.6))
    return sample


class MarkedCorpus(NamedTuple):
    """A corpus and its records, by (part, block)."""

    corpus: SourceCorpus
    records: dict[tuple[int, int], list[Record]]
    """Empty records where the status is not OK, and in blocks without marks."""


def random_marked_corpus(
    spec: SourceSpec,
    seed: float,
    row_tokens: int,
    units_max: tuple[int, ...],
    *,
    is_many: bool = False,
    bad_ratio: float = 0.0,
    plain_ratio: float = 0.1,
) -> MarkedCorpus:
    """Return a corpus of random blocks, of which a few have no marks at all."""
    rng = random.Random(seed)
    corpus = random_corpus(spec, rng.random(), lambda _: 9, bad_ratio=bad_ratio)
    records = {}
    for part, blocks in enumerate(corpus.parts):
        for number, (lengths, statuses) in enumerate(blocks):
            is_plain = rng.random() < plain_ratio
            found: list[Record] = []
            for place, status in enumerate(statuses):
                record: Record = []
                if not (part or number or place):
                    record = [[Atom(TEXT, 3)]]  # no corpus is without any short good record
                elif not status and is_plain:
                    record = [[Atom(TEXT, rng.randint(1, 2 * row_tokens))]]
                elif not status:
                    record = random_record(
                        rng,
                        row_tokens,
                        units_max,
                        is_many=is_many,
                        has_masks=spec.has_masks,
                    )
                found.append(record)
                lengths[place] = length_of(record)
            records[part, number] = found
            if not is_plain:
                corpus.marks[part, number] = [marks_of_record(record) for record in found]
    return MarkedCorpus(corpus, records)
