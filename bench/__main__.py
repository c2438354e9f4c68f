"""Run a bench by name; its last line is one JSON object."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform

BENCHES = (
    "node",
    "ring",
    "images",
    "text",
    "planner",
    "balance",
    "recover",
    "resume",
    "federation",
    "observe",
    "scaling",
)


def machine() -> dict[str, object]:
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench")
    parser.add_argument("bench", choices=BENCHES)
    parser.add_argument("--json", action="store_true", help="print the JSON line alone")
    parser.add_argument(
        "--quick", action="store_true", help="fewer and shorter runs: 50 s, images 2 min"
    )
    parser.add_argument(
        "--only",
        help="node: cpu, mapped or parquet; ring: one part; images: one way to decode, or msd; text: a tokenizer; balance: one part; recover: smallest or default; federation: exchange, planner or takeover; scaling: scaled, mean, peak, even, all or memory",
    )
    options = parser.parse_args()
    before = machine()
    module = importlib.import_module(f"bench.{options.bench}")
    say = (lambda *_: None) if options.json else print
    figures = module.run(is_quick=options.quick, say=say, only=options.only)
    print(json.dumps({"bench": options.bench, "machine": before, "figures": figures}))


if __name__ == "__main__":
    main()
