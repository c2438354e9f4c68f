"""URLs of shards: scheme, bucket and key; globs and braces; none may carry a credential."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple
from urllib.parse import parse_qsl, urlsplit

from msd_client.contract.errors import ConfigError

LISTED_SCHEMES = frozenset({"s3", "gs", "az", "hf", "file"})
WEB_SCHEMES = frozenset({"http", "https"})
BRACES_MAX = 1_000_000

_SECRET_PARAMETERS = re.compile(
    r"(?i)^(x-amz-.*|x-goog-.*|awsaccesskeyid|signature|sig|se|sp|sv|token|access_token|key|api_?key"
    r"|password|secret|policy|key-pair-id|googleaccessid)$"
)
_BRACE = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"^(\d{1,12})\.\.(\d{1,12})$")
_WILD = re.compile(r"[*?\[]")
_MAGIC = re.compile(r"[*?\[{]")


class StoreUrl(NamedTuple):
    """Where an object lies."""

    scheme: str
    host: str
    """Bucket, container or `host:port`; of hf the whole repository, `datasets/org/name[@revision]`."""
    key: str
    """Below the bucket, without a leading slash; of http(s) path and query as they stand."""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.host}/{self.key}"


def is_url(path: str) -> bool:
    """Tell whether a path of a job is a URL."""
    return "://" in path


def parse_url(url: str) -> StoreUrl:
    """Return the parts of a URL.

    Raises:
        ConfigError: The scheme is unknown, a part is missing, or it carries a credential, which the
            message does not repeat.
    """
    scheme, _, rest = url.partition("://")
    scheme = scheme.lower()
    if scheme not in LISTED_SCHEMES | WEB_SCHEMES:
        raise ConfigError(
            f"path {scheme}://... has an unknown scheme: use s3, gs, az, http, https or hf"
        )
    if scheme in WEB_SCHEMES:
        return _parse_web(scheme, url)
    if scheme == "file":
        return StoreUrl(scheme, "", rest.lstrip("/"))
    if scheme == "hf":
        return _parse_hub(rest)
    host, _, key = rest.partition("/")
    if "@" in host:
        raise ConfigError(f"a {scheme}:// path holds a credential before '@': take it out")
    if not host:
        raise ConfigError(f"path {url!r} names no bucket: write {scheme}://bucket/key")
    return StoreUrl(scheme, host, key)


def _parse_web(scheme: str, url: str) -> StoreUrl:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"an {scheme}:// path is no URL: write {scheme}://host/path") from error
    if not host:
        raise ConfigError(f"an {scheme}:// path names no host: write {scheme}://host/path")
    names = [name for name, _ in parse_qsl(parts.query, keep_blank_values=True)]
    secret = next((name for name in names if _SECRET_PARAMETERS.match(name)), None)
    if parts.username is not None or parts.password is not None or secret is not None:
        where = f"the parameter {secret!r}" if secret else "a user name"
        raise ConfigError(
            f"the URL of a shard on {host} holds a credential ({where}): a job is written to state "
            "and journal; read it through s3, gs or az with credentials in the environment"
        )
    place = f"[{host}]" if ":" in host else host
    path = parts.path.lstrip("/") + (f"?{parts.query}" if parts.query else "")
    return StoreUrl(scheme, place if port is None else f"{place}:{port}", path)


def _parse_hub(rest: str) -> StoreUrl:
    parts = rest.split("/")
    if parts[0] not in ("datasets", "models"):
        parts = ["models", *parts]
    if len(parts) < 3 or not all(parts[:3]):
        raise ConfigError(
            f"path hf://{rest} names no repository: write hf://datasets/org/name[@revision]/path"
        )
    return StoreUrl("hf", "/".join(parts[:3]), "/".join(parts[3:]))


def has_magic(key: str) -> bool:
    """Tell whether a key is a pattern: `*`, `?`, `[...]` or `{...}`."""
    return _MAGIC.search(key) is not None


def folder_of(pattern: str) -> str:
    """Return the longest folder in which all matches of a pattern lie, with its slash, or nothing."""
    found = _MAGIC.search(pattern)
    stem = pattern if found is None else pattern[: found.start()]
    return stem[: stem.rfind("/") + 1]


def expand_braces(text: str) -> Iterator[str]:
    """Yield what `{a,b}` and `{000..123}` stand for, in order, as a shell does.

    Raises:
        ConfigError: They stand for over a million.
    """
    pending, count = [text], 0
    while pending:
        head = pending.pop()
        found = _BRACE.search(head)
        choices = None if found is None else _choices(found.group(1), text)
        if found is None or choices is None:
            count += 1
            if count > BRACES_MAX:
                raise _too_many(text)
            yield head
            continue
        begin, end = head[: found.start()], head[found.end() :]
        pending.extend(begin + choice + end for choice in reversed(choices))


def _choices(inner: str, text: str) -> list[str] | None:
    numbers = _RANGE.match(inner)
    if numbers is None:
        return inner.split(",") if "," in inner else None
    begin, end = numbers.groups()
    first, last = int(begin), int(end)
    if last - first >= BRACES_MAX:
        raise _too_many(text)
    width = len(begin) if begin.startswith("0") else 0
    return [str(number).zfill(width) for number in range(first, last + 1)] or None


def _too_many(text: str) -> ConfigError:
    return ConfigError(f"{text!r} stands for over {BRACES_MAX} shards: name a folder or a glob")


class KeyPattern:
    """A glob over keys: `*` and `?` stay inside a folder, `**` goes through folders."""

    def __init__(self, pattern: str) -> None:
        parts = list(expand_braces(pattern))
        # `{00000..39999}` stands for as many plain names: one look for a key, not one for each.
        self._keys = frozenset(part for part in parts if not _WILD.search(part))
        self._rules = [re.compile(_translate(part)) for part in parts if part not in self._keys]

    def matches(self, key: str) -> bool:
        """Tell whether a key fits."""
        return key in self._keys or any(rule.fullmatch(key) is not None for rule in self._rules)


def _translate(pattern: str) -> str:
    pieces = pattern.split("/")
    last = len(pieces) - 1
    rules = []
    for number, piece in enumerate(pieces):
        if piece == "**":
            rules.append(".*" if number == last else "(?:[^/]+/)*")
        else:
            rules.append(_translate_piece(piece) + ("" if number == last else "/"))
    return "(?s:" + "".join(rules) + ")"


def _translate_piece(piece: str) -> str:
    rule, at = "", 0
    while at < len(piece):
        character, at = piece[at], at + 1
        if character == "*":
            rule += "[^/]*"
        elif character == "?":
            rule += "[^/]"
        elif character == "[" and (end := piece.find("]", at + 1)) > 0:
            body = piece[at:end].replace("\\", r"\\").replace("[", r"\[")
            rule += f"[{'^' + body[1:] if body.startswith('!') else body}]"
            at = end + 1
        else:
            rule += re.escape(character)
    return rule
