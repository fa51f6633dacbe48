"""The miniature that ships with the project: its files, and what they are worth on text that it never saw."""

from __future__ import annotations

import base64
import json
import re
import struct
from pathlib import Path

import pandas as pd
import pytest
import tiktoken
import torch
from conftest import check_same_report
from safetensors import safe_open
from torch.nn import functional
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from helpers.checkpoint import Checkpoint
from helpers.cli import main
from helpers.corpus import Document, documents
from helpers.kimi_mini import Quality, measure_kimi_mini
from helpers.kimi_shaped import CONFIG
from helpers.model import load_model
from helpers.paths import project_root
from helpers.quality import LENGTH, held_out_windows, seen_before, token_losses
from helpers.tokenizer import KIMI_PATTERN, load_tokenizer
from helpers.training import TokenizedCorpus, tokenize_corpus

FOLDER = project_root() / "checkpoints/kimi-mini"
SAMPLE = project_root() / "results/sample-kimi-mini"
LAYERS = "language_model.model.layers"


@pytest.fixture(scope="module")
def corpus() -> TokenizedCorpus:
    return tokenize_corpus(load_tokenizer(FOLDER))


@pytest.fixture(scope="module")
def quality() -> Quality:
    return measure_kimi_mini(FOLDER)


@pytest.fixture(scope="module")
def stored() -> dict[str, torch.Tensor]:
    """All tensors as the safetensors library reads them."""
    tensors = {}
    for shard in sorted(FOLDER.glob("*.safetensors")):
        with safe_open(shard, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return tensors


@pytest.fixture(scope="module")
def by_transformers(stored: dict[str, torch.Tensor]) -> DeepseekV3ForCausalLM:
    """transformers' own model, its config from the raw JSON and its weights unpacked bit by bit."""
    raw = json.loads((FOLDER / "config.json").read_text())["text_config"]
    left_out = ("model_type", "quantization_config", "dtype")
    config = DeepseekV3Config(**{key: value for key, value in raw.items() if key not in left_out})
    model = DeepseekV3ForCausalLM(config).float().eval()
    model.set_attn_implementation("eager")
    state = {}
    for name in model.state_dict():
        own = f"language_model.{name}"
        if own in stored:
            state[name] = stored[own].float()
            continue
        start, kind = own.rsplit(".", 1)
        parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
        experts = [
            torch.cat([unpacked(stored, f"{start}.{i}.{part}.weight") for part in parts])
            for i in range(config.n_routed_experts)
        ]
        state[name] = torch.stack(experts)
    model.load_state_dict(state)
    return model


def unpacked(stored: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """A weight from its packed words, in plain arithmetic: word // 16**k % 16 - 8, times its group's scale."""
    rows, width = stored[f"{name}_shape"].tolist()
    words = stored[f"{name}_packed"].long() % 2**32
    columns = [words[:, i // 8] // 16 ** (i % 8) % 16 - 8 for i in range(width)]
    scale = stored[f"{name}_scale"].float()
    weight = torch.stack([column * scale[:, i // 32] for i, column in enumerate(columns)], dim=1)
    assert weight.shape == (rows, width)
    return weight


# -- the files


def test_the_whole_checkpoint_is_at_most_16_mb() -> None:
    total = sum(path.stat().st_size for path in FOLDER.rglob("*"))
    print(f"checkpoints/kimi-mini: {total / 1e6:.1f} MB")
    assert total <= 16e6


def test_the_config_is_k26s_with_other_sizes() -> None:
    ours, theirs = (json.loads(path.read_text()) for path in (FOLDER / "config.json", CONFIG))
    assert ours["model_type"] == theirs["model_type"] == "kimi_k25"
    text, original = ours["text_config"], theirs["text_config"]
    assert text.keys() == original.keys()
    sizes = {key for key in text if text[key] != original[key]}
    assert all(isinstance(original[key], int | float) for key in sizes - {"rope_scaling"}), sizes
    assert text["quantization_config"] == original["quantization_config"]
    assert text["rope_scaling"].keys() == original["rope_scaling"].keys()
    assert text["rope_scaling"]["type"] == "yarn"
    assert (text["first_k_dense_replace"], text["n_shared_experts"], text["scoring_func"]) == (1, 1, "sigmoid")
    assert text["num_hidden_layers"] >= 6
    assert text["n_routed_experts"] >= 8


def test_shards_are_laid_out_as_k26s_are(stored: dict[str, torch.Tensor]) -> None:
    """A shard a layer, then embeddings and head; compact headers without ``__metadata__``."""
    index = json.loads((FOLDER / "model.safetensors.index.json").read_text())
    shards = sorted(path.name for path in FOLDER.glob("*.safetensors"))
    n_layers = json.loads((FOLDER / "config.json").read_text())["text_config"]["num_hidden_layers"]
    assert shards == [f"model-{i + 1:05d}-of-{n_layers + 1:06d}.safetensors" for i in range(n_layers + 1)]
    held = {}
    for shard in shards:
        content = (FOLDER / shard).read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        assert "__metadata__" not in header
        held |= dict.fromkeys(header, shard)
    assert held == index["weight_map"]
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in stored.values())
    for name, shard in held.items():
        match = re.match(rf"{re.escape(LAYERS)}\.(\d+)\.", name)
        assert shards.index(shard) == (int(match[1]) if match else n_layers), name
    outside = sorted(name for name, shard in held.items() if shard == shards[-1])
    assert outside == [
        "language_model.lm_head.weight",
        "language_model.model.embed_tokens.weight",
        "language_model.model.norm.weight",
    ]


def test_every_tensor_has_the_dtype_that_k26_has(stored: dict[str, torch.Tensor]) -> None:
    kinds = {
        r"experts\.\d+\.(gate|up|down)_proj\.weight_packed": torch.int32,
        r"experts\.\d+\.(gate|up|down)_proj\.weight_scale": torch.bfloat16,
        r"experts\.\d+\.(gate|up|down)_proj\.weight_shape": torch.int32,
        r"mlp\.gate\.e_score_correction_bias": torch.float32,
        r"(norm|layernorm|_proj|mqa|gate|lm_head|embed_tokens)\.weight": torch.bfloat16,
    }
    for name, tensor in stored.items():
        (dtype,) = [dtype for pattern, dtype in kinds.items() if re.search(rf"{pattern}$", name)]
        assert tensor.dtype == dtype, name
    for layer in range(1, 6):
        names = {name.removeprefix(f"{LAYERS}.{layer}.") for name in stored if name.startswith(f"{LAYERS}.{layer}.")}
        packed = {f"mlp.experts.{i}.{part}_proj.weight_{end}" for i in range(8) for part in ("gate", "up", "down")
                  for end in ("packed", "scale", "shape")}  # fmt: skip
        shared = {f"mlp.shared_experts.{part}_proj.weight" for part in ("gate", "up", "down")}
        assert {name for name in names if "experts" in name} == packed | shared
        assert {"mlp.gate.weight", "mlp.gate.e_score_correction_bias"} <= names
    for name in stored:
        if name.endswith("weight_packed"):
            out, width = stored[name.replace("packed", "shape")].tolist()
            assert stored[name].shape == (out, width // 8)
            assert stored[name.replace("packed", "scale")].shape == (out, width // 32)


def test_the_tokenizer_is_kimis_format_with_4096_ranks() -> None:
    lines = (FOLDER / "tiktoken.model").read_text().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split(" ") for line in lines)}
    assert sorted(ranks.values()) == list(range(4096))
    assert {bytes([byte]) for byte in range(256)} <= ranks.keys()
    encoding = tiktoken.Encoding("own", pat_str=KIMI_PATTERN, mergeable_ranks=ranks, special_tokens={})
    tokenizer = load_tokenizer(FOLDER)
    for document in documents()[::40]:
        ids = tokenizer.encode(document.text).ids
        assert ids == encoding.encode_ordinary(document.text)
        assert encoding.decode(ids) == document.text


def test_every_number_of_the_model_card_is_measured(quality: Quality) -> None:
    """Another processor may round the last digit otherwise; other versions of Python have slightly other text."""
    card = (FOLDER / "README.md").read_text()
    written = dict(re.findall(r"^\| ([^|]+?) \| ([^|]+?) \|$", card, flags=re.MULTILINE))
    for figure, measured in quality.table().itertuples(index=False):
        ours, theirs = (float(re.search(r"[-+]?[\d.]+", text)[0]) for text in (measured, written[figure]))
        assert ours == pytest.approx(theirs, rel=0.02, abs=0.03), figure


def test_the_shipped_list_of_data_holds_no_document_on_both_sides() -> None:
    data = pd.read_csv(FOLDER / "data.csv", keep_default_na=False)
    split = dict(zip(data["name"], data["split"], strict=True))
    assert len(split) == len(data) > 500
    assert set(split.values()) == {"training", "held-out"}
    for name, side in split.items():
        assert Document(name, "").held_out == (side == "held-out")
    # other versions of Python have other documents, but most are the same
    assert len({document.name for document in documents()} & set(split)) > len(split) / 2


# -- what it is worth


def test_held_out_loss_is_below_a_trigram_models_and_half_a_unigram_models(quality: Quality) -> None:
    print(quality.text())
    assert quality.n_documents >= 40
    assert quality.held_out["model"] < quality.held_out["trigram"]
    assert quality.held_out["model"] <= 0.5 * quality.held_out["unigram"]


def test_it_uses_context_beyond_32_tokens(quality: Quality) -> None:
    assert quality.context["last_32"] - quality.context["everything"] >= 0.1


def test_it_copies_a_repeated_passage(quality: Quality) -> None:
    assert quality.copying["second"] <= 0.7 * quality.copying["first"]


def test_at_least_half_of_its_layers_choose_other_tokens_than_the_null(quality: Quality) -> None:
    overlaps = quality.layers["overlap_with_null"]
    assert len(overlaps) == 6
    assert (overlaps < 0.5).sum() >= 3


def test_packing_costs_at_most_a_twentieth_of_a_nat(quality: Quality) -> None:
    assert quality.held_out["model"] - quality.before_packing <= 0.05


# -- against transformers' own model


def test_transformers_own_model_gives_the_same_logits(
    by_transformers: DeepseekV3ForCausalLM, corpus: TokenizedCorpus
) -> None:
    model = load_model(Checkpoint.open(FOLDER))
    tokens = held_out_windows(corpus)[:2, :512]
    with torch.no_grad():
        ours = model(input_ids=tokens, use_cache=False).logits
        theirs = by_transformers(input_ids=tokens, use_cache=False).logits
    error = float((ours - theirs).norm() / theirs.norm())
    print(f"logits: relative error {error:.1e}")
    assert ours.dtype == torch.float32
    assert error <= 1e-3
    assert float((ours[:, -1] - theirs[:, -1]).norm() / theirs[:, -1].norm()) <= 1e-3


def test_losses_are_those_of_transformers_model(
    by_transformers: DeepseekV3ForCausalLM, corpus: TokenizedCorpus
) -> None:
    tokens = held_out_windows(corpus)[:2, :300]
    with torch.no_grad():
        logits = by_transformers(input_ids=tokens[:, :-1], use_cache=False).logits
    expected = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view(2, -1)
    model = load_model(Checkpoint.open(FOLDER))
    torch.testing.assert_close(token_losses(model, tokens), expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(token_losses(model, tokens, last=7), expected[:, -7:], rtol=1e-3, atol=1e-3)


def test_windows_are_the_beginnings_of_held_out_documents(corpus: TokenizedCorpus) -> None:
    windows = held_out_windows(corpus)
    long = [ids for ids in corpus.held_out if len(ids) >= LENGTH + 1]
    assert windows.shape == (len(long), LENGTH + 1)
    assert all(torch.equal(window, ids[: LENGTH + 1]) for window, ids in zip(windows, long, strict=True))


def test_text_that_was_seen_before_is_counted_in_windows(corpus: TokenizedCorpus) -> None:
    """Against sets of the windows themselves, on parts of the corpus that share some."""
    stream = corpus.stream[:20_000]
    held_out = [stream[300:400], corpus.held_out[0][:500], stream[:31]]
    windows = {tuple(window) for window in stream.unfold(0, 32, 1).tolist()}
    own = [tuple(window) for ids in held_out[:2] for window in ids.unfold(0, 32, 1).tolist()]
    expected = sum(window in windows for window in own) / len(own)
    assert 0 < expected < 1
    assert seen_before(TokenizedCorpus(stream, corpus.starts, held_out)) == pytest.approx(expected)


# -- commands


def test_the_default_report_runs_on_it_and_makes_the_committed_sample(tmp_path: Path) -> None:
    assert main(["report", f"run_dir={tmp_path / 'again'}"]) == 0
    ours, kept = (json.loads((folder / "manifest.json").read_text()) for folder in (tmp_path / "again", SAMPLE))
    assert ours["status"] == kept["status"] == "complete"
    assert kept["parameters"]["checkpoint"] == "checkpoints/kimi-mini"
    if ours["input"]["text_sha256"] == kept["input"]["text_sha256"]:  # another Python's text may differ
        check_same_report(tmp_path / "again", SAMPLE)
    held_out = {document.sha256 for document in documents() if document.held_out}
    assert ours["input"]["text_sha256"] in held_out


def test_the_command_prints_every_figure(quality: Quality, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr("helpers.kimi_mini.measure_kimi_mini", lambda *_: quality)
    assert main(["measure-kimi-mini"]) == 0
    assert capsys.readouterr().out.strip() == quality.text()


def test_measuring_something_else_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["measure-kimi-mini", f"checkpoint={tmp_path}"]) == 1
    assert "name a folder that `python -m helpers train-kimi-mini` wrote" in capsys.readouterr().err
