"""SentencePiece models, GPT-2 pairs and CLIP's list of merges, as they are published."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import numpy as np
import pytest

from msd_client.contract.errors import ConfigError
from msd_daemon.config.faults import Fault
from msd_daemon.config.job_file import TokenizerFile
from msd_daemon.config.tokenizer_section import resolve_tokenizer
from msd_daemon.transforms import describe_tokenizer, open_tokenizer
from msd_daemon.transforms.decoder import open_decoder
from tests.support.sources import DATA, needs_data

TOKENIZERS = DATA / "tokenizers"
CLIP = TOKENIZERS / "clip_bpe_simple_vocab_16e6.txt.gz"
PAIR = TOKENIZERS / "gpt2-tiny-vocab.json"
MISTRAL = TOKENIZERS / "mistral_v3.model"


def encode(path: Path, *texts: str, eos: str = "none", bos: str = "none") -> list[list[int]]:
    tokenizer = open_tokenizer(describe_tokenizer(path, eos=eos, bos=bos))
    tokens, offsets = tokenizer.encode_batch(texts)
    return [tokens[offsets[i] : offsets[i + 1]].tolist() for i in range(len(texts))]


@needs_data
def test_clip_has_its_published_vocabulary_and_ids() -> None:
    spec = describe_tokenizer(CLIP, eos="end", bos="start")
    assert (spec.kind, spec.vocabulary_count) == ("clip", 49_408)
    assert (spec.bos_id, spec.eos_id) == (49_406, 49_407)
    assert encode(CLIP, "a photo of a cat", "Hello   WORLD", "a diagram", "") == [
        [320, 1125, 539, 320, 2368],
        [3306, 1002],
        [320, 22_697],
        [],
    ]
    assert encode(CLIP, "a dog", eos="end", bos="start") == [[49_406, 320, 1929, 49_407]]
    assert encode(CLIP, "<|endoftext|>") == [[49_407]]


@needs_data
def test_a_gpt2_pair_merges_as_its_list_says() -> None:
    spec = describe_tokenizer(PAIR)
    assert (spec.kind, spec.vocabulary_count, spec.eos_id) == ("bpe_files", 5000, 4999)
    text = "The total cost isn't 1234 dollars, is it?\n\n  Amazing: a_b(c)  end"
    assert encode(PAIR, text) == [reference_pair(text)]
    assert encode(PAIR, "total amazing") == [reference_pair("total amazing")]
    assert open_decoder(spec)(encode(PAIR, text + " é😀")[0]) == text + " é😀"


def reference_pair(text: str) -> list[int]:
    """Merge plain ASCII the slow way: always the pair that comes first in the list."""
    ids = json.loads(PAIR.read_text())
    lines = (TOKENIZERS / "gpt2-tiny-merges.txt").read_text().splitlines()[1:]
    ranks = {tuple(line.split()): rank for rank, line in enumerate(lines)}
    found = []
    split = r"'s|'t|'re|'ve|'m|'ll|'d| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+"
    for word in re.findall(split, text):
        pieces = list(word.replace(" ", "Ġ").replace("\n", "Ċ"))
        while True:
            pairs = [(ranks.get(pair, 1 << 30), at) for at, pair in enumerate(zip(pieces, pieces[1:]))]  # noqa: B905, RUF007 # fmt: skip
            rank, at = min(pairs, default=(1 << 30, 0))
            if rank == 1 << 30:
                break
            pieces[at : at + 2] = ["".join(pieces[at : at + 2])]
        found += [ids[piece] for piece in pieces]
    return found


@needs_data
def test_sentencepiece_puts_its_own_tokens_where_the_job_says() -> None:
    assert encode(MISTRAL, "hello", eos="end", bos="start") == [[1, 7080, 29_477, 2]]
    assert encode(MISTRAL, "hello", eos="[SUFFIX]") == [[7080, 29_477, 13]]
    assert encode(MISTRAL, "a\0b", "[INST]</s>", "") == [
        [1032, 771, 29_494],
        encode(MISTRAL, "[INST]</s>")[0],
        [],
    ]
    assert not {2, 3} & set(encode(MISTRAL, "[INST]</s>")[0])


@needs_data
def test_a_lone_surrogate_is_an_encoding_error_not_a_crash() -> None:
    tokenizer = open_tokenizer(describe_tokenizer(MISTRAL))
    with pytest.raises(UnicodeEncodeError, match="surrogates not allowed"):
        tokenizer.encode_batch(["fine", "a\ud800b"])
    assert tokenizer.encode_batch(["fine"])[0].dtype == np.uint16


@needs_data
def test_sentencepiece_ids_become_text_again() -> None:
    decode = open_decoder(describe_tokenizer(MISTRAL))
    assert decode([1, 3, 7080, 29_477, 4, 99_999]) == "<s>[INST]hello[/INST]<|99999|>"


@needs_data
def test_a_folder_names_its_tokenizer_as_hugging_face_does(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_bytes(PAIR.read_bytes())
    (tmp_path / "merges.txt").write_bytes((TOKENIZERS / "gpt2-tiny-merges.txt").read_bytes())
    assert describe_tokenizer(tmp_path).kind == "bpe_files"
    (tmp_path / "tokenizer.model").symlink_to(MISTRAL)
    assert describe_tokenizer(tmp_path).kind == "sentencepiece"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "[/INST]"}))
    assert describe_tokenizer(tmp_path).eos_id == 4


@needs_data
def test_both_files_of_a_pair_are_in_its_fingerprint(tmp_path: Path) -> None:
    vocabulary, merges = tmp_path / "x-vocab.json", tmp_path / "x-merges.txt"
    vocabulary.write_bytes(PAIR.read_bytes())
    content = (TOKENIZERS / "gpt2-tiny-merges.txt").read_text()
    merges.write_text(content)
    spec = describe_tokenizer(vocabulary)
    merges.write_text("\n".join(content.splitlines()[:-1]))
    assert describe_tokenizer(vocabulary).fingerprint != spec.fingerprint
    with pytest.raises(ConfigError, match="submit the job anew"):
        open_tokenizer(spec)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.model", b"what", "no SentencePiece model"),
        ("a.model", b"", "no SentencePiece model"),
        ("a.txt.gz", b"not gzip", "cannot be read"),
        ("a.txt.gz", gzip.compress(b"#version\na b c", mtime=0), "line 2 is no pair"),
        ("a.txt.gz", gzip.compress(b"#version\na b", mtime=0), "has 1 merges"),
        ("a.txt.gz", gzip.compress(b"\xff\xfe", mtime=0), "not UTF-8"),
        ("a.txt.gz", gzip.compress(b"a b\n" * 1000, mtime=0)[:-9], "cannot be read"),
        ("vocab.json", b'{"a": "b"}', "no map of pieces to ids"),
        ("vocab.json", b"[" * 100_000, "not readable JSON"),
        ("vocab.json", b'{"a": 0}', "do not fit"),
    ],
)
def test_damaged_files_are_refused_by_name(
    tmp_path: Path, name: str, content: bytes, reason: str
) -> None:
    (tmp_path / name).write_bytes(content)
    (tmp_path / "merges.txt").write_text("#version: 0.2\nq u\n")
    with pytest.raises(ConfigError, match=reason) as caught:
        describe_tokenizer(tmp_path / name)
    assert str(tmp_path / name) in caught.value.message


@needs_data
def test_a_job_file_takes_them(tmp_path: Path) -> None:
    faults: list[Fault] = []
    section = TokenizerFile(file=str(MISTRAL), bos="start", eos="end")
    spec = resolve_tokenizer(section, tmp_path, faults, is_needed=True)
    assert spec is not None
    assert (spec.kind, spec.bos_id, spec.eos_id, faults) == ("sentencepiece", 1, 2, [])
    assert (
        resolve_tokenizer(TokenizerFile(file="b.model"), tmp_path, faults, is_needed=True) is None
    )
    assert "b.model is not there" in faults[0].line()
