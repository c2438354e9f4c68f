"""Real etcd members on free ports of loopback, with their data in a folder."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from federation.store.etcd_client import EtcdClient, EtcdError, EtcdTls

START_S = 60.0


def etcd_program() -> str:
    """Return etcd's path; skip the test where there is none."""
    found = shutil.which("etcd")
    if found is None:
        pytest.skip("etcd is not installed (apt-get install etcd-server)")
    return found


class EtcdCluster:
    """Members that can be killed, stopped and started again."""

    def __init__(
        self,
        folder: Path,
        members: int = 1,
        options: tuple[str, ...] = (),
        *,
        host: str = "127.0.0.1",
        is_tls: bool = False,
        prefix: tuple[str, ...] = (),
    ) -> None:
        self._program = etcd_program()
        self._folder = folder
        self._options = (*options, "--auto-tls") if is_tls else options
        self._host = host
        self._prefix = prefix
        """A command that executes etcd's in its own place: on another host, where nobody waits."""
        self._is_tls = is_tls
        ports = _free_ports(2 * members)
        self._clients, self._peers = ports[:members], ports[members:]
        self._processes: list[subprocess.Popen[bytes] | None] = [None] * members

    @property
    def endpoints(self) -> list[str]:
        return [f"{self._host}:{port}" for port in self._clients]

    @property
    def tls(self) -> EtcdTls | None:
        """Trust in the certificate that the first member made for itself."""
        if not self._is_tls:
            return None
        return EtcdTls(str(self._folder / "m0" / "fixtures" / "client" / "cert.pem"))

    def url(self, prefix: str = "msd") -> str:
        return f"{'etcds' if self._is_tls else 'etcd'}://{','.join(self.endpoints)}/{prefix}"

    def start(self, *members: int) -> None:
        """Start members, all where none is named, and wait until the cluster answers."""
        for member in members or range(len(self._clients)):
            self._start(member)
        if not self._prefix:
            self.wait()

    def _start(self, member: int) -> None:
        assert self._processes[member] is None
        peer = f"http://127.0.0.1:{self._peers[member]}"
        own = f"{'https' if self._is_tls else 'http'}://{self.endpoints[member]}"
        everyone = ",".join(f"m{i}=http://127.0.0.1:{port}" for i, port in enumerate(self._peers))
        log = (self._folder / f"etcd-{member}.log").open("ab")
        self._processes[member] = subprocess.Popen(
            [
                *self._prefix, self._program, "--name", f"m{member}", "--data-dir", self._folder / f"m{member}",
                "--listen-client-urls", own, "--advertise-client-urls", own,
                "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
                "--initial-cluster", everyone, "--log-outputs", "stderr",
                *self._options,
            ],
            stdout=log,
            stderr=log,
        )  # fmt: skip
        log.close()

    def wait(self) -> None:
        """Wait until a quorum answers."""
        deadline = time.monotonic() + START_S
        while True:
            client = EtcdClient(self.endpoints, tls=self.tls)
            try:
                client.grant(60)
                break
            except EtcdError:
                assert time.monotonic() < deadline, self.log()
                time.sleep(0.05)
            finally:
                client.close()

    def leader(self) -> int:
        """Return the member that leads."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            for member, endpoint in enumerate(self.endpoints):
                client = EtcdClient([endpoint], request_s=10.0)
                with suppress(EtcdError):
                    status = client.call("/v3/maintenance/status", {})
                    if status.get("leader") == status["header"]["member_id"]:
                        return member
                client.close()
        raise AssertionError("nobody leads")

    @property
    def is_running(self) -> bool:
        """True where no member was killed."""
        return all(process is not None for process in self._processes)

    def kill(self, *members: int) -> None:
        for member in members or range(len(self._clients)):
            process = self._processes[member]
            if process is not None:
                process.kill()
                process.wait()
                self._processes[member] = None

    def pause(self, member: int) -> None:
        self._signal(member, signal.SIGSTOP)

    def go_on(self, member: int) -> None:
        self._signal(member, signal.SIGCONT)

    def _signal(self, member: int, number: int) -> None:
        process = self._processes[member]
        assert process is not None
        process.send_signal(number)

    def log(self) -> str:
        return "\n".join(path.read_text()[-2000:] for path in self._folder.glob("etcd-*.log"))

    def close(self) -> None:
        self.kill()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports
