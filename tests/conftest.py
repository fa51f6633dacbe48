"""Shared by the tests: tiny checkpoints with random weights, written as the published ones are laid out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig, PreTrainedConfig


def yarn(factor: float) -> dict[str, object]:
    """Kimi K2.6's YaRN settings with another factor."""
    return {
        "rope_type": "yarn", "factor": factor, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "rope_theta": 50000.0,
    }  # fmt: skip


def mla_config(factor: float = 64.0, **changes: object) -> DeepseekV3Config:
    """A small DeepSeek-V3: MLA in every layer, layer 0 dense, the others with routed and shared experts."""
    rope = yarn(factor) if factor != 1 else {"rope_type": "default", "rope_theta": 50000.0}
    settings: dict[str, object] = {
        "vocab_size": 200, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "n_shared_experts": 1,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
        "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12,
        "max_position_embeddings": 512, "rope_parameters": rope,
        "initializer_range": 0.2, "pad_token_id": None, "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    return DeepseekV3Config(**(settings | changes))


def llama_config(**changes: object) -> LlamaConfig:
    """A small Llama with grouped queries: 6 query heads, 2 key-value heads."""
    settings: dict[str, object] = {
        "vocab_size": 200, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 6,
        "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.2, "bos_token_id": 0,
        "eos_token_id": 1,
    }  # fmt: skip
    return LlamaConfig(**(settings | changes))


def make_model(config: PreTrainedConfig, seed: int = 0) -> torch.nn.Module:
    """transformers' full model with seeded random float32 weights; routing biases are not left at zero."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.1)
    return model


def stored_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The model's tensors under published names: routed experts each on its own, not fused."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(tensor):
                gate, up = both.chunk(2)
                tensors[name.replace("gate_up_proj", f"{expert}.gate_proj.weight")] = gate.contiguous()
                tensors[name.replace("gate_up_proj", f"{expert}.up_proj.weight")] = up.contiguous()
        elif name.endswith("experts.down_proj"):
            for expert, down in enumerate(tensor):
                tensors[name.replace("down_proj", f"{expert}.down_proj.weight")] = down.contiguous()
        else:
            tensors[name] = tensor.contiguous()
    return tensors


def write_checkpoint(
    folder: Path,
    config: PreTrainedConfig,
    tensors: dict[str, torch.Tensor],
    *,
    nested: bool = False,
    n_shards: int = 0,
    shard_name: Callable[[int, int], str] = lambda i, n: f"model-{i + 1:05d}-of-{n:06d}.safetensors",
) -> Path:
    """Write a checkpoint folder.

    ``nested``: config under ``text_config`` and keys under ``language_model.``, as Kimi K2.6. ``n_shards`` 0: one
    ``model.safetensors`` without an index.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = config.to_dict()
    if nested:
        tensors = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
        text["model_type"] = "kimi_k2" if text["model_type"] == "deepseek_v3" else text["model_type"]
        raw = {"model_type": "kimi_k25", "text_config": text}
    else:
        raw = text
    (folder / "config.json").write_text(json.dumps(raw))
    if n_shards == 0:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {}
    for i in range(n_shards):
        shard = shard_name(i, n_shards)
        part = dict(list(tensors.items())[i::n_shards])
        save_file(part, folder / shard)
        weight_map |= dict.fromkeys(part, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


@pytest.fixture(scope="session")
def mla_model() -> torch.nn.Module:
    return make_model(mla_config())


@pytest.fixture
def mla_checkpoint(tmp_path: Path, mla_model: torch.nn.Module) -> Path:
    """A small Kimi K2.6: nested config, ``language_model.`` keys, three shards. A fresh copy, free to be damaged."""
    return write_checkpoint(
        tmp_path / "small-kimi", mla_model.config, stored_tensors(mla_model), nested=True, n_shards=3
    )


@pytest.fixture
def llama_checkpoint(tmp_path: Path) -> Path:
    """A small Llama in one file, flat config."""
    model = make_model(llama_config())
    return write_checkpoint(tmp_path / "small-llama", model.config, stored_tensors(model))
