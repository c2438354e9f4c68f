"""Damaged and odd shards through a whole node: what BUGS.md H18, H19 and H20 say is delivered."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from msd_client.contract.errors import DataError
from msd_client.contract.state import DELIVERED_SAMPLES, StreamState
from tests.support.media import card, encode, ycck_jpeg
from tests.support.media_corpus import EOS, FIRST_WORD, IMAGE, text_of, write_tokenizer
from tests.support.media_ledger import MediaLedger, read_media
from tests.support.node import Node, running_node
from tests.support.tars import END, header
from tests.support.tars import file as tar_file

pytestmark = pytest.mark.processes

StartNode = Callable[..., Node]
SHARDS, SAMPLES = 5, 20
WHOLE_OF_CUT = 12
WORDS = 3


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with running_node(tmp_path_factory.mktemp("n"), "--loader-workers", "1") as running:
        yield running


def image_job(folder: Path, vocabulary: int, **source: Any) -> dict[str, Any]:
    """Return a job of one source of tars in a folder."""
    write_tokenizer(folder / "tokenizer.json", vocabulary)
    return {
        "schema": 1,
        "name": "tars",
        "seed": 3,
        "tokenizer": {"file": str(folder / "tokenizer.json"), "eos": EOS},
        "image": [
            "decode",
            {"resize": "fixed", "height": 48, "width": 96},
            {"patchify": "raster", "patch": 16},
        ],
        "placeholder": {"image": {"token": IMAGE}},
        "batch": {
            "rows": 4, "row_tokens": 64, "microbatch_rows": 1, "microbatch_patches": 64,
            "positions": "mrope",
        },
        "sources": {"tars": {"paths": str(folder / "*.tar")} | source},
        "epochs": 1,
    }  # fmt: skip


# ---- H18: a tar cut in the middle ----------------------------------------------------------------


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """H18: 5 tars of 20 samples (json and 5,000 bytes of jpg); shard 3 cut at 86,016 of 143,360."""
    folder = tmp_path_factory.mktemp("cut")
    picture = encode(card(), "JPEG").ljust(5000, b"\0")
    for shard in range(SHARDS):
        with tarfile.open(folder / f"shard-{shard}.tar", "w") as tar:
            for number in range(SAMPLES):
                words = words_of(shard, number)
                body = json.dumps({"caption": text_of(words)}).encode()
                for name, content in (("json", body), ("jpg", picture)):
                    info = tarfile.TarInfo(f"{shard}-{number:02}.{name}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
    path = folder / "shard-3.tar"
    assert path.stat().st_size == 143_360
    os.truncate(path, 86_016)
    return image_job(
        folder,
        FIRST_WORD + SHARDS * SAMPLES * WORDS,
        image="jpg",
        text="json.caption",
        shuffle={"interleave": 2, "stream_block_records": 8, "window_records": 4},
        on_error={"policy": "skip", "budget_ratio": 0.5},
    )


def words_of(shard: int, number: int) -> tuple[int, ...]:
    first = FIRST_WORD + (shard * SAMPLES + number) * WORDS
    return tuple(range(first, first + WORDS))


def samples_of(ledger: MediaLedger) -> list[tuple[int, int]]:
    """Return (shard, number) of each delivered sample, whose image and words are all there."""
    found = []
    for segment in ledger.segments().elements():
        first = (segment.tokens[18] - FIRST_WORD) // WORDS
        shard, number = divmod(first, SAMPLES)
        assert segment.tokens == (*[IMAGE] * 18, *words_of(shard, number), EOS)
        (item,) = segment.items
        assert (item.place, item.tokens, item.grid) == (0, 18, (1, 3, 6))
        found.append((shard, number))
    return sorted(found)


DELIVERED = sorted(
    (shard, number)
    for shard in range(SHARDS)
    for number in range(WHOLE_OF_CUT if shard == 3 else SAMPLES)
)


@pytest.mark.parametrize("workers", [1, 4])
def test_a_cut_tar_costs_what_is_behind_the_cut(
    start_node: StartNode, cut: dict[str, Any], workers: int
) -> None:
    node = start_node("--loader-workers", str(workers))
    ledger = read_media(node, cut, {"dp": 2}, None)
    assert samples_of(ledger) == DELIVERED
    assert ledger.drops() == {"tars": {"unreadable": 1}}
    told = [line for line in node.log.splitlines() if "shard-3.tar" in line]
    assert len(told) == 1, told
    assert "byte offset 80896 of the tar" in told[0], told  # of the 13th sample's jpg
    assert "an unknown number of records is lost" in told[0], told


def test_an_index_tells_how_many_samples_were_lost(
    node: Node, cut: dict[str, Any], tmp_path: Path
) -> None:
    folder = Path(cut["sources"]["tars"]["paths"]).parent
    for path in folder.glob("*.tar"):
        os.link(path, tmp_path / path.name)
    (tmp_path / ".nv-meta").mkdir()
    counts = {path.name: SAMPLES for path in tmp_path.glob("*.tar")}
    (tmp_path / ".nv-meta" / ".info.json").write_text(json.dumps({"shard_counts": counts}))
    section = cut["sources"]["tars"] | {"paths": str(tmp_path / "*.tar")}
    ledger = read_media(
        node, cut | {"name": "noted", "sources": {"tars": section}}, {"dp": 1}, None
    )
    assert samples_of(ledger) == DELIVERED
    told = [line for line in node.log.splitlines() if f"{tmp_path}/shard-3.tar" in line]
    assert len(told) == 1, told
    assert "8 of its 20 records are lost" in told[0], told


def test_a_cut_tar_gives_the_same_after_a_resume(node: Node, cut: dict[str, Any]) -> None:
    whole = read_media(node, cut, {"dp": 2}, None)
    for step in whole.steps[2::4]:
        later = read_media(node, cut, {"dp": 1}, None, state=whole.state(step))
        assert later.rows() == {n: rows for n, rows in whole.rows().items() if n >= step}
        assert later.drops() == whole.drops()


def test_fail_stops_before_the_first_batch_past_the_fault(
    start_node: StartNode, cut: dict[str, Any], node: Node
) -> None:
    skipped = read_media(node, cut, {"dp": 2}, None)
    # The draw of this step goes past the fault, so it is the first that must not be served.
    first = min(step for step in skipped.steps if skipped.drops(step + 1)["tars"])
    assert 0 < first < max(skipped.steps)
    section = cut["sources"]["tars"] | {"on_error": "fail"}
    job = cut | {"name": "strict", "sources": {"tars": section}}
    for workers in (1, 4):
        running = start_node("--loader-workers", str(workers))
        for begin in (0, 1, first):
            served: dict[int, list[int]] = {0: [], 1: []}

            def note(data: Any, step: Any, served: dict[int, list[int]] = served) -> None:
                served[data.rank].append(step.number)

            # The policy is no part of the samples: a state of the lenient job goes on.
            state = skipped.state(begin) if begin else None
            with pytest.raises(DataError, match=r"shard-3\.tar") as caught:
                read_media(running, job, {"dp": 2}, None, state=state, on_step=note)
            assert served == {0: list(range(begin, first)), 1: list(range(begin, first))}
            assert "mend the shard or set on_error to skip" in str(caught.value)


# ---- H19, the half of tars -----------------------------------------------------------------------


def test_a_sample_behind_4_gib_is_delivered(node: Node, tmp_path: Path) -> None:
    """H19: the first member is 4 GiB + 1 MiB of holes, the second one's data is at 4,296,016,896."""
    size = (4 << 30) + (1 << 20)
    body = json.dumps({"caption": text_of(words_of(0, 0))}).encode()
    with (tmp_path / "big.tar").open("wb") as opened:
        opened.write(header("a.json", size))
        opened.truncate(512 + size)
        opened.seek(512 + size)
        opened.write(tar_file("b.json", body) + END)
        assert opened.tell() - len(END) - 512 == 4_296_016_896
    job = image_job(tmp_path, FIRST_WORD + WORDS, text="json.caption")
    for key in ("image", "placeholder"):
        del job[key]
    del job["batch"]["microbatch_patches"]
    job["sources"]["tars"]["on_error"] = {"policy": "skip", "budget_ratio": 1.0}
    peaks: list[int] = []

    def look(_data: Any) -> None:
        status = Path(f"/proc/{node.child('msd-loader').pid}/status").read_text()
        peaks.append(int(status.partition("VmHWM:")[2].split()[0]))

    ledger = read_media(node, job | {"name": "big"}, {"dp": 1}, None, at_end=look)
    (segment,) = ledger.segments()
    assert segment.tokens == (*words_of(0, 0), EOS)
    assert ledger.drops() == {"tars": {"too_large": 1}}
    assert "'a'" in node.log and f"{size} bytes, record_bytes_max = {64 << 20}" in node.log
    print(f"peak of the worker {peaks[0] / 1024:.0f} MiB")
    assert peaks[0] < 200 * 1024


# ---- H20: colour models --------------------------------------------------------------------------


def variants() -> dict[str, bytes]:
    """Return the test card in the 14 variants of H20."""
    image = Image.fromarray(card())
    grey = image.convert("L")
    alpha = grey.copy()
    alpha.putalpha(255)
    palette = image.quantize(8)
    clear = palette.index(7) if hasattr(palette, "index") else 7
    wide = np.asarray(grey).astype(np.uint16) << 8
    frames = [Image.new("RGB", image.size, (9, 9, 9))]
    return {
        "L": encode(grey),
        "LA": encode(alpha),
        "RGB": encode(image),
        "RGBA": encode(image.convert("RGBA")),
        "palette": encode(palette),
        "palette and transparency": encode(palette, transparency=clear),
        "16-bit grey": encode(Image.fromarray(wide)),
        "CMYK": encode(image.convert("CMYK"), "JPEG", quality=95),
        "YCCK": ycck_jpeg(card()),
        "progressive": encode(card(), "JPEG", quality=95, progressive=True),
        "animated": encode(image, "GIF", save_all=True, append_images=frames),
        "1 x 1": encode(np.full((1, 1, 3), (230, 20, 30), np.uint8)),
        "empty": b"",
        "truncated": encode(card(), "JPEG", quality=95)[:400],
    }


GREY = ("L", "LA", "16-bit grey")
DROPPED = ("empty", "truncated")


def test_every_colour_model_becomes_patches_of_the_same_card(node: Node, tmp_path: Path) -> None:
    contents = variants()
    assert len(contents) == 14
    with tarfile.open(tmp_path / "cards.tar", "w") as tar:
        for number, content in enumerate(contents.values()):
            for name, data in (("img", content), ("txt", text_of(words_of(0, number)).encode())):
                info = tarfile.TarInfo(f"{number:02}.{name}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    job = image_job(
        tmp_path, FIRST_WORD + SAMPLES * WORDS, image="img", text="txt",
        on_error={"policy": "skip", "budget_ratio": 0.9},
    )  # fmt: skip
    ledger = read_media(node, job | {"name": "cards"}, {"dp": 1}, None)
    names = list(contents)
    patches: dict[str, np.ndarray[Any, Any]] = {}
    for one in ledger.microbatches:
        found = one.media["image"]
        tokens = one.fields["tokens"].reshape(-1)
        for number in range(len(found["segments"])):
            word = tokens[found["places"][found["cu_places"][number + 1] - 1] + 1]
            begin, end = found["cu_seqlens"][number : number + 2]
            patches[names[(word - FIRST_WORD) // WORDS]] = found["patches"][begin:end]
    assert sorted(patches) == sorted(set(names) - set(DROPPED))
    assert ledger.drops() == {"tars": {"undecodable": 2}}
    last = StreamState.decode(ledger.states[max(ledger.states)])
    assert last.progress[DELIVERED_SAMPLES].tolist() == [12]
    for name, units in patches.items():
        assert units.dtype == np.uint8
        pixels = units.reshape(3, 6, 16, 16, 3)[1, 1].astype(int)  # wholly in the first stripe
        red = pixels[8, 4]
        if name in GREY:
            assert np.abs(pixels - 84).max() <= 6, (name, red)
        else:
            assert red[0] > 200, (name, red)
            assert (red[1:] < 60).all(), (name, red)
    told = [line for line in node.log.splitlines() if "cards.tar" in line and "12" in line]
    assert told, "the empty file is named"
