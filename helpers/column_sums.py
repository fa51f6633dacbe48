"""Causal softmax attention that also sums its probabilities over queries, without ever holding the whole matrix.

This is the arithmetic alone: queries, keys and values in, attention output and column sums out. It works on blocks of
queries, each against all the keys it sees, so that every probability is computed once and known exactly (float32)
when it is summed; memory grows with heads x tokens and one block, never with tokens².
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from helpers.products import float32_products_in, has_bfloat16_products

BLOCK_ELEMENTS = 2**25  # probabilities held at once for one key head: 128 MB of float32
QUERIES_AT_ONCE = 512  # more make the products no faster, and waste more beyond the diagonal
HEADS_ELEMENTS = 2**21  # short inputs: this many probabilities are worth one call, over several key heads


def multiplies_in(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The type that the factors of Q·Kᵀ and P·V, which are held in float32, are multiplied in: the fastest one here.

    BF16 for BF16 inputs where a CPU has instructions for it; for the output, probabilities are then rounded to BF16.
    Logits are float32 and as exact either way: BF16 inputs are not rounded again, and products add up in float32.
    """
    own = dtype == torch.bfloat16 and device.type == "cpu" and has_bfloat16_products()
    return torch.bfloat16 if own else torch.float32


def attention_and_column_sums(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    weights: torch.Tensor,
    sums: torch.Tensor,
    *,
    real: torch.Tensor | None = None,
    products: torch.dtype = torch.float32,
    progress: Callable[[int], object] | None = None,
) -> torch.Tensor:
    """Return softmax(scale · Q·Kᵀ)·V under a causal mask, and add the column sums of its probabilities to ``sums``.

    ``sums[s, b, h, j] += Σ_i weights[s, b, i] · p(i → j)`` for the first P keys j. With B samples, H query heads, KV
    key heads, N queries, which stand at the last of M keys, and S statistics:

    Args:
        query: [B, H, N, width]; neighbouring query heads share a key head.
        key: [B, KV, M, width].
        value: [B, KV, M, value width].
        scale: what logits are multiplied with.
        weights: [S, B, N], float32; a query of weight 0 in every statistic still gets its output.
        sums: [S, B, H, P], float32, P ≤ M; added to in place.
        real: [B, M], False for keys that are padding, which no query sees. A query that sees no key gives nothing and
            gets zeros.
        products: as :func:`multiplies_in` gives it for the type of ``query``.
        progress: called after each block with the number of (query, key) pairs it did, over all heads.

    Returns:
        The output [B, N, H, value width], in the dtype of ``query``.
    """
    batch, heads, n_queries, width = query.shape
    kv_heads, n_keys = key.shape[1:3]
    group, first = heads // kv_heads, n_keys - n_queries
    output = query.new_empty(batch, n_queries, heads, value.shape[-1])
    if n_queries == 0:
        return output
    rows = rows_at_once(n_queries, n_keys, group)
    kv_at_once = kv_heads_at_once(kv_heads, group * rows * n_keys)
    probabilities = query.new_empty(kv_at_once * group * rows * n_keys, dtype=torch.float32)
    wide = [
        torch.empty_like(x[0, : kv_at_once * x.shape[1] // kv_heads], dtype=torch.float32) for x in (query, key, value)
    ]
    fast = "bf16" if products == torch.bfloat16 else "ieee"
    future = torch.ones(rows, rows, dtype=torch.bool, device=query.device).triu(1)
    active = [weights[:, b].any(dim=-1).nonzero().flatten().tolist() for b in range(batch)]

    for b in range(batch):
        sees_any = None if real is None else real[b].cumsum(0)[first:] > 0
        for kv in range(0, kv_heads, kv_at_once):
            kv_part = slice(kv, min(kv + kv_at_once, kv_heads))
            n_kv = kv_part.stop - kv_part.start
            h = slice(kv_part.start * group, kv_part.stop * group)
            parts = zip((query[b, h], key[b, kv_part], value[b, kv_part]), wide, strict=True)
            q, k, v = (x if x.dtype == torch.float32 else into[: len(x)].copy_(x) for x, into in parts)
            q, k = q.view(n_kv, group, n_queries, width), k.transpose(1, 2)
            for start in range(0, n_queries, rows):
                end = min(start + rows, n_queries)
                seen, n = first + end, end - start  # no query of this block sees a key beyond it
                size = n_kv * group * n * seen
                x = probabilities[:size].view(n_kv, group * n, seen)
                with float32_products_in(fast):
                    _scaled_product(q[:, :, start:end].reshape(n_kv, group * n, width), k[..., :seen], scale, out=x)
                p = x.view(n_kv * group, n, seen)
                p[..., first + start :].masked_fill_(future[:n, :n], float("-inf"))
                if real is not None:
                    p.masked_fill_(~real[b, :seen], float("-inf"))
                torch.softmax(p, dim=-1, out=p)
                if sees_any is not None:
                    p.masked_fill_(~sees_any[start:end, None], 0.0)  # softmax of nothing is NaN
                with float32_products_in(fast):
                    y = torch.bmm(x, v[:, :seen])
                output[b, start:end, h] = y.view(n_kv * group, n, -1).transpose(0, 1).to(output.dtype)
                with float32_products_in("ieee"):
                    _add_weighted(sums[:, b, h], weights[:, b, start:end], active[b], p)
                if progress is not None:
                    progress(n_kv * group * n * (2 * first + start + end + 1) // 2)
    return output


def rows_at_once(n_queries: int, n_keys: int, group: int) -> int:
    """Queries in a block: as many as make the products fast, few enough for the diagonal and for memory."""
    most = min(QUERIES_AT_ONCE, BLOCK_ELEMENTS // n_keys) // group
    return max(1, min(n_queries, most, max(64, n_keys // 8)))


def kv_heads_at_once(kv_heads: int, block: int) -> int:
    """Key heads in a call, where one has ``block`` probabilities: several for short inputs, whose calls are short."""
    return min(kv_heads, max(1, HEADS_ELEMENTS // block))


def _scaled_product(a: torch.Tensor, b: torch.Tensor, scale: float, out: torch.Tensor) -> None:
    """``out`` [h, n, m] = scale · ``a`` [h, n, width] · ``b`` [h, width, m]."""
    nothing = a.new_zeros(1)
    if len(a) == 1:  # a part of a matrix is multiplied in place, where a part of a batch would be copied first
        torch.addmm(nothing, a[0], b[0], beta=0, alpha=scale, out=out[0])
    else:
        torch.baddbmm(nothing, a, b, beta=0, alpha=scale, out=out)


def _add_weighted(sums: torch.Tensor, weights: torch.Tensor, active: list[int], p: torch.Tensor) -> None:
    """``sums`` [S, h, P] += ``weights`` [S, n] · ``p`` [h, n, seen], for the statistics that weigh these queries."""
    here = [s for s in active if weights[s].any()]
    seen = min(p.shape[-1], sums.shape[-1])
    if here:
        w = weights[here].expand(len(p), -1, -1)
        added = torch.mm(w[0], p[0, :, :seen])[None] if len(p) == 1 else torch.bmm(w, p[..., :seen])
        for i, s in enumerate(here):
            sums[s, :, :seen] += added[:, i]
