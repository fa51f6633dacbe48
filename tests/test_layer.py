"""Layers taken out of a checkpoint compute what the full transformers model computes, or are refused by name."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import llama_config, make_model, mla_config, stored_tensors, trace, write_checkpoint, yarn
from safetensors.torch import load_file
from test_quantization import random_packed, weight_by_hand
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    BertConfig,
    Gemma2Config,
    GPT2Config,
    MambaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    T5Config,
    ViTConfig,
)

from helpers.checkpoint import INDEX, Checkpoint
from helpers.errors import InputError
from helpers.kimi_shaped import CONFIG
from helpers.layer import (
    attention_window,
    check_attention,
    check_layers_below,
    load_attention,
    load_decoder_layer,
    load_input_norm,
    rotary_embedding,
    skeleton,
)
from helpers.memory import decoder_layer_bytes
from helpers.products import TOKENS_AT_ONCE, Float32Products

N_TOKENS = 80
LAYER_1 = "language_model.model.layers.1."

MODELS: dict[str, Callable[[], PreTrainedConfig]] = {
    "mla-no-yarn": lambda: mla_config(1),
    "mla-yarn-1": lambda: mla_config(rope_parameters=yarn(1.0)),
    "mla-yarn-32": lambda: mla_config(32.0),
    "mla-yarn-64": lambda: mla_config(64.0),
    "mla-without-q-lora": lambda: mla_config(q_lora_rank=None),
    "mla-with-biases": lambda: mla_config(attention_bias=True),
    "llama-gqa": llama_config,
    "llama-mqa-with-biases": lambda: llama_config(num_key_value_heads=1, attention_bias=True, head_dim=10),
    "qwen2": lambda: Qwen2Config(
        vocab_size=200, hidden_size=48, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.2,
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=MODELS)
def model_and_checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[nn.Module, Checkpoint]:
    model = make_model(MODELS[request.param]())
    folder = tmp_path_factory.mktemp("parity") / request.param
    write_checkpoint(folder, model.config, stored_tensors(model), nested=True, n_shards=2)
    return model, Checkpoint.open(folder)


def token_ids(seed: int = 0, n_tokens: int = N_TOKENS, batch: int = 2) -> torch.Tensor:
    return torch.randint(0, 200, (batch, n_tokens), generator=torch.Generator().manual_seed(seed))


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest error at any position, relative to the largest value there: a wrong late position can't hide."""
    error = (ours - theirs).abs().amax(dim=-1)
    return float((error / theirs.abs().amax(dim=-1)).max())


def write_mla(folder: Path, change: Callable[[dict[str, torch.Tensor]], object], model: nn.Module) -> Checkpoint:
    """Write the small Kimi with its tensors changed; names without ``language_model.``."""
    tensors = {name: tensor.clone() for name, tensor in stored_tensors(model).items()}
    change(tensors)
    return Checkpoint.open(write_checkpoint(folder / "changed", model.config, tensors, nested=True))


# Parity with the full model


@pytest.mark.parametrize("first_position", [0, 37, 200_000])
def test_attention_equals_the_full_models_at_every_position(
    model_and_checkpoint: tuple[nn.Module, Checkpoint], first_position: int
) -> None:
    """At late positions too: a wrong YaRN frequency or scale agrees at position 0 and nowhere else."""
    model, checkpoint = model_and_checkpoint
    positions = torch.arange(first_position, first_position + N_TOKENS)[None]
    for layer, truth in enumerate(trace(model, token_ids(), positions)):
        attention = load_attention(checkpoint, layer, torch.float32)
        rotary = attention.position_embeddings(truth.attention_in, positions)
        output, _ = attention.module(truth.attention_in, rotary, None)
        assert relative_error(output, truth.attention_out) < 2e-5
        if first_position == 0:
            by_default, _ = attention.module(
                truth.attention_in, attention.position_embeddings(truth.attention_in), None
            )
            assert torch.equal(by_default, output)


def test_decoder_layer_equals_the_full_models(model_and_checkpoint: tuple[nn.Module, Checkpoint]) -> None:
    """Norms, feed-forward, routed and shared experts: fused from tensors that are stored apart."""
    model, checkpoint = model_and_checkpoint
    positions = torch.arange(N_TOKENS)[None]
    rotary = rotary_embedding(checkpoint, "cpu")(torch.zeros(1), positions)
    for layer, truth in enumerate(trace(model, token_ids())):
        module = load_decoder_layer(checkpoint, layer, torch.float32, "cpu")
        output = module(truth.layer_in, attention_mask=None, position_ids=positions, position_embeddings=rotary)
        assert relative_error(output, truth.layer_out) < 2e-5
        normed = load_input_norm(checkpoint, layer, torch.float32, "cpu")(truth.layer_in)
        assert relative_error(normed, truth.attention_in) < 1e-6


def test_every_weight_of_the_layer_is_the_full_models(
    model_and_checkpoint: tuple[nn.Module, Checkpoint],
) -> None:
    """Exactly, name by name: routed experts in the right order, gate before up."""
    model, checkpoint = model_and_checkpoint
    for layer in range(3):
        theirs = model.get_decoder().layers[layer].state_dict()
        ours = load_decoder_layer(checkpoint, layer, torch.float32, "cpu").state_dict()
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            assert torch.equal(tensor, theirs[name]), name


def test_stand_alone_attention_is_causal_without_a_mask(model_and_checkpoint: tuple[nn.Module, Checkpoint]) -> None:
    """A mask left out means attention to the future in an eager module, silently."""
    _, checkpoint = model_and_checkpoint
    attention = load_attention(checkpoint, 1, torch.float32)
    hidden_states = torch.randn(1, 20, checkpoint.config.hidden_size, generator=torch.Generator().manual_seed(0))
    rotary = attention.position_embeddings(hidden_states)
    before, _ = attention.module(hidden_states, rotary, None)
    for changed in (1, 11, 19):
        other = hidden_states.clone()
        other[:, changed] += 3
        after, _ = attention.module(other, rotary, None)
        assert torch.equal(after[:, :changed], before[:, :changed])
        assert not torch.isclose(after[:, changed:], before[:, changed:]).all(dim=-1).any()


# Scale and frequencies of Kimi K2.6


def kimi_k26(folder: Path, factor: float) -> Checkpoint:
    config = json.loads(CONFIG.read_text())
    config["text_config"]["rope_scaling"]["factor"] = factor
    (folder / "config.json").write_text(json.dumps(config))
    (folder / INDEX).write_text(json.dumps({"weight_map": {}}))
    return Checkpoint.open(folder)


@pytest.mark.parametrize(
    ("factor", "scale"), [(64.0, 0.14467963), (32.0, 0.13086080), (1.0, 0.07216878)], ids=["K2.6", "K2", "none"]
)
def test_softmax_scale_holds_yarns_squared_factor(tmp_path: Path, factor: float, scale: float) -> None:
    """192 is the width of a head's query: 128 without rotation and 64 with."""
    scaling = skeleton(kimi_k26(tmp_path, factor), 0).layers[0].self_attn.scaling
    assert scaling == pytest.approx(192**-0.5 * (0.1 * math.log(factor) + 1) ** 2, rel=1e-9)
    assert scaling == pytest.approx(scale, abs=5e-9)


def test_rotary_frequencies_are_yarns(tmp_path: Path) -> None:
    """Written from the paper (arXiv:2309.00071): fast dimensions stay, slow ones turn 64 times slower."""
    base, width, factor, original = 50000.0, 64, 64.0, 4096

    def dimension_that_turns(times: float) -> float:
        return width * math.log(original / (times * 2 * math.pi)) / (2 * math.log(base))

    low, high = math.floor(dimension_that_turns(32)), math.ceil(dimension_that_turns(1))
    expected = []
    for pair in range(width // 2):
        frequency = base ** (-2 * pair / width)
        slow_share = min(1.0, max(0.0, (pair - low) / (high - low)))
        expected.append(frequency * (1 - slow_share) + frequency / factor * slow_share)
    position = 1000
    hidden_states = torch.zeros(1, 1, 1)
    cos, sin = rotary_embedding(kimi_k26(tmp_path, factor), "cpu")(hidden_states, torch.tensor([[position]]))
    angles = torch.tensor([position * frequency for frequency in expected], dtype=torch.float64)
    # cos and sin of angles up to 1,000, made in float32, and not scaled: mscale and mscale_all_dim cancel
    torch.testing.assert_close(cos[0, 0, :32].double(), angles.cos(), rtol=0, atol=2e-4)
    torch.testing.assert_close(sin[0, 0, 32:].double(), angles.sin(), rtol=0, atol=2e-4)


def test_the_skeleton_takes_no_memory_and_only_the_depth_asked_for(tmp_path: Path) -> None:
    """61 layers of K2.6 on the meta device would take minutes and its weights 2 TB."""
    decoder = skeleton(kimi_k26(tmp_path, 64.0), 1)
    assert len(decoder.layers) == 2
    assert all(parameter.is_meta for parameter in decoder.parameters())
    assert decoder.layers[1].mlp.experts.gate_up_proj.shape == (384, 4096, 7168)


# Load report


def test_the_report_lists_each_tensor_with_its_place_in_the_file(mla_checkpoint: Path) -> None:
    attention = load_attention(Checkpoint.open(mla_checkpoint), 1, torch.float32)
    files = {path.name: load_file(path) for path in mla_checkpoint.glob("*.safetensors")}
    stored = {
        name: (shard, tensor)
        for shard, held in files.items()
        for name, tensor in held.items()
        if name.startswith(f"{LAYER_1}self_attn.")
    }
    table = attention.report.table()
    assert list(table.columns) == ["name", "shard", "dtype", "shape", "bytes", "matched"]
    assert set(table["name"]) == set(stored)
    assert len(table) == len(stored) == 7
    for row in table.itertuples():
        shard, tensor = stored[row.name]
        assert row.shard == shard
        assert (row.dtype, row.shape) == ("F32", "×".join(str(n) for n in tensor.shape))
        assert (row.bytes, row.matched) == (tensor.nbytes, "yes")
    assert set(table["shard"]) == set(files)
    for entry in attention.report.describe():
        start, end = entry["byte_range"]
        shard, tensor = stored[entry["name"]]
        assert (mla_checkpoint / entry["shard"]).read_bytes()[start:end] == tensor.numpy().tobytes()
        assert (entry["shard"], entry["dtype"], entry["shape"]) == (shard, "F32", list(tensor.shape))


def test_the_summary_counts_tensors_parameters_and_bytes(mla_checkpoint: Path, mla_model: nn.Module) -> None:
    checkpoint = Checkpoint.open(mla_checkpoint)
    report = load_attention(checkpoint, 1).report
    n = sum(parameter.numel() for parameter in mla_model.get_decoder().layers[1].self_attn.parameters())
    assert report.n_parameters == n
    assert report.summary == f"7 of 7 tensors matched, {n:,} parameters, {4 * n:,} bytes read"
    assert report.totals() == {"load": report.summary, "parameter_count": n}
    headers = sum(8 + int.from_bytes(path.read_bytes()[:8], "little") for path in mla_checkpoint.glob("*.safetensors"))
    assert checkpoint.bytes_read == 4 * n + headers


def test_a_decoder_layer_reads_its_own_tensors_once(mla_checkpoint: Path) -> None:
    """Fused experts are filled slot by slot from tensors that are each read once."""
    checkpoint = Checkpoint.open(mla_checkpoint)
    load_decoder_layer(checkpoint, 1, torch.bfloat16, "cpu")
    expected = 0
    for path in mla_checkpoint.glob("*.safetensors"):
        expected += 8 + int.from_bytes(path.read_bytes()[:8], "little")
        expected += sum(tensor.nbytes for name, tensor in load_file(path).items() if name.startswith(LAYER_1))
    assert checkpoint.bytes_read == expected


def test_checking_an_attention_reads_headers_only(mla_checkpoint: Path) -> None:
    checkpoint = Checkpoint.open(mla_checkpoint)
    module = check_attention(checkpoint, 1)
    headers = sum(8 + int.from_bytes(path.read_bytes()[:8], "little") for path in mla_checkpoint.glob("*.safetensors"))
    assert checkpoint.bytes_read == headers
    assert {tensor.device.type for tensor in module.state_dict().values()} == {"meta"}


def test_old_rotary_buffers_are_ignored_and_said_to_be(tmp_path: Path, mla_model: nn.Module) -> None:
    """Files converted years ago hold ``rotary_emb.inv_freq``; reading it would count bytes that nothing needs."""
    name = "model.layers.1.self_attn.rotary_emb.inv_freq"
    checkpoint = write_mla(tmp_path, lambda tensors: tensors.update({name: torch.ones(4)}), mla_model)
    report = load_attention(checkpoint, 1).report
    table = report.table().set_index("name")
    assert table.loc[f"language_model.{name}", "matched"] == "ignored"
    assert (table["matched"] == "yes").sum() == 7
    assert report.summary.startswith("7 of 7 tensors matched")
    assert [entry["name"] for entry in report.describe()] == list(table.index[table["matched"] == "yes"])
    load_decoder_layer(checkpoint, 1, torch.float32, "cpu")


# Refusals: tensors that don't fit

O_PROJ = "model.layers.1.self_attn.o_proj.weight"


def test_a_missing_tensor_is_named(tmp_path: Path, mla_model: nn.Module) -> None:
    checkpoint = write_mla(tmp_path, lambda tensors: tensors.pop(O_PROJ), mla_model)
    for check in (check_attention, load_attention):
        with pytest.raises(InputError, match=rf"Layer 1 of changed .*'language_model\.{O_PROJ}' is missing\.$"):
            check(checkpoint, 1)
    load_attention(checkpoint, 0)


def test_a_renamed_tensor_offers_the_nearest(tmp_path: Path, mla_model: nn.Module) -> None:
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        tensors[O_PROJ.replace("o_proj", "out_proj")] = tensors.pop(O_PROJ)

    with pytest.raises(InputError, match=r"o_proj\.weight' is missing\. Did you mean 'self_attn\.out_proj\.weight'\?"):
        load_attention(write_mla(tmp_path, rename, mla_model), 1)


def test_an_unexpected_tensor_is_named(tmp_path: Path, mla_model: nn.Module) -> None:
    """A bias that the module has no place for would be dropped silently."""
    name = "model.layers.1.self_attn.o_proj.bias"
    checkpoint = write_mla(tmp_path, lambda tensors: tensors.update({name: torch.ones(64)}), mla_model)
    with pytest.raises(InputError, match=rf"'language_model\.{name}' has no place in DeepseekV3Attention"):
        load_attention(checkpoint, 1)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(tmp_path: Path, mla_model: nn.Module) -> None:
    """Transposed: as many bytes, other numbers."""

    def transpose(tensors: dict[str, torch.Tensor]) -> None:
        tensors[O_PROJ] = tensors[O_PROJ].T.contiguous()

    with pytest.raises(InputError, match=rf"'language_model\.{O_PROJ}' has shape \[48, 64\], not \[64, 48\]"):
        load_attention(write_mla(tmp_path, transpose, mla_model), 1)


@pytest.mark.parametrize(("dtype", "name"), [(torch.float8_e4m3fn, "F8_E4M3"), (torch.int32, "I32")])
def test_a_quantised_tensor_is_named(tmp_path: Path, mla_model: nn.Module, dtype: torch.dtype, name: str) -> None:
    def quantise(tensors: dict[str, torch.Tensor]) -> None:
        tensors[O_PROJ] = tensors[O_PROJ].to(dtype)

    with pytest.raises(InputError, match=rf"{O_PROJ}' is stored as {name}, (but|which)"):
        load_attention(write_mla(tmp_path, quantise, mla_model), 1)


def test_every_problem_is_listed_at_once(tmp_path: Path, mla_model: nn.Module) -> None:
    def damage(tensors: dict[str, torch.Tensor]) -> None:
        attention = "model.layers.1.self_attn."
        del tensors[f"{attention}q_a_proj.weight"]
        tensors[f"{attention}q_b_proj.weight"] = torch.zeros(3)
        tensors[f"{attention}kv_b_proj.weight"] = tensors[f"{attention}kv_b_proj.weight"].to(torch.int8)

    with pytest.raises(InputError) as refusal:
        load_attention(write_mla(tmp_path, damage, mla_model), 1)
    for words in ("q_a_proj.weight' is missing", "q_b_proj.weight' has shape [3]", "kv_b_proj.weight' is stored as I8"):
        assert words in str(refusal.value)


def test_a_missing_expert_is_named_and_many_problems_are_counted(tmp_path: Path, mla_model: nn.Module) -> None:
    """12 of the layer's tensors gone: 8 are listed, the rest is counted."""

    def drop(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("model.layers.1.mlp.experts.")]:
            del tensors[name]

    checkpoint = write_mla(tmp_path, drop, mla_model)
    with pytest.raises(InputError, match=r"experts\.0\.gate_proj\.weight' is missing.*And 4 more\.$"):
        load_decoder_layer(checkpoint, 1, torch.float32, "cpu")


@pytest.mark.parametrize("layer", [-1, 3, 99])
def test_a_layer_out_of_range_is_refused_with_the_range(mla_checkpoint: Path, layer: int) -> None:
    """-1 isn't the last layer."""
    with pytest.raises(InputError, match=rf"layer {layer} is out of range: small-kimi has layers 0 to 2"):
        load_attention(Checkpoint.open(mla_checkpoint), layer)


def test_a_part_of_the_model_serves_the_layers_that_it_holds(tmp_path: Path, mla_model: nn.Module) -> None:
    """One shard of K2.6 is a useful checkpoint: its layer loads, any other is said to be missing."""

    def keep_layer_1_attention(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if not name.startswith("model.layers.1.self_attn.")]:
            del tensors[name]

    checkpoint = write_mla(tmp_path, keep_layer_1_attention, mla_model)
    ours = load_attention(checkpoint, 1, torch.float32).module.state_dict()
    theirs = mla_model.get_decoder().layers[1].self_attn.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    with pytest.raises(InputError, match=r"changed holds no tensor language_model\.model\.layers\.0\.self_attn\."):
        load_attention(checkpoint, 0)
    with pytest.raises(InputError, match=r"layers\.1\.input_layernorm\.….*of layer 1 it holds '.*layers\.1\.self_attn"):
        load_input_norm(checkpoint, 1, torch.float32, "cpu")


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("values", "n"),
    [([math.nan], "1 NaN"), ([math.inf], "1 NaN"), ([-math.inf], "1 NaN"), ([math.nan, math.inf, -math.inf], "3 NaN")],
    ids=["nan", "inf", "minus-inf", "all-three"],
)
def test_nan_and_infinity_in_a_weight_are_named_and_counted(
    tmp_path: Path, mla_model: nn.Module, stored: torch.dtype, values: list[float], n: str
) -> None:
    """One NaN would turn every softmax row that sees it into NaN."""

    def damage(tensors: dict[str, torch.Tensor]) -> None:
        tensors[O_PROJ] = tensors[O_PROJ].to(stored)
        tensors[O_PROJ].view(-1)[5 : 5 + len(values)] = torch.tensor(values).to(stored)

    checkpoint = write_mla(tmp_path, damage, mla_model)
    with pytest.raises(InputError, match=rf"'language_model\.{O_PROJ}' of changed holds {n} or infinite values"):
        load_attention(checkpoint, 1)


def test_a_weight_that_overflows_the_narrower_dtype_is_refused(tmp_path: Path, mla_model: nn.Module) -> None:
    """70,000 is finite in BF16 and infinite in FP16."""

    def enlarge(tensors: dict[str, torch.Tensor]) -> None:
        tensors[O_PROJ] = tensors[O_PROJ].bfloat16()
        tensors[O_PROJ][0, 0] = 70_000.0

    checkpoint = write_mla(tmp_path, enlarge, mla_model)
    assert torch.isfinite(load_attention(checkpoint, 1, torch.bfloat16).module.o_proj.weight).all()
    with pytest.raises(InputError, match=rf"'language_model\.{O_PROJ}'"):
        load_attention(checkpoint, 1, torch.float16)


def test_an_infinity_in_one_of_many_experts_is_found(tmp_path: Path, mla_model: nn.Module) -> None:
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    checkpoint = write_mla(tmp_path, lambda tensors: tensors[name].view(-1)[-1:].fill_(math.inf), mla_model)
    with pytest.raises(InputError, match=rf"'language_model\.{name}' of changed holds 1 NaN or infinite"):
        load_decoder_layer(checkpoint, 1, torch.float32, "cpu")


# Precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_are_the_stored_ones_rounded_once(
    mla_checkpoint: Path, mla_model: nn.Module, dtype: torch.dtype
) -> None:
    attention = load_attention(Checkpoint.open(mla_checkpoint), 2, dtype)
    assert attention.dtype == dtype
    theirs = mla_model.get_decoder().layers[2].self_attn.state_dict()
    for name, tensor in attention.module.state_dict().items():
        assert torch.equal(tensor, theirs[name].to(dtype)), name
    assert not any(parameter.requires_grad for parameter in attention.module.parameters())


def test_routing_biases_keep_float32_in_a_bfloat16_layer(mla_checkpoint: Path, mla_model: nn.Module) -> None:
    """They choose experts by differences far below what BF16 resolves; transformers keeps them float32 too."""
    layer = load_decoder_layer(Checkpoint.open(mla_checkpoint), 1, torch.bfloat16, "cpu")
    theirs = mla_model.get_decoder().layers[1].mlp.gate.e_score_correction_bias
    ours = layer.mlp.gate.e_score_correction_bias
    assert not torch.equal(theirs, theirs.bfloat16().float())
    assert ours.dtype == torch.float32
    assert torch.equal(ours, theirs)
    assert {parameter.dtype for parameter in layer.parameters()} == {torch.bfloat16}


@pytest.fixture
def no_narrow_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that has to multiply BF16 in float32, whatever this one can do."""
    monkeypatch.setattr("helpers.products.has_bfloat16_products", lambda: False)


@pytest.mark.usefixtures("no_narrow_instructions")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 511, 512, 513, 1200])
def test_narrow_products_are_rounded_once(dtype: torch.dtype, rows: int) -> None:
    """Equal to the float64 product rounded to the narrow type, but where float32 falls on the other side of a tie.

    ``rows`` straddles the block of weight rows that is made float32 at once.
    """
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(2, 3, 300, generator=generator).to(dtype)
    weight = torch.randn(rows, 300, generator=generator).to(dtype)
    bias = torch.randn(rows, generator=generator).to(dtype)
    exact = x.double() @ weight.double().T
    with Float32Products():
        results = {
            "linear": (nn.functional.linear(x, weight), exact),
            "with bias": (nn.functional.linear(x, weight, bias), exact + bias.double()),
            "bias by name": (nn.functional.linear(x, weight, bias=bias), exact + bias.double()),
            "matmul": (torch.matmul(x, weight.T), exact),
        }
    for name, (ours, truth) in results.items():
        assert ours.dtype == dtype, name
        rounded = truth.to(dtype)
        differs = ours != rounded
        assert differs.sum() <= max(1, 0.01 * differs.numel()), name
        assert ((ours - rounded).abs()[differs] <= rounded.abs()[differs] * 2**-7 + 1e-4).all(), name


class ProductDtypes(TorchDispatchMode):
    """Notes the precision in which matrix products reach the processor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.split(".")[0] in ("mm", "addmm", "bmm", "baddbmm"):
            self.seen |= {arg.dtype for arg in args if isinstance(arg, torch.Tensor)}
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("no_narrow_instructions")
def test_long_inputs_are_multiplied_a_block_of_tokens_at_a_time() -> None:
    x = torch.randn(2, TOKENS_AT_ONCE + 5, 4).bfloat16()
    weight = torch.randn(3, 4).bfloat16()
    with Float32Products():
        ours = nn.functional.linear(x, weight)
    assert torch.equal(ours, (x.float() @ weight.float().T).bfloat16())


def test_a_processor_with_narrow_instructions_uses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("helpers.products.has_bfloat16_products", lambda: True)
    for dtype, expected in ((torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)):
        x, weight = torch.ones(2, 4, dtype=dtype), torch.ones(4, 4, dtype=dtype)
        with Float32Products(), ProductDtypes() as products:
            nn.functional.linear(x, weight)
        assert products.seen == {expected}


@pytest.mark.usefixtures("no_narrow_instructions")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_no_narrow_product_reaches_the_processor(dtype: torch.dtype) -> None:
    """Its result would depend on the processor, and without BF16 instructions it is six times slower."""
    x, weight, bias = torch.ones(2, 3, 4, dtype=dtype), torch.ones(4, 4, dtype=dtype), torch.ones(4, dtype=dtype)
    products: list[Callable[[], torch.Tensor]] = [
        lambda: nn.functional.linear(x, weight),
        lambda: nn.functional.linear(x, weight, bias),
        lambda: torch.matmul(x, weight),
        lambda: torch.matmul(x, x.transpose(1, 2)),
    ]
    for product in products:
        with ProductDtypes() as bare:
            product()
        assert dtype in bare.seen
        with Float32Products(), ProductDtypes() as products_seen:
            product()
        assert products_seen.seen == {torch.float32}


def test_float32_products_leave_float32_alone() -> None:
    x, weight = torch.randn(4, 8), torch.randn(6, 8)
    with Float32Products():
        assert torch.equal(nn.functional.linear(x, weight), x @ weight.T)
        assert torch.matmul(x, weight.T).dtype == torch.float32
        # integers have no narrow type to leave
        assert torch.matmul(torch.ones(2, 2, dtype=torch.int64), torch.ones(2, 2, dtype=torch.int64)).sum() == 8


# Architectures


def one_tensor(folder: Path, config: PreTrainedConfig) -> Checkpoint:
    name = "model.layers.0.self_attn.q_proj.weight"
    return Checkpoint.open(write_checkpoint(folder / config.model_type, config, {name: torch.zeros(2, 2)}))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GPT2Config(), "GPT2Model is no decoder with a list of layers"),
        (BertConfig(), "BertModel is no decoder with a list of layers"),
        (MambaConfig(num_hidden_layers=2, hidden_size=8), "mamba"),
        (T5Config(), "t5"),
        (ViTConfig(), "vit"),
        (Gemma2Config(num_hidden_layers=2, hidden_size=8), "gemma2"),
    ],
    ids=["gpt2", "bert", "mamba", "t5", "vit", "gemma2"],
)
def test_an_architecture_that_has_no_plain_causal_attention_is_refused(
    tmp_path: Path, config: PreTrainedConfig, message: str
) -> None:
    """No decoder layers, no attention in them, no causal model at all, or an attention with a softmax of its own."""
    with pytest.raises(InputError, match=f"(?i){message}") as refusal:
        load_attention(one_tensor(tmp_path, config), 0)
    assert len(str(refusal.value)) < 400  # one sentence, not the list of all that transformers knows


def test_attention_that_looks_ahead_is_refused(mla_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that transformers doesn't mark as causal would attend to the future without a mask."""
    attention = type(skeleton(Checkpoint.open(mla_checkpoint), 0).layers[0].self_attn)
    monkeypatch.setattr(attention, "is_causal", property(lambda self: False, lambda self, value: None), raising=False)
    with pytest.raises(InputError, match=r"Layer 1 of small-kimi \(DeepseekV3Attention\) is not causal"):
        load_attention(Checkpoint.open(mla_checkpoint), 1)


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (mla_config(), [None, None]),
        (llama_config(), [None, None]),
        (MistralConfig(sliding_window=16), [16, 16]),
        (MistralConfig(sliding_window=None), [None, None]),
        (Qwen2Config(use_sliding_window=False, sliding_window=16), [None, None]),
        (Qwen2Config(use_sliding_window=True, sliding_window=16, max_window_layers=1), [None, 16]),
    ],
    ids=["mla", "llama", "mistral", "mistral-full", "qwen2", "qwen2-from-layer-1"],
)
def test_the_window_of_each_layer_is_read_from_the_config(config: PreTrainedConfig, windows: list[int | None]) -> None:
    assert [attention_window(config, layer) for layer in (0, 1)] == windows


def test_other_kinds_of_attention_are_refused_by_kind() -> None:
    config = Qwen2Config(num_hidden_layers=2, layer_types=["full_attention", "sliding_attention"], sliding_window=4)
    config.layer_types = ["full_attention", "linear_attention"]
    assert attention_window(config, 0) is None
    with pytest.raises(InputError, match="Layer 1 is of kind linear_attention"):
        attention_window(config, 1)


# Layers below


def test_layers_below_need_room_for_each_one_and_the_numbers_are_said(tmp_path: Path) -> None:
    """Layer 0 of K2.6 has 497,498,112 parameters: 995 MB in BF16, twice that in float32; and room to run."""
    checkpoint = kimi_k26(tmp_path, 64.0)
    with pytest.raises(
        InputError, match=r"layer 0 of .* takes 1\.0 GB in bfloat16 where 0\.9 GB are free.*layer up to 0"
    ):
        check_layers_below(checkpoint, 1, 16, torch.bfloat16, free_bytes=900_000_000)
    with pytest.raises(InputError, match=r"takes 2\.0 GB in float32 where 1\.9 GB are free"):
        check_layers_below(checkpoint, 1, 16, torch.float32, free_bytes=1_900_000_000)


def test_layers_below_are_checked_against_the_checkpoint(tmp_path: Path, mla_model: nn.Module) -> None:
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    checkpoint = write_mla(tmp_path, lambda tensors: tensors.pop(name), mla_model)
    check_layers_below(checkpoint, 1, 16, torch.float32, free_bytes=10**9)
    with pytest.raises(InputError, match=rf"{name}' is missing"):
        check_layers_below(checkpoint, 2, 16, torch.float32, free_bytes=10**9)


def test_a_windowed_layer_below_is_refused_beyond_its_window(tmp_path: Path) -> None:
    """Run without a mask it would see further back than it does in the model."""
    config = MistralConfig(
        vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=16,
    )  # fmt: skip
    folder = write_checkpoint(tmp_path / "windowed", config, stored_tensors(make_model(config)))
    check_layers_below(Checkpoint.open(folder), 1, 16, torch.float32, free_bytes=10**9)
    with pytest.raises(InputError, match="Layer 0 of windowed sees the last 16 tokens only: lower seq_len"):
        check_layers_below(Checkpoint.open(folder), 1, 17, torch.float32, free_bytes=10**9)


# Packed experts

EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"


def set_packing(folder: Path, quantization: object) -> None:
    raw = json.loads((folder / "config.json").read_text())
    raw.get("text_config", raw)["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(raw))


@dataclass(frozen=True)
class PackedKimi:
    """A small Kimi with packed experts: what is stored, and transformers' model with what plain loops unpack of it."""

    model: nn.Module
    tensors: dict[str, torch.Tensor]  # as stored, without ``language_model.``

    def write(
        self, folder: Path, change: Callable[[dict[str, torch.Tensor]], object] = lambda tensors: None
    ) -> Checkpoint:
        tensors = {name: tensor.clone() for name, tensor in self.tensors.items()}
        change(tensors)
        write_checkpoint(folder / "packed-kimi", self.model.config, tensors, nested=True, n_shards=3)
        set_packing(folder / "packed-kimi", json.loads(CONFIG.read_text())["text_config"]["quantization_config"])
        return Checkpoint.open(folder / "packed-kimi")


@pytest.fixture(scope="module")
def packed_kimi() -> PackedKimi:
    model = make_model(mla_config())
    tensors: dict[str, torch.Tensor] = {}
    unpacked: dict[str, torch.Tensor] = {}
    for seed, (name, tensor) in enumerate(stored_tensors(model).items()):
        if ".mlp.experts." not in name:
            tensors[name] = tensor
            continue
        triple = random_packed(name, *tensor.shape, seed=seed)
        tensors |= triple
        unpacked[name] = weight_by_hand(triple[f"{name}_packed"], triple[f"{name}_scale"])
    with torch.no_grad():
        for i, layer in enumerate(model.get_decoder().layers):
            for j in range(4 if i else 0):  # layer 0 is dense
                gate, up, down = (
                    unpacked[f"model.layers.{i}.mlp.experts.{j}.{part}_proj.weight"] for part in ("gate", "up", "down")
                )
                layer.mlp.experts.gate_up_proj[j] = torch.cat([gate, up])
                layer.mlp.experts.down_proj[j] = down
    assert len(unpacked) == 2 * 4 * 3
    return PackedKimi(model, tensors)


def test_a_decoder_layer_with_packed_experts_equals_transformers_own(tmp_path: Path, packed_kimi: PackedKimi) -> None:
    """Exactly in every weight, and so in what it computes; layer 0 has nothing packed."""
    checkpoint = packed_kimi.write(tmp_path)
    positions = torch.arange(N_TOKENS)[None]
    rotary = rotary_embedding(checkpoint, "cpu")(torch.zeros(1), positions)
    for layer, truth in enumerate(trace(packed_kimi.model, token_ids())):
        module = load_decoder_layer(checkpoint, layer, torch.float32, "cpu")
        theirs = packed_kimi.model.get_decoder().layers[layer].state_dict()
        for name, tensor in module.state_dict().items():
            assert torch.equal(tensor, theirs[name]), name
        output = module(truth.layer_in, attention_mask=None, position_ids=positions, position_embeddings=rotary)
        assert relative_error(output, truth.layer_out) < 2e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_packed_experts_are_rounded_once(tmp_path: Path, packed_kimi: PackedKimi, dtype: torch.dtype) -> None:
    """Four bits times eight take twelve: BF16 holds them only rounded, and a second rounding would show."""
    experts = load_decoder_layer(packed_kimi.write(tmp_path), 2, dtype, "cpu").mlp.experts
    theirs = packed_kimi.model.get_decoder().layers[2].mlp.experts
    for name in ("gate_up_proj", "down_proj"):
        ours, exact = getattr(experts, name), getattr(theirs, name)
        assert ours.dtype == dtype
        assert torch.equal(ours, exact.to(dtype))
    assert not torch.equal(theirs.down_proj.bfloat16().float(), theirs.down_proj)


def test_a_layer_with_packed_experts_reads_its_own_bytes_once(tmp_path: Path, packed_kimi: PackedKimi) -> None:
    checkpoint = packed_kimi.write(tmp_path)
    load_decoder_layer(checkpoint, 1, torch.bfloat16, "cpu")
    expected = 0
    for path in checkpoint.folder.glob("*.safetensors"):
        expected += 8 + int.from_bytes(path.read_bytes()[:8], "little")
        expected += sum(tensor.nbytes for name, tensor in load_file(path).items() if name.startswith(LAYER_1))
    assert checkpoint.bytes_read == expected


def test_the_report_counts_weights_and_lists_what_is_stored(tmp_path: Path) -> None:
    """Attention may be packed too: parameters are the weight's numbers, bytes those of the three stored tensors."""
    config = llama_config(hidden_size=64, num_attention_heads=4)
    name = "model.layers.0.self_attn.v_proj.weight"
    tensors = {other: tensor for other, tensor in stored_tensors(make_model(config)).items() if other != name}
    tensors |= random_packed(name, 32, 64)
    folder = write_checkpoint(tmp_path / "packed-llama", config, tensors, n_shards=2)
    set_packing(folder, json.loads(CONFIG.read_text())["text_config"]["quantization_config"] | {"ignore": []})
    layer = load_attention(Checkpoint.open(folder), 0, torch.float32)
    by_hand = weight_by_hand(tensors[f"{name}_packed"], tensors[f"{name}_scale"])
    assert torch.equal(layer.module.v_proj.weight, by_hand)
    own = {other: tensor for other, tensor in tensors.items() if other.startswith("model.layers.0.self_attn.")}
    n, nbytes = 2 * 64 * 64 + 2 * 32 * 64, sum(tensor.nbytes for tensor in own.values())
    assert nbytes == 4 * (n - 32 * 64) + 32 * 64 // 2 + 32 * 2 * 2 + 8
    assert layer.report.n_parameters == n == sum(parameter.numel() for parameter in layer.module.parameters())
    assert layer.report.summary == f"6 of 6 tensors matched, {n:,} parameters, {nbytes:,} bytes read"
    table = layer.report.table().set_index("name")
    assert set(table.index) == set(own)
    assert table["bytes"].sum() == nbytes
    assert (table.loc[f"{name}_packed", "dtype"], table.loc[f"{name}_packed", "shape"]) == ("I32", "32×8")
    assert (table.loc[f"{name}_scale", "dtype"], table.loc[f"{name}_scale", "shape"]) == ("BF16", "32×2")
    for entry in layer.report.describe():
        start, end = entry["byte_range"]
        stored = own[entry["name"]].reshape(-1).view(torch.uint8)
        assert (folder / entry["shard"]).read_bytes()[start:end] == stored.numpy().tobytes()


@pytest.mark.parametrize("ending", ["_packed", "_scale", "_shape"])
def test_a_missing_part_of_an_expert_is_named_in_its_layer(
    tmp_path: Path, packed_kimi: PackedKimi, ending: str
) -> None:
    checkpoint = packed_kimi.write(tmp_path, lambda tensors: tensors.pop(EXPERT + ending))
    expected = rf"Layer 1 of packed-kimi doesn't fit .*: 'language_model\.{EXPERT}{ending}' is missing\.$"
    with pytest.raises(InputError, match=expected):
        load_decoder_layer(checkpoint, 1, torch.float32, "cpu")
    load_decoder_layer(checkpoint, 2, torch.float32, "cpu")


def test_every_unfit_part_of_an_expert_is_listed_at_once(tmp_path: Path, packed_kimi: PackedKimi) -> None:
    """Among them a weight that is whole in itself, but too wide for the model."""

    def damage(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{EXPERT}_scale"] = tensors[f"{EXPERT}_scale"].float()
        tensors |= random_packed(EXPERT.replace("experts.2", "experts.1"), 32, 96)
        other = EXPERT.replace("experts.2", "experts.0")
        tensors[f"{other}_scale"] = tensors[f"{other}_scale"][:, :1].contiguous()

    with pytest.raises(InputError) as refusal:
        load_decoder_layer(packed_kimi.write(tmp_path, damage), 1, torch.float32, "cpu")
    for words in (
        "experts.2.up_proj.weight_scale' is stored as F32, not BF16",
        "experts.1.up_proj.weight' has shape [32, 96], not [32, 64].",
        "experts.0.up_proj.weight_scale' has shape [32, 1], not [32, 2]",
    ):
        assert words in str(refusal.value)


def test_an_order_of_inputs_beside_a_packed_expert_has_no_place(tmp_path: Path, packed_kimi: PackedKimi) -> None:
    """``weight_g_idx`` says that inputs were reordered before they were packed."""
    order = f"{EXPERT}_g_idx"
    checkpoint = packed_kimi.write(tmp_path, lambda tensors: tensors.update({order: torch.zeros(64)}))
    with pytest.raises(InputError, match=rf"{order}' has no place in DeepseekV3DecoderLayer"):
        load_decoder_layer(checkpoint, 1, torch.float32, "cpu")


def test_experts_of_an_unknown_packing_are_refused_once(tmp_path: Path, packed_kimi: PackedKimi) -> None:
    """Before any is read, not once for each of 1,152 weights; attention, which isn't packed, loads all the same."""
    folder = packed_kimi.write(tmp_path).folder
    set_packing(folder, None)
    checkpoint = Checkpoint.open(folder)
    refused = r"layers\.1\.mlp\.experts\.0\.gate_proj\.weight' is packed, and .*says how"
    for check in (
        lambda: check_layers_below(checkpoint, 2, 16, torch.float32, free_bytes=10**9),
        lambda: load_decoder_layer(checkpoint, 1, torch.float32, "cpu"),
    ):
        with pytest.raises(InputError, match=refused) as refusal:
            check()
        assert str(refusal.value).count("is packed") == 1
    load_attention(checkpoint, 1)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38])
def test_a_scale_that_is_no_number_is_named(tmp_path: Path, packed_kimi: PackedKimi, value: float) -> None:
    """Also where only the product is infinite: 8 times 3e38 is."""

    def damage(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{EXPERT}_scale"][3, 1] = value
        tensors[f"{EXPERT}_scale"][5] = value

    expected = rf"'language_model\.{EXPERT}_scale' of packed-kimi holds 3 scales that are no positive numbers"
    if value == 3e38:
        expected = rf"'language_model\.{EXPERT}' of packed-kimi holds \d+ NaN or infinite values"
    with pytest.raises(InputError, match=expected):
        load_decoder_layer(packed_kimi.write(tmp_path, damage), 1, torch.float32, "cpu")


def test_a_packed_weight_that_overflows_float16_is_refused(tmp_path: Path, packed_kimi: PackedKimi) -> None:
    checkpoint = packed_kimi.write(tmp_path, lambda tensors: tensors[f"{EXPERT}_scale"][0, 0].fill_(60_000.0))
    load_decoder_layer(checkpoint, 1, torch.bfloat16, "cpu")
    with pytest.raises(InputError, match=rf"'language_model\.{EXPERT}' of packed-kimi holds .* too large for float16"):
        load_decoder_layer(checkpoint, 1, torch.float16, "cpu")


def test_layers_below_need_the_room_of_their_unpacked_weights(tmp_path: Path, packed_kimi: PackedKimi) -> None:
    """To the byte, and from headers alone."""
    checkpoint = packed_kimi.write(tmp_path)
    layers = packed_kimi.model.get_decoder().layers
    needed = decoder_layer_bytes(layers[1], packed_kimi.model.config, 16, torch.float32)
    assert needed > 4 * sum(parameter.numel() for parameter in layers[1].parameters())
    check_layers_below(checkpoint, 2, 16, torch.float32, free_bytes=needed)
    headers = sum(8 + int.from_bytes(path.read_bytes()[:8], "little") for path in checkpoint.folder.glob("model-*"))
    assert checkpoint.bytes_read == headers
    with pytest.raises(InputError, match="layer 1 of packed-kimi takes"):
        check_layers_below(checkpoint, 2, 16, torch.float32, free_bytes=needed - 1)


# Memory

MEASURE = """
import re, sys
from pathlib import Path
import torch
from helpers.checkpoint import Checkpoint
from helpers.layer import load_attention, skeleton

def resident(field):
    return int(re.search(field + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

checkpoint = Checkpoint.open(sys.argv[1])
skeleton(checkpoint, 0)
Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
before = resident("VmRSS")
layer = load_attention(checkpoint, layer=0)
print(resident("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc")
def test_peak_memory_of_the_load_is_that_of_the_tensors(tmp_path: Path) -> None:
    """At most 1.2 times their bytes and 3 MB; the file is three times larger, and is never mapped or read whole."""
    width = 2048
    config = llama_config(hidden_size=width, num_attention_heads=16, num_key_value_heads=16)
    shapes = {f"model.layers.0.self_attn.{part}_proj.weight": (width, width) for part in "qkvo"}
    tensors = {name: torch.full(shape, 0.01, dtype=torch.bfloat16) for name, shape in shapes.items()}
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    tensors["model.embed_tokens.weight"] = torch.full((8 * width, width), 0.01, dtype=torch.bfloat16)
    folder = write_checkpoint(tmp_path / "big", config, tensors)
    result = subprocess.run([sys.executable, "-c", MEASURE, str(folder)], capture_output=True, text=True, check=True)
    (folder / "model.safetensors").unlink()
    assert 0.9 * nbytes < int(result.stdout) <= 1.2 * nbytes + 3_000_000
