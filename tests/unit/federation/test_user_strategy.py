"""Strategies of the user's own: isolated by job, and every failure is a typed error of the job."""

import sys
from dataclasses import replace

import pytest

from federation.model.job import BatchRule, GroupRule
from federation.planning.planner import StepPlanner
from federation.planning.strategies import find_strategy
from federation.user_copy import FILES_FOLDER
from federation.user_strategy import load_strategy
from msd_client.contract.errors import ConfigError, DataError, StrategyError
from msd_daemon.verbs.check_strategy import check_strategy
from tests.support.metadata import Feed, initial_state, make_job, make_spec, random_corpus
from tests.support.user_code import user_call

CHAIN = """
def fn(graph, step, method="greedy"):
    graph = graph.mix(graph.schedule).distribute("dp").cost(graph.cost_model)
    return graph.balance(method, graph.objective)
"""


def job_of(folder, source, name="fn", **options):
    call = user_call(folder, source, name, **options)
    specs = [make_spec("a"), make_spec("b")]
    job = make_job(specs, BatchRule(4, 32), strategy=call.call, strategy_call=call)
    corpora = [random_corpus(spec, n, lambda r: r.randint(1, 40)) for n, spec in enumerate(specs)]
    return job, corpora


def feed_of(job, corpora):
    tree = make_tree()
    return Feed(StepPlanner(job, tree, initial_state(job), load_strategy(job)), corpora)


def make_tree():
    from federation.model.place_tree import ClientPlaceTree

    return ClientPlaceTree.from_mesh({"dp": 2})


def test_a_strategy_plans_as_the_built_in_one_of_the_same_verbs(tmp_path):
    job, corpora = job_of(tmp_path, CHAIN)
    plain = replace(job, strategy="balanced", strategy_call=None)
    planner = StepPlanner(plain, make_tree(), initial_state(plain), find_strategy("balanced"))
    expected = Feed(planner, corpora).steps(6)
    plans = feed_of(job, corpora).steps(6)
    for plan, other in zip(plans, expected, strict=True):
        assert plan.membership_digest == other.membership_digest
        assert plan.row_dp.tolist() == other.row_dp.tolist()
    assert job.digest() != plain.digest()
    # Which samples come does not hang on it: a state goes on under another strategy.
    assert job.sample_digest() == plain.sample_digest()


def test_the_digest_is_of_the_code_and_not_of_where_it_lies(tmp_path):
    here, _ = job_of(tmp_path / "a", CHAIN)
    there, _ = job_of(tmp_path / "b", CHAIN)
    other, _ = job_of(tmp_path / "c", CHAIN, method="none")
    assert here.digest() == there.digest() != other.digest()


def test_jobs_with_modules_of_one_name_have_their_own(tmp_path):
    before = dict(sys.modules)
    one, _ = job_of(tmp_path / "one", "import words\ndef fn(graph, step): return words.W")
    (tmp_path / "one" / FILES_FOLDER / "words.py").write_text("W = 1")
    with pytest.raises(ConfigError, match="was changed"):
        load_strategy(one)
    (tmp_path / "one" / FILES_FOLDER / "words.py").unlink()
    jobs = []
    for number in (1, 2):
        files = tmp_path / str(number) / FILES_FOLDER
        files.mkdir(parents=True)
        (files / "words.py").write_text(f"W = {number}")
        code = "import words\ndef fn(graph, step): raise ValueError(words.W)"
        jobs.append(job_of(tmp_path / str(number), code))
    for number, (job, corpora) in enumerate(jobs, 1):
        with pytest.raises(StrategyError, match=f"raises ValueError: {number} "):
            feed_of(job, corpora).step()
    assert dict(sys.modules) == before
    assert not list(tmp_path.rglob("__pycache__"))


def test_a_copy_that_holds_a_compiled_package_shares_the_one_of_the_process(tmp_path):
    files = tmp_path / FILES_FOLDER / "numpy"
    files.mkdir(parents=True)
    (files / "__init__.py").write_text("raise ImportError('a second numpy')")
    before = sys.modules["numpy"]
    source = "import numpy\ndef fn(graph, step): raise ValueError(numpy.__version__)"
    job, corpora = job_of(tmp_path, source)
    with pytest.raises(StrategyError, match=f"ValueError: {before.__version__}"):
        feed_of(job, corpora).step()
    assert sys.modules["numpy"] is before


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise KeyError('oh')", r"raises KeyError: 'oh' \(in fn, line 3 of mine.py\)"),
        ("raise SystemExit(3)", "raises SystemExit: 3"),
        ("return None", "gives NoneType, not the graph"),
        ("return graph", "has to call mix.. and distribute"),
        ("return graph.mix(graph.schedule)", "has to call mix.. and distribute"),
        ("return graph.mix(graph.schedule).distribute('pp')", "has no axis 'pp'"),
        (
            "return graph.mix(graph.schedule).distribute('dp').balance('best')",
            "balance: 'best' is none of",
        ),
        ("return graph.mix(graph.schedule).mix(graph.schedule)", "mixes once"),
        ("return graph.mix(graph.schedule).sort('dp')", "AttributeError: 'DGraph' object has no"),
        ("return graph.distribute('dp')", "comes after mix"),
    ],
)
def test_a_failure_names_strategy_and_step(tmp_path, body, said):
    job, corpora = job_of(tmp_path, f"def fn(graph, step):\n    if step == 2:\n        {body}\n    return graph.mix(graph.schedule).distribute('dp')")  # fmt: skip
    feed = feed_of(job, corpora)
    assert len(feed.steps(2)) == 2
    with pytest.raises(StrategyError, match=f"^strategy mine:fn at step 2: .*{said}") as caught:
        feed.step()
    assert caught.value.attributes == {"strategy": "mine:fn", "step": 2}
    with pytest.raises(StrategyError, match=f"at step 2: .*{said}"):
        check_strategy(job, {"dp": 2})


def test_what_the_draw_has_to_say_passes_through_careless_code(tmp_path):
    source = """
    def fn(graph, step):
        try:
            graph.mix(graph.schedule)
        except Exception as error:
            if type(error).__name__ == "SourceExhaustedError":
                raise
        return graph.distribute("dp")
    """
    job, corpora = job_of(tmp_path, source)
    capped = replace(job.sources[0], max_epochs=1)
    job = replace(job, sources=(capped, job.sources[1]))
    feed = feed_of(job, corpora)
    with pytest.raises(DataError, match="source a has no sample left"):
        feed.steps(1000)
    assert feed.planner.state().step > 1


def test_a_strategy_that_never_ends_is_ended(tmp_path):
    job, corpora = job_of(tmp_path, "def fn(graph, step):\n    while True: pass")
    call = replace(job.strategy_call, sample_s_max=0.2)
    with pytest.raises(StrategyError, match=r"takes longer than 0.2 s"):
        feed_of(replace(job, strategy_call=call), corpora).step()


@pytest.mark.parametrize(
    ("source", "name", "said"),
    [
        ("import nosuchmodule", "fn", "cannot be imported: raises ModuleNotFoundError"),
        ("x = 1", "fn", "has no attribute 'fn'"),
        ("fn = 1", "fn", "is of type int: name a function"),
        ("raise SystemExit", "fn", "raises SystemExit"),
    ],
)
def test_what_cannot_be_imported_is_refused_at_the_opening(tmp_path, source, name, said):
    job, _ = job_of(tmp_path, source, name)
    with pytest.raises(StrategyError, match=said):
        load_strategy(job)
    with pytest.raises(StrategyError, match=said):
        check_strategy(job, None)


def test_check_plans_a_few_steps_in_a_child(tmp_path):
    job, _ = job_of(tmp_path, "print('hello')\n" + CHAIN)
    assert check_strategy(job, {"dp": 4}) == "mine:fn: planned 4 made-up steps"
    assert check_strategy(replace(job, strategy="balanced", strategy_call=None), None) is None
    ends = "import os\ndef fn(graph, step): os._exit(7)"
    with pytest.raises(StrategyError, match="its process ends with 7"):
        check_strategy(job_of(tmp_path / "ends", ends)[0], None)


@pytest.mark.parametrize(
    "batch",
    [BatchRule(4, 32), BatchRule(5, 32, packing="varlen", step_tokens=128)],
    ids=["rows", "varlen"],
)
def test_made_up_steps_go_past_the_end_that_the_job_has(tmp_path, batch):
    job, _ = job_of(tmp_path, CHAIN)
    first, second = job.sources
    grouped = replace(first, group=GroupRule("field", "key"), max_epochs=1, at_exhaustion="stop")
    job = replace(job, batch=batch, sources=(grouped, second), steps=1, epochs=1)
    assert check_strategy(job, {"dp": 2}) == "mine:fn: planned 4 made-up steps"
