"""A checkpoint of Kimi K2.6's exact shapes and names with random weights, so that the demo's geometry runs anywhere.

Configuration, names and shapes are those of moonshotai/Kimi-K2.6 on the Hugging Face hub: layer 0, the first of 64
shards, keys under ``language_model.model.``.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tqdm import tqdm

from helpers.checkpoint import INDEX, ORIGIN
from helpers.files import atomic_folder

CONFIG = Path(__file__).with_name("kimi_k26_config.json")
SHARD = "model-00001-of-000064.safetensors"
LAYER = "language_model.model.layers.0."

ATTENTION_AND_NORMS: dict[str, tuple[int, ...]] = {
    "input_layernorm.weight": (7168,),
    "post_attention_layernorm.weight": (7168,),
    "self_attn.kv_a_layernorm.weight": (512,),
    "self_attn.kv_a_proj_with_mqa.weight": (576, 7168),
    "self_attn.kv_b_proj.weight": (16384, 512),
    "self_attn.o_proj.weight": (7168, 8192),
    "self_attn.q_a_layernorm.weight": (1536,),
    "self_attn.q_a_proj.weight": (1536, 7168),
    "self_attn.q_b_proj.weight": (12288, 1536),
}
FEED_FORWARD: dict[str, tuple[int, ...]] = {
    "mlp.down_proj.weight": (7168, 18432),
    "mlp.gate_proj.weight": (18432, 7168),
    "mlp.up_proj.weight": (18432, 7168),
}


def write_kimi_shaped(folder: Path, seed: int = 0, full: bool = False) -> None:
    """Write layer 0 of Kimi K2.6 with seeded random weights: 202 MB, or all of its 12 tensors (995 MB) if ``full``.

    Matrices are normal with the standard deviation of the config's ``initializer_range`` (0.02), norms are one, as
    transformers initialises the module; BF16.
    """
    config = json.loads(CONFIG.read_text())
    std = config["text_config"]["initializer_range"]
    shapes = ATTENTION_AND_NORMS | (FEED_FORWARD if full else {})
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in tqdm(shapes.items(), desc="Drawing random weights", unit="tensor"):
        if len(shape) == 1:
            tensors[LAYER + name] = torch.ones(shape, dtype=torch.bfloat16)
        else:
            tensors[LAYER + name] = (torch.randn(shape, generator=generator) * std).bfloat16()
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict.fromkeys(tensors, SHARD)}
    origin = {"weights": f"RANDOM weights of Kimi K2.6's shapes (normal, standard deviation {std}, seed {seed})"}
    with atomic_folder(folder) as partial:
        save_file(tensors, partial / SHARD)
        (partial / "config.json").write_text(CONFIG.read_text())
        (partial / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        (partial / ORIGIN).write_text(json.dumps(origin, indent=2) + "\n")
