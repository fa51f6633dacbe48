"""The estimate of a capture's memory against what a process really takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import llama_config, make_model, mla_config, stored_tensors, write_checkpoint

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux")

PEAK = """
import ctypes, gc, json, re, sys
from pathlib import Path
import torch

def of(field):
    return int(re.search(rf"{field}:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

def peak_of(run):
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what the allocator keeps would hide what comes
    Path("/proc/self/clear_refs").write_text("5")
    before = of("VmRSS")
    run()
    return of("VmHWM") - before
"""

CAPTURE = (
    PEAK
    + """
from transformers import DeepseekV3Config, LlamaConfig
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as mla
from transformers.models.llama import modeling_llama as gqa
from helpers import memory
from helpers.capture import capture_attention
from helpers.layer import AttentionLayer, LoadReport

kind, n, memory.PART_BYTES = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
if kind == "mla":
    config = DeepseekV3Config(
        hidden_size=1024, num_attention_heads=16, num_key_value_heads=16, q_lora_rank=256, kv_lora_rank=128,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    module, rotary = mla.DeepseekV3Attention(config, 0), mla.DeepseekV3RotaryEmbedding(config)
else:
    config = LlamaConfig(hidden_size=2048, num_attention_heads=32, num_key_value_heads=8)
    module, rotary = gqa.LlamaAttention(config, 0), gqa.LlamaRotaryEmbedding(config)
config._attn_implementation = "sdpa"
layer = AttentionLayer(module.bfloat16().requires_grad_(False), config, 0, LoadReport({}, []), rotary)
hidden_states = torch.randn(1, n, config.hidden_size).bfloat16()
capture_attention(layer, hidden_states[:, :64])
measured = peak_of(lambda: capture_attention(layer, hidden_states))
estimate = memory.capture_bytes(module, config.num_attention_heads, 1, n, torch.bfloat16)
print(json.dumps({"measured": measured, "estimate": estimate}))
"""
)

LAYERS_BELOW = (
    PEAK
    + """
from helpers import memory
from helpers.checkpoint import Checkpoint
from helpers.inputs import text_hidden_states
from helpers.layer import skeleton

ckpt, n = Checkpoint.open(Path(sys.argv[1])), int(sys.argv[2])
text_hidden_states(ckpt, 1, [[1] * 64], torch.bfloat16, "cpu")
measured = peak_of(lambda: text_hidden_states(ckpt, 1, [[1] * n], torch.bfloat16, "cpu"))
estimate = memory.decoder_layer_bytes(skeleton(ckpt, 1).layers[0], ckpt.config, n, torch.bfloat16)
print(json.dumps({"measured": measured, "estimate": estimate}))
"""
)


@pytest.mark.parametrize(
    ("kind", "n_tokens", "part_bytes"),
    [("mla", 6000, 2**30), ("mla", 6000, 2**25), ("gqa", 6000, 2**30)],
    ids=["latent, all heads at once", "latent, few heads at a time", "grouped"],
)
def test_the_estimate_is_near_what_is_taken_and_seldom_below(kind: str, n_tokens: int, part_bytes: int) -> None:
    check_estimate(CAPTURE, kind, str(n_tokens), str(part_bytes))


@pytest.mark.parametrize("family", ["mla", "gqa"])
def test_a_layer_below_takes_what_is_estimated_and_never_the_matrix(tmp_path: Path, family: str) -> None:
    """16 heads over 5,000 tokens: one matrix in BF16 is 0.8 GB."""
    sizes: dict[str, Any] = {
        "vocab_size": 8, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2,
        "num_attention_heads": 16, "max_position_embeddings": 8192, "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    latent = {
        "num_key_value_heads": 16, "q_lora_rank": 128, "kv_lora_rank": 64, "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32, "v_head_dim": 64, "first_k_dense_replace": 2,
    }  # fmt: skip
    config = mla_config(1.0, **sizes, **latent) if family == "mla" else llama_config(**sizes, num_key_value_heads=4)
    folder = write_checkpoint(tmp_path / "below", config, stored_tensors(make_model(config).bfloat16()))
    found = check_estimate(LAYERS_BELOW, str(folder), "5000")
    assert found["measured"] < 4e8


def check_estimate(script: str, *arguments: str) -> dict[str, int]:
    command = [sys.executable, "-c", script, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, int] = json.loads(result.stdout.splitlines()[-1])
    assert found["measured"] <= 1.1 * found["estimate"], found
    assert found["estimate"] <= 2.5 * found["measured"], found
    return found
