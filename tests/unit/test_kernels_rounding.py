"""Random bits, stochastic rounding, and the stored formats of table rows."""

import pytest
import torch
from torch import Tensor

from trainmark.kernels.rounding import other_bits, random_bits, round_stochastically
from trainmark.kernels.table_formats import (
    FORMATS,
    LARGEST_CODE,
    decode,
    encode,
    new_rows,
    read_rows,
    write_rows,
)

NARROW = [name for name in FORMATS if name != "fp32"]


def key(value: int) -> Tensor:
    return torch.tensor(value, dtype=torch.int32)


def bits(value: int, rows: Tensor, width: int) -> Tensor:
    """The 32 random bits as non-negative numbers."""
    return random_bits(key(value), rows, width).long() & 0xFFFFFFFF


# --- bits


@pytest.mark.parametrize("shift", [0, 8, 16, 24])
def test_every_byte_is_uniform(shift: int) -> None:
    found = bits(3, torch.arange(4000), 128) >> shift & 0xFF
    counts = torch.bincount(found.flatten(), minlength=256).double()
    expected = found.numel() / 256
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    # 255 degrees of freedom: mean 255, standard deviation 22.6.
    assert 150 < chi_square < 370


@pytest.mark.parametrize(
    "neighbour",
    ["next column", "next row", "next key", "row + 2^32", "key and row swapped"],
)
def test_neighbours_are_independent(neighbour: str) -> None:
    rows = torch.arange(1, 1001)
    here = bits(3, rows, 64)
    other = {
        "next column": lambda: here.roll(1, dims=1),
        "next row": lambda: bits(3, rows + 1, 64),
        "next key": lambda: bits(4, rows, 64),
        "row + 2^32": lambda: bits(3, rows + 2**32, 64),
        "key and row swapped": lambda: torch.cat([bits(int(r), key(3)[None], 64) for r in rows]),
    }[neighbour]()
    # Each of the 32 bits agrees with its neighbour half of the time.
    agree = torch.stack([((here ^ other) >> bit & 1 == 0).double().mean() for bit in range(32)])
    deviation = 0.5 / here.numel() ** 0.5
    assert (agree - 0.5).abs().max().item() < 5 * deviation
    together = torch.corrcoef(torch.stack([here.flatten(), other.flatten()]).double())[0, 1]
    assert abs(together.item()) < 5 / here.numel() ** 0.5


@pytest.mark.parametrize("shift", [0, 8, 16])
def test_the_other_bits_tell_nothing_of_16_that_are_known(shift: int) -> None:
    """Neither bit by bit nor, as rounding uses them, as numbers."""
    drawn = random_bits(key(3), torch.arange(4000), 64)
    known, others = drawn >> shift & 0xFFFF, other_bits(drawn)
    assert others.min() >= 0
    assert others.max() < 2**16
    agree = torch.stack([((known ^ others) >> bit & 1 == 0).double().mean() for bit in range(16)])
    assert (agree - 0.5).abs().max().item() < 5 * 0.5 / known.numel() ** 0.5
    both = torch.stack([known.flatten(), others.flatten()]).double()
    assert abs(torch.corrcoef(both)[0, 1].item()) < 5 / known.numel() ** 0.5


def test_bits_depend_on_nothing_but_key_row_and_column() -> None:
    rows = torch.tensor([7, 2**40 + 1, 0, 7])
    found = bits(9, rows, 5)
    assert torch.equal(found[0], found[3])
    assert torch.equal(found[:, :3], bits(9, rows, 3))
    assert torch.equal(found[1:2], bits(9, rows[1:2], 5))
    assert found.unique().numel() == 15


# --- rounding


def neighbours(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The numbers of `dtype` below and above, by looking through all of them."""
    if dtype == torch.int8:
        numbers = torch.arange(-127.0, 128.0)
    else:
        width = torch.finfo(dtype).bits
        integer = {8: torch.uint8, 16: torch.int16}[width]
        patterns = torch.arange(2**width).to(integer)
        numbers = patterns.view(dtype).float()
        numbers = numbers[numbers.isfinite()].unique()
    above = torch.searchsorted(numbers, values)
    return numbers[(above - 1).clamp(min=0)], numbers[above]


@pytest.mark.parametrize("name", NARROW)
def test_rounding_chooses_a_neighbour_without_bias(name: str) -> None:
    dtype = FORMATS[name]
    # Normal and subnormal numbers of the small types, of both signs.
    powers = torch.linspace(-3, 6, 40) if dtype == torch.int8 else torch.linspace(-11, 8, 40)
    values = torch.cat([2.0**powers, -(2.0**powers), 1e-6 * 2.0 ** powers[:10]])
    tries = 20_000
    drawn = random_bits(key(1), torch.arange(tries), values.numel())
    found = round_stochastically(values.expand(tries, -1).contiguous(), drawn, dtype).float()
    below, above = neighbours(values, dtype)
    assert ((found == below) | (found == above)).all()
    assert (found == below).any()
    chance = (values - below).double() / (above - below)
    spread = (above - below).double() * (chance * (1 - chance) / tries).sqrt()
    error = (found.double().mean(0) - values.double()).abs()
    rare = 3 * (above - below) / tries  # chances so small that a count of 2 is no wonder
    assert (error <= 5 * spread + rare).all()


@pytest.mark.parametrize("name", FORMATS)
def test_what_the_type_can_hold_stays(name: str) -> None:
    dtype = FORMATS[name]
    values = torch.tensor([0.0, -1.0, 3.0, 120.0, -96.0]).expand(500, 5).contiguous()
    drawn = random_bits(key(2), torch.arange(500), 5)
    assert torch.equal(round_stochastically(values, drawn, dtype).float(), values)


# --- formats


@pytest.mark.parametrize("name", NARROW)
def test_stored_rows_are_unbiased(name: str) -> None:
    """Also at 8 bits, where the scale follows the row."""
    dtype, tries = FORMATS[name], 20_000
    row = torch.randn(24, generator=torch.Generator().manual_seed(1))
    drawn = random_bits(key(1), torch.arange(tries), 24)
    found = decode(encode(row.expand(tries, -1).contiguous(), dtype, drawn)).double()
    error = (found.mean(0) - row.double()).abs()
    assert (error <= 5 * found.std(0) / tries**0.5 + 1e-7 * row.abs().max()).all()
    assert found.std(0).max() > 0


@pytest.mark.parametrize("name", NARROW)
def test_rounding_to_nearest_is_within_half_a_step(name: str) -> None:
    dtype = FORMATS[name]
    values = torch.randn(100, 33, generator=torch.Generator().manual_seed(1))
    found = decode(encode(values, dtype))
    if dtype == torch.int8:
        step = (values.abs().amax(1, keepdim=True) / 127).expand_as(values)
    else:
        step = values.abs() * {"bf16": 2**-7, "fp16": 2**-10, "fp8": 2**-3}[name]
        step = step + values.abs().amax(1, keepdim=True) / 448 * 2**-9 * (name == "fp8")
    assert ((found - values).abs() <= step * 0.5001).all()


@pytest.mark.parametrize("dtype", LARGEST_CODE)
@pytest.mark.parametrize("stochastic", [True, False])
def test_the_largest_weight_is_kept_and_rows_without_one_are_zero(
    dtype: torch.dtype, stochastic: bool
) -> None:
    values = torch.randn(2000, 8, generator=torch.Generator().manual_seed(3))
    values *= torch.logspace(-20, 20, 2000)[:, None]
    values[5], values[6] = 0, 1e-35
    drawn = random_bits(key(1), torch.arange(2000), 8) if stochastic else None
    rows = encode(values, dtype, drawn)
    found = decode(rows)
    assert found.isfinite().all()
    assert not found[5:7].any()
    place = values.abs().argmax(1, keepdim=True)
    largest, kept = values.gather(1, place), found.gather(1, place)
    large = largest.abs() > 1e-30
    torch.testing.assert_close(kept[large], largest[large], rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", NARROW)
def test_small_updates_need_stochastic_rounding(name: str) -> None:
    """A hundredth of a step, a hundred times: nearest loses every one of them."""
    num_rows, dim, updates = 200, 16, 100
    start = torch.ones(num_rows, dim)
    step = {"bf16": 2**-7, "fp16": 2**-10, "int8": 1 / 127, "fp8": 2**-3}[name] / updates
    ids = torch.arange(num_rows)
    moved = {}
    for stochastic in (True, False):
        rows = new_rows(num_rows, dim, FORMATS[name], "cpu")
        write_rows(rows, ids, start)
        for update in range(updates):
            values = read_rows(rows, ids)
            values[:, 1:] -= step  # the first weight holds an 8-bit row's scale in place
            drawn = random_bits(key(update), ids, dim) if stochastic else None
            write_rows(rows, ids, values, drawn)
        moved[stochastic] = (start - read_rows(rows, ids))[:, 1:].mean().item()
    assert moved[True] == pytest.approx(updates * step, rel=0.1)
    assert moved[False] == pytest.approx(0, abs=updates * step * 0.01)
