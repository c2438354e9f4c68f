"""Cost factors of a job's model, and config files that can't give them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from federation.model.cost import CostSpec
from federation.model.media import AudioRule, ImageRule, MediaRule, MelRule, PatchRule, ResizeRule
from federation.planning.costs import factors_of
from msd_daemon.config.cost_section import (
    STEP_COST_MAX,
    StepBounds,
    resolve_cost,
    typical_item_units,
)
from msd_daemon.config.job_file import ModelFile
from tests.support.model_configs import (
    CLIP_VIT_L14,
    GPT2,
    LLAMA31_8B,
    QWEN25_VL_7B,
    WHISPER_LARGE_V3,
)

IMAGES = MediaRule(
    "image", 1176, "float32", 65_536, 5,
    image=ImageRule(
        resize=ResizeRule("max_pixels", multiple=28, pixels_max=1_003_520),
        patches=PatchRule("qwen2_vl", 14, 2, 2),
    ),
)  # fmt: skip
SOUNDS = MediaRule(
    "audio", 128, "float16", 48_000, 6, audio=AudioRule(window_s=20.0, mel=MelRule(128))
)


def resolve(backbone, base_dir=Path(), row_tokens=1024, rows=64, media=(), **keys):
    faults = []
    model = ModelFile.model_validate({"backbone": backbone, **keys})
    bounds = StepBounds(rows, row_tokens)
    return resolve_cost(model, base_dir, bounds, media, faults), [fault.line() for fault in faults]


def ratio(cost):
    return cost.linear / cost.quadratic


def test_a_backbone_that_is_written_out_by_hand():
    cost, faults = resolve(
        {
            "hidden_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "intermediate_size": 100,
        }
    )
    assert not faults
    linear = 2 * (64 * 32 * (4 + 4 + 2 + 2) + 3 * 64 * 100)
    assert ratio(cost) == linear / (2 * 4 * 32)
    windows, _ = resolve({"hidden_size": 64, "num_hidden_layers": 2, "sliding_window": 100})
    assert not windows.quadratic
    assert [term.window_tokens for term in windows.windowed] == [100]
    experts, _ = resolve(
        {
            "hidden_size": 64,
            "num_hidden_layers": 1,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 50,
        }
    )
    assert ratio(experts) == 2 * (4 * 64 * 64 + 2 * 3 * 64 * 50 + 64 * 8) / (2 * 64)


def test_config_file_is_read_with_its_own_spelling(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    from_file, faults = resolve("config.json", tmp_path)
    written_out, _ = resolve(
        {
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "vocab_size": 50257,
            "gated": False,
        }
    )
    assert not faults
    assert factors_of(from_file) == factors_of(written_out)
    assert from_file.kind == "transformer"


def test_common_factor_is_removed():
    cost, _ = resolve({"hidden_size": 64, "num_hidden_layers": 2})
    doubled, _ = resolve({"hidden_size": 64, "num_hidden_layers": 4})
    assert factors_of(cost) == factors_of(doubled)


def test_sums_of_a_step_stay_in_bounds():
    cost, _ = resolve(
        {"hidden_size": 16384, "num_hidden_layers": 127, "vocab_size": 151_937},
        row_tokens=1 << 24,
        rows=1 << 10,
    )
    assert cost.quadratic >= 1
    assert (cost.linear + cost.quadratic * (1 << 24)) * (1 << 34) <= STEP_COST_MAX or (
        cost.quadratic == 1
    )


def test_without_a_model_tokens_count():
    assert resolve_cost(None, Path(), StepBounds(1, 1), (), []) == CostSpec("tokens", 1, 0)


def test_the_backbones_own_encoder_is_taken_in_its_unit(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN25_VL_7B))
    cost, faults = resolve("config.json", tmp_path, media=(IMAGES,))
    assert not faults
    (encoder,) = cost.encoders
    # 1,003,520 pixels are 5,120 patches of 14 x 14.
    assert [span.span_units for span in encoder.spans] == [64, 5120]
    layer = 4 * 1280**2 + 3 * 1280 * 3420
    merger = 5120 * 5120 + 5120 * 3584
    patch = 2 * (3 * 2 * 14 * 14 * 1280 + 32 * layer) + 2 * merger // 4
    backbone = 2 * 28 * (2 * 3584**2 + 2 * 3584 * 512 + 3 * 3584 * 18_944) + 2 * 3584 * 152_064
    assert encoder.linear / cost.linear == pytest.approx(patch / backbone)
    assert cost.activations.image > 0 == cost.activations.audio
    without, _ = resolve("config.json", tmp_path)
    assert not without.encoders
    assert ratio(without) == ratio(cost)


def test_encoders_are_named_once_or_by_modality(tmp_path):
    for name, config in {"b": GPT2, "v": CLIP_VIT_L14, "a": WHISPER_LARGE_V3}.items():
        (tmp_path / name).write_text(json.dumps(config))
    one, faults = resolve("b", tmp_path, media=(IMAGES,), encoder="v")
    assert not faults
    assert [encoder.modality for encoder in one.encoders] == ["image"]
    two, faults = resolve(
        "b", tmp_path, media=(IMAGES, SOUNDS), encoder={"image": "v", "audio": "a"},
        item_units={"image": 256},
    )  # fmt: skip
    assert not faults
    assert [encoder.modality for encoder in two.encoders] == ["image", "audio"]
    assert two.encoders[0].spans[0].span_units == 256
    assert two.encoders[1].spans[0].span_units == 2000  # 20 s of 10 ms, under Whisper's 3,000
    _, (line,) = resolve("b", tmp_path, media=(SOUNDS,), encoder="v")
    assert line.startswith('model.encoder: "v": it describes no audio encoder')
    (tmp_path / "v").write_text(json.dumps({"patch_size": 14}))
    _, lines = resolve("b", tmp_path, media=(IMAGES,), encoder={"image": "v"})
    assert [line.split(":")[0] for line in lines] == [
        "model.encoder.image.hidden_size",
        "model.encoder.image.num_hidden_layers",
        "model.encoder.image.num_attention_heads",
    ]


def test_typical_items_follow_the_resize_limits():
    fixed = ImageRule(resize=ResizeRule("fixed", height=224, width=448), patches=PatchRule())
    assert typical_item_units(replace(IMAGES, image=fixed)) == 14 * 28
    cut = ImageRule(resize=ResizeRule("short_side", side=224, crop="center"), patches=PatchRule())
    assert typical_item_units(replace(IMAGES, image=cut)) == 14 * 14
    assert typical_item_units(replace(IMAGES, row_units_max=100)) == 100
    assert typical_item_units(replace(SOUNDS, audio=AudioRule(frame_samples=160))) == 48_000


def test_recomputation_keeps_less(tmp_path):
    (tmp_path / "c").write_text(json.dumps(GPT2))
    kept, _ = resolve("c", tmp_path)
    recomputed, _ = resolve("c", tmp_path, recompute="full")
    assert recomputed.activations.token < kept.activations.token
    assert factors_of(recomputed) == factors_of(kept)


def test_written_keys_win_over_the_files_spelling(tmp_path):
    (tmp_path / "c").write_text(json.dumps(GPT2))
    fewer, faults = resolve({"config": "c", "num_hidden_layers": 6, "hidden_size": 768}, tmp_path)
    assert not faults
    assert ratio(fewer) == (2 * 6 * 12 * 768**2 + 2 * 768 * 50_257) / (2 * 6 * 768)


@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b'{"a": ' * 9999])
def test_damaged_config_is_a_fault(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    _, (line,) = resolve("config.json", tmp_path)
    assert line.startswith("model.backbone.config: ")


def test_missing_config_and_missing_sizes_are_faults(tmp_path):
    _, (line,) = resolve("nothing.json", tmp_path)
    assert "No such file" in line
    _, lines = resolve({"vocab_size": 5})
    assert [line.split(":")[0] for line in lines] == [
        "model.backbone.hidden_size",
        "model.backbone.num_hidden_layers",
    ]


def test_wrong_values_of_a_file_are_shown(tmp_path):
    (tmp_path / "c").write_text(json.dumps(LLAMA31_8B | {"hidden_size": -5}))
    _, (line,) = resolve("c", tmp_path)
    assert line == "model.backbone.hidden_size: -5: must be an integer of 1 or more; correct it"
    cost, faults = resolve({"config": "c", "hidden_size": 4096}, tmp_path)
    assert not faults
    (tmp_path / "c").write_text(json.dumps(LLAMA31_8B))
    assert factors_of(cost) == factors_of(resolve("c", tmp_path)[0])


def test_an_unknown_family_is_noted_and_asked_whether_it_is_gated(tmp_path):
    (tmp_path / "c").write_text(json.dumps(LLAMA31_8B | {"model_type": "zzz"}))
    notes = []
    model = ModelFile.model_validate({"backbone": "c"})
    resolve_cost(model, tmp_path, StepBounds(1, 64), (), [], notes)
    (note,) = notes
    assert note.startswith(
        "model.backbone.config: the family 'zzz' is not known: costed as a plain"
    )
    bare = LLAMA31_8B | {"model_type": "zzz", "hidden_act": None}
    (tmp_path / "c").write_text(json.dumps(bare))
    _, (line,) = resolve("c", tmp_path)
    assert line.startswith("model.backbone.hidden_act: (nothing): ")
    assert not resolve({"config": "c", "gated": True}, tmp_path)[1]


def test_heads_that_are_not_written_out_need_not_divide():
    cost, faults = resolve({"hidden_size": 200, "num_hidden_layers": 1})
    assert not faults
    # 3 heads of 66 channels.
    assert ratio(cost) == 2 * (4 * 200 * 3 * 66 + 3 * 200 * 800) / (2 * 3 * 66)
