"""Who may look: names of hosts against rebinding, a token in header, cookie or, once, the address."""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping
from pathlib import Path

from msd_client.contract.errors import ConfigError

COOKIE = "msd_token"
TOKEN_LENGTH_MIN = 16
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})


def read_token(path: Path) -> str:
    """Return the token that a file holds.

    Raises:
        ConfigError: It can't be read, others may read it, or it is too short.
    """
    try:
        mode = path.stat().st_mode
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"dashboard.token_file {path} can't be read ({error}): write one, for example "
            f"openssl rand -hex 24 > {path}"
        ) from error
    if mode & 0o007:
        raise ConfigError(
            f"dashboard.token_file {path} has mode {mode & 0o777:04o}, anybody may read it: chmod 0600 {path}"
        )
    if len(token) < TOKEN_LENGTH_MIN or not token.isprintable() or " " in token:
        raise ConfigError(
            f"dashboard.token_file {path} holds {len(token)} characters, at least {TOKEN_LENGTH_MIN} "
            f"without spaces are needed: openssl rand -hex 24 > {path}"
        )
    return token


class Gate:
    """Decides on requests.

    Args:
        token: That visitors need; None: none.
        names: Of hosts under which the page is reached; empty: any.
    """

    def __init__(self, token: str | None, names: Iterable[str] = ()) -> None:
        self._token = token
        self._names = frozenset(names)

    def knows_host(self, header: str) -> bool:
        """Tell whether a Host header names us: a page of elsewhere may not make a browser ask us."""
        if not self._names:
            return True
        name, colon, port = header.rpartition(":")
        return (name if colon and port.isdecimal() else header).lower() in self._names

    def admits(self, authorization: str, cookies: Mapping[str, str]) -> bool:
        """Tell whether a request may see anything.

        Args:
            authorization: Its header, `Bearer TOKEN`.
            cookies: Its cookies.
        """
        if self._token is None:
            return True
        kind, _, given = authorization.partition(" ")
        if kind.lower() == "bearer" and self.is_token(given.strip()):
            return True
        return self.is_token(cookies.get(COOKIE, ""))

    def is_token(self, given: str) -> bool:
        """Compare in a time that tells nothing."""
        return self._token is not None and hmac.compare_digest(
            given.encode(errors="replace"), self._token.encode()
        )
