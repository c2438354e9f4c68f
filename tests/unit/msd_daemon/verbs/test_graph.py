"""`msdctl graph`: the real step, as text, JSON and picture."""

import json

import pytest
from click.testing import CliRunner

import msd_daemon
from msd_client.contract.errors import UsageError
from msd_daemon.verbs.graph import command

JOB = """
schema: 1
tokenizer: {bytes: true}
batch: {rows: 12, row_tokens: 128}
epochs: 1
sources: {web: web.jsonl, books: books.jsonl}
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("graph")
    for name, count in (("web", 400), ("books", 200)):
        lines = [json.dumps({"text": "x" * (1 + 7 * number % 150)}) for number in range(count)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    (folder / "job.yaml").write_text(JOB)
    (folder / "lengths.json").write_text(
        json.dumps({name: {"lengths": [40, 90], "records": 300} for name in ("web", "books")})
    )
    return folder / "job.yaml"


def invoke(*arguments):
    result = CliRunner().invoke(command, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_the_step_is_the_one_that_training_gets(job):
    result = invoke(job, "--mesh", "dp=3,tp=2", "--step", 4, "--json")
    found = json.loads(result.stdout)
    with msd_daemon.inline(job, dp=3) as stream:
        plan = [stream.next_step() for _ in range(5)][-1].plan
    assert found["step"] == 4
    chain = "mix(schedule) -> distribute(dp) -> cost(cost_model) -> balance(greedy, step)"
    assert found["chain"] == chain
    assert found["valid_tokens"] == plan.valid_tokens
    assert [group["tokens"] for group in found["groups"]] == [
        [int(plan.length[plan.row_dp[plan.row] * 4 + plan.row_microbatch[plan.row] == 4 * dp + m].sum())
         for m in range(4)]
        for dp in range(3)
    ]  # fmt: skip
    assert found["places"][0] == {"node": 0, "group": 0, "ranks": {"all": [0, 1]}}


def test_text_and_picture_of_many_groups(job, tmp_path):
    result = invoke(job, "--mesh", "dp=12", "--node-ranks", 5, "--groups", 4, "--out", tmp_path)
    assert "... 8 more groups" in result.stdout
    assert "verbs: mix(schedule) -> distribute(dp) -> cost(cost_model) -> bal" in result.stdout
    assert "mix(schedule)" in (tmp_path / "graph.svg").read_text()
    assert "node 2" in result.stdout
    assert "dp 0: ranks 0" in result.stdout
    assert {file.name for file in tmp_path.iterdir()} == {"graph.svg", "graph.png"}


def test_records_drawn_from_lengths(job):
    lengths = job.parent / "lengths.json"
    found = json.loads(invoke(job, "--step", 2, "--lengths", lengths, "--json").stdout)
    assert found["step"] == 2
    assert sum(flow["placed"] for flow in found["sources"]) > 1000


def test_a_step_behind_the_end_is_refused(job):
    with pytest.raises(UsageError, match="ends before step 500"):
        invoke(job, "--step", 500)


OWN = """
def turned(graph, step):
    graph = graph.delay(over_tokens=100, steps=2).mix(graph.schedule).distribute("dp", group_size=1)
    return graph.cost(graph.cost_model.backbone).balance("greedy", "microbatch", min_gain=0.1)
"""


def test_a_strategy_of_the_users_own_is_drawn_and_simulated(job):
    from msd_daemon.verbs.simulate import command as simulate

    (job.parent / "own_strategy.py").write_text(OWN)
    own = job.parent / "own.yaml"
    own.write_text(JOB + "strategy: own_strategy:turned\n")
    lengths = job.parent / "lengths.json"
    arguments = ("--mesh", "dp=3", "--lengths", lengths, "--json")
    found = json.loads(invoke(own, *arguments).stdout)
    assert found["chain"] == (
        "delay(over_tokens=100, steps=2) -> mix(schedule) -> distribute(dp, group_size=1) -> "
        "cost(cost_model) -> balance(greedy, microbatch, min_gain=0.1)"
    )
    found = json.loads(invoke(own, "--mesh", "dp=3", "--json").stdout)
    assert found["chain"].startswith("delay(")
    result = CliRunner().invoke(simulate, [str(own), *map(str, arguments), "--steps", "3"])
    assert json.loads(result.stdout.splitlines()[-1])["steps"] == 3
