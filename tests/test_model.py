"""The whole model out of a checkpoint, beside the model that the checkpoint was written from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import llama_config, make_model, stored_tensors, write_checkpoint

from helpers.capture import record_attention
from helpers.checkpoint import Checkpoint
from helpers.errors import InputError
from helpers.model import load_model

IDS = torch.arange(40)[None] * 7 % 200


def test_an_mla_model_gives_the_logits_of_its_original(mla_checkpoint: Path, mla_model: torch.nn.Module) -> None:
    loaded = load_model(Checkpoint.open(mla_checkpoint))
    with torch.no_grad():
        torch.testing.assert_close(loaded(IDS).logits, mla_model(IDS).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_a_llama_model_gives_the_logits_of_its_original(tmp_path: Path, tied: bool) -> None:
    original = make_model(llama_config(tie_word_embeddings=tied))
    tensors = {name: tensor for name, tensor in stored_tensors(original).items() if not (tied and "lm_head" in name)}
    loaded = load_model(Checkpoint.open(write_checkpoint(tmp_path / "llama", original.config, tensors)))
    with torch.no_grad():
        torch.testing.assert_close(loaded(IDS).logits, original(IDS).logits, rtol=1e-4, atol=1e-4)


def test_it_can_be_recorded_and_run_on_a_cache(mla_checkpoint: Path) -> None:
    loaded = load_model(Checkpoint.open(mla_checkpoint))
    with torch.no_grad(), record_attention(loaded) as layers:
        whole = loaded(IDS)
        first = loaded(IDS[:, :30], use_cache=True)
        rest = loaded(IDS[:, 30:], cache=first.past_key_values)
    torch.testing.assert_close(rest.logits, whole.logits[:, 30:], rtol=1e-4, atol=1e-4)
    assert len(layers) == 3
    assert layers[2].mass.sum() == pytest.approx(30 * 4, rel=1e-5)  # each head's query gives 1


def test_a_missing_head_is_named(tmp_path: Path, mla_model: torch.nn.Module) -> None:
    tensors = {name: tensor for name, tensor in stored_tensors(mla_model).items() if "lm_head" not in name}
    folder = write_checkpoint(tmp_path / "headless", mla_model.config, tensors, nested=True, n_shards=2)
    with pytest.raises(InputError, match=r"has no tensor 'language_model\.lm_head\.weight'"):
        load_model(Checkpoint.open(folder))
