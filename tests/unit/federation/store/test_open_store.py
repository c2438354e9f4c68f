"""URLs of stores, and what is refused with its remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from federation.store import sqlite_store
from federation.store.etcd_client import EtcdTls
from federation.store.open_store import StorePlace, open_store, parse_store_url
from msd_client.contract.errors import ConfigError, PlanStoreError


@pytest.mark.parametrize(
    ("url", "members", "prefix"),
    [
        ("etcd://a", ("a:2379",), "msd"),
        ("etcd://a:1, b,c:65535/x/y/", ("a:1", "b:2379", "c:65535"), "x/y"),
        ("etcd://[2001:db8::1],[::1]:80/", ("[2001:db8::1]:2379", "[::1]:80"), "msd"),
    ],
)
def test_members_and_prefix_are_read(url: str, members: tuple[str, ...], prefix: str) -> None:
    assert parse_store_url(url) == StorePlace(None, members, prefix)
    assert parse_store_url(url.replace("etcd:", "etcds:")).is_tls


def test_a_path_is_read() -> None:
    assert parse_store_url("sqlite:///var/a b/plan.db") == StorePlace(Path("/var/a b/plan.db"))


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("plan.db", "no known kind: write sqlite:///"),
        ("postgres://a", "no known kind"),
        ("sqlite://plan.db", "no absolute path"),
        ("sqlite:///var/", "no absolute path"),
        ("etcd://", "'' is no host"),
        ("etcd://a,,b", "'' is no host"),
        ("etcd://a:0", "port '0' is none: write 1 to 65535"),
        ("etcd://a:65536", "port '65536' is none"),
        ("etcd://2001:db8::1:2379", r"with or without a port: write \[2001:db8::1:2379\]:2379"),
        ("etcd://[::1", "is no address"),
        ("etcd://[a]:1", "is no address"),
        ("etcd://a,a:2379", "some twice"),
        ("etcd://a/x//y", "prefix 'x//y' may hold"),
        ("etcd://a/ä", "prefix 'ä' may hold"),
    ],
)
def test_what_is_no_url_is_refused(url: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        parse_store_url(url)


def test_a_password_is_refused_and_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_store_url("etcd://root:secret@a:1")
    assert "secret" not in caught.value.message


def test_values_beside_the_url_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a lease of 0\.5 s, 2 to 60 s may be"):
        open_store("etcd://a", tmp_path, lease_s=0.5)
    with pytest.raises(ConfigError, match="write etcds://"):
        open_store("etcd://a", tmp_path, tls=EtcdTls("ca.pem"))


def test_sqlite_on_a_network_file_system_is_refused_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_store, "file_system_of", lambda path: "nfs4")
    with pytest.raises(ConfigError, match=r"is on nfs4, a network file system.*use etcd://"):
        open_store(f"sqlite://{tmp_path}/plan.db", tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "what"), [(b"x" * 5000, "it is damaged: move it away"), (None, "make room on its")]
)
def test_a_file_that_is_no_store_is_named(tmp_path: Path, content: bytes | None, what: str) -> None:
    path = tmp_path / "plan.db"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    with pytest.raises(PlanStoreError, match=f"plan.db: .*{what}"):
        open_store(f"sqlite://{path}", tmp_path)


def test_terms_grow_on_where_sqlites_file_was_lost(tmp_path: Path) -> None:
    path = tmp_path / "plan.db"
    for wanted in (1, 2, 3):
        store = open_store(f"sqlite://{path}", tmp_path)
        assert store.campaign("a", "tcp://a:1") == wanted
        store.journal("job").open_or_begin(1000).close()
        store.close()  # nobody resigned, but the process is gone as far as its lock says
    for left in tmp_path.glob("plan.db*"):
        left.unlink()
    store = open_store(f"sqlite://{path}", tmp_path)
    assert store.campaign("a", "tcp://a:1") == 4
    store.close()
