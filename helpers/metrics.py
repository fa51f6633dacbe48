"""What an eviction costs, judged by the queries that come after it: none of them was seen by a score."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from helpers.layer import AttentionLayer
from helpers.memory import is_latent
from helpers.policies import Kept
from helpers.products import ONE_AT_A_TIME, Float32Products, exact_products_of

BLOCK_BYTES = 2**28  # probabilities held at once
SMALLEST = 1e-25  # of a kept share in float32: below, its parts run out of numbers
RESAMPLES = 10_000
# documents: of normal values, a percentile interval holds the mean in 75 % of cases with 3, 85 % with 5, 89 % with 8
FEWEST = 8


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
    n_heads, n_queries, _ = query.shape
    n_keys, group = key.shape[1], n_heads // len(key)
    future = torch.ones(n_keys, n_queries, dtype=torch.bool, device=query.device).tril(n_queries - n_keys - 1)
    sets = [torch.from_numpy(np.ascontiguousarray(k if k.ndim == 1 else _by_head(k, n_heads))) for k in kept]
    sets = [nn.functional.pad(k, (0, n_queries), value=True).to(query.device) for k in sets]
    # of the full cache, then what each set changes in it: [1 + sets, H, C, value width]
    outputs = query.new_empty(1 + len(sets), n_heads, n_queries, value.shape[-1])
    squares = torch.zeros(1 + len(sets), dtype=torch.float64)
    at_once = max(1, BLOCK_BYTES // (4 * n_queries * n_keys))
    for heads in torch.arange(n_heads, device=query.device).split(at_once):
        # a key's logits lie side by side, so that tokens are picked by the row
        with exact_products_of(query.dtype):
            logits = key[heads // group].float() @ query[heads].float().transpose(1, 2)
        logits *= layer.scaling
        logits.masked_fill_(future, float("-inf"))
        values = value[heads // group].float()
        of_heads = [every if every.ndim == 1 else every[heads] for every in sets]
        for i, output in enumerate(_full_and_changes(logits, values, of_heads)):
            squares[i] += output.square().sum(dtype=torch.float64).cpu()
            outputs[i, heads] = output.to(outputs.dtype)
    with ONE_AT_A_TIME, torch.no_grad(), Float32Products():
        after = [_projected_norm(layer, output) for output in outputs]
    return OutputErrors(_relative(squares.sqrt().tolist()), _relative(after))


def _full_and_changes(
    logits: torch.Tensor, values: torch.Tensor, sets: Sequence[torch.Tensor]
) -> Iterator[torch.Tensor]:
    """Yield the output [h, C, width] of all tokens, then for each set what attending to it alone changes.

    ``logits`` [h, L, C], ``values`` [h, L, width], and ``sets`` of tokens, each [L] or [h, L].
    """
    p = torch.softmax(logits, dim=1)
    full = p.transpose(1, 2) @ values
    yield full
    values = torch.cat([values, values.new_ones(*values.shape[:2], 1)], dim=-1)  # the last column adds up p
    smaller, sums = torch.zeros_like(sets[0][..., :0]), full
    for stays in sets:
        if smaller.shape == stays.shape and not (smaller & ~stays).any():  # nested: only what is new is added
            sums = sums + _sums_over(p, values, stays & ~smaller)
        else:
            sums = _sums_over(p, values, stays)
        smaller = stays
        output = sums[..., :-1] / sums[..., -1:]
        # what stays had nearly nothing of these queries' attention, and is all that their softmax sees
        lost = sums[..., -1] < SMALLEST
        for h in lost.any(dim=-1).nonzero().flatten().tolist():
            tokens = stays if stays.ndim == 1 else stays[h]
            alone = torch.softmax(logits[h, tokens][:, lost[h]], dim=0)
            output[h, lost[h]] = alone.T @ values[h, tokens, :-1]
        yield output - full


def _sums_over(p: torch.Tensor, values: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Σ p·v over some tokens: ``p`` [h, L, C], ``values`` [h, L, width], ``tokens`` [L], or [h, L], equally many."""
    if tokens.ndim == 1:
        index = tokens.nonzero().flatten()
        return p.index_select(1, index).transpose(1, 2) @ values.index_select(1, index)
    p, values = (x.flatten(0, 1)[tokens.flatten()].view(len(x), -1, x.shape[-1]) for x in (p, values))
    return p.transpose(1, 2) @ values


def _projected_norm(layer: AttentionLayer, output: torch.Tensor) -> float:
    """Norm over all queries of ``output`` [H, C, width], its heads side by side, behind the output projection."""
    module: Any = layer.module
    return float(nn.functional.linear(output.transpose(0, 1).flatten(1), module.o_proj.weight).double().norm())


def _relative(norms: list[float]) -> list[float]:
    full, *changes = norms
    return [change / full if full else 0.0 for change in changes]


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


def mean_interval(values: npt.NDArray[np.float64], seed: int = 0) -> tuple[float, float, float]:
    """Mean of one value a document, and its 95 % interval: percentile bootstrap over documents (Efron 1979).

    For a paired comparison, ``values`` are differences. Fewer than ``FEWEST`` documents have no interval (NaN).
    """
    return float(np.mean(values)), *_middle_95(_resampled_mean(values, seed))


def fraction_of_the_way(
    values: npt.NDArray[np.float64], random: npt.NDArray[np.float64], oracle: npt.NDArray[np.float64], seed: int = 0
) -> tuple[float, float, float]:
    """Where a policy's mean lies between that of ``random`` (0) and of the mass ``oracle`` (1), with a 95 % interval.

    (mean of values − mean of random) ÷ (mean of oracle − mean of random), one value a document and array, more is
    better; the bootstrap draws documents. It may lie outside 0 … 1: nothing is cut. All NaN where these documents
    don't show that the oracle is better than random: then there is no scale.
    """
    span = _resampled_mean(oracle - random, seed)
    if not _middle_95(span)[0] > 0:  # NaN of few documents, too
        return float("nan"), float("nan"), float("nan")
    way = _resampled_mean(values - random, seed) / span
    return float(np.mean(values - random) / np.mean(oracle - random)), *_middle_95(way)


def _resampled_mean(values: npt.NDArray[np.float64], seed: int) -> npt.NDArray[np.float64]:
    """Means of as many documents drawn with replacement, ``RESAMPLES`` times; the same draws for one seed."""
    if len(values) < FEWEST:
        return np.full(RESAMPLES, np.nan)
    drawn = np.random.default_rng(seed).integers(0, len(values), size=(RESAMPLES, len(values)))
    means: npt.NDArray[np.float64] = values[drawn].mean(axis=1)
    return means


def _middle_95(resampled: npt.NDArray[np.float64]) -> tuple[float, float]:
    low, high = np.percentile(resampled, (2.5, 97.5))
    return float(low), float(high)


def _by_head(kept: Kept, n_heads: int) -> Kept:
    return np.repeat(np.atleast_2d(kept), n_heads // len(np.atleast_2d(kept)), axis=0)
