"""Running totals of a generation, for msdctl."""

from __future__ import annotations

from dataclasses import dataclass, field

from federation.model.plan import StepPlan
from msd_client.contract.state import CURSOR_BLOCK_KEY, CURSOR_INDEX, IS_EXHAUSTED, StateDelta
from msd_daemon.workers.messages import ChunkNotice

PASSED_ALL = (1 << 62, 0)
"""Cursor of a source that left the mixture: all of its records were passed."""


@dataclass
class SourceTotals:
    """Running totals of one source in this generation."""

    drawn_tokens: int = 0
    drawn_samples: int = 0
    placed_tokens: int = 0
    valid_tokens: int = 0
    """Labels that count."""
    dropped_records: int = 0


@dataclass
class Reads:
    """What the loaders read in a generation."""

    chunks: int = 0
    records: int = 0
    fetched_records: int = 0
    """Read again by position: what a state carried."""
    chunk_bytes: int = 0

    def count(self, notice: ChunkNotice) -> None:
        """Add a chunk that came."""
        records = len(notice.lengths)
        self.chunks += 1
        self.records += 0 if notice.is_fetched else records
        self.fetched_records += records if notice.is_fetched else 0
        self.chunk_bytes += notice.used_bytes


@dataclass
class Totals:
    """Running totals for msdctl and for steps' stats."""

    steps: int = 0
    skipped_steps: int = 0
    """Plan steps left out since the stream's beginning."""
    tokens: int = 0
    fill_sum: float = 0.0
    imbalance_sum: float = 0.0
    imbalance_last: float = 1.0
    encoder_imbalance_sum: float = 0.0
    encoder_imbalance_last: float | None = None
    """None of jobs whose media are encoded with their text."""
    fill_last: float = 1.0
    wanted: list[float] = field(default_factory=list)
    sources: list[SourceTotals] = field(default_factory=list)
    dropped: list[list[int]] = field(default_factory=list)
    """Since the stream's beginning: by DROPPED_COLUMNS, then source."""
    cursors: list[tuple[int, int]] = field(default_factory=list)
    """By source: block key and index of its last drawn record."""
    endings: tuple[str, ...] = ()
    """Of the sources."""

    def count(self, plan: StepPlan) -> None:
        """Add a step."""
        self.steps += 1
        self.skipped_steps = plan.plan_step - plan.step
        self.tokens += int(plan.placed_tokens.sum())
        self.fill_last, self.imbalance_last = plan.fill_ratio, plan.imbalance
        self.fill_sum += plan.fill_ratio
        self.imbalance_sum += plan.imbalance
        self.encoder_imbalance_last = plan.encoder_imbalance
        self.encoder_imbalance_sum += plan.encoder_imbalance or 0.0
        self.wanted = plan.wanted_shares.tolist()
        columns = (
            plan.drawn_tokens,
            plan.drawn_samples,
            plan.placed_tokens,
            plan.source_valid_tokens,
            plan.dropped_records,
        )
        for source, values in zip(
            self.sources, zip(*(c.tolist() for c in columns), strict=True), strict=True
        ):
            source.drawn_tokens += values[0]
            source.drawn_samples += values[1]
            source.placed_tokens += values[2]
            source.valid_tokens += values[3]
            source.dropped_records += values[4]
        self._move_cursors(plan.delta)
        if len(plan.delta.dropped_changed):
            changed = plan.delta.dropped_changed.tolist()
            for counts, news in zip(self.dropped, plan.delta.dropped.tolist(), strict=True):
                for number, count in zip(changed, news, strict=True):
                    counts[number] = count

    def _move_cursors(self, delta: StateDelta) -> None:
        columns = delta.progress[[CURSOR_BLOCK_KEY, CURSOR_INDEX, IS_EXHAUSTED]].T.tolist()
        for number, (key, index, is_over) in zip(delta.changed.tolist(), columns, strict=True):
            self.cursors[number] = PASSED_ALL if is_over else (key, index)
        for number, ending in enumerate(self.endings if delta.ending else ()):
            if delta.ending == ending:
                self.cursors[number] = PASSED_ALL
