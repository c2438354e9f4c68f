"""Images and sounds encoded on other ranks: gloo ranks of a real daemon, embeddings sent home."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from msd_client.joined_job import Data
from tests.conftest import StartNode
from tests.support.hybrid_ranks import MODALITIES, run_program
from tests.support.media_corpus import AUDIO, IMAGE, corpus_job
from tests.support.media_writers import write_corpus
from tests.support.node import Node, run_ranks

pytest.importorskip("torch")
pytestmark = pytest.mark.processes

PLACEHOLDERS = {"image": IMAGE, "audio": AUDIO}
STEPS = 5
TOLERANCES = {"float64": 1e-10, "float32": 2e-5}
"""Of losses, gradients and weights, relative to the largest: rounding of sums in another order."""


def corpus(folder: Path) -> dict[str, Any]:
    """Return a job over eight sources of images, sounds, chats and texts."""
    sources, _ = write_corpus(folder, 11)
    batch = {"rows": 16, "microbatch_rows": 2, "segment_multiple": 4}
    return corpus_job(folder, sources, batch=batch)


def of(job: dict[str, Any], folder: Path, strategy: str, **changes: Any) -> str:
    path = folder / f"{strategy}.json"
    path.write_text(json.dumps(job | {"strategy": strategy, **changes}))
    return str(path)


@pytest.mark.parametrize("mesh", [{"dp": 4}, {"dp_replicate": 2, "cp": 2, "dp_shard": 2}], ids=str)
def test_every_placeholder_gets_its_own_items_embedding(
    start_node: StartNode, tmp_path: Path, mesh: dict[str, int]
) -> None:
    """The same rows in the same places, with media encoded at home and anywhere."""
    node: Node = start_node("--loader-workers", "2")
    job = corpus(tmp_path / "data")
    found = {}
    for strategy in ("vlm_backbone", "vlm_hybrid"):
        path = of(job, tmp_path, strategy, balance_objective="microbatch")
        found[strategy] = run_program(
            node, tmp_path / strategy, job=path, mesh=mesh, steps=STEPS, kind="marks"
        )
    moved = 0
    counted = dict.fromkeys(MODALITIES, 0)
    for home, anywhere in zip(found["vlm_backbone"], found["vlm_hybrid"], strict=True):
        assert home.keys() == anywhere.keys()
        for key, value in home.items():
            name, _, cell = key.partition(".")
            if name in MODALITIES:
                assert np.array_equal(value, anywhere[key]), key
                is_placeholder = home[f"tokens.{cell}"] == PLACEHOLDERS[name]
                # The last column numbers tokens from 1: no placeholder is left out, nothing else hit.
                assert np.array_equal(value[..., -1] > 0, is_placeholder)
                counted[name] += int(is_placeholder.sum())
            elif name == "tokens":
                assert np.array_equal(value, anywhere[key])
            else:
                moved += not np.array_equal(value, anywhere[key])
    assert min(counted.values()) > 50, counted
    assert moved > STEPS


def test_training_is_the_same_wherever_rows_and_media_go(
    start_node: StartNode, tmp_path: Path
) -> None:
    """P4: one loss curve, up to the rounding of sums taken in another order."""
    node: Node = start_node("--loader-workers", "2")
    job = corpus(tmp_path / "data")
    found = {
        strategy: run_program(
            node,
            tmp_path / strategy,
            job=of(job, tmp_path, strategy),
            mesh={"dp": 4},
            steps=STEPS,
            kind="train",
            dtypes=list(TOLERANCES),
        )
        for strategy in ("unbalanced", "vlm_backbone", "vlm_hybrid")
    }
    first = found["unbalanced"][0]
    for dtype in TOLERANCES:
        losses = first[f"{dtype}.losses"]
        assert losses[-1] < losses[0]
        for name in MODALITIES:
            assert np.abs(first[f"{dtype}.grad.{name}.0.weight"]).max() > 1e-6
    for ranks in found.values():
        for rank in ranks:
            for key, value in rank.items():
                tolerance = TOLERANCES[key.split(".")[0]]
                scale = np.abs(first[key]).max()
                assert np.abs(value - first[key]).max() <= tolerance * scale, key


Key = tuple[int, int, int]
"""Step, microbatch, rank."""


def read_all(
    node: Node,
    job: dict[str, Any],
    mesh: dict[str, int],
    steps: int,
    state: dict[str, bytes] | None = None,
    victims: dict[int, str] | None = None,
) -> tuple[dict[Key, dict[str, bytes]], dict[int, dict[str, bytes]]]:
    """Return every array of every microbatch, and rank 0's state after each step.

    Args:
        node: The daemon.
        job: The job.
        mesh: Axes.
        steps: Steps to read.
        state: Where to begin.
        victims: Name of the process that rank 0 kills after a step.
    """
    seen: dict[Key, dict[str, bytes]] = {}
    states: dict[int, dict[str, bytes]] = {}

    def read(data: Data, step: Any) -> None:
        for batch in step:
            seen[step.number, batch.microbatch, data.rank] = {
                name: np.array(value).tobytes()
                for name, value in batch.items()
                if hasattr(value, "shape")
            }
            del batch
        assert step.stats["encoder_imbalance"] >= 1
        if data.rank == 0:
            (told,) = node.request("status")["jobs"]
            assert told["encoder_imbalance"] >= 1
            assert told["encoder_imbalance_last"] >= 1
            states[step.number + 1] = data.train.state_dict()
            if victims and step.number in victims:
                node.child(victims[step.number]).kill()

    run_ranks(node, job, mesh, steps, read_step=read, state=state)
    return seen, states


def test_kills_change_no_byte_and_another_mesh_goes_on_with_the_same_rows(
    start_node: StartNode, tmp_path: Path
) -> None:
    job = corpus(tmp_path / "data")
    job["strategy"] = "vlm_hybrid"
    node = start_node("--loader-workers", "2")
    whole, states = read_all(node, job, {"dp": 4}, 10)
    assert any(len(cell["image_send_counts"]) == 16 for cell in whole.values())
    victims = {2: "msd-constructor", 4: "msd-loader", 6: "msd-constructor"}
    killed, _ = read_all(node, job, {"dp": 4}, 10, victims=victims)
    assert killed == whole
    # Half the groups: other places, and the same rows in every step.
    halved, _ = read_all(node, job, {"dp": 2}, 5, state=states[5])
    for step in range(5, 10):
        rows = [
            sorted(
                row
                for (number, _, _), cell in cells.items()
                if number == step
                for row in np.frombuffer(cell["tokens"], "<i4").reshape(-1, 128).tolist()
            )
            for cells in (whole, halved)
        ]
        assert rows[0] == rows[1]
        assert len(rows[0]) == 16


def test_steps_without_media_and_last_stages_are_served_alike(
    start_node: StartNode, tmp_path: Path
) -> None:
    """Texts alone until step 3; of two pipeline stages the first alone has routes."""
    job = corpus(tmp_path / "data")
    texts = dict.fromkeys(("mds", "saved"), 1)
    job |= {
        "strategy": "vlm_hybrid",
        "mixture": {"unit": "tokens", 0: texts, 3: job["mixture"][0]},
    }
    mesh = {"pp": 2, "dp": 2}
    seen, _ = read_all(start_node("--loader-workers", "2"), job, mesh, 8)
    sent = dict.fromkeys(range(8), 0)
    for (step, _, rank), cell in seen.items():
        routes = [name for name in cell if name.endswith("_counts")]
        assert len(routes) == (4 if rank < 2 else 0)
        sent[step] += sum(int(np.frombuffer(cell[name], "<i4").sum()) for name in routes)
    assert sent[0] == sent[1] == sent[2] == 0
    assert max(sent.values()) > 0
