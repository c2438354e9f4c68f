"""The journal of one generation that is planned: its plans become durable here, before they leave.

A journal that turns out damaged makes room for a new one, begun behind the last durable step.
"""

from __future__ import annotations

from collections.abc import Sequence

from federation.journal import SNAPSHOT_EVERY_STEPS, Journal, StepRecord
from federation.journal_place import JournalPlace
from federation.messages import OpenJob
from federation.model.job import decode_job
from federation.model.plan import StepPlan
from msd_client.contract.codec import pack
from msd_client.contract.errors import JournalDamagedError
from msd_client.contract.state import StreamState


class PlanJournal:
    """Writes the steps of a generation.

    Args:
        place: Where the journal lies.
        file: The open journal; closed by `close`.
        generation: In it, which counts over all runs of the job.
        order: What the daemon asked for.
        term: Of this planner.
        durable: The state behind the last step that is journalled.
    """

    def __init__(
        self,
        place: JournalPlace,
        file: Journal,
        generation: int,
        order: OpenJob,
        term: int,
        durable: StreamState,
    ) -> None:
        self.file = file
        self.generation = generation
        self.durable = durable
        self._place = place
        self._order = order
        self._term = term

    @staticmethod
    def begin(
        place: JournalPlace, file: Journal, order: OpenJob, term: int, state: StreamState
    ) -> PlanJournal:
        """Open a generation at a state.

        Raises:
            JournalUnavailableError: The journal can't be written.
        """
        generation = _open_generation(file, order, state)
        return PlanJournal(place, file, generation, order, term, state)

    def write(self, plans: Sequence[StepPlan], state: StreamState) -> None:
        """Make consecutive plans durable, all or none.

        Args:
            plans: One or more.
            state: The state behind them.

        Raises:
            JournalUnavailableError: The journal can't be written now: try again.
        """
        records = [
            StepRecord(plan.step, plan.encoded_delta(), plan.stream_digest) for plan in plans
        ]
        is_due = state.step // SNAPSHOT_EVERY_STEPS > plans[0].step // SNAPSHOT_EVERY_STEPS
        snapshot = (state.step, state.encode()) if is_due else None
        try:
            if self.file.is_closed:  # a damaged one was moved away, and no new one could be made
                self.file = self._place.open_or_begin(self._order.steps_kept)
                self._begin_anew()
            self.file.append_steps(self.generation, self._term, records, snapshot)
        except JournalDamagedError as error:
            self.file = self._place.replace(self.file, error)
            self._begin_anew()
            self.file.append_steps(self.generation, self._term, records, snapshot)
        self.durable = state

    def append_fit(self, step: int, kind: str, body: bytes) -> None:
        """Make an event durable that is in no state.

        Raises:
            ResourceError: The journal can't be written.
        """
        self.file.append_event(self.generation, step, kind, body)

    def close(self) -> None:
        """Close the file."""
        self.file.close()

    def _begin_anew(self) -> None:
        """Go on in a new journal, from the last step that ranks may have."""
        self.generation = _open_generation(self.file, self._order, self.durable)


def _open_generation(journal: Journal, order: OpenJob, state: StreamState) -> int:
    job = decode_job(order.job)
    return journal.open_generation(
        state.step,
        state.encode(),
        state.event_number,
        job_digest=job.digest(),
        job=pack(order.job),
        mesh=pack({"mesh": order.mesh}),
    )
