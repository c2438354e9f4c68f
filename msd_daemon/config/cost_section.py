"""Turns the shape of a transformer into the integer cost of a segment.

Costs steer placement only, so a common factor does not matter: the two integers are reduced by
their greatest common divisor, and shifted down where a step's sum could leave 63 bits.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from federation.model.job import CostSpec
from msd_daemon.config.faults import Fault
from msd_daemon.config.job_file import BackboneFile, ModelFile

CONFIG_BYTES_MAX = 1 << 20
STEP_COST_MAX = 1 << 60

# Hugging Face config.json spells the same number differently from model to model.
_SPELLINGS = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads"),
    "num_key_value_heads": ("num_key_value_heads", "multi_query_group_num"),
    "head_dim": ("head_dim", "kv_channels"),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_hidden_size"),
    "vocab_size": ("vocab_size", "padded_vocab_size"),
}
_PLAIN_ACTIVATIONS = ("gelu", "gelu_new", "gelu_fast", "relu")
_GATED_FAMILIES = ("gemma", "t5", "mt5")


def resolve_cost(
    model: ModelFile | None, base_dir: Path, step_tokens: int, row_tokens: int, faults: list[Fault]
) -> CostSpec:
    """Return the cost of a segment; without a model every token costs the same.

    Args:
        model: The section of the job.
        base_dir: Folder that a relative `config` path starts from.
        step_tokens: Tokens of a step, bounds the sum of costs.
        row_tokens: Longest segment.
        faults: Receives what is wrong; the result is then of no use.
    """
    if model is None:
        return CostSpec()
    backbone, path = model.backbone, "model.backbone"
    shape: dict[str, Any] = backbone.model_dump(exclude={"config", "gated"}, exclude_none=True)
    is_gated = backbone.gated
    if backbone.config is not None:
        found = _read_config(base_dir / backbone.config, f"{path}.config", backbone, faults)
        if found is None:
            return CostSpec()
        shape = found | shape
        if "gated" not in backbone.model_fields_set:
            is_gated = bool(found["gated"])
    missing = [key for key in ("hidden_size", "num_hidden_layers") if key not in shape]
    if missing:
        faults += [
            Fault(f"{path}.{key}", None, "is needed for the cost", "add it") for key in missing
        ]
        return CostSpec()
    linear, quadratic = transformer_flops(shape, is_gated=is_gated)
    return _bounded(linear, quadratic, step_tokens, row_tokens)


def transformer_flops(shape: dict[str, Any], *, is_gated: bool) -> tuple[int, int]:
    """Return forward FLOPs as (linear, quadratic) factors of a causal segment of n tokens.

    Per layer and token 2 FLOPs a weight of the projections and the MLP; attention adds
    2 * 2 * n * n / 2 * heads * head size; the output layer 2 * hidden * vocabulary a token.
    """
    hidden = int(shape["hidden_size"])
    layers = int(shape["num_hidden_layers"])
    heads = int(shape.get("num_attention_heads", max(1, hidden // 64)))
    kv_heads = int(shape.get("num_key_value_heads", heads))
    head_dim = int(shape.get("head_dim", max(1, hidden // heads)))
    inner = int(shape.get("intermediate_size", 4 * hidden))
    projections = hidden * head_dim * (2 * heads + 2 * kv_heads)
    mlp = (3 if is_gated else 2) * hidden * inner
    linear = 2 * layers * (projections + mlp) + 2 * hidden * int(shape.get("vocab_size", 0))
    return linear, 2 * layers * heads * head_dim


def _bounded(linear: int, quadratic: int, step_tokens: int, row_tokens: int) -> CostSpec:
    common = math.gcd(linear, quadratic)
    linear, quadratic = linear // common, quadratic // common
    while (linear + quadratic * row_tokens) * step_tokens > STEP_COST_MAX:
        linear, quadratic = max(1, linear >> 1), max(1, quadratic >> 1)
    return CostSpec("transformer", linear, quadratic)


def _read_config(
    file: Path, path: str, backbone: BackboneFile, faults: list[Fault]
) -> dict[str, Any] | None:
    try:
        with file.open("rb") as opened:
            data = json.loads(opened.read(CONFIG_BYTES_MAX))
    except (OSError, ValueError, RecursionError) as error:
        problem = getattr(error, "strerror", None) or "not JSON"
        faults.append(
            Fault(path, backbone.config, f"{file}: {problem}", "give a model's config.json")
        )
        return None
    if isinstance(data, dict) and isinstance(data.get("text_config"), dict):
        data = data["text_config"]
    if not isinstance(data, dict):
        faults.append(
            Fault(path, backbone.config, "not a JSON object", "give a model's config.json")
        )
        return None
    shape: dict[str, Any] = {}
    for key, spellings in _SPELLINGS.items():
        for spelling in spellings:
            value = data.get(spelling)
            if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 31:
                shape[key] = value
                break
    activation = data.get("hidden_act") or data.get("activation_function") or "gelu"
    family = str(data.get("model_type", ""))
    shape["gated"] = activation not in _PLAIN_ACTIVATIONS or family.startswith(_GATED_FAMILIES)
    return shape
