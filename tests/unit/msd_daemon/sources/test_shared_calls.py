"""A user's process is shared by the loaders of a worker, and ends with the last of them."""

from federation.model.recipe import UserCall
from msd_daemon.sources.shared_calls import SharedCalls

ONE, OTHER = (UserCall(f"mine:{name}", "/python", "/copy", name) for name in ("one", "other"))


class Caller:
    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


def test_loaders_of_one_function_have_one_process_until_the_last_closes() -> None:
    calls = SharedCalls(lambda _: Caller())
    (first, close_first), (second, close_second) = calls.open(ONE), calls.open(ONE)
    other, _ = calls.open(OTHER)
    assert first is second
    assert first is not other
    close_first()
    close_first()
    assert first.closed == 0
    close_second()
    assert (first.closed, other.closed) == (1, 0)
    again, _ = calls.open(ONE)
    assert again is not first
