"""Images and sounds on a mesh with pipeline, context and tensor axes: who reads what of them (E8)."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import msd_daemon
from federation.model.place_tree import ClientPlaceTree
from msd_client.contract.errors import UsageError
from msd_client.joined_job import Data
from tests.conftest import StartNode
from tests.support.media_corpus import AUDIO, IMAGE, corpus_job
from tests.support.media_writers import write_corpus
from tests.support.node import Node, run_ranks

pytestmark = pytest.mark.processes

STEPS = 8
UNITS = ("patches", "cu_seqlens", "places", "cu_places", "segments")
PLACEHOLDERS = {"image": IMAGE, "audio": AUDIO}

Key = tuple[int, int, int]
"""Step, microbatch, rank."""


def read_all(node: Node, job: dict[str, Any], mesh: dict[str, int]) -> dict[Key, dict[str, Any]]:
    """Return what each rank of a mesh sees of each microbatch, copied out."""
    seen: dict[Key, dict[str, Any]] = {}
    all_done = threading.Barrier(int(np.prod(list(mesh.values()))))

    def read(data: Data, step: Any) -> None:
        for batch in step:
            own: dict[str, Any] = {
                name: np.array(value) for name, value in batch.items() if hasattr(value, "shape")
            }
            own["cp_places"] = np.array(batch.cp_places)
            for modality in PLACEHOLDERS:
                try:
                    media = batch.media(modality)
                except UsageError as error:
                    own[modality] = error.message
                    continue
                own[modality] = {name: np.array(getattr(media, name)) for name in UNITS}
                places, numbers = batch.local_places(modality)
                own[f"{modality}_local"] = np.array(places), np.array(numbers)
            seen[step.number, batch.microbatch, data.rank] = own
            del batch

    run_ranks(node, job, mesh, STEPS, read_step=read, at_end=lambda _: all_done.wait(60))
    return seen


@pytest.mark.parametrize("layout", ["zigzag_row", "zigzag_document", "contiguous"])
def test_every_rank_of_a_mesh_reads_its_part(
    start_node: StartNode, tmp_path: Path, layout: str
) -> None:
    mesh = {"pp": 2, "dp": 1, "cp": 2, "tp": 2}
    sources, _ = write_corpus(tmp_path / "data", 5)
    batch = {"cp_layout": layout, "segment_multiple": 4, "rows": 4}
    job = corpus_job(tmp_path / "data", sources, batch=batch)
    tree = ClientPlaceTree.from_mesh(mesh)
    seen = read_all(start_node("--loader-workers", "2"), job, mesh)
    held = dict.fromkeys(PLACEHOLDERS, 0)
    with msd_daemon.inline(job, dp=1) as stream:
        for number in range(STEPS):
            step = stream.next_step()
            for microbatch, whole in enumerate(step.microbatches(0)):
                for modality in PLACEHOLDERS:
                    held[modality] += len(whole.media[modality].segments)
                for rank in range(tree.rank_count):
                    own = seen[number, microbatch, rank]
                    if rank < tree.rank_count // 2:
                        check_first_stage(own, whole)
                    else:
                        check_last_stage(own, whole)
                for half in (range(4), range(4, 8)):
                    check_cover([seen[number, microbatch, rank] for rank in half], tree, half)
    assert min(held.values()) > 10, held


def check_first_stage(own: dict[str, Any], whole: Any) -> None:
    """Tokens, positions and all media are there, labels are not."""
    assert "labels" not in own
    where = own["cp_places"]
    assert np.array_equal(own["tokens"], whole.tokens.reshape(-1)[where])
    assert np.array_equal(own["position_ids"], whole.position_ids.reshape(-1)[where])
    axes = np.asarray(whole.mrope_position_ids).reshape(3, -1)
    assert np.array_equal(own["mrope_position_ids"], axes[:, where])
    for modality, placeholder in PLACEHOLDERS.items():
        media = whole.media[modality]
        for name in UNITS:
            assert np.array_equal(own[modality][name], getattr(media, name)), (modality, name)
        places, numbers = own[f"{modality}_local"]
        assert (own["tokens"].reshape(-1)[places] == placeholder).all()
        assert np.array_equal(where.reshape(-1)[places], own[modality]["places"][numbers])


def check_last_stage(own: dict[str, Any], whole: Any) -> None:
    """Labels are there; tokens and media are not, and who asks for them is told."""
    assert "tokens" not in own
    assert np.array_equal(own["labels"], whole.labels.reshape(-1)[own["cp_places"]])
    for modality in PLACEHOLDERS:
        assert isinstance(own[modality], str), own[modality]
        assert modality in own[modality]


def check_cover(peers: list[dict[str, Any]], tree: ClientPlaceTree, ranks: range) -> None:
    """Context-parallel ranks hold every placeholder token once; tensor peers see the same."""
    by_part: dict[int, dict[str, Any]] = {}
    for rank, own in zip(ranks, peers, strict=True):
        first = by_part.setdefault(tree.cp_rank(rank), own)
        for name, value in own.items():
            if isinstance(value, np.ndarray):
                assert np.array_equal(value, first[name]), name
    for modality in PLACEHOLDERS:
        if isinstance(peers[0][modality], str):
            continue
        numbers = [own[f"{modality}_local"][1] for own in by_part.values()]
        joined = np.sort(np.concatenate(numbers))
        assert np.array_equal(joined, np.arange(len(peers[0][modality]["places"])))
