"""planner.toml: defaults, layers and faults."""

from __future__ import annotations

from pathlib import Path

import pytest

from federation.store.etcd_client import EtcdTls
from msd_client.contract.errors import ConfigError
from msd_daemon.config.planner_file import load_planner_config, planner_schema


def test_no_file_gives_a_planner_of_this_machine(tmp_path: Path) -> None:
    config = load_planner_config(None, {"XDG_STATE_HOME": str(tmp_path)})
    assert config.state_dir == tmp_path / "msd" / "planner"
    assert config.store == f"sqlite://{tmp_path}/msd/planner/plan.db"
    assert config.listen.startswith("tcp://127.0.0.1:")
    assert (config.keys_dir, config.tls, config.lease_s) == (None, None, 3.0)
    assert config.name


def test_flags_are_stronger_than_the_file_that_the_environment_names(tmp_path: Path) -> None:
    (tmp_path / "key.pem").touch()
    file = tmp_path / "planner.toml"
    file.write_text(
        f'name = "p1"\nlisten = "tcp://[::]:7533"\nannounce = "tcp://p1:7533"\n'
        f'store = "etcds://a,b,c/run"\nstate_dir = "{tmp_path}"\nlease_s = 5.0\n'
        f'store_cert_file = "{tmp_path}/key.pem"\nstore_key_file = "{tmp_path}/key.pem"\n'
    )
    config = load_planner_config(None, {"MSD_PLANNER_CONFIG": str(file)}, {"name": "p2"})
    assert (config.name, config.announce, config.lease_s) == ("p2", "tcp://p1:7533", 5.0)
    assert config.store == "etcds://a,b,c/run"
    assert config.tls == EtcdTls(None, f"{tmp_path}/key.pem", f"{tmp_path}/key.pem")


def test_all_faults_are_told_at_once_with_their_keys(tmp_path: Path) -> None:
    file = tmp_path / "planner.toml"
    file.write_text(
        'state_dir = "here"\nkeys_dir = "there"\nstore = "etcd://1::2"\nstore_ca_file = "/no"\n'
        'store_cert_file = "/no"\n'
    )
    with pytest.raises(ConfigError) as caught:
        load_planner_config(file, {})
    for line in (
        "has 6 faults",
        'state_dir: "here": not an absolute path; begin it with /',
        "keys_dir: ",
        "store: ",
        'store_ca_file: "/no": not an existing file',
        "comes without its pair",
    ):
        assert line in caught.value.message
    file.write_text('lease_s = 1.0\nlisten = 5\nstor = "x"\n')
    with pytest.raises(ConfigError, match=r"has 3 faults[^$]*did you mean store\?"):
        load_planner_config(file, {})
    with pytest.raises(ConfigError, match=r"no such file; give an existing planner\.toml"):
        load_planner_config(tmp_path / "none.toml", {})


def test_the_schema_names_every_key() -> None:
    assert set(planner_schema()["properties"]) >= {"name", "listen", "store", "lease_s"}
