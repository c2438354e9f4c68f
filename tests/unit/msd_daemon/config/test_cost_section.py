"""Cost factors of known models, and config files that can't give them."""

import json
from pathlib import Path

import pytest

from federation.model.job import CostSpec
from msd_daemon.config.cost_section import STEP_COST_MAX, resolve_cost, transformer_flops
from msd_daemon.config.job_file import ModelFile

GPT2 = {"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "model_type": "gpt2"}


def resolve(backbone, base_dir=Path(), row_tokens=1024, step_tokens=65536):
    faults = []
    model = ModelFile.model_validate({"backbone": backbone})
    return resolve_cost(model, base_dir, step_tokens, row_tokens, faults), [
        fault.line() for fault in faults
    ]


def test_gpt2_flops_are_two_per_weight_plus_attention():
    linear, quadratic = transformer_flops(
        {
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "vocab_size": 50257,
        },
        is_gated=False,
    )
    weights = 12 * (4 * 768 * 768 + 2 * 768 * 3072) + 768 * 50257
    assert linear == 2 * weights
    assert quadratic == 2 * 12 * 768


def test_grouped_heads_and_gated_layers_are_counted():
    shape = {
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 100,
    }
    linear, quadratic = transformer_flops(shape, is_gated=True)
    assert linear == 2 * (64 * 32 * (4 + 4 + 2 + 2) + 3 * 64 * 100)
    assert quadratic == 2 * 4 * 32


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
    assert from_file == written_out
    assert from_file.kind == "transformer"


def test_common_factor_is_removed():
    cost, _ = resolve({"hidden_size": 64, "num_hidden_layers": 2})
    doubled, _ = resolve({"hidden_size": 64, "num_hidden_layers": 4})
    assert cost == doubled


def test_sums_of_a_step_stay_in_63_bits():
    cost, _ = resolve(
        {"hidden_size": 16384, "num_hidden_layers": 127, "vocab_size": 151_937},
        row_tokens=1 << 24,
        step_tokens=1 << 34,
    )
    assert cost.quadratic >= 1
    assert (cost.linear + cost.quadratic * (1 << 24)) * (1 << 34) <= STEP_COST_MAX or (
        cost.quadratic == 1
    )


def test_without_a_model_tokens_count():
    assert resolve_cost(None, Path(), 1, 1, []) == CostSpec("tokens", 1, 0)


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
