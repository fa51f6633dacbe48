"""A checkpoint's whole causal language model, for one that fits memory."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from helpers.checkpoint import Checkpoint
from helpers.layer import load_decoder_layer, rotary_embedding


def load_model(ckpt: Checkpoint, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    """Load every layer, the embeddings, the last norm and the head into transformers' own causal language model.

    Packed weights are unpacked; the model computes in ``dtype``.

    Raises:
        InputError: as :func:`~helpers.layer.load_decoder_layer`.
    """
    config = copy.deepcopy(ckpt.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # what is read is plain numbers
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    decoder = model.get_decoder()
    for i in range(config.num_hidden_layers):
        decoder.layers[i] = load_decoder_layer(ckpt, i, dtype, device)
        decoder.layers[i].self_attn.config = decoder.config  # one switch of the attention implementation for all layers
    decoder.rotary_emb = rotary_embedding(ckpt, device)
    head = f"{ckpt.prefix.removesuffix('model.')}lm_head.weight"
    tied = config.tie_word_embeddings
    stored = {
        decoder.embed_tokens: f"{ckpt.prefix}embed_tokens.weight",
        decoder.norm: f"{ckpt.prefix}norm.weight",
        model.get_output_embeddings(): f"{ckpt.prefix}embed_tokens.weight" if tied else head,
    }
    for module, name in stored.items():
        module.weight = nn.Parameter(ckpt.tensor(name).to(device=device, dtype=dtype), requires_grad=False)
    return model.eval()
