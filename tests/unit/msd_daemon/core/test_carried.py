"""Carried fragments are found by what a plan wants of their record."""

from __future__ import annotations

import pytest

from msd_daemon.core.allocator import Piece
from msd_daemon.core.carried import CarriedFragments
from msd_daemon.core.chunk import Chunk, Located

RECORD = (0, 7, 3)


def place(number):
    return Located(Chunk(Piece(0, 4096), 0, 0, 7, number, 1, 100), 0, 0)


def test_a_fragment_is_found_whole_in_part_and_not_beyond_its_end():
    carried = CarriedFragments()
    assert not carried
    first, second = place(0), place(1)
    carried.put((*RECORD, 100), first, 50)
    carried.put((*RECORD, 200), second, 30)
    assert carried
    assert carried.has_record(RECORD)
    assert not carried.has_record((0, 7, 4))
    assert carried.find(RECORD, 100, 50) is first
    assert carried.find(RECORD, 100, 20) is first
    assert carried.find(RECORD, 120, 30) is first
    assert carried.find(RECORD, 210, 20) is second
    assert carried.find(RECORD, 120, 31) is None
    assert carried.find(RECORD, 100, 51) is None  # it goes on where the rest was read
    assert carried.find(RECORD, 90, 20) is None
    assert carried.find((1, 7, 3), 100, 50) is None


def test_fragments_move_leave_and_are_listed():
    carried = CarriedFragments()
    first, moved = place(0), place(1)
    carried.put((*RECORD, 100), first, 50)
    carried.move((*RECORD, 100), moved)
    assert list(carried) == [((*RECORD, 100), moved, 50)]
    assert (*RECORD, 100) in carried
    assert (*RECORD, 101) not in carried
    assert carried.pop((*RECORD, 100)) is moved
    assert not carried
    with pytest.raises(KeyError):
        carried.pop((*RECORD, 100))
