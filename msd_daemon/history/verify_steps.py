"""Plans a range of a run's steps again and compares each with what was journalled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from federation.journal_reader import DamagedRow, JournalReader
from msd_client.contract.errors import DataError
from msd_daemon.history.runs import RunFolder
from msd_daemon.history.step_content import StepContent
from msd_daemon.history.step_replay import ReplayedStep, StepReplay
from msd_daemon.history.step_spans import StepSpan, step_spans


class Difference(NamedTuple):
    """A step that is not what it was."""

    step: int
    generation: int
    what: str
    """`digest`, `counts`, `content` or `unplanned`."""
    expected: str
    actual: str
    detail: str
    """Which parts differ, or why it can't be planned."""


@dataclass
class Verification:
    """What became of a range."""

    steps: tuple[int, int]
    verified: int = 0
    """Steps that are equal."""
    passed_over: int = 0
    """Steps that no whole row of the journal leads to."""
    difference: Difference | None = None
    """The first; nothing behind it is looked at, as each digest is chained to the one before."""
    damaged: list[DamagedRow] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    """What is wrong with shards that are not as the manifest has them."""
    uncompared: list[int] = field(default_factory=list)
    """Planned steps whose content was to be compared, and that the former digests lack."""
    content: dict[int, str] = field(default_factory=dict)
    """Digest of the content by step, where that was asked for."""

    @property
    def is_equal(self) -> bool:
        """True where every step of the range is what it was, in all that was to be compared."""
        return not (
            self.damaged or self.changed or self.difference or self.passed_over or self.uncompared
        )


class StepVerifier:
    """Verifies steps of one run.

    Args:
        run: Whose steps.
        reader: Its journal.
        has_content: Tokens, field values and media are digested too.
        against: Digests of content by step, of a former call; steps that it lacks are told as `uncompared`.
        tell: Told of each step that is done.
    """

    def __init__(
        self,
        run: RunFolder,
        reader: JournalReader,
        *,
        has_content: bool = False,
        against: Mapping[int, str] | None = None,
        tell: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._run = run
        self._reader = reader
        self._against = against
        self._content = StepContent() if has_content or against is not None else None
        self._tell = tell
        self._checked: set[str] = set()
        """Jobs whose shards were compared with their manifests."""

    def verify(self, first: int, end: int, generation: int | None = None) -> Verification:
        """Verify the steps [first, end).

        Args:
            first: First step.
            end: One behind the last.
            generation: Of the journal; None: the newest that holds each step.

        Raises:
            NotFoundError: A step is not kept, or not planned yet.
        """
        found = Verification((first, end))
        for span in step_spans(self._reader, first, end, generation):
            rows = self._reader.damage(span.first, span.end, span.kept.generation)
            damaged = list(rows)
            found.damaged += damaged
            for part in self._whole_parts(span, damaged, found):
                self._verify_part(part, found)
                if found.difference is not None:
                    return found
        return found

    def _whole_parts(
        self, span: StepSpan, damaged: list[DamagedRow], found: Verification
    ) -> list[StepSpan]:
        """Return the parts of a span that whole rows lead to."""
        number = span.kept.generation
        parts: list[StepSpan] = []
        at = span.first
        for row in sorted(damaged, key=lambda row: row.step):
            if row.step < at and parts:
                continue
            if row.step > at:
                parts.append(StepSpan(span.kept, at, min(row.step, span.end)))
            if row.step >= span.end:
                break
            onward = self._reader.next_snapshot(row.step, number)
            following = span.end if onward is None else min(onward, span.end)
            found.passed_over += max(0, following - max(at, row.step))
            at = max(at, following)
        if at < span.end:
            parts.append(StepSpan(span.kept, at, span.end))
        return parts

    def _verify_part(self, part: StepSpan, found: Verification) -> None:
        keep = None if self._content is None else self._content.keep
        with StepReplay(self._run, self._reader, part.kept, part.first, keep) as replay:
            if self._content is not None:
                self._content.read_from(replay.job, replay.feed.loaders)
            if replay.job.digest() not in self._checked:
                self._checked.add(replay.job.digest())
                try:
                    replay.check_sources()
                except DataError as error:
                    found.changed.append(error.message)
            try:
                for replayed in replay.steps(part.end):
                    found.difference = self._difference(part, replayed, found)
                    if found.difference is not None:
                        return
                    found.verified += 1
                    if self._content is not None:
                        planner = replay.planner
                        self._content.forget(planner.cursors(), planner.carried())
                    self._tell(1)
            except DataError as error:
                found.difference = Difference(
                    replay.planner.state().step, part.kept.generation, "unplanned", "a plan",
                    "an error", error.message,
                )  # fmt: skip

    def _difference(
        self, part: StepSpan, replayed: ReplayedStep, found: Verification
    ) -> Difference | None:
        plan, told, number = replayed.plan, replayed.journalled, part.kept.generation
        if told.digest != plan.stream_digest:
            detail = "which records stand where is not what it was"
            return Difference(plan.step, number, "digest", told.digest, plan.stream_digest, detail)
        if replayed.differing:
            detail = f"membership is equal, {', '.join(replayed.differing)} differ"
            return Difference(plan.step, number, "counts", told.digest, plan.stream_digest, detail)
        if self._content is None:
            return None
        digest = found.content[plan.step] = self._content.digest(plan)
        if self._against is None:
            return None
        expected = self._against.get(plan.step)
        if expected is None:
            found.uncompared.append(plan.step)
        elif expected != digest:
            detail = "the same records hold other tokens, values or media"
            return Difference(plan.step, number, "content", expected, digest, detail)
        return None
