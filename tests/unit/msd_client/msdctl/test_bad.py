"""`msdctl bad`: texts are cut on a terminal alone."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from msd_client.msdctl import bad, main
from msd_client.msdctl.output import format_table

TEXT = "shard a.jsonl, line 3: not JSON, " + "x" * 200 + ": mend the line"
RECORD = {
    "source": "web", "status": "corrupt", "is_drawn": True, "shard": "a.jsonl",
    "place_name": "line", "place": 3, "key": "", "text": TEXT,
}  # fmt: skip


@pytest.mark.parametrize("is_terminal", [False, True])
def test_texts_are_cut_on_a_terminal_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_terminal: bool
) -> None:
    def answer(*_: object, **__: object) -> dict[str, Any]:
        return {"job": "gpt", "folder": "", "total": 1, "unlisted": {}, "records": [RECORD]}

    monkeypatch.setattr(bad, "call", answer)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    assert main.run(["bad", "gpt"]) == 0
    row = capsys.readouterr().out.splitlines()[1]
    assert row.endswith(TEXT[:157] + "..." if is_terminal else TEXT)


def test_a_table_holds_no_character_that_moves_a_cursor():
    table = format_table(("key", "n"), [("a\x1b[31m\nb\r", 1), ("ü ⟦x⟧ 日本", 2)])
    assert table.splitlines()[1].startswith("a\\x1b[31m\\nb\\r")
    assert "ü ⟦x⟧ 日本" in table
    assert len(table.splitlines()) == 3
