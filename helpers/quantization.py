"""Quantised weights, as the Kimi K2 family and DeepSeek-V3 store them: packed INT4 in groups, FP8 in blocks.

Packed INT4 is compressed-tensors' ``pack-quantized`` (https://github.com/vllm-project/compressed-tensors): a weight
[out, in] is ``weight_packed`` [out, in / 8] int32, eight values from -8 to 7 in each, lowest bits first and each plus
8; ``weight_scale`` [out, in / group] BF16; and ``weight_shape`` [2].

FP8 is DeepSeek-V3's (arXiv:2412.19437, section 3.3): ``weight`` [out, in] e4m3 and ``weight_scale_inv`` [⌈out / rows⌉,
⌈in / columns⌉] F32, one number for a block of 128×128 which its weights are multiplied with.
"""

from __future__ import annotations

import torch

GROUP = 32  # inputs that share a scale, in the K2 family
BLOCK = (128, 128)
BITS, OFFSET = 4, 8
PER_INT32 = 32 // BITS
FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


def quantize_int4(weight: torch.Tensor, group: int = GROUP) -> tuple[torch.Tensor, torch.Tensor]:
    """Round to the nearest of 16 numbers a group: values -8 … 7 int8 [..., out, in], scales BF16 [..., out, in/group].

    The scale is a group's largest magnitude / 7.5, so that the 16 numbers span twice that magnitude.
    """
    groups = weight.float().unflatten(-1, (-1, group))
    scale = (groups.abs().amax(dim=-1) / 7.5).clamp_min(torch.finfo(torch.bfloat16).tiny).bfloat16()
    values = (groups / scale[..., None].float()).round().clamp(-OFFSET, OFFSET - 1)
    return values.flatten(-2).to(torch.int8), scale


def dequantize_int4(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Weights [..., out, in] in float32, exactly, from values [..., out, in] and scales [..., out, in / group]."""
    groups = values.float().unflatten(-1, (scale.shape[-1], -1))
    return groups.mul_(scale[..., None].float()).flatten(-2)


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


def quantize_fp8(weight: torch.Tensor, block: tuple[int, int] = BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """Round [out, in] to e4m3 [out, in] and F32 scales of blocks, each block's largest magnitude becoming 448."""
    n_out, n_in = weight.shape
    rows, columns = (-(-n // size) for n, size in zip(weight.shape, block, strict=True))
    padded = torch.zeros(rows * block[0], columns * block[1])
    padded[:n_out, :n_in] = weight
    blocks = padded.view(rows, block[0], columns, block[1])
    scale = (blocks.abs().amax(dim=(1, 3)) / FP8_MAX).clamp_min(torch.finfo(torch.float32).tiny)
    # a division may round to just above 448, which e4m3 doesn't hold
    values = (blocks / scale[:, None, :, None]).clamp(-FP8_MAX, FP8_MAX)
    return values.reshape(padded.shape)[:n_out, :n_in].to(torch.float8_e4m3fn), scale


def dequantize_fp8(values: torch.Tensor, scale: torch.Tensor, block: tuple[int, int] = BLOCK) -> torch.Tensor:
    """Weights [out, in] in float32 from e4m3 values and scales of blocks; each product is rounded once."""
    weight = values.float()
    for i, scales in enumerate(scale.float()):  # row by row of blocks: no matrix of scales
        weight[i * block[0] : (i + 1) * block[0]] *= scales.repeat_interleave(block[1])[: weight.shape[1]]
    return weight
