"""docs/mixtures.md and docs/strategies.md: what they show works, and they name all there is."""

import re

import pytest
import yaml

from federation.model.job import BatchRule
from federation.model.place_tree import ClientPlaceTree
from federation.planning.planner import StepPlanner
from federation.planning.strategies import STRATEGIES
from msd_daemon.config.job_file import JobFile
from msd_daemon.config.mixture_section import resolve_mixture
from tests.support.metadata import Feed, initial_state, make_job, make_spec, random_corpus
from tests.support.sources import ROOT

NAMES = ("books", "code", "images", "math", "web")


def blocks(page, language):
    text = (ROOT / "docs" / page).read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def functions(page):
    found = {}
    for block in blocks(page, "python"):
        exec(block, found)
        yield {name: found[name] for name in found if name != "__builtins__"}


@pytest.mark.parametrize("block", blocks("mixtures.md", "yaml") + blocks("strategies.md", "yaml"))
def test_every_section_is_one(block):
    written = yaml.load(block, yaml.BaseLoader) | yaml.safe_load(block)
    if "mixture" in written:
        written["mixture"] = {str(key): item for key, item in written["mixture"].items()}
    batch = {"rows": 2, "row_tokens": 64}
    job = JobFile.model_validate(written | {"batch": batch, "sources": dict.fromkeys(NAMES, "x")})
    if job.mixture is not None and job.mixture.schedule is None:
        faults = []
        schedule = resolve_mixture(job.mixture, NAMES, faults)
        assert not faults
        if schedule.groups:
            shares = {name: weight / 4 for name, weight in schedule.points[0].weights.items()}
            assert shares == {
                "books": 1 / 8,
                "code": 1 / 8,
                "images": 1 / 4,
                "math": 0,
                "web": 1 / 2,
            }


def test_the_functions_of_the_page_about_mixtures_give_weights():
    first, second = functions("mixtures.md")
    assert first["weights"](5000) == {"*": 1.0, "code": 0.25}
    given = second["weights"](100, {"web": 3.0, "code": 1.0}, {"web": 0.5, "code": 0.5})
    assert given["web"] > 0.5 > given["code"] > 0


def test_the_strategies_of_the_page_plan():
    specs = [make_spec("a")]
    corpora = [random_corpus(specs[0], 1, lambda r: r.randint(1, 40))]
    job = make_job(specs, BatchRule(8, 64))
    seen = []
    for found in functions("strategies.md"):
        for name in ("token_proportional", "by_cost"):
            if name in found and name not in seen:
                seen.append(name)
                tree = ClientPlaceTree.from_mesh({"dp": 2})
                planner = StepPlanner(job, tree, initial_state(job), found[name])
                assert len(Feed(planner, corpora).steps(3)) == 3
    assert seen == ["token_proportional", "by_cost"]


def test_the_page_names_every_strategy():
    table = (ROOT / "docs" / "strategies.md").read_text().partition("## By name")[2]
    named = set(re.findall(r"`([a-z_]+)`", table.partition("## Verbs")[0]))
    assert set(STRATEGIES) <= named
