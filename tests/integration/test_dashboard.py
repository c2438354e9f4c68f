"""The dashboard: who may look, what it answers, and what a browser shows, wide and narrow."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.browser import needs_browser, open_browser
from tests.support.node import Node, run_ranks, text_job, wait_until

pytestmark = pytest.mark.processes

StartNode = Callable[..., Node]


@contextmanager
def dashboard(node: Node, *options: str) -> Iterator[str]:
    """Run msdctl dashboard; give the address that it prints."""
    with subprocess.Popen(
        [sys.executable, "-m", "msd_client.msdctl.main", "dashboard", "--json", "--socket",
         str(node.socket), *options],
        stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["address"]
        finally:
            process.terminate()
            process.wait(20)
        assert process.returncode == 0


def get(address: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    opener = urllib.request.build_opener(NoRedirect())
    try:
        with opener.open(urllib.request.Request(address, headers=headers), timeout=60) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, dict(error.headers), error.read()


class NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


@contextmanager
def running_job(node: Node, folder: Path, mesh: dict[str, int]) -> Iterator[None]:
    """Have ranks read until the block ends."""
    is_over = threading.Event()
    folder.mkdir()
    job = text_job(folder, texts={"sources": 5}, steps=1_000_000)

    class Over(Exception):  # noqa: N818 - no error
        pass

    def read(_data: object, step: Any) -> None:
        for _ in step:
            pass
        if is_over.wait(0.02):
            raise Over

    def ranks() -> None:
        with pytest.raises(Over):
            run_ranks(node, job, mesh, None, read_step=read)

    thread = threading.Thread(target=ranks)
    thread.start()
    try:
        wait_until(lambda: any(j["state"] == "running" for j in node.request("jobs")["jobs"]), "it")
        yield
    finally:
        is_over.set()
        thread.join(60)


def test_a_token_is_needed_and_leaves_the_address(start_node: StartNode) -> None:
    with dashboard(start_node()) as address:
        bare, _, token = address.partition("?token=")
        assert len(token) >= 32
        status, headers, body = get(bare)
        assert (status, headers["www-authenticate"]) == (401, "Bearer")
        assert b"token" in body
        assert get(bare + "api/snapshot", authorization="Bearer wrong")[0] == 401
        assert get(bare + "?token=wrong")[0] == 401
        status, headers, _ = get(address)
        assert (status, headers["location"]) == (303, "/")
        cookie = headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "samesite=strict" in cookie.lower()
        status, headers, _ = get(bare, cookie=cookie.partition(";")[0])
        assert status == 200
        assert "default-src 'none'" in headers["content-security-policy"]
        found = json.loads(get(bare + "api/snapshot", authorization=f"Bearer {token}")[2])
        assert (found["schema"], found["jobs"]) == (1, [])
        assert get(bare + "healthz")[0] == 200
        assert get(bare + "metrics")[0] == 401
        status, headers, body = get(bare + "metrics", authorization=f"Bearer {token}")
        assert headers["content-type"].startswith("text/plain; version=0.0.4")
        assert b"msd_daemon_uptime_seconds" in body


def test_other_names_of_hosts_and_other_addresses_are_refused(start_node: StartNode) -> None:
    node = start_node()
    with dashboard(node, "--no-token") as address:
        assert get(address)[0] == 200
        assert get(address, host="evil.test")[0] == 421
        assert get(address + "api/lineage?job=x&step=-1")[0] == 400
        assert get(address + "api/lineage")[0] == 400
        status, _, body = get(address + "api/bad?job=none")
        assert status == 404
        assert "none" in json.loads(body)["error"]
    refused = subprocess.run(
        [sys.executable, "-m", "msd_client.msdctl.main", "dashboard", "--no-token", "--listen",
         "0.0.0.0:0", "--socket", str(node.socket)],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert refused.returncode == 78
    assert "without a token" in refused.stderr


def test_the_daemon_keeps_one_running_and_it_ends_with_the_daemon(
    start_node: StartNode, tmp_path: Path
) -> None:
    config = tmp_path / "daemon.toml"
    config.write_text('[dashboard]\nlisten = "127.0.0.1:0"\n')
    node = start_node("--config", str(config))

    def pid() -> int | None:
        rows = node.request("status")["daemon"]["processes"]
        return next((row["pid"] for row in rows if row["role"] == "dashboard"), None)

    wait_until(lambda: "serving http://127.0.0.1:" in node.log, lambda: node.log)
    first = pid()
    assert first is not None
    address = node.log.split("serving http://")[1].split()[0]
    found = json.loads(get(f"http://{address}api/snapshot")[2])
    assert found["daemon"]["pid"] == node.process.pid
    config.write_text("")
    assert node.request("reload")["changed"]["now"] == ["dashboard"]
    wait_until(lambda: not psutil.pid_exists(first), "the page to end")
    config.write_text('[dashboard]\nlisten = "127.0.0.1:0"\n')
    node.request("reload")
    wait_until(lambda: node.log.count("serving http://") == 2, lambda: node.log)
    second = pid()
    assert second is not None
    node.process.kill()
    node.process.wait(10)
    wait_until(lambda: not psutil.pid_exists(second), "the page to end with its daemon")


@pytest.mark.skipif(bool(needs_browser()), reason=needs_browser() or "there is one")
def test_a_browser_shows_a_running_job(start_node: StartNode, tmp_path: Path) -> None:
    node = start_node()
    with dashboard(node, "--no-token") as address, open_browser(tmp_path) as page:
        page.size(1200, 900)
        page.open(address)
        page.wait("!document.getElementById('idle').hidden")
        with running_job(node, tmp_path / "job", {"dp": 2, "tp": 2}):
            page.wait("document.querySelectorAll('#places rect.cell').length == 4")
            page.wait("document.querySelectorAll('#graph path.ribbon').length > 0")
            page.wait("document.querySelectorAll('#charts path.curve').length >= 6")
            page.wait("document.querySelector('#verdict').innerText.length > 10")
            page.wait("document.querySelectorAll('#sources tbody tr').length == 5")
            # The journal has the first steps by now: a step is shown.
            page.value("document.querySelector('#bystep [name=step]').value = '0'")
            page.value("document.querySelector('#bystep').requestSubmit()")
            page.wait("document.querySelectorAll('#lineage tbody tr').length > 3", 90)
            for width in (1200, 360):
                page.size(width, 800, dark=width == 360)
                page.wait("document.documentElement.scrollWidth <= innerWidth")
            page.picture(tmp_path / "page.png")
        page.wait("!document.getElementById('idle').hidden")
        assert page.complaints == []
