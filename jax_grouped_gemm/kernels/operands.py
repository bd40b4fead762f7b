"""Tensors over the caller's buffers, as the host side of a kernel sees them.

The library encodes the same tensor maps in C++ (`ffi/tensor_map.cc`); a test runs the host code generated from this file and compares both, byte for byte.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64

# "16bit": BFloat16 stands for it where only the size counts; the call says which one to convert to.
DTYPES = {"bfloat16": BFloat16, "float16": Float16, "float32": Float32, "16bit": BFloat16}
# What TYPE_BIAS, TYPE_C and TYPE_D hold: `enum Element` of ffi/kernel_table.h.
TYPE_BFLOAT16, TYPE_FLOAT16, TYPE_FLOAT32 = 1, 2, 3


@dataclass(frozen=True)
class Problem:
    """A kernel's parameters after the tensors, in this order: `forward_fields` and `wgrad_fields` name the same. None: not in this variant."""

    maps: cute.Pointer | None
    offsets: cute.Pointer
    experts: cute.Pointer
    counter: cute.Pointer
    alpha: cute.Pointer | None
    prob: cute.Pointer | None
    bias: cute.Pointer | None
    bias_type: Int32 | None
    d_type: Int32 | None
    c_type: Int32 | None
    m: Int32
    n: Int32
    k: Int32
    l: Int32
    groups: Int32


def extents(m, n, k):
    """K and N as multiples of 8: rows of 16 bytes for the copy engine."""
    return m, cute.assume(n, divby=8), cute.assume(k, divby=8)


def rows_of_a(pointer, m, k):
    """A (M, K), row-major."""
    return cute.make_tensor(pointer, cute.make_layout((m, k), stride=(Int64(k), 1)))


def ragged_rows_of_a(pointer, m, k):
    """A as (2^30, K, M + 1, 2^30 + 1), for loads that end at any row: see `ragged_loads`."""
    ragged = ragged_loads(pointer, m, k)
    return cute.make_tensor(ragged.iterator, cute.select(ragged.layout, mode=[1, 0, 2, 3]))


def experts_of_b(pointer, n, k, l, b_major):
    """B (N, K, L): the bytes of (L, N, K) for b_major "k", of (L, K, N) for "n"."""
    if cutlass.const_expr(b_major == "k"):
        stride = (Int64(k), 1, Int64(n) * k)
    else:
        stride = (1, Int64(n), Int64(n) * k)
    return cute.make_tensor(pointer, cute.make_layout((n, k, l), stride=stride))


def ragged_rows(pointer, m, n, box_rows):
    """D or C as (box_rows, N, M + box_rows): the row of element (x, c, y) is x + y - box_rows.

    Rows are spelled twice, so that a store of box_rows rows can be cut at a row of its choice: see `ragged_row`.
    """
    base = cute.make_tensor(pointer, cute.make_layout((m, n), stride=(Int64(n), 1)))
    shifted = cute.domain_offset((-box_rows, 0), base)
    layout = cute.make_layout((box_rows, n, m + box_rows), stride=(Int64(n), 1, Int64(n)))
    return cute.make_tensor(shifted.iterator, layout)


@cute.jit
def ragged_row(row: Int32, row_end: Int32, box_rows: cutlass.Constexpr[int]):
    """(x, y) that store box_rows rows from `row` on, but none at or past row_end: see `ragged_rows`."""
    x = cutlass.min(cutlass.max(box_rows - (row_end - row), 0), box_rows)
    return x, row + box_rows - x


WRAP = 2**30  # times a stride of 2^34 bytes: once around the addresses


def ragged_loads(pointer, m, n):
    """X (M, N), bfloat16, as (N, 2^30, M + 1, 2^30 + 1): element (c, x, y, 2^30) is in row x + y - 2^30.

    Rows are spelled twice, as in `ragged_rows`, but the tensor starts at its first element, which loads want to be a mapped address: what `ragged_rows`
    takes off the address, the last dimension does modulo 2^64.
    """
    around = 2**33 - Int64(n)  # elements of 2 bytes
    layout = cute.make_layout((n, WRAP, m + 1, WRAP + 1), stride=(1, Int64(n), Int64(n), around))
    return cute.make_tensor(pointer, layout)


def ragged_load(row, row_end, box_rows):
    """(x, y, z) that load box_rows rows from `row` on, with zeros for those at or past row_end."""
    rows = cutlass.min(row_end - row, box_rows)
    return WRAP - rows, row + rows, WRAP


def results(pointer, n, k, l):
    """Weight gradients (N, K, L): the bytes of (L, N, K)."""
    return cute.make_tensor(pointer, cute.make_layout((n, k, l), stride=(Int64(k), 1, Int64(n) * k)))


def wgrad_fields():
    """As `forward_fields`."""
    return [
        ["MAP_A"],
        ["DIM_N", "DIM_LOAD_ROWS"],
        ["MAP_B"],
        ["DIM_K", "DIM_LOAD_ROWS"],
        ["MAP_D"],
        ["DIM_N", "DIM_K", "DIM_L"],
        *[[f"PTR_{name}"] for name in ("OFFSETS", "EXPERTS", "COUNTER", "ALPHA")],
        *[[f"DIM_{name}"] for name in ("M", "N", "K", "L", "GROUPS")],
    ]


def forward_fields(variant, cuts_loads):
    """Fields of every parameter of a forward kernel, in order: tensor maps with the dynamic extents of their tensors, pointers, extents."""
    dense, plain = variant.weights == "dense", variant.epilogue == "plain"
    return [
        ["MAP_A"],
        ["DIM_K", "DIM_LOAD_ROWS"] if cuts_loads else ["DIM_M", "DIM_K"],
        ["MAP_B"],
        ["DIM_N", "DIM_K", "DIM_L" if dense else "DIM_ONE"],
        ["MAP_D"],
        ["DIM_N", "DIM_D_ROWS"],
        *([["MAP_C"], ["DIM_N", "DIM_D_ROWS"]] if variant.c_dtype else []),
        *([] if dense else [["PTR_MAPS"]]),
        ["PTR_OFFSETS"],
        ["PTR_EXPERTS"],
        ["PTR_COUNTER"],
        *([] if plain else [["PTR_ALPHA"], ["PTR_PROB"]]),
        *([["PTR_BIAS"], ["TYPE_BIAS"]] if variant.has_bias else []),
        *([["TYPE_D"]] if variant.d_dtype == "16bit" else []),
        *([["TYPE_C"]] if variant.c_dtype == "16bit" else []),
        ["DIM_M"],
        ["DIM_N"],
        ["DIM_K"],
        ["DIM_L"],
        ["DIM_GROUPS"],
    ]
