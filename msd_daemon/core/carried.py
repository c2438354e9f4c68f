"""Where the fragments lie that were drawn and wait for a row, by the record that they are of. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from msd_daemon.core.chunk import Located

RecordKey = tuple[int, int, int]
"""(source index, block key, index)."""
CarriedKey = tuple[int, int, int, int]
"""(source index, block key, index, offset) of a carried fragment."""


class CarriedFragments:
    """Places of carried fragments; whoever adds one holds its pin on the chunk."""

    def __init__(self) -> None:
        self._records: dict[RecordKey, dict[int, tuple[Located, int]]] = {}
        """By offset: where it lies and its tokens."""

    def __bool__(self) -> bool:
        return bool(self._records)

    def has_record(self, record: RecordKey) -> bool:
        """Return True where a fragment of the record waits."""
        return record in self._records

    def __contains__(self, key: CarriedKey) -> bool:
        return key[3] in self._records.get(key[:3], ())

    def __iter__(self) -> Iterator[tuple[CarriedKey, Located, int]]:
        """Give (key, place, tokens) of every fragment."""
        for record, fragments in self._records.items():
            for offset, (located, length) in fragments.items():
                yield (*record, offset), located, length

    def put(self, key: CarriedKey, located: Located, length: int) -> None:
        """Note a fragment of `length` tokens."""
        self._records.setdefault(key[:3], {})[key[3]] = (located, length)

    def move(self, key: CarriedKey, located: Located) -> None:
        """A fragment lies elsewhere now."""
        fragments = self._records[key[:3]]
        fragments[key[3]] = (located, fragments[key[3]][1])

    def pop(self, key: CarriedKey) -> Located:
        """Forget a fragment; return where it lay."""
        fragments = self._records[key[:3]]
        located, _ = fragments.pop(key[3])
        if not fragments:
            del self._records[key[:3]]
        return located

    def find(self, record: RecordKey, offset: int, length: int) -> Located | None:
        """Return where `length` tokens of a record lie, from its token `offset` on.

        A plan may place a part of a carried fragment (of a concatenation, or in shorter rows), or
        more than it: the rest of its document behind it, which then lies where it was read.
        """
        fragments = self._records.get(record)
        if fragments is None:
            return None
        exact = fragments.get(offset)
        if exact is not None and exact[1] >= length:
            return exact[0]
        end = offset + length
        for start, (located, size) in fragments.items():
            if start < offset and end <= start + size:
                return located
        return None
