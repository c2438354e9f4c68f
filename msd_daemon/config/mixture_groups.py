"""Groups of a mixture: weights inside weights become one weight a source, and each source's group.

A group that weighs 3 of 4 and holds web 2 and code 1 gives web 2 of 4 and code 1 of 4; where one of
them is dropped later, its weight stays in the group (federation.model.mixture.remaining_shares).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from msd_daemon.config.faults import Fault
from msd_daemon.config.job_file import SPREAD, GroupFile


def weighted_names(entries: dict[str, float | GroupFile]) -> Iterator[str]:
    """Yield the sources, and `*`, that have a weight above 0, in groups too."""
    for name, entry in entries.items():
        if isinstance(entry, GroupFile):
            if entry.weight > 0:
                yield from weighted_names(entry.of)
        elif entry > 0:
            yield name


class GroupFlattener:
    """Flattens the points of one mixture.

    Args:
        source_names: All sources of the job.
        faults: Receives what is wrong.
    """

    def __init__(self, source_names: tuple[str, ...], faults: list[Fault]) -> None:
        self._source_names = frozenset(source_names)
        self._faults = faults
        self._group_of: dict[str, str] = {}
        self._path_of: dict[str, str] = {}

    @property
    def groups(self) -> dict[str, str]:
        """Group of each source that is in one, as `text/rare`."""
        return {name: group for name, group in sorted(self._group_of.items()) if group}

    def flat(self, path: str, entries: dict[str, float | GroupFile]) -> dict[str, float]:
        """Return the weight of each source, and of `*`, that a point names.

        Args:
            path: Key path of the point.
            entries: As written.
        """
        found: dict[str, float] = {}
        self._add(path, entries, "", 1.0, found)
        return found

    def _add(
        self,
        path: str,
        entries: dict[str, float | GroupFile],
        group: str,
        scale: float,
        found: dict[str, float],
    ) -> None:
        for name, entry in entries.items():
            place = f"{path}.{name}"
            if isinstance(entry, GroupFile):
                self._add_group(place, name, entry, group, scale, found)
                continue
            if name in found:
                self._fault(place, entry, "the source stands twice at this point", "keep one")
            elif self._group_of.setdefault(name, group) != group and name != SPREAD:
                self._fault(
                    place,
                    entry,
                    f"{_where(group)}, {self._path_of[name]} puts it {_where(self._group_of[name])}",
                    "keep a source in one group at all points",
                )
            self._path_of.setdefault(name, place)
            found[name] = entry if scale == 1.0 else entry * scale

    def _add_group(
        self,
        place: str,
        name: str,
        entry: GroupFile,
        group: str,
        scale: float,
        found: dict[str, float],
    ) -> None:
        inside = [one.weight if isinstance(one, GroupFile) else one for one in entry.of.values()]
        total = sum(inside)  # not fsum, which raises where this gives inf
        if name in self._source_names or name == SPREAD or "/" in name:
            self._fault(place, name, "is no name for a group: a source has it", "write another")
        elif entry.weight > 0 and not 0 < total < math.inf:
            problem = "nothing inside has a weight that could be a part of it"
            self._fault(f"{place}.of", total, problem, "give one of them some weight")
        else:
            inner = f"{group}/{name}" if group else name
            part = entry.weight * scale / total if total else 0.0
            self._add(f"{place}.of", entry.of, inner, part, found)

    def _fault(self, path: str, value: object, problem: str, remedy: str) -> None:
        self._faults.append(Fault(path, value, problem, remedy))


def _where(group: str) -> str:
    return f"in group {group}" if group else "in no group"
