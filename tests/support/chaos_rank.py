"""A trainer's rank for chaos tests: reads, writes down what it was given, saves states, as others die.

Run as a process: `python -m tests.support.chaos_rank FACTS.json RANK`. It goes on from the newest
state that all ranks saved whole. Exit code 0: all steps are done; TOLD: the daemon said that
something is gone, in a typed error of those that a restart mends; anything else is a fault.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import msd_client
from msd_client.contract.errors import AvailabilityError, DeadlineError
from msd_client.state_folder import StateFolder
from tests.support.ledger import row_bytes

TOLD = 3


def row_digest(tokens: Any, labels: Any, position_ids: Any) -> str:
    """Return a short name of a row's content."""
    return hashlib.blake2b(row_bytes(tokens, labels, position_ids), digest_size=12).hexdigest()


def read(facts: dict[str, Any], rank: int) -> None:
    """Read to the last step; one line per step in the ledger, written before the next is asked for."""
    states = StateFolder(facts["states"], keep=4)
    saved = states.newest()
    ledger = Path(facts["ledger"]) / f"{facts['attempt']}-{rank}.jsonl"
    with (
        msd_client.connect(
            facts["job"], mesh={"dp": facts["dp"]}, rank=rank, daemon=facts["socket"],
            as_="numpy", deadlines=facts["deadlines"],
        ) as data,
        ledger.open("a", buffering=1) as out,
    ):  # fmt: skip
        if saved is not None:
            data.train.load_state_dict(saved.state)
        for step in data.train:
            rows = []
            for batch in step:
                columns = zip(
                    np.asarray(batch.tokens),
                    np.asarray(batch.labels),
                    np.asarray(batch.position_ids),
                    strict=True,
                )
                rows += [row_digest(*row) for row in columns]
                del batch, columns
            state = data.train.state_dict()
            digest = hashlib.blake2b(state["msd"], digest_size=12).hexdigest()
            line = {"step": step.number, "rows": rows, "valid": step.valid_tokens, "state": digest}
            out.write(json.dumps(line) + "\n")
            done = step.number + 1
            is_last = done == facts["steps"]
            if done % facts["save_every"] == 0 or is_last:
                states.save(state, step=done, part=rank, parts=facts["dp"], run=facts["attempt"])
            if is_last:
                return
            time.sleep(facts["step_s"])  # what a trainer computes
    raise AssertionError(f"the stream ended before step {facts['steps']}")


def main() -> None:
    """See the module's text."""
    facts = json.loads(Path(sys.argv[1]).read_text())
    try:
        read(facts, int(sys.argv[2]))
    except AvailabilityError as error:
        if isinstance(error, DeadlineError):
            raise
        print(f"{type(error).__name__}: {error}", flush=True)
        sys.exit(TOLD)


if __name__ == "__main__":
    main()
