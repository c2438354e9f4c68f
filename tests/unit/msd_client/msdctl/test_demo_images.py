"""Drawn pictures of the demo: captions say what is to be seen, the tar is one that msd reads."""

from __future__ import annotations

import io
import itertools
import math
import tarfile

import pytest
from PIL import Image

import msd_daemon
from msd_client.msdctl import demo, demo_images
from msd_client.msdctl.demo_progress import Progress
from msd_client.msdctl.demo_report import report_text, step_line

COUNT = 40


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return demo_images.picture_source(tmp_path_factory.mktemp("pictures"), COUNT)


def test_captions_name_the_colours_of_their_pictures(source):
    with tarfile.open(source.section["paths"]) as tar:
        members = {member.name: tar.extractfile(member).read() for member in tar}
    assert len(members) == 2 * COUNT
    for number in range(COUNT):
        caption = members[f"{number:05d}.txt"].decode()
        _, size, colour, shape, _, ground = caption.split()
        assert size in demo_images.SIZES
        assert shape in demo_images.SHAPES
        image = Image.open(io.BytesIO(members[f"{number:05d}.png"]))
        seen = [pixel for _, pixel in image.getcolors()]
        assert sorted(seen) == sorted([demo_images.COLOURS[colour], demo_images.GROUNDS[ground]])


def test_the_same_pictures_are_drawn_each_time(source, tmp_path):
    again = demo_images.picture_source(tmp_path, COUNT)
    with open(source.section["paths"], "rb") as one, open(again.section["paths"], "rb") as two:
        assert one.read() == two.read()


def test_the_job_makes_patches_of_a_fixed_size(source):
    job = {
        "schema": 1,
        "tokenizer": {"bytes": True, "eos": "end"},
        "batch": {"rows": 2, "row_tokens": 128, "microbatch_rows": 2, "microbatch_patches": 256},
        "sources": {source.name: source.section},
        **demo_images.job_keys(),
    }
    with msd_daemon.inline(job) as stream:
        (batch,) = next(iter(stream)).microbatches()
    images = batch.media["image"]
    assert len(images.grids) >= 4
    assert set(map(tuple, images.grids.tolist())) == {(1, 4, 4)}
    assert images.patches.shape[1] == demo_images.PATCH_VALUES
    assert set(batch.tokens.reshape(-1)[images.places].tolist()) == {0xFF}


def test_the_least_blind_loss_is_that_of_the_kinds():
    kinds = itertools.product(
        demo_images.SIZES, demo_images.COLOURS, demo_images.SHAPES, demo_images.GROUNDS
    )
    assert demo_images.blind_loss(30.0) == pytest.approx(math.log(len(list(kinds))) / 30)


def step(number: int, caption_loss: float):
    return {
        "kind": "step", "rank": 0, "step": number, "step_s": 0.2, "wait_s": 0.0, "compute_s": 0.1,
        "tp_s": 0.05, "dp_s": 0.03, "optimizer_s": 0.01, "loss": 4.0 - 0.1 * number,
        "valid_tokens": 100, "fill": 1.0, "imbalance": 1.0, "drawn_tokens": [50, 50],
        "wanted_shares": [0.5, 0.5], "caption_loss_sum": 30 * caption_loss, "caption_tokens": 30.0,
        "pictures": 1.0,
    }  # fmt: skip


def test_the_report_tells_captions_and_pictures():
    progress = Progress(("pictures", "text"), 10, 1)
    for number in range(10):
        progress.take(step(number, 5.0 - 0.5 * number))
    assert "captions 0.500  " in step_line(progress)
    figures = progress.figures()
    assert figures["pictures"] == 10
    assert (figures["caption_loss_start"], figures["caption_loss_end"]) == (5.0, 0.5)
    text = report_text(figures | {"total_s": 1.0, "left_behind": [], "faults": []})
    assert "captions    5.000 at the start, 0.500 at the end (0.171 is the least" in text
    assert "pictures    10 seen, 300 trained tokens of captions" in text
    assert "vision-language model" in text


def test_captions_that_do_not_fall_are_a_fault():
    falls, rises = ({"caption_loss_start": a, "caption_loss_end": b} for a, b in ((2, 1), (1, 2)))
    assert demo._caption_faults(falls) == []
    assert demo._caption_faults(rises) == ["the loss on captions did not fall (1.000 to 2.000)"]
    assert demo._caption_faults({}) == ["no caption was seen in the first or the last steps"]


def test_pictures_weigh_as_much_as_all_text(source):
    texts = [demo.DemoSource(name, "", {}, 1, 1) for name in "ab"]
    assert demo._weights(texts, [source]) == {"pictures": 3.0, "a": 2.0, "b": 1.0}
