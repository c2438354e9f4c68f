"""Verbs that need sources: check, schema, index; as a user calls them, by msdctl's root."""

import gzip
import json
import tomllib
from pathlib import Path

import click
import pytest

from msd_client.msdctl import main, verbs
from msd_client.msdctl.output import format_size
from msd_daemon.verbs import check, index, schema
from tests.support.model_configs import LLAMA31_8B

ROOT = Path(__file__).parents[4]
JOB = """
tokenizer: {bytes: true}
batch: {rows: 8, row_tokens: 128, microbatch_rows: 2}
sources: {plain: a.jsonl, packed: "*.jsonl.gz"}
mixture: {0: {plain: 3, packed: 1}}
"""


@pytest.fixture(autouse=True)
def installed(monkeypatch, tmp_path):
    """Make the verbs known as an installation would."""
    for name, module in (("check", check), ("schema", schema), ("index", index)):
        monkeypatch.setitem(verbs.BUILT_IN, name, module.__name__)
    monkeypatch.setenv("MSD__DAEMON__STATE_DIR", str(tmp_path / "state"))


@pytest.fixture
def job(tmp_path):
    line = json.dumps({"text": "word " * 20}) + "\n"
    (tmp_path / "a.jsonl").write_text(line * 5)
    for name in ("b", "c"):
        content = (line * 600 + json.dumps({"text": name})).encode()
        (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress(content))
    file = tmp_path / "job.yaml"
    file.write_text(JOB)
    return file


def test_entry_points_name_commands_that_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for name, target in project["entry-points"][verbs.ENTRY_POINT_GROUP].items():
        module, _, attribute = target.partition(":")
        command = getattr(__import__(module, fromlist=[attribute]), attribute)
        assert isinstance(command, click.Command)
        assert command.name == name


def test_check_tells_the_sizes_of_a_varlen_job(job, capsys):
    batch = "packing: varlen, step_tokens: {0: 20000, 9: 40000}, microbatch_tokens: 1024"
    loaders = "loaders: {val: {from: plain, part: all, step_tokens: 512}}\n"
    job.write_text(JOB.replace("rows: 8, row_tokens: 128, microbatch_rows: 2", batch) + loaders)
    assert main.run(["check", str(job), "--mesh", "dp=3,tp=2"]) == 0
    out = capsys.readouterr().out
    for part in (
        "20000 (40000 from step 9) tokens, microbatches of up to 1024 tokens, varlen",
        "all of plain, 512 tokens a step",
        "3 DP groups with at least 7 microbatches a step each, more where",
    ):
        assert part in out
    assert main.run(["check", str(job), "--json"]) == 0
    batch_map = json.loads(capsys.readouterr().out)["batch"]
    assert (batch_map["step_tokens"], batch_map["microbatch_tokens"]) == (20000, 1024)
    assert main.run(["check", str(job), "--mesh", "dp=1,cp=3"]) == 78
    assert "microbatch_tokens 1024 is no multiple of it" in capsys.readouterr().err


def test_check_prints_what_was_resolved(job, capsys):
    assert main.run(["check", str(job), "--mesh", "dp=2,tp=2"]) == 0
    out = capsys.readouterr().out
    for part in (
        "8 rows x 128 tokens",
        "by tokens",
        "75.00%",
        "streaming",
        "dp 2 * tp 2",
        "2 rings",
    ):
        assert part in out


def test_check_says_what_segments_cost_and_a_microbatch_keeps(job, capsys):
    assert main.run(["check", str(job), "--no-read"]) == 0
    assert "every token the same" in capsys.readouterr().out
    shape = "{hidden_size: 64, num_hidden_layers: 2, sliding_window: 32}"
    job.write_text(JOB + f"model: {{backbone: {shape}}}\ncalibration: {{every: 7}}\n")
    assert main.run(["check", str(job), "--no-read"]) == 0
    out = capsys.readouterr().out
    # 2 layers of 4 * 64^2 + 3 * 64 * 256 weights beside 2 * 2 * 64 a pair.
    assert "1024 n + 1 n^2 in windows of 32" in out
    keeps = 2 * 128 * (2 * 2 * (4 * 64 + 4 * 64 + 4 * 256) + 4 * 64)
    assert f"keeps about {format_size(keeps)}" in out
    assert main.run(["check", str(job), "--no-read", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["cost"]["microbatch_activation_bytes"] == keeps
    assert document["cost"]["windowed"] == [{"window_tokens": 32, "quadratic": 1}]
    assert document["calibration"]["every_steps"] == 7
    job.write_text(JOB + "model: {backbone: {hidden_size: 64}}\ncalibration: {every: 0}\n")
    assert main.run(["check", str(job), "--no-read"]) == 78
    out = capsys.readouterr().err
    assert "calibration.every: 0:" in out
    assert "model.backbone.num_hidden_layers: (nothing): is needed for the cost; add it" in out


def test_check_prints_json_with_a_schema(job, capsys):
    assert main.run(["check", str(job), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "msd.check/1"
    assert document["ok"] is True
    assert {source["name"]: source["shards"] for source in document["sources"]} == {
        "packed": 2,
        "plain": 1,
    }


def test_check_prints_resolved_yaml(job, capsys):
    assert main.run(["check", str(job), "--resolved"]) == 0
    assert "order_class: streaming" in capsys.readouterr().out


def test_check_lists_all_faults_and_ends_with_78(job, capsys):
    job.write_text(JOB.replace("a.jsonl", "gone.jsonl").replace("rows: 8", "rows: 8K"))
    assert main.run(["check", str(job), "--json"]) == 78
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["ok"] is False
    assert len(document["faults"]) == 2
    for fault in document["faults"]:
        assert fault in captured.err


@pytest.mark.parametrize(
    ("mesh", "part"), [("dp=3", "dp 1, 2, 4 would fit"), ("qp=2", "mesh axis 'qp' is unknown")]
)
def test_check_refuses_a_mesh_that_does_not_fit_with_the_numbers(job, capsys, mesh, part):
    assert main.run(["check", str(job), "--mesh", mesh]) == 78
    assert part in capsys.readouterr().err


def test_check_refuses_a_job_over_the_memory_budget_with_the_sums(job, capsys, monkeypatch):
    monkeypatch.setenv("MSD__MEMORY__MEMORY_BYTES", "1Mi")
    assert main.run(["check", str(job), "--mesh", "dp=2"]) == 78
    err = capsys.readouterr().err
    assert "1048576" in err
    assert "memory.memory_bytes" in err


def test_schema_is_json_schema(capsys):
    for kind, key in (("job", "sources"), ("daemon", "memory")):
        assert main.run(["schema", kind]) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["$schema"].startswith("https://json-schema.org/")
        assert key in document["properties"]
    assert main.run(["schema", "other"]) == 2


def outcomes(capsys, *arguments):
    assert main.run(["index", *arguments, "--json"]) == 0
    shards = json.loads(capsys.readouterr().out)["shards"]
    return {Path(shard["path"]).name: shard["outcome"] for shard in shards}


def test_index_builds_once_and_then_finds(job, capsys, tmp_path):
    assert outcomes(capsys, str(job)) == {
        "a.jsonl": "not needed",
        "b.jsonl.gz": "built",
        "c.jsonl.gz": "built",
    }
    assert set(outcomes(capsys, str(job)).values()) == {"present", "not needed"}
    assert list((tmp_path / "state" / "index").iterdir())


def test_index_parts_are_disjoint_and_complete(job, capsys, tmp_path):
    folder = str(tmp_path / "shared")
    parts = [outcomes(capsys, str(job), "--part", f"{i}/2", "--index-dir", folder) for i in (1, 2)]
    assert not set(parts[0]) & set(parts[1])
    assert set(parts[0]) | set(parts[1]) == {"a.jsonl", "b.jsonl.gz", "c.jsonl.gz"}


def test_index_by_several_processes_is_the_same(job, capsys, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    alone = outcomes(capsys, str(job), "--index-dir", str(one), "--workers", "1")
    assert outcomes(capsys, str(job), "--index-dir", str(two), "--workers", "2") == alone
    assert list(alone) == ["b.jsonl.gz", "c.jsonl.gz", "a.jsonl"]
    files = sorted(path.name for path in one.iterdir())
    assert sorted(path.name for path in two.iterdir()) == files
    assert [(one / name).read_bytes() == (two / name).read_bytes() for name in files] == [True] * 2


def test_index_says_how_far_it_is(job, capsys):
    assert main.run(["index", str(job)]) == 0
    assert "3/3 shards" in capsys.readouterr().err


@pytest.mark.parametrize("part", ["0/2", "3/2", "1", "a/b", "1/0"])
def test_index_refuses_malformed_parts(job, part):
    assert main.run(["index", str(job), "--part", part]) == 2


def test_check_tells_ramps_validation_streams_and_fields(job, capsys):
    job.write_text(
        """
tokenizer: {bytes: true}
batch: {rows: {0: 8, 10: 16}, row_tokens: {0: 64, 1M: 128}}
sources: {plain: {paths: a.jsonl, hold_out: 0.2}, packed: "*.jsonl.gz"}
loaders: {val: {from: plain, rows: 4}}
fields: {reward: {per: segment, from: score, dtype: int32}}
"""
    )
    assert main.run(["check", str(job), "--mesh", "dp=2,cp=2", "--no-read"]) == 0
    text = capsys.readouterr().out
    assert "8 (16 from step 10) rows x 64 (128 from token 1000000) tokens" in text
    assert "loader    val: held out of plain, 4 rows a step" in text
    assert "fields    reward (int32 per segment)" in text
    assert " + validation " in text
    assert main.run(["check", str(job), "--mesh", "dp=8"]) == 78  # the validation stream's rows
    assert "batch.rows 4 is not a multiple" in capsys.readouterr().err
    assert main.run(["check", str(job), "--mesh", "dp=2,cp=64"]) == 78
    assert "row_tokens 64" in capsys.readouterr().err


def test_check_says_that_a_family_is_not_known(job, capsys):
    shape = LLAMA31_8B | {"model_type": "zzz"}
    (job.parent / "config.json").write_text(json.dumps(shape))
    job.write_text(JOB + "model: {backbone: config.json}\n")
    assert main.run(["check", str(job), "--no-read"]) == 0
    assert "cost      model.backbone.config: the family 'zzz' is not known" in (
        capsys.readouterr().out
    )
