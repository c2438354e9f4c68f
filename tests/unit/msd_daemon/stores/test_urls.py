"""URLs: parts, globs, braces, and that none carries a credential."""

from __future__ import annotations

import pytest

from msd_client.contract.errors import ConfigError
from msd_daemon.stores.urls import KeyPattern, StoreUrl, expand_braces, folder_of, parse_url


@pytest.mark.parametrize(
    ("url", "want"),
    [
        ("s3://bucket/a/b c.jsonl", ("s3", "bucket", "a/b c.jsonl")),
        ("S3://bucket", ("s3", "bucket", "")),
        ("gs://b/", ("gs", "b", "")),
        (
            "https://h.example/a/b.tar?download=true",
            ("https", "h.example", "a/b.tar?download=true"),
        ),
        ("http://127.0.0.1:80/x", ("http", "127.0.0.1:80", "x")),
        ("http://[::1]:8080/x", ("http", "[::1]:8080", "x")),
        ("file:///tmp/x", ("file", "", "tmp/x")),
        ("hf://datasets/org/name/d/x.parquet", ("hf", "datasets/org/name", "d/x.parquet")),
        ("hf://datasets/org/name@v1/x", ("hf", "datasets/org/name@v1", "x")),
        ("hf://org/model/x.txt", ("hf", "models/org/model", "x.txt")),
    ],
)
def test_parts(url: str, want: tuple[str, str, str]) -> None:
    assert parse_url(url) == StoreUrl(*want)


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("ftp://h/x", "unknown scheme"),
        ("s3:///key", "names no bucket"),
        ("http:///x", "names no host"),
        ("http://h:port/x", "is no URL"),
        ("hf://datasets/org", "names no repository"),
        ("https://user:hunter2@h/x", "holds a credential"),
        ("https://h/x?X-Amz-Signature=hunter2", "parameter 'X-Amz-Signature'"),
        ("https://h/x?a=1&sig=hunter2&se=2030", "parameter 'sig'"),
        ("https://h/x?access_token=hunter2", "parameter 'access_token'"),
        ("s3://KEY:hunter2@bucket/x", "before '@'"),
    ],
)
def test_refusals_never_repeat_a_secret(url: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match) as caught:
        parse_url(url)
    assert "hunter2" not in caught.value.message


def test_braces_expand_as_in_a_shell() -> None:
    assert list(expand_braces("a-{08..11}.tar")) == [f"a-{n}.tar" for n in ("08", "09", "10", "11")]
    assert list(expand_braces("{a,b}/{1..2}")) == ["a/1", "a/2", "b/1", "b/2"]
    assert list(expand_braces("{x}{3..1}")) == ["{x}{3..1}"]
    with pytest.raises(ConfigError, match="over 1000000 shards"):
        list(expand_braces("{0..999999999}"))
    with pytest.raises(ConfigError, match="over 1000000 shards"):
        list(expand_braces("{0..9999}{0..9999}"))


@pytest.mark.parametrize(
    ("pattern", "hits", "misses"),
    [
        ("d/*.jsonl", ["d/a.jsonl", "d/.jsonl"], ["d/e/a.jsonl", "d/a.jsonl.gz", "x/d/a.jsonl"]),
        ("d/**/*.txt", ["d/a.txt", "d/e/f/a.txt"], ["a.txt", "d/a.txtx"]),
        ("d/**", ["d/a", "d/e/f"], ["e/d"]),
        ("a?[0-9][!x].(b)", ["ab1y.(b)"], ["ab1x.(b)", "a/1y.(b)"]),
        ("p-{0..2}.gz", ["p-1.gz"], ["p-3.gz"]),
        ("[", ["["], ["]"]),
    ],
)
def test_patterns_of_keys(pattern: str, hits: list[str], misses: list[str]) -> None:
    rule = KeyPattern(pattern)
    assert [rule.matches(key) for key in hits] == [True] * len(hits)
    assert [rule.matches(key) for key in misses] == [False] * len(misses)


def test_the_folder_listed_is_the_longest_without_a_pattern() -> None:
    assert folder_of("a/b/c-*.jsonl") == "a/b/"
    assert folder_of("*.jsonl") == ""
    assert folder_of("a/{b,c}/x") == "a/"
