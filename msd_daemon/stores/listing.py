"""What a URL of a job stands for: objects with size and ETag, found by one listing of a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import PurePosixPath

from msd_client.contract.errors import ConfigError, StoreMissingError
from msd_daemon.stores.answers import ObjectInfo, object_fingerprint
from msd_daemon.stores.hub import HubTransport
from msd_daemon.stores.options import StoreOptions, configured_options
from msd_daemon.stores.store import Store, open_store
from msd_daemon.stores.urls import (
    WEB_SCHEMES,
    KeyPattern,
    StoreUrl,
    expand_braces,
    folder_of,
    has_magic,
    parse_url,
)

_HEAD_THREADS = 16
_HIDDEN = (".", "_")


@dataclass(frozen=True)
class RemoteObject:
    """An object of a listing; what a `Path` is to a local shard."""

    url: str
    size_bytes: int
    fingerprint: str
    """Of name, size and ETag."""
    index_fingerprint: str = ""
    """Of the `.idx` of the same name, where the listing has one."""

    @property
    def name(self) -> str:
        """Last part of its key."""
        return self.url.partition("?")[0].rpartition("/")[2]

    @property
    def suffixes(self) -> list[str]:
        """Extensions of its name, each with its dot."""
        return PurePosixPath(self.name).suffixes

    def is_file(self) -> bool:
        """Tell that it can be read."""
        return True

    def __fspath__(self) -> str:
        return self.url

    def __str__(self) -> str:
        return self.url


def expand_url(
    url: str, is_wanted: Callable[[str], bool], options: StoreOptions | None = None
) -> list[RemoteObject]:
    """Return the objects that a URL stands for, sorted by key.

    An object's URL gives that object, a folder's all below it that `is_wanted`, hidden ones left
    out; a glob its matches, of folders what is below them. One listing serves a whole glob.

    Args:
        url: `{a,b}` and `{00..99}` are expanded too, and are all that http(s) can have.
        is_wanted: Tells by its name whether an object of a folder is data.
        options: Default: those of the process.

    Raises:
        ConfigError: The URL is faulty or matches nothing.
        StoreError: The store does not answer.
    """
    options = options or configured_options()
    place = parse_url(url)
    store = open_store(url, options)
    if place.scheme in WEB_SCHEMES:
        return _expand_web(store, place)
    if place.scheme == "hf":
        place, store = _pin(store, place, options)
    found = _expand_key(store, place.key, is_wanted)
    if not found:
        raise ConfigError(f"path {url!r} matches no object (looked at {store.place})", path=url)
    return found


def stat_index(url: str) -> str:
    """Return the fingerprint of an `.idx` that no listing has shown, asked for.

    Raises:
        ConfigError: It is not there.
        StoreError: The store does not answer.
    """
    place = parse_url(url)
    try:
        return _fingerprint(open_store(url).stat(place.key))
    except StoreMissingError as error:
        raise ConfigError(f"{url} is not there: a bin needs its idx beside it", path=url) from error


def _expand_web(store: Store, place: StoreUrl) -> list[RemoteObject]:
    path = place.key.partition("?")[0]
    if any(character in path for character in "*[]"):
        raise ConfigError(
            f"path {str(place)!r} is a glob, a web server cannot be listed: write "
            "{000..099} for numbered shards, or name each"
        )
    keys = list(expand_braces(place.key))
    with ThreadPoolExecutor(min(_HEAD_THREADS, len(keys))) as threads:
        return [_object(store, found, {}) for found in threads.map(store.stat, keys)]


def _pin(store: Store, place: StoreUrl, options: StoreOptions) -> tuple[StoreUrl, Store]:
    """Return the same place at the commit that its branch stands at now, so that it is frozen."""
    hub = store.transport
    assert isinstance(hub, HubTransport)
    commit = store.run(f"{store.place} (revision)", hub.commit)
    pinned = place._replace(host=f"{place.host.partition('@')[0]}@{commit}")
    return pinned, open_store(str(pinned), options)


def _expand_key(store: Store, key: str, is_wanted: Callable[[str], bool]) -> list[RemoteObject]:
    if has_magic(key):
        folder = folder_of(key)
        chosen = _match(key, is_wanted)
    else:
        named = _named(store, key) if key and not key.endswith("/") else []
        if named:
            return named
        folder = f"{key.rstrip('/')}/" if key else ""

        def chosen(found: str) -> bool:
            return _is_data(found.removeprefix(folder), is_wanted)

    infos = _without_markers({info.key: info for info in store.list(folder)})
    keys = {_bin_of(found, infos) for found in infos if chosen(found)}
    return [_object(store, infos[found], infos) for found in sorted(keys, key=_bytes_of)]


def _without_markers(infos: dict[str, ObjectInfo]) -> dict[str, ObjectInfo]:
    """Leave out the empty objects that consoles make for folders; listings may cut their slash."""
    folders = {parent for key in infos for parent, _ in _cut(key)}
    return {
        key: info
        for key, info in infos.items()
        if info.size_bytes or not (key.endswith("/") or key in folders)
    }


def _named(store: Store, key: str) -> list[RemoteObject]:
    """Return the object of a key, or the bin of a Megatron prefix or idx; nothing for a folder."""
    for name in (_with_bin(key) if key.endswith(".idx") else key, f"{key}.bin"):
        try:
            return [_object(store, store.stat(name), {})]
        except StoreMissingError:
            continue
    return []


def _match(pattern: str, is_wanted: Callable[[str], bool]) -> Callable[[str], bool]:
    rule = KeyPattern(pattern)
    is_deep = "**" in pattern

    def chosen(key: str) -> bool:
        if rule.matches(key):
            return True
        if is_deep:
            return False
        return any(rule.matches(parent) and _is_data(rest, is_wanted) for parent, rest in _cut(key))

    return chosen


def _cut(key: str) -> Iterator[tuple[str, str]]:
    at = key.find("/")
    while at >= 0:
        yield key[:at], key[at + 1 :]
        at = key.find("/", at + 1)


def _is_data(rest: str, is_wanted: Callable[[str], bool]) -> bool:
    parts = rest.split("/")
    return not any(part.startswith(_HIDDEN) for part in parts) and is_wanted(parts[-1])


def _with_bin(key: str) -> str:
    return f"{key.removesuffix('.idx')}.bin"


def _bin_of(key: str, infos: Iterable[str]) -> str:
    return _with_bin(key) if key.endswith(".idx") and _with_bin(key) in infos else key


def _object(store: Store, info: ObjectInfo, infos: dict[str, ObjectInfo]) -> RemoteObject:
    index = infos.get(f"{info.key.removesuffix('.bin')}.idx") if info.key.endswith(".bin") else None
    return RemoteObject(
        f"{store.place}/{info.key}",
        info.size_bytes,
        _fingerprint(info),
        "" if index is None else _fingerprint(index),
    )


def _fingerprint(info: ObjectInfo) -> str:
    name = info.key.rpartition("/")[2]
    return object_fingerprint(name, info.size_bytes, info.validator)


def _bytes_of(key: str) -> bytes:
    return key.encode("utf-8", "surrogateescape")
