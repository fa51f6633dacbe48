"""A layer's queries, keys and values themselves, for what column sums can't answer: online eviction, output error."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from helpers.capture import attention_implementation, check_hidden_states
from helpers.errors import InputError
from helpers.layer import AttentionLayer
from helpers.memory import free_bytes
from helpers.products import ONE_AT_A_TIME, Float32Products

IMPLEMENTATION = "hand_over"
EXPANDED = 8  # queries, keys and values as projected, rotated and put together


def queries_keys_values(
    layer: AttentionLayer, hidden_states: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what the softmax of ``layer`` reads from ``hidden_states`` [1, L, hidden], after norms and rotation.

    query [H, L, width], key [KV, L, width], value [KV, L, value width], in the layer's dtype; logits are
    ``layer.module.scaling * query · key``.

    Raises:
        InputError: hidden states that the layer can't read, or queries and keys that memory doesn't hold.
    """
    check_hidden_states(layer, hidden_states)
    module: Any = copy.copy(layer.module)
    width = getattr(module, "qk_head_dim", 0) or module.o_proj.in_features // layer.n_heads
    needed = EXPANDED * layer.n_heads * hidden_states.shape[1] * width * layer.dtype.itemsize
    if needed > (free := free_bytes(layer.device)):
        raise InputError(
            f"Queries, keys and values of {hidden_states.shape[1]:,} tokens take about {needed / 1e9:.1f} GB, and "
            f"{free / 1e9:.1f} GB are free: lower seq_len or continuation."
        )
    module._modules = layer.module._modules | {"o_proj": nn.Identity()}
    hidden_states = hidden_states.to(device=layer.device, dtype=layer.dtype)
    with ONE_AT_A_TIME, torch.no_grad(), Float32Products(), attention_implementation(module, IMPLEMENTATION):
        module(hidden_states, layer.position_embeddings(hidden_states), None)
    query, key, value = module.handed_over
    return query[0], key[0], value[0]


def _hand_over(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    module.handed_over = (query, key, value)
    return value.new_zeros(1).expand(*query.transpose(1, 2).shape[:3], value.shape[-1]), None


AttentionInterface.register(IMPLEMENTATION, _hand_over)
