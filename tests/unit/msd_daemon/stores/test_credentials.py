"""Credentials are found by name, in variables and profiles, and stand nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest

from msd_client.contract.errors import ConfigError
from msd_client.contract.plain import encode_plain
from msd_daemon.stores.answers import FailureKind
from msd_daemon.stores.cloud import failure_of, s3_store
from msd_daemon.stores.options import (
    EndpointOptions,
    StoreOptions,
    check_store_options,
    decode_store_options,
    encode_store_options,
)

pytest.importorskip("obstore", reason="obstore is not installed (pip install msd[daemon])")

OPTIONS = StoreOptions()


def test_a_variable_that_is_not_set_is_named_and_no_value_is() -> None:
    endpoint = EndpointOptions(access_key_env="MY_KEY", secret_key_env="MY_SECRET")
    with pytest.raises(ConfigError, match="access_key_env names the variable 'MY_KEY'"):
        s3_store("b", endpoint, OPTIONS, environ={"MY_SECRET": "hunter2"})
    with pytest.raises(ConfigError, match="'MY_SECRET'") as caught:
        s3_store("b", endpoint, OPTIONS, environ={"MY_KEY": "hunter2"})
    assert "hunter2" not in caught.value.message
    config = s3_store("b", endpoint, OPTIONS, environ={"MY_KEY": "k", "MY_SECRET": "s"}).config
    assert (config["access_key_id"], config["secret_access_key"]) == ("k", "s")


def test_profiles_of_the_credentials_file_are_used_by_name(tmp_path: Path) -> None:
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/credentials").write_text(
        "[default]\naws_access_key_id = d\naws_secret_access_key = ds\n"
        "[lab]\naws_access_key_id = l\naws_secret_access_key = ls\naws_session_token = lt\n"
    )
    (tmp_path / ".aws/config").write_text("[profile lab]\nregion = eu-west-1\n")
    environ = {"HOME": str(tmp_path), "TEAM_PROFILE": "lab"}
    lab = s3_store("b", EndpointOptions(profile_env="TEAM_PROFILE"), OPTIONS, environ=environ)
    found = lab.credential_provider()
    assert (found["access_key_id"], found["secret_access_key"], found["token"]) == ("l", "ls", "lt")
    assert lab.config["region"] == "eu-west-1"
    default = s3_store("b", EndpointOptions(), OPTIONS, environ=environ)
    assert default.credential_provider()["access_key_id"] == "d"
    keys = environ | {"AWS_ACCESS_KEY_ID": "e", "AWS_SECRET_ACCESS_KEY": "es"}
    assert s3_store("b", EndpointOptions(), OPTIONS, environ=keys).credential_provider is None
    with pytest.raises(ConfigError, match="AWS profile 'gone' has no keys"):
        s3_store("b", EndpointOptions(), OPTIONS, environ=environ | {"AWS_PROFILE": "gone"})


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"requests_per_host_max": 0}, "requests_per_host_max is 0, it must be 1 to 1024"),
        ({"block_bytes": 100}, "block_bytes is 100"),
        ({"request_bytes_max": 1000}, "request_bytes_max is 1000, it must be 262144"),
        ({"memory_bytes_max": 1000}, "memory_bytes_max is 1000"),
        ({"cache_bytes_max": 10, "cache_dir": "x"}, "write an absolute path"),
        ({"endpoints": {"s3": {"endpoint": "http://u:hunter2@h"}}}, "holds a credential"),
        ({"endpoints": {"ftp": {}}}, "'ftp': name one of s3"),
        ({"endpoints": {"s3": {"endpoint": "h:1"}}}, "write http"),
        ({"deadline": 3}, "unknown keys"),
    ],
)
def test_options_out_of_range_are_refused(fields: dict[str, object], match: str) -> None:
    with pytest.raises(ConfigError, match=match) as caught:
        decode_store_options(encode_plain(OPTIONS) | fields)
    assert "hunter2" not in caught.value.message


def test_options_survive_the_wire() -> None:
    options = StoreOptions(endpoints={"s3://b": EndpointOptions("http://h:1", region="r")})
    check_store_options(options)
    assert decode_store_options(encode_store_options(options)) == options
    assert options.endpoint_of("s3", "b").region == "r"
    assert options.endpoint_of("s3", "c") == EndpointOptions()


@pytest.mark.parametrize(
    ("text", "kind", "reason"),
    [
        ("GET https://h/k?sig=hunter2 - status code: 503 Busy", "THROTTLED", "HTTP 503"),
        (
            "status code: 403 x: <Code>AccessDenied</Code> hunter2",
            "DENIED",
            "HTTP 403 AccessDenied",
        ),
        ("HttpError { kind: Timeout, TimedOut } hunter2", "TRANSIENT", "the connection failed"),
        ("missing credentials hunter2", "DENIED", "no credentials were found"),
        ("InvalidListResponse hunter2", "REFUSED", "the answer is not understood (GenericError)"),
    ],
)
def test_what_obstore_says_is_classed_and_not_repeated(text: str, kind: str, reason: str) -> None:
    from obstore.exceptions import GenericError

    failure = failure_of(GenericError(text))
    assert failure.kind is FailureKind[kind]
    assert failure.reason == reason
