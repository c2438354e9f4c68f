"""A chat template that cannot be used is refused when the job is resolved, not at its first record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from federation.model.job import ResolvedJob
from msd_client.contract.errors import JobError
from msd_daemon.config.resolve import render_resolved_yaml, resolve_job
from tests.support.chat_templates import CHATML

# What comes after a message changes how it is written, and no tag says what is the assistant's.
SHIFTING = """{%- for message in messages %}{{ loop.revindex }}{{ message.content }}{%- endfor %}"""
SILENT = (
    """{%- for message in messages %}{% if message.role == 'user' %}{{ message.content }}"""
    """{% endif %}{%- endfor %}"""
)


def resolve(folder: Path, template: str, **chat: Any) -> ResolvedJob:
    (folder / "t.jinja").write_text(template)
    line = json.dumps({"messages": [{"role": "user", "content": "x"}], "text": "x"})
    (folder / "a.jsonl").write_text(line + "\n")
    job = {
        "tokenizer": {"bytes": True},
        "chat": {"template": "t.jinja", **chat},
        "sources": {
            "chat": {"paths": "a.jsonl", "messages": "messages"},
            "other": {"paths": "a.jsonl", "messages": "messages"},
            "text": "a.jsonl",
        },
        "batch": {"rows": 2, "row_tokens": 64},
    }
    return resolve_job(job, folder, "job", folder / "store")


def test_how_turns_are_told_is_noted_once(tmp_path: Path) -> None:
    job = resolve(tmp_path, CHATML)
    notes = [note for note in job.notes if note.startswith("chat: ")]
    assert notes[:2] == [
        "chat: turns are told by rendering beginnings, as the template has no generation tags",
        "chat: trained of an answer: 'Aone answers<|im_end|>\\n'",
    ]
    assert len(notes) == len(set(notes))
    assert f"# - {notes[0]}" in render_resolved_yaml(job)


@pytest.mark.parametrize(
    ("template", "problem", "remedy"),
    [
        (SHIFTING, "turns cannot be told", "generation tags, or train_on: last"),
        (SILENT, "leaves out what the assistant says", "mend it"),
        ("{{ messages[99].role }}", "a chat of 2 messages", "mend the template"),
        ("{{ strftime_now('%Y') }}" + CHATML, "templates have no clock here", "write a date"),
        ("{% for %}", "chat.template", ""),
    ],
)
def test_a_template_that_tells_nobody_apart_is_refused(
    tmp_path: Path, template: str, problem: str, remedy: str
) -> None:
    with pytest.raises(JobError) as caught:
        resolve(tmp_path, template)
    lines = [line for line in str(caught.value).splitlines() if "chat.template" in line]
    assert len(lines) == 1
    assert problem in lines[0]
    assert remedy in lines[0]


def test_where_all_is_trained_nothing_has_to_be_told_apart(tmp_path: Path) -> None:
    assert resolve(tmp_path, SHIFTING, train_on="all").sources[0].recipe is not None
