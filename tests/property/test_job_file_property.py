"""Whatever stands in a job file, the answer is a job or a JobError with lines; never a crash."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from msd_client.contract.errors import JobError
from msd_daemon.config.resolve import resolve_job

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 70), 1 << 70),
    st.floats(allow_nan=True, allow_infinity=True),
    st.text(max_size=8),
    st.sampled_from(["8K", "1.8T", "4Mi", "end", "best_fit", "web", "*", "a\0b", "../x", "\ud800"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=8,
)
PATHS = [
    ("seed",),
    ("steps",),
    ("name",),
    ("ignore",),
    ("strategy",),
    ("tokenizer",),
    ("tokenizer", "eos"),
    ("tokenizer", "file"),
    ("batch",),
    ("batch", "rows"),
    ("batch", "row_tokens"),
    ("batch", "microbatch_rows"),
    ("batch", "packing"),
    ("batch", "step_tokens"),
    ("batch", "microbatch_tokens"),
    ("batch", "pad_id"),
    ("defaults",),
    ("defaults", "shuffle"),
    ("defaults", "on_error"),
    ("sources",),
    ("sources", "web"),
    ("sources", "web", "paths"),
    ("mixture",),
    ("mixture", "0"),
    ("mixture", "0", "web"),
    ("model",),
    ("model", "backbone"),
    ("dtypes",),
]


def valid_job() -> dict:
    return {
        "seed": 1,
        "tokenizer": {"bytes": True},
        "batch": {"rows": 4, "row_tokens": 16},
        "sources": {"web": {"paths": "web.txt"}},
        "mixture": {"0": {"web": 1}},
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("job")
    (path / "web.txt").write_text("text\n")
    return path


def put(job: dict, path: tuple[str, ...], value: object) -> dict:
    here = job
    for key in path[:-1]:
        here = here.setdefault(key, {})
        if not isinstance(here, dict):
            return job
    here[path[-1]] = value
    return job


def answer(job: object, folder: Path) -> None:
    try:
        resolved = resolve_job(job, folder, "job")
    except JobError as error:
        assert error.faults
        for fault in error.faults:
            assert ": " in fault
            assert "; " in fault
    else:
        assert resolved.batch.rows % resolved.batch.microbatch_rows == 0
        for point in resolved.mixture.points:
            assert all(math.isfinite(weight) and weight >= 0 for weight in point.weights.values())
            assert sum(point.weights.values()) > 0


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(changes=st.lists(st.tuples(st.sampled_from(PATHS), VALUES), min_size=1, max_size=4))
def test_any_value_anywhere_gives_a_job_or_faults(folder, changes):
    job = valid_job()
    for path, value in changes:
        job = put(job, path, value)
    answer(job, folder)


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(text=st.text(max_size=200))
def test_any_text_gives_faults(folder, text):
    answer(text, folder)


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    cut=st.integers(0, 200), junk=st.sampled_from(["", "{", "\t", "&a *a", "\x00", "!!int x", "? "])
)
def test_damaged_yaml_gives_a_job_or_faults(folder, cut, junk):
    text = yaml.safe_dump(valid_job())
    answer(text[:cut] + junk + text[cut:], folder)
