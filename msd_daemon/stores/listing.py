"""What a URL of a job stands for: objects with size and ETag, found by one listing of a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from msd_client.contract.errors import ConfigError, StoreMissingError
from msd_daemon.stores.answers import ObjectInfo
from msd_daemon.stores.hub import HubTransport
from msd_daemon.stores.options import StoreOptions, configured_options
from msd_daemon.stores.remote_path import Listed, RemoteObject, RemotePath, remote_object
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
class FolderRule:
    """What of a folder is data."""

    is_wanted: Callable[[str], bool]
    """Tells by its name whether an object is data."""
    is_secondary: Callable[[str], bool] = lambda _: False
    """Tells by its name whether an object is left out where others of the folder are data."""
    marks: frozenset[str] = frozenset()
    """Names of files that a folder of one data set has."""
    dataset: Callable[[RemotePath], tuple[str, list[RemotePath]] | None] = lambda _: None
    """Returns format and shards of a folder that is one data set."""


def expand_url(
    url: str, rule: FolderRule, options: StoreOptions | None = None
) -> list[RemoteObject]:
    """Return the objects that a URL stands for, sorted by key.

    An object's URL gives that object, a folder's all data below it, hidden ones left out, and of a
    folder that is one data set its shards; a glob its matches, of folders what is below them. One
    listing serves a whole glob, and the index of a data set is read once.

    Args:
        url: `{a,b}` and `{00..99}` are expanded too, and are all that http(s) can have, beside
            folders that are one data set.
        rule: What of a folder is data.
        options: Default: those of the process.

    Raises:
        ConfigError: The URL is faulty or matches nothing, or a data set is not read.
        StoreMissingError: A shard of a data set, or an object of a web server, is not there.
        StoreError: The store does not answer.
    """
    options = options or configured_options()
    place = parse_url(url)
    store = open_store(url, options)
    if place.scheme in WEB_SCHEMES:
        return _expand_web(store, place, rule)
    if place.scheme == "hf":
        place, store = _pin(store, place, options)
    found = _expand_key(store, place.key, rule)
    if not found:
        raise ConfigError(f"path {url!r} matches no object (looked at {store.place})", path=url)
    return found


def _expand_web(store: Store, place: StoreUrl, rule: FolderRule) -> list[RemoteObject]:
    path = place.key.partition("?")[0]
    if any(character in path for character in "*[]"):
        raise ConfigError(
            f"path {str(place)!r} is a glob, a web server cannot be listed: write "
            "{000..099} for numbered shards, or name each"
        )
    listed = Listed(store, {})
    paths: list[tuple[RemotePath, str]] = []
    for key in expand_braces(place.key):
        if key and not key.endswith("/"):
            paths.append((RemotePath(f"{store.place}/{key}", listed), ""))
            continue
        found = rule.dataset(RemotePath(f"{store.place}/{key}".rstrip("/"), listed))
        if found is None:
            raise ConfigError(
                f"path {str(place)!r} is a folder, a web server cannot be listed: name its files, or "
                f"a folder that has its own index ({', '.join(sorted(rule.marks))})"
            )
        paths += [(shard, found[0]) for shard in found[1]]
    with ThreadPoolExecutor(max(1, min(_HEAD_THREADS, len(paths)))) as threads:
        return list(threads.map(lambda pair: remote_object(*pair), paths))


def _pin(store: Store, place: StoreUrl, options: StoreOptions) -> tuple[StoreUrl, Store]:
    """Return the same place at the commit that its branch stands at now, so that it is frozen."""
    hub = store.transport
    assert isinstance(hub, HubTransport)
    commit = store.run(f"{store.place} (revision)", hub.commit)
    pinned = place._replace(host=f"{place.host.partition('@')[0]}@{commit}")
    return pinned, open_store(str(pinned), options)


def _expand_key(store: Store, key: str, rule: FolderRule) -> list[RemoteObject]:
    pattern: KeyPattern | None = None
    if has_magic(key):
        folder, pattern = folder_of(key), KeyPattern(key)
    else:
        named = _named(store, key) if key and not key.endswith("/") else []
        if named:
            return named
        folder = f"{key.rstrip('/')}/" if key else ""
    infos = _without_markers({info.key: info for info in store.list(folder)})
    listed = Listed(store, infos, folder)
    places = {found: _place_of(found, folder, key, pattern) for found in infos}
    sets = _data_sets(store, listed, places, rule)
    known = {shard.key: name for name, shards in sets.values() for shard in shards}
    keys = {_bin_of(found, infos) for found, place in places.items() if place == "named"}
    below = [
        found
        for found, place in places.items()
        if place == "below" and _folder(found) not in sets and rule.is_wanted(_name(found))
    ]
    first = [found for found in below if not rule.is_secondary(_name(found))]
    keys |= {_bin_of(found, infos) for found in first}
    folders = {_folder(found) for found, place in places.items() if place == "below"}
    keys |= {shard.key for key in folders & set(sets) for shard in sets[key][1]}
    keys = keys or set(below)
    return [
        remote_object(RemotePath(f"{store.place}/{found}", listed), known.get(found, ""))
        for found in sorted(keys, key=_bytes_of)
    ]


def _place_of(found: str, folder: str, key: str, pattern: KeyPattern | None) -> str:
    """Tell whether a key is `named` by a path, lies `below` a folder that is, or neither."""
    if pattern is None:
        return "below" if not _is_hidden(found.removeprefix(folder)) else ""
    if pattern.matches(found):
        return "named"
    if "**" in key:
        return ""
    is_below = any(pattern.matches(parent) and not _is_hidden(rest) for parent, rest in _cut(found))
    return "below" if is_below else ""


def _data_sets(
    store: Store, listed: Listed, places: dict[str, str], rule: FolderRule
) -> dict[str, tuple[str, list[RemotePath]]]:
    """Return the folders that are one data set each, of those that something is taken from."""
    taken = {_folder(found) for found, place in places.items() if place}
    marked = {_folder(found) for found in places if _name(found) in rule.marks}
    sets = {}
    for folder in sorted(marked & taken):
        found = rule.dataset(RemotePath(f"{store.place}/{folder}".rstrip("/"), listed))
        if found is not None:
            sets[folder] = found
    return sets


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
            info = store.stat(name)
        except StoreMissingError:
            continue
        return [remote_object(RemotePath(f"{store.place}/{name}", Listed(store, {name: info})))]
    return []


def _cut(key: str) -> Iterator[tuple[str, str]]:
    at = key.find("/")
    while at >= 0:
        yield key[:at], key[at + 1 :]
        at = key.find("/", at + 1)


def _is_hidden(rest: str) -> bool:
    return any(part.startswith(_HIDDEN) for part in rest.split("/"))


def _folder(key: str) -> str:
    return key.rpartition("/")[0]


def _name(key: str) -> str:
    return key.rpartition("/")[2]


def _with_bin(key: str) -> str:
    return f"{key.removesuffix('.idx')}.bin"


def _bin_of(key: str, infos: Iterable[str]) -> str:
    return _with_bin(key) if key.endswith(".idx") and _with_bin(key) in infos else key


def _bytes_of(key: str) -> bytes:
    return key.encode("utf-8", "surrogateescape")
