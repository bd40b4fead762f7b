"""The native calls on the document's shapes, as one program each."""

import functools

import jax

from jax_grouped_gemm import debug
from jax_grouped_gemm.api import grouped_gemm, grouped_gemm_wgrad


def forward(operands, *, call):
    """D (M, N, 1), and C or None. operands: `strided.StridedOperands` of arrays, a_tensor (M, K, 1), prob (M, 1, 1).

    b_tensor, if there, is the native array (L, N, K) or (L, K, N), and bias_tensor (L, N).
    """
    return _forward(operands, call=call, checked=debug.enabled())


@functools.partial(jax.jit, static_argnames=("call", "checked"))
def _forward(operands, *, call, checked):
    """checked: JAX keeps the trace of a jitted function, within other programs too: one without the switch, one with it."""
    del checked  # grouped_gemm looks at the switch itself
    m, n, k = call.m, call.n, call.k
    results = grouped_gemm(
        operands.a_tensor.reshape(m, k),
        operands.b_tensor,
        b_ptrs=operands.b_ptrs,
        n=None if operands.b_ptrs is None else n,
        b_major=call.b_major,
        offsets=operands.padded_offsets,
        alpha=operands.alpha_tensor,
        prob=operands.prob_tensor.reshape(m),
        bias=operands.bias_tensor,
        d_dtype=call.d_dtype,
        generate_c=call.c_dtype is not None,
        c_dtype=call.c_dtype,
        use_dynamic_sched=call.dynamic,
        mma_tiler_mn=call.mma_tiler_mn,
        cluster_shape_mn=call.cluster_shape_mn,
        overlap_margin=call.overlap_margin,
    )
    d, c = results if call.c_dtype is not None else (results, None)
    return d.reshape(m, n, 1), None if c is None else c.reshape(m, n, 1)


def wgrad(x, y, offsets, total=None, *, call):
    """D (L, N, K), for x (M, N) and y (M, K) as of `grouped_gemm_wgrad`."""
    return _wgrad(x, y, offsets, total, call=call, checked=debug.enabled())


@functools.partial(jax.jit, static_argnames=("call", "checked"))
def _wgrad(x, y, offsets, total, *, call, checked):
    del checked  # as above
    return grouped_gemm_wgrad(
        x,
        y,
        offsets=offsets,
        d_dtype=call.d_dtype,
        accumulate_into=total,
        use_dynamic_sched=call.dynamic,
        mma_tiler_mn=call.mma_tiler_mn,
        cluster_shape_mn=call.cluster_shape_mn,
        overlap_margin=call.overlap_margin,
    )
