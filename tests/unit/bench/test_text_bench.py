"""The text bench compares equal work: the loader's tokens are those of the library."""

from __future__ import annotations

import pytest

from bench import text, text_corpus


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    paths, texts = text_corpus.make_shards(folder, 200_000, folder / "no data")
    return folder, paths, texts


def test_made_texts_have_about_the_bytes_asked_for(made):
    _, paths, texts = made
    assert len(paths) == text_corpus.SHARDS
    assert 100_000 < sum(map(len, texts)) < 400_000
    assert list(text_corpus.made_texts(200_000)) == texts


def test_rounds_count_the_tokens_of_both_sides(made):
    folder, paths, texts = made
    found = text_corpus.tokenizers(folder, texts, folder / "no data")
    assert sorted(found) == ["bytes_tiktoken", "trained_hf"]
    counts = {}
    for name, tokenizer in found.items():
        job = text.write_job(folder / f"{name}.yaml", paths, tokenizer)
        (one,) = text.measure(job, texts, 1)  # it ends with an error where tokens differ
        assert one["library_s"] > 0 < one["loader_s"]
        counts[name] = one["tokens"]
    size = sum(map(len, texts))
    assert size / 8 < counts["trained_hf"] < size / 2
    assert size / 8 < counts["bytes_tiktoken"] < size / 2
