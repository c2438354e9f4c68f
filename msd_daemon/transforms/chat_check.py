"""What a chat template does to a small chat: refused before a job starts, not at its first record."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

from federation.model.recipe import ChatRule
from msd_client.contract.errors import ConfigError
from msd_daemon.sources.field_numbers import shown
from msd_daemon.sources.record_fault import RecordFault
from msd_daemon.transforms.chat import ChatEncoder
from msd_daemon.transforms.tokenizer import Tokenizer

_TURNS = [
    {"role": "user", "content": "Qone asks"},
    {"role": "assistant", "content": "Aone answers"},
    {"role": "user", "content": "Qtwo asks"},
    {"role": "assistant", "content": "Atwo answers"},
]
_SYSTEM = {"role": "system", "content": "Sone says"}
_LOOKS_SPECIAL = re.compile(
    r"<\|[^|<>\s]{1,40}\|>|</?s>|\[/?[A-Z_]{2,30}\]|<(?:bos|eos|start_of_turn|end_of_turn)>"
)


class TemplateReport(NamedTuple):
    """What is to be said of a template."""

    faults: tuple[str, ...]
    """Why it cannot be used, each `problem; remedy`."""
    notes: tuple[str, ...]
    """How it will be used."""


def check_template(
    rule: ChatRule, tokenizer: Tokenizer, allowed: Collection[str] = ()
) -> TemplateReport:
    """Return what is wrong with a chat template, and what a person should know of it.

    Args:
        rule: The source's; its template is complete (`complete_template`).
        tokenizer: Of the job.
        allowed: Special tokens that messages may spell.
    """
    try:
        encoder = ChatEncoder(rule, tokenizer, allowed)
    except ConfigError as error:
        problem, _, remedy = error.message.rpartition(": ")
        return TemplateReport((f"{problem}; {remedy}",), ())
    faults: list[str] = []
    notes = [_way(rule, encoder)]
    for turns in (_TURNS[:2], _TURNS):
        try:
            faults += _spans_faults(rule, encoder, turns, notes)
        except RecordFault as fault:
            faults.append(_with_remedy(fault.message, len(turns)))
        if faults:
            return TemplateReport(tuple(faults), tuple(notes))
    try:
        text = encoder.spans([_SYSTEM, *_TURNS[:2]])[0].text
        if _SYSTEM["content"] not in text:
            notes.append("system messages are left out by the template")
    except RecordFault as fault:
        notes.append(f"system messages are refused by the template: {fault.message}")
    return TemplateReport((), (*notes, *_token_notes(encoder, tokenizer)))


def _way(rule: ChatRule, encoder: ChatEncoder) -> str:
    if rule.train_on == "all":
        return "every token of a chat is trained"
    if encoder.template.has_generation:
        return "turns are told by the template's generation tags"
    return "turns are told by rendering beginnings, as the template has no generation tags"


def _spans_faults(
    rule: ChatRule, encoder: ChatEncoder, turns: list[dict[str, str]], notes: list[str]
) -> list[str]:
    """Return what is wrong with what is trained of a chat of one or two questions."""
    rendered, spans = encoder.spans(turns)
    trained = [rendered.text[begin:end] for begin, end in spans]
    answers = [turn["content"] for turn in turns if turn["role"] == "assistant"]
    questions = [turn["content"] for turn in turns if turn["role"] == "user"]
    if rule.train_on == "last":
        answers, questions = answers[-1:], [*questions, *answers[:-1]]
    if any(answer not in rendered.text for answer in answers):
        return ["the template leaves out what the assistant says; mend it"]
    if rule.train_on == "all":
        return []
    remedy = "put {% generation %} and {% endgeneration %} around what the assistant says"
    if not all(any(answer in part for part in trained) for answer in answers):
        return [f"what the assistant says would not be trained; {remedy}"]
    if any(question in part for question in questions for part in trained):
        return [f"what others say would be trained; {remedy}"]
    if len(turns) == 2:
        notes.append(f"trained of an answer: {trained[-1]!r}")
    return []


def _with_remedy(message: str, turns: int) -> str:
    where = f"a chat of {turns} messages: "
    if "strftime_now" in message:
        return f"{where}{message}; templates have no clock here, write a date into the template"
    problem, found, remedy = message.rpartition(", give the template ")
    if found:
        return f"{where}{problem}; give the template {remedy}, or train_on: last"
    return f"{where}{message}; mend the template"


def _token_notes(encoder: ChatEncoder, tokenizer: Tokenizer) -> list[str]:
    text = encoder.spans(_TURNS)[0].text
    unknown = []
    for name in dict.fromkeys(_LOOKS_SPECIAL.findall(text)):
        ids = tokenizer.encode_special(name).ids
        if len(ids) != 1:
            unknown.append(f"{name} ({len(ids)} tokens)")
    if not unknown:
        return []
    names = shown(", ".join(unknown)).strip("'") if len(unknown) > 8 else ", ".join(unknown)
    return [f"no special tokens of the tokenizer, encoded as plain text: {names}"]
