"""The public entry: canonical operands in, one primitive out."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_grouped_gemm import contract, ffi_call, reference


def grouped_gemm(
    a,
    b=None,
    *,
    offsets=None,
    group_sizes=None,
    b_ptrs=None,
    n=None,
    b_major="k",
    alpha=None,
    prob=None,
    d_dtype=None,
    implementation=None,
):
    """Multiplies each group of rows of `a` by its own expert's weights.

    For the rows of group g, from offsets[g - 1] (0 for the first) up to offsets[g]::

        D = prob[:, None] * (alpha[g] * a @ b[g].T)

    with FP32 accumulation and one rounding, to `d_dtype`. Rows at or past the last offset are exactly zero, whatever
    `a` and `prob` hold there. Groups may be empty and need no alignment. Works under `jax.jit` and eagerly; the
    implementation is chosen per platform when the traced program is lowered.

    Args:
      a: (M, K) bfloat16, rows sorted by expert.
      b: the weights, bfloat16: one array (L, N, K), or (L, K, N) with `b_major="n"`; or a tuple or list of L arrays
        (N, K), or (K, N) with `b_major="n"`, which the kernels read where they lie.
      offsets: (L,) int32, the exclusive end row of each group. Or give `group_sizes`.
      group_sizes: (L,) int32, rows of each group.
      b_ptrs: instead of `b`, the addresses of L weight matrices laid out as the arrays of a tuple: (L,) int64, or the
        same bytes as (8 L,) uint8 where `jax_enable_x64` is off; outside of jit, NumPy's 64-bit integers are converted.
        Addresses are in the memory of the device that runs the call, aligned to 16 bytes; those of experts without
        rows are not read. The caller keeps the matrices alive until the result is ready; XLA does not know of them.
        The reference reads them on a CPU only, through the package's library.
      n: N, the output columns; needed with `b_ptrs`.
      b_major: the contiguous dimension of the weights, "k" or "n".
      alpha: (L,) float32, a factor per expert; absent, it costs nothing.
      prob: (M,) float32, a factor per row; absent, it costs nothing.
      d_dtype: bfloat16, float16 or float32; by default that of `a`.
      implementation: "cutedsl" for the CUDA kernels, "reference" for plain JAX, None for the kernels on GPUs of
        compute capability 9.0, 10.0 and 10.3 and the reference elsewhere.

    K and N must be multiples of 8; M, N, K and L must each be less than 2^31 - 2^10, their products need not.

    Returns:
      (M, N) of `d_dtype`. Where M, N, K or L is 0, zeros.

    Raises:
      ValueError: an operand's shape, dtype or alignment, or (outside of tracing) the values of `offsets` or
        `group_sizes`. In a traced program values cannot be seen: there each end is clamped to [previous end, M], a
        negative size counts as 0, and sizes stop at M.
      RuntimeError: this machine cannot run the implementation asked for; the message says why.
      NotImplementedError: differentiation, vmap, and operands on a mesh with explicit axes or in a shard_map that
        checks varying axes.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_grouped_gemm import grouped_gemm
      >>> a = jnp.ones((6, 16), jnp.bfloat16)
      >>> b = jnp.ones((3, 8, 16), jnp.bfloat16)
      >>> offsets = jnp.array([2, 2, 5], jnp.int32)  # rows 0-1, none, rows 2-4; row 5 belongs to no expert
      >>> print(jax.jit(grouped_gemm)(a, b, offsets=offsets)[:, 0])
      [16 16 16 16 16 0]
    """
    contract.exactly_one(b=b, b_ptrs=b_ptrs)
    contract.exactly_one(offsets=offsets, group_sizes=group_sizes)
    weights, b = _weights(b, b_ptrs)
    a = jnp.asarray(a)
    by_size = offsets is None
    groups = _groups(group_sizes if by_size else offsets)
    operands = contract.Operands(a, _int32(groups), _optional(alpha), _optional(prob), b)
    options = contract.Options("group_sizes" if by_size else "offsets", n, b_major, d_dtype, implementation)
    call = contract.check_call(options, weights, operands)
    if not isinstance(groups, jax.core.Tracer):
        check = contract.check_group_sizes if by_size else contract.check_offsets
        check(np.asarray(groups), call.m)
    if call.empty:
        return jnp.zeros((call.m, call.n), call.d_dtype)
    ends = reference.ends_of(operands.offsets, m=call.m) if by_size else operands.offsets
    present = [x for x in (operands.alpha, operands.prob) if x is not None]
    return ffi_call.grouped_gemm(call, a, ends, *present, *b)


def _weights(b, b_ptrs):
    """The weight mode and its operands."""
    if b_ptrs is not None:
        return "pointers", (_pointers(b_ptrs),)
    if isinstance(b, (tuple, list)):
        return "tuple", tuple(map(jnp.asarray, b))
    return "dense", (jnp.asarray(b),)


def _groups(groups):
    """Offsets or sizes: a JAX array (or lists of traced scalars), or the host's integers, whatever their width."""
    if isinstance(groups, jax.Array) or any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(groups)):
        return jnp.asarray(groups)
    groups = np.asarray(groups)
    return groups.astype(np.int32) if groups.size == 0 else groups


def _int32(groups):
    """The operand. Host integers that do not fit are clipped here and refused by the check of values."""
    if isinstance(groups, jax.Array) or groups.dtype == np.int32:
        return jnp.asarray(groups)
    if not all(isinstance(x, (int, np.integer)) for x in groups.flat):
        return groups  # its dtype is refused
    # As Python's integers: NumPy 2.0 cannot clip a dtype to bounds that it does not hold.
    return jnp.asarray(np.clip(groups.astype(object), -(2**31), 2**31 - 1).astype(np.int32))


def _pointers(b_ptrs):
    """Host addresses keep all 64 bits: without x64, JAX would truncate int64 to int32."""
    if not isinstance(b_ptrs, jax.Array):
        b_ptrs = np.asarray(b_ptrs)
        if b_ptrs.dtype == np.uint64 or b_ptrs.size == 0:
            b_ptrs = b_ptrs.astype(np.int64)
        if b_ptrs.dtype == np.int64 and not jax.config.read("jax_enable_x64"):
            b_ptrs = np.ascontiguousarray(b_ptrs).view(np.uint8)
    return jnp.asarray(b_ptrs)


def _optional(x):
    return None if x is None else jnp.asarray(x)
