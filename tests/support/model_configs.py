"""Key values of public Hugging Face configs, written out, and published parameter counts."""

from __future__ import annotations

from typing import Any


def _llama_like(**changes: Any) -> dict[str, Any]:
    base = {
        "model_type": "llama", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    }  # fmt: skip
    return base | changes


LLAMA31_8B = _llama_like(vocab_size=128_256)
LLAMA31_70B = _llama_like(
    hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
    vocab_size=128_256,
)  # fmt: skip
MISTRAL_7B = _llama_like(model_type="mistral", vocab_size=32_000, sliding_window=4096)
MIXTRAL_8X7B = _llama_like(
    model_type="mixtral", vocab_size=32_000, num_local_experts=8, num_experts_per_tok=2,
    sliding_window=None,
)  # fmt: skip
QWEN2_7B = {
    "model_type": "qwen2", "hidden_act": "silu", "hidden_size": 3584, "intermediate_size": 18944,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
    "vocab_size": 152_064, "sliding_window": 131_072, "use_sliding_window": False,
    "max_window_layers": 28, "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_8B = {
    "model_type": "qwen3", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151_936, "sliding_window": None, "use_sliding_window": False,
    "max_window_layers": 36, "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe", "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 151_936,
    "tie_word_embeddings": False,
}  # fmt: skip
DEEPSEEK_V2_LITE = {
    "model_type": "deepseek_v2", "hidden_act": "silu", "hidden_size": 2048,
    "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27,
    "num_attention_heads": 16, "num_key_value_heads": 16, "n_routed_experts": 64,
    "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1,
    "moe_layer_freq": 1, "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 102_400, "tie_word_embeddings": False,
}  # fmt: skip
DEEPSEEK_V3 = DEEPSEEK_V2_LITE | {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "first_k_dense_replace": 3, "q_lora_rank": 1536,
    "vocab_size": 129_280,
}  # fmt: skip
GEMMA2_9B = {
    "model_type": "gemma2", "hidden_act": "gelu_pytorch_tanh", "hidden_size": 3584,
    "intermediate_size": 14336, "num_hidden_layers": 42, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 256, "vocab_size": 256_000, "sliding_window": 4096,
}  # fmt: skip
GEMMA3_4B = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240,
        "num_hidden_layers": 34, "sliding_window": 1024,
    },
    "vision_config": {
        "model_type": "siglip_vision_model", "hidden_size": 1152, "image_size": 896,
        "intermediate_size": 4304, "num_attention_heads": 16, "num_hidden_layers": 27,
        "patch_size": 14, "vision_use_head": False,
    },
}  # fmt: skip
GEMMA3_1B = {
    "model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912,
    "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
    "vocab_size": 262_144, "sliding_window": 512, "sliding_window_pattern": 6,
}  # fmt: skip
PHI3_MINI = {
    "model_type": "phi3", "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 8192,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
    "vocab_size": 32_064, "sliding_window": 2047, "resid_pdrop": 0.0, "tie_word_embeddings": False,
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2", "activation_function": "gelu_new", "n_embd": 768, "n_layer": 12,
    "n_head": 12, "n_positions": 1024, "vocab_size": 50_257, "resid_pdrop": 0.1,
}  # fmt: skip
GPT_NEOX_20B = {
    "model_type": "gpt_neox", "hidden_act": "gelu_fast", "hidden_size": 6144,
    "intermediate_size": 24576, "num_hidden_layers": 44, "num_attention_heads": 64,
    "vocab_size": 50_432, "tie_word_embeddings": False,
}  # fmt: skip
FALCON_7B = {
    "model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71,
    "num_kv_heads": 71, "multi_query": True, "new_decoder_architecture": False,
    "parallel_attn": True, "vocab_size": 65_024,
}  # fmt: skip
FALCON_40B = FALCON_7B | {
    "hidden_size": 8192, "num_hidden_layers": 60, "num_attention_heads": 128, "num_kv_heads": 8,
    "new_decoder_architecture": True,
}  # fmt: skip
OLMO_7B = _llama_like(
    model_type="olmo", intermediate_size=11008, num_key_value_heads=32, vocab_size=50_304
)
QWEN2_VL_7B = QWEN2_7B | {
    "model_type": "qwen2_vl",
    "vision_config": {
        "depth": 32, "embed_dim": 1280, "hidden_size": 3584, "in_chans": 3, "mlp_ratio": 4,
        "num_heads": 16, "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14,
        "temporal_patch_size": 2,
    },
}  # fmt: skip
QWEN25_VL_7B = QWEN2_7B | {
    "model_type": "qwen2_5_vl",
    "vision_config": {
        "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420,
        "num_heads": 16, "in_chans": 3, "out_hidden_size": 3584, "patch_size": 14,
        "spatial_merge_size": 2, "spatial_patch_size": 14, "temporal_patch_size": 2,
        "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
    },
}  # fmt: skip
CLIP_VIT_L14 = {
    "model_type": "clip",
    "text_config": {"hidden_size": 768},
    "vision_config": {
        "hidden_size": 1024, "image_size": 224, "intermediate_size": 4096,
        "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14,
    },
}  # fmt: skip
WHISPER_LARGE_V3 = {
    "model_type": "whisper", "d_model": 1280, "encoder_layers": 32, "encoder_ffn_dim": 5120,
    "encoder_attention_heads": 20, "num_mel_bins": 128, "max_source_positions": 1500,
    "num_hidden_layers": 32,
}  # fmt: skip

PARAMETERS: dict[str, tuple[dict[str, Any], int]] = {
    "llama 3.1 8B": (LLAMA31_8B, 8_030_261_248),
    "llama 3.1 70B": (LLAMA31_70B, 70_553_706_496),
    "mistral 7B": (MISTRAL_7B, 7_241_732_096),
    "mixtral 8x7B": (MIXTRAL_8X7B, 46_702_792_704),
    "qwen2 7B": (QWEN2_7B, 7_615_616_512),
    "qwen3 8B": (QWEN3_8B, 8_190_735_360),
    "qwen3 30B-A3B": (QWEN3_30B_A3B, 30_532_122_624),
    "deepseek v2 lite": (DEEPSEEK_V2_LITE, 15_706_484_224),
    "deepseek v3": (DEEPSEEK_V3, 671_026_419_200),
    "gemma 2 9B": (GEMMA2_9B, 9_241_705_984),
    "gemma 3 4B": (GEMMA3_4B, 3_880_263_168),
    "gemma 3 1B": (GEMMA3_1B, 999_885_952),
    "phi 3 mini": (PHI3_MINI, 3_821_079_552),
    "gpt2": (GPT2, 124_439_808),
    "gpt-neox 20B": (GPT_NEOX_20B, 20_554_567_680),
    "falcon 7B": (FALCON_7B, 6_921_720_704),
    "falcon 40B": (FALCON_40B, 41_303_293_952),
    "olmo 7B": (OLMO_7B, 6_888_095_744),
    "qwen2-vl 7B": (QWEN2_VL_7B, 7_615_616_512),
}
"""Parameters of the language model, as the model cards and safetensors headers have them."""

ENCODER_PARAMETERS: dict[str, tuple[dict[str, Any], int]] = {
    "qwen2-vl": (QWEN2_VL_7B, 675_759_104),
    "qwen2.5-vl": (QWEN25_VL_7B, 676_550_144),
    "clip vit-l/14": (CLIP_VIT_L14, 303_179_776),
    "siglip so400m/14 at 896": (GEMMA3_4B, 417_000_000),
    "whisper large v3": (WHISPER_LARGE_V3, 637_000_000),
}
"""Of the encoder, with its merger where it has one."""
