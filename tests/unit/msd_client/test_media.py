"""Media of a batch for a trainer: numpy and torch, whole and sliced, copied, moved and refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from msd_client import torch_adapter
from msd_client.batch import Batch
from msd_client.contract.batch_spec import BatchSpec
from msd_client.contract.errors import BatchReleasedError, UsageError
from msd_daemon.inline_media import InlineItem
from tests.support.media_rows import FIELDS, Cut, Sample, build

KINDS = [
    "numpy",
    pytest.param(
        "torch",
        marks=pytest.mark.skipif(not torch_adapter.has_torch(), reason="torch is not installed"),
    ),
]
PATCHES = np.arange(64, dtype=np.uint8).reshape(16, 4)
SAMPLE = Sample(
    [1, 900, 900, 900, 900, 2, 3], {1, 2, 3, 4}, [(0, InlineItem(1, 4, (1, 4, 4), PATCHES))]
)
CUTS = [Cut(0, 0, 0, 7, 0, 0)]


def spec(**change: Any) -> BatchSpec:
    rule: dict[str, Any] = {"rows": 1, "row_tokens": 8, "row_segments_max": 4, "media": FIELDS}
    return BatchSpec.for_rule(**(rule | change))


@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_go_where_the_placeholders_are(kind: str) -> None:
    (batch,) = build(spec(), [[SAMPLE]], CUTS, as_=kind)
    image = batch.media("image")
    assert image.patches.tolist() == PATCHES.tolist()
    assert str(image.patches.dtype).removeprefix("torch.") == "uint8"
    places, numbers = batch.local_places("image")
    assert (places.tolist(), numbers.tolist()) == ([1, 2, 3, 4], [0, 1, 2, 3])
    assert str(places.dtype).removeprefix("torch.") == "int32"
    inputs = batch.tokens.reshape(-1) * 1
    embeddings = image.places * 100  # one a placeholder token
    inputs[places] = embeddings[numbers]
    assert inputs.tolist() == [1, 100, 200, 300, 400, 2, 3, 0]
    assert [batch.local_places(name)[0].tolist() for name in ("video", "audio")] == [[], []]
    assert batch.media("video").patches.shape == (0, 3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("layout", "want"),
    [
        ("contiguous", [([1, 2, 3], [0, 1, 2]), ([0], [3])]),
        ("zigzag_row", [([1], [0]), ([0, 1, 2], [1, 2, 3])]),
    ],
)
def test_a_rank_has_the_places_of_its_slice_and_all_patches(
    kind: str, layout: Any, want: list[tuple[list[int], list[int]]]
) -> None:
    batches = build(spec(cp_count=2, cp_layout=layout), [[SAMPLE]], CUTS, as_=kind)
    found = []
    for batch in batches:
        assert batch.media("image").patches.shape == (16, 4)
        assert batch.media("image").places.tolist() == [1, 2, 3, 4]
        places, numbers = batch.local_places("image")
        assert (batch.tokens.reshape(-1)[places] == 900).all()
        found.append((places.tolist(), numbers.tolist()))
    assert found == want


@pytest.mark.parametrize("kind", KINDS)
def test_clones_and_views_have_media_too(kind: str) -> None:
    (batch,) = build(spec(positions="mrope"), [[SAMPLE]], CUTS, as_=kind)
    for other in (batch.clone(), batch.numpy()):
        assert other.media("image").places.tolist() == [1, 2, 3, 4]
        assert other.media("image").max_seqlen == 16
        assert other.mrope_position_ids.shape == (3, 1, 8)
    assert isinstance(batch, dict)
    assert batch["image_patches"].tolist() == PATCHES.tolist()
    flat = batch.flat
    assert flat.tokens.shape == (1, 8)
    assert flat.mrope_position_ids.shape == (3, 1, 8)
    for name in ("image_patches", "image_grids", "image_places"):
        with pytest.raises(AttributeError, match="no token field"):
            getattr(flat, name)


@pytest.mark.skipif(not torch_adapter.has_torch(), reason="torch is not installed")
def test_media_move_to_a_device_with_the_batch() -> None:
    (batch,) = build(spec(), [[SAMPLE]], CUTS, as_="torch")
    moved = batch.to("meta")
    assert moved.media("image").patches.device.type == "meta"
    assert moved.media("image").patches.shape == (16, 4)
    assert moved.media("image").max_seqlen == 16
    assert batch.to("cpu") is batch


@pytest.mark.parametrize(
    ("stage", "modality", "message"),
    [
        ("last", "image", "pipeline stage last has no 'image_patches': it is for the first stage"),
        ("middle", "audio", "pipeline stage middle has no 'audio_frames'"),
    ],
)
def test_other_stages_say_where_media_are(stage: Any, modality: Any, message: str) -> None:
    (batch,) = build(spec(stage=stage), [[SAMPLE]], CUTS)
    with pytest.raises(UsageError, match=message):
        batch.media(modality)
    with pytest.raises(UsageError, match=message):
        batch.local_places(modality)


def test_a_job_without_media_says_so() -> None:
    batch = Batch({"tokens": np.zeros((1, 4), np.int32)}, None, spec(media=()))
    with pytest.raises(UsageError, match="none of its sources has such media"):
        batch.media("image")
    with pytest.raises(UsageError, match="none of its sources"):
        Batch({"tokens": np.zeros((1, 4), np.int32)}).media("image")
    batch.release()
    with pytest.raises(BatchReleasedError):
        batch.media("image")
