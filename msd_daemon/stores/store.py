"""A store: one bucket, host or repository, its requests retried and limited; one per process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

from msd_client.contract.errors import ConfigError
from msd_daemon.stores.answers import ObjectInfo, RangeAnswer, Transport
from msd_daemon.stores.cloud import CloudTransport, S3Transport, azure_store, gcs_store
from msd_daemon.stores.gate_host import gate_host
from msd_daemon.stores.http_client import HttpClient
from msd_daemon.stores.hub import HubTransport
from msd_daemon.stores.limiter import HostGate
from msd_daemon.stores.local import LocalTransport
from msd_daemon.stores.options import StoreOptions, configured_options
from msd_daemon.stores.retry import Retrier, RetryCounts
from msd_daemon.stores.urls import StoreUrl, is_url, parse_url
from msd_daemon.stores.web import WebTransport

T = TypeVar("T")


class Store:
    """Objects of one place; safe in any thread.

    Args:
        place: Begins every object's URL, as `s3://bucket`; for messages.
        transport: Makes single requests.
        retrier: Repeats them.
    """

    def __init__(self, place: str, transport: Transport, retrier: Retrier) -> None:
        self.place = place
        self.transport = transport
        self._retrier = retrier

    @property
    def counts(self) -> RetryCounts:
        """Requests and retries so far."""
        return self._retrier.counts

    def read(self, key: str, begin: int, end: int) -> RangeAnswer:
        """Return the bytes [begin, end) of an object, fewer only at its end.

        Raises:
            StoreMissingError: There is no such object.
            StoreError: It cannot be read, whatever was tried.
        """
        return self._retrier.run(self._name(key), lambda: self.transport.read(key, begin, end))

    def stat(self, key: str) -> ObjectInfo:
        """Return an object's size and validator.

        Raises:
            StoreMissingError: There is no such object.
            StoreError: It cannot be read, whatever was tried.
        """
        return self._retrier.run(self._name(key), lambda: self.transport.stat(key))

    def list(self, folder: str) -> Iterator[ObjectInfo]:
        """Yield the objects below a folder (with its slash, or empty) in the store's order, once each.

        One listing, page by page; only a page that fails is asked for again.

        Raises:
            StoreError: It cannot be listed, whatever was tried.
        """
        token: str | None = ""
        while token is not None:
            page, token = self._retrier.run(
                f"{self._name(folder)} (listing)",
                partial(self.transport.list_page, folder, token),
            )
            yield from page

    def write(self, key: str, content: bytes) -> None:
        """Put an object, whole or not at all.

        Raises:
            ConfigError: Objects of this place are not written.
            StoreError: It cannot be written, whatever was tried.
        """
        write = getattr(self.transport, "write", None)
        if write is None:
            raise ConfigError(f"{self.place} is only read: name a folder, or s3, gs or az")
        self._retrier.run(f"{self._name(key)} (write)", lambda: write(key, content))

    def run(self, what: str, request: Callable[[], T]) -> T:
        """Return what another request to this place gives, retried and limited as all are.

        Raises:
            StoreMissingError: There is no such thing.
            StoreError: It failed for good.
        """
        return self._retrier.run(what, request)

    def _name(self, key: str) -> str:
        return f"{self.place}/{key}"


_stores: dict[tuple[str, str], tuple[StoreOptions, int, Store]] = {}
_clients: dict[tuple[float, float, int], HttpClient] = {}
_lock = threading.Lock()


def open_store(url: str, options: StoreOptions | None = None) -> Store:
    """Return the store that a URL or local path lies in; the same one for equal options.

    Args:
        url: `s3://`, `gs://`, `az://`, `hf://`, `http(s)://`, `file://` or a path.
        options: Default: those of the process.

    Raises:
        ConfigError: The URL or an option is faulty; a credential it should use is not there.
    """
    options = options or configured_options()
    place = parse_url(url if is_url(url) else f"file://{os.path.abspath(url)}")
    key = (place.scheme, place.host)
    with _lock:
        found = _stores.get(key)
        if found is not None and found[0] == options and found[1] == os.getpid():
            return found[2]
        store = _make(place, options)
        _stores[key] = (options, os.getpid(), store)
        return store


def _make(place: StoreUrl, options: StoreOptions) -> Store:
    transport, host = _transport(place, options)
    gate = HostGate(options.shared_folder(), host, options.requests_per_host_max)
    return Store(f"{place.scheme}://{place.host}", transport, Retrier(gate, options.deadline_s))


def _transport(place: StoreUrl, options: StoreOptions) -> tuple[Transport, str]:
    """Return what makes requests, and the host that its limit is of."""
    scheme, host = place.scheme, place.host
    endpoint = options.endpoint_of(scheme, host)
    limited = gate_host(place, options)
    if scheme == "file":
        return LocalTransport(), limited
    client = _client(options)
    if scheme == "s3":
        return S3Transport(client, host, options), limited
    if scheme == "gs":
        return CloudTransport(gcs_store(host, endpoint, options)), limited
    if scheme == "az":
        return CloudTransport(azure_store(host, endpoint, options), is_paged=False), limited
    if scheme == "hf":
        return HubTransport(client, host, endpoint), limited
    return WebTransport(client, lambda _, key: f"{scheme}://{host}/{key}"), limited


def _client(options: StoreOptions) -> HttpClient:
    key = (options.connect_timeout_s, options.read_timeout_s, os.getpid())
    return _clients.setdefault(key, HttpClient(*key[:2]))
