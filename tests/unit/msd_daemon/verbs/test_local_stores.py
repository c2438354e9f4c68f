"""Stores of verbs run by hand: a short deadline unless one was set, endpoints from MSD_CONFIG."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from msd_client.contract.errors import ConfigError
from msd_daemon.stores.options import StoreOptions, configure_stores, configured_options
from msd_daemon.stores.retry import tell_waits
from msd_daemon.verbs.local_stores import configure_local_stores


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Leave this process's stores as they were."""
    monkeypatch.setenv("MSD__DAEMON__STATE_DIR", str(tmp_path))
    monkeypatch.delenv("MSD_CONFIG", raising=False)
    before = configured_options()
    yield
    configure_stores(before)
    tell_waits(None)


def configured() -> StoreOptions:
    assert configure_local_stores().stores == configured_options()
    return configured_options()


def test_nobody_waits_five_minutes_at_a_terminal() -> None:
    assert configured().deadline_s == 30.0


def test_a_deadline_of_the_environment_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MSD__STORES__DEADLINE_S", "300.0")
    assert configured().deadline_s == 300.0


def test_the_file_gives_endpoint_and_deadline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "daemon.toml"
    file.write_text(
        '[stores]\ndeadline_s = 7.0\n[stores.endpoints.s3]\nendpoint = "http://127.0.0.1:9000"\n'
    )
    monkeypatch.setenv("MSD_CONFIG", str(file))
    options = configured()
    assert options.deadline_s == 7.0
    assert options.endpoint_of("s3", "b").endpoint == "http://127.0.0.1:9000"


def test_a_relative_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MSD_CONFIG", "daemon.toml")
    with pytest.raises(ConfigError) as raised:
        configure_local_stores()
    assert raised.value.message == (
        "MSD_CONFIG is 'daemon.toml', not an absolute path: begin it with /"
    )
