"""`msdctl demo`: msd at work on this machine's own text, from disk to four training ranks.

Starts a daemon of its own in a temporary folder, trains a small GPT on four ranks (dp 2 x tp 2),
changes the mixture on the way, reports, and looks whether anything stayed behind.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import click

from msd_client.contract.errors import MsdError, ResourceError, UsageError
from msd_client.contract.paths import SOCKET_PATH_BYTES_MAX
from msd_client.control import request
from msd_client.msdctl.demo_images import PICTURES_NAME, job_keys, picture_source
from msd_client.msdctl.demo_processes import (
    DaemonProcess,
    RankProcesses,
    leftovers,
    marked_environ,
    shared_names,
    tail,
)
from msd_client.msdctl.demo_progress import Progress
from msd_client.msdctl.demo_report import INTERRUPTED, report_text, sources_text
from msd_client.msdctl.demo_sources import DemoSource, folder_sources, system_sources
from msd_client.msdctl.demo_view import View, open_view
from msd_client.msdctl.output import json_option, print_json, say

DP, TP = 2, 2
STEPS, MULTIMODAL_STEPS = 240, 180
ROWS, ROW_TOKENS, MICROBATCH_ROWS = 8, 512, 2
STATUS_EVERY_S = 1.0
LOOK_S = 0.25
RANKS_END_S = 30.0
SOCKET_NAME_BYTES = 40
"""Longest name of a socket in the demo's folder, the planner's own included."""
CHANGE_LEAD_STEPS = 6
"""Steps that are planned ahead: the change is asked for so long before the middle."""
_DAEMON_LIBRARIES = ("msd_daemon", "uvloop", "zmq", "pydantic", "yaml")


@click.command(name="demo", short_help="See msd at work: four ranks train on this machine's text.")
@click.option(
    "--steps",
    type=click.IntRange(8, 100_000),
    help=f"Default: {STEPS}, {MULTIMODAL_STEPS} with --multimodal.",
)
@click.option(
    "--data", type=click.Path(path_type=Path), help="Folder with text; default: this machine's own."
)
@click.option(
    "--multimodal", is_flag=True, help="Train a vision-language model, on drawn pictures too."
)
@click.option("--keep-log", is_flag=True, help="Keep the logs of the daemon and the ranks.")
@json_option
def command(
    steps: int | None, data: Path | None, multimodal: bool, keep_log: bool, as_json: bool
) -> int:
    """Train a small GPT on four ranks (dp 2 x tp 2) with text of this machine.

    With --multimodal it has a vision encoder before it, and learns captions of pictures as well.

    Ends by itself after one or two minutes, with a report. Exit code 0 where the loss fell, all
    ranks ended cleanly and nothing was left behind.
    """
    check_libraries()
    began = time.monotonic()
    steps = steps or (MULTIMODAL_STEPS if multimodal else STEPS)
    demo = Demo(steps, open_view(is_json=as_json), is_multimodal=multimodal)
    try:
        with _interruptible():
            demo.run(data)
    except KeyboardInterrupt:
        demo.faults.append(INTERRUPTED)
    except MsdError as error:
        if not demo.is_started:
            raise  # no text: nothing to report on
        demo.faults.append(error.message)
        demo.add_logs()
    finally:
        demo.close(keep_log=keep_log)
    report = demo.report(time.monotonic() - began)
    if as_json:
        print_json("demo", report)
    else:
        click.echo(report_text(report))
    if INTERRUPTED in demo.faults:
        raise click.Abort
    return 1 if report["faults"] else 0


def check_libraries() -> None:
    """Check that the ranks' torch and the daemon's libraries can be found, without importing them.

    Raises:
        ResourceError: Says what to install.
    """
    if importlib.util.find_spec("torch") is None:
        raise ResourceError(
            "the demo trains with torch, which is not installed here: run `make demo`, which "
            "installs it into .venv, or pip install torch (about 200 MB for CPUs alone: pip install "
            "torch --index-url https://download.pytorch.org/whl/cpu)"
        )
    missing = [name for name in _DAEMON_LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        raise ResourceError(
            f"the demo starts a daemon, which needs {', '.join(missing)}: pip install 'msd[daemon]'"
        )


class Demo:
    """One run: `run`, then `close` whatever happened, then `report`."""

    def __init__(self, steps: int, view: View, *, is_multimodal: bool = False) -> None:
        self.faults: list[str] = []
        self._is_multimodal = is_multimodal
        self._steps = steps
        self._view = view
        self._names_before = shared_names()
        self._folder = _make_folder()
        self._mark = self._folder.name
        self._daemon: DaemonProcess | None = None
        self._ranks: RankProcesses | None = None
        self._progress = Progress((), steps, DP * TP)
        self._left: list[str] = []
        self._is_change_asked = False
        self._status_at = 0.0

    @property
    def is_started(self) -> bool:
        """True once a process of the demo was started."""
        return self._daemon is not None

    def run(self, data: Path | None) -> None:
        """Prepare, start, watch to the end.

        Raises:
            MsdError: No text, no daemon, or the daemon's word.
        """
        say_ = self._view.say
        say_("looking for text ...")
        found = system_sources(self._folder) if data is None else folder_sources(data)
        texts, pictures = found.sources, self._pictures(found.sources)
        sources = [*pictures, *texts]
        say_(sources_text(sources, found.notes))
        names = sorted(source.name for source in sources)
        self._progress = Progress(names, self._steps, DP * TP)
        job = self._write_job(sources, _weights(texts, pictures))
        environ = marked_environ(self._mark)
        self._daemon = DaemonProcess(self._folder, environ)
        self._daemon.wait_ready()
        say_(
            f"daemon pid {self._daemon.process.pid}; starting {DP * TP} ranks (dp {DP} x tp {TP}) ..."
        )
        arguments = [
            "--job", str(job), "--socket", str(self._daemon.socket),
            "--rendezvous", str(self._folder / "rendezvous"), "--steps", str(self._steps),
            "--row-tokens", str(ROW_TOKENS), "--dp", str(DP), "--tp", str(TP),
            *(["--multimodal"] if self._is_multimodal else []),
        ]  # fmt: skip
        # Gloo takes the interface of the host's name otherwise, which a bare container lacks.
        self._ranks = RankProcesses(
            self._folder, arguments, DP * TP, {**environ, "GLOO_SOCKET_IFNAME": "lo"}
        )
        self._watch(self._ranks, _weights(texts[::-1], pictures))
        if not self._ranks.wait(RANKS_END_S):
            self.faults.append(f"ranks did not end within {RANKS_END_S:g} s")
        self._check_ranks(self._ranks)

    def _pictures(self, texts: list[DemoSource]) -> list[DemoSource]:
        if not self._is_multimodal:
            return []
        if any(source.name == PICTURES_NAME for source in texts):
            raise UsageError(
                f"the text of --data has a source named {PICTURES_NAME!r}, as the drawn pictures: "
                "rename that file or folder"
            )
        self._view.say("drawing pictures ...")
        return [picture_source(self._folder)]

    def _write_job(self, sources: list[DemoSource], weights: dict[str, float]) -> Path:
        batch = {"rows": ROWS, "row_tokens": ROW_TOKENS, "microbatch_rows": MICROBATCH_ROWS}
        job: dict[str, Any] = {
            "schema": 1,
            "stream": 1,
            "name": "demo",
            "seed": 17,
            "tokenizer": {"bytes": True, "eos": "end"},
            "batch": batch,
            "defaults": {"on_error": "skip"},
            "sources": {source.name: source.section for source in sources},
            "mixture": {"unit": "tokens", "0": weights},
            "steps": self._steps,
        }
        if self._is_multimodal:
            batch["microbatch_patches"] = MICROBATCH_ROWS * ROW_TOKENS  # one patch, one token
            job |= job_keys()
        path = self._folder / "job.yaml"
        path.write_text(json.dumps(job, indent=1), encoding="utf-8")  # JSON is YAML
        return path

    def _watch(self, ranks: RankProcesses, new_weights: dict[str, float]) -> None:
        while ranks.is_talking:
            for message in ranks.messages(LOOK_S):
                if self._progress.take(message):
                    self._look_at_daemon(is_due=len(self._progress.views) == 1)
                    self._view.stepped(self._progress)
                    self._change_mixture(new_weights)
            if ranks.failed():
                return
            if self._progress.joined:
                self._look_at_daemon()

    def _look_at_daemon(self, *, is_due: bool = False) -> None:
        """Ask for the status now and then; the last answer before the ranks leave is the report's."""
        is_over = len(self._progress.views) > self._steps - 3
        if not is_due and (is_over or time.monotonic() - self._status_at < STATUS_EVERY_S):
            return
        assert self._daemon is not None
        self._status_at = time.monotonic()
        self._progress.take_status(request(self._daemon.socket, {"verb": "status"}))

    def _change_mixture(self, weights: dict[str, float]) -> None:
        last = self._progress.last
        if self._is_change_asked or last is None:
            return
        if last.number < max(0, self._steps // 2 - CHANGE_LEAD_STEPS):
            return
        assert self._daemon is not None
        self._is_change_asked = True
        answer = request(
            self._daemon.socket, {"verb": "mixture", "job": "demo", "weights": weights}
        )
        self._progress.change_step = int(answer["step"])
        shown = ", ".join(f"{name} {weight:g}" for name, weight in weights.items())
        self._view.say(
            f"after step {last.number}: new weights ({shown}) hold from step {answer['step']} on"
        )

    def _check_ranks(self, ranks: RankProcesses) -> None:
        for rank, status in ranks.failed():
            self.faults.append(f"rank {rank} ended with status {status}")
        silent = sorted(set(range(DP * TP)) - self._progress.ended)
        if silent and not self.faults:
            self.faults.append(f"ranks {silent} did not come to the end of the stream")
        if self.faults:
            self.add_logs()

    def add_logs(self) -> None:
        """Print the ends of the logs, which go with the folder; ranks that say the same once."""
        paths = [self._daemon.log] if self._daemon is not None else []
        paths += self._ranks.logs if self._ranks is not None else []
        seen = set()
        for path in paths:
            text = tail(path) if path.exists() else ""
            told = re.sub(r"rank ?\d+", "rank", text)
            if text and told not in seen:
                seen.add(told)
                say(f"--- end of {path.name}\n{text}")

    def close(self, *, keep_log: bool) -> None:
        """End all processes, look for leftovers, remove the folder. Not to be interrupted."""
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._view.close()
        if self._ranks is not None:
            self._ranks.stop()
        if self._daemon is not None and not self._daemon.stop():
            status = self._daemon.process.returncode
            self.faults.append(f"the daemon did not drain and end by itself (status {status})")
            say(f"--- end of daemon.log\n{tail(self._daemon.log)}")
        self._left = leftovers(self._mark, self._names_before)
        if keep_log:
            kept = Path(tempfile.mkdtemp(prefix="msd-demo-log-"))
            for path in self._folder.glob("*.log"):
                shutil.copy(path, kept)
            shutil.copy(self._folder / "job.yaml", kept)
            self._view.say(f"logs and job file: {kept}")
        shutil.rmtree(self._folder, ignore_errors=True)
        signal.signal(signal.SIGINT, before)

    def report(self, total_s: float) -> dict[str, Any]:
        """Return the report's figures with the verdict."""
        figures = self._progress.figures()
        faults = list(self.faults)
        start, end = figures["loss_start"], figures["loss_end"]
        if not faults and start is not None and end is not None and not end < start:
            faults.append(f"the loss did not fall ({start:.3f} to {end:.3f})")
        if not faults and self._is_multimodal:
            faults += _caption_faults(figures)
        if not faults and figures["steps"] != self._steps:
            faults.append(f"{figures['steps']} of {self._steps} steps were completed")
        if self._left:
            faults.append("something was left behind")
        return figures | {"total_s": total_s, "left_behind": self._left, "faults": faults}


def _weights(sources: list[DemoSource], pictures: Sequence[DemoSource] = ()) -> dict[str, float]:
    """Return falling weights n, n-1 ... 1 in the order given; pictures weigh as much as all of them."""
    weights = {source.name: float(len(sources) - place) for place, source in enumerate(sources)}
    return {source.name: sum(weights.values()) for source in pictures} | weights


def _caption_faults(figures: dict[str, Any]) -> list[str]:
    start, end = figures.get("caption_loss_start"), figures.get("caption_loss_end")
    if start is None or end is None:
        return ["no caption was seen in the first or the last steps"]
    return [] if end < start else [f"the loss on captions did not fall ({start:.3f} to {end:.3f})"]


def _make_folder() -> Path:
    """Make the demo's folder where socket paths are short enough."""
    base = Path(tempfile.gettempdir()).resolve()
    longest = len(os.fsencode(base / "msd-demo-12345678")) + SOCKET_NAME_BYTES
    if longest > SOCKET_PATH_BYTES_MAX:
        base = Path("/tmp")  # noqa: S108 - mkdtemp makes a private folder in it
    return Path(tempfile.mkdtemp(prefix="msd-demo-", dir=base))


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the demo as Ctrl-C does."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
