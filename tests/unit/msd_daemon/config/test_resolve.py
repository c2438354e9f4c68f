"""From what a user wrote to the resolved job; every refusal, all at once, before anything starts."""

import io
import json
import lzma
import os
import subprocess
import sys
from pathlib import Path

import msgpack
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from federation.model.job import TokenizerSpec, decode_job, encode_job
from msd_client.contract.errors import JobError, MeshMismatchError
from msd_daemon.config import resolve as resolve_module
from msd_daemon.config.resolve import check_mesh, render_resolved_yaml, resolve_job
from msd_daemon.workers import resolve_main
from tests.support.sources import DATA, needs_data

JOB = """
seed: 17
tokenizer: {bytes: true, eos: end}
batch: {rows: 8, row_tokens: 512, microbatch_rows: 2}
sources: {web: web/*.jsonl, code: code.txt}
mixture: {0: {web: 3, "*": 1}}
"""


@pytest.fixture
def folder(tmp_path):
    """Return a folder with two sources."""
    (tmp_path / "web").mkdir()
    for name in "ba":
        (tmp_path / "web" / f"{name}.jsonl").write_text(json.dumps({"text": name * 50}) + "\n")
    (tmp_path / "code.txt").write_text("print()\n")
    return tmp_path


def faults_of(text, folder):
    with pytest.raises(JobError) as raised:
        resolve_job(text, folder, "job")
    assert raised.value.exit_code == 78
    return raised.value.faults


def test_every_default_is_written_out(folder):
    job = resolve_job(JOB, folder, "job")
    assert job.name == "job"
    web = job.sources[job.source_index("web")]
    assert [Path(shard.path).name for shard in web.shards] == ["a.jsonl", "b.jsonl"]
    assert (web.format, web.compression, web.order_class) == ("jsonl", "none", "seekable")
    assert (web.on_error.policy, web.on_error.budget_ratio) == ("skip", 0.001)
    assert (web.shuffle.window_shards, web.shuffle.window_records, web.shuffle.interleave) == (
        16,
        256,
        4,
    )
    assert job.mixture.unit == "tokens"
    assert job.mixture.points[0].weights == {"code": 1.0, "web": 3.0}
    assert job.batch.row_segments_max == 64
    assert (job.tokenizer.eos_id, job.tokenizer.vocabulary_count) == (256, 257)
    assert decode_job(encode_job(job)) == job


def test_stream_does_not_depend_on_the_order_of_keys_nor_on_text_or_map(folder):
    written = yaml.safe_load(JOB)
    written["sources"] = dict(reversed(written["sources"].items()))
    assert resolve_job(written, folder, "job").digest() == resolve_job(JOB, folder, "job").digest()


def test_moved_files_give_the_same_digest_and_changed_ones_another(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("moved")
    digest = resolve_job(JOB, folder, "job").digest()
    for entry in list(folder.iterdir()):
        entry.rename(other / entry.name)
    assert resolve_job(JOB, other, "job").digest() == digest
    (other / "code.txt").write_text("print(1)\n")
    assert resolve_job(JOB, other, "job").digest() != digest


def test_a_mesh_never_enters_the_digest(folder):
    job = resolve_job(JOB, folder, "job")
    before = job.digest()
    assert "2 DP groups with 2 microbatches" in check_mesh(job, {"dp": 2, "tp": 2})
    assert job.digest() == before
    with pytest.raises(MeshMismatchError, match="dp 3"):
        check_mesh(job, {"dp": 3})


@pytest.mark.parametrize(
    ("packing", "row_tokens", "segments"),
    [
        ("best_fit", 32, 32),
        ("best_fit", 512, 64),
        ("best_fit", 4096, 512),
        ("best_fit_even", 4096, 512),
        ("padded", 4096, 512),
        ("concat", 4096, 4096),
    ],
)
def test_default_of_segments_in_a_row(folder, packing, row_tokens, segments):
    text = JOB.replace("row_tokens: 512", f"row_tokens: {row_tokens}, packing: {packing}")
    assert resolve_job(text, folder).batch.row_segments_max == segments


def test_what_is_evened_is_chosen_by_the_job(folder):
    digests = set()
    for objective in ("step", "microbatch", "pipeline"):
        job = resolve_job(f"{JOB}\nbalance_objective: {objective}\n", folder)
        assert job.balance_objective == objective
        digests.add(job.digest())
    assert len(digests) == 3
    with pytest.raises(JobError, match="balance_objective"):
        resolve_job(f"{JOB}\nbalance_objective: speed\n", folder)


def test_own_keys_of_a_source_win_over_defaults_key_by_key(folder):
    text = JOB.replace(
        "sources: {web: web/*.jsonl",
        "defaults: {text: body, on_error: {budget_ratio: 0.5, window_records: 9},"
        " shuffle: {interleave: 2}, max_epochs: 2}\n"
        "sources: {web: {paths: web/*.jsonl, text: t, on_error: fail, shuffle: false}",
    )
    job = resolve_job(text, folder)
    web, code = job.sources[job.source_index("web")], job.sources[job.source_index("code")]
    assert web.text_field == "t"
    assert (web.on_error.policy, web.on_error.budget_ratio, web.on_error.window_records) == (
        "fail",
        0.5,
        9,
    )
    assert (web.shuffle.is_shuffled, web.shuffle.interleave) == (False, 2)
    assert (code.shuffle.is_shuffled, code.max_epochs) == (True, 2)


@pytest.mark.parametrize(
    ("stem", "name"), [("my job (1)", "my_job__1_"), ("-x", "x"), ("", "job"), ("ü", "_")]
)
def test_file_name_becomes_the_name(folder, stem, name):
    assert resolve_job(JOB, folder, stem).name == name


def test_resolved_yaml_is_yaml_with_digest_and_order_class(folder):
    job = resolve_job(JOB, folder, "job")
    text = render_resolved_yaml(job)
    plain = yaml.safe_load(text)
    assert plain.pop("digest") == job.digest()
    assert plain == {key: value for key, value in encode_job(job).items() if key != "notes"}
    assert "order_class: seekable" in text
    assert "# - sources.web: 2 shards" in text


def test_all_faults_of_all_sections_stand_together(folder):
    faults = faults_of(
        """
        seed: x
        tokenizer: {file: none.json}
        ignore: 5
        batch: {rows: 8, row_tokens: 512, microbatch_rows: 3, row_segments_max: 513}
        strategy: magic
        sources: {web: web/*.jsonl, gone: "gone/*.jsonl", bad: {path: x}}
        mixture: {0: {web: 1, typo: 2}}
        model: {backbone: none.json}
        """,
        folder,
    )
    paths = [fault.split(": ")[0] for fault in faults]
    assert sorted(paths) == sorted(
        [
            "seed",
            "sources.bad.path",
            "sources.bad.paths",
            "sources.gone.paths",
            "tokenizer.file",
            "batch.microbatch_rows",
            "batch.row_segments_max",
            "mixture.0.typo",
            "model.backbone.config",
            "strategy",
        ]
    )
    for fault in faults:
        assert "; " in fault


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("web/*.jsonl", "nothing/*.jsonl", "sources.web.paths: \"nothing/*.jsonl\": path"),
        ("web/*.jsonl", "[web/a.jsonl, gone.jsonl]", "sources.web.paths[1]: \"gone.jsonl\""),
        ("web/*.jsonl", "ftp://host/a.jsonl", "has an unknown scheme"),
        ("web/*.jsonl", "[web/a.jsonl, code.txt]", "mixes jsonl and text"),
        ("code.txt", "{paths: code.txt, text: body}", "format text has no fields; remove it"),
        ("web/*.jsonl", "{paths: web/*.jsonl, document: file}", "a record of jsonl is one document"),
        ("code.txt", '"a\\0b"', "holds a NUL"),
        ("microbatch_rows: 2", "microbatch_rows: 5", "does not divide batch.rows 8; write one of 2, 4, 8"),
        ("rows: 8", "rows: 1048576", "batch.rows"),
        ("row_tokens: 512", "row_tokens: 512, pad_id: 257", "outside the vocabulary (0..256)"),
        ("row_tokens: 512", "row_tokens: 512, packing: concat, row_segments_max: 9", "can't keep a limit"),
        ("seed: 17", "seed: 17\nignore: 256", "would never be trained"),
        ("seed: 17", "seed: 17\nignore: -3000000000\ndtypes: {labels: int32}", "does not fit labels"),
        ("eos: end", "eos: '<|end|>'", "tokenizer.eos"),
        ("bytes: true", "file: code.txt", "tokenizer.file"),
        ("bytes: true", "dir: web", "tokenizer.dir"),
        ("tokenizer: {bytes: true, eos: end}", "", "tokenizer: (nothing): is needed"),
        ("web: 3", "web: .nan", "mixture.0.web: NaN"),
        ('web: 3, "*": 1', "web: 0", "all weights are zero (sources code, web)"),
    ],
)  # fmt: skip
def test_refusals(folder, old, new, line):
    assert old in JOB
    text = JOB.replace(old, new)
    if "1048576" in new:
        text = text.replace("row_tokens: 512", "row_tokens: 1048576")
    faults = faults_of(text, folder)
    assert len(faults) == 1, faults
    assert line in faults[0]


def test_slot_beyond_4_gib_is_refused_with_bytes(folder):
    text = JOB.replace(
        "rows: 8, row_tokens: 512, microbatch_rows: 2",
        "rows: 64, row_tokens: 16777216, microbatch_rows: 64",
    )
    (fault,) = faults_of(text, folder)
    assert "bytes" in fault
    assert "batch.microbatch_rows" in fault


def test_empty_files_fifos_and_dead_links_are_refused(folder):
    (folder / "code.txt").write_text("")
    os.mkfifo(folder / "web" / "c.jsonl")
    (folder / "web" / "d.jsonl").symlink_to(folder / "gone")
    faults = faults_of(JOB, folder)
    assert any("all files are empty" in fault for fault in faults), faults
    assert any("c.jsonl" in fault and "not a regular file" in fault for fault in faults), faults
    assert any("d.jsonl" in fault and "dead link" in fault for fault in faults), faults


def test_misnamed_and_mixed_compressions_are_refused(folder):
    (folder / "code.txt").write_bytes(lzma.compress(b"text"))
    (folder / "web" / "c.jsonl.xz").write_bytes(lzma.compress(b"{}"))
    faults = faults_of(JOB.replace("web/*.jsonl", '"web/*"'), folder)
    assert any("xz by its first bytes" in fault for fault in faults)
    assert any("mixes jsonl and jsonl.xz" in fault for fault in faults)


def test_parquet_is_seekable_and_a_whole_file_compression_of_it_refused(folder):
    pq.write_table(pa.table({"text": ["a"]}), folder / "t.parquet")
    job = resolve_job(JOB.replace("code.txt", "t.parquet"), folder)
    assert job.sources[job.source_index("code")].order_class == "seekable"
    (folder / "t.parquet").rename(folder / "t.parquet.gz")
    (fault,) = faults_of(JOB.replace("code.txt", "t.parquet.gz"), folder)
    assert "unpack it" in fault


def test_parquet_without_the_text_column_is_refused_with_the_columns_it_has(folder):
    pq.write_table(pa.table({"content": ["a"], "id": [1]}), folder / "t.parquet")
    (fault,) = faults_of(JOB.replace("code.txt", "t.parquet"), folder)
    assert fault.startswith('sources.code.text: "text": t.parquet has no such column')
    assert "content, id" in fault


def test_damaged_parquet_is_left_to_the_error_policy(folder):
    (folder / "t.parquet").write_bytes(b"PAR1" + b"\0" * 64)
    assert resolve_job(JOB.replace("code.txt", "t.parquet"), folder).sources[0].format == "parquet"


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_vocabulary_over_the_dtype_is_refused(folder, monkeypatch, dtype):
    large = TokenizerSpec(kind="huggingface", vocabulary_count=(1 << 31) + 5)
    monkeypatch.setattr(resolve_module, "resolve_tokenizer", lambda *_, **__: large)
    text = JOB + f"\ndtypes: {{tokens: {dtype}, labels: int64}}"
    faults = faults_of(text, folder)
    assert f'dtypes.tokens: "{dtype}": ids of the tokenizer go up to 2147483652' in faults[0]


def test_tokenized_sources_need_no_tokenizer(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"\1\0" * 8)
    (tmp_path / "a.idx").write_bytes(b"MMIDIDX\0\0" + b"\0" * 64)
    text = "{batch: {rows: 2, row_tokens: 8}, sources: {a: a.bin}}"
    assert resolve_job(text, tmp_path).tokenizer.kind == "none"
    job = resolve_job(text[:-1] + ", tokenizer: {vocabulary: 50304}}", tmp_path)
    assert (job.tokenizer.kind, job.tokenizer.vocabulary_count) == ("none", 50304)
    (tmp_path / "a.idx").unlink()
    (fault,) = faults_of(text, tmp_path)
    assert "a.idx" in fault


@needs_data
def test_corpora_of_all_formats_resolve_as_one_job():
    text = """
    tokenizer: {file: tokenizers/o200k_base.tiktoken, eos: end}
    batch: {rows: 64, row_tokens: 4096, microbatch_rows: 8}
    sources:
      bible: text/bible_kjv.jsonl.zst
      go: text/code_go.jsonl.gz
      js: text/code_js.jsonl.xz
      python: text/code_python.parquet
      man: "text/manpages_i18n/*/*.parquet"
      shakespeare: text/tinyshakespeare.txt
      gsm: {paths: text/gsm8k/train.jsonl, text: question}
    """
    job = resolve_job(text, DATA, "corpora")
    classes = {source.name: source.order_class for source in job.sources}
    assert [name for name, kind in classes.items() if kind == "streaming"] == ["bible", "go", "js"]
    assert len(job.sources[job.source_index("man")].shards) == 10
    assert job.tokenizer.eos_id == 199_999
    assert job.tokenizer.pattern == "o200k_base"


@needs_data
@pytest.mark.parametrize(
    ("tokenizer", "eos_id"),
    [
        ("{file: tokenizers/gpt2_hf_tokenizer.json, eos: end}", 50256),
        ("{file: tokenizers/gpt2_hf_tokenizer.json, eos: '<|endoftext|>'}", 50256),
        ("{file: tokenizers/cl100k_base.tiktoken, eos: 5}", 5),
        ("{tiktoken: tokenizers/r50k_base.tiktoken, pattern: r50k_base, eos: end}", 50256),
        ("{tiktoken: tokenizers/r50k_base.tiktoken}", None),
    ],
)
def test_real_tokenizers_and_their_eos(tokenizer, eos_id):
    text = f"{{tokenizer: {tokenizer}, batch: {{rows: 2, row_tokens: 64}}, sources: {{t: text/tinyshakespeare.txt}}}}"
    assert resolve_job(text, DATA).tokenizer.eos_id == eos_id


def test_child_answers_with_the_job_or_with_its_faults(folder):
    request = {"text": JOB, "base_dir": str(folder), "name": "job", "mesh": {"dp": 2}}
    answer = resolve_main.respond(io.BytesIO(msgpack.packb(request)))
    job = resolve_job(JOB, folder, "job")
    assert decode_job(answer["job"]) == job
    assert answer["resolved_yaml"] == render_resolved_yaml(job)
    answer = resolve_main.respond(io.BytesIO(msgpack.packb(request | {"mesh": {"dp": 3}})))
    assert answer["error"]["code"] == "config.mesh"
    answer = resolve_main.respond(io.BytesIO(msgpack.packb(request | {"text": "seed: x"})))
    assert answer["error"]["code"] == "config.job"
    assert "batch: (nothing)" in answer["error"]["message"]


@pytest.mark.parametrize("request_bytes", [b"", b"\xc1", b"\x90", b"\x81\xa1a", msgpack.packb({})])
def test_child_answers_malformed_requests(request_bytes):
    assert resolve_main.respond(io.BytesIO(request_bytes))["error"]["code"] == "config"


def test_child_answers_requests_without_a_job(folder):
    answer = resolve_main.respond(io.BytesIO(msgpack.packb({"base_dir": str(folder)})))
    assert answer["error"]["code"] == "config.job"


def test_child_reads_stdin_and_writes_stdout(folder):
    request = msgpack.packb({"text": JOB, "base_dir": str(folder), "name": "job"})
    done = subprocess.run(
        [sys.executable, "-m", "msd_daemon.workers.resolve_main"],
        input=request,
        capture_output=True,
        check=True,
        cwd=Path(__file__).parents[4],
    )
    assert msgpack.unpackb(done.stdout)["job"]["name"] == "job"
    assert done.stderr == b""


def test_small_numbers_of_a_map_travel_as_json_and_stay_numbers(folder):
    """A trainer's dict is sent as JSON, where Python writes 1e-05."""
    job = yaml.safe_load(JOB) | {"mixture": {"0": {"web": 5e-3, "code": 1e-5}}}
    job["defaults"] = {"on_error": {"budget_ratio": 1e-5}, "hold_out": 5e-3}
    assert "1e-05" in json.dumps(job)
    sent = resolve_job(json.dumps(job), folder)
    assert sent == resolve_job(job, folder)
    assert sent.mixture.points[0].weights == {"code": 1e-5, "web": 5e-3}
    assert sent.sources[0].on_error.budget_ratio == 1e-5


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_numbers_without_an_end_are_refused_as_such(folder, value):
    job = yaml.safe_load(JOB) | {"mixture": {"0": {"web": value, "code": 1}}}
    job["defaults"] = {"on_error": {"budget_ratio": value}}
    lines = faults_of(json.dumps(job), folder)
    assert lines == faults_of(job, folder)
    assert any("a weight is finite and not negative" in line for line in lines)
    assert any(line.startswith("defaults.on_error.budget_ratio") for line in lines)
    assert not any("valid number" in line or "is str" in line for line in lines)
