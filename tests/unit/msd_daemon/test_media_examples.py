"""Example jobs of media and chats: `check` takes them, and what they give is what they say."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers.pre_tokenizers import ByteLevel

import msd_daemon
from bench.text_corpus import byte_letters
from msd_client.msdctl import main, verbs
from msd_daemon.config.yaml_text import read_yaml
from msd_daemon.verbs import check
from tests.support.example_data import SPECIAL, write_audio, write_sft, write_tokenizer, write_vlm

EXAMPLES = Path(__file__).parents[3] / "examples"
ID = {token: 256 + number for number, token in enumerate(SPECIAL)}
WRITERS: dict[str, Callable[[Path], None]] = {
    "vlm": write_vlm,
    "audio": write_audio,
    "sft": write_sft,
}


@pytest.fixture(autouse=True)
def installed(monkeypatch, tmp_path):
    monkeypatch.setitem(verbs.BUILT_IN, "check", check.__name__)
    monkeypatch.setenv("MSD__DAEMON__STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def placed(tmp_path: Path, name: str) -> Path:
    """Put an example beside data that it is for; return the job file."""
    data = tmp_path / "data"
    data.mkdir()
    write_tokenizer(data / "tokenizer.json")
    WRITERS[name](data)
    return Path(shutil.copy(EXAMPLES / f"{name}.yaml", tmp_path))


@pytest.mark.parametrize("name", WRITERS)
def test_check_takes_an_example_with_its_data(name, tmp_path, capsys):
    status = main.run(["check", str(placed(tmp_path, name))])
    captured = capsys.readouterr()
    assert status == 0, captured.err
    assert f"job       {name}, digest" in captured.out


def first_batch(job: Path, rows: int, row_tokens: int, **batch: int):
    """Return the first microbatch of an example with a smaller step."""
    written = read_yaml(job.read_text())
    written["batch"] |= {"rows": rows, "row_tokens": row_tokens, "microbatch_rows": rows, **batch}
    with msd_daemon.inline(written, base_dir=job.parent) as stream:
        step = next(iter(stream))
    return step.microbatches()[0]


def test_the_vlm_example_gives_native_images_and_their_placeholders(tmp_path):
    batch = first_batch(placed(tmp_path, "vlm"), 2, 256)
    images = batch.media["image"]
    # 90 x 60 pixels and the card's 96 x 48 both become 84 x 56: 6 x 4 patches of 14.
    assert {tuple(grid) for grid in images.grids.tolist()} == {(1, 4, 6)}
    assert images.patches.shape == (int(images.cu_seqlens[-1]), 3 * 2 * 14 * 14)
    assert len(images.places) == len(images.patches) // 4
    assert set(batch.tokens.reshape(-1)[images.places].tolist()) == {ID["<|image_pad|>"]}
    assert batch.mrope_position_ids.shape == (3, 2, 256)


def test_the_audio_example_gives_frames_of_what_is_long_enough(tmp_path):
    batch = first_batch(placed(tmp_path, "audio"), 1, 128)
    sounds = batch.media["audio"]
    # Half a second is 50 frames of 80 bins; ceil(ceil(50 / 2) / 4) tokens stand for it.
    assert np.diff(sounds.cu_seqlens).tolist() == [50] * (len(sounds.cu_seqlens) - 1)
    assert np.diff(sounds.cu_places).tolist() == [7] * (len(sounds.cu_seqlens) - 1)
    assert sounds.patches.shape == (int(sounds.cu_seqlens[-1]), 80)
    assert sounds.patches.dtype == np.float16
    texts = bytes_of(batch.tokens)
    assert b"tone 1" in texts
    assert b"tone 0" not in texts.replace(b"tone 10", b"")


def test_the_sft_example_trains_the_answers_of_chats_alone(tmp_path):
    written = read_yaml(placed(tmp_path, "sft").read_text())
    assert written["batch"]["packing"] == "varlen"
    written["batch"] |= {"step_tokens": 900, "microbatch_tokens": 4096}
    with msd_daemon.inline(written, base_dir=tmp_path) as stream:
        (batch,) = next(iter(stream)).microbatches()
    trained = batch.labels[batch.labels != -100]
    spoken = bytes_of(trained)
    assert ID["<|im_end|>"] in trained.tolist()
    assert b"What" not in spoken
    assert b"What" in bytes_of(batch.tokens)
    assert b"Question: 1 + 1?\nAnswer: 2" in bytes_of(batch.tokens)


def bytes_of(ids) -> bytes:
    """Return the bytes that ids stand for, special tokens left out."""
    letters = byte_letters(sorted(ByteLevel.alphabet()))
    of_id = [letters[letter] for letter in sorted(letters)]
    return bytes(of_id[token] for token in np.asarray(ids).reshape(-1).tolist() if token < 256)
