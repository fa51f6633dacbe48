"""Causal softmax attention that also sums its probabilities over queries, without ever holding the whole matrix.

This is the arithmetic alone: queries, keys and values in, attention output and column sums out. It works on blocks of
queries, each against all the keys it sees, so that every probability is computed once and known exactly (float32)
when it is summed; memory grows with heads x tokens and one block, never with tokens².
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from helpers.products import has_bfloat16_products

BLOCK_ELEMENTS = 2**24  # probabilities held at once for one key head: 64 MB of float32
QUERIES_AT_ONCE = 512  # more make the products no faster, and waste more beyond the diagonal
HEADS_ELEMENTS = 2**22  # short inputs: this many probabilities are worth one call, over several key heads


def multiplies_in(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The type that Q·Kᵀ and P·V are multiplied in unless float32 logits are asked for: the fastest one here.

    BF16 where a CPU has instructions for it: logits are then rounded to BF16. Otherwise float32, which is exact.
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
        products: float32, or bfloat16 to multiply in BF16, which rounds logits and, for the output, probabilities.
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
    kv_at_once = min(kv_heads, max(1, HEADS_ELEMENTS // (group * rows * n_keys)))
    block = kv_at_once * group * rows * n_keys
    logits, probabilities = (query.new_empty(block, dtype=torch.float32) for _ in range(2))
    future = torch.ones(rows, rows, dtype=torch.bool, device=query.device).triu(1)
    active = [weights[:, b].any(dim=-1).nonzero().flatten().tolist() for b in range(batch)]

    for b in range(batch):
        sees_any = None if real is None else real[b].cumsum(0)[first:] > 0
        for kv in range(0, kv_heads, kv_at_once):
            kv_part = slice(kv, min(kv + kv_at_once, kv_heads))
            n_kv = kv_part.stop - kv_part.start
            h = slice(kv_part.start * group, kv_part.stop * group)
            q = query[b, h].view(n_kv, group, n_queries, width).to(products)
            if products == torch.float32:
                q = q * scale
            k, v = key[b, kv_part].to(products).transpose(1, 2), value[b, kv_part].to(products)
            for start in range(0, n_queries, rows):
                end = min(start + rows, n_queries)
                seen, n = first + end, end - start  # no query of this block sees a key beyond it
                size = n_kv * group * n * seen
                x = logits[:size].view(n_kv, group * n, seen)
                q_block = q[:, :, start:end].reshape(n_kv, group * n, width)
                if products == torch.float32:
                    torch.bmm(q_block, k[..., :seen], out=x)
                else:  # the scale is applied in the product's own float32, before its one rounding
                    x.copy_(torch.baddbmm(q_block.new_zeros(1), q_block, k[..., :seen], beta=0, alpha=scale))
                by_head = x.view(n_kv * group, n, seen)
                by_head[..., first + start :].masked_fill_(future[:n, :n], float("-inf"))
                if real is not None:
                    by_head.masked_fill_(~real[b, :seen], float("-inf"))
                p = torch.softmax(by_head, dim=-1, out=probabilities[:size].view(by_head.shape))
                if sees_any is not None:
                    p.masked_fill_(~sees_any[start:end, None], 0.0)  # softmax of nothing is NaN
                y = torch.bmm(p.view(x.shape).to(products), v[:, :seen])
                output[b, start:end, h] = y.view(n_kv * group, n, -1).transpose(0, 1).to(output.dtype)
                _add_weighted(sums[:, b, h], weights[:, b, start:end], active[b], p)
                if progress is not None:
                    progress(n_kv * group * n * (2 * first + start + end + 1) // 2)
    return output


def rows_at_once(n_queries: int, n_keys: int, group: int) -> int:
    """Queries in a block: as many as make the products fast, few enough for the diagonal and for memory."""
    most = min(QUERIES_AT_ONCE, BLOCK_ELEMENTS // n_keys) // group
    return max(1, min(n_queries, most, max(64, n_keys // 16)))


def _add_weighted(sums: torch.Tensor, weights: torch.Tensor, active: list[int], p: torch.Tensor) -> None:
    """``sums`` [S, h, P] += ``weights`` [S, n] · ``p`` [h, n, seen], for the statistics that weigh these queries."""
    here = [s for s in active if weights[s].any()]
    seen = min(p.shape[-1], sums.shape[-1])
    if here:
        added = torch.matmul(weights[here], p[..., :seen])  # [h, here, seen]
        for i, s in enumerate(here):
            sums[s, :, :seen] += added[:, i]
