"""Messages of a chat as records have them, brought to the form that templates take."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np

from federation.model.chunk import RecordStatus
from msd_daemon.sources.field_numbers import kind_of, shown
from msd_daemon.sources.record_fault import RecordFault, missing

MESSAGES_MAX = 10_000
ContentForm = Literal["as_is", "text", "parts"]
"""What a template takes as content: both forms, text alone, or lists of parts alone."""

Message = dict[str, Any]

_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
_NONCHARACTERS = re.compile("[\ufdd0-\ufdef]")
_MARKS_COUNT = 3


def read_messages(value: object) -> list[Message]:
    """Return the messages of a record.

    A message is a map with `role`, or `from` and `value` as ShareGPT has it. Keys that are null are
    left out, since columns of maps give every message every key; null content stays. A list that
    is written as JSON text is read.

    Raises:
        RecordFault: FIELD_MISSING; they are no such list, or have no assistant's turn at all.
    """
    found = _from_json(value, "messages")
    if isinstance(found, np.ndarray):
        found = found.tolist()
    if not isinstance(found, (list, tuple)):
        raise missing(f"messages are {kind_of(found)}, not a list")
    if not 1 <= len(found) <= MESSAGES_MAX:
        raise missing(f"{len(found)} messages, a chat has 1 to {MESSAGES_MAX}")
    return [_message(one, number) for number, one in enumerate(found)]


def read_tools(value: object) -> list[Any] | None:
    """Return the tools of a record, None where it has none.

    Raises:
        RecordFault: FIELD_MISSING; they are no list.
    """
    found = _from_json(value, "tools") if value else None
    if isinstance(found, np.ndarray):
        found = found.tolist()
    if not isinstance(found, (list, tuple)):
        if found:
            raise missing(f"tools are {kind_of(found)}, not a list")
        return None
    # A function may be written as JSON text of its own, where a column could not hold its schema.
    return [_from_json(tool, "tools") for tool in found] or None


def _from_json(value: object, name: str) -> Any:
    if not isinstance(value, str) or value[:1] not in ("[", "{"):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise missing(f"{name} are no JSON: {error}") from None


def _message(value: object, number: int) -> Message:
    if not isinstance(value, Mapping):
        raise missing(f"message {number} is {kind_of(value)}, not a map")
    message = {str(key): item for key, item in value.items() if item is not None}
    if "role" not in message and "from" in message:
        own = message.pop("from")
        role = _SHAREGPT_ROLES.get(own) if isinstance(own, str) else None
        if role is None:
            raise missing(f"message {number} is from {shown(own)}, which is no role known")
        message = {"role": role, "content": message.pop("value", None)} | message
    if not isinstance(message.get("role"), str):
        raise missing(f"message {number} has no role")
    message.setdefault("content", None)
    return message


def fit_content(messages: list[Message], form: ContentForm) -> list[Message]:
    """Return messages with their content as a template takes it.

    Raises:
        RecordFault: FIELD_MISSING; parts other than text, where a template takes text alone.
    """
    if form == "as_is":
        return messages
    return [
        message | {"content": _fitted(message["content"], form, number)}
        for number, message in enumerate(messages)
    ]


def _fitted(content: Any, form: ContentForm, number: int) -> Any:
    if form == "parts":
        return [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(content, (list, tuple)):
        return content
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else part
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        if kind != "text" or not isinstance(text, str):
            raise missing(f"message {number} has a part of {shown(kind)}, the template takes text")
        texts.append(text)
    return "".join(texts)


def unused_marks(*values: object) -> tuple[str, ...]:
    """Return characters, one of each use, that stand in no text of these values.

    Raises:
        RecordFault: BAD_ENCODING; the values use up the noncharacters.
    """
    used = {found for text in _texts(values) for found in _NONCHARACTERS.findall(text)}
    free = [chr(code) for code in range(0xFDD0, 0xFDF0) if chr(code) not in used]
    if len(free) < _MARKS_COUNT:
        raise RecordFault(RecordStatus.BAD_ENCODING, "the chat is full of Unicode noncharacters")
    return tuple(free[:_MARKS_COUNT])


def _texts(value: object) -> Iterator[str]:
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, Mapping):
            waiting += [*one.keys(), *one.values()]
        elif isinstance(one, (list, tuple)):
            waiting += one


def has_match(pattern: re.Pattern[str] | None, value: object) -> bool:
    """Tell whether a pattern is found in any text of a value."""
    return pattern is not None and any(pattern.search(text) for text in _texts(value))


def broken_up(value: Any, pattern: re.Pattern[str], mark: str) -> Any:
    """Return a value in whose texts a mark stands behind the first character of each match."""
    if isinstance(value, str):
        return pattern.sub(lambda found: found.group()[0] + mark + found.group()[1:], value)
    if isinstance(value, Mapping):
        return {
            broken_up(key, pattern, mark): broken_up(item, pattern, mark)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [broken_up(item, pattern, mark) for item in value]
    return value
