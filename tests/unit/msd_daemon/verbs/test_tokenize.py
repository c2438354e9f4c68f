"""`msdctl tokenize`: pairs that hold what the source gives, finished shards kept, others refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from msd_client.contract.errors import JobError
from msd_client.msdctl import main, verbs
from msd_daemon.config.resolve import resolve_job
from msd_daemon.sources.megatron import MegatronShard
from msd_daemon.sources.megatron_writer import MegatronWriter
from msd_daemon.sources.record import ReadMeter
from msd_daemon.transforms import describe_tokenizer, open_tokenizer
from msd_daemon.verbs import tokenize
from tests.support.sources import DATA, IN_ORDER, make_loader, make_spec, needs_data, read_stream

JOB = """
tokenizer: {{bytes: true, eos: {eos}}}
batch: {{rows: 8, row_tokens: 128}}
sources: {{web: "*.jsonl*", other: "*.txt"}}
"""


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(verbs.BUILT_IN, "tokenize", tokenize.__name__)
    monkeypatch.setenv("MSD__DAEMON__STATE_DIR", str(tmp_path / "state"))


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Return a job of two shards: 5 and 600 records, four of the first bad or empty."""
    lines = [json.dumps({"text": f"record {number} é"}) for number in range(5)]
    lines[1:1] = [
        "{broken",
        json.dumps({"no": "text"}),
        json.dumps({"text": ""}),
        '{"text": "\\ud800"}',
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    more = "".join(json.dumps({"text": f"zipped {number}"}) + "\n" for number in range(600))
    (tmp_path / "b.jsonl").write_text(more)
    (tmp_path / "c.txt").write_text("text")
    file = tmp_path / "job.yaml"
    file.write_text(JOB.format(eos="end"))
    return file


def run(capsys: Any, job: Path, *options: str, code: int = 0) -> Any:
    out = job.parent / "out"
    arguments = ["tokenize", str(job), "--source", "web", "--out", str(out), *options]
    assert main.run([*arguments, "--json"]) == code
    captured = capsys.readouterr()
    return json.loads(captured.out) if code == 0 else captured.err


def documents(path: Path) -> list[list[int]]:
    spec = make_spec([path], "megatron", shuffle=IN_ORDER)
    tokenizer = open_tokenizer(describe_tokenizer(None, kind="none", vocabulary=1 << 20))
    return [list(record.tokens) for record in read_stream(make_loader(spec, tokenizer=tokenizer))]


def direct(path: Path, tokenizer: Any) -> list[list[int]]:
    spec = make_spec([path], shuffle=IN_ORDER)
    records = read_stream(make_loader(spec, tokenizer=tokenizer))
    return [list(record.tokens) for record in records if record.status == 0]


@pytest.mark.parametrize("workers", ["1", "2"])
def test_pairs_hold_what_the_source_gives(job: Path, capsys: Any, workers: str) -> None:
    found = run(capsys, job, "--workers", workers)
    assert (found["documents"], found["faulty"], found["failed"]) == (605, 3, {})
    assert found["dropped"] == {
        "bad_syntax": 1,
        "field_missing": 1,
        "empty": 1,
        "bad_encoding": 1,
    }
    assert [shard["bin"] for shard in found["shards"]] == ["00000-a.bin", "00001-b.bin"]
    faults = found["shards"][0]["faults"]
    assert [fault.split(":")[1].split("byte offset")[1] for fault in faults] == [
        " 28",
        " 36",
        " 64",
    ]
    assert all(fault.startswith(str(job.parent / "a.jsonl")) for fault in faults)
    tokenizer = open_tokenizer(describe_tokenizer(None, kind="bytes", eos="end"))
    out = job.parent / "out"
    for name in ("a", "b"):
        number = "ab".index(name)
        assert documents(out / f"0000{number}-{name}.bin") == direct(
            job.parent / f"{name}.jsonl", tokenizer
        )
    expected = [*"record 0 é".encode(), 256]
    assert documents(out / "00000-a.bin")[0] == expected
    assert np.fromfile(out / "00000-a.bin", dtype="<u2")[: len(expected)].tolist() == expected
    names = {path.name for path in out.iterdir()}
    assert names == {
        "00000-a.bin", "00000-a.idx", "00001-b.bin", "00001-b.idx", ".msd-tokenize.json",
        ".msd-tokenize.lock",
    }  # fmt: skip


def test_a_rerun_keeps_what_is_finished_and_does_the_rest(job: Path, capsys: Any) -> None:
    first = run(capsys, job)
    out = job.parent / "out"
    stamps = {path.name: path.stat().st_mtime_ns for path in out.glob("*.bin")}
    with (job.parent / "a.jsonl").open("a") as file:
        file.write(json.dumps({"text": "new"}) + "\n")
    second = run(capsys, job)
    assert second["documents"] == first["documents"] + 1
    assert (out / "00001-b.bin").stat().st_mtime_ns == stamps["00001-b.bin"]
    assert (out / "00000-a.bin").stat().st_mtime_ns != stamps["00000-a.bin"]
    # A pair that was damaged, and one that was removed, are made again.
    (out / "00001-b.bin").write_bytes(b"x")
    (out / "00000-a.idx").unlink()
    assert run(capsys, job) == second
    assert len(documents(out / "00001-b.bin")) == 600
    (job.parent / "a.jsonl").unlink()
    third = run(capsys, job)
    assert third["documents"] == 600
    assert sorted(path.name for path in out.glob("*.bin")) == ["00000-b.bin"]


def test_pairs_of_another_tokenizer_or_source_are_refused_or_made_anew(
    job: Path, capsys: Any
) -> None:
    run(capsys, job)
    job.write_text(JOB.format(eos="none"))
    error = run(capsys, job, code=78)
    assert "holds pairs of another tokenizer vocabulary_count, tokenizer eos_id" in error
    assert "--rewrite" in error
    found = run(capsys, job, "--rewrite")
    assert found["tokens"] == len("record 0 é".encode()) * 5 + sum(
        len(f"zipped {number}") for number in range(600)
    )
    job.write_text(JOB.format(eos="none") + "defaults: {text: other}\n")
    assert "another source (then 'web')" in run(capsys, job, code=78)
    manifest = job.parent / "out" / ".msd-tokenize.json"
    for damage in ("{", "[]", '{"schema": "x"}', '{"schema": "msd.tokenized/1", "shards": [{}]}'):
        manifest.write_text(damage)
        assert "is no manifest of msdctl tokenize" in run(capsys, job, code=78)


def test_a_shard_that_cannot_be_read_fails_and_the_rest_is_written(
    job: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from msd_client.contract.errors import CorruptRecordError
    from msd_daemon.sources import tokenized_shard

    check = tokenized_shard.check_shard

    def refuse(spec: Any, number: int) -> None:
        if number == 0:
            raise CorruptRecordError("a.jsonl is cut: get it again")
        check(spec, number)

    monkeypatch.setattr(tokenized_shard, "check_shard", refuse)
    assert "a.jsonl is cut" in run(capsys, job, "--workers", "1", code=1)
    assert sorted(path.name for path in (job.parent / "out").glob("*.bin")) == ["00001-b.bin"]
    monkeypatch.undo()


def test_unknown_sources_and_samples_that_are_more_than_tokens_are_refused(
    job: Path, capsys: Any
) -> None:
    out = str(job.parent / "out")
    assert main.run(["tokenize", str(job), "--source", "none", "--out", out]) == 78
    assert "has no source 'none': it has other, web" in capsys.readouterr().err
    import dataclasses

    from federation.model.recipe import ChatRule, FimRule, SampleRecipe
    from msd_client.contract.errors import ConfigError
    from msd_daemon.sources.tokenized_shard import check_tokenizable

    spec = make_spec([job.parent / "a.jsonl"])
    check_tokenizable(spec)
    for recipe, reason in (
        (SampleRecipe(chat=ChatRule()), "not trained"),
        (SampleRecipe(fim=FimRule(0.5, 1, 2, 3)), "another one in each epoch"),
    ):
        with pytest.raises(ConfigError, match=reason):
            check_tokenizable(dataclasses.replace(spec, recipe=recipe))


def test_two_at_once_into_one_folder_are_refused(job: Path, capsys: Any) -> None:
    out = job.parent / "out"
    out.mkdir()
    with tokenize._lock(out):
        assert "another msdctl tokenize writes" in run(capsys, job, code=78)


def test_the_writer_leaves_nothing_behind_when_it_fails(tmp_path: Path) -> None:
    with pytest.raises(KeyError), MegatronWriter(tmp_path / "x", np.dtype(np.uint16)) as writer:
        writer.append([np.arange(4)], np.array([4]))
        raise KeyError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", [np.dtype(np.uint16), np.dtype(np.int32)])
def test_pairs_of_many_documents_and_none(tmp_path: Path, dtype: Any) -> None:
    lengths = np.arange(200_000) % 3
    tokens = np.arange(int(lengths.sum())) % 60_000
    with MegatronWriter(tmp_path / "x.y", dtype) as writer:
        half = int(lengths[:100_000].sum())
        writer.append([tokens[:half]], lengths[:100_000])
        writer.append([tokens[half : half + 7], tokens[half + 7 :]], lengths[100_000:])
        writer.finish()
    assert (writer.documents, writer.tokens) == (133_333, len(tokens))
    spec = make_spec([tmp_path / "x.y.bin"], "megatron")
    shard = MegatronShard(spec.shards[0], ReadMeter())
    assert shard.document_count == 133_333
    block = shard.open_block(0, 133_333, 1 << 30)
    assert block.lengths.tolist() == lengths[lengths > 0].tolist()
    assert not block.status.any()
    assert shard.read_tokens(0, len(tokens)).tolist() == tokens.tolist()
    shard.close()
    with MegatronWriter(tmp_path / "empty", dtype) as writer:
        writer.finish()
    assert (tmp_path / "empty.bin").stat().st_size == 0
    assert documents(tmp_path / "empty.bin") == []


@needs_data
def test_a_compressed_corpus_by_a_real_tokenizer(tmp_path: Path, capsys: Any) -> None:
    text = "".join(json.dumps({"text": f"The {n}th line, é😀 of text."}) + "\n" for n in range(300))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    file = DATA / "tokenizers" / "mistral_v3.model"
    job = tmp_path / "job.yaml"
    job.write_text(
        f'tokenizer: {{file: "{file}", bos: start, eos: end}}\n'
        "batch: {rows: 8, row_tokens: 128}\nsources: {web: a.jsonl.gz}\n"
    )
    found = run(capsys, job)
    tokenizer = open_tokenizer(describe_tokenizer(file, eos="end", bos="start"))
    assert documents(tmp_path / "out/00000-a.bin") == direct(tmp_path / "a.jsonl.gz", tokenizer)
    manifest = json.loads((tmp_path / "out" / ".msd-tokenize.json").read_text())
    assert manifest["tokenizer"]["fingerprint"] == tokenizer.spec.fingerprint
    assert manifest["shards"] == found["shards"]
    assert manifest["dtype"] == "uint16"


READER = "batch: {{rows: 8, row_tokens: 128}}\nsources: {{qa: out/}}\ntokenizer: {0}\n"


def test_the_folder_is_a_source_of_the_tokenizer_that_made_it(job: Path, capsys: Any) -> None:
    run(capsys, job)
    resolved = resolve_job(READER.format("{bytes: true, eos: end}"), job.parent)
    assert [Path(shard.path).name for shard in resolved.sources[0].shards] == [
        "00000-a.bin",
        "00001-b.bin",
    ]
    assert resolved.sources[0].format == "megatron"
    for fitting in ("{vocabulary: 257}", "{vocabulary: 300}"):
        assert resolve_job(READER.format(fitting), job.parent).sources[0].is_tokenized
    without = READER.format("").replace("tokenizer: \n", "")
    assert resolve_job(without, job.parent).sources[0].is_tokenized


def test_pairs_of_another_tokenizer_are_no_source(job: Path, capsys: Any) -> None:
    run(capsys, job)
    out = job.parent / "out"
    with pytest.raises(JobError) as caught:
        resolve_job(READER.format("{bytes: true, eos: none}"), job.parent)
    assert (
        f'sources.qa.paths: "{out}": msdctl tokenize made its pairs with another tokenizer '
        "(eos_id 256) than the job's (eos_id None); give the job that tokenizer, with its bos and "
        "eos, or make the pairs anew (--rewrite)"
    ) in str(caught.value)
    with pytest.raises(JobError, match=r"a vocabulary of 257, the job's is 256; write tokenizer"):
        resolve_job(READER.format("{vocabulary: 256}"), job.parent)
    manifest = out / ".msd-tokenize.json"
    found = json.loads(manifest.read_text())
    found["tokenizer"] |= {"kind": "huggingface", "fingerprint": "abc"}
    manifest.write_text(json.dumps(found))
    with pytest.raises(JobError) as caught:
        resolve_job(READER.format("{bytes: true, eos: end}"), job.parent)
    assert "(kind huggingface, fingerprint abc) than the job's (kind bytes, fingerprint " in str(
        caught.value
    )
    for damage in ("{", '{"schema": "msd.tokenized/1", "shards": [], "tokenizer": 3}'):
        manifest.write_text(damage)
        with pytest.raises(JobError, match="is no manifest of msdctl tokenize"):
            resolve_job(READER.format("{bytes: true, eos: end}"), job.parent)


def test_a_manifest_of_the_former_name_is_taken_over(job: Path, capsys: Any) -> None:
    first = run(capsys, job)
    out = job.parent / "out"
    (out / ".msd-tokenize.json").rename(out / "msd-tokenize.json")
    stamps = {path.name: path.stat().st_mtime_ns for path in out.glob("*.bin")}
    assert run(capsys, job) == first
    assert {path.name: path.stat().st_mtime_ns for path in out.glob("*.bin")} == stamps
    assert not (out / "msd-tokenize.json").exists()
    assert (out / ".msd-tokenize.json").is_file()
