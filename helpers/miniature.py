"""A miniature Kimi: DeepSeek-V3's architecture with every part of it, scaled down, and stored as Kimi K2.6 is.

Multi-head latent attention in every layer, YaRN, a dense layer 0 and mixture-of-experts layers with a shared expert and
sigmoid routing with a correction bias. :mod:`helpers.training` trains it.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from tokenizers import Regex, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as HuggingFaceTokenizer
from torch import nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from helpers.checkpoint import INDEX, ORIGIN, text_config
from helpers.kimi_shaped import CONFIG
from helpers.quantization import pack_int4, quantize_int4
from helpers.tokenizer import BYTE_OF, KIMI_PATTERN, TIKTOKEN_MODEL

N_RANKS, N_SPECIAL = 4096, 256  # Kimi's special tokens are the 256 ids behind the ranks
BOS, EOS, PAD = N_RANKS, N_RANKS + 1, N_RANKS + N_SPECIAL - 1
ARCHITECTURE: dict[str, Any] = {
    "vocab_size": N_RANKS + N_SPECIAL, "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD,
    "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 8,
    "q_lora_rank": 96, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
    "intermediate_size": 768, "moe_intermediate_size": 192, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "routed_scaling_factor": 2.0, "max_position_embeddings": 4096,
}  # fmt: skip
YARN: dict[str, Any] = {"factor": 4.0, "original_max_position_embeddings": 1024}
PREFIX = "language_model."
# where training begins: see new_model
EMBEDDING_STD, HEAD_STD, SMALL = 0.25, 0.06, 0.05
QUERY_LIKE_KEY, OUTPUT_LIKE_VALUE = 0.5, 0.7
KEY_START, QUERY_START, OTHER_START, FASTEST = 1.7, 10.0, 0.3, 3


def config_json() -> dict[str, Any]:
    """``config.json`` of the miniature: Kimi K2.6's, with the sizes of :data:`ARCHITECTURE` and no vision tower."""
    config = json.loads(CONFIG.read_text())
    text = config["text_config"] | ARCHITECTURE
    text["rope_scaling"] = text["rope_scaling"] | YARN
    outer = {key: config[key] for key in ("architectures", "model_type", "tie_word_embeddings")}
    return outer | {key: text[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")} | {"text_config": text}


def model_config() -> DeepseekV3Config:
    """The same as a transformers config, without the quantisation of the stored files."""
    config = text_config(config_json(), "the miniature")
    del config.quantization_config
    return cast(DeepseekV3Config, config)


def new_model(seed: int) -> DeepseekV3ForCausalLM:
    """Make the model in float32 with random weights, of which a few start where training would take them late.

    Matrices are normal with standard deviation 1/√inputs; those that write to the residual stream begin small, but for
    layer 0's attention. Embeddings are normal around a vector that all tokens share, and the output head starts as a
    smaller copy of what sets them apart. In every layer attention begins with a leaning to tokens like the own one
    (:func:`_mimic`), but for half of layer 0's heads, which begin with the token before
    (:func:`_look_at_the_token_before`). These starts are meant to help it learn to copy: a head finds what stood behind
    an earlier occurrence by the token before it. What each contributes was not measured apart.
    """
    torch.manual_seed(seed)
    model = DeepseekV3ForCausalLM(model_config())
    for name, weight in model.named_parameters():
        if weight.ndim > 1:
            small = name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")) and ".0.self_attn." not in name
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5 * (SMALL if small else 1))
    apart, shared = torch.randn_like(model.lm_head.weight), torch.randn(model.config.hidden_size)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(EMBEDDING_STD * (apart + shared))
        model.lm_head.weight.copy_(HEAD_STD * apart)
        for layer in model.model.layers:
            _mimic(layer.self_attn)
        _look_at_the_token_before(model, shared)
    return model


def _mimic(attention: Any) -> None:
    """Mimetic initialisation (arXiv:2305.09828) of latent attention: query · key and output · value near an identity.

    Queries' latents begin as keys' latents and more; a head's query matrix shares a part of its key's, and its output
    matrix is, in part, the transpose of what makes its values.
    """
    rank, nope, head_dim = attention.kv_lora_rank, attention.qk_nope_head_dim, attention.qk_head_dim
    down, output = attention.kv_a_proj_with_mqa.weight[:rank], attention.o_proj.weight
    down.copy_(attention.q_a_proj.weight[:rank])
    queries = attention.q_b_proj.weight.view(attention.num_heads, head_dim, -1)
    key_values = attention.kv_b_proj.weight.view(attention.num_heads, -1, rank)
    outputs = output.view(len(output), attention.num_heads, -1).transpose(0, 1)
    std = output.std()
    for query, key_value, out in zip(queries, key_values, outputs, strict=True):
        query[:nope] *= (1 - QUERY_LIKE_KEY**2) ** 0.5
        query[:nope, :rank] += QUERY_LIKE_KEY * key_value[:nope]
        values = key_value[nope:] @ down  # [v_head_dim, hidden_size]
        out *= (1 - OUTPUT_LIKE_VALUE**2) ** 0.5
        out += OUTPUT_LIKE_VALUE * std * (values / values.std()).T


def _look_at_the_token_before(model: DeepseekV3ForCausalLM, shared: torch.Tensor) -> None:
    """Let the first half of layer 0's heads attend to the position before, by the rotary parts of queries and keys.

    What all tokens ``shared`` gives every key the rotary part 1 in each pair of coordinates, and every query of these
    heads exp(-iω) in the fastest three pairs: rotated to positions t and s, their product is largest for t - s = 1.
    """
    attention: Any = model.model.layers[0].self_attn
    n_heads, n_nope, rank = attention.num_heads, attention.qk_nope_head_dim, attention.kv_lora_rank
    frequency = model.model.rotary_emb.inv_freq
    pairs = len(frequency)
    key = KEY_START * torch.stack([torch.ones(pairs), torch.zeros(pairs)], dim=1)
    query = QUERY_START * torch.stack([torch.cos(-frequency), torch.sin(-frequency)], dim=1)
    query[FASTEST:] = 0
    common = shared / 2**0.5  # of the normalised input
    _maps(attention.kv_a_proj_with_mqa.weight[rank:], common, key.flatten())
    latent = attention.q_a_layernorm(attention.q_a_proj(common)) / 2**0.5
    for head in attention.q_b_proj.weight.view(n_heads, -1, len(latent))[: n_heads // 2]:
        head[:n_nope] *= OTHER_START
        _maps(head[n_nope:], latent, query.flatten())


def _maps(matrix: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """Change ``matrix`` in place so that it takes ``source`` to ``target``, and all else to less than before."""
    matrix *= OTHER_START
    matrix += torch.outer(target - matrix @ source, source) / source.square().sum()


def train_tokenizer(texts: Iterable[str]) -> dict[bytes, int]:
    """Byte-pair encoding of ``texts`` with Kimi's split pattern: token bytes -> rank, :data:`N_RANKS` of them."""
    tokenizer = HuggingFaceTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(KIMI_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=N_RANKS, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return {bytes(BYTE_OF[c] for c in token): rank for token, rank in tokenizer.get_vocab().items()}


def write_tokenizer(ranks: Mapping[bytes, int], folder: Path) -> None:
    """Write ``tiktoken.model`` as Kimi does: a base64 token and its rank a line."""
    lines = [
        f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in sorted(ranks.items(), key=lambda x: x[1])
    ]
    (folder / TIKTOKEN_MODEL).write_text("".join(lines))


def write_weights(weights: Mapping[str, torch.Tensor], origin: str, folder: Path) -> None:
    """Write config, index, shards and :data:`~helpers.checkpoint.ORIGIN` as Kimi K2.6 is laid out.

    Args:
        weights: a ``DeepseekV3ForCausalLM``'s parameters and correction biases by name, float32, experts fused.
        origin: what the weights are, in words.
        folder: an existing folder.
    """
    n_layers = ARCHITECTURE["num_hidden_layers"]
    shards: list[dict[str, torch.Tensor]] = [{} for _ in range(n_layers + 1)]  # a shard a layer; embeddings and head
    for name, weight in weights.items():
        number = int(name.split(".")[2]) if name.startswith("model.layers.") else n_layers
        shards[number] |= _stored(PREFIX + name, weight)
    weight_map: dict[str, str] = {}
    total = 0
    for number, tensors in enumerate(shards, start=1):
        shard = f"model-{number:05d}-of-{len(shards):06d}.safetensors"
        save_file(tensors, folder / shard)
        weight_map |= dict.fromkeys(sorted(tensors), shard)
        total += sum(tensor.nbytes for tensor in tensors.values())
    _write_json(folder / "config.json", config_json())
    _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    _write_json(folder / ORIGIN, {"weights": origin})


def _stored(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors that one of the model's becomes: each expert's matrices packed INT4, the routing bias F32."""
    if name.endswith(".e_score_correction_bias"):
        return {name: weight.float().contiguous()}
    if not name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
        return {name: weight.bfloat16().contiguous()}
    experts, _, kind = name.rpartition(".")
    tensors: dict[str, torch.Tensor] = {}
    for i, fused in enumerate(weight):
        halves = fused.chunk(2) if kind == "gate_up_proj" else (fused,)
        for part, matrix in zip(kind.removesuffix("_proj").split("_"), halves, strict=True):
            values, scale = quantize_int4(matrix)
            own = f"{experts}.{i}.{part}_proj.weight"
            tensors |= {f"{own}_packed": pack_int4(values), f"{own}_scale": scale}
            tensors[f"{own}_shape"] = torch.tensor(matrix.shape, dtype=torch.int32)
    return tensors


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
