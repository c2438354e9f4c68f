"""The registry of readers: what stands in it can be opened."""

from __future__ import annotations

import importlib

import pytest

from federation.model.job import SourceSpec
from federation.model.recipe import SampleRecipe
from msd_daemon.sources.formats import BUILT_IN, reader_module


def spec_of(kind: str, recipe: SampleRecipe | None = None) -> SourceSpec:
    return SourceSpec("s", kind, "none", "seekable", (), "", recipe=recipe)


@pytest.mark.parametrize("kind", [entry.name for entry in BUILT_IN])
@pytest.mark.parametrize("recipe", [None, SampleRecipe(where="a > 1")])
def test_the_module_of_every_built_in_reader_is_there(
    kind: str, recipe: SampleRecipe | None
) -> None:
    importlib.import_module(reader_module(spec_of(kind, recipe)))


def test_modules_are_those_of_what_a_source_asks_for() -> None:
    assert reader_module(spec_of("jsonl")) == "msd_daemon.sources.jsonl"
    asked = spec_of("jsonl", SampleRecipe(where="a > 1"))
    assert reader_module(asked) == "msd_daemon.sources.jsonl_fields"
    assert reader_module(spec_of("arrow")) == "msd_daemon.sources.arrow_fields"
    assert reader_module(spec_of("of_a_package")) == ""
