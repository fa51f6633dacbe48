"""Packed INT4 weights, as the Kimi K2 family stores its routed experts: symmetric, one BF16 scale for 32 inputs.

The layout is compressed-tensors' ``pack-quantized`` (https://github.com/vllm-project/compressed-tensors): a weight
[out, in] is ``weight_packed`` [out, in / 8] int32, eight values from -8 to 7 in each, lowest bits first and each plus
8; ``weight_scale`` [out, in / 32] BF16; and ``weight_shape`` [2].
"""

from __future__ import annotations

import torch

GROUP = 32  # inputs that share a scale
BITS, OFFSET = 4, 8
PER_INT32 = 32 // BITS


def quantize_int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round to the nearest of 16 numbers a group: values -8 … 7 int8 [..., out, in], scales BF16 [..., out, in / 32].

    The scale is a group's largest magnitude / 7.5, so that the 16 numbers span twice that magnitude.
    """
    groups = weight.float().unflatten(-1, (-1, GROUP))
    scale = (groups.abs().amax(dim=-1) / 7.5).clamp_min(torch.finfo(torch.bfloat16).tiny).bfloat16()
    values = (groups / scale[..., None].float()).round().clamp(-OFFSET, OFFSET - 1)
    return values.flatten(-2).to(torch.int8), scale


def dequantize_int4(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Weights [..., out, in] in float32, exactly, from values [..., out, in] and scales [..., out, in / 32]."""
    return (values.float().unflatten(-1, (-1, GROUP)) * scale[..., None].float()).flatten(-2)


def pack_int4(values: torch.Tensor) -> torch.Tensor:
    """Eight values an int32, lowest bits first: [..., in] int8 -> [..., in / 8] int32."""
    nibbles = (values.long() + OFFSET).unflatten(-1, (-1, PER_INT32)) << torch.arange(0, 32, BITS)
    packed = nibbles.sum(dim=-1)
    return torch.where(packed < 2**31, packed, packed - 2**32).to(torch.int32)


def unpack_int4(packed: torch.Tensor) -> torch.Tensor:
    """Inverse of :func:`pack_int4`: [..., in / 8] int32 -> [..., in] int8."""
    pairs = packed.contiguous().view(torch.uint8)  # as bytes, lowest first: an expert's int64 would take 100 MB
    nibbles = torch.stack((pairs & (2**BITS - 1), pairs >> BITS), dim=-1).flatten(-2)
    return nibbles.to(torch.int8) - OFFSET
