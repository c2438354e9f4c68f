"""docs/sources.md: its job is one, and it names every format, status and key that there is."""

from __future__ import annotations

import re
from pathlib import Path

from federation.model.chunk import FAULT_STATUSES, RecordStatus
from msd_daemon.config.job_file import DefaultsFile, parse_job_file
from msd_daemon.config.recipe_file import RecipeFile
from msd_daemon.config.yaml_text import read_yaml
from msd_daemon.sources.formats import BUILT_IN

PAGE = (Path(__file__).parents[4] / "docs" / "sources.md").read_text(encoding="utf-8")
REST = "tokenizer: {bytes: true}\nbatch: {rows: 1, row_tokens: 64}\n"


def rows_of(head: str) -> dict[str, list[str]]:
    """Return the rows of a table, their cells by the first one."""
    table = PAGE[PAGE.index(head) :].split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.split(" | ")] for line in table]
    return {row[0].lstrip("| ").strip("`"): row for row in cells}


def test_examples_are_jobs() -> None:
    first, errors = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    parsed = parse_job_file(read_yaml(first + REST))
    assert [fault.line() for fault in parsed.faults] == []
    assert parsed.file.sources["laion"].image == "jpg;png"
    for line in errors.splitlines():
        section = line if line.startswith("defaults") else f"defaults: {{{line.split('#')[0]}}}"
        parsed = parse_job_file(read_yaml(f"{section}\nsources: {{a: a.jsonl}}\n{REST}"))
        assert [fault.line() for fault in parsed.faults] == []


def test_every_format_is_told_with_its_extensions_and_order() -> None:
    rows = rows_of("| format | files |")
    assert set(rows) == {entry.name for entry in BUILT_IN}
    for entry in BUILT_IN:
        _, files, order, *_ = rows[entry.name]
        assert all(extension in files for extension in entry.extensions), entry.name
        if entry.order == "streaming":
            assert order == "streaming"
        elif entry.order == "seekable":
            assert order == "seekable"


def test_every_status_is_told_and_whether_it_is_a_fault() -> None:
    told = {
        name: row[-1].rstrip("| ") == "yes"
        for row in rows_of("| status | of |").values()
        for name in re.findall(r"`([A-Z_]+)`", row[0])
    }
    faults = {status.name: status in FAULT_STATUSES for status in RecordStatus if status}
    assert told == faults


def test_every_key_of_a_recipe_is_told() -> None:
    keys = [*RecipeFile.model_fields, *DefaultsFile.model_fields]
    assert [key for key in keys if not re.search(rf"\b{key}\b", PAGE)] == []
