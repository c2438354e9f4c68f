"""Bytes of a ring: what is written is read again, and nothing else is believed."""

from __future__ import annotations

import itertools

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msd_client.contract import ring_layout as rl
from msd_client.contract.errors import BudgetError, SegmentCorruptError

FIELDS = (
    rl.TocField("tokens", "int32", (2, 4), 0, 32),
    rl.TocField("cu_seqlens", "int32", (3,), 128, 12),
)


def slot_bytes(sequence: int = 7, generation: int = 5, payload: int = 140) -> bytearray:
    toc = rl.encode_table(FIELDS, {"rows": 2})
    slot = bytearray(8192)
    header = rl.encode_closed_header(
        generation=generation,
        sequence=sequence,
        step=3,
        microbatch=1,
        toc=toc,
        payload_bytes=payload,
    )
    slot[: len(header)] = header
    slot[rl.SLOT_HEADER_BYTES : rl.SLOT_HEADER_BYTES + len(toc)] = toc
    slot[rl.SEQUENCE_END_OFFSET : rl.SLOT_HEADER_BYTES] = rl.encode_sequence_end(sequence)
    return slot


def test_a_closed_slot_says_what_was_announced() -> None:
    header, table = rl.check_slot(slot_bytes(), generation=5, sequence=7, payload_bytes=140)
    assert (header.step, header.microbatch, header.payload_bytes) == (3, 1, 140)
    assert table.fields == FIELDS
    assert table.scalars == {"rows": 2}


@pytest.mark.parametrize(
    ("announced", "named"),
    [
        ({"generation": 6}, "generation 5 instead of 6"),
        ({"sequence": 8}, "sequence 7 instead of 8"),
        ({"payload_bytes": 12}, "payload bytes 140 instead of 12"),
    ],
)
def test_another_slot_than_announced_is_refused(announced: dict[str, int], named: str) -> None:
    right = {"generation": 5, "sequence": 7, "payload_bytes": 140}
    with pytest.raises(SegmentCorruptError, match=named):
        rl.check_slot(slot_bytes(), **(right | announced))


def test_a_slot_that_was_not_closed_is_refused() -> None:
    slot = slot_bytes()
    slot[rl.SEQUENCE_END_OFFSET : rl.SLOT_HEADER_BYTES] = rl.encode_sequence_end(rl.SEQUENCE_OPEN)
    with pytest.raises(SegmentCorruptError, match="closing sequence"):
        rl.check_slot(slot, generation=5, sequence=7, payload_bytes=140)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, rl.SLOT_HEADER_BYTES + 60), st.integers(0, 255))
def test_damage_in_header_or_table_is_never_believed(place: int, value: int) -> None:
    slot = slot_bytes()
    before = slot[place]
    slot[place] = value
    try:
        _, table = rl.check_slot(slot, generation=5, sequence=7, payload_bytes=140)
    except SegmentCorruptError:
        assert before != value
    else:
        assert table.fields == FIELDS


@pytest.mark.parametrize(
    "toc",
    [
        b"",
        b"\xc1",
        msgpack.packb(7),
        msgpack.packb([[], {}, 1]),
        msgpack.packb([[["a", "int32", [2], 0]], {}]),
        msgpack.packb([[["a", "object", [2], 0, 8]], {}]),
        msgpack.packb([[["a", "int32", [2], 0, 9]], {}]),
        msgpack.packb([[["a", "int32", [-2], 0, -8]], {}]),
        msgpack.packb([[["a", "int32", [2], 2, 8]], {}]),
        msgpack.packb([[["a", "int32", [2], 96, 8]], {}]),
        msgpack.packb([[["a", "int32", [2.0], 0, 8]], {}]),
        msgpack.packb([[[7, "int32", [2], 0, 8]], {}]),
        msgpack.packb([[["a", ["int32"], [2], 0, 8]], {}]),
        msgpack.packb([[], {"a": "b"}]),
        msgpack.packb([[], []]),
        b"\x92" * 2000,
    ],
)
def test_field_tables_out_of_bounds_are_refused(toc: bytes) -> None:
    with pytest.raises(SegmentCorruptError):
        rl.decode_table(toc, 100)


def test_a_table_beyond_its_page_is_refused() -> None:
    many = [rl.TocField(f"user_field_{n}", "int32", (1,), 0, 4) for n in range(400)]
    with pytest.raises(BudgetError, match="4032"):
        rl.encode_table(many, {})


@given(st.integers(1, 64 << 20), st.integers(1, rl.SLOTS_MAX))
def test_slots_are_disjoint_inside_the_ring_and_survive_both_wires(
    payload: int, slots: int
) -> None:
    layout = rl.RingLayout.for_payload(payload, slots, ring_id=3, generation=2**63)
    starts = [layout.slot_offset(slot) for slot in range(slots)]
    assert starts[0] >= rl.PAGE_BYTES
    assert all(b - a == layout.stride_bytes for a, b in itertools.pairwise(starts))
    assert starts[-1] + layout.stride_bytes <= layout.ring_bytes
    assert layout.payload_bytes_max >= payload
    # Rounding never costs more than an eighth, but for the pages of tiny slots.
    assert layout.stride_bytes <= max((payload + 4096) * 9 // 8, payload + 2 * 4096)
    assert rl.RingLayout.decode(layout.encode()) == layout
    block = rl.encode_superblock(
        layout, created_ns=1, page_bytes=4096, daemon_pid=2, boot_id=b"boot"
    )
    assert rl.decode_superblock(block) == layout


@pytest.mark.parametrize("slots", [0, 65, -1])
def test_too_many_or_no_slots_are_refused(slots: int) -> None:
    with pytest.raises(BudgetError, match="allowed are 1 to 64"):
        rl.RingLayout.for_payload(100, slots, ring_id=0, generation=0)


@pytest.mark.parametrize("payload", [0, 4 << 30])
def test_a_slot_beyond_its_limit_is_refused(payload: int) -> None:
    with pytest.raises(BudgetError, match="at most"):
        rl.RingLayout.for_payload(payload, 4, ring_id=0, generation=0)


def test_a_slot_that_the_ring_lacks_is_refused() -> None:
    layout = rl.RingLayout.for_payload(100, 4, ring_id=0, generation=0)
    for slot in (-1, 4):
        with pytest.raises(SegmentCorruptError, match="slots 0 to 3"):
            layout.slot_offset(slot)


def test_damage_in_a_superblock_is_refused() -> None:
    layout = rl.RingLayout.for_payload(100, 4, ring_id=0, generation=9)
    block = bytearray(
        rl.encode_superblock(layout, created_ns=1, page_bytes=4096, daemon_pid=2, boot_id=b"")
    )
    for place in range(len(block)):
        damaged = bytearray(block)
        damaged[place] ^= 0x10
        with pytest.raises(SegmentCorruptError):
            rl.decode_superblock(damaged)
    with pytest.raises(SegmentCorruptError, match="needs"):
        rl.decode_superblock(block[:-1])


@pytest.mark.parametrize(
    ("key", "value"),
    [("slots", 65), ("slots", 5), ("stride_bytes", 5000), ("ring_bytes", 4096), ("slots", "4")],
)
def test_a_layout_that_does_not_add_up_is_refused(key: str, value: object) -> None:
    plain: dict[str, object] = dict(
        rl.RingLayout.for_payload(100, 4, ring_id=0, generation=0).encode()
    )
    plain[key] = value
    with pytest.raises(SegmentCorruptError):
        rl.RingLayout.decode(plain)


def test_short_headers_are_refused() -> None:
    with pytest.raises(SegmentCorruptError, match="64 bytes"):
        rl.decode_slot_header(bytes(63))
