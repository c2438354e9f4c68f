"""Values of arguments in errors, whatever they are."""

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
