"""A whole transformers model that runs with its attention recorded: against the same model's own eager attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from conftest import llama_config, make_model, mla_config
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    BertConfig,
    BertModel,
    CLIPVisionConfig,
    DynamicCache,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MistralConfig,
    StaticCache,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from helpers.capture import ColumnSums, record_attention
from helpers.errors import InputError

pytestmark = pytest.mark.filterwarnings("ignore:A window of", "ignore:Only . of the prompt's")
Model = Any


@pytest.fixture(scope="module")
def mla() -> Model:
    return make_model(mla_config())


@pytest.fixture(scope="module")
def gqa() -> Model:
    return make_model(llama_config())


@pytest.fixture(params=["mla", "gqa"])
def model(request: pytest.FixtureRequest) -> Model:
    return request.getfixturevalue(request.param)


def tokens(batch: int, n: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, 200, (batch, n), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def probabilities(model: Model, ids: torch.Tensor) -> tuple[list[np.ndarray], torch.Tensor]:
    """Each layer's [H, L, L] of one sequence from transformers' eager attention, and its logits [L, vocabulary]."""
    result = model(ids[None], output_attentions=True, use_cache=False)
    return [p[0].double().numpy() for p in result.attentions], result.logits[0]


def assert_statistics(record: ColumnSums, sample: int, p: np.ndarray, prompt: int, columns: slice) -> None:
    """Hold one sample's statistics against [H, L, L], whose first ``prompt`` tokens stand in ``columns``."""
    queries = p[:, :prompt, :prompt]
    age = prompt - 1 - np.arange(prompt)
    truth = {
        "mass": queries.sum(axis=1),
        "mass_window": queries[:, age < 32].sum(axis=1),
        "mass_last": queries[:, -1],
        "mass_decayed": (0.98 ** age[:, None] * queries).sum(axis=1),
        "mass_continuation": p[:, prompt:, :prompt].sum(axis=1),
    }
    for name, expected in truth.items():
        ours = getattr(record, name)[sample]
        np.testing.assert_allclose(ours[:, columns], expected, rtol=1e-4, atol=2e-6, err_msg=name)
        padding = torch.ones(ours.shape[-1], dtype=torch.bool)
        padding[columns] = False
        assert (ours[:, padding] == 0).all(), f"{name} of padding"


@torch.no_grad()
def test_every_layer_of_a_batch(model: Model) -> None:
    ids = tokens(2, 50)
    with record_attention(model) as layers:
        logits = model(ids, use_cache=False).logits
    assert list(layers) == [0, 1, 2]
    for sample in range(2):
        truth, own_logits = probabilities(model, ids[sample])
        torch.testing.assert_close(logits[sample], own_logits, rtol=1e-4, atol=1e-4)
        for layer, p in enumerate(truth):
            assert_statistics(layers[layer], sample, p, 50, slice(0, 50))


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_collects_and_gives_nothing(model: Model, side: str) -> None:
    """A padded sample's statistics are those of the sample alone; its padding's are exactly zero."""
    lengths, longest = (40, 23), 40
    sequences = [tokens(1, n, seed=n)[0] for n in lengths]
    ids, mask = torch.zeros(2, longest, dtype=torch.long), torch.zeros(2, longest, dtype=torch.long)
    columns = [slice(longest - n, longest) if side == "left" else slice(0, n) for n in lengths]
    for sample, (sequence, where) in enumerate(zip(sequences, columns, strict=True)):
        ids[sample, where], mask[sample, where] = sequence, 1
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    with record_attention(model) as layers:
        logits = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    assert torch.isfinite(logits).all()
    for sample, (sequence, where) in enumerate(zip(sequences, columns, strict=True)):
        truth, own_logits = probabilities(model, sequence)
        torch.testing.assert_close(logits[sample, where], own_logits, rtol=1e-4, atol=1e-4)
        for layer, p in enumerate(truth):
            assert_statistics(layers[layer], sample, p, len(sequence), where)


@torch.no_grad()
@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 14), min_size=1, max_size=5), st.booleans(), st.integers(0, 5))
def test_a_prompt_in_parts_on_a_growing_cache(mla: Model, parts: list[int], decode: bool, later: int) -> None:
    """Chunks of a prompt, then tokens of a continuation: the same statistics as in one pass."""
    prompt = sum(parts)
    ids = tokens(1, prompt + later)
    calls = [*parts, *([1] * later if decode else [later] if later else [])]
    cache, start = DynamicCache(config=mla.config), 0
    with record_attention(mla, prompt_length=prompt) as layers:
        for n in calls:
            mla(ids[:, start : start + n], cache=cache)
            start += n
    for layer, p in enumerate(probabilities(mla, ids[0])[0]):
        assert_statistics(layers[layer], 0, p, prompt, slice(0, prompt))


@torch.no_grad()
def test_left_padding_and_a_cache_together(model: Model) -> None:
    lengths, later = (17, 9), 4
    sequences = [tokens(1, n + later, seed=n)[0] for n in lengths]
    ids, mask = torch.zeros(2, 17 + later, dtype=torch.long), torch.zeros(2, 17 + later, dtype=torch.long)
    for sample, sequence in enumerate(sequences):
        ids[sample, -len(sequence) :], mask[sample, -len(sequence) :] = sequence, 1
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)
    with record_attention(model, prompt_length=17) as layers:
        for part in (slice(0, 11), slice(11, 17), *(slice(17 + i, 18 + i) for i in range(later))):
            model(
                ids[:, part], attention_mask=mask[:, : part.stop], position_ids=positions[:, part],
                cache=cache,
            )  # fmt: skip
    for sample, n in enumerate(lengths):
        for layer, p in enumerate(probabilities(model, sequences[sample])[0]):
            assert_statistics(layers[layer], sample, p, n, slice(17 - n, 17))


@torch.no_grad()
def test_generation_judges_the_prompt(model: Model) -> None:
    """The first call is the prompt; what generate() decodes on its cache is the continuation."""
    ids = tokens(1, 20)
    with record_attention(model) as layers:
        out = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    plain = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(out, plain)
    for layer, p in enumerate(probabilities(model, out[0, :-1])[0]):  # the last token is never read
        assert_statistics(layers[layer], 0, p, 20, slice(0, 20))


@torch.no_grad()
def test_a_call_without_earlier_keys_starts_anew(gqa: Model) -> None:
    with record_attention(gqa) as layers:
        gqa(tokens(2, 12, seed=1), use_cache=False)
        gqa(tokens(1, 9), use_cache=False)
    assert layers[0].mass.shape == (1, 6, 9)
    assert_statistics(layers[0], 0, probabilities(gqa, tokens(1, 9)[0])[0][0], 9, slice(0, 9))


@torch.no_grad()
def test_the_models_own_attention_is_back_afterwards(model: Model) -> None:
    ids = tokens(1, 10)
    before = model(ids).logits
    with pytest.raises(ZeroDivisionError), record_attention(model):
        1 / 0  # noqa: B018
    assert model.config._attn_implementation == "eager"
    assert torch.equal(model(ids).logits, before)


# Refusals


@torch.no_grad()
def test_a_static_cache_is_refused(gqa: Model) -> None:
    cache = StaticCache(config=gqa.config, max_cache_len=32)
    with record_attention(gqa), pytest.raises(InputError, match=r"with a cache that grows \(DynamicCache\), not"):
        gqa(tokens(1, 8), cache=cache)


@torch.no_grad()
def test_a_cache_that_was_filled_before_the_recording_is_refused(gqa: Model) -> None:
    cache = DynamicCache(config=gqa.config)
    gqa(tokens(1, 8), cache=cache)
    with record_attention(gqa), pytest.raises(InputError, match="start recording before the first token"):
        gqa(tokens(1, 2), cache=cache)


@torch.no_grad()
def test_windows_are_refused_beyond_their_width() -> None:
    model = make_model(
        MistralConfig(
            vocab_size=200, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, sliding_window=16,
        )
    )  # fmt: skip
    with record_attention(model) as layers:
        model(tokens(1, 16), use_cache=False)
        assert layers[1].mass.sum().item() == pytest.approx(4 * 16, rel=1e-5)
        with pytest.raises(InputError, match="not sliding windows beyond their width"):
            model(tokens(1, 17), use_cache=False)


@torch.no_grad()
def test_packed_sequences_and_masks_of_ones_own_are_refused(gqa: Model) -> None:
    packed = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    with record_attention(gqa):
        with pytest.raises(InputError, match="packed sequences"):
            gqa(tokens(1, 7), position_ids=packed, use_cache=False)
        with pytest.raises(InputError, match="LlamaAttention masks more than padding and the future"):
            gqa(tokens(1, 7), attention_mask=torch.zeros(1, 1, 7, 7), use_cache=False)


@torch.no_grad()
def test_right_padding_in_parts_is_refused(gqa: Model) -> None:
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    with record_attention(gqa, prompt_length=10), pytest.raises(InputError, match="can be padded on the left only"):
        gqa(tokens(2, 4), attention_mask=mask, cache=DynamicCache(config=gqa.config))


def test_gradients_are_refused(gqa: Model) -> None:
    with (
        record_attention(gqa),
        pytest.raises(InputError, match=r"keeps no gradients: run the model under torch\.no_grad"),
    ):
        gqa(tokens(1, 7), use_cache=False)


def test_a_model_that_is_not_causal_is_refused() -> None:
    config = BertConfig(vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    with pytest.raises(InputError, match="BertModel is no stack of causal"), record_attention(BertModel(config)):
        pass


@pytest.mark.parametrize("prompt", [0, -3])
def test_an_empty_prompt_is_refused(gqa: Model, prompt: int) -> None:
    with (
        pytest.raises(InputError, match=f"A prompt takes a whole number of tokens, at least 1, not {prompt}"),
        record_attention(gqa, prompt_length=prompt),
    ):
        pass


# -- models that hold more than a decoder, and uses that can't be recorded


def multimodal() -> Model:
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=3, num_attention_heads=4, image_size=16, patch_size=4
    )
    config = LlavaConfig(
        vision_config=vision, text_config=llama_config(), image_token_index=199, vision_feature_layer=-1
    )
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.mul_(8)
    return model


def test_of_a_multimodal_model_the_decoder_is_recorded_and_the_vision_tower_runs_as_before() -> None:
    model = multimodal()
    ids = tokens(1, 30) % 190
    ids[0, 4 : 4 + 16] = 199
    pixels = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(input_ids=ids, pixel_values=pixels).logits
        with record_attention(model) as layers:
            recorded = model(input_ids=ids, pixel_values=pixels).logits
        model.set_attn_implementation("eager")
        truth = model(input_ids=ids, pixel_values=pixels, output_attentions=True).attentions
    torch.testing.assert_close(recorded, expected, rtol=1e-4, atol=1e-4)
    for i, p in enumerate(truth):
        np.testing.assert_allclose(layers[i].mass, p.double().sum(dim=2), rtol=1e-3, atol=1e-5)


def test_attention_beside_the_causal_one_is_refused_not_made_causal() -> None:
    config = WhisperConfig(
        vocab_size=100, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, num_mel_bins=8, max_source_positions=20,
        max_target_positions=30, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config).eval()
    with torch.no_grad(), record_attention(model), pytest.raises(InputError, match="is not causal self-attention"):
        model(input_features=torch.randn(1, 8, 40), decoder_input_ids=torch.tensor([[3, 4, 5]]))


@torch.no_grad()
def test_a_model_that_is_being_recorded_is_not_recorded_again(gqa: Model) -> None:
    before = gqa.config._attn_implementation
    with record_attention(gqa) as layers:
        with pytest.raises(InputError, match="is being recorded already"), record_attention(gqa):
            pass
        gqa(tokens(1, 8))
    assert float(layers[0].mass.sum()) == pytest.approx(8 * 6, rel=1e-5)
    assert gqa.config._attn_implementation == before


@torch.no_grad()
@pytest.mark.parametrize("chunk", [1, 5, 8, 12])
def test_right_padding_that_begins_in_the_last_chunk_is_refused_too(gqa: Model, chunk: int) -> None:
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[1, 13:] = 0
    cache = DynamicCache(config=gqa.config)

    def read_in_parts() -> None:
        for start in range(0, 16, chunk):
            end = min(start + chunk, 16)
            gqa(tokens(2, 16)[:, start:end], attention_mask=mask[:, :end], cache=cache)

    with (
        pytest.raises(InputError, match="A prompt that comes in parts can be padded on the left only"),
        record_attention(gqa, 16),
    ):
        read_in_parts()


@torch.no_grad()
def test_a_prompt_that_was_not_read_to_its_end_is_said(gqa: Model) -> None:
    with pytest.warns(UserWarning, match="Only 40 of the prompt's 50 tokens were read"), record_attention(gqa, 50):
        gqa(tokens(1, 40))


@torch.no_grad()
def test_attention_that_is_not_finite_is_said_at_the_end() -> None:
    model = make_model(llama_config())
    model.model.layers[0].self_attn.q_proj.weight.fill_(torch.inf)
    with pytest.raises(InputError, match="Attention of layer 0 is not finite"), record_attention(model):
        model(tokens(1, 8))


def test_dropout_is_refused() -> None:
    model = make_model(llama_config(attention_dropout=0.5)).train()
    with torch.no_grad(), record_attention(model), pytest.raises(InputError, match="call eval"):
        model(tokens(1, 8))


@pytest.mark.parametrize("projection", ["q_proj", "k_proj", "v_proj"])
def test_gradients_of_any_projection_are_refused(projection: str) -> None:
    model = make_model(llama_config()).requires_grad_(False)
    getattr(model.model.layers[0].self_attn, projection).requires_grad_(True)
    with record_attention(model), pytest.raises(InputError, match="keeps no gradients"):
        model(tokens(1, 8))


def test_what_was_never_run_and_what_is_no_model_are_said(gqa: Model) -> None:
    with record_attention(gqa) as layers:
        pass
    with pytest.raises(InputError, match="Nothing has been recorded"):
        _ = layers[0].mass
    with pytest.raises(InputError, match="Linear is no stack of causal"), record_attention(torch.nn.Linear(2, 2)):
        pass
