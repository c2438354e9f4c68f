"""Numbers as people write them: exact, and refused where they mean two things."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msd_daemon.config.units import (
    BINARY,
    COUNT_MAX,
    DECIMAL,
    format_bytes,
    parse_bytes,
    parse_count,
    parse_schedule_key,
)


@pytest.mark.parametrize(
    ("written", "count"),
    [
        (768, 768),
        ("768", 768),
        ("1_000", 1000),
        ("4M", 4_000_000),
        ("1.8T", 1_800_000_000_000),
        ("250 B", 250_000_000_000),
        ("8Ki", 8192),
        ("1.5Mi", 3 << 19),
        (32.0, 32),
    ],
)
def test_counts_are_exact(written, count):
    assert parse_count(written) == count


@pytest.mark.parametrize("written", ["8K", "8k", "0.5k"])
def test_k_is_refused_with_both_meanings(written):
    with pytest.raises(ValueError, match=r"1000 to some and 1024 to others; .*Ki"):
        parse_count(written)
    with pytest.raises(ValueError, match="1000 to some"):
        parse_bytes(written)


@pytest.mark.parametrize(
    "written",
    [
        "",
        "x",
        "-4",
        -4,
        "1e3",
        "4MB",
        "0x10",
        1.5,
        "1.0000001M",
        float("nan"),
        float("inf"),
        True,
        None,
        [],
        "9" * 39,
        "١٢",
    ],
)
def test_what_is_no_whole_count_is_refused_with_a_remedy(written):
    with pytest.raises(ValueError, match="; write"):
        parse_count(written)


def test_bytes_take_binary_suffixes_only():
    assert parse_bytes("512Ki") == 512 * 1024
    with pytest.raises(ValueError, match=r"unknown suffix 'M'; .*Mi"):
        parse_bytes("4M")


def test_bare_schedule_keys_are_steps_and_suffixed_ones_tokens():
    assert parse_schedule_key("1000") == (1000, "steps")
    assert parse_schedule_key("1.8T") == (1_800_000_000_000, "tokens")


@pytest.mark.parametrize("key", ["8Ki", "5K", "web", "-1", "", "1.5"])
def test_other_schedule_keys_are_refused(key):
    with pytest.raises(ValueError, match="; write"):
        parse_schedule_key(key)


@given(st.integers(0, 1 << 30), st.sampled_from(sorted(DECIMAL | BINARY)))
def test_suffix_multiplies_exactly(number, suffix):
    factor = (DECIMAL | BINARY)[suffix]
    if number * factor <= COUNT_MAX:
        assert parse_count(f"{number}{suffix}") == number * factor
    else:
        with pytest.raises(ValueError, match="outside"):
            parse_count(f"{number}{suffix}")


def test_sizes_read_well():
    assert [format_bytes(n) for n in (0, 1023, 1024, 3 << 29)] == [
        "0 B",
        "1023 B",
        "1 KiB",
        "1.5 GiB",
    ]
