"""Addresses as people write them (IPv6 without brackets is where others went wrong)."""

from __future__ import annotations

import ipaddress
import socket
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from federation import addresses
from federation.addresses import (
    Endpoint,
    announced,
    bind_places,
    interface_address,
    outward_address,
    parse_endpoint,
    parse_peer,
    resolve,
)
from msd_client.contract.errors import ConfigError

KEY = "planner.listen"


@pytest.mark.parametrize(
    ("text", "host", "port", "printed"),
    [
        ("10.0.0.7:5555", "10.0.0.7", 5555, "10.0.0.7:5555"),
        ("tcp://10.0.0.7:5555", "10.0.0.7", 5555, "10.0.0.7:5555"),
        ("10.0.0.7", "10.0.0.7", 1, "10.0.0.7:1"),
        ("::1", "::1", 1, "[::1]:1"),
        ("[::1]", "::1", 1, "[::1]:1"),
        ("[::1]:5555", "::1", 5555, "[::1]:5555"),
        ("tcp://[2001:DB8:0::7]:9", "2001:db8::7", 9, "[2001:db8::7]:9"),
        ("2001:db8::beef", "2001:db8::beef", 1, "[2001:db8::beef]:1"),
        ("1:2:3:4:5:6:7:8", "1:2:3:4:5:6:7:8", 1, "[1:2:3:4:5:6:7:8]:1"),
        ("[fe80::7%eth0]:5", "fe80::7%eth0", 5, "[fe80::7%eth0]:5"),
        ("fe80::beef%eth0", "fe80::beef%eth0", 1, "[fe80::beef%eth0]:1"),
        ("planner.example:5", "planner.example", 5, "planner.example:5"),
        ("planner-0", "planner-0", 1, "planner-0:1"),
        ("*:5", "*", 5, "*:5"),
        ("%eth0:5", "%eth0", 5, "%eth0:5"),
        ("[::]:*", "::", 0, "[::]:0"),
        ("::", "::", 1, "[::]:1"),
    ],
)
def test_valid_forms(text: str, host: str, port: int, printed: str) -> None:
    endpoint = parse_endpoint(text, KEY, 1)
    assert endpoint == Endpoint(host, port)
    assert str(endpoint) == printed
    assert endpoint.zmq == f"tcp://{printed}"


def test_ipc_is_a_path() -> None:
    endpoint = parse_endpoint("ipc:///run/msd/p", KEY)
    assert endpoint.zmq == str(endpoint) == "ipc:///run/msd/p"
    assert endpoint.is_loopback
    assert bind_places(endpoint, KEY) == [endpoint]


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("2001:db8::1:5555", "[2001:db8::1]:5555"),
        ("2001:db8::1:5555", "[2001:db8::1:5555]"),
        ("::1:5555", "[::1]:5555"),
        ("1:2:3:4:5:6:7:8:5555", "[1:2:3:4:5:6:7:8]:5555"),
        ("fe80::1%eth0:5555", "[fe80::1%eth0]:5555"),
        ("fe80::1", "interface"),
        ("[fe80::1]:5", "[fe80::1%eth0]:PORT"),
        ("[2001:db8::1%eth0]:5", "only link-local"),
        ("[10.0.0.1]:5", "no IPv6 address"),
        ("[::1", "[ADDRESS]:PORT"),
        ("[::1]5555", "[ADDRESS]:PORT"),
        ("10.0.0.256:1", "no IPv4 address"),
        ("10.0.1:1", "no IPv4 address"),
        ("host:65536", "0 to 65535"),
        ("host:-1", "0 to 65535"),
        ("host:٣", "0 to 65535"),
        ("host:", "0 to 65535"),
        (":5555", "no name"),
        ("", "no name"),
        ("a b:1", "no name"),
        ("-a:1", "no name"),
        ("udp://host:1", "only tcp:// and ipc://"),
        ("ipc://relative", "absolute path"),
        ("%eth0 :1", "no interface"),
    ],
)
def test_wrong_forms_are_refused_with_the_right_one(text: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_endpoint(text, KEY, 1)
    assert KEY in caught.value.message
    assert repr(text) in caught.value.message
    assert remedy in caught.value.message


def test_port_is_asked_for_where_none_is_usual() -> None:
    with pytest.raises(ConfigError, match="needs a port"):
        parse_endpoint("host", KEY)


@pytest.mark.parametrize("text", ["*:5", "%eth0:5", "[::]:5", "0.0.0.0:5", "host:0"])
def test_places_to_listen_are_none_to_connect_to(text: str) -> None:
    with pytest.raises(ConfigError, match="listen on"):
        parse_peer(text, KEY)


@given(st.ip_addresses(v=6).filter(lambda one: not one.is_link_local), st.integers(0, 65_535))
def test_every_ipv6_address_is_read_back_as_it_is_printed(
    address: ipaddress.IPv6Address, port: int
) -> None:
    endpoint = Endpoint(address.compressed, port)
    assert parse_endpoint(str(endpoint), KEY) == endpoint
    assert parse_endpoint(endpoint.zmq, KEY) == endpoint
    # Without brackets a port is never taken for a part of the address, nor the other way.
    try:
        bare = parse_endpoint(f"{address.compressed}:{port}", KEY, 1)
    except ConfigError as error:
        assert f"[{address.compressed}]:{port}" in error.message
    else:
        raise AssertionError(f"{bare} was guessed")


@given(st.text(max_size=60))
def test_any_text_gives_an_endpoint_or_a_typed_error(text: str) -> None:
    try:
        endpoint = parse_endpoint(text, KEY, 1)
    except ConfigError:
        return
    assert parse_endpoint(str(endpoint), KEY) == endpoint


def test_all_interfaces_are_one_dual_stack_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "has_ipv6", lambda: True)
    assert bind_places(Endpoint("*", 5), KEY) == [Endpoint("::", 5)]
    monkeypatch.setattr(addresses, "has_ipv6", lambda: False)
    assert bind_places(Endpoint("*", 5), KEY) == [Endpoint("0.0.0.0", 5)]


def _answers(*found: str) -> Any:
    return lambda *_args, **_named: [
        (socket.AF_INET6 if ":" in one else socket.AF_INET, 1, 6, "", (one, 0)) for one in found
    ]


def test_name_with_both_kinds_is_ipv4_where_ipv6_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", _answers("2001:db8::1", "10.0.0.1"))
    monkeypatch.setattr(addresses, "has_ipv6", lambda: True)
    both = [Endpoint("2001:db8::1", 5), Endpoint("10.0.0.1", 5)]
    assert resolve(Endpoint("p", 5), KEY) == both
    monkeypatch.setattr(addresses, "has_ipv6", lambda: False)
    assert resolve(Endpoint("p", 5), KEY) == both[1:]


def test_name_with_ipv6_alone_says_that_ipv6_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", _answers("2001:db8::1"))
    monkeypatch.setattr(addresses, "has_ipv6", lambda: False)
    with pytest.raises(ConfigError, match=r"2001:db8::1.*IPv6 is off"):
        resolve(Endpoint("p", 5), KEY)
    with pytest.raises(ConfigError, match="IPv6 is off"):
        resolve(Endpoint("2001:db8::1", 5), KEY)


def test_unknown_name_is_named() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.invalid"):
        resolve(Endpoint("nowhere.invalid", 5), KEY)


def test_interfaces_are_known_by_name() -> None:
    assert interface_address("lo", KEY) == "127.0.0.1"
    assert bind_places(Endpoint("%lo", 5), KEY) == [Endpoint("127.0.0.1", 5)]
    with pytest.raises(ConfigError, match=r"no interface 'eth99' here; there are .*lo"):
        interface_address("eth99", KEY)


def test_what_is_announced_can_be_connected_to() -> None:
    assert announced(Endpoint("127.0.0.1", 0), 7, KEY) == "tcp://127.0.0.1:7"
    assert announced(Endpoint("%lo", 0), 7, KEY) == "tcp://127.0.0.1:7"
    assert announced(Endpoint("*", 0), 7, KEY, interface="lo") == "tcp://127.0.0.1:7"
    try:
        outward = outward_address(KEY)
    except ConfigError as error:
        assert "name an interface" in error.message
        return
    told = parse_peer(announced(Endpoint("*", 0), 7, KEY), KEY)
    assert told == Endpoint(outward, 7)
