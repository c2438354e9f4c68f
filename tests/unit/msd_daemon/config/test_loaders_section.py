"""Validation streams: what they read, and that the training mixture leaves it out."""

import json

import pytest

from federation.model.job import LoaderRule
from msd_client.contract.errors import JobError
from msd_daemon.config.resolve import resolve_job

JOB = """
tokenizer: {bytes: true}
batch: {rows: %s, row_tokens: 512, microbatch_rows: 2}
sources:
  web: {paths: a.jsonl, hold_out: .1}
  code: b.jsonl
  exam: c.jsonl
"""


@pytest.fixture
def folder(tmp_path):
    """Return a folder with three sources."""
    for name in "abc":
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": name}) + "\n")
    return tmp_path


def resolve(folder, more, rows="8"):
    return resolve_job(JOB % rows + more, folder)


def faults_of(folder, more):
    with pytest.raises(JobError) as raised:
        resolve(folder, more)
    return raised.value.faults


def test_there_are_no_loaders_by_default(folder):
    assert resolve(folder, "").loaders == ()
    assert resolve(folder, "loaders: {train: {}}").loaders == ()


def test_what_a_loader_reads_follows_from_its_sources(folder):
    job = resolve(
        folder,
        "loaders: {val_web: {from: web}, exam: {from: exam, steps: 3}, all: {from: [web, web, code],"
        " part: all, rows: 4}}\nmixture: {0: {web: 1}}",
    )
    assert job.loaders == (
        LoaderRule("all", ("code", "web"), "all", 4, None),
        LoaderRule("exam", ("exam",), "all", 8, 3),
        LoaderRule("val_web", ("web",), "held_out", 8, None),
    )


def test_rows_are_those_of_the_first_training_step(folder):
    job = resolve(folder, "loaders: {val: {from: web}}", rows="{20: 16, 0: 6}")
    assert job.loaders[0].rows == 6


def test_validation_does_not_change_the_stream_it_runs_beside(folder):
    plain = resolve(folder, "mixture: {0: {web: 1}}")
    beside = resolve(folder, "mixture: {0: {web: 1}}\nloaders: {val: {from: web}}")
    assert beside.digest() == plain.digest()


def test_the_default_mixture_leaves_out_what_only_validation_reads(folder):
    job = resolve(folder, "loaders: {exam: {from: exam}, val: {from: web}}")
    assert job.mixture.points[0].weights == {"code": 1, "exam": 0, "web": 1}
    assert "sources.exam: only for validation, weight 0" in job.notes


def test_a_star_leaves_out_what_only_validation_reads(folder):
    job = resolve(folder, 'loaders: {exam: {from: exam}}\nmixture: {0: {web: 2, "*": 2}}')
    assert job.mixture.points[0].weights == {"code": 2, "exam": 0, "web": 2}
    job = resolve(folder, 'loaders: {exam: {from: exam}}\nmixture: {0: {"*": 4}}')
    assert job.mixture.points[0].weights == {"code": 2, "exam": 0, "web": 2}


def test_a_name_in_the_mixture_wins(folder):
    job = resolve(
        folder, 'loaders: {exam: {from: exam, part: all}}\nmixture: {0: {exam: 1, "*": 2}}'
    )
    assert job.mixture.points[0].weights == {"code": 1, "exam": 1, "web": 1}


def test_a_star_with_nothing_left_is_refused(folder):
    (fault,) = faults_of(
        folder, 'loaders: {exam: {from: exam}}\nmixture: {0: {web: 1, code: 1, "*": 1}}'
    )
    assert "mixture.0.*: 1.0: every source is named already" in fault


def test_a_job_without_a_source_to_train_on_is_refused(folder):
    (fault,) = faults_of(folder, "loaders: {val: {from: [web, code, exam], part: all}}")
    assert "no source is left to train on" in fault


@pytest.mark.parametrize(
    ("loaders", "line"),
    [
        ("{train: {from: web}}", "loaders.train: "),
        ("{val: {from: gone}}", 'loaders.val.from: "gone": no source has this name; write one of code, exam, web'),
        ("{val: {}}", 'loaders.val.from: "nothing": names no source'),
        ("{close: {from: web}}", "loaders.close: "),
        ("{a-b: {from: web}}", "can't be an attribute"),
        ("{val: {from: code, part: held_out}}", 'loaders.val.part: "held_out": code holds nothing out'),
        ("{val: {from: [web, code]}}", "code holds nothing out; give it hold_out, or write part: all"),
        ("{val: {from: web, rows: 3}}", "loaders.val.rows: 3: is no multiple of batch.microbatch_rows 2"),
        ("{val: {from: web, steps: 0}}", "loaders.val.steps"),
        ("{val: {from: web, part: train}}", "loaders.val.part"),
    ],
)  # fmt: skip
def test_refusals(folder, loaders, line):
    faults = faults_of(folder, f"loaders: {loaders}")
    assert [line in fault for fault in faults] == [True], faults


@pytest.mark.parametrize("mixture", ["{0: {code: 1}}", "{0: {web: 1}, 20: {'*': 1, code: .5}}"])
@pytest.mark.parametrize("sources", ["code", "[code, exam]"])
def test_a_stream_over_what_is_trained_on_has_to_say_so(folder, mixture, sources):
    more = f"mixture: {mixture}\nloaders: {{val: {{from: {sources}}}}}"
    (line,) = faults_of(folder, more)
    assert line == (
        'loaders.val.from: "code": code is trained on and holds nothing out; '
        "give it hold_out, or write part: all"
    )
    explicit = resolve(folder, more.removesuffix("}}") + ", part: all}}")
    assert explicit.loaders[0].part == "all"


@pytest.mark.parametrize("mixture", ["{0: {web: 1, code: 0}}", "{0: {web: 1, '*': 1}}"])
def test_a_source_without_a_weight_is_read_whole(folder, mixture):
    job = resolve(folder, f"mixture: {mixture}\nloaders: {{val: {{from: code}}}}")
    assert job.loaders[0].part == "all"
    assert all(point.weights["code"] == 0 for point in job.mixture.points)
