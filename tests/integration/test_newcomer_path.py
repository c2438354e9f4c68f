"""A newcomer with the README alone: its job, its loop, its commands, from nothing to a stopped job.

The job file, the trainer and all commands are README.md's own.
"""

from __future__ import annotations

import json
import random
import re
import signal
import string
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from tests.support.bad_disk import BadDisk
from tests.support.browser import needs_browser, open_browser
from tests.support.node import wait_until
from tests.support.pages import blocks
from tests.support.screen import on_screen
from tests.support.sources import ROOT

pytestmark = [pytest.mark.processes, pytest.mark.soak]

PRELUDE = """
import os, time, torch

def model(tokens, position_ids, **kwargs):
    return torch.zeros(1, requires_grad=True)

def cross_entropy_sum(logits, labels):
    return logits.sum()

class optimizer:
    # A trainer that needs less than a busy machine can read would never wait for the slow disk.
    step = staticmethod(lambda: time.sleep(0.0 if os.path.exists("hurry") else 0.15))

def save(state):
    pass
"""
SHARDS = 96
"""Small ones: each is at least a read of its own on the slow disk."""
TOLD = (ROOT / "README.md").read_text()


def block_of(language: str, part: str) -> str:
    (found,) = [it.text for it in blocks(language) if it.page == "README.md" and part in it.text]
    return found


class Newcomer:
    """Types commands in a folder of his own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environ = {
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
            "HOME": str(folder),
            "XDG_RUNTIME_DIR": str(folder / "run"),
            "PYTHONPATH": str(ROOT),
        }
        (folder / "run").mkdir(mode=0o700)

    def types(self, *command: str) -> str:
        """Type a command that the README has; return what it printed."""
        self.has_read(command)
        done = subprocess.run(
            command, cwd=self.folder, env=self.environ, capture_output=True, text=True,
            check=False, timeout=100,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def has_read(self, command: Sequence[str]) -> None:
        """Assert that the README has a command and its options."""
        program, *rest = command
        wanted = [re.escape(it) for it in rest if it.startswith("-")]
        wanted.append(rf"\b{program} {rest[0]}\b|`{rest[0]}\b" if rest else program)
        for pattern in wanted:
            assert re.search(pattern, TOLD), f"{command}: {pattern} is nowhere told of"

    def starts(self, log: str, *command: str, **environ: str) -> subprocess.Popen[str]:
        """Start something that stays."""
        if command[0] != "python":
            self.has_read(command)
        with (self.folder / log).open("w") as file:
            return subprocess.Popen(
                command, cwd=self.folder, env=self.environ | environ, stdout=subprocess.PIPE,
                stderr=file, text=True,
            )  # fmt: skip


@pytest.fixture
def newcomer(tmp_path: Path) -> Newcomer:
    """Somebody with texts, and the README's job file."""
    rng = random.Random(3)
    # Hardly compressible, so that a slow disk has much to read, also where little else is quick.
    signs = string.ascii_letters + string.digits + "+/"
    texts = ["".join(rng.choices(signs, k=rng.randint(100, 2400))) for _ in range(3000)]
    for name in ("web", "code"):
        (tmp_path / "data" / name).mkdir(parents=True)
    for part in range(SHARDS):
        lines = "".join(json.dumps({"text": it}) + "\n" for it in texts[part::SHARDS])
        packed = zstandard.ZstdCompressor().compress(lines.encode())
        (tmp_path / f"data/web/{part}.jsonl.zst").write_bytes(packed)
    pq.write_table(pa.table({"content": texts[:1500]}), tmp_path / "data/code/0.parquet")
    job = block_of("yaml", "# job.yaml")
    # The README's own alternative for who has no tokenizer yet.
    job, count = re.subn(
        r"tokenizer: \{file: tokenizer\.json, eos: end\}", "tokenizer: {bytes: true, eos: end}", job
    )
    assert count == 1
    (tmp_path / "job.yaml").write_text(job)
    kept = [
        it for it in block_of("python", "msd_client.connect").splitlines() if "# optional" not in it
    ]
    (tmp_path / "train.py").write_text(PRELUDE + "\n".join(kept))
    return Newcomer(tmp_path)


@pytest.fixture
def processes() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def ended(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.communicate(timeout=40)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


def test_the_readme_leads_from_nothing_to_a_stopped_job(
    newcomer: Newcomer, processes: ExitStack, tmp_path: Path
) -> None:
    disk = BadDisk(tmp_path / "data/web", tmp_path / "orders")
    daemon = newcomer.starts("daemon.log", "msd-daemon", **disk.environ)
    processes.callback(ended, daemon)
    wait_until((tmp_path / "run/msd/msd.sock").exists, "the daemon")
    newcomer.types("msdctl", "check", "job.yaml", "--mesh", "dp=2,tp=2")
    assert newcomer.types("msdctl", "preview", "job.yaml", "--media-dir", "seen")
    ranks = [
        newcomer.starts(
            f"rank{n}.log", "python", "train.py", RANK=str(n), WORLD_SIZE="4", LOCAL_RANK=str(n)
        )
        for n in range(4)
    ]
    for rank in ranks:
        processes.callback(ended, rank)

    def job() -> dict[str, Any]:
        for rank in ranks:
            assert rank.poll() is None, (tmp_path / f"rank{ranks.index(rank)}.log").read_text()
        found = json.loads(newcomer.types("msdctl", "status", "--json"))["jobs"]
        return dict(found[0]) if found else {}

    wait_until(lambda: int(str(job().get("step_released") or 0)) > 2, "steps", 90)
    newcomer.has_read(["msdctl", "top"])
    with on_screen(["msdctl", "top"], tmp_path, newcomer.environ) as screen:
        screen.until("tokens/s")
        screen.until("web")
        screen.types("q")
        assert screen.process.wait(30) == 0
    page = newcomer.starts("page.log", "msdctl", "dashboard", "--json")
    processes.callback(ended, page)
    assert page.stdout is not None
    address = json.loads(page.stdout.readline())["address"]
    if not needs_browser():
        browser = processes.enter_context(open_browser(tmp_path))
        browser.open(address)
        browser.wait("document.querySelectorAll('#places rect.cell').length == 4")
    newcomer.types("msdctl", "mix", "job", "web=5,code=1")

    def shares() -> dict[str, float]:
        return {str(it["name"]): float(it["wanted"]) for it in job()["sources"]}

    wait_until(lambda: abs(shares()["web"] - 5 / 6) < 1e-3, lambda: str(shares()), 60)
    disk.begin("worn_reads")
    (tmp_path / "hurry").touch()

    def verdict() -> str:
        return newcomer.types("msdctl", "why", "job")

    wait_until(
        lambda: "source web: its files come slowly from their disk" in verdict(), verdict, 90
    )
    disk.end("worn_reads")
    newcomer.types("msdctl", "stop", "job")
    for number, rank in enumerate(ranks):
        rank.wait(60)
        assert "SessionClosedError" in (tmp_path / f"rank{number}.log").read_text()
    daemon.send_signal(signal.SIGINT)  # Ctrl-C
    assert daemon.wait(40) == 0
