"""`mixture.schedule`: a function of the user's own, asked at submit in a process of its own."""

import json

import pytest

from msd_client.contract.errors import JobError
from msd_daemon.config.resolve import resolve_job


def resolve(folder, code, schedule="curriculum:weights", **keys):
    (folder / "curriculum.py").write_text(code)
    for name in ("code", "web"):
        (folder / f"{name}.jsonl").write_text(json.dumps({"text": "words " * 50}) + "\n")
    mixture = {key: keys.pop(key) for key in ("every", "unit") if key in keys}
    job = {
        "tokenizer": {"bytes": True},
        "batch": {"rows": 2, "row_tokens": 64},
        "sources": {"code": "code.jsonl", "web": "web.jsonl"},
        "mixture": {"schedule": schedule} | mixture,
    }
    return resolve_job(job | keys, folder, store_dir=folder / "store")


STEPS = """
import os
PID = os.getpid()
def weights(step, full=1000):
    return {"web": 1, "code": min(1.0, step / full)}
"""


def test_a_function_becomes_points_at_submit(tmp_path):
    job = resolve(tmp_path, STEPS, steps=2000, every=250)
    assert [(p.start, p.weights["code"]) for p in job.mixture.points] == [
        (0, 0.0),
        (250, 0.25),
        (500, 0.5),
        (750, 0.75),
        (1000, 1.0),
    ]
    assert any("curriculum:weights (copy " in note for note in job.notes)
    options = {"call": "curriculum:weights", "options": {"full": 500}, "until": 500}
    longer = resolve(tmp_path, STEPS, options, every=250)
    assert [p.weights["code"] for p in longer.mixture.points] == [0.0, 0.5]
    star = resolve(tmp_path, "def weights(step): return {'*': 2}", steps=10)
    assert [p.weights for p in star.mixture.points] == [{"code": 1.0, "web": 1.0}]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def weights(step): return 3", "mixture.schedule(0): 3: gave int, no map of weights"),
        ("def weights(step): return {'wbe': 1}", "mixture.schedule(0).wbe: 1: no source has this"),
        ("def weights(step): return {'web': float('nan')}", "schedule(0).web: NaN: a weight is"),
        ("def weights(step): return {'web': 5 - step}", "mixture.schedule(6).web: -1: a weight is"),
        ("def weights(step): return {}", "all weights are zero"),
        ("def weights(step): raise KeyError('oh')", "KeyError: 'oh'; mend the function"),
        (
            "def weights(step): return {'web': object()}",
            "mixture.schedule(0): 0: curriculum:weights",
        ),
        ("import nosuchmodule", "mixture.schedule.call"),
    ],
)
def test_what_the_function_may_not_give_is_one_fault(tmp_path, code, said):
    with pytest.raises(JobError) as caught:
        resolve(tmp_path, code, steps=100, every=2)
    assert said in str(caught.value)
    assert "has 1 fault:" in str(caught.value)


def test_a_job_without_an_end_has_to_say_how_far(tmp_path):
    with pytest.raises(JobError, match=r"the job has no steps, .*write until: 100000"):
        resolve(tmp_path, STEPS)
    with pytest.raises(JobError, match=r"gives 5000 pieces, at most 4096 fit.* write 2 or more"):
        resolve(tmp_path, STEPS, steps=5000, every=1)
    with pytest.raises(JobError, match=r"mixture.every: 1000000000: a schedule is a function of"):
        resolve(tmp_path, STEPS, steps=5000, every="1B")
