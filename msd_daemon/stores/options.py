"""Settings of the stores of one process: limits, cache, time-outs, endpoints. Never a credential."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from msd_client.contract.errors import ConfigError
from msd_client.contract.paths import default_runtime_dir
from msd_client.contract.plain import decode_plain, encode_plain

SCHEMES = ("s3", "gs", "az", "hf")
WRITABLE_SCHEMES = ("s3", "gs", "az")
BLOCK_BYTES_MIN = 4096


@dataclass(frozen=True)
class EndpointOptions:
    """Where a scheme's stores answer, and the names of variables that hold its credentials."""

    endpoint: str = ""
    """URL of a service other than the provider's own, as `http://127.0.0.1:9000`."""
    region: str = ""
    account: str = ""
    """Azure's storage account; else AZURE_STORAGE_ACCOUNT_NAME."""
    profile_env: str = ""
    """Variable that names the profile of the AWS credentials file; else AWS_PROFILE."""
    access_key_env: str = ""
    """Variable that holds the access key; else the provider's usual ones."""
    secret_key_env: str = ""
    session_token_env: str = ""
    token_env: str = ""
    """Variable that holds a bearer token (gs, hf); hf: else HF_TOKEN."""
    is_anonymous: bool = False
    """Requests are not signed: public buckets."""


@dataclass(frozen=True)
class StoreOptions:
    """All settings of the stores of a process."""

    cache_dir: str = ""
    """Folder of the node's disk cache, shared by all processes that name it."""
    cache_bytes_max: int = 0
    """Most bytes of the cache; 0 switches it off."""
    requests_per_host_max: int = 64
    """Requests that all processes of the node have open to one host, 1 to 1024."""
    connect_timeout_s: float = 10.0
    read_timeout_s: float = 30.0
    """Longest silence of a server inside an answer."""
    deadline_s: float = 300.0
    """Longest time of one read with all its retries; then it fails."""
    block_bytes: int = 256 * 1024
    """Unit of caching; reads are widened to whole blocks."""
    request_bytes_max: int = 4 << 20
    """Most bytes of one request: so many neighbouring blocks are fetched together."""
    memory_bytes_max: int = 64 << 20
    """Blocks kept in memory by a process, those read ahead included, beside one an open file."""
    read_ahead_threads: int = 8
    index_store: str = ""
    """Folder, or s3, gs or az URL, where indexes of shards are shared between nodes; empty: none."""
    shared_dir: str = ""
    """Folder of the request limiter's files, one for the node; default below the runtime folder."""
    endpoints: dict[str, EndpointOptions] = field(default_factory=dict)
    """By scheme (`s3`), or by scheme and bucket (`s3://bucket`), which goes first."""

    def endpoint_of(self, scheme: str, host: str) -> EndpointOptions:
        """Return the endpoint settings of a bucket."""
        found = self.endpoints.get(f"{scheme}://{host}") or self.endpoints.get(scheme)
        return found or EndpointOptions()

    def for_another_user(self) -> StoreOptions:
        """Return what a process has that reads with another user's rights: no folder of the daemon's."""
        return replace(self, cache_dir="", cache_bytes_max=0, index_store="", shared_dir="")

    def shared_folder(self) -> Path:
        """Return the folder of what the processes of this node share."""
        if self.shared_dir:
            return Path(self.shared_dir)
        return default_runtime_dir(os.environ, os.geteuid()) / "stores"


def encode_store_options(options: StoreOptions) -> dict[str, Any]:
    """Return the settings as plain maps and scalars."""
    return dict(encode_plain(options))


def decode_store_options(plain: object) -> StoreOptions:
    """Return the settings from their plain form, checked.

    Raises:
        ConfigError: A key is unknown, a value has the wrong type or is out of its range.
    """
    options = decode_plain(StoreOptions, plain, "stores")
    check_store_options(options)
    return options


def check_store_options(options: StoreOptions) -> None:
    """Check ranges and endpoints.

    Raises:
        ConfigError: Names the key, the value and the range.
    """
    ranges: tuple[tuple[str, float, float], ...] = (
        ("cache_bytes_max", 0, 1 << 60),
        ("requests_per_host_max", 1, 1024),
        ("connect_timeout_s", 0.001, 3600),
        ("read_timeout_s", 0.001, 3600),
        ("deadline_s", 0.001, 86_400),
        ("block_bytes", BLOCK_BYTES_MIN, 64 << 20),
        ("request_bytes_max", options.block_bytes, 256 << 20),
        ("memory_bytes_max", 2 * options.request_bytes_max, 1 << 40),
        ("read_ahead_threads", 0, 64),
    )
    for key, low, high in ranges:
        value = getattr(options, key)
        if not low <= value <= high:
            raise ConfigError(f"stores.{key} is {value}, it must be {low} to {high}: change it")
    if options.cache_bytes_max and not Path(options.cache_dir).is_absolute():
        raise ConfigError(
            f"stores.cache_dir is {options.cache_dir!r}, a cache of {options.cache_bytes_max} bytes "
            "needs a folder: write an absolute path, or set cache_bytes_max to 0"
        )
    scheme, separator, _ = options.index_store.partition("://")
    if separator and scheme not in WRITABLE_SCHEMES:
        raise ConfigError(
            f"stores.index_store is {options.index_store!r}: indexes are written to a folder, or to "
            f"{', '.join(WRITABLE_SCHEMES)}"
        )
    if options.index_store and not separator and not Path(options.index_store).is_absolute():
        raise ConfigError(
            f"stores.index_store is {options.index_store!r}: write an absolute path, or a URL"
        )
    for place, endpoint in options.endpoints.items():
        _check_endpoint(place, endpoint)


def _check_endpoint(place: str, endpoint: EndpointOptions) -> None:
    scheme = place.partition("://")[0]
    if scheme not in SCHEMES:
        raise ConfigError(
            f"stores.endpoints has {place!r}: name one of {', '.join(SCHEMES)}, or s3://bucket"
        )
    if not endpoint.endpoint:
        return
    parts = urlsplit(endpoint.endpoint)
    if parts.username is not None or parts.password is not None or parts.query:
        raise ConfigError(
            f"stores.endpoints.{place}.endpoint holds a credential: name variables instead "
            "(access_key_env, secret_key_env)"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"stores.endpoints.{place}.endpoint is {endpoint.endpoint!r}: write http(s)://host:port"
        )


_configured: list[StoreOptions] = [StoreOptions()]


def configure_stores(options: StoreOptions) -> None:
    """Set the options of this process; stores opened later have them.

    Raises:
        ConfigError: A value is out of its range.
    """
    check_store_options(options)
    _configured[0] = options


def configured_options() -> StoreOptions:
    """Return the options of this process."""
    return _configured[0]
