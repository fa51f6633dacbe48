"""Training of the miniature: seeded, resumed exactly, and with the quantiser's numbers in the forward pass."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors import safe_open
from torch.nn import functional

from helpers import training
from helpers.cli import main
from helpers.errors import InputError
from helpers.kimi_mini import train_kimi_mini
from helpers.miniature import ARCHITECTURE, EOS, N_RANKS, new_model
from helpers.quantization import dequantize_int4, quantize_int4
from helpers.training import LOSSES, STAGES, STATE, Stage, TokenizedCorpus, Trainer, batch_of, rate_factor

STEPS = (
    Stage("copying", 3, 2, 32, repeating=0.9, random=0.5, over_and_over=True),
    Stage("text", 2, 1, 48, repeating=0.2, random=0.1),
    Stage("long", 3, 1, 64, repeating=0.2, random=0.1, quantized=True),
)


@pytest.fixture(scope="module", autouse=True)
def smaller() -> Iterator[None]:
    """The same architecture, in a size that trains in a moment."""
    sizes = {
        "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4,
        "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
        "intermediate_size": 96, "moe_intermediate_size": 32, "n_routed_experts": 4,
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name, size in sizes.items():
            patch.setitem(ARCHITECTURE, name, size)
        yield


@pytest.fixture(scope="module")
def corpus() -> TokenizedCorpus:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, N_RANKS, (9000,), generator=generator)
    return TokenizedCorpus(ids[:6000], torch.tensor([0, 1000, 3000]), [ids[6000:7030], ids[7030:]])


def trained(folder: Path, corpus: TokenizedCorpus, stop_after: int | None = None, **changes: object) -> Trainer:
    """A training that runs to its end, or is interrupted behind a step that wasn't saved."""
    trainer = Trainer(folder, corpus, stages=STEPS, save_every=2, **changes)
    if stop_after is None:
        trainer.train()
        return trainer

    one_step = trainer._one_step

    def stopping(stage: Stage) -> float:
        if trainer.step == stop_after:
            raise KeyboardInterrupt
        return one_step(stage)

    trainer._one_step = stopping
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    return trainer


@pytest.mark.parametrize("stop_after", [1, 3, 7])
def test_an_interrupted_training_ends_where_an_uninterrupted_one_does(
    tmp_path: Path, corpus: TokenizedCorpus, stop_after: int
) -> None:
    """Stopped before the first save, between two, and inside the quantised stage."""
    straight = trained(tmp_path / "straight", corpus)
    trained(tmp_path / "halves", corpus, stop_after)
    resumed = trained(tmp_path / "halves", corpus)
    assert resumed.step == straight.step == 8
    for name, weight in straight.weights.items():
        assert torch.equal(resumed.weights[name], weight), name
    assert (tmp_path / "halves" / LOSSES).read_text() == (tmp_path / "straight" / LOSSES).read_text()
    again = trained(tmp_path / "halves", corpus)  # nothing is left to do
    assert again.step == 8


def test_another_seed_gives_another_training(tmp_path: Path, corpus: TokenizedCorpus) -> None:
    first, other = trained(tmp_path / "a", corpus), trained(tmp_path / "b", corpus, seed=1)
    assert not torch.equal(first.weights["lm_head.weight"], other.weights["lm_head.weight"])


@pytest.mark.parametrize("what", ["seed", "stages", "text"])
def test_the_state_of_another_training_is_refused_and_kept(tmp_path: Path, corpus: TokenizedCorpus, what: str) -> None:
    trained(tmp_path, corpus)
    before = (tmp_path / STATE).read_bytes()
    other = TokenizedCorpus(corpus.stream[1:], corpus.starts, corpus.held_out)
    changes = {"seed": {"seed": 1}, "stages": {"stages": STAGES}, "text": {}}[what]
    with pytest.raises(InputError, match=f"holds a training with other {what}: name another folder"):
        Trainer(tmp_path, other if what == "text" else corpus, **({"stages": STEPS} | changes))
    assert (tmp_path / STATE).read_bytes() == before


def test_losses_are_the_models_own_cross_entropy(tmp_path: Path, corpus: TokenizedCorpus) -> None:
    """The first step's loss, from new weights in float32 by torch alone; BF16 products leave a little."""
    trained(tmp_path, corpus)
    noted = pd.read_csv(tmp_path / LOSSES)
    assert list(noted["step"]) == list(range(1, 9))
    assert list(noted["stage"]) == ["copying"] * 3 + ["text"] * 2 + ["long"] * 3
    assert list(noted["tokens"]) == [64] * 3 + [48] * 2 + [64] * 3
    model = new_model(0).eval()
    tokens = batch_of(STEPS[0], corpus, 0)
    with torch.no_grad():
        logits = model(input_ids=tokens[:, :-1]).logits
    expected = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    assert noted["loss"][0] == pytest.approx(float(expected), rel=2e-3)


def test_the_last_stage_computes_with_the_numbers_that_are_stored(tmp_path: Path, corpus: TokenizedCorpus) -> None:
    trainer = trained(tmp_path, corpus)
    experts = trainer.model.model.layers[1].mlp.experts
    for name in ("gate_up_proj", "down_proj"):
        kept = trainer.weights[f"model.layers.1.mlp.experts.{name}"]
        stored = dequantize_int4(*quantize_int4(kept))
        torch.testing.assert_close(getattr(experts, name), stored, rtol=0, atol=1e-6)
        assert not torch.equal(stored, kept)
    # and the gradient goes to the weights themselves
    experts.zero_grad()
    experts.down_proj.sum().backward()
    gradient = experts.parametrizations.down_proj.original.grad
    assert torch.equal(gradient, torch.ones_like(gradient))


def test_routing_biases_rise_for_idle_experts(tmp_path: Path, corpus: TokenizedCorpus) -> None:
    trainer = Trainer(tmp_path, corpus, stages=STEPS)
    trainer._one_step(STEPS[0])
    router = trainer.model.model.layers[1].mlp.gate
    load, bias = trainer.loads[router], router.e_score_correction_bias
    assert load.sum() == 2 * 32 * 2  # sequences × tokens × experts a token
    assert (bias[load < load.mean()] > 0).all()
    assert (bias[load > load.mean()] < 0).all()


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_batches_hold_the_stated_share_of_repeats(corpus: TokenizedCorpus, stage: Stage) -> None:
    """Counted from outside: a passage of eight tokens that stands twice, which random text of 4,096 never has."""
    rows = torch.cat([batch_of(stage, corpus, seed) for seed in range(max(1, 400 // stage.batch))])
    assert rows.shape[1] == stage.length + 1

    def repeats(row: list[int]) -> bool:
        eights = [tuple(row[i : i + 8]) for i in range(len(row) - 7)]
        return len(set(eights)) < len(eights)

    share = sum(repeats(row) for row in rows.tolist()) / len(rows)
    assert share == pytest.approx(stage.repeating, abs=0.07)
    assert torch.equal(batch_of(stage, corpus, 3), batch_of(stage, corpus, 3))
    assert not torch.equal(batch_of(stage, corpus, 3), batch_of(stage, corpus, 4))


def test_the_learning_rate_rises_and_then_follows_each_stages_line() -> None:
    stages = (
        Stage("even", 100, 1, 32, repeating=0, random=0),
        Stage("falling", 50, 1, 32, repeating=0, random=0, rates=(1, 0.5)),
        Stage("again", 200, 1, 32, repeating=0, random=0, rates=(0.8, 0)),
    )
    rates = [rate_factor(step, stages) for step in range(350)]
    assert rates[0] == pytest.approx(1 / training.WARM_UP)
    assert rates[training.WARM_UP] == rates[99] == rates[100] == 1
    assert rates[125] == pytest.approx(0.75)
    assert rates[150] == 0.8
    assert rates[250] == pytest.approx(0.4)
    assert rates[-1] == training.LAST_RATE  # 0.004 by the line
    assert all(training.LAST_RATE <= rate_factor(step) <= 1 for step in range(30, sum(s.steps for s in STAGES)))


def test_documents_are_tokenised_with_an_end_behind_each() -> None:
    from helpers.corpus import Document

    class Bytes:
        def encode(self, text: str) -> object:
            return type("Tokens", (), {"ids": list(text.encode())})()

    names = [f"name{i}" for i in range(40)]
    found = [Document(name, name) for name in names]
    tokens = training.tokenize_corpus(Bytes(), found)
    kept, held = [d for d in found if not d.held_out], [d for d in found if d.held_out]
    assert held
    assert tokens.stream.tolist() == [i for d in kept for i in [*d.text.encode(), EOS]]
    assert [int(tokens.stream[start]) for start in tokens.starts] == [d.text.encode()[0] for d in kept]
    assert [ids.tolist() for ids in tokens.held_out] == [list(d.text.encode()) for d in held]


# -- the command


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trial")
    words = [f"checkpoint={folder / 'mini'}", f"state={folder / 'state'}", "plan=trial", "seed=3", "device=cpu"]
    assert main(["train-kimi-mini", *words]) == 0
    return folder


def test_the_command_trains_and_writes_a_checkpoint(trial: Path) -> None:
    from helpers.checkpoint import Checkpoint
    from helpers.layer import load_attention

    record = json.loads((trial / "mini/training.json").read_text())
    assert (record["seed"], record["tokens"]) == (3, 2 * 4 * 128 + 2 * 2 * 256 + 2 * 512)
    stored = load_attention(Checkpoint.open(trial / "mini"), 2).module.q_a_proj.weight
    with safe_open(trial / "state" / STATE, framework="pt") as state:
        assert torch.equal(stored, state.get_tensor("model.layers.2.self_attn.q_a_proj.weight").bfloat16())


def test_a_model_card_stays_when_the_checkpoint_is_written_again(trial: Path) -> None:
    (trial / "mini/README.md").write_text("a card")
    train_kimi_mini(trial / "mini", trial / "state", seed=3, plan="trial")
    assert (trial / "mini/README.md").read_text() == "a card"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan=half"], "There is no plan 'half' of a training: plans are full, trial."),
        (["seed=-1"], "seed takes a whole number"),
        (["device=tpu"], "device"),
        (["sed=1"], "Did you mean 'seed'?"),
    ],
)
def test_what_the_command_refuses(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = [f"checkpoint={tmp_path / 'mini'}", f"state={tmp_path / 'state'}"]
    assert main(["train-kimi-mini", *target, *words]) == 1
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_folder_with_something_else_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    assert main(["train-kimi-mini", f"checkpoint={tmp_path}", f"state={tmp_path}-state", "plan=trial"]) == 1
    assert "holds something else than a miniature" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
