"""A trainer's ranks on one host, each a process; they write down what they are given.

Run as `python -m tests.support.host_ranks FACTS.json HOST`: the ranks of that host are forked from
one process that imported everything and opened nothing. `FACTS` says:

job, mesh, steps, step_s (what a trainer computes), out (folder), sockets and ranks by host; where
wanted also state (a file to start from), states and save_every (a `StateFolder`: go on from its
newest step, save there), attempt (names the ranks' files), changes ({step: [weights, at]}), skips
({step: [first, end]}), passes ([step, ...]: validation behind them), deadlines. Rank 0 asks for
changes and skips.

Each rank leaves OUT/ATTEMPT-RANK.jsonl, a line a step, written before the next is asked for. Exit
codes: 0 all steps are done; TOLD a typed error that a restart mends; KILLED a rank was killed; 1
anything else.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np

import msd_client
from msd_client.contract.errors import AvailabilityError, DeadlineError
from msd_client.state_folder import StateFolder
from tests.support.chaos_rank import TOLD, row_digest

KILLED = 4
ROW_FIELDS = ("tokens", "labels", "position_ids")


def batch_digest(batch: Any) -> str:
    """Return a name of all that a batch holds: names, types, shapes and bytes."""
    digest = hashlib.blake2b(digest_size=12)
    for name in sorted(batch):
        array = np.ascontiguousarray(batch[name])
        digest.update(f"{name} {array.dtype.str} {array.shape} ".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def read_step(step: Any) -> dict[str, Any]:
    """Return a step's line; of a pipeline stage that sees no rows it has none."""
    rows: list[str] = []
    batches: list[str] = []
    for batch in step:
        batches.append(batch_digest(batch))
        if all(name in batch for name in ROW_FIELDS):
            columns = (np.asarray(batch[name]) for name in ROW_FIELDS)
            rows += [row_digest(*row) for row in zip(*columns, strict=True)]
        del batch
    return {
        "step": step.number,
        "plan_step": step.plan_step,
        "valid": step.valid_tokens,
        "batches": batches,
        "rows": rows,
    }


class Rank:
    """One rank."""

    def __init__(self, facts: dict[str, Any], host: str, rank: int) -> None:
        self._facts = facts
        self._rank = rank
        self._states = StateFolder(facts["states"], keep=4) if "states" in facts else None
        self._path = Path(facts["out"]) / f"{facts.get('attempt', 1)}-{rank}.jsonl"
        self._socket = facts["sockets"][host]

    def read(self) -> None:
        """Read to the last step."""
        facts = self._facts
        saved = None if self._states is None else self._states.newest()
        with (
            msd_client.connect(
                facts["job"], mesh=facts["mesh"], rank=self._rank, daemon=self._socket,
                as_="numpy", deadlines=facts["deadlines"],
            ) as data,
            self._path.open("a", buffering=1) as out,
        ):  # fmt: skip
            if saved is not None:
                data.train.load_state_dict(saved.state)
            elif "state" in facts:
                data.train.load_state_dict({"msd": Path(facts["state"]).read_bytes()})
            for step in data.train:
                line = read_step(step)
                state = data.train.state_dict()["msd"]
                line |= {"state": hashlib.blake2b(state, digest_size=12).hexdigest()}
                line |= {"ns": time.monotonic_ns()}
                if step.number in facts.get("passes", ()):
                    steps = [read_step(own) for own in data.val.once()]
                    line["passes"] = steps
                out.write(json.dumps(line) + "\n")
                self._act(data, step.number)
                if self._is_done(step.number + 1, state):
                    return
                time.sleep(facts.get("step_s", 0))
        raise AssertionError(f"the stream ended before step {facts['steps']}")

    def _act(self, data: Any, step: int) -> None:
        if self._rank:
            return
        if str(step) in self._facts.get("changes", {}):
            weights, at = self._facts["changes"][str(step)]
            assert data.set_mixture(weights, at=at) == at
        if str(step) in self._facts.get("skips", {}):
            data.skip_steps(*self._facts["skips"][str(step)])

    def _is_done(self, done: int, state: bytes) -> bool:
        facts = self._facts
        is_last = done == facts["steps"]
        if self._states is not None and (is_last or done % facts["save_every"] == 0):
            parts = int(np.prod(list(facts["mesh"].values())))
            self._states.save(
                {"msd": state}, step=done, part=self._rank, parts=parts, run=str(facts["attempt"])
            )
        if self._rank == 0 and done == facts.get("keep_state"):
            Path(facts["out"], "state").write_bytes(state)
        return is_last


def _life(facts: dict[str, Any], host: str, rank: int) -> int:
    try:
        Rank(facts, host, rank).read()
        return 0
    except AvailabilityError as error:
        print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1 if isinstance(error, DeadlineError) else TOLD
    except BaseException:  # noqa: BLE001 - told, and the process ends here
        traceback.print_exc()
        return 1


def main() -> int:
    """Fork the ranks of a host; return the worst of their exit codes."""
    facts = json.loads(Path(sys.argv[1]).read_text())
    host = sys.argv[2]
    pids = []
    for rank in facts["ranks"][host]:
        pid = os.fork()
        if not pid:
            code = _life(facts, host, rank)
            sys.stderr.flush()
            os._exit(code)
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    if any(code not in (0, TOLD, -signal.SIGKILL) for code in codes):
        return 1
    return KILLED if -signal.SIGKILL in codes else max(codes)


if __name__ == "__main__":
    sys.exit(main())
