"""Tokenizers: ids equal the reference's, BOS and EOS stand where the job says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from federation.model.job import TokenizerSpec
from msd_client.contract.errors import ConfigError
from msd_daemon.transforms import describe_tokenizer, open_tokenizer
from tests.support.sources import DATA, needs_data

TOKENIZERS = DATA / "tokenizers"
FILES = {
    "o200k_base": "o200k_base.tiktoken",
    "cl100k_base": "cl100k_base.tiktoken",
    "r50k_base": "r50k_base.tiktoken",
    "gpt2_hf_tokenizer": "gpt2_hf_tokenizer.json",
    "claude_legacy_tokenizer": "claude_legacy_tokenizer.json",
    "mistral_v3": "mistral_v3.model",
}


def encode(spec: TokenizerSpec, texts: list[str]) -> list[list[int]]:
    tokenizer = open_tokenizer(spec)
    tokens, offsets = tokenizer.encode_batch(texts)
    assert tokens.dtype == tokenizer.dtype
    assert offsets.dtype == np.int64
    return [tokens[offsets[i] : offsets[i + 1]].tolist() for i in range(len(texts))]


@needs_data
@pytest.mark.parametrize("name", sorted(FILES))
def test_ids_equal_the_golden_ones(name: str) -> None:
    rows: list[dict[str, Any]] = [
        json.loads(line) for line in (TOKENIZERS / "golden.jsonl").read_text().splitlines()
    ]
    spec = describe_tokenizer(TOKENIZERS / FILES[name], eos="none")
    got = encode(spec, [row["text"] for row in rows])
    wrong = [row["id"] for row, ids in zip(rows, got, strict=True) if ids != row[name]]
    assert len(rows) == 551
    assert wrong == []


@needs_data
@pytest.mark.parametrize(
    ("name", "count", "eos", "wide"),
    [
        ("o200k_base", 200_019, 199_999, True),
        ("cl100k_base", 100_277, 100_257, True),
        ("r50k_base", 50_257, 50_256, False),
        ("gpt2_hf_tokenizer", 50_257, 50_256, False),
        ("claude_legacy_tokenizer", 65_000, 0, False),
        ("mistral_v3", 32_768, 2, False),
    ],
)
def test_vocabulary_and_eos_are_found(name: str, count: int, eos: int, wide: bool) -> None:
    spec = describe_tokenizer(TOKENIZERS / FILES[name])
    assert (spec.vocabulary_count, spec.eos_id, spec.bos_id) == (count, eos, None)
    assert spec.library.split()[0] in {"tiktoken", "tokenizers", "sentencepiece"}
    assert len(spec.fingerprint) == 32
    assert open_tokenizer(spec).dtype == (np.int32 if wide else np.uint16)
    assert encode(spec, ["a", ""])[0][-1] == eos


@needs_data
def test_special_tokens_in_tiktoken_text_are_plain_text() -> None:
    spec = describe_tokenizer(TOKENIZERS / FILES["r50k_base"])
    (ids,) = encode(spec, ["<|endoftext|>"])
    assert 50_256 not in ids[:-1]
    assert ids[-1] == 50_256


@needs_data
@pytest.mark.parametrize("text", [" " * 200_000, "a" * 200_000, "\n" * 100_000, "^" * 100_000])
def test_long_runs_of_one_character_neither_hang_nor_crash(text: str) -> None:
    spec = describe_tokenizer(TOKENIZERS / FILES["r50k_base"], eos="none")
    assert len(encode(spec, [text])[0]) > 0


@needs_data
def test_a_folder_and_its_config_name_the_tokens(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").symlink_to(TOKENIZERS / FILES["claude_legacy_tokenizer"])
    config = {"eos_token": {"content": "<META_END>"}, "bos_token": "<META>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    spec = describe_tokenizer(tmp_path, eos="end", bos="start")
    assert (spec.bos_id, spec.eos_id) == (1, 3)


@needs_data
def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path: Path) -> None:
    plain = json.loads((TOKENIZERS / FILES["gpt2_hf_tokenizer"]).read_text())
    plain["truncation"] = {
        "direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0,
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(plain))
    spec = describe_tokenizer(tmp_path / "tokenizer.json", eos="none")
    assert len(encode(spec, ["one two three four five"])[0]) == 5


@pytest.mark.parametrize(
    ("eos", "bos", "want"),
    [
        ("end", "none", (None, 256)),
        ("start", "none", (256, None)),
        ("none", "start", (256, None)),
        ("end", "start", (257, 256)),
        (300, 7, (7, 300)),
        (None, None, (None, None)),
    ],
)
def test_policies_say_where_the_tokens_stand(
    eos: str | int | None, bos: str | int | None, want: tuple[int | None, int | None]
) -> None:
    spec = describe_tokenizer(None, kind="bytes", eos=eos, bos=bos)
    assert (spec.bos_id, spec.eos_id) == want
    before = [] if spec.bos_id is None else [spec.bos_id]
    after = [] if spec.eos_id is None else [spec.eos_id]
    assert spec.vocabulary_count > max([255, *before, *after])
    assert encode(spec, ["é", "", "a"]) == [
        [*before, 0xC3, 0xA9, *after],
        [],
        [*before, 97, *after],
    ]


@needs_data
@pytest.mark.parametrize(
    ("file", "options", "reason"),
    [
        ("missing.json", {}, "is not there"),
        ("golden.jsonl", {}, "neither a tokenizer.json"),
        ("expected.json", {}, "cannot be loaded"),
        ("o200k_base.tiktoken", {"pattern": "what"}, "is none of"),
        ("o200k_base.tiktoken", {"eos": "</s>"}, "neither end, start, none nor a token"),
        ("o200k_base.tiktoken", {"eos": 200_019}, "beyond the 200019 ids"),
        ("o200k_base.tiktoken", {"eos": -1}, "no token id"),
        ("o200k_base.tiktoken", {"eos": True}, "no token id"),
        ("o200k_base.tiktoken", {"eos": "start", "bos": "start"}, "both claim the start"),
        ("gpt2_hf_tokenizer.json", {"bos": "start"}, "names no bos token"),
        ("golden.jsonl", {"kind": "tiktoken"}, "not a tiktoken rank file"),
        ("o200k_base.tiktoken", {"kind": "bytes"}, "give one of them"),
        (None, {"kind": "huggingface"}, "give one of them"),
    ],
)
def test_unknown_files_policies_and_tokens_are_refused(
    file: str | None, options: dict[str, Any], reason: str
) -> None:
    path = None if file is None else TOKENIZERS / file
    with pytest.raises(ConfigError, match=reason):
        describe_tokenizer(path, **options)


@needs_data
def test_a_file_that_changed_since_submit_is_refused(tmp_path: Path) -> None:
    for name in ("r50k_base", "gpt2_hf_tokenizer"):
        path = tmp_path / FILES[name]
        path.write_bytes((TOKENIZERS / FILES[name]).read_bytes())
        spec = describe_tokenizer(path)
        path.write_bytes(path.read_bytes() + b"\n")
        with pytest.raises(ConfigError, match="submit the job anew"):
            open_tokenizer(spec)


def test_text_without_a_tokenizer_is_refused() -> None:
    spec = describe_tokenizer(None, kind="none", vocabulary=50_257)
    assert spec.vocabulary_count == 50_257
    assert encode(spec, []) == []
    with pytest.raises(ConfigError, match="name a tokenizer file"):
        encode(spec, ["a"])
