"""Items of whole pipelines: data, grid, tokens, the user's step, limits, previews, versions."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from federation.model.media import (
    AudioRule,
    ImageRule,
    MediaRule,
    MelRule,
    PatchRule,
    ResizeRule,
    VideoRule,
)
from msd_client.contract.plain import decode_plain, encode_plain
from msd_daemon.transforms.image_decode import decode_image
from msd_daemon.transforms.media_error import MediaError
from msd_daemon.transforms.media_pipeline import decoder_versions, open_pipeline
from msd_daemon.transforms.media_preview import preview
from tests.support.media import card, encode, noise, tone, video, wav

NATIVE = ResizeRule("native", multiple=28, pixels_min=3136, pixels_max=1003520)
QWEN = PatchRule("qwen2_vl", 14, 2, 2)
IMAGE = MediaRule(
    "image", QWEN.values, "uint8", 65536, 7, image=ImageRule(resize=NATIVE, patches=QWEN)
)
VIDEO = MediaRule(
    "video", QWEN.values, "uint8", 65536, 7, video=VideoRule(resize=NATIVE, patches=QWEN)
)
AUDIO = MediaRule(
    "audio", 80, "float16", 3000, 7, audio=AudioRule(rate=16000, mel=MelRule()),
    placeholder_tokens="ceil(ceil(frames / 2) / 4)",
)  # fmt: skip
RULES = {"image": IMAGE, "video": VIDEO, "audio": AUDIO}


def rng() -> np.random.Generator:
    return np.random.default_rng(3)


def test_an_image() -> None:
    item = open_pipeline(IMAGE)(encode(noise(427, 640), "JPEG"), rng())
    assert item.grid == (1, 30, 46)
    assert item.tokens == 345
    assert item.data.shape == (1380, IMAGE.unit_values)
    assert item.data.dtype == np.uint8
    assert item.data.flags.c_contiguous
    # Both frames of a patch are the image.
    both = item.data.reshape(1380, 3, 2, 14 * 14)
    assert np.array_equal(both[:, :, 0], both[:, :, 1])


def test_a_png_of_the_right_size_keeps_its_pixels() -> None:
    pixels = noise(56, 84)
    raster = PatchRule("raster", 28)
    rule = dataclasses.replace(
        IMAGE, unit_values=raster.values, image=ImageRule(resize=NATIVE, patches=raster)
    )
    item = open_pipeline(rule)(encode(pixels), rng())
    assert (item.grid, item.tokens) == ((1, 2, 3), 6)
    back = item.data.reshape(2, 3, 28, 28, 3).transpose(0, 2, 1, 3, 4).reshape(56, 84, 3)
    assert np.array_equal(back, pixels)


def test_a_scaled_decode_is_near_the_whole_one() -> None:
    content = encode(noise(1201, 1603), "JPEG", quality=90)
    small = ResizeRule("max_pixels", multiple=16, pixels_max=256 * 192)
    found = {}
    for gap in (0, 2):
        image = ImageRule(draft_gap=gap, resize=small, patches=PatchRule())
        rule = dataclasses.replace(IMAGE, unit_values=768, image=image)
        found[gap] = open_pipeline(rule)(content, rng()).data.astype(float)
    error = ((found[0] - found[2]) ** 2).mean()
    assert 0 < error < 255**2 / 10**4.2  # 42 dB, of noise; photos have 47 and more


def test_a_video() -> None:
    item = open_pipeline(VIDEO)(video([0, 100, 200], size=(56, 84)), rng())
    assert item.grid == (1, 4, 6)
    rule = dataclasses.replace(
        VIDEO, video=dataclasses.replace(VIDEO.video, sample="count", count=3)
    )
    item = open_pipeline(rule)(video([0, 100, 200], size=(56, 84)), rng())
    assert item.grid == (2, 4, 6)
    assert item.tokens == 12
    assert item.data.shape == (48, QWEN.values)
    by_frame = item.data.reshape(2, 24, 3, 2, 14 * 14).mean(axis=(1, 2, 4)).round()
    assert np.abs(by_frame - [[0, 100], [200, 200]]).max() < 3


def test_a_sound() -> None:
    item = open_pipeline(AUDIO)(wav(tone(1.5, rate=8000), 8000), rng())
    assert item.grid == (150, 1, 1)
    assert item.tokens == 19
    assert item.data.shape == (150, 80)
    assert item.data.dtype == np.float16


def test_a_raw_wave() -> None:
    rule = dataclasses.replace(
        AUDIO, unit_values=320, unit_dtype="float32", placeholder_tokens="",
        audio=AudioRule(rate=16000, frame_samples=320),
    )  # fmt: skip
    samples = tone(0.05)
    item = open_pipeline(rule)(wav(samples), rng())
    assert (item.data.shape, item.tokens) == ((3, 320), 3)
    assert np.abs(item.data.reshape(-1)[:800] - samples).max() < 1e-4
    assert not item.data.reshape(-1)[800:].any()


def test_a_sound_without_samples_is_an_item_without_frames() -> None:
    item = open_pipeline(AUDIO)(wav(np.zeros(0)), rng())
    assert (item.data.shape, item.grid, item.tokens) == ((0, 80), (0, 1, 1), 0)


def test_the_users_step_stands_before_the_patches() -> None:
    seen = []

    def invert(array: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        seen.append((array.shape, array.dtype, int(generator.integers(100))))
        return 255 - array

    content = encode(noise(56, 84))
    plain, changed = (open_pipeline(IMAGE, call)(content, rng()) for call in (None, invert))
    assert np.array_equal(changed.data, 255 - plain.data)
    assert seen == [((56, 84, 3), np.uint8, int(rng().integers(100)))]
    item = open_pipeline(IMAGE, lambda array, _: array[:28, :28])(content, rng())
    assert item.grid == (1, 2, 2)
    clip = video([0, 200], size=(56, 84))
    rule = dataclasses.replace(
        VIDEO, video=dataclasses.replace(VIDEO.video, sample="count", count=4)
    )
    assert open_pipeline(rule, lambda array, _: array[:2])(clip, rng()).grid == (1, 4, 6)
    halved = open_pipeline(AUDIO, lambda array, _: array[::2])(wav(tone(1.0)), rng())
    assert halved.grid == (50, 1, 1)


@pytest.mark.parametrize(
    ("rule", "gives", "message"),
    [
        (IMAGE, lambda a: a.astype(float), r"float64 of shape \(56, 84, 3\) for the image"),
        (IMAGE, lambda a: a[..., 0], r"uint8 of shape \(56, 84\) for the image"),
        (IMAGE, lambda a: None, "NoneType for the image"),
        (IMAGE, lambda a: a[:0], "return uint8 of shape"),
        (IMAGE, lambda a: a[:27], "84x27 pixels does not divide into patches of 28"),
        (VIDEO, lambda a: a[0], r"for the video; return uint8 of shape \(frames"),
        (AUDIO, lambda a: a[None], "for a sound; return finite float32"),
        (AUDIO, lambda a: a * np.nan, "for a sound; return finite float32"),
    ],
)
def test_a_step_that_gives_nonsense_is_named(rule: MediaRule, gives, message: str) -> None:
    content = {
        "image": encode(noise(56, 84)),
        "video": video([0, 200], size=(56, 84)),
        "audio": wav(tone(0.1)),
    }[rule.modality]
    with pytest.raises(MediaError, match=message):
        open_pipeline(rule, lambda array, _: gives(array))(content, rng())


def test_an_item_that_fits_no_row_is_refused() -> None:
    small = {name: dataclasses.replace(rule, row_units_max=23) for name, rule in RULES.items()}
    with pytest.raises(MediaError, match="image of 1x4x6 patches: 24, the limit is 23 of a row"):
        open_pipeline(small["image"])(encode(noise(56, 84)), rng())
    with pytest.raises(MediaError, match="video of 1x4x6 patches: 24, the limit is 23 of a row"):
        open_pipeline(small["video"])(video([0, 200], size=(56, 84)), rng())
    with pytest.raises(MediaError, match="sound, frames: 24, the limit is 23 of a row"):
        open_pipeline(small["audio"])(wav(tone(0.24)), rng())


def test_an_expression_that_gives_no_count_is_told_of_the_item() -> None:
    rule = dataclasses.replace(AUDIO, placeholder_tokens="frames / 7")
    assert open_pipeline(rule)(wav(tone(0.07)), rng()).tokens == 1
    with pytest.raises(MediaError, match=r"gives 1\.142"):
        open_pipeline(rule)(wav(tone(0.08)), rng())


@pytest.mark.parametrize("name", RULES)
def test_content_is_a_function_of_rule_bytes_and_generator(name: str) -> None:
    content = {
        "image": encode(noise(300, 200), "JPEG"),
        "video": video([0, 50, 200], size=(56, 84)),
        "audio": wav(tone(0.3)),
    }[name]
    items = [open_pipeline(RULES[name])(content, np.random.default_rng(i)) for i in (1, 2)]
    assert items[0].data.tobytes() == items[1].data.tobytes()


@pytest.mark.parametrize("name", RULES)
def test_rules_travel_as_plain_maps(name: str) -> None:
    rule = RULES[name]
    assert decode_plain(MediaRule, encode_plain(rule), "media") == rule


def test_bytes_of_a_unit() -> None:
    assert IMAGE.unit_bytes == 1176
    assert AUDIO.unit_bytes == 160
    assert (IMAGE.merge, AUDIO.merge) == (2, 1)


def test_previews_are_pictures() -> None:
    picture = preview(encode(card(3000, 2000)), IMAGE)
    assert picture.dtype == np.uint8
    assert picture.shape == (1086, 724, 3)
    small = preview(encode(card(), "JPEG", quality=95), IMAGE)
    assert np.array_equal(
        small, decode_image(encode(card(), "JPEG", quality=95), ImageRule()).pixels
    )
    sheet = preview(video([0, 100, 200, 100, 200], size=(56, 84), key_every=1), VIDEO)
    assert sheet.shape == (112, 336, 3)
    assert [round(float(sheet[20, 42 + 84 * i].mean()), -1) for i in range(4)] == [0, 100, 200, 100]
    spectrogram = preview(wav(tone(1.0, 440.0)), AUDIO)
    assert spectrogram.shape == (80, 101, 3)
    loudest = spectrogram[:, 50, 0].argmax()
    assert 60 < loudest < 75  # 440 Hz, near the bottom
    assert preview(wav(np.zeros(0)), AUDIO).shape == (1, 1, 3)


def test_versions_name_the_libraries_that_make_the_content() -> None:
    import PIL

    found = decoder_versions([IMAGE, AUDIO])
    assert f"pillow {PIL.__version__}" in found
    for name in ("simplejpeg ", "soundfile ", "libsndfile ", "soxr ", "av ", "resize "):
        assert name in found
    assert "pillow" not in decoder_versions([AUDIO])
    assert decoder_versions([]) == ""
