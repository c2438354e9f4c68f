"""Values of arguments in errors, whatever they are."""

import contextlib
from collections.abc import Iterable

from msd_client.contract.errors import StateMismatchError

VALUE_CHARACTERS_MAX = 80
"""Of a value shown in an error."""


def shown(value: object) -> str:
    """Return a value's text, cut where it is long, and its type."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - of any class, and of integers with more digits than Python writes
        return f"a value that can't be shown ({type(value).__name__})"
    if len(text) > VALUE_CHARACTERS_MAX:
        text = text[: VALUE_CHARACTERS_MAX - 3] + "..."
    return f"{text} ({type(value).__name__})"


def saved_bytes(value: object) -> bytes:
    """Return the bytes of a saved state, of whatever a checkpoint made of them.

    Raises:
        StateMismatchError: It holds no bytes.
    """
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, Iterable) and not isinstance(value, str):
        with contextlib.suppress(TypeError, ValueError):
            return bytes(value)  # an array or a tensor of uint8, a list of numbers below 256
    raise StateMismatchError(
        f'the state under "msd" is {shown(value)}: give the bytes that state_dict() returned'
    )
