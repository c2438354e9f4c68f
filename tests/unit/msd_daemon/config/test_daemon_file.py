"""daemon.toml: layers, provenance, and every refusal with its key, value and remedy."""

import os

import pytest

from msd_client.contract.errors import ConfigError
from msd_client.machine_memory import usable_memory_bytes
from msd_daemon.config.daemon_config import decode_daemon_config, encode_daemon_config
from msd_daemon.config.daemon_file import (
    daemon_schema,
    load_daemon_config,
)

HOME = {"HOME": "/home/u"}


def refusal(text, tmp_path, environ=HOME):
    file = tmp_path / "daemon.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as raised:
        load_daemon_config(file, environ)
    return raised.value.message


def test_no_file_at_all_works():
    config = load_daemon_config(None, HOME)
    uid = os.geteuid()
    assert str(config.socket) == f"/tmp/msd-{uid}/msd.sock"
    assert str(config.state_dir) == "/home/u/.local/state/msd"
    assert config.memory_bytes == min(usable_memory_bytes() // 4, 32 << 30)
    assert config.pool_bytes is None
    assert config.ring_slots is None
    assert 1 <= config.loader_workers <= 4
    assert config.segment == "auto"
    assert (config.first_batch_s, config.next_batch_s) == (300.0, 120.0)
    assert set(config.origins.values()) == {"default"}


def test_layers_override_each_other_and_say_where_from(tmp_path):
    file = tmp_path / "daemon.toml"
    file.write_text(
        '[memory]\nmemory_bytes = "64Mi"\nsegment = "shm"\n[deadlines]\njoin_s = 9.0\n'
        "[workers]\nloader_workers = 3\n"
    )
    environ = HOME | {"MSD__MEMORY__SEGMENT": "memfd", "MSD__DEADLINES__JOIN_S": "11"}
    config = load_daemon_config(file, environ, {"deadlines.join_s": 13.0})
    assert config.memory_bytes == 64 << 20
    assert config.segment == "memfd"
    assert config.join_s == 13.0
    assert config.loader_workers == 3
    assert config.origins["memory.memory_bytes"] == str(file)
    assert config.origins["memory.segment"] == "MSD__MEMORY__SEGMENT"
    assert config.origins["deadlines.join_s"] == "flag"
    assert config.origins["daemon.socket"] == "default"


def test_runtime_dir_moves_the_socket(tmp_path):
    config = load_daemon_config(None, HOME, {"daemon.runtime_dir": str(tmp_path)})
    assert config.socket == tmp_path / "msd.sock"


def test_environment_takes_lists_and_words():
    config = load_daemon_config(
        None, HOME | {"MSD__ACCESS__ALLOW_UIDS": "[1000, 1001]", "MSD__DAEMON__LOG_LEVEL": "debug"}
    )
    assert config.allow_uids == (1000, 1001)
    assert config.log_level == "debug"


def test_all_faults_at_once_with_their_origin(tmp_path):
    message = refusal(
        '[daemon]\nlog_level = "loud"\n[memory]\npool_bytes = "3K"\nring_slots = 65\n[acces]\nx=1\n',
        tmp_path,
        HOME | {"MSD__DEADLINES__JOIN_S": "-3", "MSD__X": "3"},
    )
    lines = message.splitlines()
    assert lines[0] == "the daemon's configuration has 6 faults:"
    text = "\n".join(lines)
    assert "daemon.log_level: \"loud\": is none of 'debug'" in text
    assert 'memory.pool_bytes: "3K": K and k are refused' in text
    assert "memory.ring_slots: 65: must be less than or equal to 64" in text
    assert "did you mean access?" in text
    assert "deadlines.join_s: -3: must be greater than 0; write a larger number" in text
    assert "(from MSD__DEADLINES__JOIN_S)" in text
    assert "MSD__X" in text


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('[memory]\nmemory_bytes = "900Ti"', "memory.memory_bytes"),
        ('[memory]\nmemory_bytes = "1Gi"\npool_bytes = "1000Mi"', "leaves no room for rings"),
        ("[memory]\nmemory_bytes = nan", "is not a whole number"),
        ("[deadlines]\njoin_s = nan", "deadlines.join_s: NaN"),
        ("[deadlines]\njoin_s = inf", "deadlines.join_s: Infinity"),
        ('[daemon]\nsocket = "msd.sock"', "not an absolute path"),
        (
            f'[daemon]\nsocket = "/{"a" * 107}"',
            "108 bytes long, a Unix socket path holds at most 107",
        ),
        ('[daemon]\nstate_dir = "x"', "daemon.state_dir"),
        ('[access]\nroots = ["/nonexistent/msd"]', "access.roots[0]"),
        ("[workers]\nloader_workers = 0", "workers.loader_workers: 0"),
        ("[stores]\nrequests_per_host = 0", "stores.requests_per_host: 0"),
        ('[stores]\nblock_bytes = "8Mi"', "stores.request_bytes_max is 4194304"),
        ('[stores]\ncache_bytes = 9\ncache_dir = "x"', "write an absolute path"),
        ('[stores.endpoints.s4]\nregion = "x"', "stores.endpoints has 's4'"),
        ('[stores.endpoints.s3]\nendpoint = "h:1"', "write http(s)://host:port"),
        ('[stores.endpoints.s3]\nsecret_key = "x"', "stores.endpoints.s3.secret_key"),
        ("memory = 3", "memory: 3: "),
        ("[memory", "not TOML"),
    ],
)
def test_refusals(text, line, tmp_path):
    assert line in refusal(text, tmp_path)


def test_socket_of_107_bytes_is_accepted():
    path = "/" + "a" * 106
    assert str(load_daemon_config(None, HOME, {"daemon.socket": path}).socket) == path


def test_stores_are_told_by_file_and_environment(tmp_path):
    file = tmp_path / "daemon.toml"
    file.write_text(
        '[stores]\ncache_bytes = "10Gi"\n[stores.endpoints.s3]\nendpoint = "http://h:9"\n'
        'access_key_env = "KEY"\nsecret_key_env = "SECRET"\n'
        '[stores.endpoints."s3://open"]\nanonymous = true\n'
    )
    stores = load_daemon_config(file, HOME | {"MSD__STORES__DEADLINE_S": "60"}).stores
    assert stores.cache_bytes_max == 10 << 30
    assert stores.cache_dir == "/home/u/.local/state/msd/store-cache"
    assert stores.shared_dir == f"/tmp/msd-{os.geteuid()}/stores"
    assert stores.deadline_s == 60
    assert stores.endpoint_of("s3", "any").secret_key_env == "SECRET"
    assert stores.endpoint_of("s3", "open").is_anonymous
    config = load_daemon_config(file, HOME)
    assert decode_daemon_config(encode_daemon_config(config)) == config


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        load_daemon_config(tmp_path / "none.toml", HOME)


def test_schema_has_all_sections():
    assert set(daemon_schema()["properties"]) == {
        "daemon",
        "memory",
        "workers",
        "planner",
        "journal",
        "access",
        "deadlines",
        "stores",
        "federation",
        "dashboard",
    }


def test_a_file_of_the_environment_gives_way_to_a_given_one(tmp_path):
    for name, seconds in (("a", 7.0), ("b", 9.0)):
        (tmp_path / name).write_text(f"[stores]\ndeadline_s = {seconds}\n")
    environ = HOME | {"MSD_CONFIG": str(tmp_path / "a")}
    config = load_daemon_config(None, environ)
    assert config.stores.deadline_s == 7.0
    assert config.origins["stores.deadline_s"] == str(tmp_path / "a")
    assert load_daemon_config(tmp_path / "b", environ).stores.deadline_s == 9.0
    assert load_daemon_config(None, HOME | {"MSD_CONFIG": ""}).stores.deadline_s == 300.0
