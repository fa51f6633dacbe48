"""What an eviction costs, judged by the queries that come after it: none of them was seen by a score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from helpers.layer import AttentionLayer
from helpers.memory import is_latent
from helpers.policies import Kept
from helpers.products import ONE_AT_A_TIME, Float32Products

BLOCK_BYTES = 2**28  # probabilities held at once
SMALLEST = 1e-25  # of a kept share in float32: below, its parts run out of numbers
RESAMPLES = 10_000


def share_of_kept_mass(mass_continuation: torch.Tensor, kept: Kept) -> tuple[float, float]:
    """Return the share of the continuation's mass on prompt tokens that ``kept`` ones have: pooled, and worst head.

    ``mass_continuation`` [H, P]; ``kept`` [P], or [G, P] for G groups of neighbouring heads. Pooled: over all heads,
    Σ mass of kept tokens ÷ Σ mass of all prompt tokens.
    """
    mass = mass_continuation.double().cpu().numpy()
    on_kept = (mass * _by_head(kept, len(mass))).sum(axis=1)
    return float(on_kept.sum() / mass.sum()), float((on_kept / mass.sum(axis=1)).min())


@dataclass(frozen=True)
class OutputErrors:
    """Relative error of the attention output, ‖evicted − full‖ ÷ ‖full‖ over all continuation queries.

    ``before`` the output projection (heads side by side), and ``after`` it (what the residual stream gets).
    """

    before: list[float]
    after: list[float]


def output_errors(
    layer: AttentionLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kept: Sequence[Kept]
) -> OutputErrors:
    """Attend from the continuation's queries again, once for each kept set, and compare with the full cache.

    Args:
        layer: whose ``o_proj`` and softmax scale are used.
        query: [H, C, width], the queries after a prompt of P tokens.
        key: [KV, P + C, width].
        value: [KV, P + C, value width].
        kept: sets of the prompt's tokens, each [P] or [G, P] for G groups of neighbouring heads, which keep equally
            many. The continuation's own tokens all stay.
    """
    module: Any = layer.module
    n_heads, n_queries, _ = query.shape
    n_keys, group = key.shape[1], n_heads // len(key)
    prompt = n_keys - n_queries
    future = torch.ones(n_queries, n_keys, dtype=torch.bool, device=query.device).triu(prompt + 1)
    sets = [torch.from_numpy(np.ascontiguousarray(k if k.ndim == 1 else _by_head(k, n_heads))) for k in kept]
    sets = [nn.functional.pad(k, (0, n_queries), value=True).to(query.device) for k in sets]
    width = value.shape[-1]
    full = query.new_empty(n_queries, n_heads, width)
    change = query.new_empty(len(sets), n_queries, n_heads, width)
    squares, full_square = torch.zeros(len(sets), dtype=torch.float64), 0.0
    at_once = max(1, BLOCK_BYTES // (4 * n_queries * n_keys))
    for first in range(0, n_heads, at_once):
        heads = torch.arange(first, min(first + at_once, n_heads), device=query.device)
        k, v = key[heads // group].float(), value[heads // group].float()
        logits = module.scaling * query[heads].float() @ k.transpose(1, 2)
        logits.masked_fill_(future, float("-inf"))
        p = torch.softmax(logits, dim=-1)
        attended = p @ v
        full[:, heads] = attended.transpose(0, 1).to(full.dtype)
        full_square += float(attended.double().square().sum())
        values = torch.cat([v, v.new_ones(*v.shape[:2], 1)], dim=-1)  # the last column adds up the probabilities
        smaller, sums = torch.zeros_like(future[0]), values.new_zeros(len(heads), n_queries, width + 1)
        for i, every in enumerate(sets):
            stays = every if every.ndim == 1 else every[heads]
            if smaller.ndim == stays.ndim and not (smaller & ~stays).any():  # nested: only what is new is added
                sums = sums + _sums_over(p, values, stays & ~smaller)
            else:
                sums = _sums_over(p, values, stays)
            smaller, attended_to = stays, sums
            if sums[..., -1].min() < SMALLEST:  # what stays had nearly nothing of all, and is all its softmax sees
                mask = stays if stays.ndim == 1 else stays[:, None]
                attended_to = torch.softmax(logits.masked_fill(~mask, float("-inf")), dim=-1) @ values
            difference = attended_to[..., :-1] / attended_to[..., -1:] - attended
            squares[i] += difference.double().square().sum().cpu()
            change[i, :, heads] = difference.transpose(0, 1).to(change.dtype)
    with ONE_AT_A_TIME, torch.no_grad(), Float32Products():
        weight = module.o_proj.weight
        norms = [float(nn.functional.linear(x.flatten(1), weight).double().norm()) for x in (full, *change)]
    before = (squares / full_square).sqrt().tolist() if full_square else [0.0] * len(sets)
    return OutputErrors(before, [norm / norms[0] if norms[0] else 0.0 for norm in norms[1:]])


def cache_bytes(layer: AttentionLayer, n_tokens: int) -> dict[str, int]:
    """Bytes that one layer's cache takes for ``n_tokens``: ``expanded`` to heads, and of MLA the ``latent`` as well.

    The latent is kv_lora_rank + qk_rope_head_dim numbers a token, the same for all heads (DeepSeek-V2,
    arXiv:2405.04434, table 1); expanded, each key-value head has its own key and value.
    """
    module: Any = layer.module
    itemsize = layer.dtype.itemsize
    if is_latent(module):
        each = layer.n_heads * (module.qk_head_dim + module.v_head_dim)
        latent = module.kv_a_proj_with_mqa.out_features
        return {"latent": n_tokens * latent * itemsize, "expanded": n_tokens * each * itemsize}
    return {"expanded": n_tokens * layer.config.num_key_value_heads * 2 * module.head_dim * itemsize}


def fraction_of_the_way(
    value: npt.NDArray[np.float64], random: npt.NDArray[np.float64], oracle: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """0 at ``random``, 1 at the mass ``oracle``; NaN where these don't differ. May lie outside: nothing is cut."""
    span = oracle - random
    return np.divide(value - random, span, out=np.full_like(span, np.nan), where=span != 0)


def mean_interval(values: npt.NDArray[np.float64], seed: int = 0) -> tuple[float, float, float]:
    """Mean of one value a document, and its 95 % interval: percentile bootstrap over documents (Efron 1979).

    For a paired comparison, ``values`` are differences. The interval of fewer than two documents is NaN.
    """
    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, float("nan"), float("nan")
    drawn = np.random.default_rng(seed).integers(0, len(values), size=(RESAMPLES, len(values)))
    low, high = np.percentile(np.asarray(values)[drawn].mean(axis=1), (2.5, 97.5))
    return mean, float(low), float(high)


def _sums_over(p: torch.Tensor, values: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Σ p·v over some tokens: ``p`` [h, C, L], ``values`` [h, L, width], ``tokens`` [L], or [h, L], equally many."""
    if tokens.ndim == 1:
        index = tokens.nonzero().flatten()
        return p.index_select(2, index) @ values.index_select(1, index)
    index = tokens.nonzero()[:, 1].view(len(tokens), -1)
    of_p = index[:, None].expand(-1, p.shape[1], -1)
    return p.gather(2, of_p) @ values.gather(1, index[..., None].expand(-1, -1, values.shape[-1]))


def _by_head(kept: Kept, n_heads: int) -> Kept:
    return np.repeat(np.atleast_2d(kept), n_heads // len(np.atleast_2d(kept)), axis=0)
