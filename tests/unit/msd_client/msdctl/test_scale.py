"""`msdctl scale`: what it sends, and what it shows."""

from __future__ import annotations

import json
from typing import Any

import pytest

from msd_client import control
from msd_client.msdctl import main

SCALING = {
    "is_on": True,
    "loaders": 3,
    "loaders_wanted": 4,
    "loaders_max": 8,
    "reason": "a load of 2.90 workers",
    "steps_per_s": 4.0,
    "moves": 2,
    "sources": [
        {
            "name": "web", "load": 0.4111, "load_ahead": 0.4, "loaders": [0], "partitions": 1,
            "pinned": None, "is_parked": False, "blocks_ahead": 8,
        },
        {
            "name": "code", "load": 2.5, "load_ahead": 2.5, "loaders": [0, 1, 2], "partitions": 3,
            "pinned": 3, "is_parked": False, "blocks_ahead": 0,
        },
        {
            "name": "old", "load": 0.0, "load_ahead": 0.0, "loaders": [1], "partitions": 1,
            "pinned": None, "is_parked": True, "blocks_ahead": 0,
        },
    ],
    "last": [{"source": "code", "before": [0], "after": [0, 1, 2], "reason": "asked", "time": 1.0}],
}  # fmt: skip


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []

    def request(_socket: object, message: dict[str, Any], **_: object) -> dict[str, Any]:
        messages.append(message)
        if message["verb"] == "scale":
            return {"job": "gpt", **message}
        return {"jobs": [{"name": "gpt", "scaling": SCALING}, {"name": "new", "scaling": None}]}

    monkeypatch.setattr(control, "request", request)
    return messages


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["code", "6"], {"source": "code", "partitions": 6}),
        (["code", "auto", "--job", "gpt"], {"source": "code", "partitions": None, "job": "gpt"}),
        (
            ["code", "2", "--loaders", "0,5"],
            {"source": "code", "partitions": 2, "loaders": [0, 5]},
        ),
        (["--max", "4"], {"loaders_max": 4}),
    ],
)
def test_it_sends_what_was_asked(
    sent: list[dict[str, Any]], arguments: list[str], message: dict[str, Any]
) -> None:
    assert main.run(["scale", *arguments]) == 0
    assert sent == [{"verb": "scale"} | message]


@pytest.mark.parametrize(
    "arguments", [["code", "0"], ["code", "many"], ["code", "1", "--loaders", "x"]]
)
def test_what_is_no_number_is_refused_before_anything_is_sent(
    sent: list[dict[str, Any]], arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["scale", *arguments]) != 0
    assert "write" in capsys.readouterr().err
    assert sent == []


@pytest.mark.usefixtures("sent")
def test_it_shows_loads_loaders_and_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["scale"]) == 0
    out = capsys.readouterr().out
    for part in (
        "gpt: 3 loader workers of at most 8, 4 wanted: a load of 2.90 workers",
        "0.41",
        "0 1 2",
        "set to 3",
        "nothing open",
        "8 blocks fetched ahead",
        "code: loaders [0] -> [0, 1, 2]: asked",
        "new: nothing is read yet",
    ):
        assert part in out


@pytest.mark.usefixtures("sent")
def test_json_of_one_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["scale", "code", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "msd.scale/1"
    assert [entry["name"] for entry in found["jobs"][0]["scaling"]["sources"]] == ["code"]


@pytest.mark.parametrize("arguments", [[], ["nope"], ["--json"], ["nope", "--json"]])
def test_without_a_job_there_is_nothing_to_show(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(control, "request", lambda *_, **__: {"jobs": []})
    assert main.run(["scale", *arguments]) == 4
    assert "no job runs" in capsys.readouterr().err


def test_a_source_that_no_job_has_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = [{"name": "gpt", "scaling": SCALING}]
    monkeypatch.setattr(control, "request", lambda *_, **__: {"jobs": jobs})
    assert main.run(["scale", "nope"]) == 4
    assert "'nope': web, code, old" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("is_pending", "text"),
    [
        (True, "will be read in 6 partitions from the next block on"),
        (False, "is read in 6 partitions"),
    ],
)
def test_a_pending_move_is_told_as_such(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_pending: bool,
    text: str,
) -> None:
    answer = {"job": "gpt", "source": "code", "partitions": 6, "is_pending": is_pending}
    monkeypatch.setattr(control, "request", lambda *_, **__: answer)
    assert main.run(["scale", "code", "6"]) == 0
    captured = capsys.readouterr()
    assert text in captured.out + captured.err


def test_a_move_under_way_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    web, *others = SCALING["sources"]  # type: ignore[misc]
    moving = SCALING | {"sources": [web | {"partitions_pending": 1}, *others]}
    jobs = [{"name": "gpt", "scaling": moving}]
    monkeypatch.setattr(control, "request", lambda *_, **__: {"jobs": jobs})
    assert main.run(["scale"]) == 0
    assert "moves: 1 partition from the next block on" in capsys.readouterr().out
