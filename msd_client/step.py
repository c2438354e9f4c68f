"""One optimizer step of one rank: its numbers, known before its first microbatch, and its batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

from msd_client.batch import Batch
from msd_client.contract.errors import UsageError
from msd_client.process_bound import ProcessBound


class BatchGiver(Protocol):
    """Where a step's microbatches come from."""

    sources: tuple[str, ...]
    source_loss_weights: tuple[float, ...]
    averaging_ranks: int

    def next_batch(self, step: Step) -> Batch:
        """Return the next microbatch of `step`; waits for it."""

    def report_step(self, number: int, seconds: float) -> bool:
        """Report how long this rank computed for a step; never waits."""


class Step(ProcessBound):
    """One optimizer step: iterate it once for this rank's microbatches.

    Counts are those of the whole step over all ranks; context-parallel and tensor-parallel peers
    count once.

    Attributes:
        number: The trainer's step number, dense.
        plan_step: The planner's number of it (differs after skips).
        valid_tokens: Labels that are trained.
        valid_segments: Segments with a trained label.
        loss_weight: Sum of the loss weights of the trained labels; `valid_tokens` where the job has
            no weights.
        microbatches: This rank's microbatches.
        stats: wait seconds of this rank, shares wanted and realised, imbalance, fill, and lists by
            source in the order of `loader.sources`; where media may be encoded on other ranks also
            encoder_imbalance.
    """

    def __init__(self, loader: BatchGiver, meta: Mapping[str, Any]) -> None:
        self._loader = loader
        self.number: int = meta["step"]
        self.plan_step: int = meta["plan_step"]
        self.valid_tokens: int = meta["valid_tokens"]
        self.valid_segments: int = meta["valid_segments"]
        self.loss_weight: float = meta["loss_weight"]
        self.microbatches: int = meta["microbatches"]
        self.stats: dict[str, Any] = dict(meta["stats"])
        self.stats["wait_s"] = 0.0
        self._given = 0
        self._device: tuple[Any, bool] | None = None

    @property
    def source_valid_tokens(self) -> dict[str, int]:
        """Trained labels by source; sources without any are left out."""
        return self._by_source(self.stats["valid_tokens"])

    @property
    def source_valid_segments(self) -> dict[str, int]:
        """Segments with a trained label by source."""
        return self._by_source(self.stats["valid_segments"])

    @property
    def source_loss_weight(self) -> dict[str, float]:
        """Sums of loss weights by source."""
        weights = self._loader.source_loss_weights or (1.0,) * len(self._loader.sources)
        counts = self.stats["valid_tokens"]
        return self._by_source([w * n for w, n in zip(weights, counts, strict=True)])

    def _by_source(self, values: Sequence[Any]) -> dict[str, Any]:
        pairs = zip(self._loader.sources, values, strict=True)
        return {name: value for name, value in pairs if value}

    def to(self, device: Any, *, non_blocking: bool = True) -> Step:
        """Give every microbatch on this device."""
        self._device = (device, non_blocking)
        return self

    def loss_scale(self, reduction: Literal["mean", "sum"] = "mean") -> float:
        """Return the factor for the summed loss of a microbatch of this rank.

        The loss of a microbatch is summed over its trained labels, each times its loss weight where
        the job has them. `mean`: dp_count * cp_count / loss_weight, so that gradients averaged over
        data-parallel and context-parallel ranks equal the mean over every trained label of the
        step. `sum`: dp_count * cp_count.

        Raises:
            UsageError: The reduction is neither.
        """
        if reduction not in ("mean", "sum"):
            raise UsageError(f"loss_scale({reduction!r}): write 'mean' or 'sum'")
        factor = float(self._loader.averaging_ranks)
        return factor / self.loss_weight if reduction == "mean" else factor

    def report(self, *, compute_s: float) -> bool:
        """Report how long this rank computed for the step; see `loader.report_step`.

        Args:
            compute_s: Seconds of the forward and backward passes, without what was waited for.

        Returns:
            True where the report went out: the job has a `calibration` and the daemon reads.

        Raises:
            UsageError: It is no number above 0.
        """
        return self._loader.report_step(self.number, compute_s)

    def __len__(self) -> int:
        return self.microbatches

    def __iter__(self) -> Iterator[Batch]:
        """Give this rank's microbatches that were not given out yet.

        Raises:
            UsageError: All of them were, or the stream went on without this step.
            MsdError: The stream failed.
        """
        if self._given and self.is_complete:
            raise UsageError(
                f"all {self.microbatches} microbatches of step {self.number} were given out: keep "
                "the batches with clone() to go over them twice",
                step=self.number,
            )
        while self._given < self.microbatches:
            batch = self._loader.next_batch(self)
            self._given += 1
            if self._device is not None:
                device, non_blocking = self._device
                batch = batch.to(device, non_blocking=non_blocking)
            yield batch
            del batch

    def __repr__(self) -> str:
        return (
            f"Step({self.number}: {self._given} of {self.microbatches} microbatches given out, "
            f"{self.valid_tokens} valid tokens)"
        )

    @property
    def left(self) -> int:
        """Microbatches that were not given out yet."""
        return self.microbatches - self._given

    @property
    def is_complete(self) -> bool:
        """True once every microbatch was given out."""
        return self._given == self.microbatches

    def skip_rest(self) -> None:
        """Take the microbatches that the trainer left, so that the next step can come."""
        while self._given < self.microbatches:
            self._loader.next_batch(self).release()
            self._given += 1
