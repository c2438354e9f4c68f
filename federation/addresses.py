"""Endpoints as people write them: parsed, resolved, printed; where to bind and what to announce.

| written | means |
|---|---|
| `10.0.0.7:5555`, `10.0.0.7` | IPv4, with or without the port |
| `[2001:db8::7]:5555`, `[2001:db8::7]`, `2001:db8::7` | IPv6; with a port it needs brackets |
| `[fe80::7%eth0]:5555` | link-local, with the interface that leads there |
| `planner.example:5555` | a name with A or AAAA records, asked for at each connection |
| `%eth0:5555`, `%eth0` | listening: this interface's first address, IPv4 before IPv6 |
| `*:5555` | listening: all interfaces |
| `ipc:///run/msd/p` | this machine only |

`tcp://` before any of these is allowed. `2001:db8::1:5555` is refused: it may be an address, or one
with a port. Names are looked up by whoever connects, so a planner that moves is found again.
"""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
from dataclasses import dataclass

from msd_client.contract.errors import AddressMissingError, ConfigError

PORT_MAX = 65_535
PLANNER_PORT = 7533
"""Of a planner, where none is written."""
ANY = "*"
_LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)")
_INTERFACE = re.compile(r"[A-Za-z0-9_.@-]{1,15}")
NAME_LENGTH_MAX = 253


@dataclass(frozen=True)
class Endpoint:
    """Where something listens."""

    host: str
    """A name, an address without brackets (with `%scope`), `*`, `%INTERFACE`, or an `ipc` path."""
    port: int = 0
    """0: any free one, when listening."""
    is_ipc: bool = False

    def __str__(self) -> str:
        if self.is_ipc:
            return f"ipc://{self.host}"
        return f"[{self.host}]:{self.port}" if self.is_ipv6 else f"{self.host}:{self.port}"

    @property
    def is_ipv6(self) -> bool:
        """True for an IPv6 address; names may be either."""
        return not self.is_ipc and ":" in self.host

    @property
    def is_address(self) -> bool:
        """True where nothing has to be looked up."""
        return self._address is not None

    @property
    def is_unspecified(self) -> bool:
        """True for `0.0.0.0` and `::`: all interfaces."""
        return self._address is not None and self._address.is_unspecified

    @property
    def _address(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
        try:
            return None if self.is_ipc else ipaddress.ip_address(self.host.partition("%")[0])
        except ValueError:
            return None

    @property
    def is_loopback(self) -> bool:
        """True where only this machine reaches it."""
        return self.is_ipc or (self._address is not None and self._address.is_loopback)

    @property
    def zmq(self) -> str:
        """Return the form that ZeroMQ connects to."""
        return str(self) if self.is_ipc else f"tcp://{self}"


def parse_endpoint(text: str, key: str, port_default: int | None = None) -> Endpoint:
    """Return the endpoint that somebody wrote.

    Args:
        text: As in the module's table.
        key: Of the configuration, for messages.
        port_default: Where none is written; None: one has to be.

    Raises:
        ConfigError: It is none, or ambiguous; says how to write it.
    """
    if text.startswith("ipc://"):
        path = text.removeprefix("ipc://")
        if not path.startswith(("/", "@")) or "\0" in path:
            raise _wrong(key, text, "an ipc endpoint is an absolute path: ipc:///run/msd/planner")
        return Endpoint(path, is_ipc=True)
    rest = text.removeprefix("tcp://")
    if "://" in rest:
        raise _wrong(key, text, "only tcp:// and ipc:// are spoken here")
    if rest.startswith("["):
        host, closing, behind = rest[1:].partition("]")
        if not closing or (behind and not behind.startswith(":")):
            raise _wrong(key, text, "write [ADDRESS]:PORT")
        port = behind[1:] if behind else None
        return Endpoint(_ipv6(key, text, host), _port(key, text, port, port_default))
    if rest.count(":") > 1:
        return Endpoint(_bare_ipv6(key, text, rest), _port(key, text, None, port_default))
    host, colon, behind = rest.partition(":")
    return Endpoint(
        _host(key, text, host), _port(key, text, behind if colon else None, port_default)
    )


def parse_peer(text: str, key: str, port_default: int | None = None) -> Endpoint:
    """Return an endpoint to connect to.

    Raises:
        ConfigError: It is none, or one to listen on only.
    """
    endpoint = parse_endpoint(text, key, port_default)
    if endpoint.host == ANY or endpoint.host.startswith("%") or endpoint.is_unspecified:
        raise _wrong(key, text, "that is a place to listen on: write the peer's address or name")
    if not endpoint.is_ipc and endpoint.port == 0:
        raise _wrong(key, text, "port 0 is one to listen on: write the peer's port")
    return endpoint


def bind_places(endpoint: Endpoint, key: str) -> list[Endpoint]:
    """Return what has to be bound for an endpoint, with names and interfaces resolved.

    All interfaces are one dual-stack socket where this machine has IPv6, else IPv4's. A name binds
    every address that it has here.

    Raises:
        ConfigError: A name or interface has no address here.
    """
    if endpoint.is_ipc:
        return [endpoint]
    if endpoint.host == ANY:
        return [Endpoint("::" if has_ipv6() else "0.0.0.0", endpoint.port)]  # noqa: S104
    if endpoint.host.startswith("%"):
        return [Endpoint(interface_address(endpoint.host[1:], key), endpoint.port)]
    return resolve(endpoint, key)


def announced(endpoint: Endpoint, bound_port: int, key: str, interface: str | None = None) -> str:
    """Return the endpoint that peers shall be told for one that listens.

    Args:
        endpoint: As configured.
        bound_port: The port that was given.
        key: Of the configuration, for messages.
        interface: Whose address stands for `*`; None: the one that leads out of this machine.

    Raises:
        ConfigError: No address of this machine is known that others could reach.
    """
    if endpoint.is_ipc:
        return endpoint.zmq
    host = endpoint.host
    if interface is not None:
        host = interface_address(interface, key)
    elif host.startswith("%"):
        host = interface_address(host[1:], key)
    elif host in (ANY, "0.0.0.0", "::"):  # noqa: S104
        host = outward_address(key)
    return Endpoint(host, bound_port).zmq


def has_ipv6() -> bool:
    """Tell whether this machine can listen on IPv6 at all; many have it switched off."""
    if not socket.has_ipv6:
        return False
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def interface_address(interface: str, key: str) -> str:
    """Return an interface's first address: IPv4 before IPv6, link-local ones last, with scope.

    Raises:
        AddressMissingError: There is no such interface, or it has no address.
    """
    import psutil

    known = psutil.net_if_addrs()
    if interface not in known:
        raise AddressMissingError(
            f"{key}: no interface {interface!r} here; there are {', '.join(sorted(known))}"
        )
    found = []
    for entry in known[interface]:
        if entry.family not in (socket.AF_INET, socket.AF_INET6):
            continue
        bare = entry.address.partition("%")[0]
        address = ipaddress.ip_address(bare)
        is_local = address.is_link_local
        text = f"{bare}%{interface}" if is_local and address.version == 6 else bare
        found.append((is_local, address.version, text))
    if not found:
        raise AddressMissingError(f"{key}: interface {interface!r} has no address")
    # As the system lists them, but by kind: the first of a kind wins.
    return min(found, key=lambda one: one[:2])[2]


def outward_address(key: str) -> str:
    """Return the address that this machine uses towards others: of the default route.

    Raises:
        AddressMissingError: There is no route; the configuration has to name an interface.
    """
    # Connecting a datagram socket sends nothing; documentation addresses, RFC 5737 and 3849.
    for family, target in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((target, 9))
                return str(probe.getsockname()[0])
        except OSError:
            continue
    raise AddressMissingError(
        f"{key}: this machine has no default route, so no address to announce: name an interface "
        "(%eth0:5555) or an address"
    )


def resolve(endpoint: Endpoint, key: str) -> list[Endpoint]:
    """Return the addresses of an endpoint that this machine can speak with, in the system's order.

    May ask DNS, so it may take seconds.

    Raises:
        ConfigError: The name has none, or IPv6 ones only where IPv6 is off.
    """
    if endpoint.is_ipv6:
        _check_ipv6(endpoint, key)
    if endpoint.is_ipc or endpoint.is_address:
        return [endpoint]
    try:
        found = socket.getaddrinfo(endpoint.host, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise AddressMissingError(
            f"{key}: {endpoint.host}: {error.strerror}: the name has no address here; write one, or "
            "mend DNS or /etc/hosts"
        ) from error
    addresses = dict.fromkeys(str(entry[4][0]) for entry in found)
    kept = [one for one in addresses if ":" not in one or has_ipv6()]
    if not kept:
        raise ConfigError(
            f"{key}: {endpoint.host} has IPv6 addresses only ({', '.join(addresses)}) and IPv6 is off "
            "on this machine: give it an IPv4 address, or switch IPv6 on"
        )
    return [Endpoint(address, endpoint.port) for address in kept]


def _check_ipv6(endpoint: Endpoint, key: str) -> None:
    if not has_ipv6():
        raise ConfigError(
            f"{key}: {endpoint}: IPv6 is off on this machine: write an IPv4 address, or switch it on"
        )


def _ipv6(key: str, text: str, host: str) -> str:
    bare, percent, scope = host.partition("%")
    try:
        address = ipaddress.IPv6Address(bare)
    except ValueError as error:
        raise _wrong(key, text, f"{bare!r} is no IPv6 address; only those stand in []") from error
    if percent and not _INTERFACE.fullmatch(scope):
        raise _wrong(key, text, f"{scope!r} names no interface")
    if address.is_link_local and not percent:
        raise _wrong(
            key, text, f"a link-local address needs its interface: [{address.compressed}%eth0]:PORT"
        )
    if percent and not address.is_link_local:
        raise _wrong(key, text, "only link-local addresses have an interface")
    return f"{address.compressed}{percent}{scope}"


def _bare_ipv6(key: str, text: str, host: str) -> str:
    """An IPv6 address without brackets and, as that would be ambiguous, without a port."""
    left, _, last = host.rpartition(":")
    is_port = last.isdigit() and int(last) <= PORT_MAX
    is_split = False
    if is_port:
        try:
            ipaddress.IPv6Address(left.partition("%")[0])
            is_split = True
        except ValueError:
            pass
    try:
        found = _ipv6(key, text, host)
    except ConfigError:
        if is_split:
            raise _wrong(key, text, f"write [{left}]:{last}") from None
        raise
    if is_split:
        raise _wrong(
            key,
            text,
            f"it may be an address, or one with port {last}: write [{left}]:{last} for the port, or "
            f"[{found}] for the address",
        )
    return found


def _host(key: str, text: str, host: str) -> str:
    if host == ANY:
        return host
    if host.startswith("%"):
        if not _INTERFACE.fullmatch(host[1:]):
            raise _wrong(key, text, f"{host[1:]!r} names no interface")
        return host
    if re.fullmatch(r"[0-9.]+", host):
        try:
            return str(ipaddress.IPv4Address(host))
        except ValueError as error:
            raise _wrong(key, text, f"{host!r} is no IPv4 address") from error
    labels = host.rstrip(".").split(".")
    if len(host) > NAME_LENGTH_MAX or not all(_LABEL.fullmatch(label) for label in labels):
        raise _wrong(key, text, f"{host!r} is no name of a machine")
    return host


def _port(key: str, text: str, port: str | None, default: int | None) -> int:
    if port is None:
        if default is None:
            raise _wrong(key, text, "it needs a port: HOST:PORT, or [ADDRESS]:PORT for IPv6")
        return default
    if port == ANY:
        return 0
    if not (port.isascii() and port.isdigit()) or int(port) > PORT_MAX:
        raise _wrong(key, text, f"port {port!r} is none of 0 to {PORT_MAX}")
    return int(port)


def _wrong(key: str, text: str, what: str) -> ConfigError:
    return ConfigError(f"{key}: {text!r}: {what}", key=key, value=text)


def bind_error(endpoint: Endpoint, code: int | None, text: str, key: str) -> ConfigError:
    """Return what to tell of an endpoint that can't be bound, from the system's code and text."""
    causes = {
        errno.EADDRINUSE: "another process listens there: stop it, or take another port",
        errno.EADDRNOTAVAIL: "no interface of this machine has that address",
        errno.ENODEV: "no interface of this machine has that address; IPv6 may be off here",
        errno.EACCES: "this user may not listen there: ports below 1024 are root's",
    }
    cause = causes.get(code or 0, text)
    return ConfigError(f"{key}: {endpoint} can't be bound: {cause}", endpoint=str(endpoint))
