"""Chat templates: found beside a tokenizer, made complete, rendered into text and spans."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2.exceptions import TemplateError
from jinja2.lexer import TOKEN_BLOCK_BEGIN

from federation.model.chunk import RecordStatus
from federation.model.job import TokenizerSpec
from msd_client.contract.errors import ConfigError
from msd_daemon.sources.record_fault import RecordFault
from msd_daemon.transforms.chat_messages import Message, broken_up, has_match, unused_marks
from msd_daemon.transforms.chat_sandbox import (
    CLOSE_NAME,
    OPEN_NAME,
    RENDER_WORK_MAX,
    TEMPLATE_CHARACTERS_MAX,
    ChatEnvironment,
)
from msd_daemon.transforms.describe import named_token
from msd_daemon.transforms.special_text import Span, special_pattern

TOKEN_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")
_FILE_BYTES_MAX = 64 << 20


class Rendered(NamedTuple):
    """A chat as text."""

    text: str
    spans: tuple[Span, ...]
    """What stands inside `{% generation %}`, in order."""
    plain: tuple[Span, ...]
    """Names of special tokens that messages spell: plain text."""


class ChatTemplate:
    """A template, read once.

    Args:
        text: Jinja.
        names: Texts of special tokens that messages may not become by spelling them.

    Raises:
        ConfigError: It is no Jinja template, or too long.
    """

    def __init__(self, text: str, names: Sequence[str] = ()) -> None:
        self._environment = ChatEnvironment()
        self._text = text
        self._names = sorted(names, key=lambda name: (-len(name), name))
        self._pattern = special_pattern(names)
        if not text.strip() or len(text) > TEMPLATE_CHARACTERS_MAX:
            raise ConfigError(
                f"chat template has {len(text)} characters, it may have 1 to "
                f"{TEMPLATE_CHARACTERS_MAX}: give the Jinja text of the model"
            )
        try:
            self._template = self._environment.from_string(text)
            lexed = list(self._environment.lex(text))
        except (TemplateError, RecursionError, MemoryError, ValueError, SyntaxError) as error:
            line = getattr(error, "lineno", None)
            where = "" if line is None else f" at line {line}"
            raise ConfigError(
                f"chat template cannot be read{where}: {error}: mend the Jinja text"
            ) from error
        self.has_generation = any(
            before[1] == TOKEN_BLOCK_BEGIN and _first_word(lexed, at) == "generation"
            for at, before in enumerate(lexed)
        )

    def render(
        self, messages: list[Message], tools: list[Any] | None, *, is_prompt: bool = False
    ) -> Rendered:
        """Return a chat as text.

        Args:
            messages: As `read_messages` gives them.
            tools: Descriptions of functions.
            is_prompt: True: the text ends where the assistant is to go on
                (`add_generation_prompt`).

        Raises:
            RecordFault: TRANSFORM_FAILED: the template refuses the messages, fails, or takes more
                than it may; BAD_ENCODING: the text has a lone surrogate.
        """
        opens, closes, breaks = unused_marks(messages, tools, self._text)
        self._environment.break_mark = ""
        has_names = has_match(self._pattern, (messages, tools))
        if has_names:
            assert self._pattern is not None
            messages = broken_up(messages, self._pattern, breaks)
            tools = broken_up(tools, self._pattern, breaks)
            self._environment.break_mark = breaks
        self._environment.work_left = RENDER_WORK_MAX
        try:
            text = self._template.render(
                {
                    "messages": messages,
                    "tools": tools,
                    "documents": None,
                    "add_generation_prompt": is_prompt,
                    OPEN_NAME: opens,
                    CLOSE_NAME: closes,
                }
            )
        except Exception as error:  # noqa: BLE001 - a template may fail in any way that Python can
            said = str(error) or type(error).__name__
            raise _failed(f"chat template: {said[:400]}") from None
        return self._parted(text, opens, closes, breaks)

    def _parted(self, text: str, opens: str, closes: str, breaks: str) -> Rendered:
        """Return the text without marks, and what they say."""
        pieces = re.split(f"([{opens}{closes}{breaks}])", text)
        clean = "".join(pieces[::2])
        _check_encoding(clean)
        spans: list[Span] = []
        plain: list[Span] = []
        at, begin, depth = 0, 0, 0
        for piece, mark in zip(pieces[::2], [*pieces[1::2], ""], strict=True):
            at += len(piece)
            if mark == opens:
                begin = at if not depth else begin
                depth += 1
            elif mark == closes:
                depth -= 1
                if depth < 0:
                    break
                if not depth:
                    spans.append((begin, at))
            elif mark == breaks and at:
                plain += self._name_at(clean, at - 1)
        if depth:
            raise _failed("chat template: cuts or moves the text of a generation tag")
        return Rendered(clean, tuple(spans), tuple(plain))

    def _name_at(self, text: str, begin: int) -> list[Span]:
        """Return where the name that was broken up behind its first character stands."""
        for name in self._names:
            if text.startswith(name, begin):
                return [(begin, begin + len(name))]
        return []  # the template cut it: nothing is left to hide


def _first_word(lexed: list[Any], at: int) -> str:
    for token in lexed[at + 1 : at + 4]:
        if token[1] == "name":
            return str(token[2])
    return ""


def _check_encoding(text: str) -> None:
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RecordFault(
            RecordStatus.BAD_ENCODING, f"a lone surrogate at character {error.start} of the chat"
        ) from None


def _failed(message: str) -> RecordFault:
    return RecordFault(RecordStatus.TRANSFORM_FAILED, message)


def complete_template(text: str, spec: TokenizerSpec) -> str:
    """Return a template in which the tokenizer's `bos_token`, `eos_token` and so on are set.

    They stand at its head as values, so that the text alone says what is rendered, whatever
    becomes of the files beside the tokenizer.
    """
    names = {key: name for key, name in token_names(spec).items() if re.search(rf"\b{key}\b", text)}
    if not names:
        return text
    values = ", ".join(_quoted(name) for name in names.values())
    comma = "," if len(names) == 1 else ""
    # The line end belongs to the statement: trim_blocks takes it away again.
    return f"{{% set {', '.join(names)}{comma} = {values}{comma} %}}\n{text}"


def token_names(spec: TokenizerSpec) -> dict[str, str]:
    """Return the texts of a tokenizer's special tokens by what templates call them."""
    path = Path(spec.path)
    found = {key: named_token(path, key) for key in TOKEN_NAMES} if spec.path else {}
    if spec.kind == "sentencepiece":
        from msd_daemon.transforms.sentencepiece_tokenizer import load_processor

        processor = load_processor(path)
        own = {"bos_token": processor.bos_id(), "eos_token": processor.eos_id()}
        for key, token_id in own.items():
            if found.get(key) is None and token_id >= 0:
                found[key] = str(processor.id_to_piece(token_id))
    elif spec.kind == "tiktoken":
        found |= {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    return {key: name for key, name in found.items() if name is not None}


def _quoted(text: str) -> str:
    masked = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    return f"'{masked}'"


def find_chat_template(path: Path) -> str | None:
    """Return the chat template that lies beside a tokenizer, None where there is none.

    Looks as transformers does: `chat_template.jinja`, `chat_template.json`, then `chat_template` in
    `tokenizer_config.json`; of several named ones that called `default`.

    Args:
        path: The tokenizer's file or folder.

    Raises:
        ConfigError: A file cannot be read, or has templates but none called default.
    """
    folder = path if path.is_dir() else path.parent
    plain = folder / "chat_template.jinja"
    if plain.is_file():
        return _read(plain)
    for name in ("chat_template.json", "tokenizer_config.json"):
        file = folder / name
        if not file.is_file():
            continue
        try:
            found = json.loads(_read(file))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{file} is not readable JSON: {error}", path=str(file)) from error
        template = found.get("chat_template") if isinstance(found, Mapping) else None
        if template is not None:
            return _default_of(template, file)
    return None


def _default_of(template: object, file: Path) -> str:
    if isinstance(template, str):
        return template
    if isinstance(template, list):
        named = {one.get("name"): one.get("template") for one in template if isinstance(one, dict)}
        if isinstance(named.get("default"), str):
            return str(named["default"])
        names = ", ".join(str(name) for name in named)
        raise ConfigError(
            f"{file} has chat templates {names or '(none)'} but no default: name a template file",
            path=str(file),
        )
    raise ConfigError(f"{file} has a chat_template that is no text", path=str(file))


def _read(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            content = opened.read(_FILE_BYTES_MAX + 1)
        if len(content) > _FILE_BYTES_MAX:
            raise ConfigError(
                f"{file} has more than {_FILE_BYTES_MAX} bytes: no chat template", path=str(file)
            )
        return content.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}", path=str(file)) from error
