"""One attention or decoder layer of any decoder that transformers knows, with a checkpoint's weights in it.

The causal model is built on the meta device, where it takes no memory, and only as deep as the layer asked for; the
layer is taken out of it and given the stored tensors one by one. The layer's code is transformers' own.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Container
from dataclasses import dataclass
from typing import Any, cast

import pandas as pd
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from helpers.checkpoint import Checkpoint
from helpers.errors import InputError, did_you_mean
from helpers.memory import decoder_layer_bytes
from helpers.weights import StoredTensor, Weight

# Buffers that old checkpoints store and no module reads: the rotary frequencies follow from the config.
IGNORED = ("rotary_emb.inv_freq",)
# The one place where modules hold fused tensors and checkpoints hold separate ones: routed experts.
FUSED_EXPERTS = {
    "mlp.experts.gate_up_proj": ("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight"),
    "mlp.experts.down_proj": ("mlp.experts.{}.down_proj.weight",),
}


@dataclass(frozen=True)
class LoadReport:
    """What one module takes from a checkpoint. Names, shapes and dtypes were checked both ways before it exists.

    ``sources`` maps each of the module's tensors to the weights it is made of (one, but for fused experts), which are
    one stored tensor each, or two or three if quantised; ``ignored`` are stored tensors of the layer that no module
    reads.
    """

    sources: dict[str, list[Weight]]
    ignored: list[StoredTensor]

    @property
    def stored(self) -> list[StoredTensor]:
        return [entry for weights in self.sources.values() for weight in weights for entry in weight.stored]

    @property
    def n_parameters(self) -> int:
        return sum(math.prod(weight.shape) for weights in self.sources.values() for weight in weights)

    @property
    def summary(self) -> str:
        nbytes = sum(entry.nbytes for entry in self.stored)
        n = len(self.stored)
        return f"{n} of {n} tensors matched, {self.n_parameters:,} parameters, {nbytes:,} bytes read"

    def totals(self) -> dict[str, Any]:
        return {"load": self.summary, "parameter_count": self.n_parameters}

    def describe(self) -> list[dict[str, Any]]:
        """What a manifest says of each tensor, its byte range in the shard's file included."""
        return [
            {
                "name": entry.name,
                "shard": entry.shard,
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "byte_range": [entry.start, entry.end],
            }
            for entry in self.stored
        ]

    def table(self) -> pd.DataFrame:
        """One row a stored tensor: name, shard, dtype, shape, bytes, matched (``yes`` or ``ignored``)."""
        return pd.DataFrame(
            {
                "name": entry.name,
                "shard": entry.shard,
                "dtype": entry.dtype,
                "shape": "×".join(map(str, entry.shape)),
                "bytes": entry.nbytes,
                "matched": matched,
            }
            for entries, matched in ((self.stored, "yes"), (self.ignored, "ignored"))
            for entry in entries
        )


@dataclass
class AttentionLayer:
    """One attention layer with its weights, ready to run alone.

    ``module`` is transformers' attention module. It is causal when called without a mask, which an eager or
    unconfigured stand-alone module is not. ``config`` is the model's, ``index`` the layer's number, ``report`` the
    :class:`LoadReport`.
    """

    module: nn.Module
    config: PreTrainedConfig
    index: int
    report: LoadReport
    rotary: nn.Module

    @property
    def n_heads(self) -> int:
        return int(self.config.num_attention_heads)

    @property
    def scaling(self) -> float:
        """What the softmax's logits, query · key, are multiplied with."""
        return float(cast(Any, self.module).scaling)

    @property
    def norm_epsilons(self) -> str:
        """Epsilons of the norms inside the attention, as transformers sets them whatever the config says; or ``""``."""
        found = {part.variance_epsilon for part in self.module.modules() if hasattr(part, "variance_epsilon")}
        return ", ".join(sorted(f"{epsilon:g}" for epsilon in found))

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.module.parameters()).dtype

    def position_embeddings(
        self, hidden_states: torch.Tensor, position_ids: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rotary ``(cos, sin)``, each [B or 1, L, rotary width], for positions 0 … L-1 or those given."""
        if position_ids is None:
            position_ids = torch.arange(hidden_states.shape[1], device=hidden_states.device)[None]
        cos, sin = self.rotary(hidden_states, position_ids)
        return cos, sin


def load_attention(
    ckpt: Checkpoint, layer: int = 0, dtype: torch.dtype = torch.bfloat16, device: str = "cpu"
) -> AttentionLayer:
    """Load the attention of decoder layer ``layer``; reads its tensors and their shards' headers, nothing more.

    Raises:
        InputError: no such layer; an architecture without a causal ``self_attn``; a tensor missing, unexpected, of
            another shape or of a quantised dtype; NaN or infinity in a weight.
    """
    decoder = skeleton(ckpt, layer)
    module = _part(decoder.layers[layer], "self_attn")
    if not getattr(module, "is_causal", False):
        raise InputError(f"Layer {layer} of {ckpt.name} ({type(module).__name__}) is not causal self-attention.")
    report = _load(ckpt, layer, "self_attn.", module, dtype, device)
    return AttentionLayer(module, decoder.config, layer, report, _rotary(decoder, device))


def random_attention(layer: AttentionLayer, seed: int) -> AttentionLayer:
    """Return ``layer`` with random weights of its shapes, drawn as transformers initialises a new model.

    Matrices are normal(0, the config's ``initializer_range``), norms are 1 and biases 0: what any figure must be held
    against that is said of trained weights.
    """
    module = copy.deepcopy(layer.module)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            else:
                drawn = torch.randn(parameter.shape, generator=generator) * initializer_range(layer.config)
                parameter.copy_(drawn)
    return AttentionLayer(module, layer.config, layer.index, layer.report, layer.rotary)


def initializer_range(config: PreTrainedConfig) -> float:
    """Standard deviation that a new model's matrices are drawn with; transformers' own default where none is given."""
    return float(getattr(config, "initializer_range", 0.02))


def load_decoder_layer(ckpt: Checkpoint, layer: int, dtype: torch.dtype, device: str) -> nn.Module:
    """Load the whole decoder layer ``layer`` (norms, attention, feed-forward or experts); quantised weights are
    dequantised.

    Raises:
        InputError: as :func:`load_attention`.
    """
    module = skeleton(ckpt, layer).layers[layer]
    _load(ckpt, layer, "", module, dtype, device)
    return module


def load_input_norm(ckpt: Checkpoint, layer: int, dtype: torch.dtype, device: str) -> nn.Module:
    """Load the norm that stands before the attention of ``layer``.

    Raises:
        InputError: as :func:`load_attention`, or the architecture has no ``input_layernorm``.
    """
    module = _part(skeleton(ckpt, layer).layers[layer], "input_layernorm")
    _load(ckpt, layer, "input_layernorm.", module, dtype, device)
    return module


def check_attention(ckpt: Checkpoint, layer: int) -> nn.Module:
    """Check names, shapes and dtypes as :func:`load_attention` does, from headers alone; no weight is read.

    Returns the attention module on the meta device.
    """
    module = _part(skeleton(ckpt, layer).layers[layer], "self_attn")
    _match(ckpt, layer, "self_attn.", module)
    return module


def check_layers_below(ckpt: Checkpoint, layer: int, n_tokens: int, dtype: torch.dtype, free_bytes: int) -> None:
    """Refuse a ``layer`` whose lower layers can't be run one after another, from the skeleton and headers alone.

    Raises:
        InputError: a layer that takes more than ``free_bytes``, that sees only a window of ``n_tokens``, or whose
            tensors don't fit; this layer's input norm is checked too.
    """
    layers = skeleton(ckpt, layer).layers
    for below in range(layer):
        window = attention_window(ckpt.config, below)
        if window is not None and n_tokens > window:
            raise InputError(f"Layer {below} of {ckpt.name} sees the last {window} tokens only: lower seq_len.")
        _part(layers[below], "self_attn")
        needed = decoder_layer_bytes(layers[below], ckpt.config, n_tokens, dtype)
        if needed > free_bytes:
            raise InputError(
                f"Text at layer {layer} needs the layers below to run first, and layer {below} of {ckpt.name} takes "
                f"{needed / 1e9:.1f} GB in {str(dtype).removeprefix('torch.')} where {free_bytes / 1e9:.1f} GB are "
                f"free: use a layer up to {below}, or input=random."
            )
        _match(ckpt, below, "", layers[below])
    _match(ckpt, layer, "input_layernorm.", _part(layers[layer], "input_layernorm"))


def skeleton(ckpt: Checkpoint, layer: int) -> Any:
    """Build the decoder on the meta device (no memory), as deep as ``layer``, with causal attention.

    Raises:
        InputError: the model has no such layer, or its decoder isn't a stack of ``layers``.
    """
    n_layers = ckpt.config.num_hidden_layers
    if not 0 <= layer < n_layers:
        raise InputError(f"layer {layer} is out of range: {ckpt.name} has layers 0 to {n_layers - 1}.")
    config = copy.deepcopy(ckpt.config)
    try:
        config.num_hidden_layers = layer + 1
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[: layer + 1]
        with torch.device("meta"):
            # sdpa without a mask is causal; eager without one would attend to the future
            decoder = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").get_decoder()
    except Exception as error:  # transformers raises a different type for each kind of model that has no such form
        # a KeyError's text is the key alone
        reason = f"it doesn't know {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
        raise InputError(
            f"transformers builds no causal decoder from {ckpt.name} (model type {config.model_type}): "
            f"{reason.splitlines()[0][:200].rstrip('.')}."
        ) from error
    if not isinstance(getattr(decoder, "layers", None), nn.ModuleList):
        raise InputError(
            f"{type(decoder).__name__} is no decoder with a list of layers: this architecture is not supported."
        )
    return decoder.eval()


def rotary_embedding(ckpt: Checkpoint, device: str) -> nn.Module:
    """Return the model's rotary embedding: ``(hidden_states, position_ids) -> (cos, sin)``."""
    return _rotary(skeleton(ckpt, 0), device)


def attention_window(config: PreTrainedConfig, layer: int) -> int | None:
    """Return how many tokens back this layer sees, or None for all of them (full causal attention)."""
    kinds = getattr(config, "layer_types", None)
    kind = kinds[layer] if kinds else "full_attention"
    if kind == "full_attention":
        uses_window = not kinds and getattr(config, "use_sliding_window", True)
        return getattr(config, "sliding_window", None) if uses_window else None
    if kind == "sliding_attention":
        return int(config.sliding_window)
    raise InputError(f"Layer {layer} is of kind {kind}: only causal softmax attention can be studied.")


def _part(decoder_layer: nn.Module, name: str) -> nn.Module:
    part = getattr(decoder_layer, name, None)
    if part is None:
        parts = ", ".join(child for child, _ in decoder_layer.named_children())
        raise InputError(
            f"{type(decoder_layer).__name__} has no {name} (it has {parts}): this architecture is not supported."
        )
    return part


def _rotary(decoder: Any, device: str) -> nn.Module:
    """Make the decoder's rotary embedding anew: its frequencies are computed, not stored, and meta has no numbers."""
    rotary = getattr(decoder, "rotary_emb", None)
    if rotary is None:
        raise InputError(f"{type(decoder).__name__} has no rotary_emb: only rotary position embeddings are supported.")
    return type(rotary)(config=decoder.config).to(device)


def _match(ckpt: Checkpoint, layer: int, part: str, module: nn.Module) -> LoadReport:
    """Hold the module's tensors against the checkpoint's, both ways; reads headers only.

    Raises:
        InputError: lists every missing, unexpected and misshapen tensor, with the nearest name, and every weight that
            is stored in a way that can't be read.
    """
    start = f"{ckpt.prefix}layers.{layer}."
    held = {name.removeprefix(start) for name in ckpt.layer_names(layer, part)}
    if not held:
        rest = ckpt.layer_names(layer)
        why = f"of layer {layer} it holds '{rest[0]}'" if rest else f"a part of the model without layer {layer}"
        raise InputError(f"{ckpt.name} holds no tensor {start}{part}…: {why}.")
    targets = {part + name: tensor for name, tensor in module.state_dict().items()}
    wanted = {name: _source_shapes(name, tensor, held) for name, tensor in targets.items()}
    expected = {name: shape for shapes in wanted.values() for name, shape in shapes.items()}
    ignored = {name for name in held if name.endswith(IGNORED)}
    unexpected = held - expected.keys() - ignored

    members = {name: ckpt.members(start + name) for name in expected}
    missing = {name: [member for member in members[name] if member not in ckpt.shard_of] for name in expected}
    problems = [
        f"'{member}' is missing.{did_you_mean(member.removeprefix(start), unexpected)}"
        for absent in missing.values()
        for member in absent
    ]
    if not problems:
        problems = [f"'{start}{name}' has no place in {type(module).__name__}." for name in sorted(unexpected)]
    weights = {name: ckpt.weight(start + name) for name in expected if not missing[name]}
    of_config = [weight.config_fault for weight in weights.values() if weight.config_fault]
    problems += of_config[:1]  # once: it is so for every weight that is stored like that
    for name, weight in weights.items():
        if of_config:
            break
        if weight.fault:
            problems.append(weight.fault)
        elif weight.shape != expected[name]:
            problems.append(f"'{weight.name}' has shape {list(weight.shape)}, not {list(expected[name])}.")
    if problems:
        shown = " ".join(problems[:8]) + (f" And {len(problems) - 8} more." if len(problems) > 8 else "")
        raise InputError(f"Layer {layer} of {ckpt.name} doesn't fit the model that its config describes: {shown}")
    return LoadReport(
        {name.removeprefix(part): [weights[source] for source in wanted[name]] for name in targets},
        [ckpt.stored(start + name) for name in sorted(ignored)],
    )


def _source_shapes(name: str, target: torch.Tensor, held: Container[str]) -> dict[str, tuple[int, ...]]:
    """Names of the weights that one module tensor is made of, in order, with the shape each must have."""
    if name in held or name not in FUSED_EXPERTS:
        return {name: tuple(target.shape)}
    n_experts, rows, width = target.shape  # rows of gate and up lie one after the other
    patterns = FUSED_EXPERTS[name]
    shape = (rows // len(patterns), width)
    return {pattern.format(expert): shape for expert in range(n_experts) for pattern in patterns}


def _load(ckpt: Checkpoint, layer: int, part: str, module: nn.Module, dtype: torch.dtype, device: str) -> LoadReport:
    """Give ``module`` (on meta) the checkpoint's tensors, one at a time, so that memory never holds them twice."""
    report = _match(ckpt, layer, part, module)
    parameters = dict(module.named_parameters())
    state = {}
    for name, weights in report.sources.items():
        # a buffer keeps its stored precision: routing biases are float32 in a BF16 model
        to = dtype if name in parameters else weights[0].dtype
        if len(weights) == 1:
            state[name] = _finite(ckpt, weights[0], to).to(device=device, dtype=to)
        else:
            state[name] = torch.empty(module.get_parameter(name).shape, device=device, dtype=to)
            for slot, weight in zip(state[name].view(len(weights), *weights[0].shape), weights, strict=True):
                slot.copy_(_finite(ckpt, weight, to))
    module.load_state_dict(state, assign=True)
    without_numbers = [name for name, buffer in module.named_buffers() if buffer.is_meta]
    if without_numbers:
        raise InputError(f"{type(module).__name__} computes {', '.join(without_numbers)} itself: it is not supported.")
    module.requires_grad_(False)
    return report


def _finite(ckpt: Checkpoint, weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """Read a weight and refuse what is NaN or infinite, or would be in ``dtype``: it spreads through a softmax row."""
    name = weight.name
    tensor = ckpt.tensor(name)
    low, high = torch.aminmax(tensor)  # NaN comes through; no temporary of the tensor's size
    if not torch.isfinite(torch.stack([low, high])).all():
        finite = torch.isfinite(tensor)
        bad = tensor.numel() - int(finite.sum())
        raise InputError(f"'{name}' of {ckpt.name} holds {bad:,} NaN or infinite values: fetch its shard again.")
    if max(-low.item(), high.item()) > torch.finfo(dtype).max:
        raise InputError(
            f"'{name}' of {ckpt.name} holds {max(-low.item(), high.item()):.3g}, too large for "
            f"{str(dtype).removeprefix('torch.')}: use dtype=bfloat16 or dtype=float32."
        )
    return tensor
