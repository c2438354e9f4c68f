"""What belongs to one process: it holds a connection or a place in a stream, no copy could go on."""

from __future__ import annotations

from typing import NoReturn

from msd_client.contract.errors import UsageError


class ProcessBound:
    """Refuses to be pickled or copied, and says what to do."""

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            f"a {type(self).__name__} is of this process and can't be pickled or copied: send "
            "clones of batches (batch.clone()), or call msd_client.connect() in the other process"
        )
