"""A rank of the scaling bench: takes a step at a fixed rate, and tells how late each one came."""

from __future__ import annotations

import argparse
import time

from bench.rank import pause, say

TOLD_EVERY = 20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--job", required=True)
    parser.add_argument("--socket", required=True)
    parser.add_argument("--period-s", type=float, required=True)
    parser.add_argument("--steps", type=int, required=True)
    options = parser.parse_args()
    import msd_client

    data = msd_client.connect(
        options.job,
        mesh={"dp": options.ranks},
        rank=options.rank,
        daemon=options.socket,
        as_="numpy",
        deadlines={"first_batch_s": 120.0, "next_batch_s": 120.0},
    )
    waits, gaps = [], []
    with data:
        due = before = 0.0
        for step in data.train:
            for microbatch in step:
                microbatch.tokens.sum()
                del microbatch
            if not before:
                pause("first")
                due = before = time.monotonic()
                continue
            came = time.monotonic()
            waits.append(max(came - due, 0.0))
            gaps.append(came - before)
            before = came
            if step.number % TOLD_EVERY == 0 and options.rank == 0:
                say(step=step.number)
            if step.number >= options.steps:
                break
            # As a trainer does: a step takes its time however late its batch came.
            due = max(due, came) + options.period_s
            time.sleep(max(due - time.monotonic(), 0.0))
        say(waits=waits, gaps=gaps)


if __name__ == "__main__":
    main()
