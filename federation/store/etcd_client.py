"""A client of etcd's documented JSON gateway (`/v3/*`, etcd 3.4 and later), over urllib3. Blocking.

Its members are asked one after the other until one answers. An error says whether what was asked
may have been done all the same (`is_open`): a request that left and got no answer is settled by
whoever sent it. API: https://etcd.io/docs/v3.5/dev-guide/api_grpc_gateway/
"""

from __future__ import annotations

import base64
import errno
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import urllib3

REQUEST_S = 0.75
"""Longest wait for one member's answer: a quarter of a lease, so that another one is asked in time."""
CONNECT_S = 0.5
ANSWER_BYTES_MAX = 64 << 20
PAGE_KEYS = 128

_NO_SPACE = "database space exceeded"
_INVALID, _NOT_FOUND, _EXHAUSTED, _PRECONDITION = 3, 5, 8, 9
_DENIED, _UNAUTHENTICATED, _OUT_OF_RANGE = 7, 16, 11
_REFUSALS = (
    _INVALID, _NOT_FOUND, _EXHAUSTED, _PRECONDITION, _DENIED, _UNAUTHENTICATED, _OUT_OF_RANGE,
)  # fmt: skip
"""gRPC codes by which etcd says that it did nothing; with others a request may still be applied."""


class EtcdError(OSError):
    """What etcd was asked can't be said to be done.

    Args:
        message: Members and reasons.
        number: ENOSPC where its room is used up, EIO otherwise.
        is_open: It may have been done, or be done yet.
        code: gRPC's, where etcd answered.
    """

    def __init__(
        self, message: str, *, number: int = errno.EIO, is_open: bool = False, code: int = 0
    ) -> None:
        super().__init__(number, message)
        self.is_open = is_open
        self.code = code

    def __str__(self) -> str:
        return str(self.strerror)

    @property
    def is_missing(self) -> bool:
        """True where etcd says that what was named does not exist."""
        return self.code == _NOT_FOUND


@dataclass(frozen=True)
class EtcdTls:
    """Files for TLS with etcd; none given means the system's own authorities and no client key."""

    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None


class KeyValue(NamedTuple):
    """A key as etcd keeps it."""

    key: bytes
    value: bytes
    create_revision: int
    mod_revision: int


class Page(NamedTuple):
    """Some keys of a range."""

    found: list[KeyValue]
    rest: bytes | None
    """Where the next page begins; None behind the last one."""
    revision: int
    """Of the store that was read."""


class TxnAnswer(NamedTuple):
    """What a transaction came to."""

    succeeded: bool
    revision: int
    """Of the store behind it; the mod revision of what it wrote."""
    ranges: list[list[KeyValue]]
    """Of its range operations, in order."""


class EtcdClient:
    """Asks the members of one etcd cluster.

    Args:
        endpoints: `host:port` of members, `[v6]:port` too.
        tls: None speaks plain HTTP.
        request_s: Longest wait for one member's answer.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        tls: EtcdTls | None = None,
        request_s: float = REQUEST_S,
    ) -> None:
        self._scheme = "http" if tls is None else "https"
        self._endpoints = tuple(endpoints)
        self._first = 0
        """The member that answered last."""
        options: dict[str, Any] = {}
        if tls is not None:
            options = {
                "ca_certs": tls.ca_file,
                "cert_file": tls.cert_file,
                "key_file": tls.key_file,
            }
        self._pool = urllib3.PoolManager(
            num_pools=max(10, len(endpoints)),
            timeout=urllib3.Timeout(connect=min(CONNECT_S, request_s), read=request_s),
            retries=False,
            **options,
        )

    def call(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the answer of the first member that gives one; each is asked once.

        Raises:
            EtcdError: None did, or etcd refused.
        """
        data = json.dumps(body).encode()
        is_open = False
        reasons = []
        for turn in range(len(self._endpoints)):
            place = (self._first + turn) % len(self._endpoints)
            try:
                answer = self._ask(self._endpoints[place], path, data)
            except EtcdError as error:
                is_open = is_open or error.is_open
                if error.code in _REFUSALS and not is_open:
                    raise
                reasons.append(f"{self._endpoints[place]}: {error}")
                if is_open and path.startswith("/v3/kv/txn"):
                    break  # whoever sent it looks first whether it was done
                continue
            self._first = place
            return answer
        self._first = (self._first + 1) % len(self._endpoints)
        raise EtcdError("; ".join(reasons), is_open=is_open)

    def _ask(self, endpoint: str, path: str, data: bytes) -> dict[str, Any]:
        url = f"{self._scheme}://{endpoint}{path}"
        try:
            answer = self._pool.request(
                "POST",
                url,
                body=data,
                headers={"Content-Type": "application/json"},
                preload_content=False,
                redirect=False,
            )
            try:
                text = answer.read(ANSWER_BYTES_MAX + 1)
            finally:
                answer.release_conn()
        except (urllib3.exceptions.ConnectTimeoutError, urllib3.exceptions.NewConnectionError) as e:
            raise EtcdError(_short(e)) from e
        except (urllib3.exceptions.HTTPError, OSError) as e:
            is_tls = isinstance(e, urllib3.exceptions.SSLError)
            raise EtcdError(_short(e), is_open=not is_tls) from e
        if len(text) > ANSWER_BYTES_MAX:
            raise EtcdError(f"an answer of more than {ANSWER_BYTES_MAX} bytes", is_open=True)
        return _decoded(answer.status, text)

    # -- keys ------------------------------------------------------------------------------------

    def get(self, key: bytes) -> KeyValue | None:
        """Return a key's value, None where there is none.

        Raises:
            EtcdError: etcd does not answer.
        """
        found = _key_values(self.call("/v3/kv/range", {"key": _text(key)}))
        return found[0] if found else None

    def page(self, start: bytes, end: bytes, revision: int = 0) -> Page:
        """Return the first keys from `start` to before `end`, as of a revision; 0: as of now.

        Raises:
            EtcdError: etcd does not answer.
        """
        body = {
            "key": _text(start),
            "range_end": _text(end),
            "limit": str(PAGE_KEYS),
            "revision": str(revision),
        }
        answer = self.call("/v3/kv/range", body)
        found = _key_values(answer)
        rest = found[-1].key + b"\0" if found and answer.get("more") else None
        return Page(found, rest, revision or int(answer["header"]["revision"]))

    def txn(
        self,
        compare: Iterable[dict[str, Any]],
        success: Iterable[dict[str, Any]],
        failure: Iterable[dict[str, Any]] = (),
    ) -> TxnAnswer:
        """Do operations in one transaction, if all comparisons hold; one member is asked at least.

        Raises:
            EtcdError: etcd refused, or it is not known what came of it (`is_open`).
        """
        body = {"compare": list(compare), "success": list(success), "failure": list(failure)}
        answer = self.call("/v3/kv/txn", body)
        ranges = [
            _key_values(response["response_range"])
            for response in answer.get("responses", [])
            if "response_range" in response
        ]
        return TxnAnswer(bool(answer.get("succeeded")), int(answer["header"]["revision"]), ranges)

    # -- leases and maintenance ------------------------------------------------------------------

    def grant(self, seconds: int) -> int:
        """Return the number of a new lease.

        Raises:
            EtcdError: etcd does not answer.
        """
        return int(self.call("/v3/lease/grant", {"TTL": str(seconds)})["ID"])

    def keep_alive(self, lease: int) -> bool:
        """Renew a lease; False where it is over.

        Raises:
            EtcdError: etcd does not answer.
        """
        answer = self.call("/v3/lease/keepalive", {"ID": str(lease)})
        return int(answer.get("result", {}).get("TTL", 0)) > 0

    def revoke(self, lease: int) -> None:
        """End a lease and its keys.

        Raises:
            EtcdError: etcd does not answer, or knows no such lease.
        """
        self.call("/v3/lease/revoke", {"ID": str(lease)})

    def revision(self) -> int:
        """Return the store's revision.

        Raises:
            EtcdError: etcd does not answer.
        """
        answer = self.call("/v3/kv/range", {"key": _text(b"\0"), "count_only": True})
        return int(answer["header"]["revision"])

    def compact(self, revision: int) -> None:
        """Let go of what was overwritten or deleted before a revision.

        Raises:
            EtcdError: etcd does not answer, or did so already.
        """
        self.call("/v3/kv/compaction", {"revision": str(revision)})

    def close(self) -> None:
        """Close all connections."""
        self._pool.clear()


# -- parts of requests ---------------------------------------------------------------------------


def created_at(key: bytes, revision: int) -> dict[str, Any]:
    """Return the comparison that a key was created at a revision; 0: that there is none."""
    return {
        "key": _text(key),
        "target": "CREATE",
        "result": "EQUAL",
        "create_revision": str(revision),
    }


def written_at(key: bytes, revision: int) -> dict[str, Any]:
    """Return the comparison that a key was written last at a revision; 0: that there is none."""
    return {"key": _text(key), "target": "MOD", "result": "EQUAL", "mod_revision": str(revision)}


def put(key: bytes, value: bytes, lease: int = 0) -> dict[str, Any]:
    """Return the operation that writes a key."""
    body = {"key": _text(key), "value": _text(value)}
    if lease:
        body["lease"] = str(lease)
    return {"request_put": body}


def get(key: bytes) -> dict[str, Any]:
    """Return the operation that reads a key."""
    return {"request_range": {"key": _text(key)}}


def delete(first: bytes, end: bytes | None = None) -> dict[str, Any]:
    """Return the operation that deletes a key, or all from it to before `end`."""
    body = {"key": _text(first)}
    if end is not None:
        body["range_end"] = _text(end)
    return {"request_delete_range": body}


def prefix_end(prefix: bytes) -> bytes:
    """Return the first key behind all that begin with a prefix, which does not end in 0xFF."""
    assert prefix
    assert prefix[-1] < 0xFF
    return prefix[:-1] + bytes([prefix[-1] + 1])


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _key_values(answer: dict[str, Any]) -> list[KeyValue]:
    try:
        return [
            KeyValue(
                base64.b64decode(found["key"]),
                base64.b64decode(found.get("value", "")),
                int(found["create_revision"]),
                int(found["mod_revision"]),
            )
            for found in answer.get("kvs", [])
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise EtcdError(f"an answer that is not etcd's ({error!r})") from error


def _decoded(status: int, text: bytes) -> dict[str, Any]:
    """Return an answer's body.

    Raises:
        EtcdError: It tells of an error, or is not etcd's.
    """
    try:
        answer = json.loads(text)
    except ValueError:
        answer = None
    if status == 200 and isinstance(answer, dict) and "error" not in answer:
        return answer
    if not isinstance(answer, dict) or not {"error", "code"} & set(answer):
        hint = " (has it its gRPC gateway on?)" if status == 404 else ""
        raise EtcdError(f"HTTP {status}, no answer of etcd 3.4 or later{hint}")
    error = answer.get("error")
    if isinstance(error, dict):  # an error inside of a stream of answers
        answer = error
    message = str(answer.get("message") or answer.get("error"))
    code = int(answer.get("code") or answer.get("grpc_code") or 0)
    number = errno.ENOSPC if _NO_SPACE in message else errno.EIO
    raise EtcdError(message, number=number, is_open=code not in _REFUSALS, code=code)


def _short(error: BaseException) -> str:
    """Return what urllib3 says, without the objects that it says it of."""
    inner = error.args[-1] if error.args else ""
    text = str(inner if isinstance(inner, BaseException) else error)
    return text.rpartition(": ")[2] or type(error).__name__
