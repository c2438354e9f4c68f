"""Reads the shapes of a model out of a Hugging Face `config.json`, whatever its family calls them.

Where a family's configs leave a number out because its class has a default, the default stands in
`_CLASS_DEFAULTS`. A number that can't be known is a gap that names the key and what to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from federation.planning.config_numbers import (
    REMEDY,
    Config,
    Gap,
    ShapeError,
    needed_numbers,
    number_of,
    usable_number,
)
from federation.planning.model_families import (
    FOURFOLD_FAMILIES,
    is_gated_family,
    is_known,
    plain_name,
    refuse_mixers,
)
from federation.planning.model_flops import (
    Attention,
    DecoderShape,
    EncoderShape,
    FeedForward,
    Layer,
)

EncoderKind = Literal["vision", "audio"]

LAYERS_MAX = 1 << 12

# The same number is spelt differently from model to model.
_SPELLINGS = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads"),
    "num_key_value_heads": ("num_key_value_heads", "multi_query_group_num", "num_kv_heads"),
    "head_dim": ("head_dim", "kv_channels"),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim"),
    "vocab_size": ("vocab_size", "padded_vocab_size"),
    "sliding_window": ("sliding_window",),
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "num_experts_per_tok": ("num_experts_per_tok", "num_experts_per_token"),
    "moe_intermediate_size": ("moe_intermediate_size",),
}

_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads")
_MAY_BE_ZERO = ("sliding_window", "num_experts", "num_experts_per_tok", "moe_intermediate_size")
"""Configs write 0 for none."""
_EVERY_SECOND = ("gemma2",)
"""Of these, layers 0, 2, 4 ... have the window, where the config lists no layers."""
_GEMMA3 = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
_CLASS_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": _GEMMA3 | {"vocab_size": 262_208, "sliding_window_pattern": 6},
    "gemma3": _GEMMA3 | {"vocab_size": 262_208, "sliding_window_pattern": 6},
    "cohere2": {"sliding_window_pattern": 4},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
}
_TEXT_SECTIONS = ("text_config", "llm_config", "language_config")
_FULL_LAYERS = ("full_attention", "attention")
_WINDOW_LAYERS = ("sliding_attention", "chunked_attention")


def spellings_of(key: str) -> tuple[str, ...]:
    """Return all spellings of a decoder's key."""
    return _SPELLINGS.get(key, (key,))


def text_section(config: Config) -> Config:
    """Return the part of a config that describes the language model."""
    if isinstance(config.get("thinker_config"), Mapping):
        config = config["thinker_config"]
    for name in _TEXT_SECTIONS:
        section = config.get(name)
        if isinstance(section, Mapping):
            outer = {"tie_word_embeddings": config.get("tie_word_embeddings", True)}
            if "model_type" in config:
                outer["model_type"] = config["model_type"]
            return {**outer, **section}
    return config


def decoder_shape(config: Config, *, is_gated: bool | None = None) -> DecoderShape:
    """Return the shape of a language model.

    Args:
        config: A whole config.json; of one with several parts, the language model's is taken.
        is_gated: Whether the MLP has three matrices; None: as the family has it.

    Raises:
        ShapeError: A number is missing or wrong, or a family or a kind of layer has no attention.
    """
    config = text_section(config)
    family = str(config.get("model_type") or "")
    refuse_mixers(config, family)
    config = {**_CLASS_DEFAULTS.get(family, {}), **config}
    numbers = _numbers(config)
    hidden, count = numbers["hidden_size"], numbers["num_hidden_layers"]
    matrices = 3 if (is_gated_family(config, family) if is_gated is None else is_gated) else 2
    attention = _attention(config, numbers)
    windows = _windows(config, family, count)
    experts = _experts(config, numbers, matrices)
    sparse = _sparse_layers(config, count) if experts else frozenset()
    dense = experts
    if experts is None or len(sparse) < count:
        dense = FeedForward(_width(family, numbers), matrices)
    assert dense is not None
    return DecoderShape(
        hidden,
        numbers["vocab_size"],
        tuple(
            Layer(attention, experts if experts and layer in sparse else dense, windows[layer])
            for layer in range(count)
        ),
        is_tied=config.get("tie_word_embeddings", True) is not False,
        positions=number_of(config, ("n_positions",)) if family == "gpt2" else 0,
        has_dropout=any(
            isinstance(config.get(key), float) and config[key] > 0
            for key in ("resid_pdrop", "hidden_dropout", "resid_dropout")
        ),
    )


def family_note(config: Config) -> str | None:
    """Return what to tell of a config whose family is not known here; None where it is, or none."""
    family = str(text_section(config).get("model_type") or "")
    if not family or is_known(family):
        return None
    return f"the family {family!r} is not known: costed as a plain transformer of these numbers"


def _numbers(config: Config) -> dict[str, int]:
    """Return the decoder's counts, 0 for those left out; all that are wrong are told at once."""
    numbers: dict[str, int] = {}
    gaps: list[Gap] = []
    for key, spellings in _SPELLINGS.items():
        try:
            numbers[key] = number_of(config, spellings, 0 if key in _MAY_BE_ZERO else 1)
        except ShapeError as error:
            gaps += error.gaps
            continue
        if key in _NEEDED and not numbers[key]:
            gaps.append(Gap(key, None, "is needed for the cost", REMEDY))
        if key == "num_hidden_layers" and numbers[key] > LAYERS_MAX:
            gaps.append(Gap(key, numbers[key], f"is above {LAYERS_MAX}", "lower it"))
    if gaps:
        raise ShapeError(gaps)
    return numbers


def _width(family: str, numbers: Mapping[str, int]) -> int:
    """Return the width of a dense MLP."""
    if numbers["intermediate_size"]:
        return numbers["intermediate_size"]
    if plain_name(family) in FOURFOLD_FAMILIES:
        return 4 * numbers["hidden_size"]
    problem = "the width of the MLP is needed for the cost"
    raise ShapeError([Gap("intermediate_size", None, problem, REMEDY)])


def _attention(config: Config, numbers: Mapping[str, int]) -> Attention:
    heads = numbers["num_attention_heads"]
    kv_rank = number_of(config, ("kv_lora_rank",))
    if kv_rank:
        rope = _needed(config, "qk_rope_head_dim")
        key_width = _needed(config, "qk_nope_head_dim") + rope
        query_rank = number_of(config, ("q_lora_rank",))
        value_width = _needed(config, "v_head_dim")
        return Attention(heads, heads, key_width, value_width, query_rank, kv_rank, rope)
    kv_heads = numbers["num_key_value_heads"] or heads
    if config.get("multi_query") is True and not config.get("new_decoder_architecture"):
        kv_heads = 1
    if heads % kv_heads:
        key = _spelling_in(config, "num_key_value_heads")
        problem = f"must divide num_attention_heads, which is {heads}"
        raise ShapeError([Gap(key, kv_heads, problem, "correct one of them")])
    hidden = numbers["hidden_size"]
    if not numbers["head_dim"] and hidden % heads:
        key = _spelling_in(config, "num_attention_heads")
        problem = f"must divide hidden_size, which is {hidden}, where there is no head_dim"
        raise ShapeError([Gap(key, heads, problem, "correct it, or add head_dim")])
    width = numbers["head_dim"] or hidden // heads
    return Attention(heads, kv_heads, width, width)


def _spelling_in(config: Config, key: str) -> str:
    """Return how a config spells a key."""
    return next((name for name in _SPELLINGS[key] if config.get(name) is not None), key)


def _needed(config: Config, key: str, why: str = "is needed for the cost") -> int:
    return needed_numbers(config, {key: (key,)}, why)[key]


def _experts(config: Config, numbers: Mapping[str, int], matrices: int) -> FeedForward | None:
    count = numbers["num_experts"]
    if count < 2:
        return None
    active = numbers["num_experts_per_tok"]
    if not 0 < active <= count:
        problem = f"has to say how many of the {count} experts a token goes through"
        raise ShapeError([Gap("num_experts_per_tok", active or None, problem, REMEDY)])
    inner = numbers["moe_intermediate_size"] or numbers["intermediate_size"]
    if not inner:
        problem = "the width of an expert is needed for the cost"
        raise ShapeError([Gap("moe_intermediate_size", None, problem, REMEDY)])
    shared = number_of(config, ("shared_expert_intermediate_size",))
    shared = shared or inner * number_of(config, ("n_shared_experts",))
    return FeedForward(inner, matrices, count, active, shared)


def _sparse_layers(config: Config, count: int) -> frozenset[int]:
    """Return the layers that have experts; all where the config says nothing.

    By first_k_dense_replace and moe_layer_freq (DeepSeek), by decoder_sparse_step and
    mlp_only_layers (Qwen).
    """
    first = number_of(config, ("first_k_dense_replace",))
    every = number_of(config, ("moe_layer_freq",)) or 1
    step = number_of(config, ("decoder_sparse_step",)) or 1
    dense = config.get("mlp_only_layers")
    dense = dense if isinstance(dense, list) else []
    return frozenset(
        layer
        for layer in range(count)
        if layer >= first and layer % every == 0 and (layer + 1) % step == 0 and layer not in dense
    )


def _windows(config: Config, family: str, count: int) -> list[int]:
    """Return the window of each layer, 0 for none."""
    window = number_of(config, _SPELLINGS["sliding_window"])
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        return _windows_of_kinds(config, kinds, window, count)
    if not window or config.get("use_sliding_window") is False:
        return [0] * count
    if family.startswith(_EVERY_SECOND):
        return [0 if layer % 2 else window for layer in range(count)]
    pattern = number_of(config, ("sliding_window_pattern", "_sliding_window_pattern"))
    if pattern:
        return [window if (layer + 1) % pattern else 0 for layer in range(count)]
    # Qwen2: the first max_window_layers have none.
    first = number_of(config, ("max_window_layers",))
    first = first if config.get("use_sliding_window") is True else 0
    return [window if layer >= first else 0 for layer in range(count)]


def _windows_of_kinds(config: Config, kinds: list[Any], window: int, count: int) -> list[int]:
    if len(kinds) < count:
        problem = f"lists {len(kinds)} layers of {count}"
        raise ShapeError([Gap("layer_types", kinds, problem, "list all, or remove it")])
    found = []
    for kind in kinds[:count]:
        if kind in _FULL_LAYERS:
            found.append(0)
            continue
        if kind not in _WINDOW_LAYERS:
            known = ", ".join(_FULL_LAYERS + _WINDOW_LAYERS)
            problem = f"the cost of this kind of layer is not known, there are {known}"
            remedy = "write the numbers out under model.backbone in place of config"
            raise ShapeError([Gap("layer_types", kind, problem, remedy)])
        key = "sliding_window" if kind == "sliding_attention" else "attention_chunk_size"
        found.append(
            window
            if key == "sliding_window" and window
            else _needed(
                config, key, "layer_types has windows, their length is needed for the cost"
            )
        )
    return found


# -- encoders --------------------------------------------------------------------------------------

_ENCODER_WHY = "is needed for the cost of the encoder"
_VISION_NUMBERS = {
    "hidden_size": ("embed_dim", "hidden_size"),
    "num_hidden_layers": ("depth", "num_hidden_layers"),
    "num_attention_heads": ("num_heads", "num_attention_heads"),
    "patch_size": ("patch_size",),
}
_AUDIO_NUMBERS = {
    "d_model": ("d_model", "hidden_size"),
    "encoder_layers": ("encoder_layers", "num_hidden_layers"),
    "encoder_attention_heads": ("encoder_attention_heads", "num_attention_heads"),
    "num_mel_bins": ("num_mel_bins",),
}


def encoder_sections(config: Config) -> dict[EncoderKind, Config]:
    """Return the encoders that a config describes: of a whole model, or an encoder's own config."""
    if isinstance(config.get("thinker_config"), Mapping):
        config = config["thinker_config"]
    found: dict[EncoderKind, Config] = {}
    kinds: tuple[EncoderKind, ...] = ("vision", "audio")
    for kind in kinds:
        section = config.get(f"{kind}_config")
        if isinstance(section, Mapping):
            found[kind] = section
    if found:
        return found
    if "encoder_layers" in config:
        return {"audio": config}
    return {"vision": config} if "patch_size" in config else {}


def vision_shape(config: Config, output: int = 0) -> EncoderShape:
    """Return the shape of a ViT: CLIP and SigLIP, Qwen2-VL, Qwen2.5-VL with its window blocks.

    Args:
        config: Its own config, or the `vision_config` of a whole one.
        output: Channels of the backbone's tokens; 0: no projector but the config's own.

    Raises:
        ShapeError: A number is missing.
    """
    hidden, count, heads, patch = needed_numbers(config, _VISION_NUMBERS, _ENCODER_WHY).values()
    ratio = config.get("mlp_ratio")
    inner = usable_number(config, ("intermediate_size",))
    if not inner:
        inner = int(hidden * ratio) if isinstance(ratio, (int, float)) and ratio > 0 else 4 * hidden
    is_gated = "fullatt_block_indexes" in config or config.get("hidden_act") in ("silu", "swish")
    attention = Attention(heads, heads, max(1, hidden // heads), max(1, hidden // heads))
    mlp = FeedForward(inner, 3 if is_gated else 2)
    channels = usable_number(config, ("in_channels", "in_chans", "num_channels")) or 3
    frames = usable_number(config, ("temporal_patch_size",)) or 1
    windows = _vision_windows(config, count, patch)
    side = usable_number(config, ("spatial_merge_size",))
    own = usable_number(config, ("out_hidden_size",)) or (
        usable_number(config, ("hidden_size",)) if "embed_dim" in config else 0
    )
    if side:
        # Qwen's merger: all patches of a token side by side, two matrices.
        merged = hidden * side * side
        merge_units, merge_weights = side * side, merged * (merged + (own or output or hidden))
    else:
        merge_units, merge_weights = 1, hidden * output
    pixels = usable_number(config, ("image_size",))
    return EncoderShape(
        hidden,
        tuple(Layer(attention, mlp, windows[layer]) for layer in range(count)),
        channels * frames * patch * patch * hidden,
        merge_units=merge_units,
        merge_weights=merge_weights,
        learned_positions=0 if side else (pixels // patch) ** 2,
    )


def _vision_windows(config: Config, count: int, patch: int) -> list[int]:
    window = usable_number(config, ("window_size",))
    full = config.get("fullatt_block_indexes")
    if not window or not isinstance(full, list):
        return [0] * count
    units = max(1, window // patch) ** 2
    return [0 if layer in full else units for layer in range(count)]


def audio_shape(config: Config, output: int = 0) -> EncoderShape:
    """Return the shape of a Whisper-like encoder.

    It has two convolutions of width 3, the second of stride 2, then layers.

    Args:
        config: Its own config, or the `audio_config` of a whole one.
        output: Channels of the backbone's tokens; 0: no projector.

    Raises:
        ShapeError: A number is missing.
    """
    hidden, count, heads, bins = needed_numbers(config, _AUDIO_NUMBERS, _ENCODER_WHY).values()
    inner = usable_number(config, ("encoder_ffn_dim", "intermediate_size")) or 4 * hidden
    width = max(1, hidden // heads)
    layer = Layer(Attention(heads, heads, width, width), FeedForward(inner, 2))
    first, second = 3 * bins * hidden, 3 * hidden * hidden
    return EncoderShape(
        hidden,
        (layer,) * count,
        first + second // 2,
        position_units=2,
        merge_weights=hidden * output,
        first_weights=first + second,
        learned_positions=usable_number(config, ("max_source_positions",)),
    )


def audio_item_units(config: Config) -> int:
    """Return the frames that attend to each other at most; 0 where the config does not say."""
    return 2 * usable_number(config, ("max_source_positions",))
