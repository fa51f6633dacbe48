"""Quantised weights against plain Python (bits one by one, exact fractions) and the compressed-tensors library."""

from __future__ import annotations

from fractions import Fraction

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.quantization import (
    GROUP,
    dequantize_fp8,
    dequantize_int4,
    pack_int4,
    quantize_fp8,
    quantize_int4,
    unpack_int4,
)

LEVELS = range(-8, 8)
SLACK = Fraction(1, 2**20)  # of a scale: what float32's division may round


def bits_of(number: int) -> list[int]:
    """An int32's 32 bits, lowest first, two's complement."""
    return [(number % 2**32) // 2**place % 2 for place in range(32)]


def values_by_hand(packed: torch.Tensor) -> list[list[int]]:
    """Rows of an int32 matrix, bit by bit: the lowest four bits are the first value, plus 8."""
    rows = []
    for row in packed.tolist():
        bits = [bit for number in row for bit in bits_of(number)]
        nibbles = [bits[i : i + 4] for i in range(0, len(bits), 4)]
        rows.append([a + 2 * b + 4 * c + 8 * d - 8 for a, b, c, d in nibbles])
    return rows


def weight_by_hand(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The float32 weight [out, in] of one packed matrix; a product of 4 and 8 significant bits is exact in float32."""
    scales = scale.double().tolist()
    rows = values_by_hand(packed)
    return torch.tensor([[value * scales[i][j // 32] for j, value in enumerate(row)] for i, row in enumerate(rows)])


def random_packed(name: str, n_out: int, n_in: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """The three stored tensors of a packed weight ``name``: all bit patterns, scales around 0.02."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"{name}_packed": torch.randint(-(2**31), 2**31, (n_out, n_in // 8), generator=generator).to(torch.int32),
        f"{name}_scale": (0.01 + 0.02 * torch.rand(n_out, n_in // 32, generator=generator)).bfloat16(),
        f"{name}_shape": torch.tensor([n_out, n_in], dtype=torch.int32),
    }


int32s = st.integers(-(2**31), 2**31 - 1)


@settings(deadline=None)
@given(st.lists(st.lists(int32s, min_size=3, max_size=3), min_size=1, max_size=4))
def test_unpacking_reads_the_bits_that_a_plain_loop_reads(numbers: list[list[int]]) -> None:
    packed = torch.tensor(numbers, dtype=torch.int32)
    values = unpack_int4(packed)
    assert values.dtype == torch.int8
    assert values.tolist() == values_by_hand(packed)
    assert torch.equal(pack_int4(values), packed)


@settings(deadline=None)
@given(st.lists(st.lists(st.sampled_from(LEVELS), min_size=16, max_size=16), min_size=1, max_size=4))
def test_packing_writes_what_a_plain_loop_reads_back(values: list[list[int]]) -> None:
    packed = pack_int4(torch.tensor(values, dtype=torch.int8))
    assert packed.dtype == torch.int32
    assert packed.shape == (len(values), 2)
    assert values_by_hand(packed) == values


def test_the_layout_written_out() -> None:
    """0x76543210 holds 0 to 7 from its lowest bits, each less 8; all ones are eight times the largest value."""
    assert unpack_int4(torch.tensor([0x76543210], dtype=torch.int32)).tolist() == [-8, -7, -6, -5, -4, -3, -2, -1]
    assert unpack_int4(torch.tensor([-1], dtype=torch.int32)).tolist() == [7] * 8
    assert unpack_int4(torch.tensor([-(2**31)], dtype=torch.int32)).tolist() == [-8] * 7 + [0]


def test_leading_dimensions_and_strides_change_nothing() -> None:
    """Experts in a stack, and a view that isn't contiguous: bytes are taken of the numbers, not of the storage."""
    packed = torch.randint(-(2**31), 2**31, (3, 4, 6), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    for view in (packed, packed.transpose(0, 1), packed[..., ::2]):
        values = unpack_int4(view)
        assert values.shape == (*view.shape[:-1], view.shape[-1] * 8)
        for i, matrix in enumerate(view):
            assert values[i].tolist() == values_by_hand(matrix)
        assert torch.equal(pack_int4(values), view)


@settings(deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([(1, 32), (3, 64), (2, 160)]))
def test_dequantised_weights_are_exact(seed: int, shape: tuple[int, int]) -> None:
    """Each group of 32 with its own scale."""
    packed, scale, _ = random_packed("w", *shape, seed=seed).values()
    weight = dequantize_int4(unpack_int4(packed), scale)
    assert weight.dtype == torch.float32
    assert torch.equal(weight, weight_by_hand(packed, scale))


magnitudes = st.sampled_from([1e-45, 1e-38, 1e-6, 0.02, 1.0, 1e30])
groups = st.lists(st.floats(-1, 1, width=32), min_size=GROUP, max_size=GROUP)


@settings(deadline=None)
@given(st.lists(groups, min_size=1, max_size=3), magnitudes)
def test_quantising_takes_the_nearest_of_sixteen_numbers(rows: list[list[float]], magnitude: float) -> None:
    """In exact fractions: no level is nearer, and the error is at most half a scale where the levels reach."""
    weight = torch.tensor(rows) * magnitude
    values, scale = quantize_int4(weight)
    assert (values.dtype, values.shape) == (torch.int8, weight.shape)
    assert (scale.dtype, scale.shape) == (torch.bfloat16, (len(rows), 1))
    for row, chosen, (own,) in zip(weight.tolist(), values.tolist(), scale.tolist(), strict=True):
        step = Fraction(own)
        wanted = max(abs(Fraction(number)) for number in row) / Fraction(15, 2)
        assert abs(step - wanted) <= wanted / 2**8 or (wanted < 2.0**-126 and own == 2.0**-126)
        for number, value in zip(row, chosen, strict=True):
            assert value in LEVELS
            error = abs(Fraction(number) - value * step)
            assert error <= min(abs(Fraction(number) - level * step) for level in LEVELS) + step * SLACK
            if -8.5 * step <= Fraction(number) <= 7.5 * step:
                assert error <= step / 2 + step * SLACK


def test_a_group_takes_exactly_sixteen_levels() -> None:
    """All of them are used where numbers spread evenly, and the groups of a row don't share a scale."""
    ramp = torch.linspace(-7.5, 7.5, GROUP)
    weight = torch.cat([ramp / 64, ramp * 12])[None]
    values, scale = quantize_int4(weight)
    for group in values.unflatten(-1, (-1, GROUP))[0]:
        assert sorted(set(group.tolist())) == list(LEVELS)
    rounded = dequantize_int4(values, scale).unflatten(-1, (-1, GROUP))[0]
    assert [len(group.unique()) for group in rounded] == [16, 16]
    assert scale.tolist() == [[1 / 64, 12]]


@settings(deadline=None)
@given(st.lists(groups, min_size=1, max_size=3))
def test_what_was_dequantised_packs_back_into_the_same_numbers(rows: list[list[float]]) -> None:
    """Writing and reading a checkpoint changes no weight."""
    values, scale = quantize_int4(torch.tensor(rows))
    weight = dequantize_int4(values, scale)
    assert torch.equal(dequantize_int4(unpack_int4(pack_int4(values)), scale), weight)


def test_a_group_of_zeros_stays_zero() -> None:
    values, scale = quantize_int4(torch.zeros(2, 64))
    assert torch.equal(dequantize_int4(values, scale), torch.zeros(2, 64))
    assert (scale > 0).all()


# Held to the compressed-tensors library, which wrote the published files


@settings(deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([(1, 32, 32), (6, 96, 32), (5, 128, 64), (3, 96, 8)]))
def test_unpacked_and_dequantised_bit_for_bit_as_compressed_tensors_does(
    seed: int, shape: tuple[int, int, int]
) -> None:
    n_out, n_in, group = shape
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(-(2**31), 2**31, (n_out, n_in // 8), generator=generator).to(torch.int32)
    scale = (torch.rand(n_out, n_in // group, generator=generator) + 1e-3).bfloat16()
    theirs = unpack_from_int32(packed, 4, torch.Size((n_out, n_in)))
    ours = unpack_int4(packed)
    assert torch.equal(ours, theirs)
    assert torch.equal(pack_to_int32(ours, 4), pack_int4(ours))
    args = QuantizationArgs(num_bits=4, group_size=group, strategy="group", symmetric=True)
    weight = dequantize(theirs, scale.float(), args=args, dtype=torch.float32)
    assert torch.equal(dequantize_int4(ours, scale).view(torch.int32), weight.view(torch.int32))


# FP8

sizes = st.tuples(st.integers(1, 40), st.integers(1, 40))
blocks = st.sampled_from([(16, 16), (8, 24), (1, 40), (128, 128)])


@settings(deadline=None)
@given(sizes, blocks, st.integers(0, 2**31), st.sampled_from([1e-30, 1e-3, 1.0, 1e30]))
def test_fp8_takes_the_nearest_number_of_e4m3(
    size: tuple[int, int], block: tuple[int, int], seed: int, magnitude: float
) -> None:
    """Each block's largest number is kept; all others become the nearest that e4m3 has."""
    weight = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * magnitude
    values, scale = quantize_fp8(weight, block)
    assert (values.dtype, values.shape, scale.dtype) == (torch.float8_e4m3fn, weight.shape, torch.float32)
    assert scale.shape == (-(-size[0] // block[0]), -(-size[1] // block[1]))
    levels = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    levels = levels[levels.isfinite()]
    again = dequantize_fp8(values, scale, block).double()
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            part = (slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
            own, step = weight[part].double(), scale[i, j].double()
            nearest = (own[..., None] - levels * step).abs().amin(dim=-1)
            torch.testing.assert_close((own - again[part]).abs(), nearest, rtol=1e-4, atol=float(step) * 1e-4)
            assert abs(float(again[part].abs().max() / own.abs().max()) - 1) < 1e-6


def test_fp8_zeros_stay_zero() -> None:
    values, scale = quantize_fp8(torch.zeros(130, 5))
    assert torch.equal(dequantize_fp8(values, scale), torch.zeros(130, 5))
    assert (scale > 0).all()
