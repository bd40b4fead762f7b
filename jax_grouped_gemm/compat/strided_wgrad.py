"""What `strided` is to the forward product, for cuDNN's names of weight gradients."""

import contextlib
from typing import Any, NamedTuple

from jax_grouped_gemm import contract
from jax_grouped_gemm.compat import strided


class Tensors(NamedTuple):
    """The tensors of a weight gradient by cuDNN's names, or their layouts; None where absent."""

    a_tensor: Any
    b_tensor: Any
    offsets_tensor: Any
    wgrad_tensor: Any = None


class Options(NamedTuple):
    """The arguments that are not tensors, otherwise unchecked. overlap_margin counts SMs."""

    acc_dtype: Any
    wgrad_dtype: Any
    mma_tiler_mn: Any
    cluster_shape_mn: Any
    accumulate_on_output: Any
    input_order: Any
    overlap_margin: Any


# Of weight gradients, by the dimension that is contiguous; T is the tokens, which are contracted.
STRIDED = {
    "offsets_tensor": strided.Strided(("L",), ("1",), ("int32",), "pass one end per expert, contiguous"),
    "wgrad_tensor": strided.Strided(
        ("L", "M", "N"), ("M*N", "N", "1"), ("bfloat16", "float32"), "leave it out, or pass a contiguous tensor"
    ),
}
A = {
    "m": strided.Strided(
        ("M", "T"), ("1", "M"), ("bfloat16",), "transpose a contiguous (T, M), or pass a contiguous (M, T)"
    ),
    "k": strided.Strided(("M", "T"), ("T", "1"), ("bfloat16",), ""),
}
B = {
    "n": strided.Strided(
        ("T", "N"), ("N", "1"), ("bfloat16",), "pass a contiguous (T, N), or transpose a contiguous (N, T)"
    ),
    "k": strided.Strided(("T", "N"), ("1", "T"), ("bfloat16",), ""),
}


def check_only_bfloat16(**of_scales):
    """Arguments that only block-scaled operands have."""
    for name, value in of_scales.items():
        if value is not None:
            raise ValueError(f"{name} must be left out with bfloat16 operands; got one; no block scaling is computed")


def check_dense(output_mode, wgrad_ptrs):
    if wgrad_ptrs is not None or output_mode != "dense":
        found = repr(output_mode) + (" with wgrad_ptrs" if wgrad_ptrs is not None else "")
        raise ValueError(
            f"output_mode must be 'dense', without wgrad_ptrs; got {found}; expert g's matrix is wgrad_tensor[g]"
        )


def check_arguments(options, operands):
    """Which tensors are there, and the values of arguments that are not tensors, dtypes by name."""
    for name in ("b_tensor", "offsets_tensor"):
        if getattr(operands, name) is None:
            raise ValueError(f"{name} must be given; got None; pass all of a_tensor, b_tensor and offsets_tensor")
    strided.check_only("acc_dtype", options.acc_dtype, "float32")
    strided.check_only("input_order", options.input_order, "tensor2d")
    contract.check_one_of("wgrad_dtype", options.wgrad_dtype, STRIDED["wgrad_tensor"].dtypes)
    contract.check_flag("accumulate_on_output", options.accumulate_on_output)
    given = operands.wgrad_tensor
    if options.accumulate_on_output and given is not None and given.dtype != "float32":
        raise ValueError(
            f"wgrad_tensor must be float32 with accumulate_on_output; got {given.dtype}; sums of more calls than one are "
            "kept in float32"
        )


def check_layouts(entry, operands):
    """As `strided.check_layouts`; returns (the sizes by symbol, A's contiguous dimension, B's)."""
    strided.check_devices(operands)
    a, b = operands.a_tensor, operands.b_tensor
    a_major = _major("a_tensor", a, {}, A)
    extents = {"M": a.shape[0], "T": a.shape[1]}
    b_major = _major("b_tensor", b, extents, B)
    extents["N"] = b.shape[1]
    strided.check_strided("offsets_tensor", operands.offsets_tensor, extents, STRIDED["offsets_tensor"])
    extents["L"] = operands.offsets_tensor.shape[0]
    for symbol in "MNL":
        if extents[symbol] == 0:
            raise ValueError(f"{symbol} must be positive; got 0; only T, the tokens, may be 0")
    contract.check_alignment("M", "a_tensor.shape[0]", extents["M"])
    contract.check_alignment("N", "b_tensor.shape[1]", extents["N"])
    if operands.wgrad_tensor is not None:
        strided.check_strided("wgrad_tensor", operands.wgrad_tensor, extents, STRIDED["wgrad_tensor"])
    if entry.sm100 and extents["T"] % strided.SM100_M_ALIGNED:
        raise ValueError(
            f"T (a_tensor.shape[1]) must be a multiple of {strided.SM100_M_ALIGNED}; got {extents['T']}; "
            f"pad the tokens, or call {entry.instead}, which takes any"
        )
    return extents, a_major, b_major


def _major(name, layout, extents, by_major):
    """The first is the one that is not copied, and that errors tell of."""
    if layout.strides is None:  # of JAX: the last dimension
        major = {"a_tensor": "k", "b_tensor": "n"}[name]
        strided.check_strided(name, layout, extents, by_major[major])
        return major
    first, other = by_major
    if len(layout.shape) == 2 and strided.wrong_strides(layout, extents, by_major[first]) is not None:
        with contextlib.suppress(ValueError):
            strided.check_strided(name, layout, extents, by_major[other])
            return other
    strided.check_strided(name, layout, extents, by_major[first])
    return first


def check_functional(**of_outputs):
    """With JAX arrays, which nothing is written to in place."""
    for name, value in of_outputs.items():
        if value is not None and value is not False:
            raise ValueError(
                f"{name} must be left out with JAX arrays, which nothing is written to in place; got one; call "
                "jax_grouped_gemm.grouped_gemm_wgrad(..., accumulate_into=) in a jit that the sum is donated to"
            )


def check_token_offsets(offsets, tokens, aligned):
    """Concrete ends: non-decreasing, within [0, T], multiples of `aligned`."""
    for g, end, previous in contract.bad_ends(offsets, tokens, aligned):
        multiples = f" and multiples of {aligned}" if aligned > 1 else ""
        raise ValueError(
            f"offsets_tensor must be non-decreasing ends within [0, T = {tokens}]{multiples}; "
            f"got offsets_tensor[{g}] = {end} after {previous}; {'pad' if multiples else 'sort'} each expert's tokens"
        )
