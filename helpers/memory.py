"""How much memory a capture takes, said before it runs: a kernel that dies of it says nothing."""

from __future__ import annotations

from typing import Any

import psutil
import torch

from helpers.column_sums import kv_heads_at_once, rows_at_once
from helpers.errors import InputError
from helpers.products import TOKENS_AT_ONCE

PART_BYTES = 2**30  # queries, keys and values of the heads of an MLA layer that are expanded at a time
STATISTICS = 4  # column sums kept for each head and token, beside one a window


def free_bytes(device: str | torch.device) -> int:
    """Memory that is free on ``device``: of the GPU, or what the system can give without swapping."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def is_latent(module: Any) -> bool:
    """Whether an attention module is multi-head latent attention, which expands keys and values from one latent."""
    return hasattr(module, "kv_b_proj") and hasattr(module, "kv_a_proj_with_mqa")


def heads_at_once(module: Any, n_heads: int, n_tokens: int, dtype: torch.dtype) -> int:
    """Heads that are expanded together: all, or in a long MLA layer as many as take ``PART_BYTES``."""
    if not is_latent(module):
        return n_heads
    return max(1, min(n_heads, PART_BYTES // (n_tokens * _expanded_bytes(module, n_heads, dtype))))


def capture_bytes(
    module: Any, n_heads: int, batch: int, n_tokens: int, dtype: torch.dtype, *, n_windows: int = 1
) -> int:
    """Estimate the peak memory of a capture beyond the layer's weights and its input, in bytes.

    ``module`` may be on the meta device. The largest parts: what heads attended to (all heads, all tokens), the heads
    that are expanded at a time, the column sums, the output, and a block of probabilities.
    """
    at_once = heads_at_once(module, n_heads, batch * n_tokens, dtype)
    return _attention_bytes(module, n_heads, batch, n_tokens, dtype, at_once, STATISTICS + n_windows)


def decoder_layer_bytes(layer: Any, config: Any, n_tokens: int, dtype: torch.dtype) -> int:
    """Estimate the peak memory of running a whole decoder layer over one sample, its weights included, in bytes.

    ``layer`` may be on the meta device. All its heads are expanded at once; no column sums are kept.
    """
    n_heads, itemsize = config.num_attention_heads, dtype.itemsize
    weights = sum(tensor.numel() for tensor in layer.state_dict().values()) * itemsize
    attention = _attention_bytes(layer.self_attn, n_heads, 1, n_tokens, dtype, n_heads, 0)
    feed_forward = 3 * n_tokens * config.intermediate_size * itemsize  # gate, up, and their product
    norms = 5 * n_tokens * config.hidden_size * 4  # the stream beside the layer, its squares and norm in float32
    return weights + norms + attention + feed_forward  # allocators keep what attention gives back


def _attention_bytes(
    module: Any, n_heads: int, batch: int, n_tokens: int, dtype: torch.dtype, at_once: int, statistics: int
) -> int:
    total, itemsize = batch * n_tokens, dtype.itemsize
    attended = module.o_proj.in_features * itemsize  # all bytes from here on are for one token
    output = module.o_proj.out_features * itemsize
    expanded = at_once * _expanded_bytes(module, n_heads, dtype)
    latents = 0
    if is_latent(module):
        latents = 3 * (module.kv_a_proj_with_mqa.out_features + (module.q_lora_rank or 0)) * itemsize
    sums = statistics * n_heads * 4
    group = getattr(module, "num_key_value_groups", 1)
    block = group * rows_at_once(n_tokens, n_tokens, group) * n_tokens  # probabilities of one key head
    kv_heads = kv_heads_at_once(n_heads // group, block)
    widened = kv_heads * (group + 2) * _width(module, n_heads) * 4  # queries, keys and values in float32
    projections = min(TOKENS_AT_ONCE, total) * (module.o_proj.in_features + module.o_proj.out_features) * 4
    blocks = 6 * kv_heads * block + projections  # in float32, and what products make of them
    return (
        total * (latents + sums + attended + max(expanded + attended // n_heads, output)) + n_tokens * widened + blocks
    )


def check_capture_fits(
    module: Any, n_heads: int, batch: int, n_tokens: int, dtype: torch.dtype, device: str | torch.device,
    *, n_windows: int = 1, besides: int = 0,
) -> None:  # fmt: skip
    """Refuse a capture that memory can't hold; ``besides``: bytes of input and weights that aren't there yet.

    Raises:
        InputError: names what is needed, what is free, and what to lower.
    """
    needed = besides + capture_bytes(module, n_heads, batch, n_tokens, dtype, n_windows=n_windows)
    free = free_bytes(device)
    if needed > free:
        samples = f"{batch} samples of " if batch > 1 else ""
        raise InputError(
            f"Capturing {samples}{n_tokens:,} tokens takes about {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are "
            f"free on {torch.device(device).type}: take fewer tokens (lower seq_len or continuation)."
        )


def _width(module: Any, n_heads: int) -> int:
    """The widest of a head's query, key and value."""
    if is_latent(module):
        return int(module.qk_head_dim)
    return int(module.o_proj.in_features // n_heads)


def _expanded_bytes(module: Any, n_heads: int, dtype: torch.dtype) -> int:
    """Bytes for one head and token while the module makes its queries, keys and values.

    The query three times (as projected, its rotated part, put together), the key and value as projected, and the key
    put together; rotary embeddings of grouped-query layers hold the query four times.
    """
    width = _width(module, n_heads)
    if is_latent(module):
        return (3 * width + module.kv_b_proj.out_features // n_heads + width) * dtype.itemsize
    return 7 * width * dtype.itemsize
