"""Every handed text corpus gives the rows, tokens and digests that independent tools gave."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from typing import Any

import numpy as np
import pytest

from msd_daemon.transforms import Tokenizer, describe_tokenizer, open_tokenizer
from tests.support.sources import (
    DATA,
    IN_ORDER,
    make_loader,
    make_spec,
    needs_data,
    read_chunks,
    read_stream,
    texts_of,
)

pytestmark = needs_data


def expected() -> dict[str, dict[str, Any]]:
    path = DATA / "text" / "expected.json"
    if not path.exists():
        return {}
    rows: dict[str, dict[str, Any]] = json.loads(path.read_text())
    return {name: row for name, row in rows.items() if not name.endswith((".arrow", ".feather"))}


@cache
def o200k() -> Tokenizer:
    return open_tokenizer(
        describe_tokenizer(DATA / "tokenizers" / "o200k_base.tiktoken", eos="none")
    )


@pytest.mark.parametrize("name", sorted(expected()))
def test_rows_tokens_and_digest_of(name: str) -> None:
    row = expected()[name]
    field = "question+answer" if name.startswith("gsm8k") else row["text_field"]
    spec = make_spec([DATA / "text" / name], text_field=field, shuffle=IN_ORDER)
    loader = make_loader(spec, tokenizer=o200k())
    digest = hashlib.sha256()
    rows = tokens = 0
    for draft in read_chunks(loader):
        rows += len(draft.meta.lengths)
        tokens += draft.payload_tokens
        for part in draft.payload:
            digest.update(part.astype("<u4").tobytes())
    assert loader.statistics().faults == {}
    assert (rows, tokens) == (row["rows"], row["tokens"]["o200k_base"])
    assert digest.hexdigest() == row["tokens_u32le_sha256"]["o200k_base"]


def test_ten_languages_of_a_hive_folder_are_one_source() -> None:
    spec = make_spec([DATA / "text" / "manpages_i18n"])
    rows = [row["rows"] for name, row in expected().items() if name.startswith("manpages_i18n")]
    drafts = read_chunks(make_loader(spec))
    assert len(spec.shards) == len(rows) == 10
    assert sum(len(draft.meta.lengths) for draft in drafts) == sum(rows)


def test_blank_line_blocks_of_a_text_file_are_the_documents_of_its_jsonl_twin() -> None:
    text = make_spec(
        [DATA / "text" / "tinyshakespeare.txt"], text_document="blank_line", shuffle=IN_ORDER
    )
    twin = make_spec([DATA / "text" / "shakespeare.jsonl.zst"], shuffle=IN_ORDER)

    documents = texts_of(read_stream(make_loader(text)))
    # The twin was split at "\\n\\n": three of its documents begin with a newline, one ends so.
    assert documents == [one.strip("\n") for one in texts_of(read_stream(make_loader(twin)))]


@pytest.mark.parametrize(
    ("name", "documents", "tokens"),
    [
        ("bible_o200k_text_sentence", 350, 378190),
        ("shakespeare_r50k_text_document", 7222, 330807),
    ],
)
def test_megatron_pairs_give_their_documents(name: str, documents: int, tokens: int) -> None:
    path = DATA / "shards" / "megatron" / f"{name}.bin"
    spec = make_spec([path], shuffle=IN_ORDER)
    drafts = read_chunks(make_loader(spec))
    dtype = drafts[0].dtype
    assert sum(len(draft.meta.lengths) for draft in drafts) == documents
    assert sum(draft.payload_tokens for draft in drafts) == tokens
    payload = np.concatenate([part for draft in drafts for part in draft.payload])
    assert payload.dtype == dtype
    assert payload.tobytes() == path.read_bytes()
