"""Chats as token ids, with the assistant's turns trained and all else not (E12).

What the assistant says is found by the template's own `{% generation %}` tags. A template without
them is rendered message by message: an assistant's turn is what follows the prompt for it, up to
the end of its message (end-of-turn token and what the template puts behind it included). That
holds where every beginning of a chat, rendered, begins the text of the whole chat; a template that
changes earlier turns as a chat goes on (Qwen3 takes thoughts out of them) is refused, by
`check_template` and for each chat.

Ids are those of the whole text, tokenized at once with special tokens recognised: the spans, known
in characters, are looked up in the characters of each token. A token is trained if any of its
characters is. Names of special tokens that a message spells stay plain text, which transformers
cannot do, as a rendered text does not tell where it comes from; here such names are marked before
rendering. Tokens that a tokenizer adds without calling them special (`<think>`) are recognised
wherever they stand.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt

from federation.model.chunk import RecordStatus
from federation.model.recipe import ChatRule
from msd_daemon.sources.field_numbers import shown
from msd_daemon.sources.record_fault import RecordFault
from msd_daemon.transforms.chat_messages import (
    ContentForm,
    Message,
    fit_content,
    read_messages,
    read_tools,
)
from msd_daemon.transforms.chat_template import ChatTemplate, Rendered
from msd_daemon.transforms.special_text import LocatedIds, Span
from msd_daemon.transforms.tokenizer import Tokenizer

PREFIX_CHARACTERS_MAX = 1 << 26
"""Of all beginnings of one chat together, where there are no generation tags."""
_PROBE = "qzxj"

Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


class ChatEncoder:
    """Turns chats into ids and what of them is trained.

    Args:
        rule: The source's; its template is complete (`complete_template`).
        tokenizer: Of the job.
        allowed: Special tokens that messages may spell, as placeholders of images.

    Raises:
        ConfigError: The template cannot be read.
    """

    def __init__(self, rule: ChatRule, tokenizer: Tokenizer, allowed: Collection[str] = ()) -> None:
        self._rule = rule
        self._tokenizer = tokenizer
        names = [name for name in tokenizer.special_tokens if name not in allowed]
        self.template = ChatTemplate(rule.template, names)
        self.content_form: ContentForm = self._find_form()

    def encode(self, messages: object, tools: object = None) -> tuple[Ids, Mask]:
        """Return a chat's ids and which of them are trained.

        BOS and EOS are put around it as the job says, unless the template did so already; EOS is
        trained if the token before it is.

        Args:
            messages: A list of {role, content, ...}, or of {from, value} as ShareGPT has it.
                Content is text, or a list of parts {type: text, text: ...}, {type: image}.
            tools: A list of descriptions of functions, or None.

        Returns:
            ids, int64, and is_trained, bool; both of shape (tokens,). None of them may be trained.

        Raises:
            RecordFault: FIELD_MISSING: the messages are no such list; TRANSFORM_FAILED: the template
                refuses them or its turns cannot be told; BAD_ENCODING; EMPTY.
        """
        rendered, spans = self.spans(messages, tools)
        if not rendered.text:
            raise RecordFault(RecordStatus.EMPTY)
        located = self._tokenizer.encode_special(rendered.text, rendered.plain)
        is_trained = trained_tokens(located, spans, len(rendered.text))
        return self._with_ends(located, is_trained, rendered.text)

    def spans(self, messages: object, tools: object = None) -> tuple[Rendered, list[Span]]:
        """Return a chat as text, and which of its characters are trained.

        Raises:
            RecordFault: As `encode`.
        """
        chat = fit_content(read_messages(messages), self.content_form)
        functions = read_tools(tools)
        rendered = self.template.render(chat, functions)
        if self._rule.train_on == "all":
            return rendered, [(0, len(rendered.text))]
        turns = [number for number, one in enumerate(chat) if _is_assistant(one)]
        if self._rule.train_on == "last":
            turns = turns[-1:]
        if self.template.has_generation:
            return rendered, self._tagged(rendered, chat, functions, turns)
        return rendered, self._by_beginnings(rendered, chat, functions, turns)

    def _tagged(
        self, rendered: Rendered, chat: list[Message], functions: Any, turns: list[int]
    ) -> list[Span]:
        spans = list(rendered.spans)
        if self._rule.train_on != "last" or len(spans) <= 1 or not turns:
            return spans
        before = self.template.render(chat[: turns[0]], functions) if turns[0] else None
        return spans[len(before.spans) if before is not None else 0 :]

    def _by_beginnings(
        self, rendered: Rendered, chat: list[Message], functions: Any, turns: list[int]
    ) -> list[Span]:
        spans: list[Span] = []
        characters = 0
        for turn in turns:
            prompt = self._beginning(rendered, chat[:turn], functions, turn, is_prompt=True)
            end = len(rendered.text)
            if turn + 1 < len(chat):
                end = self._beginning(rendered, chat[: turn + 1], functions, turn, is_prompt=False)
            characters += prompt + end
            if characters > PREFIX_CHARACTERS_MAX:
                raise _failed(
                    f"{len(turns)} turns give more than {PREFIX_CHARACTERS_MAX} characters of "
                    "beginnings: give the template generation tags"
                )
            spans.append((prompt, end))
        return spans

    def _beginning(
        self, whole: Rendered, chat: list[Message], functions: Any, turn: int, *, is_prompt: bool
    ) -> int:
        """Return how long the text of a beginning is, which has to begin the whole text."""
        begun = self.template.render(chat, functions, is_prompt=is_prompt).text
        if whole.text.startswith(begun):
            return len(begun)
        what = f"the prompt for message {turn}" if is_prompt else f"messages 0 to {turn}"
        at = _first_difference(begun, whole.text)
        raise _failed(
            f"chat template: {what} gives {shown(begun[at : at + 16])} at character {at}, the whole "
            f"chat {shown(whole.text[at : at + 16])}: turns cannot be told, give the template "
            "generation tags"
        )

    def _with_ends(self, located: LocatedIds, is_trained: Mask, text: str) -> tuple[Ids, Mask]:
        spec = self._tokenizer.spec
        ids = [located.ids]
        masks = [is_trained]
        if spec.bos_id is not None and not (len(ids[0]) and ids[0][0] == spec.bos_id):
            ids.insert(0, np.array([spec.bos_id], dtype=np.int64))
            masks.insert(0, np.array([self._rule.train_on == "all"]))
        if spec.eos_id is not None:
            # A template may put a line end behind its last token.
            said = np.flatnonzero(located.begins < len(text.rstrip()))
            last = int(said[-1]) if len(said) else -1
            if last < 0 or located.ids[last] != spec.eos_id:
                ids.append(np.array([spec.eos_id], dtype=np.int64))
                masks.append(np.array([bool(is_trained[last]) if last >= 0 else False]))
        return np.concatenate(ids), np.concatenate(masks)

    def _find_form(self) -> ContentForm:
        """Return which form of content the template takes, by a text that has to come through."""
        parts: Any = [{"type": "text", "text": _PROBE}]
        if self._shows(parts):
            return "as_is" if self._shows(_PROBE) else "parts"
        return "text"

    def _shows(self, content: object) -> bool:
        try:
            text = self.template.render([{"role": "user", "content": content}], None).text
        except RecordFault:
            return False
        return _PROBE in text and "'type'" not in text and '"type"' not in text


def trained_tokens(located: LocatedIds, spans: list[Span], characters: int) -> Mask:
    """Return which tokens have a character of a span. Shape (tokens,)."""
    inside = np.zeros(characters + 1, dtype=np.int64)
    for begin, end in spans:
        inside[begin + 1 : end + 1] = 1
    counts = np.cumsum(inside)
    is_trained: Mask = counts[located.ends] > counts[located.begins]
    return is_trained


def _is_assistant(message: Message) -> bool:
    return message["role"] in ("assistant", "model")


def _first_difference(one: str, other: str) -> int:
    for at, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return at
    return min(len(one), len(other))


def _failed(message: str) -> RecordFault:
    return RecordFault(RecordStatus.TRANSFORM_FAILED, message)
