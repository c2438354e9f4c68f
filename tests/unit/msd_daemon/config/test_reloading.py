"""What a running daemon takes of a changed configuration."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from msd_daemon.config.daemon_config import DaemonConfig
from msd_daemon.config.daemon_file import DaemonFile, load_daemon_config
from msd_daemon.config.reloading import EFFECTS, effect_of, reload

HOME = {"HOME": "/home/u"}


def config(**flags: object) -> DaemonConfig:
    return load_daemon_config(None, HOME, {key.replace("__", "."): it for key, it in flags.items()})


def test_each_setting_has_an_effect_and_each_key_of_the_file_one() -> None:
    assert set(EFFECTS) == {field.name for field in fields(DaemonConfig)} - {"origins"}
    for section, field in DaemonFile.model_fields.items():
        for key in field.annotation.model_fields:
            assert effect_of(f"{section}.{key}") in ("now", "next job", "restart")


def test_nothing_changed_is_said_so() -> None:
    found = reload(config(), config())
    assert found.lines() == ["nothing changed"]
    assert found.config == config()


def test_each_change_is_named_by_its_effect_and_what_needs_a_restart_stays() -> None:
    old = config()
    new = config(
        daemon__log_level="debug", workers__spares=3, daemon__state_dir="/elsewhere",
        dashboard__listen="127.0.0.1:9",
    )  # fmt: skip
    found = reload(old, new)
    assert found.changed == {
        "now": ("daemon.log_level", "dashboard"),
        "next job": ("workers.spares",),
        "restart": ("daemon.state_dir",),
    }
    assert found.config == replace(new, state_dir=old.state_dir, stores=old.stores)
    assert "restart of the daemon" in found.lines()[-1]


@pytest.mark.parametrize(
    ("listen", "token", "told"),
    [
        ("0.0.0.0:8710", "", "dashboard.listen"),
        ("127.0.0.1", "", "HOST:PORT"),
        ("127.0.0.1:99999", "", "HOST:PORT"),
        ("127.0.0.1:1", "relative", "dashboard.token_file"),
    ],
)
def test_a_dashboard_for_others_needs_a_token(listen: str, token: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        config(dashboard__listen=listen, dashboard__token_file=token)
