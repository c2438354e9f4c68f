"""Texts with special tokens by name: ids, characters, and names that are plain text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as LibraryTokenizer

from msd_daemon.transforms import Tokenizer, describe_tokenizer, open_tokenizer
from msd_daemon.transforms.special_text import special_pattern, split_special
from tests.support.sources import DATA, needs_data

TOKENIZERS = DATA / "tokenizers"


def open_file(name: str) -> Tokenizer:
    return open_tokenizer(describe_tokenizer(TOKENIZERS / name))


def test_the_longest_name_counts_and_plain_spans_hide_names() -> None:
    special = {"<a>": 1, "<a>b": 2, "c": 3}
    pattern = special_pattern(special)
    parts = [tuple(part) for part in split_special("x<a>b<a>yc", pattern, special)]
    assert parts == [(0, 1, None), (1, 5, 2), (5, 8, 1), (8, 9, None), (9, 10, 3)]
    parts = [tuple(part) for part in split_special("x<a>b<a>yc", pattern, special, [(1, 5)])]
    assert parts == [(0, 5, None), (5, 8, 1), (8, 9, None), (9, 10, 3)]
    assert [tuple(p) for p in split_special("ccc", pattern, special, [(0, 1), (2, 3)])] == [
        (0, 1, None),
        (1, 2, 3),
        (2, 3, None),
    ]
    assert list(split_special("", pattern, special)) == []
    assert [tuple(part) for part in split_special("ab", None, {})] == [(0, 2, None)]


@needs_data
@pytest.mark.parametrize("name", ["o200k_base", "cl100k_base", "r50k_base"])
def test_tiktoken_ids_equal_its_own_with_all_special_allowed(name: str) -> None:
    tokenizer = open_file(f"{name}.tiktoken")
    library = tokenizer._encoding
    rows = [json.loads(line) for line in (TOKENIZERS / "golden.jsonl").read_text().splitlines()]
    for row in rows[:300]:
        text = f"<|endoftext|>{row['text']}<|endoftext|><|endofprompt|> {row['text']}"
        found = tokenizer.encode_special(text)
        assert found.ids.tolist() == library.encode(text, allowed_special="all"), row["id"]
        check_extents(found, text)


def check_extents(found, text: str) -> None:
    """Tokens are in order and leave no character out."""
    assert len(found.ids) == len(found.begins) == len(found.ends)
    reached = 0
    for begin, end in zip(found.begins.tolist(), found.ends.tolist(), strict=True):
        assert begin <= reached
        assert begin < end
        reached = max(reached, end)
    assert reached == len(text)


@needs_data
def test_characters_of_tokens_are_those_that_they_spell() -> None:
    tokenizer = open_file("r50k_base.tiktoken")
    text = "hi<|endoftext|> é😀 you"
    found = tokenizer.encode_special(text)
    assert found.ids[1] == 50_256
    spelled = [text[b:e] for b, e in zip(found.begins, found.ends, strict=True)]
    assert spelled[:3] == ["hi", "<|endoftext|>", " é"]
    assert set(spelled[3:-1]) <= {"😀", " 😀"}
    assert spelled[-1] == " you"
    bytes_tokenizer = open_tokenizer(describe_tokenizer(None, kind="bytes"))
    found = bytes_tokenizer.encode_special("aé")
    assert [column.tolist() for column in found] == [[97, 0xC3, 0xA9], [0, 1, 1], [1, 2, 2]]
    assert bytes_tokenizer.encode_special("").ids.tolist() == []


@needs_data
def test_control_pieces_are_parsed_by_their_names() -> None:
    tokenizer = open_file("mistral_v3.model")
    found = tokenizer.encode_special("<s>[INST]hello[/INST] hello</s>")
    # No space is put before the text behind a control piece.
    assert found.ids[:2].tolist() == [1, 3]
    assert found.ids[-3:].tolist() == [7080, 29_477, 2]
    hello = open_file("mistral_v3.model").encode_special("hello").ids.tolist()
    assert hello == [7080, 29_477]
    assert found.ids.tolist().index(4) == len(found.ids) - 4
    check_extents(found, "<s>[INST]hello[/INST] hello</s>")
    plain = tokenizer.encode_special("<s>[INST]", [(3, 9)])
    assert plain.ids[0] == 1
    assert 3 not in plain.ids


def library_file(tmp_path: Path) -> Path:
    library = LibraryTokenizer.from_file(str(TOKENIZERS / "gpt2_hf_tokenizer.json"))
    library.add_special_tokens(
        [AddedToken("<|im_start|>"), AddedToken("<|im_end|>", rstrip=True, normalized=False)]
    )
    library.add_tokens([AddedToken("<think>", normalized=False)])
    path = tmp_path / "tokenizer.json"
    library.save(str(path))
    return path


@needs_data
def test_the_library_recognises_names_but_for_those_in_plain_spans(tmp_path: Path) -> None:
    path = library_file(tmp_path)
    tokenizer = open_tokenizer(describe_tokenizer(path))
    assert tokenizer.special_tokens == {
        "<|endoftext|>": 50_256,
        "<|im_start|>": 50_257,
        "<|im_end|>": 50_258,
    }
    library = LibraryTokenizer.from_file(str(path))
    text = "<|im_start|>user\nsay <think> <|im_end|>  \n<|im_start|> é😀 end<|im_end|>"
    ids = library.encode(text, add_special_tokens=False).ids
    found = tokenizer.encode_special(text)
    assert found.ids.tolist() == ids
    # A plain span without a name in it changes nothing, however ids are found.
    same = tokenizer.encode_special(text, [(13, 17)])
    assert [column.tolist() for column in same] == [column.tolist() for column in found]
    at = text.index("<|im_end|>")
    plain = tokenizer.encode_special(text, [(at, at + 10)])
    assert plain.ids.tolist().count(50_258) == 1
    assert plain.ids.tolist().count(50_257) == 2
    assert plain.ids.tolist().count(50_259) == 1
    assert library.decode(plain.ids.tolist(), skip_special_tokens=False) == text
    assert tokenizer.encode_special("", [(0, 0)]).ids.tolist() == []
