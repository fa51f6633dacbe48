"""The GPU's form of :mod:`helpers.column_sums`, in Triton: nothing but queries, keys, values and sums is in memory.

Two kernels. The first is a flash forward (Dao 2023, arXiv:2307.08691): output, and the log-sum-exp of each query's
logits. The second goes over Q·Kᵀ once more, a block of keys at a time: with the log-sum-exp known, every probability is
known at once, and a key's sums over queries stay in registers. No atomic addition, so results are the same every time.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634  # kernels work in powers of 2, which GPUs are fast in


@triton.jit
def _scores(q, k, columns, rows, real, first, n_keys, scale, padded: tl.constexpr):
    """Logits [rows, columns] in base 2 of a block of queries and keys; -inf where a query doesn't see the key."""
    logits = tl.dot(q, k, input_precision="ieee") * scale
    visible = (columns[None, :] <= first + rows[:, None]) & (columns[None, :] < n_keys)
    if padded:
        visible = visible & (tl.load(real + columns, mask=columns < n_keys, other=0) != 0)[None, :]
    return tl.where(visible, logits, float("-inf"))


@triton.jit
def _forward(
    query, key, value, output, log_sum_exp, real,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, o_batch, o_row, o_head,
    n_heads, group, n_queries, n_keys, scale,
    width: tl.constexpr, v_width: tl.constexpr, width_block: tl.constexpr, v_width_block: tl.constexpr,
    m_block: tl.constexpr, n_block: tl.constexpr, padded: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head against all keys: output and log2-sum-exp2."""
    b, h = (tl.program_id(1) // n_heads).to(tl.int64), (tl.program_id(1) % n_heads).to(tl.int64)
    rows = tl.program_id(0) * m_block + tl.arange(0, m_block)
    d, dv = tl.arange(0, width_block), tl.arange(0, v_width_block)
    first = n_keys - n_queries
    q = tl.load(
        query + b * q_batch + h * q_head + rows[:, None].to(tl.int64) * q_row + d[None, :],
        mask=(rows[:, None] < n_queries) & (d[None, :] < width), other=0.0,
    )  # fmt: skip
    keys, values = key + b * k_batch + h // group * k_head, value + b * v_batch + h // group * v_head
    largest = tl.full([m_block], float("-inf"), tl.float32)
    total = tl.zeros([m_block], tl.float32)
    weighted = tl.zeros([m_block, v_width_block], tl.float32)
    for start in range(0, tl.minimum(n_keys, first + (tl.program_id(0) + 1) * m_block), n_block):
        columns = start + tl.arange(0, n_block)
        inside = columns < n_keys
        at = columns.to(tl.int64)
        k = tl.load(keys + at[None, :] * k_row + d[:, None], mask=inside[None, :] & (d[:, None] < width), other=0.0)
        v = tl.load(
            values + at[:, None] * v_row + dv[None, :], mask=inside[:, None] & (dv[None, :] < v_width), other=0.0
        )
        logits = _scores(q, k, columns, rows, real + b * n_keys, first, n_keys, scale, padded)
        now = tl.maximum(largest, tl.max(logits, 1))
        shift = tl.where(now == float("-inf"), 0.0, now)  # a query that has seen no key yet
        p = tl.exp2(logits - shift[:, None])
        shrink = tl.exp2(largest - shift)
        total = total * shrink + tl.sum(p, 1)
        weighted = weighted * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        largest = now
    none = total == 0.0
    result = weighted / tl.where(none, 1.0, total)[:, None]
    tl.store(
        output + b * o_batch + h * o_head + rows[:, None].to(tl.int64) * o_row + dv[None, :],
        result.to(output.dtype.element_ty), mask=(rows[:, None] < n_queries) & (dv[None, :] < v_width),
    )  # fmt: skip
    # +inf makes every probability of a query that sees nothing 0 in the second kernel
    lse = tl.where(none, float("inf"), largest + tl.log2(tl.where(none, 1.0, total)))
    tl.store(log_sum_exp + tl.program_id(1).to(tl.int64) * n_queries + rows, lse, mask=rows < n_queries)


@triton.jit
def _column_sums(
    query, key, log_sum_exp, weights, sums, real,
    q_batch, q_head, q_row, k_batch, k_head, k_row, s_statistic, s_batch, s_head, w_statistic, w_batch,
    n_heads, group, n_queries, n_keys, n_columns, scale,
    n_statistics: tl.constexpr, statistics_block: tl.constexpr, width: tl.constexpr, width_block: tl.constexpr,
    m_block: tl.constexpr, n_block: tl.constexpr, padded: tl.constexpr,
):  # fmt: skip
    """One block of keys of one head against all queries that see it: every statistic's sum over queries."""
    b, h = (tl.program_id(1) // n_heads).to(tl.int64), (tl.program_id(1) % n_heads).to(tl.int64)
    columns = tl.program_id(0) * n_block + tl.arange(0, n_block)
    d, s = tl.arange(0, width_block), tl.arange(0, statistics_block)
    first = n_keys - n_queries
    k = tl.load(
        key + b * k_batch + h // group * k_head + columns[None, :].to(tl.int64) * k_row + d[:, None],
        mask=(columns[None, :] < n_keys) & (d[:, None] < width), other=0.0,
    )  # fmt: skip
    queries, lse_of = query + b * q_batch + h * q_head, log_sum_exp + tl.program_id(1).to(tl.int64) * n_queries
    total = tl.zeros([statistics_block, n_block], tl.float32)
    first_seeing = tl.maximum(0, tl.program_id(0) * n_block - first) // m_block * m_block
    for start in range(first_seeing, n_queries, m_block):
        rows = start + tl.arange(0, m_block)
        inside = rows < n_queries
        q = tl.load(
            queries + rows[:, None].to(tl.int64) * q_row + d[None, :],
            mask=inside[:, None] & (d[None, :] < width), other=0.0,
        )  # fmt: skip
        lse = tl.load(lse_of + rows, mask=inside, other=float("inf"))
        logits = _scores(q, k, columns, rows, real + b * n_keys, first, n_keys, scale, padded)
        p = tl.exp2(logits - lse[:, None])
        for statistic in tl.static_range(n_statistics):
            w = tl.load(weights + statistic * w_statistic + b * w_batch + rows, mask=inside, other=0.0)
            total += tl.where(s[:, None] == statistic, tl.sum(p * w[:, None], 0)[None, :], 0.0)
    place = sums + s[:, None] * s_statistic + b * s_batch + h * s_head + columns[None, :]
    mask = (s[:, None] < n_statistics) & (columns[None, :] < n_columns)
    tl.store(place, tl.load(place, mask=mask, other=0.0) + total, mask=mask)


def attention_and_column_sums(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    weights: torch.Tensor,
    sums: torch.Tensor,
    *,
    real: torch.Tensor | None = None,
) -> torch.Tensor:
    """Same as :func:`helpers.column_sums.attention_and_column_sums`; logits and probabilities are float32 throughout.

    Products are in the inputs' dtype with float32 accumulation (float32 inputs: IEEE float32, not TF32).
    """
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    batch, heads, n_queries, width = query.shape
    kv_heads, n_keys = key.shape[1:3]
    v_width = value.shape[-1]
    output = query.new_empty(batch, n_queries, heads, v_width)
    if n_queries == 0:
        return output
    if not query.is_cuda:  # Triton's interpreter, which multiplies BF16 as if it were integers
        query, key, value = query.float(), key.float(), value.float()
    log_sum_exp = query.new_empty(batch * heads, n_queries, dtype=torch.float32)
    block = 32 if query.dtype == torch.float32 else 64  # what fits the registers and shared memory at width 192
    padding = (
        torch.empty(0, dtype=torch.int8, device=query.device) if real is None else real.to(torch.int8).contiguous()
    )
    shared: dict[str, Any] = {
        "n_heads": heads, "group": heads // kv_heads, "n_queries": n_queries, "n_keys": n_keys,
        "scale": scale * LOG2_E, "width": width, "width_block": _block(width), "m_block": block, "n_block": block,
        "padded": real is not None,
    }  # fmt: skip
    _forward[(triton.cdiv(n_queries, block), batch * heads)](
        query, key, value, output, log_sum_exp, padding, *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
        *output.stride()[:3], v_width=v_width, v_width_block=_block(v_width), **shared,
    )  # fmt: skip
    n_statistics, _, _, n_columns = sums.shape
    if n_statistics:
        _column_sums[(triton.cdiv(n_columns, block), batch * heads)](
            query, key, log_sum_exp, weights, sums, padding, *query.stride()[:3], *key.stride()[:3],
            *sums.stride()[:3], *weights.stride()[:2], n_columns=n_columns, n_statistics=n_statistics,
            statistics_block=triton.next_power_of_2(n_statistics), **shared,
        )  # fmt: skip
    return output


def _block(width: int) -> int:
    """Tensors in a kernel have powers of 2 as sizes, and a product at least 16."""
    return max(16, triton.next_power_of_2(width))
