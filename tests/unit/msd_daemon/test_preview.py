"""Previewed rows hold the text of the files, piece by piece, with joins and padding told."""

import json
from collections import defaultdict
from pathlib import Path

import pytest

from msd_client.contract.errors import CorruptRecordError, DataError, SourceExhaustedError
from msd_client.msdctl import main, verbs
from msd_daemon.config.resolve import resolve_job
from msd_daemon.preview import StreamPreview
from msd_daemon.transforms.decoder import open_decoder
from msd_daemon.verbs.preview import row_lines
from tests.support.sources import DATA, needs_data

ROOT = Path(__file__).parents[3]


@pytest.fixture
def folder(tmp_path):
    for name, count, words in (("a", 40, 3), ("b", 6, 30)):
        lines = [json.dumps({"text": f"{name}{i} " * words}) for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def job_text(**batch):
    rule = ", ".join(f"{key}: {value}" for key, value in batch.items())
    return (
        "{seed: 3, tokenizer: {bytes: true, eos: end}, sources: {a: a.jsonl, b: b.jsonl}, "
        f"batch: {{{rule}}}}}"
    )


def rows_of(text, folder, count=100):
    job = resolve_job(text, folder, "job")
    preview = StreamPreview(job)
    try:
        plan = preview.plan_first_step()
        return job, plan, list(preview.rows(plan, count))
    finally:
        preview.close()


@pytest.mark.parametrize("packing", ["best_fit", "best_fit_even", "concat", "padded"])
def test_pieces_are_the_text_of_the_documents(folder, packing):
    job, plan, rows = rows_of(job_text(rows=4, row_tokens=64, packing=packing), folder)
    decode = open_decoder(job.tokenizer)
    texts = {
        json.loads(line)["text"]
        for name in "ab"
        for line in (folder / f"{name}.jsonl").read_text().splitlines()
    }
    assert len(rows) == plan.rows == 4
    for row in rows:
        used = sum(len(segment.tokens) for segment in row.segments)
        assert used + row.pad_tokens == 64
        for segment in row.segments:
            piece = decode(segment.tokens.tolist())
            if len(segment.tokens) == segment.document_tokens:
                assert piece.endswith("<|256|>")
                assert piece.removesuffix("<|256|>") in texts
            else:
                assert any(piece.removesuffix("<|256|>") in text for text in texts)
                assert segment.source == "b" or packing == "concat"


def test_count_limits_the_rows(folder):
    _, _, rows = rows_of(job_text(rows=4, row_tokens=64), folder, count=2)
    assert [row.number for row in rows] == [0, 1]


def test_joins_and_padding_are_marked(folder):
    job, _, rows = rows_of(job_text(rows=2, row_tokens=64, packing="padded"), folder)
    decode = open_decoder(job.tokenizer)
    text = "\n".join("\n".join(row_lines(row, decode, 20)) for row in rows)
    assert "── padding, " in text
    assert "── a, whole document of " in text
    assert "characters ...]" in text or "── b" not in text


def test_pieces_of_one_group_are_told(folder):
    lines = [json.dumps({"text": f"{n} {k}", "pair": n}) for n in range(9) for k in "ab"]
    (folder / "a.jsonl").write_text("\n".join(lines) + "\n")
    text = job_text(rows=2, row_tokens=32).replace(
        "a: a.jsonl, b: b.jsonl", "a: {paths: a.jsonl, group: {field: pair}}"
    )
    job, plan, rows = rows_of(text, folder)
    begins = [segment.begins_group for row in rows for segment in row.segments]
    assert begins == plan.group_begins.tolist() == [True, False] * (len(begins) // 2)
    lines = [line for row in rows for line in row_lines(row, open_decoder(job.tokenizer), 90)]
    told = [line.endswith(", of the same group") for line in lines if line.startswith("── a")]
    assert told == [False, True] * (len(begins) // 2)


def test_bad_record_under_fail_is_named(folder):
    (folder / "a.jsonl").write_text("{broken\n" * 40)
    text = job_text(rows=4, row_tokens=64)[:-1] + ", defaults: {on_error: fail}}"
    with pytest.raises(CorruptRecordError, match=r"a\.jsonl"):
        rows_of(text, folder)


def test_sources_without_a_record_end_with_their_name(folder):
    (folder / "a.jsonl").write_text("\n\n")
    with pytest.raises((SourceExhaustedError, DataError), match=r"source .?a"):
        rows_of(job_text(rows=4, row_tokens=64), folder)


def test_verb_prints_text_and_json(folder, capsys, monkeypatch):
    monkeypatch.setitem(verbs.BUILT_IN, "preview", "msd_daemon.verbs.preview")
    job = folder / "job.yaml"
    job.write_text(job_text(rows=4, row_tokens=64))
    assert main.run(["preview", str(job), "--rows", "3"]) == 0
    assert capsys.readouterr().out.count("══ row ") == 3
    assert main.run(["preview", str(job), "--rows", "1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "msd.preview/1"
    assert len(document["rows"]) == 1
    job.write_text("seed: x")
    assert main.run(["preview", str(job)]) == 78


def test_example_of_the_system_resolves_where_its_files_are(monkeypatch, capsys):
    if not Path("/usr/share/common-licenses").is_dir():
        pytest.skip("no Debian license texts on this machine")
    monkeypatch.setitem(verbs.BUILT_IN, "check", "msd_daemon.verbs.check")
    example = ROOT / "examples" / "system_text.yaml"
    assert main.run(["check", str(example), "--mesh", "dp=2,tp=2"]) == 0
    assert "licenses" in capsys.readouterr().out


@needs_data
@pytest.mark.parametrize(
    "tokenizer",
    [
        "{file: tokenizers/o200k_base.tiktoken, eos: end}",
        "{file: tokenizers/gpt2_hf_tokenizer.json, eos: end}",
        "{bytes: true}",
    ],
)
def test_decoded_pieces_join_to_the_real_document(tokenizer):
    text = (
        f"{{tokenizer: {tokenizer}, batch: {{rows: 200, row_tokens: 2048}}, "
        "sources: {t: text/tinyshakespeare.txt}, defaults: {shuffle: false}, steps: 1}"
    )
    job, _, rows = rows_of(text, DATA, count=200)
    decode = open_decoder(job.tokenizer)
    pieces = defaultdict(str)
    for row in rows:
        for segment in row.segments:
            pieces[segment.offset] = decode(segment.tokens.tolist())
    document = "".join(pieces[offset] for offset in sorted(pieces))
    assert document.startswith("First Citizen:\nBefore we proceed any further, hear me speak.")
    whole = (DATA / "text" / "tinyshakespeare.txt").read_text()
    assert document[:100_000] == whole[:100_000]


def test_a_varlen_step_is_previewed_microbatch_by_microbatch(folder, monkeypatch, capsys):
    monkeypatch.setitem(verbs.BUILT_IN, "preview", "msd_daemon.verbs.preview")
    batch = {"packing": "varlen", "step_tokens": 600, "microbatch_tokens": 256}
    _, plan, rows = rows_of(job_text(**batch), folder)
    assert len(rows) == plan.rows == plan.microbatch_count >= 3
    assert sum(len(s.tokens) for row in rows for s in row.segments) >= 600
    assert all(sum(len(s.tokens) for s in row.segments) + row.pad_tokens == 256 for row in rows)
    (folder / "job.yaml").write_text(job_text(**batch))
    assert main.run(["preview", str(folder / "job.yaml")]) == 0
    assert f"{plan.rows} microbatches of 256 tokens" in capsys.readouterr().out
