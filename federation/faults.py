"""What a planner makes of its own faults: an error that one job is told, and the others go on."""

from __future__ import annotations

import traceback
from collections.abc import Callable

from msd_client.contract.errors import InternalError, MsdError


def failure_of(action: Callable[[], None]) -> MsdError | None:
    """Do something for a job; return what failed, or None."""
    try:
        action()
    except MsdError as error:
        return error
    except (
        ArithmeticError,
        LookupError,
        ValueError,
        TypeError,
        AssertionError,
        OSError,
    ) as error:
        traceback.print_exc()
        return InternalError(f"planner: {type(error).__name__}: {error}")
    return None
