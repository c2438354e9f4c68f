"""Cuts a range of steps into the generations that hold it."""

from __future__ import annotations

from typing import NamedTuple

from federation.journal_reader import JournalReader, KeptSteps


class StepSpan(NamedTuple):
    """Steps of one generation."""

    kept: KeptSteps
    first: int
    end: int


def step_spans(
    reader: JournalReader, first: int, end: int, generation: int | None = None
) -> list[StepSpan]:
    """Return the steps [first, end) by the newest generation that holds each, or by the one named.

    Raises:
        NotFoundError: A step is not kept, or not planned yet; what is kept is named.
    """
    spans: list[StepSpan] = []
    step = first
    while step < end:
        kept = reader.holding(step, generation)
        newer = [
            other.first
            for other in reader.kept()
            if other.generation > kept.generation and step < other.first < other.end
        ]
        last = min([end, kept.end, *(newer if generation is None else [])])
        spans.append(StepSpan(kept, step, last))
        step = last
    return spans
