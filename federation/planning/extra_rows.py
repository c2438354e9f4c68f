"""What the fragments of some jobs have beside their places: further rows of every matrix of them.

They are the last rows of the matrices of known, drawn and carried fragments and of segments alike,
so they are found by negative number, whatever stands above them. A job whose every token is trained
and whose every record is one sample has none.

- `begins`: 1 where a fragment begins a sample, else 0. In jobs with a source whose records may
  become several samples; in others a sample begins where its record does.
- `trained`: 2 * trained tokens + 1 if the first token is trained. In jobs with masks.
- `units_image` and so on: units (patches, frames) of each modality of the job.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from federation.model.job import ResolvedJob, Unit
from federation.planning.step_pool import LENGTH, OFFSET
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

    @staticmethod
    def of(job: ResolvedJob) -> ExtraRows:
        """Return those of a job."""
        recipes = [source.recipe for source in job.sources if source.recipe is not None]
        return ExtraRows(
            any(recipe.transform is not None for recipe in recipes),
            job.has_masks,
            tuple(rule.modality for rule in job.media),
            tuple(rule.row_units_max for rule in job.media),
        )

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names in their order, as states have them."""
        units = tuple(f"units_{modality}" for modality in self.modalities)
        return ("begins",) * self.has_begins + ("trained",) * self.has_trained + units

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

    def fit_state(self, state: StreamState, row_tokens: int) -> StreamState:
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
        if self.has_trained:
            limits = (row_tokens, *self.units_max)
            held = (carried[LENGTH], *self.units(carried))
            names = ("tokens", *(f"{modality} units" for modality in self.modalities))
            for name, limit, values in zip(names, limits, held, strict=True):
                most = int(values.max(initial=0))
                if most > limit:
                    raise StateMismatchError(
                        f"the state carries a fragment of {most} {name}, a row of the job holds "
                        f"{limit}, and fragments with masks or media cannot be cut again; raise "
                        "batch.row_tokens or the media's row_units_max to what they were",
                        seen=most,
                        limit=limit,
                    )
        return replace(state, carried=carried, carried_columns=columns)


NO_EXTRA_ROWS = ExtraRows()
