"""A real S3 server (moto) in a process of its own, on loopback, and what fills its buckets."""

from __future__ import annotations

import http.client
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from urllib.parse import quote

import pytest

_MAIN = """
import sys, logging
from moto.server import ThreadedMotoServer
logging.getLogger("werkzeug").disabled = True
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


class S3Server:
    """Puts objects; moto does not check signatures, so plain PUTs do."""

    def __init__(self, port: int) -> None:
        self.port = port

    def make_bucket(self, bucket: str) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        self._put(f"/{bucket}", b"", connection)
        connection.close()

    def put(self, bucket: str, objects: Mapping[str, bytes]) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        for key, content in objects.items():
            self._put(f"/{bucket}/{quote(key)}", content, connection)
        connection.close()

    def _put(self, path: str, content: bytes, connection: http.client.HTTPConnection) -> None:
        headers = {"Authorization": "AWS4-HMAC-SHA256 Credential=x/20260101/us-east-1/s3/aws4"}
        connection.request("PUT", path, content, headers)
        response = connection.getresponse()
        response.read()
        assert response.status == 200, (path, response.status)


@contextmanager
def running_s3() -> Iterator[S3Server]:
    pytest.importorskip("moto.server", reason="moto is not installed (pip install moto[server])")
    process = subprocess.Popen(
        [sys.executable, "-c", _MAIN],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stdin is not None
        port = process.stdout.readline()  # comes once the server listens
        assert port.strip(), "moto ended before it listened"
        yield S3Server(int(port))
    finally:
        process.stdin.close()
        process.wait(timeout=30)
        process.stdout.close()
