"""Keys `image`, `video`, `audio` and `placeholder`: what they come to, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from pydantic import Field, ValidationError

from federation.model.media import MediaRule, MelRule
from federation.model.recipe import UserCall
from msd_client.contract.media_fields import MODALITIES
from msd_client.contract.plain import decode_plain, encode_plain
from msd_daemon.config.faults import Fault, faults_of_validation
from msd_daemon.config.media_placeholder import MediaIds
from msd_daemon.config.media_section import resolve_media
from msd_daemon.config.media_steps import AudioSteps, Call, ImageSteps, Placeholders, VideoSteps
from msd_daemon.config.section import Section
from tests.support.sources import ROOT

VOCABULARY = {
    "<|image_pad|>": 5, "<|video_pad|>": 6, "<|vision_start|>": 3, "<|vision_end|>": 4,
    "<|AUDIO|>": 9, "<img>": 11,
}  # fmt: skip
CAPS = {"image": 65536, "video": 65536, "audio": 48000}


class MediaFile(Section):
    """The media keys alone."""

    image: ImageSteps | None = None
    video: VideoSteps | None = None
    audio: AudioSteps | None = None
    placeholder: Placeholders = Field(default_factory=dict)


def token_id_of(token: str | int) -> int | None:
    return VOCABULARY.get(token) if isinstance(token, str) else token if token < 100 else None


def step_of(path: str, call: Call) -> UserCall:
    return UserCall(call.call, call.python or "", path, "digest")


def resolve(
    plain: dict[str, Any],
    caps: dict = CAPS,
    known: dict | None = None,
    used: frozenset | None = None,
) -> tuple[tuple[MediaRule, ...], list[str]]:
    file = MediaFile.model_validate(plain)
    faults: list[Fault] = []
    if used is None:
        used = frozenset(name for name in MODALITIES if getattr(file, name) is not None)
    rules = resolve_media(file, used, token_id_of, caps, step_of, faults, known)
    for rule in rules:
        assert decode_plain(MediaRule, encode_plain(rule), "media") == rule
    return rules, [fault.line() for fault in faults]


def good(plain: dict[str, Any], **options: Any) -> tuple[MediaRule, ...]:
    rules, faults = resolve(plain, **options)
    assert faults == []
    return rules


def refused(plain: dict[str, Any]) -> list[str]:
    with pytest.raises(ValidationError) as error:
        MediaFile.model_validate(plain)
    return [fault.line() for _, fault in faults_of_validation(error.value, MediaFile)]


def test_the_vlm_example() -> None:
    (rule,) = good(
        {
            "image": [
                "decode",
                {"resize": "native", "max_pixels": 1003520, "multiple": 28},
                {"python": "venv/bin/python", "call": "ocrlab:jitter"},
                {"patchify": "qwen2_vl"},
            ]
        }
    )
    assert (rule.modality, rule.unit_values, rule.unit_dtype) == ("image", 1176, "uint8")
    assert (rule.placeholder_id, rule.begin_id, rule.end_id) == (5, 3, 4)
    assert (rule.row_units_max, rule.placeholder_tokens) == (65536, "")
    assert rule.step == UserCall("ocrlab:jitter", "venv/bin/python", "image.call", "digest")
    assert rule.image.pixels_max == 1 << 25
    assert rule.image.background == (255, 255, 255)
    resize, patches = rule.image.resize, rule.image.patches
    assert (resize.policy, resize.multiple, resize.pixels_min, resize.pixels_max) == (
        "native",
        28,
        3136,
        1003520,
    )
    assert (patches.patch, patches.temporal, patches.merge) == (14, 2, 2)
    assert patches.mean == (0.48145466, 0.4578275, 0.40821073)


def test_the_audio_example() -> None:
    (rule,) = good(
        {
            "audio": [
                {"resample": 16000},
                {"mel": {"bins": 128, "hop_ms": 10, "dtype": "float16"}},
            ],
            "placeholder": {"audio": "ceil(ceil(frames / 2) / 4)"},
        }
    )
    assert (rule.unit_values, rule.unit_dtype, rule.row_units_max) == (128, "float16", 48000)
    assert rule.placeholder_tokens == "ceil(ceil(frames / 2) / 4)"
    assert (rule.placeholder_id, rule.begin_id) == (9, None)
    assert rule.audio.rate == 16000
    assert rule.audio.mel == MelRule(bins=128)


def test_rules_stand_in_the_order_of_modalities() -> None:
    rules = good(
        {
            "audio": [
                {"decode": {"raw": {"format": "s16le", "rate": 8000}, "channels": "first"}},
                {"window": 30, "mode": "fit"},
                {"frames": {"samples": 320}},
            ],
            "video": [
                {"decode": {"max_seconds": 60}},
                {"sample": "count", "count": 8},
                {"resize": "fixed", "height": 224, "width": 224},
                {"patchify": "raster", "dtype": "float16"},
            ],
            "image": [
                {"decode": {"background": "black", "draft_gap": 0, "max_pixels": "16Mi"}},
                {"resize": "short_side", "side": 224, "crop": "random"},
                {"patchify": "navit", "patch": 14},
            ],
        }
    )
    assert [rule.modality for rule in rules] == ["image", "video", "audio"]
    image, video, audio = rules
    assert image.image.background == (0, 0, 0)
    assert (image.image.pixels_max, image.image.draft_gap) == (1 << 24, 0)
    assert image.unit_values == 588
    assert (video.video.sample, video.video.count, video.video.seconds_max) == ("count", 8, 60)
    assert (video.unit_values, video.unit_dtype) == (768, "float16")
    assert video.video.patches.mean == (0.5, 0.5, 0.5)
    assert (audio.audio.raw_format, audio.audio.raw_rate) == ("s16le", 8000)
    assert (audio.audio.window_s, audio.audio.window) == (30.0, "fit")
    assert (audio.unit_values, audio.unit_dtype) == (320, "float32")


def test_the_example_of_the_docs() -> None:
    text = (ROOT / "docs" / "media.md").read_text(encoding="utf-8")
    example = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    image, video, audio = good(example)
    assert image.image.draft_gap == 2
    assert image.image.pixels_max == 1 << 25
    assert video.video.frames_max == 64
    assert audio.audio.mel == MelRule(bins=128)


STEPS = {"image": [{"patchify": "raster"}]}


@pytest.mark.parametrize(
    ("given", "ids"),
    [
        (None, MediaIds(5, 3, 4)),
        ("<img>", MediaIds(11)),
        (42, MediaIds(42)),
        ({"token": "<img>", "begin": 1, "end": 2}, MediaIds(11, 1, 2)),
        ({"begin": 1}, MediaIds(5, 1, 4)),
        ("patches // 4", MediaIds(5, 3, 4)),
    ],
)
def test_placeholders(given: object, ids: MediaIds) -> None:
    plain = STEPS | ({"placeholder": {"image": given}} if given is not None else {})
    (rule,) = good(plain)
    assert MediaIds(rule.placeholder_id, rule.begin_id, rule.end_id) == ids
    assert rule.placeholder_tokens == ("patches // 4" if given == "patches // 4" else "")


def test_ids_of_the_model_go_before_known_tokens_and_after_given_ones() -> None:
    known = {"image": MediaIds(60, 61, 62)}
    (rule,) = good(STEPS, known=known)
    assert (rule.placeholder_id, rule.begin_id, rule.end_id) == (60, 61, 62)
    (rule,) = good(STEPS | {"placeholder": {"image": 42}}, known=known)
    assert (rule.placeholder_id, rule.begin_id) == (42, None)


NATIVE = {"resize": "native"}
QWEN = {"patchify": "qwen2_vl"}
CASES: list[tuple[dict, str]] = [
    ({"image": [NATIVE]}, 'image: (nothing): there is no patchify step; add it as the last one'),
    ({"image": [QWEN, NATIVE]}, 'image[1]: "resize": stands too late; the order is: decode, resize, call, patchify'),
    ({"image": [NATIVE, NATIVE, QWEN]}, 'image[1]: "resize": stands twice'),
    ({"image": [{"resize": "native", "multiple": 14}, QWEN]}, "image.resize.multiple: 14: is no multiple of patch * merge, 28; write 28"),
    ({"image": [{"resize": "fixed", "height": 224, "width": 100}, QWEN]}, "image.resize: 100: does not divide into patches of 28 pixels"),
    ({"image": [{"resize": "fixed", "height": 224}, QWEN]}, "image.resize.width: (nothing): resize fixed needs it; add it"),
    ({"image": [{"resize": "multiple", "side": 5}, QWEN]}, "image.resize.side: 5: is no key of resize multiple; remove it"),
    ({"image": [{"resize": "native", "min_pixels": 9, "max_pixels": 8}, QWEN]}, "image.resize.min_pixels: 9: is over max_pixels"),
    ({"image": [{"resize": "native", "max_pixels": 99999999}, QWEN]}, 'image.resize: "510204 patches": the largest image takes more patches than the 65536 of a row'),
    ({"image": [{"patchify": "raster", "mean": [0.0, 0.0, 0.0]}]}, "uint8 patches are not normalised"),
    ({"video": [{"sample": "count"}, QWEN]}, "video.sample.count: (nothing): sample count needs it"),
    ({"video": [{"sample": "keyframes", "fps": 2.0}, QWEN]}, "video.sample.fps: 2.0: is no key of sample keyframes"),
    ({"video": [{"sample": "count", "count": 4096}, {"resize": "fixed", "height": 224, "width": 224}, QWEN]}, 'video.resize: "524288 patches"'),
    ({"audio": ["mel"]}, "audio: (nothing): mel needs one rate; put {resample: 16000} before it"),
    ({"audio": [{"resample": 16000}]}, "audio: (nothing): there is no mel or frames step"),
    ({"audio": [{"resample": 16000}, {"mel": {"fmax": 9000.0}}]}, 'audio.mel.fmax: "0 to 9000 Hz": is no range of this rate'),
    ({"audio": [{"resample": 16000}, {"mel": {"fft": 256}}]}, "audio.mel.fft: 256: is shorter than the window's 400 samples"),
    (STEPS | {"placeholder": {"image": "<none>"}}, 'placeholder.image.token: "<none>": the tokenizer has no such token'),
    (STEPS | {"placeholder": {"image": {"begin": 5000}}}, "placeholder.image.begin: 5000: the tokenizer has no such token"),
    (STEPS | {"placeholder": {"audio": 3}}, 'placeholder.audio: "audio": no source has it; remove it'),
]  # fmt: skip


@pytest.mark.parametrize(("plain", "line"), CASES)
def test_faults_name_key_value_and_remedy(plain: dict, line: str) -> None:
    _, faults = resolve(plain)
    assert any(line in fault for fault in faults), faults


def test_what_sources_have_and_what_steps_say_belong_together() -> None:
    _, faults = resolve({}, used=frozenset({"image"}))
    assert faults[0].startswith("image: (nothing): sources have it, and no steps say")
    rules, faults = resolve(STEPS, used=frozenset())
    assert rules == ()
    assert faults == [
        'image: "1 steps": no source has it; name its field in a source, or remove image'
    ]


def test_a_batch_says_how_many_units_a_row_has() -> None:
    _, faults = resolve(STEPS, caps={})
    wanted = "(nothing): a job with image has to say how many patches a microbatch holds; add it"
    assert faults == [f"batch.microbatch_patches: {wanted}"]


def test_a_tokenizer_without_known_tokens_is_told() -> None:
    faults: list[Fault] = []
    file = MediaFile.model_validate(STEPS)
    resolve_media(file, frozenset({"image"}), lambda _: None, CAPS, step_of, faults)
    (fault,) = faults
    assert fault.line() == (
        "placeholder.image: (nothing): the tokenizer has none of <|image_pad|>, <image>, [IMG]; "
        "name a token, or an id"
    )


@pytest.mark.parametrize(
    ("plain", "line"),
    [
        (
            {"image": ["decod"]},
            'image[0]: "decod": is no step; write one of decode, resize, call, patchify',
        ),
        ({"image": [{"resize": "native", "call": "a:b"}]}, "is no step"),
        ({"image": [{"call": "foo"}]}, 'image[0].call: "foo": not module:function'),
        ({"image": []}, "image: []:"),
        ({"image": [{"resize": "nativ"}]}, "is none of 'none', 'fixed'"),
        ({"image": [{"resize": "native", "max_pixel": 3}]}, "max_pixel: 3: unknown key"),
        ({"image": [{"decode": {"background": "pink"}}]}, "background"),
        ({"image": [{"patchify": "raster", "std": [1.0, 0.0, 1.0]}]}, "a deviation is not above 0"),
        ({"audio": [{"mel": {"bins": 0}}]}, "bins: 0:"),
        ({"video": [{"sample": "all"}]}, "is none of 'fps', 'count' or 'keyframes'"),
        ({"placeholder": {"text": 3}}, "is none of 'image', 'video' or 'audio'"),
        ({"placeholder": {"audio": {"tokens": "os.system"}}}, "holds 'os.system'"),
        ({"placeholder": {"audio": True}}, "neither a token nor an id"),
    ],
)
def test_what_cannot_be_read_is_refused(plain: dict, line: str) -> None:
    faults = refused(plain)
    assert any(line in fault for fault in faults), faults


def test_the_schema_lists_every_step() -> None:
    text = str(MediaFile.model_json_schema())
    for key in ("patchify", "resample", "background", "max_source_frames", "draft_gap"):
        assert key in text
