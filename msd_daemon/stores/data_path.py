"""What readers ask of the folder of a data set, be it on this machine or in a store."""

from __future__ import annotations

from typing import Protocol, Self, TypeVar

P = TypeVar("P", bound="DataPath")


class DataPath(Protocol):
    """A file or folder, local (`Path`) or in a store (`RemotePath`); `str()` opens it."""

    @property
    def parent(self) -> Self:
        """The folder that it lies in."""
        ...

    @property
    def name(self) -> str:
        """Last part."""
        ...

    def is_file(self) -> bool:
        """Tell whether there is a file or an object here."""
        ...

    def __truediv__(self, name: str, /) -> Self:
        """Return a place below."""
        ...
