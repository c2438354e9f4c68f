"""What is wrong with one record, on its way from where it is found to its status."""

from __future__ import annotations

from federation.model.chunk import RecordStatus


class RecordFault(Exception):  # noqa: N818 - a fault of the data, not of the program
    """A record that is no sample.

    Args:
        status: Its fate; not OK.
        message: Why, for people.
    """

    def __init__(self, status: RecordStatus, message: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.message = message


def missing(message: str) -> RecordFault:
    """Return the fault of a field that is absent, null or of the wrong type."""
    return RecordFault(RecordStatus.FIELD_MISSING, message)
