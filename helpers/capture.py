"""One pass over a layer's attention: its output, and how much attention each token collects.

The layer runs as transformers wrote it; only the softmax part is ours, registered as an attention implementation. It
works on blocks of queries and keeps sums over queries, so that memory grows with heads x tokens, never with tokens².
Probabilities and sums are float32 throughout: column sums in BF16 drift.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from helpers.errors import InputError
from helpers.layer import AttentionLayer, Float32Products, attention_window

WINDOW = 32  # queries of ``mass_window`` (SnapKV's observation window)
DECAY = 0.98  # forgetting factor of ``mass_decayed`` (as in A2SF)
IMPLEMENTATION = "column_sums"
BLOCK_ELEMENTS = 2**26  # probabilities held at once: 256 MB of float32


@dataclass
class Capture:
    """What one pass over attention leaves, all float32 but ``output``. ``P`` prompt tokens, ``L`` tokens in all.

    ``output`` [B, L, hidden] is the attention layer's output. The others are [B, H, P], a sum over queries of the
    softmax probability p(i -> j) that query i gives to prompt token j:

    - ``mass``: all prompt queries (i < P): the attention mass that H2O accumulates (arXiv:2306.14048);
    - ``mass_window``: the last ``WINDOW`` prompt queries (SnapKV, arXiv:2404.14469), all of them if there are fewer;
    - ``mass_last``: the last prompt query (TOVA, arXiv:2401.06104);
    - ``mass_decayed``: prompt queries weighted by ``DECAY ** (P - 1 - i)`` (A2SF, arXiv:2407.20485);
    - ``mass_continuation``: the queries after the prompt (i >= P), which no score may see.
    """

    output: torch.Tensor
    mass: torch.Tensor
    mass_window: torch.Tensor
    mass_last: torch.Tensor
    mass_decayed: torch.Tensor
    mass_continuation: torch.Tensor

    def first_sample(self) -> dict[str, torch.Tensor]:
        """The column statistics of the batch's first sample by name, each [H, P] on the CPU, as they are stored."""
        names = [field.name for field in fields(self) if field.name != "output"]
        return {name: getattr(self, name)[0].contiguous().cpu() for name in names}


def query_weights(n_tokens: int, prompt_length: int) -> torch.Tensor:
    """Weights [5, L] that turn attention probabilities into the column statistics of :class:`Capture`, in its order.

    Every statistic is a weighted sum over queries i, so one matrix product with the probabilities gives them all.
    """
    i = torch.arange(n_tokens)
    prompt = i < prompt_length
    return torch.stack(
        [
            prompt.float(),
            (prompt & (i >= prompt_length - WINDOW)).float(),
            (i == prompt_length - 1).float(),
            torch.where(prompt, DECAY ** (prompt_length - 1 - i).clamp(min=0), 0.0),
            (~prompt).float(),
        ]
    )


def capture_attention(layer: AttentionLayer, hidden_states: torch.Tensor, prompt_length: int | None = None) -> Capture:
    """Run ``layer`` over ``hidden_states`` [B, L, hidden] and return its :class:`Capture`.

    The first ``prompt_length`` tokens (default: all) are the prompt. Samples of a batch never mix. Hidden states are
    taken to the layer's device and dtype.

    Raises:
        InputError: hidden states of another width or with NaN or infinity, a prompt longer than the input or empty, or
            an attention that isn't plain causal softmax over this length.
    """
    if hidden_states.ndim != 3:
        raise InputError(f"Hidden states are [batch, tokens, width], not of shape {list(hidden_states.shape)}.")
    n_tokens = hidden_states.shape[1]
    prompt_length = n_tokens if prompt_length is None else prompt_length
    hidden_states = hidden_states.to(device=layer.device, dtype=layer.dtype)
    _check_input(layer, hidden_states, prompt_length)
    recorder = _Recorder(query_weights(n_tokens, prompt_length).to(hidden_states.device), prompt_length)
    with torch.no_grad(), Float32Products(), _implementation(layer.module, IMPLEMENTATION):
        output, _ = layer.module(hidden_states, layer.position_embeddings(hidden_states), None, recorder=recorder)
    return Capture(output, *recorder.sums.unbind(dim=0))


def capture_digest(layer: AttentionLayer, hidden_states: torch.Tensor, prompt_length: int) -> str:
    """SHA-256 over everything that determines a capture: weights, configuration, input, lengths, dtype, definitions."""
    digest = hashlib.sha256()
    config = {key: value for key, value in layer.config.to_dict().items() if key != "transformers_version"}
    settings = [config, layer.index, layer.device.type, prompt_length, WINDOW, DECAY]
    digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
    for name, tensor in [*layer.module.state_dict().items(), ("hidden_states", hidden_states)]:
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(memoryview(tensor.cpu().contiguous().view(torch.uint8).numpy()))
    return digest.hexdigest()


def eager_attention_weights(layer: AttentionLayer, hidden_states: torch.Tensor) -> torch.Tensor:
    """Attention probabilities [B, H, L, L] as transformers' own eager attention returns them, in the layer's dtype.

    This builds the whole matrix: it is the check of :func:`capture_attention` at a length where that fits.
    """
    n_tokens = hidden_states.shape[1]
    future = torch.full((n_tokens, n_tokens), torch.finfo(hidden_states.dtype).min, device=hidden_states.device).triu(1)
    mask = future.to(hidden_states.dtype)[None, None]
    with torch.no_grad(), Float32Products(), _implementation(layer.module, "eager"):
        _, weights = layer.module(hidden_states, layer.position_embeddings(hidden_states), mask)
    return weights


class _Recorder:
    """Collects [statistics, B, H, P] while one layer runs."""

    def __init__(self, weights: torch.Tensor, prompt_length: int) -> None:
        self.weights = weights
        self.prompt_length = prompt_length
        self.sums = torch.empty(0)


def _column_sums_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    scaling: float,
    recorder: _Recorder,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal softmax attention that records column sums; transformers' attention interface.

    ``query`` [B, H, L, width], ``key`` and ``value`` [B, KV heads, L, width] -> output [B, L, H, value width].
    """
    changed = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if changed:
        raise InputError(f"{type(module).__name__} changes its softmax ({', '.join(changed)}): it is not supported.")
    batch, heads, n_tokens, width = query.shape
    kv_heads, prompt = key.shape[1], recorder.prompt_length
    # queries that share a key head go through one product, so grouped keys are never copied for each query head
    grouped = query.float().view(batch, kv_heads, heads // kv_heads, n_tokens, width) * scaling
    keys = key.float().transpose(-1, -2)  # [B, KV, width, L]
    values = value.float()
    output = query.new_empty(batch, heads, n_tokens, value.shape[-1])
    recorder.sums = query.new_zeros(len(recorder.weights), batch, heads, prompt, dtype=torch.float32)
    positions = torch.arange(n_tokens, device=query.device)
    block = max(1, min(n_tokens, BLOCK_ELEMENTS // (batch * heads * n_tokens)))
    for start in range(0, n_tokens, block):
        end = min(start + block, n_tokens)  # causal: no query of this block sees beyond it
        q = grouped[:, :, :, start:end].reshape(batch, kv_heads, -1, width)
        logits = (q @ keys[..., :end]).view(batch, heads, end - start, end)
        logits.masked_fill_(positions[None, :end] > positions[start:end, None], float("-inf"))
        p = logits.softmax(dim=-1)  # [B, H, block, end]
        grouped_p = p.view(batch, kv_heads, -1, end)
        output[:, :, start:end] = (grouped_p @ values[:, :, :end]).view(batch, heads, end - start, -1).to(output.dtype)
        seen = min(end, prompt)
        for sums, weights in zip(recorder.sums, recorder.weights[:, start:end], strict=True):
            if weights.any():
                sums[..., :seen] += weights @ p[..., :seen]
    return output.transpose(1, 2), None


AttentionInterface.register(IMPLEMENTATION, _column_sums_attention)


@contextmanager
def _implementation(module: nn.Module, name: str) -> Iterator[None]:
    """Let one layer's module compute its softmax part with the attention implementation ``name``."""
    config: Any = module.config
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before


def _check_input(layer: AttentionLayer, hidden_states: torch.Tensor, prompt_length: int) -> None:
    _, n_tokens, width = hidden_states.shape
    if width != layer.config.hidden_size:
        raise InputError(f"Hidden states are {width} wide, and the layer takes {layer.config.hidden_size}.")
    if not 1 <= prompt_length <= n_tokens:
        raise InputError(f"A prompt of {prompt_length} tokens doesn't fit an input of {n_tokens}.")
    if not torch.isfinite(hidden_states).all():
        bad = int((~torch.isfinite(hidden_states)).sum())
        raise InputError(f"The hidden states hold {bad:,} values that are NaN or infinite.")
    window = attention_window(layer.config, layer.index)
    if window is not None and n_tokens > window:
        raise InputError(
            f"Layer {layer.index} attends to the last {window} tokens only, not to all {n_tokens}: lower seq_len."
        )
