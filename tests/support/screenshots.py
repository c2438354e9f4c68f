"""Pictures of dashboard and top for the documentation: an idle, a healthy, a stalled, a failing job.

`python -m tests.support.screenshots docs/pictures [STATE ...]` makes them, with a daemon and ranks of its own
and a headless Chromium. Nothing in them is drawn: each is a real job in that state.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image

from tests.support.browser import Page, open_browser
from tests.support.node import Node, running_node, text_job, wait_until

STATES = ("idle", "healthy", "stalled", "failing")
LIVE_S = 24
"""So long a job is watched before its picture, so that charts have something to show."""

_RANK = """
import sys, time, json, msd_client
job, rank, socket, pause = json.load(open(sys.argv[1])), int(sys.argv[2]), sys.argv[3], float(sys.argv[4])
with msd_client.connect(job, mesh={"dp": 4, "tp": 2}, rank=rank, daemon=socket, as_="numpy") as data:
    for step in data.train:
        for batch in step:
            time.sleep(pause)
"""
_SLOW = """
import time

def clean(sample, rng):
    time.sleep(0.1)
    return sample
"""


@contextlib.contextmanager
def ranks(
    node: Node, job: dict[str, Any], folder: Path, pause_s: float
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run eight ranks as processes."""
    file = folder / "job.json"
    file.write_text(json.dumps(job))
    log = (folder / "ranks.log").open("wb")
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK, str(file), str(rank), str(node.socket), str(pause_s)],
            cwd=folder, stdout=log, stderr=log,
        )
        for rank in range(8)
    ]  # fmt: skip
    try:
        yield processes
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
            process.kill()
        for process in processes:
            process.wait(20)
        log.close()


def job_of(folder: Path, state: str) -> dict[str, Any]:
    """Return the job that comes into a state."""
    folder.mkdir()
    names = ("web", "code", "books", "math", "wiki", "forum")
    job = text_job(folder, texts={"sources": 6, "documents": 3000}, name=f"gpt-{state}",
                   batch={"rows": 32, "row_tokens": 1024, "microbatch_rows": 2})  # fmt: skip
    job["sources"] = dict(zip(names, job["sources"].values(), strict=True))
    job["mixture"] = {
        "unit": "tokens",
        0: {"web": 8, "code": 4, "books": 3, "math": 2, "wiki": 2, "forum": 1},
    }
    if state == "stalled":
        (folder / "heavy.py").write_text(_SLOW)
        job["sources"]["math"] = {
            "paths": job["sources"]["math"],
            "transform": {"call": "heavy:clean", "python": sys.executable},
        }
    if state == "failing":
        path = Path(job["sources"]["web"])
        lines = path.read_text().splitlines()
        path.write_text(
            "\n".join(it[:20] if n % 5 == 0 else it for n, it in enumerate(lines)) + "\n"
        )
        job["sources"]["web"] = {
            "paths": str(path), "on_error": {"policy": "skip", "budget_ratio": 1.0}
        }  # fmt: skip
    return job


def take(page: Page, node: Node, out: Path, state: str) -> None:
    """Save the pictures of one state."""
    for name, width, dark in (("", 1240, False), ("-dark", 1240, True), ("-narrow", 380, False)):
        page.size(width, 900, dark=dark)
        page.wait("document.querySelector('#link .good')")
        if state == "failing":
            page.value("document.getElementById('loadbad').click()")
        page.value("new Promise(done => setTimeout(done, 1500))")
        path = out / f"dashboard-{state}{name}.png"
        page.picture(path)
        # A few colours suffice, at a fifth of the bytes.
        Image.open(path).convert("RGB").quantize(96).save(path, optimize=True)
    subprocess.run(
        [sys.executable, "-m", "msd_client.msdctl.main", "top", "--svg", str(out / f"top-{state}.svg"),
         "--count", "3", "--socket", str(node.socket)],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip


def make(out: Path, states: tuple[str, ...] = STATES) -> None:
    """Make the pictures of some states in a folder."""
    out.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="msd-pictures-")))
        node = stack.enter_context(running_node(folder / "n"))
        served = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-m", "msd_client.msdctl.main", "dashboard", "--no-token", "--json",
                 "--socket", str(node.socket)],
                stdout=subprocess.PIPE, text=True,
            )
        )  # fmt: skip
        stack.callback(served.terminate)
        assert served.stdout is not None
        address = json.loads(served.stdout.readline())["address"]
        page = stack.enter_context(open_browser(folder))
        page.open(address)
        page.wait("!document.getElementById('idle').hidden")
        if "idle" in states:
            take(page, node, out, "idle")
        for state in (it for it in states if it != "idle"):
            job = job_of(folder / state, state)
            with ranks(node, job, folder / state, 0.03) as processes:
                page.wait("!document.getElementById('jobview').hidden", 90)
                threading.Event().wait(LIVE_S)
                if state == "failing":
                    processes[5].send_signal(signal.SIGSTOP)
                    threading.Event().wait(LIVE_S)
                take(page, node, out, state)
            wait_until(lambda: not node.request("jobs")["jobs"], "the job to end", 60)


if __name__ == "__main__":
    make(Path(sys.argv[1]), tuple(sys.argv[2:]) or STATES)
