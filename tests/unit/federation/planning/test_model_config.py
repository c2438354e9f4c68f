"""Shapes, parameter counts and FLOPs of public model families, from their config.json."""

from __future__ import annotations

import pytest

from federation.model.cost import SpanTerm, WindowTerm
from federation.planning.config_numbers import ShapeError
from federation.planning.costs import reduced_cost
from federation.planning.model_config import (
    audio_item_units,
    audio_shape,
    decoder_shape,
    encoder_sections,
    family_note,
    vision_shape,
)
from federation.planning.model_flops import (
    decoder_activations,
    decoder_cost,
    encoder_activations,
    encoder_cost,
)
from tests.support import model_configs as configs
from tests.support.model_configs import ENCODER_PARAMETERS, PARAMETERS


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_the_published_ones(name):
    config, published = PARAMETERS[name]
    assert abs(decoder_shape(config).parameters() / published - 1) < 0.01


@pytest.mark.parametrize("name", ENCODER_PARAMETERS)
def test_encoders_have_the_published_parameters(name):
    config, published = ENCODER_PARAMETERS[name]
    ((kind, section),) = encoder_sections(config).items()
    shape = (vision_shape if kind == "vision" else audio_shape)(section)
    assert abs(shape.parameters() / published - 1) < 0.01


@pytest.mark.parametrize(
    ("config", "published"),
    [
        (configs.MIXTRAL_8X7B, 12.9e9),
        (configs.QWEN3_30B_A3B, 3.35e9),
        (configs.DEEPSEEK_V2_LITE, 2.66e9),
        (configs.DEEPSEEK_V3, 37.55e9),
    ],
)
def test_a_token_meets_the_active_experts(config, published):
    shape = decoder_shape(config)
    assert abs(shape.active_parameters() / published - 1) < 0.01
    # 2 FLOPs for each weight but those of the embedding, which is looked up, and of norms.
    met = shape.active_parameters() - shape.hidden * (shape.vocabulary + 1)
    met -= 2 * shape.hidden * len(shape.layers)
    assert decoder_cost(shape).linear == 2 * met


def test_gpt2_flops_by_hand():
    cost = decoder_cost(decoder_shape(configs.GPT2))
    assert cost.linear == 2 * (12 * 12 * 768**2 + 768 * 50_257)
    assert cost.quadratic == 2 * 12 * 768
    assert not cost.windowed


def test_grouped_heads_and_gated_layers_by_hand():
    cost = decoder_cost(decoder_shape(configs.LLAMA31_8B))
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    assert cost.linear == 2 * (32 * layer + 4096 * 128_256)
    assert cost.quadratic == 32 * 32 * (128 + 128)


def test_latent_attention_by_hand():
    cost = decoder_cost(decoder_shape(configs.DEEPSEEK_V3))
    assert cost.quadratic == 61 * 128 * (192 + 128)
    shape = decoder_shape(configs.DEEPSEEK_V3).layers[0].attention
    by_hand = 7168 * 1536 + 1536 * 128 * 192 + 7168 * (512 + 64)
    by_hand += 512 * 128 * (128 + 128) + 128 * 128 * 7168
    assert shape.weights(7168) == by_hand


@pytest.mark.parametrize(
    ("config", "full", "windowed"),
    [
        (configs.MISTRAL_7B, 0, {4096: 32}),
        (configs.MIXTRAL_8X7B, 32, {}),
        (configs.PHI3_MINI, 0, {2047: 32}),
        (configs.GEMMA2_9B, 21, {4096: 21}),
        (configs.GEMMA3_4B, 5, {1024: 29}),
        (configs.GEMMA3_1B, 4, {512: 22}),
        (configs.QWEN2_7B, 28, {}),
        (
            configs.QWEN2_7B | {"use_sliding_window": True, "max_window_layers": 21},
            21,
            {131_072: 7},
        ),
        (
            configs.QWEN3_8B
            | {
                "num_hidden_layers": 3,
                "sliding_window": 128,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            1,
            {128: 2},
        ),
        (
            configs.LLAMA31_8B
            | {
                "num_hidden_layers": 2,
                "attention_chunk_size": 8192,
                "layer_types": ["chunked_attention", "full_attention"],
            },
            1,
            {8192: 1},
        ),
    ],
)
def test_windows_lie_where_the_family_has_them(config, full, windowed):
    shape = decoder_shape(config)
    cost = decoder_cost(shape)
    pair = shape.layers[0].attention.pair_flops
    assert cost.quadratic == full * pair
    assert cost.windowed == tuple(WindowTerm(w, n * pair) for w, n in sorted(windowed.items()))


def test_qwen25_windows_by_hand():
    shape = vision_shape(configs.QWEN25_VL_7B["vision_config"])
    cost = encoder_cost(shape, "image", 4096)
    layer = 4 * 1280**2 + 3 * 1280 * 3420
    patch = 3 * 2 * 14 * 14 * 1280
    merger = 5120 * 5120 + 5120 * 3584
    assert cost.linear == 2 * (patch + 32 * layer) + 2 * merger // 4
    # Both ways, 2 FLOPs for a channel of key and of value: 4 * 1280 a pair and layer.
    assert cost.spans == (SpanTerm(64, 28 * 4 * 1280), SpanTerm(4096, 4 * 4 * 1280))
    assert encoder_cost(shape, "image", 16).spans == (SpanTerm(16, 32 * 4 * 1280),)


def test_whisper_counts_frames_before_the_stride():
    config = configs.WHISPER_LARGE_V3
    cost = encoder_cost(audio_shape(config), "audio", audio_item_units(config))
    layer = 4 * 1280**2 + 2 * 1280 * 5120
    convolutions = 3 * 128 * 1280 + 3 * 1280 * 1280 // 2
    assert cost.linear == 2 * convolutions + 32 * layer  # a layer's position is two frames
    assert cost.spans == (SpanTerm(3000, 32 * 4 * 1280 // 4),)


def test_a_plain_vit_is_projected_to_the_backbone():
    section = configs.CLIP_VIT_L14["vision_config"]
    alone, joined = vision_shape(section), vision_shape(section, 4096)
    assert joined.parameters() - alone.parameters() == 1024 * 4096
    difference = (
        encoder_cost(joined, "image", 256).linear - encoder_cost(alone, "image", 256).linear
    )
    assert difference == 2 * 1024 * 4096


def test_a_common_divisor_is_taken_out_of_backbone_and_encoder_together():
    cost = decoder_cost(decoder_shape(configs.GPT2))
    reduced = reduced_cost(cost)
    assert reduced.linear * cost.quadratic == reduced.quadratic * cost.linear
    assert reduced.linear < cost.linear


def test_activations_of_gpt_are_the_papers():
    gpt3 = {
        "model_type": "gpt2", "n_embd": 12_288, "n_layer": 96, "n_head": 96, "vocab_size": 51_200,
        "resid_pdrop": 0.1, "activation_function": "gelu_new",
    }  # fmt: skip
    shape = decoder_shape(gpt3)
    output = 4 * 12_288 + 4 * 51_200
    assert decoder_activations(shape) == 96 * 34 * 12_288 + output
    recomputed = decoder_activations(shape, is_recomputed=True)
    assert recomputed == 96 * 2 * 12_288 + 34 * 12_288 + output


def test_activations_of_other_shapes_by_hand():
    layer = 2 * (4 * 4096 + 32 * 256 + 8 * 256 + 4 * 14336)
    shape = decoder_shape(configs.LLAMA31_8B)
    assert decoder_activations(shape) == 32 * layer + 4 * 4096 + 4 * 128_256
    expert = 2 * (4 * 4096 + 32 * 256 + 8 * 256 + 2 * 4 * 14336 + 2 * 4096 + 8)
    shape = decoder_shape(configs.MIXTRAL_8X7B)
    assert decoder_activations(shape) == 32 * expert + 4 * 4096 + 4 * 32_000
    whisper = audio_shape(configs.WHISPER_LARGE_V3)
    layer = 2 * (4 * 1280 + 4 * 1280 + 2 * 5120)
    assert encoder_activations(whisper) == 32 * layer // 2 + 2 * 1280


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"num_attention_heads": "32"}, "num_attention_heads"),
        ({"num_hidden_layers": 1 << 20}, "num_hidden_layers"),
        ({"num_experts": 8}, "num_experts_per_tok"),
        ({"num_experts": 8, "num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"kv_lora_rank": 512}, "qk_rope_head_dim"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["mamba"] * 32}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 32}, "sliding_window"),
    ],
)
def test_what_cannot_be_known_is_named(changes, key):
    with pytest.raises(ShapeError) as caught:
        decoder_shape(configs.LLAMA31_8B | changes)
    assert [gap.key for gap in caught.value.gaps] == [key]
    assert all(gap.problem and gap.remedy for gap in caught.value.gaps)


def test_gaps_of_encoders_are_named():
    with pytest.raises(ShapeError) as caught:
        vision_shape({"patch_size": 14, "hidden_size": 1024})
    assert [gap.key for gap in caught.value.gaps] == ["num_hidden_layers", "num_attention_heads"]
    with pytest.raises(ShapeError) as caught:
        audio_shape({"encoder_layers": 4, "d_model": 8, "encoder_attention_heads": 2})
    assert [gap.key for gap in caught.value.gaps] == ["num_mel_bins"]


def without(config, *keys):
    return {key: value for key, value in config.items() if key not in keys}


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_family_tells_whether_the_mlp_is_gated(name):
    config, published = PARAMETERS[name]
    shape = decoder_shape(without(config, "hidden_act", "activation_function"))
    assert abs(shape.parameters() / published - 1) < 0.01


def test_an_unknown_family_has_to_tell_its_activation():
    config = configs.LLAMA31_8B | {"model_type": "zzz"}
    assert decoder_shape(config) == decoder_shape(configs.LLAMA31_8B)
    assert "'zzz'" in family_note(config)
    assert family_note(configs.LLAMA31_8B) is None
    assert family_note(without(config, "model_type")) is None
    for bare in (without(config, "hidden_act"), without(config, "hidden_act", "model_type")):
        with pytest.raises(ShapeError, match=r"hidden_act: None.*gated: true or false"):
            decoder_shape(bare)
        assert decoder_shape(bare, is_gated=True) == decoder_shape(configs.LLAMA31_8B)


def test_a_text_part_without_a_family_has_the_whole_models():
    text = without(configs.GEMMA3_4B["text_config"], "model_type")
    whole = configs.GEMMA3_4B | {"text_config": text}
    assert decoder_shape(whole) == decoder_shape(configs.GEMMA3_4B)


@pytest.mark.parametrize("config", [configs.LLAMA31_8B, configs.GPT_NEOX_20B])
def test_a_width_is_assumed_only_where_the_class_does(config):
    with pytest.raises(ShapeError) as caught:
        decoder_shape(without(config, "intermediate_size"))
    assert [(gap.key, gap.value) for gap in caught.value.gaps] == [("intermediate_size", None)]
    wide = decoder_shape(configs.GPT2 | {"n_inner": None}).layers[0].feed_forward.inner
    assert wide == 4 * 768
    experts = without(configs.QWEN3_30B_A3B, "intermediate_size")
    assert decoder_shape(experts) == decoder_shape(configs.QWEN3_30B_A3B)


@pytest.mark.parametrize(
    "family", ["mamba", "mamba2", "rwkv", "falcon_mamba", "jamba", "recurrent_gemma", "qwen3_next"]
)
def test_families_without_attention_are_refused(family):
    with pytest.raises(ShapeError) as caught:
        decoder_shape(configs.LLAMA31_8B | {"model_type": family})
    (gap,) = caught.value.gaps
    assert (gap.key, gap.value) == ("model_type", family)
    assert "model.backbone" in gap.remedy


def test_listed_layers_tell_that_all_have_attention():
    changes = {"model_type": "granitemoehybrid", "layer_types": ["attention"] * 32}
    assert decoder_shape(configs.LLAMA31_8B | changes) == decoder_shape(configs.LLAMA31_8B)


@pytest.mark.parametrize("value", [-5, "big", float("nan"), 1e12, 1024.5, True, 0, [1], 1 << 40])
@pytest.mark.parametrize(
    "key", ["hidden_size", "num_hidden_layers", "vocab_size", "head_dim", "num_key_value_heads"]
)
def test_a_wrong_number_is_shown_and_never_taken_as_absent(key, value):
    with pytest.raises(ShapeError) as caught:
        decoder_shape(configs.LLAMA31_8B | {key: value})
    (gap,) = caught.value.gaps
    assert (gap.key, gap.value) == (key, value)
    assert gap.problem.startswith("must be an integer of 1 or more")


@pytest.mark.parametrize(
    ("changes", "key", "says"),
    [
        ({"sliding_window": "a"}, "sliding_window", "must be an integer of 0 or more"),
        ({"sliding_window": -3}, "sliding_window", "must be an integer of 0 or more"),
        ({"num_key_value_heads": 64}, "num_key_value_heads", "must divide num_attention_heads"),
        ({"num_key_value_heads": 7}, "num_key_value_heads", "must divide num_attention_heads"),
        ({"num_attention_heads": 7, "num_key_value_heads": 7, "hidden_size": 1024},
         "num_attention_heads", "must divide hidden_size, which is 1024"),
        ({"hidden_act": 5, "model_type": "zzz"}, "hidden_act", "must be a string"),
        ({"intermediate_size": [4, 4]}, "intermediate_size", "must be an integer of 1 or more"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(changes, key, says):
    with pytest.raises(ShapeError) as caught:
        decoder_shape(configs.LLAMA31_8B | changes)
    (gap,) = caught.value.gaps
    assert (gap.key, gap.value) == (key, changes[key])
    assert says in gap.problem


def test_a_heads_width_may_be_any_where_it_is_written():
    changes = {"num_attention_heads": 7, "num_key_value_heads": 7, "head_dim": 100}
    assert decoder_shape(configs.LLAMA31_8B | changes).layers[0].attention.key_width == 100


def test_all_wrong_numbers_are_told_at_once_by_the_files_spelling():
    with pytest.raises(ShapeError) as caught:
        decoder_shape({"model_type": "gpt2", "n_embd": -1, "n_layer": "x"})
    found = [(gap.key, gap.value) for gap in caught.value.gaps]
    assert found == [("n_embd", -1), ("n_layer", "x"), ("num_attention_heads", None)]
    with pytest.raises(ShapeError, match="depth: 0: must be an integer of 1 or more"):
        vision_shape({"patch_size": 14, "hidden_size": 64, "depth": 0, "num_heads": 4})
