"""Opens a store by its URL: `sqlite:///path/plan.db` or `etcd://host1:2379,host2,host3/prefix`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from federation.store.etcd_client import EtcdTls
from federation.store.plan_store import LEASE_S, PlanStore
from msd_client.contract.errors import ConfigError

DEFAULT_PORT = 2379
DEFAULT_PREFIX = "msd"
MEMBERS_MAX = 16
LEASE_RANGE_S = (2.0, 60.0)

_PREFIX = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*")
_HOST = re.compile(r"[A-Za-z0-9._-]+")
_EXAMPLES = "write sqlite:///var/lib/msd/plan.db, or etcd://host1:2379,host2,host3/prefix"


@dataclass(frozen=True)
class StorePlace:
    """Where a store is."""

    path: Path | None = None
    """Of SQLite's file."""
    members: tuple[str, ...] = ()
    """etcd's, `host:port` each."""
    prefix: str = DEFAULT_PREFIX
    is_tls: bool = False


def parse_store_url(url: str) -> StorePlace:
    """Return the place that a URL names; `etcds://` speaks TLS.

    Raises:
        ConfigError: It is none.
    """
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in ("sqlite", "etcd", "etcds"):
        raise ConfigError(f"store {url!r} is of no known kind: {_EXAMPLES}")
    if scheme == "sqlite":
        path = Path(rest)
        if not path.is_absolute() or path.name in ("", "..") or rest.endswith("/"):
            raise ConfigError(f"store {url!r} names no absolute path of a file: {_EXAMPLES}")
        return StorePlace(path)
    hosts, _, prefix = rest.partition("/")
    if "@" in hosts:
        raise ConfigError(
            "the store's URL holds a name or password, which logs would show: use etcds:// with a "
            "client's certificate (store_cert_file, store_key_file)"
        )
    members = tuple(_member(host.strip(), url) for host in hosts.split(","))
    if len(members) > MEMBERS_MAX or len(set(members)) != len(members):
        raise ConfigError(
            f"store {url!r} names {len(members)} members, some twice or more than {MEMBERS_MAX}: name "
            "each once"
        )
    prefix = prefix.strip("/") or DEFAULT_PREFIX
    if not _PREFIX.fullmatch(prefix):
        raise ConfigError(
            f"store {url!r}: prefix {prefix!r} may hold letters, digits, '.', '_', '-' and '/' alone: "
            "write another one"
        )
    return StorePlace(None, members, prefix, scheme == "etcds")


def open_store(
    url: str, cache_dir: Path, *, lease_s: float = LEASE_S, tls: EtcdTls | None = None
) -> PlanStore:
    """Open the store of a URL.

    Args:
        url: See `parse_store_url`.
        cache_dir: Local folder of working copies; SQLite needs none.
        lease_s: So long a leader that says nothing is waited for.
        tls: Files for `etcds://`.

    Raises:
        ConfigError: The URL, or a value beside it, can't be used.
        PlanStoreError: SQLite's file can't be. etcd need not answer yet.
    """
    place = parse_store_url(url)
    low, high = LEASE_RANGE_S
    if not low <= lease_s <= high:
        raise ConfigError(
            f"a lease of {lease_s} s, {low:g} to {high:g} s may be: write one of these"
        )
    if tls is not None and not place.is_tls:
        raise ConfigError(
            f"store {url!r} speaks no TLS, and files for it are given: write etcds://"
        )
    if place.path is not None:
        from federation.store.sqlite_store import SqliteStore

        return SqliteStore(place.path, lease_s=lease_s)
    from federation.store.etcd_store import EtcdStore

    return EtcdStore(
        list(place.members),
        place.prefix,
        cache_dir,
        tls=(tls or EtcdTls()) if place.is_tls else None,
        lease_s=lease_s,
    )


def _member(host: str, url: str) -> str:
    """Return `host:port` of one member."""
    if host.startswith("["):
        name, bracket, port = host.partition("]")
        if not bracket or name.count(":") < 2 or not re.fullmatch(r"(:\d+)?", port):
            raise ConfigError(f"store {url!r}: {host!r} is no address: write [v6 address]:port")
        name += "]"
        port = port.removeprefix(":")
    else:
        if host.count(":") > 1:
            raise ConfigError(
                f"store {url!r}: {host!r} may be an address with or without a port: write "
                f"[{host}]:{DEFAULT_PORT}"
            )
        name, _, port = host.partition(":")
        if not _HOST.fullmatch(name):
            raise ConfigError(f"store {url!r}: {host!r} is no host: {_EXAMPLES}")
    number = port or str(DEFAULT_PORT)
    if not number.isdigit() or not 0 < int(number) < 1 << 16:
        raise ConfigError(f"store {url!r}: port {port!r} is none: write 1 to 65535")
    return f"{name}:{int(number)}"
