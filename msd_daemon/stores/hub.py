"""Hugging Face repositories: files of one commit, listed by the hub's tree and read by its URLs."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urljoin

from msd_daemon.stores.answers import FailureKind, ObjectInfo, RangeAnswer, RequestFailure
from msd_daemon.stores.gate_host import HUB_URL
from msd_daemon.stores.http_client import HttpClient
from msd_daemon.stores.options import EndpointOptions
from msd_daemon.stores.web import WebTransport

_NEXT = re.compile(r'<([^<>]+)>\s*;\s*rel="?next"?')


class HubTransport:
    """Files of one repository at one revision; a branch is read as the commit it stands at.

    Args:
        client: Connections.
        repository: `datasets/org/name[@revision]` or `models/org/name[@revision]`.
        endpoint: The hub, and the variable that holds a token.
        environ: Environment.
    """

    def __init__(
        self,
        client: HttpClient,
        repository: str,
        endpoint: EndpointOptions,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._client = client
        name, _, revision = repository.partition("@")
        self._name = name
        self._revision = revision or "main"
        self._url = (endpoint.endpoint or environ.get("HF_ENDPOINT") or HUB_URL).rstrip("/")
        token = "" if endpoint.is_anonymous else _token(endpoint, environ)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._web = WebTransport(client, self._url_of, self._headers)

    def read(self, key: str, begin: int, end: int) -> RangeAnswer:
        """Return the bytes [begin, end) of a file, fewer only at its end."""
        return self._web.read(key, begin, end)

    def stat(self, key: str) -> ObjectInfo:
        """Return a file's size and the hash that the hub knows it by."""
        return self._web.stat(key)

    def list_page(self, folder: str, token: str) -> tuple[list[ObjectInfo], str | None]:
        """Return a page of the files below a folder; the token is the next page's URL."""
        tree = f"{self._url}/api/{self._name}/tree/{quote(self._revision, safe='')}"
        below = f"/{quote(folder.rstrip('/'))}" if folder else ""
        url = token or f"{tree}{below}?recursive=true"
        reply = self._client.get(url, self._headers)
        found = _NEXT.search(reply.headers.get("Link", ""))
        following = None if found is None else urljoin(url, found.group(1))
        if following is not None and not following.startswith(f"{self._url}/"):
            raise RequestFailure(FailureKind.REFUSED, "the next page lies on another host")
        return list(_files(_entries(bytes(reply.body)))), following

    def commit(self) -> str:
        """Return the commit that the revision stands at.

        Raises:
            RequestFailure: The hub does not know it, or does not answer.
        """
        revision = quote(self._revision, safe="")
        reply = self._client.get(f"{self._url}/api/{self._name}/revision/{revision}", self._headers)
        found = _parse(bytes(reply.body))
        commit = found.get("sha") if isinstance(found, dict) else None
        if not isinstance(commit, str) or not re.fullmatch(r"[0-9a-f]{40,64}", commit):
            raise RequestFailure(FailureKind.REFUSED, "the hub names no commit of the revision")
        return commit

    def _url_of(self, method: str, key: str) -> str:
        del method
        kind, _, name = self._name.partition("/")
        prefix = "" if kind == "models" else f"{kind}/"
        revision = quote(self._revision, safe="")
        return f"{self._url}/{prefix}{name}/resolve/{revision}/{quote(key)}"


def _token(endpoint: EndpointOptions, environ: Mapping[str, str]) -> str:
    if endpoint.token_env:
        return environ.get(endpoint.token_env, "")
    if environ.get("HF_TOKEN"):
        return environ["HF_TOKEN"]
    home = environ.get("HF_HOME") or os.path.join(environ.get("HOME", "/"), ".cache/huggingface")
    try:
        return Path(home, "token").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _parse(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestFailure(FailureKind.TRANSIENT, "the hub's answer is no JSON") from error


def _entries(body: bytes) -> list[Any]:
    found = _parse(body)
    if not isinstance(found, list):
        raise RequestFailure(FailureKind.REFUSED, "the hub's tree is no list")
    return found


def _files(entries: list[Any]) -> Iterator[ObjectInfo]:
    for entry in entries:
        if not isinstance(entry, dict) or entry.get("type") != "file":
            continue
        large = entry.get("lfs")
        path, size, oid = entry.get("path"), entry.get("size"), entry.get("oid")
        if isinstance(large, dict):
            oid, size = large.get("oid", oid), large.get("size", size)
        if isinstance(path, str) and isinstance(size, int) and isinstance(oid, str):
            yield ObjectInfo(path, size, oid)
