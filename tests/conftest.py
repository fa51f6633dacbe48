"""Shared by the tests: tiny checkpoints with random weights, written as the published ones are laid out."""

from __future__ import annotations

import io
import json
import os
import platform
import signal
import socket
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig, PreTrainedConfig

from helpers.cli import main
from helpers.paths import project_root

if not torch.cuda.is_available():
    # the GPU kernels run in Triton's interpreter, which has to be chosen before anything imports Triton
    os.environ["TRITON_INTERPRET"] = "1"

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # as in a script's background jobs, where the interrupts that tests send would be lost
    signal.signal(signal.SIGINT, signal.default_int_handler)


def yarn(factor: float) -> dict[str, object]:
    """Kimi K2.6's YaRN settings with another factor."""
    return {
        "rope_type": "yarn", "factor": factor, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
        "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096, "rope_theta": 50000.0,
    }  # fmt: skip


def mla_config(factor: float = 64.0, **changes: object) -> DeepseekV3Config:
    """A small DeepSeek-V3: MLA in every layer, layer 0 dense, the others with routed and shared experts."""
    rope = yarn(factor) if factor != 1 else {"rope_type": "default", "rope_theta": 50000.0}
    settings: dict[str, object] = {
        "vocab_size": 200, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "n_shared_experts": 1,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
        "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12,
        "max_position_embeddings": 512, "rope_parameters": rope,
        "initializer_range": 0.2, "pad_token_id": None, "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    return DeepseekV3Config(**(settings | changes))


def llama_config(**changes: object) -> LlamaConfig:
    """A small Llama with grouped queries: 6 query heads, 2 key-value heads."""
    settings: dict[str, object] = {
        "vocab_size": 200, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 6,
        "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.2, "bos_token_id": 0,
        "eos_token_id": 1,
    }  # fmt: skip
    return LlamaConfig(**(settings | changes))


def make_model(config: PreTrainedConfig, seed: int = 0) -> torch.nn.Module:
    """transformers' full model with seeded random float32 weights; norms and routing biases are random too."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.1)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def stored_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The model's tensors under published names: routed experts each on its own, not fused."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(tensor):
                gate, up = both.chunk(2)
                tensors[name.replace("gate_up_proj", f"{expert}.gate_proj.weight")] = gate.contiguous()
                tensors[name.replace("gate_up_proj", f"{expert}.up_proj.weight")] = up.contiguous()
        elif name.endswith("experts.down_proj"):
            for expert, down in enumerate(tensor):
                tensors[name.replace("down_proj", f"{expert}.down_proj.weight")] = down.contiguous()
        else:
            tensors[name] = tensor.contiguous()
    return tensors


def write_checkpoint(
    folder: Path,
    config: PreTrainedConfig,
    tensors: dict[str, torch.Tensor],
    *,
    nested: bool = False,
    n_shards: int = 0,
    shard_name: Callable[[int, int], str] = lambda i, n: f"model-{i + 1:05d}-of-{n:06d}.safetensors",
) -> Path:
    """Write a checkpoint folder.

    ``nested``: config under ``text_config`` and keys under ``language_model.``, as Kimi K2.6. ``n_shards`` 0: one
    ``model.safetensors`` without an index.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = config.to_dict()
    if nested:
        tensors = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
        text["model_type"] = "kimi_k2" if text["model_type"] == "deepseek_v3" else text["model_type"]
        raw = {"model_type": "kimi_k25", "text_config": text}
    else:
        raw = text
    (folder / "config.json").write_text(json.dumps(raw))
    if n_shards == 0:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {}
    for i in range(n_shards):
        shard = shard_name(i, n_shards)
        part = dict(list(tensors.items())[i::n_shards])
        save_file(part, folder / shard)
        weight_map |= dict.fromkeys(part, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


@dataclass
class Trace:
    """What one layer of the full model took in and gave out, each with a batch in front."""

    attention_in: torch.Tensor  # [B, L, hidden], after the input norm
    attention_out: torch.Tensor  # [B, L, hidden], before the residual is added
    layer_in: torch.Tensor
    layer_out: torch.Tensor
    probabilities: torch.Tensor  # [B, heads, L, L], of transformers' own eager attention


def trace(model: torch.nn.Module, ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> list[Trace]:
    """Run transformers' full model on token ids [B, L] and note what goes through each layer: the tests' truth."""
    layers = model.get_decoder().layers
    seen: list[dict[str, torch.Tensor]] = [{} for _ in layers]

    def note(into: dict[str, torch.Tensor], part: str) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: tuple, kwargs: dict, output: object) -> None:
            into[f"{part}_in"] = args[0] if args else kwargs["hidden_states"]
            into[f"{part}_out"] = output[0] if isinstance(output, tuple) else output

        return hook

    hooks = []
    for layer, into in zip(layers, seen, strict=True):
        hooks.append(layer.register_forward_hook(note(into, "layer"), with_kwargs=True))
        hooks.append(layer.self_attn.register_forward_hook(note(into, "attention"), with_kwargs=True))
    with torch.no_grad():
        result = model(ids, position_ids=position_ids, output_attentions=True, use_cache=False)
    for hook in hooks:
        hook.remove()
    return [Trace(**into, probabilities=p) for into, p in zip(seen, result.attentions, strict=True)]


@pytest.fixture(scope="session")
def mla_model() -> torch.nn.Module:
    return make_model(mla_config())


@pytest.fixture
def mla_checkpoint(tmp_path: Path, mla_model: torch.nn.Module) -> Path:
    """A small Kimi K2.6: nested config, ``language_model.`` keys, three shards. A fresh copy, free to be damaged."""
    return write_checkpoint(
        tmp_path / "small-kimi", mla_model.config, stored_tensors(mla_model), nested=True, n_shards=3
    )


@pytest.fixture
def llama_checkpoint(tmp_path: Path) -> Path:
    """A small Llama in one file, flat config."""
    model = make_model(llama_config())
    return write_checkpoint(tmp_path / "small-llama", model.config, stored_tensors(model))


def check_same_report(ours: Path, sample: Path) -> None:
    """Scores within 1 %; categories equal but where a score is that near to the cut (BF16 differs by processor)."""
    assert sorted(path.name for path in ours.rglob("*")) == sorted(path.name for path in sample.rglob("*"))
    ran, kept = (pd.read_csv(folder / "eviction.csv", keep_default_na=False) for folder in (ours, sample))
    np.testing.assert_allclose(ran["attention_score"], kept["attention_score"], rtol=0.01)
    cut = kept.loc[kept["category"] == "heavy", "attention_score"].min()
    near = (kept["attention_score"] / cut - 1).abs() < 0.02
    assert (ran["category"] == kept["category"])[~near].all()


# What tokens of the small report's text are: markup, quotes, line breaks, and words that pandas takes for no value.
PIECES = [
    "<script>alert(1)</script>", 'a "quoted" word', "two\nlines", "NA", "null", "a, comma", " space before",
    "space after ", "None", "naïve", "=1+1", "'", "#", "**bold**", "&amp;", "\\", "nan", "-", "plain", "words",
]  # fmt: skip


@dataclass(frozen=True)
class SmallReport:
    """One report on text at layer 1 of a small MLA checkpoint, and what is needed to check it from outside."""

    folder: Path
    checkpoint: Path
    text: Path
    ids: list[int]
    stdout: str
    stderr: str
    seconds: float
    private: list[str]  # words that no artefact may hold: the maker's user name, home, host and folders

    @property
    def pages(self) -> list[Path]:
        return sorted(self.folder.glob("*.html"))


@pytest.fixture(scope="session")
def small_report(tmp_path_factory: pytest.TempPathFactory, mla_model: torch.nn.Module) -> SmallReport:
    """Run all notebooks once, as the command line does, for a user with a home and a name that can be searched for."""
    home = tmp_path_factory.mktemp("private") / "home" / "wilhelmina.tester"
    checkpoint = write_checkpoint(
        home / "downloads" / "small-kimi", mla_model.config, stored_tensors(mla_model), nested=True, n_shards=3
    )
    (checkpoint / "origin.json").write_text(json.dumps({"weights": "RANDOM weights of a small model"}))
    tokenizer = Tokenizer(WordLevel({piece: i for i, piece in enumerate(PIECES)}, unk_token=PIECES[-1]))
    tokenizer.pre_tokenizer = Split("|", behavior="removed")
    tokenizer.save(str(checkpoint / "tokenizer.json"))
    # the script tag stands at every other place among the first 16, so it is sure to be among the highest scores
    ids = [0 if i % 2 == 0 and i < 16 else (i * 7) % len(PIECES) for i in range(64)]
    text = home / "texts" / "held <mark> _out_ *of* [it] $x$ `&amp;`.txt"
    text.parent.mkdir()
    text.write_text("|".join(PIECES[i] for i in ids))
    folder = home / "runs" / "small-report"
    words = {
        "checkpoint": checkpoint, "layer": 1, "text": text, "seq_len": 48, "continuation": 16, "n_sink": 4,
        "n_recent": 8, "budget": 12, "dtype": "float32", "run_dir": folder, "notebooks": "01,02,03,04",
    }  # fmt: skip
    stdout, stderr = io.StringIO(), io.StringIO()
    started = time.monotonic()
    before = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(stdout), redirect_stderr(stderr):
        patch.setenv("MPLCONFIGDIR", mpl.get_cachedir())  # a fresh home would cost the fonts' cache
        patch.setenv("HOME", str(home))
        for name in ("USER", "LOGNAME", "USERNAME"):
            patch.setenv(name, home.name)
        status = main(["report", *(f"{name}={value}" for name, value in words.items())])
    signal.signal(signal.SIGTERM, before)
    assert status == 0, stderr.getvalue()
    host = [name for name in (socket.gethostname(), platform.node()) if len(name) > 3 and name != "localhost"]
    above = [str(path) for path in (home.parents[1], project_root(), tmp_path_factory.getbasetemp())]
    return SmallReport(
        folder, checkpoint, text, ids, stdout.getvalue(), stderr.getvalue(), time.monotonic() - started,
        [home.name, home.parents[1].name + "/", "downloads/", tmp_path_factory.getbasetemp().name, *host, *above],
    )  # fmt: skip
