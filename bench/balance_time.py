"""Iteration time that ranks would see, predicted: unbalanced order against packed and balanced rows.

Both train on the same samples in a step, on the same mesh, with the same assumptions: forward FLOPs
of an 8 B decoder and of a 0.6 B image encoder with full attention in each image, twice as many
backward; the encoder runs on the first stage, and the decoder's layers are laid out so that all
stages have the same work on average; 1F1B; no time between stages; all ranks meet at the end of the
step, so its time is the slowest rank's.

Three unbalanced orders, in all of which an image is encoded where its text is:

- `native`: what the ranks of a plain loader draw. Each reads a shard of its own as it lies, and a shard
  is of one source; microbatches have the same number of samples (a loader's batch size: what fills
  the context on average), concatenated without padding (varlen).
- `shuffled`: the same from a shuffle over all sources and shards, as a sampler with an index of all gives.
- `filled`: shuffled, and each microbatch goes on taking samples until its context is full.

Balanced are rows by best fit, placed for the `pipeline` objective; images are dealt to the microbatches
of all ranks by encoder cost (hybrid balance). `beside text` are the same rows with each image encoded
where its text is, placed by the sum of both costs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from bench.balance_lengths import BACKBONE, Lengths, split
from federation.planning.balance import BalanceRule, Placement, pipeline_ends, place_balanced
from federation.planning.best_fit import best_fit_rows
from federation.planning.capped_deal import deal_capped
from federation.planning.costs import segment_costs
from federation.planning.step_time import stage_costs

DP, PP, MICROBATCHES = 256, 4, 8
CONTEXTS = (4096, 8192, 16384, 32768, 131072)
_MERGE = 4
"""Patches of an image that become one token."""
_VIT_HIDDEN, _VIT_LAYERS, _VIT_FFN = 1280, 32, 5120
_SHIFT = 24
"""Costs are FLOPs / 2**24."""


_MIX = (("text", 0.4), ("captions", 0.25), ("pages", 0.15), ("interleaved", 0.1), ("frames", 0.1))
"""Sources of the VLM mix and their shares of the tokens."""
_NUMBERS = {name: 1000 + number for number, (name, _) in enumerate(_MIX)}


class Samples(NamedTuple):
    """Samples in shuffled order. Shape (n,) each."""

    tokens: np.ndarray
    pictures: np.ndarray
    patches: np.ndarray
    """Of each picture."""
    source: np.ndarray


class Times(NamedTuple):
    native: int
    shuffled: int
    filled: int
    beside_text: int
    balanced: int
    perfect: int
    """All microbatches of all ranks alike."""


def decoder_costs(tokens: np.ndarray) -> np.ndarray:
    return segment_costs(BACKBONE, tokens) >> _SHIFT


def encoder_costs(patches: np.ndarray) -> np.ndarray:
    weights = _VIT_LAYERS * (4 * _VIT_HIDDEN**2 + 2 * _VIT_HIDDEN * _VIT_FFN)
    return patches * (2 * weights + 4 * _VIT_LAYERS * _VIT_HIDDEN * patches) >> _SHIFT


def text_samples(rng: np.random.Generator, lengths: Lengths, tokens: int, context: int) -> Samples:
    fragments = split(lengths(rng, tokens), context)
    order = rng.permutation(len(fragments.lengths))
    none = np.zeros_like(order)
    return Samples(fragments.lengths[order], none, none, fragments.source[order])


def vlm_samples(rng: np.random.Generator, lengths: Lengths, tokens: int, context: int) -> Samples:
    """A mix of five sources by tokens, msd's default unit, shuffled: see _MIX.

    Text as the text mix has it. Patches of 14 pixels: captions have a photo of 256 to 1,024 pixels a
    side; pages one scan of 1,000 to 2,300; interleaved documents 2 to 12 photos; frames 8 to 64
    pictures of 448 x 252. A sample over the context has its pictures scaled down, as processors do.
    """
    parts = [_source(rng, lengths, name, int(tokens * share), context) for name, share in _MIX]
    order = rng.permutation(sum(len(part.tokens) for part in parts))
    return Samples(*(np.concatenate(columns)[order] for columns in zip(*parts, strict=True)))


def _source(
    rng: np.random.Generator, lengths: Lengths, name: str, tokens: int, context: int
) -> Samples:
    if name == "text":
        return text_samples(rng, lengths, tokens, context)
    count = tokens // 64 + 99
    median, pictures, patches = {
        "captions": lambda: (60, np.ones(count), (rng.uniform(256, 1024, count) / 14) ** 2),
        "pages": lambda: (600, np.ones(count), (rng.uniform(1000, 2300, count) / 14) ** 2),
        "interleaved": lambda: (
            1500,
            rng.integers(2, 13, count),
            (rng.uniform(256, 1024, count) / 14) ** 2,
        ),
        "frames": lambda: (150, rng.integers(8, 65, count), np.full(count, 32 * 18)),
    }[name]()
    pictures = np.asarray(pictures, np.int64)
    words = rng.lognormal(np.log(median), 0.8, count).astype(np.int64) + 1
    words = np.minimum(words, context // 2)
    patches = np.minimum(patches.astype(np.int64), (context - words) * _MERGE // pictures)
    patches = patches // _MERGE * _MERGE
    total = words + pictures * patches // _MERGE
    kept = int(np.searchsorted(np.cumsum(total), tokens)) + 1
    source = np.full(kept, _NUMBERS[name])
    return Samples(total[:kept], pictures[:kept], patches[:kept], source)


def predict(samples: Samples, context: int) -> Times:
    """Return the times of a step of the samples that best fit puts into DP * MICROBATCHES contexts."""
    cells = DP * MICROBATCHES
    order = np.argsort(-samples.tokens, kind="stable")
    row_of = np.empty(len(order), np.int64)
    row_of[order] = best_fit_rows(samples.tokens[order], 0, cells, context, context)
    own = row_of >= 0  # the same samples for all
    rows = row_of[own]
    tokens, pictures, patches, source = (column[own] for column in samples)
    decoder, encoder = decoder_costs(tokens), pictures * encoder_costs(patches)
    count = len(tokens)
    shuffled = np.arange(count) * cells // count
    native = np.empty(count, np.int64)
    native[np.argsort(source, kind="stable")] = shuffled
    filled = np.minimum((np.cumsum(tokens) - tokens // 2) * cells // int(tokens.sum()), cells - 1)
    rule = BalanceRule(objective="pipeline", stages=PP)
    beside = place_balanced(_sums(rows, decoder + encoder, cells), DP, 1, rule)
    hybrid = place_balanced(_sums(rows, decoder, cells), DP, 1, rule)
    images = np.repeat(encoder_costs(patches), pictures)
    dealt = deal_capped(images, images, cells, int(images.sum()))
    assert dealt is not None
    shares = place_balanced(_sums(dealt, images, cells), DP, 1, rule)
    even = (
        _sums(_cells(hybrid)[rows], decoder, cells),
        _sums(_cells(shares)[dealt], images, cells),
    )
    return Times(
        *(
            _time(_sums(cell, decoder, cells), _sums(cell, encoder, cells))
            for cell in (native, shuffled, filled, _cells(beside)[rows])
        ),
        _time(*even),
        3 * (MICROBATCHES + PP - 1) * int((decoder + encoder).sum()) // (cells * PP),
    )


def _cells(placement: Placement) -> np.ndarray:
    cells: np.ndarray = placement.dp * MICROBATCHES + placement.microbatch
    return cells


def _sums(place: np.ndarray, costs: np.ndarray, count: int) -> np.ndarray:
    return np.bincount(place, costs, count).astype(np.int64)


def _time(decoder: np.ndarray, encoder: np.ndarray) -> int:
    """Return the slowest rank's time from the costs of its microbatches. Shape (cells,) each."""
    shape = (DP, MICROBATCHES)
    costs = stage_costs(decoder.reshape(shape), encoder.reshape(shape), int(encoder.sum()), PP)
    return int(pipeline_ends(costs).max())


def table(rng: np.random.Generator, lengths: Lengths, mix: str, steps: int) -> dict[int, Times]:
    """Return the sum of the times of some steps, by context."""
    make = {"text": text_samples, "vlm": vlm_samples}[mix]
    found = {}
    for context in CONTEXTS:
        tokens = DP * MICROBATCHES * context * 33 // 32
        one = [predict(make(rng, lengths, tokens, context), context) for _ in range(steps)]
        found[context] = Times(*(sum(values) for values in zip(*one, strict=True)))
    return found
