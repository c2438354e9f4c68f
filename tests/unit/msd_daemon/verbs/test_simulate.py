"""`msdctl simulate`: what it rests on, what it says, how it compares with the real stream."""

import json
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import msd_daemon
from federation.model.place_tree import ClientPlaceTree
from msd_client.contract.errors import ConfigError, DataError
from msd_daemon.config.resolve import resolve_job
from msd_daemon.core.node_memory import node_memories
from msd_daemon.services.job_memory import job_pool_sums
from msd_daemon.verbs.length_sampling import given_lengths, sampled_lengths
from msd_daemon.verbs.simulate import command

JOB = """
schema: 1
tokenizer: {bytes: true}
batch: {rows: 16, row_tokens: 256}
sources: {web: "web-*.jsonl", books: {paths: "books.parquet", text: text}, notes: "notes.txt"}
mixture: {unit: tokens, 0: {web: 2, books: 1, notes: 1}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("simulate")
    rng = random.Random(3)
    lengths = {"web": [], "books": [], "notes": []}
    for shard in range(3):
        with open(found / f"web-{shard}.jsonl", "w") as lines:
            for _ in range(400):
                text = "w" * rng.randint(5, 300)
                lengths["web"].append(len(text))
                lines.write(json.dumps({"text": text}) + "\n")
    texts = ["b" * rng.randint(20, 900) for _ in range(300)]
    lengths["books"] = [len(text) for text in texts]
    pq.write_table(pa.table({"text": texts}), found / "books.parquet", row_group_size=50)
    (found / "notes.txt").write_text("n" * 700)
    lengths["notes"] = [700]
    (found / "job.yaml").write_text(JOB)
    (found / "lengths.json").write_text(
        json.dumps({name: {"lengths": values} for name, values in lengths.items()})
    )
    return found


def invoke(*arguments):
    result = CliRunner().invoke(command, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def simulated(folder, *arguments):
    result = invoke(folder / "job.yaml", "--mesh", "dp=4,tp=2", "--json", *arguments)
    return json.loads(result.stdout.splitlines()[-1])


def test_given_lengths_predict_the_real_stream(folder):
    found = simulated(folder, "--steps", 30, "--lengths", folder / "lengths.json")
    with msd_daemon.inline(folder / "job.yaml", dp=4) as stream:
        plans = [step.plan for step, _ in zip(stream, range(30), strict=False)]
    padding = sum(1 - plan.fill_ratio for plan in plans) / len(plans)
    assert abs(found["padding"]["mean"] - padding) < 0.01
    imbalance = sum(plan.imbalance for plan in plans) / len(plans)
    assert abs(found["imbalance"]["mean"] - imbalance) < 0.02
    drawn = sum(plan.drawn_tokens for plan in plans)
    for entry, real in zip(found["sources"], drawn / drawn.sum(), strict=True):
        assert abs(entry["token_share"] - real) < 0.01
    by_name = {entry["name"]: entry for entry in found["sources"]}
    samples = {name: sum(int(plan.drawn_samples[place]) for plan in plans)
               for place, name in enumerate(by_name)}  # fmt: skip
    assert by_name["web"]["records"] == 1200
    assert by_name["notes"]["epochs"] == pytest.approx(samples["notes"], rel=0.1)
    assert by_name["web"]["epochs"] == pytest.approx(samples["web"] / 1200, rel=0.1)


def test_a_sample_tells_how_many_records_there_are(folder):
    job = resolve_job((folder / "job.yaml").read_text(), folder, "job")
    found = dict(
        zip([source.name for source in job.sources], sampled_lengths(job, 2000), strict=True)
    )
    assert {name: one.records for name, one in found.items()} == {
        "web": 1200, "books": 300, "notes": 1,
    }  # fmt: skip
    assert len(found["books"].lengths) == 300
    place = list(found).index("web")
    few = sampled_lengths(job, 60)[place]
    assert 60 <= len(few.lengths) < 1200
    assert 900 < few.records < 1600


def test_plots_and_text(folder, tmp_path):
    result = invoke(folder / "job.yaml", "--mesh", "dp=2,pp=2", "--steps", 4, "--lengths",
                    folder / "lengths.json", "--node-ranks", 2, "--plots", tmp_path / "plots")  # fmt: skip
    assert "4 steps" in result.stdout
    assert "2 nodes" in result.stdout
    assert {file.name for file in (tmp_path / "plots").iterdir()} == {
        "simulation.svg", "simulation.png",
    }  # fmt: skip
    assert (tmp_path / "plots/simulation.png").read_bytes()[:4] == b"\x89PNG"


def test_the_time_in_native_order_is_predicted(folder):
    (folder / "balanced.yaml").write_text(
        JOB + "model: {backbone: {hidden_size: 16, num_hidden_layers: 4, intermediate_size: 16}}\n"
        "balance_objective: pipeline\n"
    )
    arguments = ("--mesh", "dp=4,pp=2", "--steps", 6, "--lengths", folder / "lengths.json")
    found = json.loads(
        invoke(folder / "balanced.yaml", *arguments, "--json").stdout.splitlines()[-1]
    )
    assert found["speedup_over_native"]["mean"] > 1
    assert "encoder_imbalance" not in found
    text = invoke(folder / "balanced.yaml", *arguments).stdout
    assert f"in native order a step takes {found['speedup_over_native']['mean']:.3f} times" in text


def test_bytes_between_nodes_with_and_without_locality(folder):
    arguments = ("--steps", 4, "--lengths", folder / "lengths.json", "--node-ranks", 2)
    found = simulated(folder, *arguments, "--locality")
    assert found["locality"].keys() == {"crossing_bytes", "imbalance", "speedup_over_native"}
    assert found["locality"]["crossing_bytes"]["mean"] <= found["crossing_bytes"]["mean"]
    assert "locality" not in simulated(folder, *arguments)
    text = invoke(folder / "job.yaml", "--mesh", "dp=4,tp=2", *arguments, "--locality").stdout
    assert "by strategy local, slowest rank / mean" in text


def test_memory_of_nodes_adds_up_from_the_sums_of_one(folder):
    job = resolve_job((folder / "job.yaml").read_text(), folder, "job")
    options = {"horizon_steps": 4, "ring_slots": None, "pool_bytes": None}
    (whole,) = node_memories(job, ClientPlaceTree.from_mesh({"dp": 4}), **options)
    tree = ClientPlaceTree.from_mesh({"dp": 4}, [0, 0, 0, 2])
    most, least = node_memories(job, tree, **options)
    assert (most.node, most.groups, least.node, least.groups) == (0, 3, 2, 1)
    assert most.rings_bytes + least.rings_bytes == whole.rings_bytes
    assert most.rings_bytes == 3 * least.rings_bytes
    config = type(
        "Config",
        (),
        {"horizon_steps": 4, "pool_bytes": None, "loader_workers_max": 2, "shadow_bytes": None},
    )
    assert whole.pool_bytes == job_pool_sums(job, config).pool_bytes >= most.pool_bytes


def test_files_of_lengths_that_do_not_fit_are_refused(folder, tmp_path):
    table = pa.table({"source": ["web", "web"], "tokens": [3, 4]})
    pq.write_table(table, tmp_path / "some.parquet")
    assert given_lengths(tmp_path / "some.parquet", ["web"])[0].records == 2
    with pytest.raises(ConfigError, match="no lengths of books; it has web"):
        given_lengths(tmp_path / "some.parquet", ["web", "books"])
    (tmp_path / "odd.json").write_text('{"web": [1, 2]}')
    with pytest.raises(ConfigError, match="lengths"):
        given_lengths(tmp_path / "odd.json", ["web"])


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[1]", r"it holds \[1\], no map by source"),
        ("{", "can't be read: "),
        ("[" * 100_000, "can't be read: "),
        ('{"web": [1]}', r"source web: its entry is \[1\], no map"),
        ('{"web": {"tokens": [1]}}', "source web: there is no key lengths, its keys: tokens"),
        ('{"web": {"lengths": [1], "records": -1}}', "source web: records is -1"),
        ('{"web": {"lengths": [1], "records": "9"}}', "source web: records is '9'"),
        ('{"web": {"lengths": [1, 5.7]}}', "source web: entry 1 of lengths is 5.7: write integers"),
        ('{"web": {"lengths": [1, null]}}', "source web: entry 1 of lengths is None"),
        ('{"web": {"lengths": [NaN]}}', "source web: entry 0 of lengths is nan"),
        ('{"web": {"lengths": [[1], [2, 3]]}}', r"source web: entry 0 of lengths is \[1\]"),
        ('{"web": {"lengths": ["a"]}}', "source web: entry 0 of lengths is 'a'"),
        ('{"web": {"lengths": "12"}}', "source web: lengths is '12'"),
        ('{"web": {"lengths": null}}', "source web: lengths is None"),
        ('{"web": {"lengths": []}}', "source web: lengths is empty"),
    ],
)
def test_faults_of_json_lengths_are_one_line(tmp_path, text, named):
    path = tmp_path / "odd.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"odd.json: {named}") as caught:
        given_lengths(path, ["web"])
    assert "\n" not in caught.value.message
    assert caught.value.attributes["path"] == str(path)


@pytest.mark.parametrize(
    ("columns", "named"),
    [
        ({"source": ["web"], "length": [1]}, "there is no column tokens; it has source, length"),
        ({"x": [1]}, "there is no column source and tokens; it has x"),
        ({"source": ["web", None], "tokens": [1, 2]}, "row 1: source is null"),
        ({"source": [4], "tokens": [1]}, "row 0: source is 4"),
        ({"source": ["web", "web"], "tokens": [1, None]}, "source web: row 1: tokens is null"),
        ({"source": ["web"], "tokens": [5.7]}, "source web: entry 0 of lengths is 5.7"),
        ({"source": ["web"], "tokens": [float("nan")]}, "source web: entry 0 of lengths is nan"),
        ({"source": ["web"], "tokens": [-3]}, "source web: entry 0 of lengths is -3"),
        ({"source": ["web"], "tokens": ["a"]}, "source web: entry 0 of lengths is 'a'"),
        ({"source": ["web"], "tokens": [[1, 2]]}, "source web: entry 0 of lengths is "),
        ({"source": ["web"], "tokens": [True]}, "source web: entry 0 of lengths is True"),
    ],
)
def test_faults_of_parquet_lengths_are_one_line(tmp_path, columns, named):
    path = tmp_path / "odd.parquet"
    pq.write_table(pa.table(columns), path)
    with pytest.raises(ConfigError, match=f"odd.parquet: {named}") as caught:
        given_lengths(path, ["web"])
    assert "\n" not in caught.value.message


def test_a_file_that_is_no_parquet_is_refused_in_one_line(tmp_path):
    (tmp_path / "odd.parquet").write_text("no parquet")
    with pytest.raises(ConfigError, match=r"odd\.parquet: can't be read: ") as caught:
        given_lengths(tmp_path / "odd.parquet", ["web"])
    assert "\n" not in caught.value.message


def test_a_source_without_a_sample_is_named(tmp_path):
    (tmp_path / "bad.jsonl").write_text("no json\n" * 30)
    text = JOB.split("sources:", maxsplit=1)[0] + "sources: {bad: bad.jsonl}\n"
    job = resolve_job(text, tmp_path, "job")
    with pytest.raises(DataError, match="source bad: none of 30 sampled records"):
        sampled_lengths(job, 100)
