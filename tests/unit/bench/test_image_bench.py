"""What the peers of the image bench make is what msd makes, so that they are compared on equal work."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from bench import image_corpus, image_decoders
from federation.model.media import PatchRule, ResizeRule
from msd_daemon.transforms.image_patches import patchify
from msd_daemon.transforms.image_resize import resize, target_size

RESIZE = ResizeRule(policy="native", multiple=28, pixels_min=56 * 56, pixels_max=28 * 28 * 1280)
PATCHES = PatchRule(layout="qwen2_vl", patch=14, temporal=2, merge=2)


@pytest.fixture(scope="module")
def content() -> bytes:
    return image_corpus.photo([image_corpus.drawn(0, 900, 700)], 3)


def test_photos_are_as_the_bench_says(content):
    image = Image.open(io.BytesIO(content))
    assert image.size in image_corpus.SIZES
    assert 0.26e6 < image.width * image.height < 0.29e6
    assert image.layer == [(1, 2, 2, 0), (2, 1, 1, 1), (3, 1, 1, 1)]  # 4:2:0
    assert content == image_corpus.photo([image_corpus.drawn(0, 900, 700)], 3)


def test_pillow_gives_the_pixels_of_msd(content):
    pixels = image_decoders.pillow(content)
    decoded = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
    target = target_size(RESIZE, *decoded.shape[:2], np.random.default_rng(0))
    assert (target.height, target.width) == image_decoders.target_of(*decoded.shape[:2])
    assert np.array_equal(pixels, resize(decoded, target, RESIZE))


@pytest.mark.parametrize("way", ["turbo_area", "turbo_torch"])
def test_the_fast_ways_give_nearly_the_same_picture(way, content):
    pytest.importorskip({"turbo_area": "cv2", "turbo_torch": "torch"}[way])
    difference = image_decoders.WAYS[way](content).astype(float) - image_decoders.pillow(content)
    assert 10 * np.log10(255**2 / np.mean(difference**2)) > 34


def test_both_ways_to_patches_are_those_of_msd():
    pixels = np.random.default_rng(1).integers(0, 256, (56, 84, 3), dtype=np.uint8)
    expected = patchify(pixels[None], PATCHES, None)
    assert np.array_equal(image_decoders.patches_of(pixels), expected)
    pytest.importorskip("cv2")
    assert np.array_equal(image_decoders.patches_by_planes(pixels), expected)


def test_a_row_of_the_peer_holds_whole_samples(tmp_path):
    torch = pytest.importorskip("torch")
    from bench.image_peer import BEGIN, END, IGNORE, PLACEHOLDER, STOP, PackedPhotos, list_tar

    tar = image_corpus.make_tar(tmp_path / "a.tar", 4, tmp_path / "no photos")
    assert len(list_tar(tar)) == 4
    row = next(iter(PackedPhotos(str(tar), "pillow", 1024, 4096, 0, 1)))
    images = len(row["image_grids"])
    assert images == 2  # of some 350 placeholders and 50 bytes of caption each
    assert row["image_patches"].shape == (int(row["image_cu_seqlens"][-1]), 3 * 2 * 14 * 14)
    tokens, labels = row["tokens"][0], row["labels"][0]
    for token, count in ((BEGIN, images), (END, images), (STOP, images)):
        assert int((tokens == token).sum()) == count
    assert int((tokens == PLACEHOLDER).sum()) == len(row["image_patches"]) // 4
    trained = labels[labels != IGNORE]
    assert bytes(trained[trained < 256].to(torch.uint8).tolist()).count(b"photo") == images
