"""What the classes of public model families have where a config.json doesn't say it.

By the configuration and modelling files of Hugging Face's transformers. Names are `model_type`s.
"""

from __future__ import annotations

from federation.planning.config_numbers import Config, Gap, ShapeError

_ACTIVATIONS = ("hidden_act", "activation_function", "hidden_activation")
_PLAIN_ACTIVATIONS = ("gelu", "gelu_new", "gelu_fast", "relu")


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


GATED_FAMILIES = _names(
    """
    aria baichuan bitnet chameleon chatglm code_llama cohere cohere2 cohere2_moe csm deepseek
    deepseek_v2 deepseek_v3 deepseek_v32 deepseek_vl diffllama doge dots1 emu3 ernie4_5
    ernie4_5_moe exaone4 exaone_moe flex_olmo gemma gemma2 gemma3 gemma3n glm glm4 glm4_moe
    glm4_moe_lite glm4v glm4v_moe gpt_oss granite granitemoe granitemoehybrid granitemoeshared
    helium hunyuan_v1_dense hunyuan_v1_moe idefics2 idefics3 internlm internlm2 internlm3
    internvl_chat jetmoe kimi_k2 lfm2 lfm2_moe llama llama4 llava llava_next llava_onevision
    minicpm minimax minimax_m2 ministral ministral3 mistral mistral3 mistral4 mixtral mllama mt5
    olmo olmo2 olmo3 olmo_hybrid olmoe paligemma phi3 phi3_v phi4_multimodal phimoe pixtral qwen2
    qwen2_5_omni qwen2_5_vl qwen2_audio qwen2_moe qwen2_vl qwen3 qwen3_5 qwen3_5_moe qwen3_moe
    qwen3_next qwen3_omni_moe qwen3_vl qwen3_vl_moe seed_oss smollm3 smolvlm stablelm t5 t5gemma
    umt5 vaultgemma yi
    """
)
"""Their MLP has three matrices, whatever the activation."""

PLAIN_FAMILIES = _names(
    """
    apertus arcee biogpt bloom codegen ctrl falcon gpt2 gpt-sw3 gpt_bigcode gpt_neo gpt_neox
    gpt_neox_japanese gptj mpt nemotron openai-gpt opt persimmon phi starcoder2 xglm
    """
)
"""Their MLP has two matrices, whatever the activation."""

FOURFOLD_FAMILIES = _names(
    """
    bloom codegen falcon gpt2 gpt-sw3 gpt_bigcode gpt_neo gpt_neox_japanese gptj mpt openai-gpt
    """
)
"""Their MLP is four times as wide as the hidden state where the config does not say it."""

OTHER_MIXERS = _names(
    """
    bamba bailing_hybrid falcon_h1 falcon_mamba hyena jamba kimi_linear mamba mamba2 nemotron_h
    plamo2 recurrent_gemma retnet rwkv rwkv5 rwkv6 rwkv6qwen2 rwkv7 stripedhyena xlstm zamba zamba2
    """
)
"""Layers of these have, all or some, no attention: their cost is not known."""

LISTED_MIXERS = _names(
    "granitemoehybrid lfm2 lfm2_moe minimax olmo_hybrid qwen3_5 qwen3_5_moe qwen3_next"
)
"""Only `layer_types` tells which layers of these have attention."""


def plain_name(family: str) -> str:
    """Return a `model_type` without what marks it as the text part of a larger model."""
    return family.removesuffix("_model").removesuffix("_text")


def is_known(family: str) -> bool:
    """Whether a family's class is known here."""
    return plain_name(family) in GATED_FAMILIES | PLAIN_FAMILIES


def refuse_mixers(config: Config, family: str) -> None:
    """Refuse a config of a family whose layers aren't all attention, or not known to be.

    Raises:
        ShapeError: It is of such a family.
    """
    name = plain_name(family)
    if name in OTHER_MIXERS:
        problem = "has layers without attention, whose cost is not known"
    elif name in LISTED_MIXERS and not isinstance(config.get("layer_types"), list):
        problem = "has layers without attention, and no layer_types tells which"
    else:
        return
    remedy = "write the numbers of a like transformer under model.backbone in place of config"
    raise ShapeError([Gap("model_type", family, problem, remedy)])


def is_gated_family(config: Config, family: str) -> bool:
    """Whether the MLP has three matrices: by the family, by the activation where it's not known.

    Raises:
        ShapeError: Neither tells.
    """
    name = plain_name(family)
    if name in GATED_FAMILIES or name in PLAIN_FAMILIES:
        return name in GATED_FAMILIES
    for key in _ACTIVATIONS:
        activation = config.get(key)
        if isinstance(activation, str):
            return activation not in _PLAIN_ACTIVATIONS
        if activation is not None:
            raise ShapeError([Gap(key, activation, "must be a string", "correct it")])
    whose = f"the family {family!r} is not known" if family else "no model_type tells the family"
    problem = f"is needed to know whether the MLP has two matrices or three: {whose}"
    remedy = "add it, or write gated: true or false under model.backbone"
    raise ShapeError([Gap("hidden_act", None, problem, remedy)])
