"""The capture: column sums of attention against plain loops in float64, transformers' eager matrix and closed forms."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import llama_config, make_model, mla_config, stored_tensors, trace, write_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm import tqdm
from transformers import AttentionInterface, DeepseekV3Config, MistralConfig, PreTrainedConfig, Qwen2Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention
from transformers.models.llama.modeling_llama import LlamaAttention

import helpers.capture
from helpers.capture import (
    Capture,
    ColumnSums,
    capture_attention,
    capture_digest,
    eager_attention_weights,
)
from helpers.checkpoint import Checkpoint
from helpers.column_sums import attention_and_column_sums
from helpers.errors import InputError
from helpers.kimi_shaped import CONFIG
from helpers.layer import AttentionLayer, load_attention
from helpers.memory import capture_bytes, heads_at_once
from helpers.products import Float32Products, float32_products_in

# most prompts here are shorter than the default window of 32; one test looks at the warning
pytestmark = pytest.mark.filterwarnings("ignore:A window of")
STATISTICS = ["mass", "mass_window", "mass_last", "mass_decayed", "mass_continuation"]
Weights = dict[str, np.ndarray]


def make_layer(
    folder: Path, config: PreTrainedConfig, layer: int = 1, dtype: torch.dtype = torch.float32
) -> tuple[AttentionLayer, torch.nn.Module]:
    """Write a checkpoint, and return one of its layers and the full model that it came from."""
    model = make_model(config)
    write_checkpoint(folder, config, stored_tensors(model))
    return load_attention(Checkpoint.open(folder), layer, dtype), model


@pytest.fixture(scope="module")
def mla(tmp_path_factory: pytest.TempPathFactory) -> AttentionLayer:
    return make_layer(tmp_path_factory.mktemp("mla"), mla_config())[0]


@pytest.fixture(scope="module")
def gqa(tmp_path_factory: pytest.TempPathFactory) -> AttentionLayer:
    return make_layer(tmp_path_factory.mktemp("gqa"), llama_config())[0]


@pytest.fixture(params=["mla", "gqa"])
def layer(request: pytest.FixtureRequest) -> AttentionLayer:
    return request.getfixturevalue(request.param)


def hidden(layer: AttentionLayer, n_tokens: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, n_tokens, layer.config.hidden_size, generator=generator).to(layer.dtype)


def assert_same(ours: Capture, theirs: Capture, rtol: float = 2e-6, sample: int | slice = slice(None)) -> None:
    for name in ("output", *STATISTICS):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name)[sample], rtol=rtol, atol=1e-6)


# The truth: attention written out in float64 from its formula, one query and one head at a time


def softmax_rows(queries: np.ndarray, keys: np.ndarray, scale: float) -> np.ndarray:
    """Causal probabilities [L, L] of one head."""
    n = len(queries)
    p = np.zeros((n, n))
    for i in range(n):
        logits = [scale * float(queries[i] @ keys[j]) for j in range(i + 1)]
        exponentials = [math.exp(logit - max(logits)) for logit in logits]
        for j in range(i + 1):
            p[i, j] = exponentials[j] / sum(exponentials)
    return p


def rms_norm(x: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + epsilon) * weight


def yarn_frequencies(width: int, base: float, factor: float) -> list[float]:
    """Kimi's YaRN: 4,096 original positions, beta 32 and 1."""
    low, high = (width * math.log(4096 / (turns * 2 * math.pi)) / (2 * math.log(base)) for turns in (32, 1))
    low, high = max(math.floor(low), 0), min(math.ceil(high), width - 1)
    frequencies = []
    for pair in range(width // 2):
        slow_share = min(1.0, max(0.0, (pair - low) / (high - low)))
        frequency = base ** (-2 * pair / width)
        frequencies.append(frequency * (1 - slow_share) + frequency / factor * slow_share)
    return frequencies


def rotate_neighbours(x: np.ndarray, frequencies: list[float]) -> np.ndarray:
    """DeepSeek's layout: dimensions 2k and 2k+1 turn together."""
    y = np.empty_like(x)
    for position in range(len(x)):
        for k, frequency in enumerate(frequencies):
            a, b = x[position, 2 * k], x[position, 2 * k + 1]
            cos, sin = math.cos(position * frequency), math.sin(position * frequency)
            y[position, 2 * k], y[position, 2 * k + 1] = a * cos - b * sin, a * sin + b * cos
    return y


def rotate_halves(x: np.ndarray, frequencies: list[float]) -> np.ndarray:
    """Llama's layout: dimensions k and k + width/2 turn together."""
    y, half = np.empty_like(x), x.shape[1] // 2
    for position in range(len(x)):
        for k, frequency in enumerate(frequencies):
            a, b = x[position, k], x[position, k + half]
            cos, sin = math.cos(position * frequency), math.sin(position * frequency)
            y[position, k], y[position, k + half] = a * cos - b * sin, a * sin + b * cos
    return y


def mla_by_hand(w: Weights, config: PreTrainedConfig, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Multi-head latent attention (arXiv:2405.04434): probabilities [H, L, L] and output [L, hidden]."""
    nope, rope, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    frequencies = yarn_frequencies(rope, 50000.0, 64.0)
    scale = (nope + rope) ** -0.5 * (0.1 * math.log(64.0) + 1) ** 2
    q = rms_norm(x @ w["q_a_proj.weight"].T, w["q_a_layernorm.weight"], 1e-6) @ w["q_b_proj.weight"].T
    compressed = x @ w["kv_a_proj_with_mqa.weight"].T
    latent = rms_norm(compressed[:, : config.kv_lora_rank], w["kv_a_layernorm.weight"], 1e-6)
    shared_key = rotate_neighbours(compressed[:, config.kv_lora_rank :], frequencies)
    kv = latent @ w["kv_b_proj.weight"].T
    probabilities, heads = [], []
    for head in range(config.num_attention_heads):
        q_head = q[:, head * (nope + rope) : (head + 1) * (nope + rope)]
        kv_head = kv[:, head * (nope + value) : (head + 1) * (nope + value)]
        queries = np.hstack([q_head[:, :nope], rotate_neighbours(q_head[:, nope:], frequencies)])
        p = softmax_rows(queries, np.hstack([kv_head[:, :nope], shared_key]), scale)
        probabilities.append(p)
        heads.append(p @ kv_head[:, nope:])
    return np.stack(probabilities), np.hstack(heads) @ w["o_proj.weight"].T


def gqa_by_hand(w: Weights, config: PreTrainedConfig, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Llama's grouped-query attention: neighbouring query heads share a key head."""
    n_heads, n_kv = config.num_attention_heads, config.num_key_value_heads
    width = config.hidden_size // n_heads
    frequencies = [10000.0 ** (-2 * k / width) for k in range(width // 2)]
    q, k, v = (x @ w[f"{part}_proj.weight"].T for part in "qkv")
    probabilities, heads = [], []
    for head in range(n_heads):
        shared = head * n_kv // n_heads
        of_head, of_group = (slice(i * width, (i + 1) * width) for i in (head, shared))
        queries, keys = rotate_halves(q[:, of_head], frequencies), rotate_halves(k[:, of_group], frequencies)
        p = softmax_rows(queries, keys, width**-0.5)
        probabilities.append(p)
        heads.append(p @ v[:, of_group])
    return np.stack(probabilities), np.hstack(heads) @ w["o_proj.weight"].T


def column_sums(p: np.ndarray, prompt: int) -> dict[str, np.ndarray]:
    """The statistics from probabilities [H, L, L], each from its own definition, query by query."""
    n_heads, n_tokens, _ = p.shape
    sums = {name: np.zeros((n_heads, prompt)) for name in STATISTICS}
    for i in range(n_tokens):
        for j in range(min(i + 1, prompt)):
            given_to_j = p[:, i, j]
            if i >= prompt:
                sums["mass_continuation"][:, j] += given_to_j
                continue
            sums["mass"][:, j] += given_to_j
            sums["mass_decayed"][:, j] += 0.98 ** (prompt - 1 - i) * given_to_j
            if prompt - i <= 32:
                sums["mass_window"][:, j] += given_to_j
            if i == prompt - 1:
                sums["mass_last"][:, j] += given_to_j
    return sums


def weights_of(layer: AttentionLayer) -> Weights:
    return {name: tensor.double().numpy() for name, tensor in layer.module.state_dict().items()}


@pytest.mark.parametrize("prompt", [40, 52])
@pytest.mark.parametrize(("name", "by_hand"), [("mla", mla_by_hand), ("gqa", gqa_by_hand)])
def test_output_and_every_statistic_equal_plain_loops(
    request: pytest.FixtureRequest, name: str, by_hand: Callable[..., tuple[np.ndarray, np.ndarray]], prompt: int
) -> None:
    layer = request.getfixturevalue(name)
    hidden_states = hidden(layer, 52)
    captured = capture_attention(layer, hidden_states, prompt_length=prompt)
    p, output = by_hand(weights_of(layer), layer.config, hidden_states[0].double().numpy())
    np.testing.assert_allclose(captured.output[0], output, rtol=0, atol=1e-5 * np.abs(output).max())
    truth = column_sums(p, prompt)
    np.testing.assert_allclose(captured.mass[0], truth["mass"], rtol=1e-5)
    for statistic, expected in truth.items():
        ours = getattr(captured, statistic)
        assert ours.dtype == torch.float32
        # a single probability of 1e-9 has the logits' rounding in it
        np.testing.assert_allclose(ours[0], expected, rtol=2e-5, atol=1e-9, err_msg=statistic)


@contextmanager
def spy(layer: AttentionLayer) -> Iterator[dict[str, Any]]:
    """Note the query, key, value and scale that the module hands to its attention implementation."""
    seen: dict[str, Any] = {}

    def implementation(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **kwargs: Any) -> Any:
        seen.update(query=query, key=key, value=value, scaling=scaling)
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None

    AttentionInterface.register("spy", implementation)
    before = layer.module.config._attn_implementation
    layer.module.config._attn_implementation = "spy"
    yield seen
    layer.module.config._attn_implementation = before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("config", [mla_config(), llama_config()], ids=["mla", "gqa"])
def test_narrow_layers_lose_no_precision_in_softmax_or_sums(
    tmp_path: Path, config: PreTrainedConfig, dtype: torch.dtype
) -> None:
    """From the very queries and keys of a BF16 layer, the mass is right to float32: nothing is rounded on the way."""
    layer, _ = make_layer(tmp_path, config, dtype=dtype)
    hidden_states = hidden(layer, 48)
    captured = capture_attention(layer, hidden_states, prompt_length=40)
    with Float32Products(), spy(layer) as seen:
        layer.module(hidden_states, layer.position_embeddings(hidden_states), None)
    assert seen["query"].dtype == dtype
    queries, keys = (seen[part][0].double().numpy() for part in ("query", "key"))
    group = len(queries) // len(keys)
    p = np.stack([softmax_rows(q, keys[head // group], seen["scaling"]) for head, q in enumerate(queries)])
    for statistic, expected in column_sums(p, 40).items():
        np.testing.assert_allclose(getattr(captured, statistic)[0], expected, rtol=1e-5, atol=1e-9)
    assert captured.output.dtype == dtype


# Against transformers


@pytest.mark.parametrize(
    "config",
    [
        mla_config(),
        mla_config(1),
        llama_config(),
        llama_config(num_key_value_heads=1),
        Qwen2Config(
            vocab_size=200, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, initializer_range=0.2,
        ),
        MistralConfig(
            vocab_size=200, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, initializer_range=0.2, sliding_window=60,
        ),
    ],
    ids=["mla", "mla-no-yarn", "gqa", "mqa", "qwen2", "mistral-within-its-window"],
)  # fmt: skip
def test_mass_is_the_column_sum_of_the_full_models_eager_attention(tmp_path: Path, config: PreTrainedConfig) -> None:
    layer, model = make_layer(tmp_path, config)
    ids = torch.randint(0, 200, (2, 60), generator=torch.Generator().manual_seed(0))
    truth = trace(model, ids)[1]
    captured = capture_attention(layer, truth.attention_in, prompt_length=50)
    p = truth.probabilities.double()
    np.testing.assert_allclose(captured.mass, p[:, :, :50, :50].sum(dim=2), rtol=1e-5)
    np.testing.assert_allclose(captured.mass_continuation, p[:, :, 50:, :50].sum(dim=2), rtol=2e-5, atol=1e-7)
    torch.testing.assert_close(captured.output, truth.attention_out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(eager_attention_weights(layer, truth.attention_in), truth.probabilities)


def test_eager_weights_of_a_bfloat16_layer_agree_to_its_precision(tmp_path: Path) -> None:
    """The first notebook's cross-check: transformers rounds logits and matrix to BF16, the capture doesn't."""
    layer, _ = make_layer(tmp_path, mla_config(), dtype=torch.bfloat16)
    hidden_states = hidden(layer, 64)
    weights = eager_attention_weights(layer, hidden_states)
    assert weights.dtype == torch.bfloat16
    assert weights.float().triu(1).count_nonzero() == 0
    mass = capture_attention(layer, hidden_states).mass
    # logits up to 8 have steps of 2^-5 in BF16, and are rounded to half a step twice: as a product, and scaled
    np.testing.assert_allclose(weights.double().sum(dim=2), mass, rtol=2**-5)
    assert np.corrcoef(weights.double().sum(dim=2).ravel(), mass.ravel())[0, 1] > 0.9999


# Causality and totals


def test_a_token_gets_exactly_nothing_from_queries_before_it(
    layer: AttentionLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen query by query: weights that single out one query turn a statistic into that query's probabilities."""
    queries = [0, 1, 7, 20, 31]
    one_query_each = torch.eye(32)[queries][:, None]
    monkeypatch.setattr(ColumnSums, "query_weights", lambda *_: one_query_each)
    captured = capture_attention(layer, hidden(layer, 32))
    for i, name in zip(queries, STATISTICS, strict=True):
        p = getattr(captured, name)[0]
        assert torch.all(p[:, i + 1 :] == 0), f"query {i} sees the future"
        assert torch.all(p[:, : i + 1] > 0)
        torch.testing.assert_close(p.sum(dim=1), torch.ones(layer.n_heads))


@pytest.mark.parametrize("changed", [1, 17, 39])
def test_a_later_token_changes_nothing_before_it(layer: AttentionLayer, changed: int) -> None:
    hidden_states = hidden(layer, 40)
    other = hidden_states.clone()
    other[:, changed:] = hidden(layer, 40 - changed, seed=5) * 3
    before = capture_attention(layer, hidden_states, prompt_length=changed)
    after = capture_attention(layer, other, prompt_length=changed)
    for name in STATISTICS[:-1]:
        assert torch.equal(getattr(before, name), getattr(after, name)), name
    assert torch.equal(before.output[:, :changed], after.output[:, :changed])
    assert not torch.equal(before.mass_continuation, after.mass_continuation)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 24).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n))), st.integers(0, 3))
def test_prompt_and_continuation_share_what_all_queries_give(
    mla: AttentionLayer, lengths: tuple[int, int], seed: int
) -> None:
    n_tokens, prompt = lengths
    hidden_states = hidden(mla, n_tokens, seed=seed)
    whole = capture_attention(mla, hidden_states)
    split = capture_attention(mla, hidden_states, prompt_length=prompt)
    torch.testing.assert_close(split.mass + split.mass_continuation, whole.mass[..., :prompt], rtol=2e-6, atol=1e-7)
    torch.testing.assert_close(split.mass.sum(dim=-1), torch.full((1, mla.n_heads), float(prompt)))
    torch.testing.assert_close(split.mass_last.sum(dim=-1), torch.ones(1, mla.n_heads))
    torch.testing.assert_close(split.mass_window.sum(dim=-1), torch.full((1, mla.n_heads), float(min(32, prompt))))
    total = sum(0.98**k for k in range(prompt))
    torch.testing.assert_close(split.mass_decayed.sum(dim=-1), torch.full((1, mla.n_heads), total))
    # a statistic of the prompt is that of the prompt alone
    alone = capture_attention(mla, hidden_states[:, :prompt])
    for name in STATISTICS[:-1]:
        torch.testing.assert_close(getattr(split, name), getattr(alone, name), rtol=2e-6, atol=1e-7)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> AttentionLayer:
    """Two heads in BF16, small enough for 16,384 tokens."""
    config = mla_config(num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=1)
    return make_layer(tmp_path_factory.mktemp("narrow"), config, 0, torch.bfloat16)[0]


def test_total_mass_is_heads_times_queries_at_16384_tokens(narrow: AttentionLayer) -> None:
    """Sums in BF16 stop growing at 256: each further probability is lost in the rounding."""
    n = 16_384
    captured = capture_attention(narrow, hidden(narrow, n))
    assert captured.mass.double().sum().item() == pytest.approx(2 * n, rel=1e-5)
    np.testing.assert_allclose(captured.mass.double().sum(dim=-1), n, rtol=1e-5)
    assert captured.mass.max() > 256


def test_attention_that_spreads_evenly_gives_harmonic_sums(narrow: AttentionLayer) -> None:
    """Zero hidden states make every logit zero: token j collects the sum of 1/(i+1), known in closed form."""
    n, prompt = 8192, 8000
    captured = capture_attention(narrow, torch.zeros(1, n, 64, dtype=torch.bfloat16), prompt_length=prompt)
    share = 1 / np.arange(1, n + 1)  # what query i gives to each token that it sees
    age = prompt - 1 - np.arange(prompt)
    expected = {
        "mass": np.cumsum(share[:prompt][::-1])[::-1],
        "mass_window": np.cumsum((share[:prompt] * (age < 32))[::-1])[::-1],
        "mass_last": np.full(prompt, 1 / prompt),
        "mass_decayed": np.cumsum((share[:prompt] * 0.98**age)[::-1])[::-1],
        "mass_continuation": np.full(prompt, share[prompt:].sum()),
    }
    for name, truth in expected.items():
        for head in getattr(captured, name)[0]:
            np.testing.assert_allclose(head, truth, rtol=1e-5, err_msg=name)


# Batches, blocks, edges


def test_a_batch_of_two_is_two_of_one(layer: AttentionLayer) -> None:
    hidden_states = hidden(layer, 45, batch=2)
    both = capture_attention(layer, hidden_states, prompt_length=36)
    for sample in range(2):
        alone = capture_attention(layer, hidden_states[sample : sample + 1], prompt_length=36)
        assert_same(alone, both, sample=slice(sample, sample + 1))
    assert not torch.allclose(both.mass[0], both.mass[1], rtol=0.1)


@pytest.mark.parametrize("heads_elements", [1, 400, 2**22])
@pytest.mark.parametrize("rows", [1, 2, 7, 44, 45])
def test_the_size_of_a_block_changes_nothing(
    layer: AttentionLayer, monkeypatch: pytest.MonkeyPatch, rows: int, heads_elements: int
) -> None:
    hidden_states = hidden(layer, 45, batch=2)
    whole = capture_attention(layer, hidden_states, prompt_length=36)
    monkeypatch.setattr("helpers.column_sums.rows_at_once", lambda *_: rows)
    monkeypatch.setattr("helpers.column_sums.HEADS_ELEMENTS", heads_elements)
    assert_same(capture_attention(layer, hidden_states, prompt_length=36), whole)


class LargestTensor(TorchDispatchMode):
    """Notes the most elements that any tensor had."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.untyped_storage().nbytes() // result.element_size())
        return result


def test_memory_never_grows_with_the_square_of_the_length(
    narrow: AttentionLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("helpers.column_sums.BLOCK_ELEMENTS", 2**18)
    monkeypatch.setattr("helpers.column_sums.HEADS_ELEMENTS", 2**18)
    n = 2048
    with LargestTensor() as largest:
        capture_attention(narrow, hidden(narrow, n))
    assert n * 64 <= largest.elements <= 2**18 < n * n


def test_a_prompt_of_one_token_gets_all_that_its_query_gives(layer: AttentionLayer) -> None:
    hidden_states = hidden(layer, 9)
    captured = capture_attention(layer, hidden_states, prompt_length=1)
    for name in STATISTICS[:-1]:
        assert torch.equal(getattr(captured, name), torch.ones(1, layer.n_heads, 1)), name
    whole = capture_attention(layer, hidden_states)
    torch.testing.assert_close(captured.mass_continuation, whole.mass[..., :1] - 1, rtol=1e-5, atol=1e-6)


def test_a_prompt_that_is_everything_leaves_no_continuation(layer: AttentionLayer) -> None:
    hidden_states = hidden(layer, 9)
    captured = capture_attention(layer, hidden_states, prompt_length=9)
    assert captured.mass_continuation.shape == (1, layer.n_heads, 9)
    assert captured.mass_continuation.count_nonzero() == 0
    default = capture_attention(layer, hidden_states)
    for name in ("output", *STATISTICS):
        assert torch.equal(getattr(captured, name), getattr(default, name)), name


@pytest.mark.parametrize(("prompt", "same"), [(31, True), (32, True), (33, False)])
def test_a_window_of_32_queries_is_all_of_a_shorter_prompt(layer: AttentionLayer, prompt: int, same: bool) -> None:
    captured = capture_attention(layer, hidden(layer, 40), prompt_length=prompt)
    assert torch.equal(captured.mass_window, captured.mass) is same


def test_the_output_is_the_layers_own(layer: AttentionLayer) -> None:
    hidden_states = hidden(layer, 33, batch=2)
    own, _ = layer.module(hidden_states, layer.position_embeddings(hidden_states), None)
    torch.testing.assert_close(capture_attention(layer, hidden_states).output, own, rtol=1e-4, atol=1e-5)


def test_the_first_sample_is_stored_by_name(layer: AttentionLayer) -> None:
    captured = capture_attention(layer, hidden(layer, 12, batch=2), prompt_length=8)
    stored = captured.first_sample()
    assert list(stored) == STATISTICS
    for name, tensor in stored.items():
        assert torch.equal(tensor, getattr(captured, name)[0])
        assert tensor.is_contiguous()


# Several windows, another decay


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 12),
    st.lists(st.integers(1, 15), min_size=1, max_size=3, unique=True).map(tuple),
    st.floats(0.01, 1.0),
)
def test_windows_and_decay_follow_their_definitions(
    mla: AttentionLayer, prompt: int, windows: tuple[int, ...], decay: float
) -> None:
    """Against transformers' eager matrix, weighted query by query in float64."""
    hidden_states = hidden(mla, 12)
    captured = capture_attention(mla, hidden_states, prompt, windows=windows, decay=decay)
    p = eager_attention_weights(mla, hidden_states)[0, :, :prompt, :prompt].double()
    assert list(captured.mass_windows) == list(windows)
    for w, ours in captured.mass_windows.items():
        np.testing.assert_allclose(ours[0], p[:, max(0, prompt - w) :].sum(dim=1), rtol=1e-4, atol=1e-7)
    assert torch.equal(captured.mass_window, captured.mass_windows[windows[0]])
    decayed = sum(decay ** (prompt - 1 - i) * p[:, i] for i in range(prompt))
    np.testing.assert_allclose(captured.mass_decayed[0], decayed, rtol=1e-4, atol=1e-7)
    stored = captured.first_sample()
    assert [name for name in stored if name not in STATISTICS] == [f"mass_window_{w}" for w in windows[1:]]
    for w in windows[1:]:
        assert torch.equal(stored[f"mass_window_{w}"], captured.mass_windows[w][0])


def test_a_window_longer_than_the_prompt_is_clamped_and_said(mla: AttentionLayer) -> None:
    with pytest.warns(UserWarning, match="A window of 64 queries is longer than the prompt of 40: all its queries"):
        captured = capture_attention(mla, hidden(mla, 40), windows=(8, 64))
    assert torch.equal(captured.mass_windows[64], captured.mass)
    assert not torch.equal(captured.mass_windows[8], captured.mass)


# Heads at a time


@pytest.mark.parametrize("at_once", [1, 3])
@pytest.mark.parametrize("q_lora_rank", [24, None])
def test_a_latent_layer_expanded_some_heads_at_a_time_is_the_same_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, q_lora_rank: int | None, at_once: int
) -> None:
    layer, _ = make_layer(tmp_path, mla_config(q_lora_rank=q_lora_rank))
    hidden_states = hidden(layer, 45, batch=2)
    whole = capture_attention(layer, hidden_states, prompt_length=36)
    ran = []
    layer.module.o_proj.register_forward_hook(lambda module, args, output: ran.append(args[0].shape))
    monkeypatch.setattr("helpers.capture.heads_at_once", lambda *_: at_once)
    assert_same(capture_attention(layer, hidden_states, prompt_length=36), whole)
    assert ran == [(2, 45, 4 * 12)]
    assert dict(layer.module.named_parameters())["kv_b_proj.weight"].shape[0] == 4 * 20


def test_long_latent_layers_are_expanded_few_heads_at_a_time() -> None:
    """K2.6: 131,072 tokens of 64 heads take 17 GB expanded; grouped-query layers have nothing to expand."""
    with torch.device("meta"):
        kimi = DeepseekV3Attention(DeepseekV3Config(**json.loads(CONFIG.read_text())["text_config"]), 0)
        llama = LlamaAttention(llama_config(), 0)
    assert heads_at_once(kimi, 64, 256, torch.bfloat16) == 64
    long = heads_at_once(kimi, 64, 131_072, torch.bfloat16)
    assert 1 <= long < 16
    assert capture_bytes(kimi, 64, 1, 131_072, torch.bfloat16) < 12e9
    assert heads_at_once(llama, 6, 131_072, torch.bfloat16) == 6


# Products in BF16


def test_products_by_bfloat16_instructions_round_no_logit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the same queries and keys, the mass is exact to float32 on any processor; the output to BF16."""
    layer, _ = make_layer(tmp_path, mla_config(), dtype=torch.bfloat16)
    hidden_states = hidden(layer, 200)
    with Float32Products(), spy(layer) as seen:
        layer.module(hidden_states, layer.position_embeddings(hidden_states), None)
    q, k = (seen[part][0].double() for part in ("query", "key"))
    logits = (q @ k.transpose(1, 2) * seen["scaling"]).masked_fill(torch.ones(200, 200).triu(1).bool(), -math.inf)
    truth = logits.softmax(-1).sum(dim=1)
    captured = {}
    for products in (torch.bfloat16, torch.float32):
        monkeypatch.setattr("helpers.capture.multiplies_in", lambda *_, products=products: products)
        captured[products] = capture_attention(layer, hidden_states)
        np.testing.assert_allclose(captured[products].mass[0], truth, rtol=1e-5)
    fast, exact = (found.output.float() for found in captured.values())
    torch.testing.assert_close(fast, exact, rtol=0.05, atol=0.05)


def test_a_precision_that_was_inherited_goes_on_being_inherited() -> None:
    backend = torch.backends.mkldnn
    before = backend.fp32_precision
    try:
        backend.fp32_precision = "bf16"
        with float32_products_in("ieee"):
            assert backend.matmul.fp32_precision == "ieee"
        backend.fp32_precision = "ieee"
        assert backend.matmul.fp32_precision == "ieee"
    finally:
        backend.fp32_precision = before


def test_captures_in_two_threads_do_not_change_each_others_precision(mla: AttentionLayer, tmp_path: Path) -> None:
    narrow, _ = make_layer(tmp_path, mla_config(), dtype=torch.bfloat16)
    hidden_states = hidden(mla, 300)
    expected = capture_attention(mla, hidden_states).mass
    with ThreadPoolExecutor(1) as one_thread, ThreadPoolExecutor(1) as other_thread:
        others = [other_thread.submit(capture_attention, narrow, hidden(narrow, 300)) for _ in range(30)]
        ours = [one_thread.submit(capture_attention, mla, hidden_states) for _ in range(30)]
        for future in others + ours:
            future.result()
    assert all(torch.equal(future.result().mass, expected) for future in ours)
    assert torch.backends.mkldnn.matmul.fp32_precision == "none"


def test_a_capture_leaves_torchs_precision_of_products_as_it_was(mla: AttentionLayer) -> None:
    setting = torch.backends.mkldnn.matmul
    assert setting.fp32_precision == "none"
    capture_attention(mla, hidden(mla, 40))
    assert setting.fp32_precision == "none"
    with pytest.raises(ZeroDivisionError), float32_products_in("bf16"):
        _ = 1 / 0
    assert setting.fp32_precision == "none"


def test_sums_stay_exact_where_products_of_float32_were_made_fast_for_the_whole_process(mla: AttentionLayer) -> None:
    """torch.set_float32_matmul_precision("medium") is common in training scripts."""
    expected = capture_attention(mla, hidden(mla, 300)).mass
    with float32_products_in("bf16"):
        hidden_states = hidden(mla, 300)
        with spy(mla) as seen, float32_products_in("ieee"):
            mla.module(hidden_states, mla.position_embeddings(hidden_states), None)
        weights, sums = torch.ones(1, 1, 300), torch.zeros(1, 1, mla.n_heads, 300)
        attention_and_column_sums(seen["query"], seen["key"], seen["value"], seen["scaling"], weights, sums)
    torch.testing.assert_close(sums[0], expected, rtol=1e-6, atol=1e-6)


# Memory and progress


def test_a_capture_that_memory_cannot_hold_is_refused_with_the_numbers(
    mla: AttentionLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("helpers.memory.free_bytes", lambda device: 10**8)
    with pytest.raises(
        InputError, match=r"Capturing 90,000 tokens takes about 0\.\d GB, and 0\.1 GB are free on cpu: take fewer"
    ):
        capture_attention(mla, hidden(mla, 90000))
    with pytest.raises(InputError, match=r"Capturing 3 samples of 90,000 tokens"):
        capture_attention(mla, hidden(mla, 90000, batch=3))


def test_long_work_shows_tokens_rate_and_time_left(
    mla: AttentionLayer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    capture_attention(mla, hidden(mla, 64))
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("helpers.capture.PROGRESS_AFTER_S", 0.0)
    monkeypatch.setattr("helpers.capture.tqdm", partial(tqdm, mininterval=0, miniters=1))
    monkeypatch.setattr("helpers.column_sums.rows_at_once", lambda *_: 8)
    monkeypatch.setattr("helpers.column_sums.HEADS_ELEMENTS", 1)
    capture_attention(mla, hidden(mla, 64, batch=2))
    shown = capsys.readouterr().err
    done = [
        int(n) for n in re.findall(r"Capturing attention: .*? (\d+)/128 tokens \[\d+:\d+<\d+:\d+, .*? tokens/s", shown)
    ]
    assert done[-1] == 128
    assert done == sorted(done)
    assert len(set(done)) > 8


# Refusals


def test_a_layer_that_is_not_causal_is_refused(mla: AttentionLayer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla.module, "is_causal", False)
    with pytest.raises(InputError, match=r"Layer 1 \(DeepseekV3Attention\) is not causal self-attention"):
        capture_attention(mla, hidden(mla, 6))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"windows": ()}, r"windows are whole numbers of queries, at least 1, such as \(16, 32\), not \(\)"),
        ({"windows": (4, 0)}, r"windows are whole numbers .*, not \(4, 0\)"),
        ({"decay": 0.0}, "decay is above 0 and at most 1, not 0"),
        ({"decay": 1.5}, "decay is above 0 and at most 1, not 1.5"),
    ],
)
def test_impossible_statistics_are_refused(mla: AttentionLayer, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        capture_attention(mla, hidden(mla, 6), **settings)


def test_hidden_states_of_another_width_are_refused(mla: AttentionLayer) -> None:
    with pytest.raises(InputError, match="Hidden states are 48 wide, and the layer takes 64"):
        capture_attention(mla, torch.zeros(1, 5, 48))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_hidden_states_that_are_not_finite_are_refused_and_counted(mla: AttentionLayer, bad: float) -> None:
    hidden_states = hidden(mla, 6)
    hidden_states[0, 3, 10:12] = bad
    with pytest.raises(InputError, match="hidden states hold 2 values that are NaN or infinite"):
        capture_attention(mla, hidden_states)


def test_attention_that_leaves_the_range_of_its_type_is_refused(tmp_path: Path) -> None:
    layer, _ = make_layer(tmp_path, llama_config(), dtype=torch.float16)
    with pytest.raises(InputError, match="Attention of layer 1 is not finite: its logits are too large for float16"):
        capture_attention(layer, torch.full((1, 4, 48), 60000.0, dtype=torch.float16))


@pytest.mark.parametrize("prompt", [0, -1, 7])
def test_a_prompt_that_does_not_fit_the_input_is_refused(mla: AttentionLayer, prompt: int) -> None:
    with pytest.raises(InputError, match=f"A prompt of {prompt} tokens doesn't fit an input of 6"):
        capture_attention(mla, hidden(mla, 6), prompt_length=prompt)


def small(config: type[PreTrainedConfig], **changes: Any) -> PreTrainedConfig:
    return config(
        vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, **changes,
    )  # fmt: skip


def test_a_sliding_window_layer_is_refused_beyond_its_window(tmp_path: Path) -> None:
    """Column sums over all queries would be wrong; within the window they are right."""
    layer, _ = make_layer(tmp_path, small(MistralConfig, sliding_window=16))
    torch.testing.assert_close(capture_attention(layer, hidden(layer, 16)).mass.sum(), torch.tensor(4 * 16.0))
    with pytest.raises(InputError, match="Layer 1 attends to the last 16 tokens only, not to all 17: lower seq_len"):
        capture_attention(layer, hidden(layer, 17))


def test_only_the_windowed_layers_of_a_mixed_model_are_refused(tmp_path: Path) -> None:
    config = small(Qwen2Config, use_sliding_window=True, sliding_window=16, max_window_layers=1)
    full, _ = make_layer(tmp_path / "0", config, 0)
    assert capture_attention(full, hidden(full, 40)).mass.shape[-1] == 40
    windowed, _ = make_layer(tmp_path / "1", config, 1)
    with pytest.raises(InputError, match="Layer 1 attends to the last 16 tokens only"):
        capture_attention(windowed, hidden(windowed, 40))


@pytest.mark.parametrize("change", ["softcap", "s_aux", "position_bias"])
def test_a_changed_softmax_is_refused_by_name(
    layer: AttentionLayer, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Capped logits (Gemma 2), sinks (gpt-oss), position biases: plain column sums would be of another attention."""
    plain = layer.module.forward
    monkeypatch.setattr(layer.module, "forward", lambda *args, **kwargs: plain(*args, **kwargs, **{change: 50.0}))
    with pytest.raises(InputError, match=rf"{type(layer.module).__name__} changes its softmax \({change}\)"):
        capture_attention(layer, hidden(layer, 8))
    assert layer.module.config._attn_implementation == "sdpa"


# The layer is left as it was


@pytest.mark.parametrize("use", [capture_attention, eager_attention_weights])
def test_the_layers_own_attention_is_back_after_use_and_after_a_failure(
    layer: AttentionLayer, monkeypatch: pytest.MonkeyPatch, use: Callable[..., object]
) -> None:
    hidden_states = hidden(layer, 10)
    rotary = layer.position_embeddings(hidden_states)
    own, _ = layer.module(hidden_states, rotary, None)
    use(layer, hidden_states)
    assert layer.module.config._attn_implementation == "sdpa"
    with monkeypatch.context() as patch:
        patch.setattr(layer.module.o_proj, "forward", lambda x: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            use(layer, hidden_states)
    assert layer.module.config._attn_implementation == "sdpa"
    again, _ = layer.module(hidden_states, rotary, None)
    assert torch.equal(again, own)


# Digest


def test_the_digest_changes_with_everything_that_determines_a_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, model = make_layer(tmp_path / "a", mla_config())
    hidden_states = hidden(layer, 12)
    digests = {"base": capture_digest(layer, hidden_states, 10)}

    digests["prompt length"] = capture_digest(layer, hidden_states, 9)
    one_bit = hidden_states.clone()
    one_bit.view(torch.int32)[0, 11, 63] ^= 1
    digests["one bit of the input"] = capture_digest(layer, one_bit, 10)
    digests["sign of a zero"] = capture_digest(layer, torch.zeros_like(hidden_states), 10)
    digests["sign of a zero, minus"] = capture_digest(layer, -torch.zeros_like(hidden_states), 10)
    digests["length of the input"] = capture_digest(layer, hidden_states[:, :11], 10)
    digests["shape of the input"] = capture_digest(layer, hidden_states.reshape(2, 6, 64), 10)
    for name, parameter in layer.module.named_parameters():
        last = parameter.view(-1)[-1:]
        before = last.clone()
        last.mul_(1.001)
        digests[f"weight {name}"] = capture_digest(layer, hidden_states, 10)
        last.copy_(before)
    assert capture_digest(layer, hidden_states, 10) == digests["base"]

    # the same weights under another configuration or number
    other_rope = write_checkpoint(tmp_path / "b", mla_config(32.0), stored_tensors(model))
    digests["rope"] = capture_digest(load_attention(Checkpoint.open(other_rope), 1, torch.float32), hidden_states, 10)
    tensors = stored_tensors(model)
    for name in [name for name in tensors if name.startswith("model.layers.1.self_attn.")]:
        tensors[name.replace("layers.1", "layers.2")] = tensors[name].clone()
    moved = write_checkpoint(tmp_path / "c", mla_config(), tensors)
    digests["layer"] = capture_digest(load_attention(Checkpoint.open(moved), 2, torch.float32), hidden_states, 10)
    bfloat16 = load_attention(Checkpoint.open(tmp_path / "a"), 1, torch.bfloat16)
    digests["dtype"] = capture_digest(bfloat16, hidden_states.bfloat16(), 10)
    for constant, value in (("WINDOW", 16), ("DECAY", 0.9)):
        with monkeypatch.context() as patch:
            patch.setattr(helpers.capture, constant, value)
            digests[constant] = capture_digest(layer, hidden_states, 10)

    assert len(set(digests.values())) == len(digests), digests


def test_the_digest_stays_whatever_does_not_change_the_capture(tmp_path: Path) -> None:
    layer, model = make_layer(tmp_path / "a", mla_config())
    hidden_states = hidden(layer, 12)
    digest = capture_digest(layer, hidden_states, 10)
    capture_attention(layer, hidden_states, 10)
    assert capture_digest(layer, hidden_states, 10) == digest
    not_contiguous = hidden_states.transpose(1, 2).contiguous().transpose(1, 2)
    assert not not_contiguous.is_contiguous()
    assert capture_digest(layer, not_contiguous, 10) == digest
    # other folder, shards and key prefix, the same model
    folder = write_checkpoint(tmp_path / "b", model.config, stored_tensors(model), nested=True, n_shards=4)
    again = load_attention(Checkpoint.open(folder), 1, torch.float32)
    assert capture_digest(again, hidden_states, 10) == digest
