"""The arithmetic of capture, in both its forms, against float64: the blocked pass, and the GPU's Triton kernels.

Without a GPU the kernels run on the CPU in Triton's interpreter (conftest.py chooses it).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import column_sums, fused

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Form = Callable[..., torch.Tensor]


@pytest.fixture(params=[column_sums, fused], ids=["blocked", "fused"])
def form(request: pytest.FixtureRequest) -> Form:
    return request.param.attention_and_column_sums


def inputs(
    batch: int, heads: int, kv_heads: int, n: int, m: int, width: int, v_width: int, dtype: torch.dtype, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key, value, and weights of three statistics."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (batch, heads, n, width), (batch, kv_heads, m, width), (batch, kv_heads, m, v_width)
    q, k, v = (torch.randn(shape, generator=generator).to(dtype).to(DEVICE) for shape in shapes)
    return q, k, v, torch.rand(3, batch, n, generator=generator).to(DEVICE)


def run(
    form: Form, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, weights: torch.Tensor, columns: int, **kwargs: object
) -> tuple[torch.Tensor, torch.Tensor]:
    sums = torch.zeros(len(weights), *q.shape[:2], columns, device=q.device)
    output = form(q, k, v, 0.3, weights, sums, **kwargs)
    return output.cpu(), sums.cpu()


def truth(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, weights: torch.Tensor, real: torch.Tensor | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Output [B, N, H, V] and sums [S, B, H, M] in float64, sample by sample and query by query."""
    q, k, v, weights = (x.cpu().double() for x in (q, k, v, weights))
    batch, heads, n, _ = q.shape
    m, group = k.shape[2], heads // k.shape[1]
    output, sums = np.zeros((batch, n, heads, v.shape[-1])), np.zeros((len(weights), batch, heads, m))
    for b in range(batch):
        for h in range(heads):
            for i in range(n):
                visible = [j for j in range(m - n + i + 1) if real is None or bool(real[b, j])]
                if visible:
                    logits = (0.3 * (k[b, h // group, visible] @ q[b, h, i])).numpy()
                    p = np.exp(logits - logits.max())
                    p /= p.sum()
                    output[b, i, h] = p @ v[b, h // group, visible].numpy()
                    sums[:, b, h, visible] += weights[:, b, i, None].numpy() * p
    return output, sums


SHAPES = {
    "one token": (1, 2, 2, 1, 1, 16, 16),
    "grouped": (2, 6, 2, 37, 37, 24, 24),
    "latent widths": (1, 2, 2, 70, 70, 192, 128),
    "on a cache": (2, 4, 1, 5, 83, 20, 12),
    "one step of decoding": (1, 4, 2, 1, 65, 16, 16),
    "whole blocks": (1, 1, 1, 128, 128, 64, 64),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_output_and_sums_equal_float64(form: Form, shape: tuple[int, ...]) -> None:
    q, k, v, weights = inputs(*shape, torch.float32)
    output, sums = run(form, q, k, v, weights, columns=shape[4])
    expected_output, expected_sums = truth(q, k, v, weights)
    np.testing.assert_allclose(output, expected_output, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(sums, expected_sums, rtol=2e-5, atol=1e-7)
    # fewer columns are those columns
    part = run(form, q, k, v, weights, columns=(shape[4] + 1) // 2)[1]
    torch.testing.assert_close(part, sums[..., : (shape[4] + 1) // 2], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_inputs_keep_float32_probabilities(form: Form, dtype: torch.dtype) -> None:
    q, k, v, weights = inputs(1, 2, 2, 70, 70, 192, 128, dtype)
    output, sums = run(form, q, k, v, weights, columns=70)
    expected_output, expected_sums = truth(q, k, v, weights)
    assert output.dtype == dtype
    np.testing.assert_allclose(sums, expected_sums, rtol=2e-5, atol=1e-7)
    np.testing.assert_allclose(output.double(), expected_output, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_sums_of_bfloat16_products_are_exact_to_float32(shape: tuple[int, ...]) -> None:
    q, k, v, weights = inputs(*shape, torch.bfloat16)
    output, sums = run(
        column_sums.attention_and_column_sums, q, k, v, weights, columns=shape[4], products=torch.bfloat16
    )
    expected_output, expected_sums = truth(q, k, v, weights)
    np.testing.assert_allclose(sums, expected_sums, rtol=2e-5, atol=1e-7)
    np.testing.assert_allclose(output.double(), expected_output, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("padded", ["left", "right", "holes", "everything"])
def test_padding_is_seen_by_no_query(form: Form, padded: str) -> None:
    q, k, v, weights = inputs(3, 4, 2, 40, 40, 16, 16, torch.float32)
    real = torch.ones(3, 40, dtype=torch.bool)
    where = {"left": slice(0, 33), "right": slice(20, 40), "holes": slice(0, 40, 3), "everything": slice(0, 40)}
    real[1, where[padded]] = False
    output, sums = run(form, q, k, v, weights, columns=40, real=real.to(DEVICE))
    expected_output, expected_sums = truth(q, k, v, weights, real)
    np.testing.assert_allclose(output, expected_output, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(sums, expected_sums, rtol=2e-5, atol=1e-7)
    assert (sums[:, 1, :, ~real[1]] == 0).all()


def test_sums_are_added_to_what_is_there(form: Form) -> None:
    q, k, v, weights = inputs(1, 2, 1, 20, 20, 16, 16, torch.float32)
    once = run(form, q, k, v, weights, columns=20)[1]
    sums = torch.ones(3, 1, 2, 20, device=DEVICE)
    form(q, k, v, 0.3, weights, sums)
    torch.testing.assert_close(sums.cpu(), once + 1)


def test_large_logits_do_not_overflow(form: Form) -> None:
    q, k, v, weights = inputs(1, 2, 2, 40, 40, 16, 16, torch.float32)
    output, sums = run(form, q * 300, k, v, weights, columns=40)
    expected_output, expected_sums = truth(q * 300, k, v, weights)
    np.testing.assert_allclose(sums, expected_sums, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(output, expected_output, rtol=1e-3, atol=1e-3)


def test_nothing_to_sum_is_plain_attention(form: Form) -> None:
    q, k, v, _ = inputs(1, 2, 2, 30, 30, 16, 16, torch.float32)
    none = torch.zeros(0, 1, 30, device=DEVICE)
    output, sums = run(form, q, k, v, none, columns=1)
    assert sums.shape == (0, 1, 2, 1)
    own = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)
    torch.testing.assert_close(output, own.transpose(1, 2).cpu(), rtol=1e-4, atol=1e-5)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([column_sums, fused]), st.integers(1, 2), st.integers(1, 2), st.integers(1, 3), st.integers(1, 70),
    st.integers(0, 40), st.integers(0, 100),
)  # fmt: skip
def test_every_query_gives_exactly_one(
    module: object, batch: int, kv_heads: int, group: int, n: int, earlier: int, seed: int
) -> None:
    """Weights of 1: each head's sums over all keys come to the number of queries, whatever the shape."""
    q, k, v, _ = inputs(batch, kv_heads * group, kv_heads, n, n + earlier, 8, 8, torch.float32, seed)
    sums = run(module.attention_and_column_sums, q, k, v, torch.ones(1, batch, n, device=DEVICE), n + earlier)[1]
    torch.testing.assert_close(sums.sum(dim=-1), torch.full((1, batch, kv_heads * group), float(n)))


@pytest.mark.parametrize(
    ("n_queries", "n_keys", "group"), [(1, 1, 1), (1, 10**6, 8), (256, 256, 1), (16384, 16384, 1), (131072, 131072, 8)]
)
def test_blocks_stay_within_their_size(n_queries: int, n_keys: int, group: int) -> None:
    rows = column_sums.rows_at_once(n_queries, n_keys, group)
    assert 1 <= rows <= n_queries
    assert rows == 1 or rows * group * n_keys <= column_sums.BLOCK_ELEMENTS
