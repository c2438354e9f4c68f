"""A rank that knows nothing of itself: who it is and where its daemon is, its launcher's variables say.

Run as a process: `python -m tests.support.launched_rank JOB.json FOLDER STEPS`. It goes on from the
newest state in FOLDER, writes down what it was given, and says there which run it is of.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

import msd_client
from msd_client.launcher import find_launch
from msd_client.state_folder import StateFolder
from tests.support.chaos_rank import row_digest

DEADLINES = {"first_batch_s": 60.0, "next_batch_s": 60.0, "join_s": 60.0}
SAVE_EVERY = 4


def read(job: Path, folder: Path, steps: int, step_s: float) -> None:
    """Read to the last step; a line a step, written before the next one is asked for."""
    launch = find_launch(os.environ)
    states = StateFolder(folder / "states", keep=4)
    saved = states.newest()
    with (
        msd_client.connect(json.loads(job.read_text()), as_="numpy", deadlines=DEADLINES) as data,
        (folder / f"rank-{data.rank}.jsonl").open("a", buffering=1) as out,
    ):
        if saved is not None:
            data.train.load_state_dict(saved.state)
        for step in data.train:
            line: dict[str, Any] = {"step": step.number, "rows": [], "run": launch.run}
            for batch in step:
                columns = (batch.tokens, batch.labels, batch.position_ids)
                line["rows"] += [
                    row_digest(*row) for row in zip(*map(np.asarray, columns), strict=True)
                ]
                del batch, columns
            out.write(json.dumps(line) + "\n")
            done = step.number + 1
            if done % SAVE_EVERY == 0:
                states.save(
                    data.train.state_dict(),
                    step=done,
                    part=data.rank,
                    parts=launch.world or 1,
                    run=launch.run,
                )
            if done == steps:
                return
            time.sleep(step_s)  # what a trainer computes


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser()
    parser.add_argument("job", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--slow", action="store_true")
    options = parser.parse_args()
    read(options.job, options.folder, options.steps, 0.3 * options.slow)


if __name__ == "__main__":
    main()
