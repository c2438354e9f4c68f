"""How an oracle's step packs its fragments into rows: plain loops, see `tests.support.oracle`."""

from __future__ import annotations

from dataclasses import dataclass

from tests.support.oracle_order import Document

CARRIED_PART = 4


@dataclass(eq=False)
class Fragment:
    """A drawn piece of a document."""

    source: int
    epoch: int
    document: Document
    offset: int
    length: int
    drawn_step: int = -1
    origin: Fragment | None = None
    """The carried fragment that this piece was cut from, where rows became shorter."""

    def is_of(self, other: Fragment) -> bool:
        mine = (self.source, self.epoch, self.document.number)
        return mine == (other.source, other.epoch, other.document.number)


def places_of(length: int, multiple: int) -> int:
    """Return the places that a fragment of so many tokens takes."""
    return -(-length // multiple) * multiple


@dataclass(frozen=True)
class Packer:
    """Packs the pool of one step."""

    packing: str
    rows: int
    row_tokens: int
    multiple: int
    """Places of a segment are a multiple of it."""
    segments_max: int
    """Of a row."""
    fillers: int = 0
    """So many fragments at the pool's end come from behind the end of their sources."""
    is_ending: bool = False
    """True where the draw came to the stream's end."""

    def pack(
        self, pool: list[Fragment], carried_count: int, left: int | None
    ) -> tuple[list[list[Fragment]], list[Fragment]]:
        """Return the rows of a pool, and what is left of it.

        Args:
            pool: Fragments, carried ones first; where rows are concatenated, they are cut.
            carried_count: So many are carried.
            left: Tokens up to the end of the job, where that is near.
        """
        if self.packing in ("concat", "varlen"):
            return self._in_order(pool, carried_count, left)
        usable = len(pool)
        if left is not None:
            through = 0
            for number, fragment in enumerate(pool):
                through += fragment.length
                if through >= left:
                    usable = number + 1
                    break
        row_of = dict.fromkeys(range(len(pool)), -1)
        if self.packing == "padded":
            row_of |= {place: place for place in range(min(usable, self.rows))}
        else:
            row_of |= self._best_fit(pool[:usable], min(carried_count, usable))
            self._take_back(pool, carried_count, row_of)
            if self.packing == "best_fit_even":
                even = dict.fromkeys(range(len(pool)), -1)
                even |= self._even_fit(pool[:usable], min(carried_count, usable))
                self._take_back(pool, carried_count, even)
                is_last = self.is_ending or self.fillers > 0
                is_last |= left is not None and left <= self.rows * self.row_tokens
                own = range(min(usable, len(pool) - self.fillers))
                if self._is_as_good(pool, carried_count, own, even, row_of, is_last):
                    row_of = even
        rows: list[list[Fragment]] = [[] for _ in range(self.rows)]
        for place, fragment in enumerate(pool):
            if row_of[place] >= 0:
                rows[row_of[place]].append(fragment)
        return rows, [fragment for place, fragment in enumerate(pool) if row_of[place] < 0]

    def _take_back(self, pool: list[Fragment], carried_count: int, row_of: dict[int, int]) -> None:
        for place, fragment in enumerate(pool):
            may_go_on = fragment.length == self.row_tokens or place < carried_count
            if row_of[place] < 0 and may_go_on:
                for other, later in enumerate(pool):
                    if later.is_of(fragment) and later.offset > fragment.offset:
                        row_of[other] = -1

    def _is_as_good(
        self,
        pool: list[Fragment],
        carried_count: int,
        own: range,
        even: dict[int, int],
        best: dict[int, int],
        is_last: bool,
    ) -> bool:
        missed = [n for n in own if best[n] >= 0 and even[n] < 0]
        if (is_last and missed) or any(n < carried_count for n in missed):
            return False
        held, there = (sum(pool[n].length for n in own if rows[n] >= 0) for rows in (best, even))
        used, wanted = (len({rows[n] for n in own} - {-1}) for rows in (even, best))
        return (held - there) * 64 <= held and used >= wanted

    def _even_fit(self, pool: list[Fragment], carried_count: int) -> dict[int, int]:
        """Long fragments go to the row with the least tokens, the others as by best fit.

        Jobs of this oracle have no model, so a fragment costs its tokens.
        """
        order = self._fit_order(pool, carried_count)
        own = order[: len(order) - self.fillers]
        left = sum(self._places(pool[n].length) for n in own)
        free, room = [self.row_tokens] * self.rows, [self.segments_max] * self.rows
        loads = [0] * self.rows
        found: dict[int, int] = {}
        for place in sorted(own, key=lambda n: -pool[n].length):
            size = self._places(pool[place].length)
            left -= size
            if size * 32 <= self.row_tokens or left * 8 < self.row_tokens * self.rows:
                break
            fitting = [row for row in range(self.rows) if room[row] and free[row] >= size]
            found[place] = min(fitting, key=lambda row: (loads[row], row), default=-1)
            if fitting:
                row = found[place]
                loads[row] += pool[place].length
                free[row] -= size
                room[row] -= 1
        return found | self._fill(pool, [n for n in order if n not in found], free, room)

    def _fit_order(self, pool: list[Fragment], carried_count: int) -> list[int]:
        ranks = [fragment.length for fragment in pool]
        for place, fragment in enumerate(pool[:carried_count]):
            # Cut for rows of another length, a part may be shorter than a later one.
            ranks[place] = max(
                other.length
                for other in pool[place:carried_count]
                if other.is_of(fragment) and other.drawn_step == fragment.drawn_step
            )
        return sorted(range(len(pool)), key=lambda n: (pool[n].drawn_step, -ranks[n]))

    def _best_fit(self, pool: list[Fragment], carried_count: int) -> dict[int, int]:
        """Return the row of each place of the pool, -1 where no row holds it."""
        order = self._fit_order(pool, carried_count)
        free = [self.row_tokens] * self.rows
        carried, drawn = order[:carried_count], order[carried_count:]
        full = [self.segments_max] * self.rows
        if not carried:
            return self._fill(pool, drawn, free, full)
        tokens = sum(self._places(pool[n].length) for n in carried)
        fillers = drawn[len(drawn) - self.fillers :]
        full_count = sum(
            self._places(pool[n].length) == self.row_tokens for n in drawn if n not in fillers
        )
        needed = max(5 * tokens // (4 * self.row_tokens), len(carried) // self.segments_max) + 1
        usable = max(self.rows - full_count, min(needed, self.rows))
        part = max(1, self.segments_max // CARRIED_PART, 5 * len(carried) // (4 * usable))
        part = min(part, self.segments_max)
        room = [part if row < usable else 0 for row in range(self.rows)]
        found = self._fill(pool, carried, free, room)
        room = [
            room[row] + self.segments_max - part if row < usable else self.segments_max
            for row in range(self.rows)
        ]
        found |= self._fill(pool, [n for n in carried if found[n] < 0], free, room)
        return found | self._fill(pool, drawn, free, room)

    def _fill(
        self, pool: list[Fragment], places: list[int], free: list[int], room: list[int]
    ) -> dict[int, int]:
        found = {}
        for place in places:
            length = self._places(pool[place].length)
            fitting = [
                (free[row], row) for row in range(self.rows) if room[row] and free[row] >= length
            ]
            found[place] = -1
            if fitting:
                _, row = min(fitting)
                found[place] = row
                free[row] -= length
                room[row] -= 1
        return found

    def _in_order(
        self, pool: list[Fragment], carried_count: int, left: int | None
    ) -> tuple[list[list[Fragment]], list[Fragment]]:
        if self.packing == "varlen":
            return [[fragment] for fragment in pool], []
        return self._concat(pool, carried_count, left)

    def _concat(
        self, pool: list[Fragment], carried_count: int, left: int | None
    ) -> tuple[list[list[Fragment]], list[Fragment]]:
        space = self.rows * self.row_tokens
        if left is not None:
            space = min(space, left)
        rows: list[list[Fragment]] = [[] for _ in range(self.rows)]
        rest: list[Fragment] = []
        place = 0
        for number, fragment in enumerate(pool):
            done = 0
            while done < fragment.length and place < space:
                row = rows[place // self.row_tokens]
                room = self.row_tokens - place % self.row_tokens
                taken = min(fragment.length - done, room, space - place)
                offset = fragment.offset + done
                last = row[-1] if row else None
                touches = last is not None and last.offset + last.length == offset
                is_drawn = number >= carried_count
                if last is not None and touches and last.is_of(fragment) and is_drawn:
                    last.length += taken
                else:
                    row.append(
                        Fragment(fragment.source, fragment.epoch, fragment.document, offset, taken)
                    )
                done += taken
                place += taken
            if done < fragment.length:
                fragment.offset += done
                fragment.length -= done
                rest.append(fragment)
        return rows, rest

    def _places(self, length: int) -> int:
        return places_of(length, self.multiple)
