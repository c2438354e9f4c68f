"""Gradients of packed, accumulated, averaged microbatches equal those of one process (E7, H11)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from msd_client.batch import Batch
from msd_client.contract.batch_spec import BatchSpec
from msd_client.step import Step
from tests.support.microbatches import Document, build_batches

torch = pytest.importorskip("torch")
from torch.nn.functional import cross_entropy  # noqa: E402

VOCABULARY, WIDTH, POSITIONS = 23, 5, 64
DP, ACCUMULATION = 2, 2
TOLERANCE = 1e-12
"""Below the 1e-6 that is asked for: all is float64, only the order of sums differs."""

LENGTHS = [[[8, 3], [2, 1, 5]], [[3], [3, 4, 4]]]
"""Of the documents of each row: DP ranks of microbatches of one row."""


class Model(torch.nn.Module):
    """Token and position embeddings and a linear head; nothing flows between tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.tokens = torch.nn.Embedding(VOCABULARY, WIDTH, dtype=torch.float64)
        self.positions = torch.nn.Embedding(POSITIONS, WIDTH, dtype=torch.float64)
        self.head = torch.nn.Linear(WIDTH, VOCABULARY, dtype=torch.float64)

    def forward(self, tokens: Any, position_ids: Any) -> Any:
        return self.head(torch.tanh(self.tokens(tokens) + self.positions(position_ids)))


def gradients(model: Model) -> list[Any]:
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    return found


def make_rows() -> list[list[list[Document]]]:
    """Return the documents of each rank's rows; three sources take turns."""
    numbers = itertools.count(1)
    documents = itertools.count()

    def document(length: int) -> Document:
        return Document([next(numbers) * 7 % 19 + 1 for _ in range(length)], next(documents) % 3)

    return [[[document(n) for n in row] for row in rank] for rank in LENGTHS]


# ---- one process that never heard of packing ----


def pairs_of(row: Sequence[Document], labels: str, *, is_joined: bool) -> Iterator[tuple[int, ...]]:
    """Yield (token, position, next token, source that the label's place belongs to)."""
    for number, document in enumerate(row):
        for k, (token, following) in enumerate(itertools.pairwise(document.tokens)):
            yield token, k, following, document.source
        if is_joined and number + 1 < len(row):
            after = row[number + 1]
            source = document.source if labels == "shifted" else after.source
            yield document.tokens[-1], len(document.tokens) - 1, after.tokens[0], source


@dataclass
class OneProcess:
    gradients: list[Any]
    loss: float
    weight: float
    valid_tokens: int


def one_process(
    rows: Sequence[Sequence[Document]], weights: Sequence[float], labels: str, *, is_joined: bool
) -> OneProcess:
    """Return the gradient of the mean loss over every trained label of the step."""
    model = Model()
    pairs = [pair for row in rows for pair in pairs_of(row, labels, is_joined=is_joined)]
    tokens, positions, targets, sources = (
        torch.tensor(column) for column in zip(*pairs, strict=True)
    )
    weight = torch.tensor(weights or [1.0] * 3, dtype=torch.float64)[sources]
    losses = cross_entropy(model(tokens, positions), targets, reduction="none")
    loss = (losses * weight).sum() / weight.sum()
    loss.backward()
    return OneProcess(gradients(model), loss.item(), float(weight.sum()), int((weight > 0).sum()))


# ---- the trainer's way ----


def loss_sum(model: Model, batch: Batch) -> Any:
    """Return the summed loss of a microbatch as its conventions say."""
    logits, labels = model(batch.tokens, batch.position_ids), batch.labels
    conventions = batch.conventions
    has_weights = "loss_weights" in batch
    weights = batch.loss_weights if has_weights else torch.ones_like(labels, dtype=torch.float64)
    if conventions["labels"] == "aligned":  # the model shifts
        logits, labels, weights = logits[:, :-1], labels[:, 1:], weights[:, 1:]
    ignored = -100 if conventions["ignore"] == "loss_mask" else conventions["ignore_label"]
    losses = cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=ignored, reduction="none"
    )
    return (losses * weights.flatten()).sum()


class Giver:
    """What `Step` asks of its loader."""

    sources = ("a", "b", "c")
    source_loss_weights = ()

    def __init__(self, averaging_ranks: int) -> None:
        self.averaging_ranks = averaging_ranks

    def next_batch(self, step: Step) -> Batch:
        raise AssertionError("no batch is asked for")

    def report_step(self, number: int, seconds: float) -> bool:
        raise AssertionError("nothing is reported")


def step_of(weight: float, ranks: int) -> Step:
    meta = dict.fromkeys(("step", "plan_step", "valid_tokens", "valid_segments", "microbatches"), 0)
    return Step(Giver(ranks), meta | {"loss_weight": weight, "stats": {}})


def trained(ranks: list[list[Batch]], weight: float) -> tuple[list[Any], float]:
    """Return gradients averaged over ranks as DDP and FSDP do, and the loss that they log."""
    scale = step_of(weight, len(ranks)).loss_scale("mean")
    per_rank, total = [], 0.0
    for batches in ranks:
        model = Model()
        for batch in batches:
            loss = loss_sum(model, batch) * scale
            loss.backward()
            total += loss.item() / len(ranks)
        per_rank.append(gradients(model))
    return [torch.stack(parts).mean(0) for parts in zip(*per_rank, strict=True)], total


def build(rows: list[list[list[Document]]], **rule: Any) -> list[list[Batch]]:
    """Return the microbatches of every rank, context-parallel ranks of a DP rank side by side."""
    plain: dict[str, Any] = {"rows": 1, "row_tokens": 32, "row_segments_max": 8}
    spec = BatchSpec.for_rule(**(plain | rule))
    ranks: list[list[Batch]] = []
    for rank_rows in rows:
        microbatches = [build_batches(spec, [row]) for row in rank_rows]
        ranks += [list(batches) for batches in zip(*microbatches, strict=True)]
    return ranks


WEIGHTS = (1.0, 0.25, 0.0)


def check(labels: str, documents: str, weights: tuple[float, ...], **rule: Any) -> None:
    rows = make_rows()
    right = one_process(
        [row for rank in rows for row in rank], weights, labels, is_joined=documents == "joined"
    )
    ranks = build(rows, labels=labels, documents=documents, source_weights=weights, **rule)
    cp_count = len(ranks) // DP
    counts = [[batch.valid_tokens for batch in batches] for batches in ranks[::cp_count]]
    assert sum(map(sum, counts)) == right.valid_tokens
    assert len({count for rank in counts for count in rank}) > 1, "unequal valid tokens"
    found, loss = trained(ranks, right.weight)
    assert loss == pytest.approx(right.loss, abs=TOLERANCE)
    for want, have in zip(right.gradients, found, strict=True):
        assert want.abs().max() > 1e-3
        assert (want - have).abs().max() < TOLERANCE


@pytest.mark.parametrize("documents", ["separate", "joined"])
@pytest.mark.parametrize("labels", ["shifted", "aligned"])
@pytest.mark.parametrize(
    ("ignore", "weights"),
    [("label", ()), ("label", WEIGHTS), ("loss_mask", (1.0, 1.0, 1.0)), ("loss_mask", WEIGHTS)],
)
def test_gradients_equal_those_of_one_process(
    labels: str, documents: str, ignore: str, weights: tuple[float, ...]
) -> None:
    check(labels, documents, weights, ignore=ignore)


@pytest.mark.parametrize("ignore", ["label", "loss_mask"])
@pytest.mark.parametrize("layout", ["zigzag_row", "zigzag_document", "contiguous"])
def test_gradients_of_context_parallel_ranks_equal_those_of_one_process(
    layout: str, ignore: str
) -> None:
    check(
        "shifted",
        "separate",
        WEIGHTS,
        ignore=ignore,
        cp_count=2,
        cp_layout=layout,
        segment_multiple=4,
    )


@pytest.mark.parametrize("labels", ["shifted", "aligned"])
def test_gradients_with_padding_inside_segments_equal_those_of_one_process(labels: str) -> None:
    check(labels, "separate", (), segment_multiple=4)


@pytest.mark.parametrize("labels", ["shifted", "aligned"])
@pytest.mark.parametrize("ignore", ["label", "loss_mask"])
def test_a_mean_of_means_is_told_apart_by_the_numbers_of_h11(labels: str, ignore: str) -> None:
    lengths = [[8, 2], [3, 3]]
    rows = [[[Document(list(range(1, n + 1)))] for n in rank] for rank in lengths]
    weights = (1.0,) if ignore == "loss_mask" else ()
    ranks = build(rows, labels=labels, ignore=ignore, source_weights=weights)
    counts = [[batch.valid_tokens for batch in batches] for batches in ranks]
    assert counts == [[7, 1], [2, 2]]
    valid_tokens = sum(map(sum, counts))
    assert valid_tokens == 12
    losses = [[1.0 * n for n in counts[0]], [3.0 * n for n in counts[1]]]
    scale = step_of(valid_tokens, DP).loss_scale()
    loss = sum(sum(loss * scale for loss in rank) for rank in losses) / DP
    assert loss == pytest.approx(20 / 12)
    means = [
        loss / n
        for own, rank in zip(counts, losses, strict=True)
        for n, loss in zip(own, rank, strict=True)
    ]
    assert sum(means) / len(means) == 2.0, "what normalising by microbatch would give"
