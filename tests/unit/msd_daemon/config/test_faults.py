"""How a fault of a file is shown."""

from __future__ import annotations

from msd_daemon.config.faults import VALUE_CHARACTERS_MAX, Fault


def test_of_a_long_value_both_ends_are_shown() -> None:
    path = "/data/" + "folder/" * 40 + "c.jsonl"
    line = Fault("sources.web.paths", path, "not a regular file", "mend or remove it").line()
    shown = line.split(": ")[1]
    assert len(shown) == VALUE_CHARACTERS_MAX
    assert shown.startswith('"/data/')
    assert shown.endswith('c.jsonl"')
