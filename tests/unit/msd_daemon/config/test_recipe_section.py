"""Recipes of sources: what they share is made once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from msd_daemon.config.resolve import resolve_job
from msd_daemon.sources import exclude

JOB = """
sources:
  a: a.jsonl
  b: b.jsonl
  c: {paths: c.jsonl, exclude: {hashes: keys.txt}}
defaults: {exclude: {keys: keys.txt}}
tokenizer: {bytes: true}
batch: {rows: 2, row_tokens: 16}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in "abc":
        (tmp_path / f"{name}.jsonl").write_text('{"text": "one"}\n')
    (tmp_path / "keys.txt").write_text("ab" * 32 + "\n")
    return tmp_path


def test_a_list_that_sources_share_is_built_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[tuple[Any, ...]] = []
    build = exclude.build_exclude_list

    def counted(*arguments: Any) -> Any:
        built.append(arguments[2:])
        return build(*arguments)

    monkeypatch.setattr(exclude, "build_exclude_list", counted)
    a, b, c = resolve_job(JOB, folder, "job", folder / "store").sources
    assert built == [("key", ""), ("content", "")]
    assert a.recipe is not None and c.recipe is not None and a.recipe.exclude is not None
    assert a.recipe == b.recipe
    assert a.recipe.exclude.by == "key"
    assert c.recipe.exclude is not None and c.recipe.exclude.by == "content"
