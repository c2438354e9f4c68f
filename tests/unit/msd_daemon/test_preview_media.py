"""Previewed media: placeholders as one word, untrained text in brackets, pictures as models see them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from federation.model.media import AudioRule, MelRule, PatchRule
from msd_client.msdctl import main, verbs
from msd_daemon.config.resolve import resolve_job
from msd_daemon.preview import PreviewRow, StreamPreview
from msd_daemon.preview_media import frames_of
from msd_daemon.shm.chunk_layout import UNTRAINED_BIT
from msd_daemon.transforms.decoder import open_decoder
from msd_daemon.transforms.image_patches import patchify, unpatchify, value_table
from msd_daemon.transforms.media_preview import preview_frames, spectrogram
from msd_daemon.verbs.preview import row_lines
from tests.support.media import noise
from tests.support.media_job import media_job, write_media

CHAT_TEXT = (
    "⟦<|im_start|>user\nwhat is it?<|im_end|>\n<|im_start|>assistant\n⟧a ship<|im_end|>\n<|256|>"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("media")
    write_media(made)
    return made


def rows_of(section: dict[str, Any], folder: Path) -> tuple[Any, list[PreviewRow]]:
    job = resolve_job(section, folder, "job", folder / "store")
    preview = StreamPreview(job)
    try:
        return job, list(preview.rows(preview.plan_first_step(), 100))
    finally:
        preview.close()


def text_of(job: Any, rows: list[PreviewRow]) -> str:
    decode = open_decoder(job.tokenizer)
    return "\n".join(line for row in rows for line in row_lines(row, decode, 0, job.media))


def test_media_are_one_word_and_untrained_text_stands_in_brackets(folder: Path) -> None:
    job, rows = rows_of(media_job("text", "chat", "pictures", "sounds", "videos"), folder)
    text = text_of(job, rows)
    assert "[image 4x5 patches, 20 tokens]picture " in text
    assert "[video 6x3x2 patches, 36 tokens]video " in text
    assert "[audio 100 frames, 13 tokens]sound " in text
    assert CHAT_TEXT in text
    assert "plain text" in text
    for row in rows:
        for segment in row.segments:
            assert segment.tokens.max() < UNTRAINED_BIT
            spans = segment.spans()
            assert [span.begin for span in spans[1:]] == [span.end for span in spans[:-1]]
            assert (spans[0].begin, spans[-1].end) == (0, len(segment.tokens))
            for span in spans:
                assert set(segment.is_trained[span.begin : span.end].tolist()) == {span.is_trained}
                if span.item is not None:
                    assert set(segment.tokens[span.begin : span.end].tolist()) == {250 + span.kind}


def test_a_cut_text_closes_its_brackets(folder: Path) -> None:
    job, rows = rows_of(media_job("chat"), folder)
    decode = open_decoder(job.tokenizer)
    lines = list(row_lines(rows[0], decode, 40, job.media))
    left = len(CHAT_TEXT) - 40
    # The end of the untrained text is not in the half that is shown last.
    assert lines[3] == f"{CHAT_TEXT[:20]}⟧\n   [... {left} characters ...]\n{CHAT_TEXT[-20:]}"
    assert all(line.count("⟦") == line.count("⟧") for line in lines)


@pytest.mark.parametrize(
    "patches",
    [
        {"patchify": "raster"},
        {"patchify": "navit", "dtype": "float32"},
        {"patchify": "qwen2_vl", "patch": 8},
        {"patchify": "qwen2_vl", "patch": 8, "dtype": "float16"},
    ],
)
def test_images_are_those_that_were_decoded(patches: dict[str, Any], folder: Path) -> None:
    job, rows = rows_of(media_job("pictures", patches=patches), folder)
    seen = 0
    for row in rows:
        for segment in row.segments:
            for item in segment.items[0]:
                number = (item.grid[1] * job.media[0].image.patches.patch - 48) // 16
                frames = frames_of(item, job.media[0])
                assert np.array_equal(frames[0], noise(48 + 16 * number, 64, number))
                seen += 1
    assert seen > 10


@pytest.mark.parametrize("layout", ["raster", "navit", "qwen2_vl"])
@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32"])
def test_patches_become_the_pixels_again(layout: Any, dtype: str) -> None:
    rule = PatchRule(layout, 4, 2, 2, mean=(0.48, 0.4, 0.5), std=(0.3, 0.26, 0.27))
    frames = np.stack([noise(24, 16, seed) for seed in range(4)])
    patches = patchify(frames, rule, value_table(rule, dtype))
    assert np.array_equal(unpatchify(patches, rule, (2, 6, 4)), frames)


def test_frames_of_sounds_become_spectrograms() -> None:
    frames = np.array([[0.0, 1.0], [2.0, -5.0], [1.0, 2.0]])
    picture = spectrogram(frames, 2.0)
    assert picture[:, :, 0].tolist() == [[128, 0, 255], [0, 255, 128]]
    whisper = AudioRule(mel=MelRule(bins=2, log="whisper"))
    assert np.array_equal(preview_frames(frames, whisper), picture)
    wave = np.sin(np.arange(16000) * 0.2).astype(np.float32).reshape(-1, 320)
    assert preview_frames(wave, AudioRule(rate=16000, frame_samples=320)).shape == (80, 101, 3)


def test_the_verb_writes_sheets_and_tells_spans(
    folder: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MSD__DAEMON__STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setitem(verbs.BUILT_IN, "preview", "msd_daemon.verbs.preview")
    job = folder / "job.yaml"
    job.write_text(yaml.safe_dump(media_job("pictures", "videos", "sounds")))
    out = tmp_path / "out"
    arguments = ["preview", str(job), "--rows", "4", "--media-dir", str(out)]
    assert main.run([*arguments, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    files = [Path(name) for row in rows for name in row["media_files"]]
    assert sorted(files) == sorted(out.iterdir())
    counts = {
        modality: sum(
            item["modality"] == modality
            for row in rows
            for segment in row["segments"]
            for item in segment["media"]
        )
        for modality in ("image", "video", "audio")
    }
    for modality in ("video", "audio"):  # one picture each
        assert sum(f"-{modality}-" in path.name for path in files) == counts[modality] > 0
    sheets = [path for path in files if "-image-" in path.name]
    assert 0 < len(sheets) < counts["image"]
    for path in files:
        with Image.open(path) as picture:
            assert picture.format == "PNG"
            assert picture.width <= 6 * 260 and picture.height <= 2048
    segment = next(s for row in rows for s in row["segments"] if s["source"] == "pictures")
    (item,) = segment["media"]
    assert segment["trained_spans"] == [[item["tokens"], segment["tokens"]]]
    assert item["grid"][0] * item["grid"][1] * item["grid"][2] == item["units"]
    assert main.run(arguments) == 0
    assert f"── {out}/row0-image-0.png" in capsys.readouterr().out
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert main.run(["preview", str(job), "--media-dir", str(blocked / "x")]) == 2
    assert "--media-dir" in capsys.readouterr().err
