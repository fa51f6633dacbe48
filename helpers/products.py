"""Matrix products of narrow types on a CPU: which type to multiply in, and linear layers that do."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

NARROW = (torch.bfloat16, torch.float16)
ONE_AT_A_TIME = threading.RLock()  # held while torch's settings aren't its user's
ROWS_AT_ONCE = 512  # of a weight made float32: a block that stays in the processor's cache
TOKENS_AT_ONCE = 4096  # of an input made float32: long inputs are never held twice


@cache
def has_bfloat16_products() -> bool:
    """Whether this processor multiplies BF16 matrices by itself, with float32 accumulation (AVX512-BF16, AMX)."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


@contextmanager
def float32_products_in(precision: str) -> Iterator[None]:
    """Let float32 matrix products on a CPU take their factors in ``"bf16"`` (sums stay float32), or in ``"ieee"``.

    oneDNN's fpmath mode. Where factors are BF16 numbers already, ``"bf16"`` loses nothing, and is several times faster
    on processors with BF16 instructions; on others it changes nothing. The setting is the process's: one thread at a
    time has it, but float32 products that other threads make meanwhile are made as it says.
    """
    backend: Any = torch.backends.mkldnn
    with ONE_AT_A_TIME:
        before = backend.matmul.fp32_precision
        if before == backend.fp32_precision:
            before = "none"  # what it inherits goes on being inherited
        backend.matmul.fp32_precision = precision
        try:
            yield
        finally:
            backend.matmul.fp32_precision = before


def exact_products_of(dtype: torch.dtype) -> AbstractContextManager[None]:
    """Let float32 products on a CPU be as fast as is exact where every factor is a number of ``dtype``."""
    return float32_products_in("bf16" if dtype == torch.bfloat16 else "ieee")


class Float32Products(TorchFunctionMode):
    """Let linear layers and ``torch.matmul`` of BF16 and FP16 on a CPU multiply in float32, and round each result once.

    The numbers are those of a narrow product with float32 accumulation, whatever the processor; where it has no BF16
    instructions (AVX2), its own BF16 product is about six times slower than this. Where it has them, they are used.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first: Any = args[0] if args else None
        if isinstance(first, torch.Tensor) and _is_slow(first):
            if func is nn.functional.linear:
                return _linear_in_float32(*args, **(kwargs or {}))
            if func is torch.matmul:
                return func(first.float(), args[1].float()).to(first.dtype)
        return func(*args, **(kwargs or {}))


def _is_slow(tensor: torch.Tensor) -> bool:
    own = tensor.dtype == torch.bfloat16 and has_bfloat16_products()
    return tensor.device.type == "cpu" and tensor.dtype in NARROW and not own


def _linear_in_float32(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    output = x.new_empty(*x.shape[:-1], len(weight))
    flat = output.view(-1, len(weight))
    for tokens, result in zip(
        x.reshape(-1, x.shape[-1]).split(TOKENS_AT_ONCE), flat.split(TOKENS_AT_ONCE), strict=True
    ):
        wide = tokens.float()
        for start in range(0, len(weight), ROWS_AT_ONCE):
            rows = slice(start, start + ROWS_AT_ONCE)
            result[:, rows] = nn.functional.linear(
                wide, weight[rows].float(), None if bias is None else bias[rows].float()
            )
    return output
