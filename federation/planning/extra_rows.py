"""What the fragments of some jobs have beside their places: further rows of every matrix of them.

They are the last rows of the matrices of known, drawn and carried fragments and of segments alike,
so they are found by negative number, whatever stands above them. A job whose every token is trained
and whose every record is one sample has none.

- `begins`: 1 where a fragment begins a sample, else 0. In jobs with a source whose records may
  become several samples; in others a sample begins where its record does.
- `follow`: how many fragments of its group stand behind a fragment, 0 where it is the last one or
  in none. In jobs with groups; a group's fragments stand beside each other in every matrix.
- `trained`: 2 * trained tokens + 1 if the first token is trained. In jobs with masks.
- `units_image` and so on: units (patches, frames) of each modality of the job.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from federation.model.job import BatchRule, ResolvedJob, Unit
from federation.planning.step_pool import LENGTH, OFFSET, group_starts, places_of
from msd_client.contract.errors import StateMismatchError
from msd_client.contract.state import CARRIED_COLUMNS, StreamState

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ExtraRows:
    """Which rows a job's fragments have beside their places."""

    has_begins: bool = False
    has_trained: bool = False
    modalities: tuple[str, ...] = ()
    units_max: tuple[int, ...] = ()
    """Most units that a row of a batch holds, of each modality."""
    has_groups: bool = False

    @staticmethod
    def of(job: ResolvedJob) -> ExtraRows:
        """Return those of a job."""
        recipes = [source.recipe for source in job.sources if source.recipe is not None]
        return ExtraRows(
            any(recipe.transform is not None for recipe in recipes),
            job.has_masks,
            tuple(rule.modality for rule in job.media),
            tuple(rule.row_units_max for rule in job.media),
            job.has_groups,
        )

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names in their order, as states have them."""
        units = tuple(f"units_{modality}" for modality in self.modalities)
        return (
            ("begins",) * self.has_begins
            + ("follow",) * self.has_groups
            + ("trained",) * self.has_trained
            + units
        )

    @cached_property
    def count(self) -> int:
        """Number of rows."""
        return len(self.names)

    def begins(self, fragments: Int64Array, extras: Int64Array | None = None) -> Int64Array:
        """Return where fragments begin a sample, 1 or 0. Shape (n,).

        Args:
            fragments: With the row OFFSET.
            extras: Their extra rows, where `fragments` does not end with them.
        """
        if self.has_begins:
            row: Int64Array = (fragments if extras is None else extras)[-self.count]
            return row
        firsts: Int64Array = (fragments[OFFSET] == 0).astype(np.int64)
        return firsts

    def follow(self, fragments: Int64Array) -> Int64Array:
        """Return how many fragments of its group stand behind each. Shape (n,).

        Args:
            fragments: With the extra rows last, of a job with groups.
        """
        row: Int64Array = fragments[int(self.has_begins) - self.count]
        return row

    def group_begins(self, segments: Int64Array) -> npt.NDArray[np.bool_] | None:
        """Return which segments begin a group, or are in none. Shape (n,); None without groups.

        Args:
            segments: Extra rows of segments, in the order of rows.
        """
        if not self.has_groups:
            return None
        found = np.zeros(segments.shape[1], np.bool_)
        found[group_starts(self.follow(segments))] = True
        return found

    def amounts(self, fragments: Int64Array, unit: Unit) -> Int64Array:
        """Return what fragments count for in a mixture of this unit. Shape (n,).

        Args:
            fragments: With the rows OFFSET and LENGTH, and the extra rows last.
            unit: Of the mixture. Where nothing is masked, every token is trained.
        """
        if unit == "samples":
            return self.begins(fragments)
        amounts: Int64Array = fragments[LENGTH]
        if unit == "trained" and self.has_trained:
            amounts = self.trained(fragments) // 2
        return amounts

    def draw_amounts(self, fragments: Int64Array, unit: Unit) -> Int64Array:
        """Return what fragments count for where the draw has them: a group's first for all of it.

        Args:
            fragments: Whole groups; as of `amounts`.
            unit: Of the mixture.
        """
        amounts = self.amounts(fragments, unit)
        if not self.has_groups or not fragments.shape[1]:
            return amounts
        starts = group_starts(self.follow(fragments))
        found = np.zeros_like(amounts)
        found[starts] = np.add.reduceat(amounts, starts)
        return found

    def may_be_nothing(self, unit: Unit) -> bool:
        """Return True where a fragment that begins a sample may count for nothing."""
        return unit == "trained" and self.has_trained

    def trained(self, fragments: Int64Array) -> Int64Array:
        """Return the row `trained`, of a job that has it. Shape (n,)."""
        row: Int64Array = fragments[-1 - len(self.units_max)]
        return row

    def units(self, fragments: Int64Array) -> Int64Array:
        """Return the units of each modality. Shape (modalities, n)."""
        rows: Int64Array = fragments[len(fragments) - len(self.units_max) :]
        return rows

    @cached_property
    def row_units(self) -> dict[str, int]:
        """Most units of a row by modality."""
        return dict(zip(self.modalities, self.units_max, strict=True))

    def units_by_modality(self, fragments: Int64Array) -> dict[str, Int64Array]:
        """Return the units of each fragment by modality. Shape (n,) each."""
        return dict(zip(self.modalities, self.units(fragments), strict=True))

    def fit_state(self, state: StreamState, rule: BatchRule) -> StreamState:
        """Return a state whose carried fragments have these rows.

        What a carried fragment holds is known as a whole only, not where in it: where rows became
        too small for it, it cannot be cut.

        Raises:
            StateMismatchError: They have other rows, or do not fit into rows of the batch.
        """
        columns = (*CARRIED_COLUMNS, *self.names)
        carried = state.carried
        if not carried.shape[1]:
            carried = np.zeros((len(columns), 0), np.int64)
        elif state.carried_columns != columns:
            raise StateMismatchError(
                f"the state carries {', '.join(state.carried_columns)} of its fragments, the job "
                f"needs {', '.join(columns)}; load it into the job that wrote it"
            )
        if self.has_groups and carried.shape[1]:
            held = group_sums(self, carried, rule.segment_multiple)
            self._check_carried(held, rule, "group")
        elif self.has_trained:
            ones = np.ones(carried.shape[1], np.int64)
            self._check_carried(
                np.stack((carried[LENGTH], ones, *self.units(carried))), rule, "fragment"
            )
        return replace(state, carried=carried, carried_columns=columns)

    def _check_carried(self, held: Int64Array, rule: BatchRule, what: str) -> None:
        limits = (rule.row_tokens, rule.row_segments_max, *self.units_max)
        names = ("tokens", "segments", *(f"{modality} units" for modality in self.modalities))
        for name, limit, values in zip(names, limits, held, strict=True):
            most = int(values.max(initial=0))
            if most > limit:
                raise StateMismatchError(
                    f"the state carries a {what} of {most} {name}, a row of the job holds "
                    f"{limit}, and fragments with masks or media, and groups, cannot be cut again; "
                    "raise batch.row_tokens, batch.row_segments_max or the media's row_units_max to "
                    "what they were",
                    seen=most,
                    limit=limit,
                )


def group_sums(extras: ExtraRows, fragments: Int64Array, multiple: int) -> Int64Array:
    """Return the places, segments and units of each modality of every group, at least one.

    Args:
        extras: Those of the job.
        fragments: With the row LENGTH, and the extra rows last.
        multiple: What the places of a segment are a multiple of.

    Returns:
        Shape (2 + modalities, groups).
    """
    starts = group_starts(extras.follow(fragments))
    places = places_of(fragments[LENGTH], multiple)
    rows = np.stack((places, np.ones_like(places), *extras.units(fragments)))
    sums: Int64Array = np.add.reduceat(rows, starts, axis=1)
    return sums


NO_EXTRA_ROWS = ExtraRows()
