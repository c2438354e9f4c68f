"""The rank of the recovery bench: takes a step at a fixed rate and says when each one came."""

from __future__ import annotations

import argparse
import time

from bench.rank import say


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--job", required=True)
    parser.add_argument("--socket", required=True)
    parser.add_argument("--period-s", type=float, required=True)
    options = parser.parse_args()
    import msd_client

    data = msd_client.connect(
        options.job,
        mesh={"dp": options.ranks},
        rank=options.rank,
        daemon=options.socket,
        as_="numpy",
        deadlines={"first_batch_s": 60.0, "next_batch_s": 30.0},
    )
    with data:
        due = time.monotonic()
        for step in data.train:
            for microbatch in step:
                microbatch.tokens.sum()
                del microbatch  # with one step planned ahead the next one waits for its slot
            came = time.monotonic()
            say(step=step.number, came=came)
            # As a trainer does: a step takes its time however late its batch came.
            due = max(due + options.period_s, came)
            time.sleep(max(due - time.monotonic(), 0.0))


if __name__ == "__main__":
    main()
