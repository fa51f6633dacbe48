"""Where the miniature's training begins: what its first weights already lean to, measured from outside."""

from __future__ import annotations

import pytest
import torch
from transformers import DeepseekV3ForCausalLM

from helpers.miniature import N_RANKS, new_model

N_TOKENS = 64


@pytest.fixture(scope="module")
def model() -> DeepseekV3ForCausalLM:
    model = new_model(0).eval()
    model.set_attn_implementation("eager")
    return model


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    """32 different tokens, and the same ones again in another order."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(4):
        tokens = torch.randperm(N_RANKS, generator=generator)[: N_TOKENS // 2]
        rows.append(torch.cat([tokens, tokens[torch.randperm(N_TOKENS // 2, generator=generator)]]))
    return torch.stack(rows)


@pytest.fixture(scope="module")
def attention(model: DeepseekV3ForCausalLM, ids: torch.Tensor) -> list[torch.Tensor]:
    with torch.no_grad():
        return list(model(input_ids=ids, output_attentions=True).attentions)


def assert_near_identity(form: torch.Tensor) -> None:
    """The trace is far from zero, which it would be but for noise with independent matrices."""
    noise = form.norm() / len(form) ** 0.5  # of the sum of the diagonal, if its entries were independent
    assert form.trace() > 5 * noise


def test_half_of_layer_0s_heads_begin_with_the_token_before(attention: list[torch.Tensor]) -> None:
    """Against the closed form: cosines of the three fastest frequencies, largest one position back."""
    before = attention[0].diagonal(-1, 2, 3).mean((0, 2))  # by head
    assert (before[:4] > 0.4).all()
    assert (before[4:] < 0.1).all()
    query = attention[0][:, :4, -1].mean((0, 1))
    distance = torch.arange(N_TOKENS - 1, -1, -1.0)
    frequencies = torch.tensor([1.0, 50_000 ** (-1 / 8), 50_000 ** (-2 / 8)])
    expected = torch.cos(frequencies[:, None] * (distance - 1)).sum(0)
    # what is far is all but zero, and the order of the near ones is the closed form's
    near = distance <= 4
    assert torch.equal(query[near].argsort(), expected[near].argsort())
    assert query[near].sum() > 0.75


def test_other_heads_begin_with_a_leaning_to_the_same_token(model: DeepseekV3ForCausalLM) -> None:
    """The trace of query · key as a form on the layer's input; in layer 0 it is also seen in the attention."""
    for layer in model.model.layers:
        attention = layer.self_attn
        queries = attention.q_b_proj.weight.view(8, 48, 96)[:, :32] @ attention.q_a_proj.weight
        keys = attention.kv_b_proj.weight.view(8, 64, 64)[:, :32] @ attention.kv_a_proj_with_mqa.weight[:64]
        for query, key in zip(queries, keys, strict=True):
            assert_near_identity(query.T @ key)


def test_layer_0s_other_heads_look_more_at_the_same_token(ids: torch.Tensor, attention: list[torch.Tensor]) -> None:
    """A token of the second half at its first occurrence, beside the other 31: by chance, it's all one."""
    same = ids[:, N_TOKENS // 2 :, None] == ids[:, None, : N_TOKENS // 2]
    for head in range(4, 8):
        across = attention[0][:, head, N_TOKENS // 2 :, : N_TOKENS // 2]
        assert across[same].mean() > 1.5 * across[~same].mean(), head


def test_heads_begin_by_writing_what_they_read(model: DeepseekV3ForCausalLM) -> None:
    """The trace of output · value as a map of the layer's input."""
    for layer in model.model.layers:
        attention = layer.self_attn
        down = attention.kv_a_proj_with_mqa.weight[:64]
        values = attention.kv_b_proj.weight.view(8, 64, 64)[:, 32:]
        outputs = attention.o_proj.weight.view(256, 8, 32)
        for head in range(8):
            assert_near_identity(outputs[:, head] @ values[head] @ down)


def test_the_head_begins_as_a_small_copy_of_what_sets_embeddings_apart(model: DeepseekV3ForCausalLM) -> None:
    embeddings, head = model.model.embed_tokens.weight.detach(), model.lm_head.weight.detach()
    apart = embeddings - embeddings.mean(0)
    cosine = torch.nn.functional.cosine_similarity(apart, head - head.mean(0))
    assert cosine.min() > 0.999
    assert float(head.std()) == pytest.approx(0.06, rel=0.01)


def test_a_seed_gives_the_same_weights_again_and_another_seed_others() -> None:
    first, again, other = (dict(new_model(seed).named_parameters()) for seed in (0, 0, 1))
    assert all(torch.equal(weight, again[name]) for name, weight in first.items())
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
