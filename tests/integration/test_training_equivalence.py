"""Balanced and unbalanced placement, on any number of ranks, train the same model (P4).

Real ranks on gloo train a small GPT, and one with pictures, on the same steps placed in different
ways. Normalised by the step's own count (`step.loss_scale("mean")`), the loss of every step is the
same but for the order in which sums are rounded; normalised by what each rank holds, it is not.

Tolerances, relative, for the loss of any of 20 steps. What differs between runs is the order of
additions alone: of tokens in a microbatch, of microbatches in a gradient, of ranks in an all-reduce.
Each rounds to half a unit of the dtype, 6e-8 or 1e-16; errors of either sign add up by the root of
their number and are spread over thousands of labels. Measured were 8e-8 and 5e-16 at most, so 1e-6
and 1e-13 are asked for. The wrong normalisation is off by 1e-3 and more; the test wants 1e-4.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from msd_client.msdctl.demo_images import PATCH_VALUES, job_keys, picture_source
from tests.support.node import Node, running_node, write_job
from tests.support.sources import ROOT

pytest.importorskip("torch")
pytestmark = pytest.mark.processes

STEPS = 20
FLOAT64, FLOAT32, WRONG = 1e-13, 1e-6, 1e-4
VOCABULARY, LONGEST = 257, 128

BATCHES: dict[str, dict[str, Any]] = {
    "packed": {"rows": 8, "row_tokens": LONGEST, "microbatch_rows": 1},
    "varlen": {"packing": "varlen", "step_tokens": 1000, "microbatch_tokens": LONGEST,
               "segment_multiple": 8},
}  # fmt: skip
PLACEMENTS = {
    "one rank": ("unbalanced", 1),
    "unbalanced": ("unbalanced", 2),
    "balanced": ("balanced", 2),
    "balanced on 4": ("balanced", 4),
}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with running_node(tmp_path_factory.mktemp("n"), "--loader-workers", "2") as running:
        yield running


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two sources of text that can be learnt, of very different lengths and weights."""
    folder = tmp_path_factory.mktemp("texts")
    rng = np.random.default_rng(4)
    words = ["ship", "sail", "wind", "north", "anchor", "deck", "the", "a", "of", "to"]
    sections: dict[str, Any] = {}
    for name, longest, weight in (("short", 8, 1.0), ("long", 40, 0.25)):
        lines = [
            json.dumps({"text": " ".join(rng.choice(words, 1 + int(longest * rng.random() ** 2)))})
            for _ in range(4000)
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
        sections[name] = {"paths": str(folder / f"{name}.jsonl"), "loss_weight": weight}
    return sections


def job_of(name: str, sources: dict[str, Any], batch: dict[str, Any]) -> dict[str, Any]:
    return {
        "schema": 1,
        "name": name,
        "seed": 2,
        "tokenizer": {"bytes": True, "eos": "end"},
        "batch": batch,
        "sources": sources,
        # Attention counts: rows of equal tokens differ in cost.
        "model": {"backbone": {"hidden_size": 32, "num_hidden_layers": 2}},
    }


class Curves:
    """What one run told."""

    def __init__(self, parts: list[dict[str, Any]]) -> None:
        self.losses: dict[str, list[float]] = parts[0]["losses"]
        assert all(part["losses"] == self.losses for part in parts)
        self.microbatches: list[int] = parts[0]["microbatches"]
        assert all(part["microbatches"] == self.microbatches for part in parts)
        self.placed = [part["used_tokens"] for part in parts]
        """Of each rank, step and microbatch."""

    def difference(self, other: Curves, kind: str) -> float:
        """Return the largest relative difference of the losses of any step."""
        mine, theirs = np.array(self.losses[kind]), np.array(other.losses[kind])
        return float(np.abs(mine / theirs - 1).max())


def run(
    node: Node, folder: Path, job: dict[str, Any], *, is_varlen: bool, patch_values: int = 0
) -> dict[str, Curves]:
    """Train on the job's first steps in every placement."""
    asks = []
    for name, (strategy, dp) in PLACEMENTS.items():
        placed = {**job, "name": f"{job['name']}-{strategy}-{dp}", "strategy": strategy}
        out = folder / name.replace(" ", "_")
        asks.append({
            "job": str(write_job(out.with_suffix(".yaml"), placed)), "daemon": str(node.socket),
            "dp": dp, "steps": STEPS, "out": str(out), "kinds": ["float64", "float32", "own"],
            "vocabulary": VOCABULARY, "positions": LONGEST, "patch_values": patch_values,
            # Padding that only some of them compute changes nothing either.
            "is_trimmed": is_varlen and name != "unbalanced",
        })  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.support.equal_trainer", json.dumps(asks)],
        cwd=ROOT, capture_output=True, text=True, timeout=200, check=False,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:] + node.log[-2000:]
    return {
        name: Curves(
            [json.loads(Path(f"{ask['out']}.{rank}").read_text()) for rank in range(ask["dp"])]
        )
        for name, ask in zip(PLACEMENTS, asks, strict=True)
    }


def check_same(runs: dict[str, Curves]) -> None:
    """Check that all runs trained the same model, and that a wrong normalisation does not."""
    reference, *others = runs.values()
    for kind, tolerance in (("float64", FLOAT64), ("float32", FLOAT32)):
        losses = reference.losses[kind]
        assert len(losses) == STEPS
        assert losses[-1] < 0.8 * losses[0], "nothing was learnt, so nothing is shown"
        # A loss that jumps magnifies roundings: how much hangs on the processor's vectors.
        assert max(np.diff(losses)) < 0.02 * losses[0], "training is not stable"
        differences = {name: made.difference(reference, kind) for name, made in runs.items()}
        assert max(differences.values()) <= tolerance, differences
    own, alone = np.array(reference.losses["own"]), np.array(reference.losses["float64"])
    assert np.abs(own / alone - 1).max() <= FLOAT64  # one rank holds all there is
    wrong = [made.difference(reference, "own") for made in others]
    assert min(wrong) > WRONG, wrong
    # Placement did differ, or nothing would be shown.
    assert runs["balanced"].placed != runs["unbalanced"].placed


@pytest.mark.parametrize("batch", BATCHES)
def test_a_gpt_learns_the_same_however_its_steps_are_placed(
    node: Node, tmp_path: Path, texts: dict[str, Any], batch: str
) -> None:
    job = job_of(batch, texts, BATCHES[batch])
    check_same(run(node, tmp_path, job, is_varlen=batch == "varlen"))


@pytest.mark.parametrize("batch", BATCHES)
def test_a_vlm_learns_the_same_however_its_steps_are_placed(
    node: Node, tmp_path: Path, texts: dict[str, Any], batch: str
) -> None:
    pytest.importorskip("PIL")
    pictures = picture_source(tmp_path, 600)
    sources = {"short": texts["short"], "pictures": {**pictures.section, "loss_weight": 0.25}}
    shape = {**BATCHES[batch], "microbatch_patches": LONGEST}
    job = job_of(f"vlm-{batch}", sources, shape) | job_keys()
    check_same(run(node, tmp_path, job, is_varlen=batch == "varlen", patch_values=PATCH_VALUES))
