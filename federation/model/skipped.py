"""Steps that were left out, as a daemon is told of them: what was passed, and what is carried on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from msd_client.contract.errors import ProtocolError
from msd_client.contract.state import StateDelta

_CARRIED_OUT_COLUMNS = 4


@dataclass(frozen=True, eq=False)
class SkippedSteps:
    """All plan steps that were left out since the last served one. Has no row, only an effect."""

    plan_step: int
    """The plan step behind them."""
    delta: StateDelta
    """From the state behind the last served step to the one behind these."""
    carried_out_columns: npt.NDArray[np.int64]
    """(source, block_key, index, offset) of fragments that left the carried pool. Shape (4, o)."""

    def carried_in(self) -> list[tuple[int, int, int, int, int]]:
        """Return the fragments that joined: (source, block_key, index, offset, length)."""
        return list(zip(*self.delta.carried_in[:5].tolist(), strict=True))

    def carried_out(self) -> list[tuple[int, int, int, int]]:
        """Return the fragments that left: (source, block_key, index, offset)."""
        return list(zip(*self.carried_out_columns.tolist(), strict=True))

    def cursors_after(self) -> list[tuple[int, int, int, int]]:
        """Return what the draw passed: (source, block_key, index, offset) of touched sources."""
        return self.delta.cursors()

    def encode(self) -> tuple[bytes, bytes]:
        """Return the frames that `decode` takes."""
        columns = self.carried_out_columns.astype("<i8", copy=False)
        return self.delta.encode(), columns.tobytes()

    @staticmethod
    def decode(plan_step: int, frames: Sequence[bytes | memoryview]) -> SkippedSteps:
        """Return what `encode` wrote.

        Raises:
            ProtocolError: The frames are not these.
        """
        try:
            delta, columns = frames
            carried_out = np.frombuffer(columns, "<i8").reshape(_CARRIED_OUT_COLUMNS, -1)
        except ValueError as error:
            raise ProtocolError(f"skipped steps are malformed: {error}") from error
        return SkippedSteps(plan_step, StateDelta.decode(bytes(delta)), carried_out)
