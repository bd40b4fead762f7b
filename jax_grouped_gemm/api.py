"""The public entry: canonical operands in, one primitive out."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_grouped_gemm import contract, debug, ffi_call, reference


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
    bias=None,
    d_dtype=None,
    generate_c=False,
    c_dtype=None,
    use_dynamic_sched=False,
    mma_tiler_mn=None,
    cluster_shape_mn=None,
    overlap_margin=0,
    implementation=None,
):
    """Multiplies each group of rows of `a` by its own expert's weights.

    For the rows of group g, from offsets[g - 1] (0 for the first) up to offsets[g]::

        without bias:  C = alpha[g] * a @ b[g].T                                 D = prob[:, None] * C
        with bias:     C = alpha[g] * a @ b[g].T + prob[:, None] * bias[g]      D = C

    in FP32, from which D and C are each rounded once, to their own dtypes. Rows at or past the last offset are exactly
    zero in both, whatever `a` and `prob` hold there. Groups may be empty and need no alignment. Works under `jax.jit` and eagerly; the
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
      prob: (M,) float32, a factor per row; absent, it costs nothing. With a bias it multiplies the bias alone, as the
        formula says: for prob * (a @ b[g].T + bias) leave it out, and multiply the result.
      bias: (L, N) bfloat16, float16 or float32, a row per expert; absent, it costs nothing.
      d_dtype: bfloat16, float16 or float32; by default that of `a`.
      generate_c: return C too; otherwise it is not written.
      c_dtype: bfloat16, float16 or float32, with `generate_c` only; by default that of `a`.
      use_dynamic_sched: the kernels take tiles from a counter as they get free, instead of every CTA having its share
        beforehand. Results are the same, bit for bit.
      mma_tiler_mn: rows and columns of D, e.g. (256, 256), that a CTA computes, or a pair of CTAs along M where the
        cluster has one; by default the package chooses among the compiled tiles.
      cluster_shape_mn: CTAs of a cluster along M and N, e.g. (2, 1); by default the package chooses.
      overlap_margin: SMs that the kernels leave free, e.g. for communication at the same time.
      implementation: "cutedsl" for the CUDA kernels, "reference" for plain JAX, None for the kernels on GPUs of
        compute capability 9.0, 10.0 and 10.3 and the reference elsewhere, to which the four options before this one
        make no difference.

    K and N must be multiples of 8; M, N, K and L must each be less than 2^31 - 2^10, their products need not.

    Returns:
      D, (M, N) of `d_dtype`; with `generate_c`, the tuple (D, C), C being (M, N) of `c_dtype`. Where M, N or L is 0,
      zeros, and where K is 0 and there is no bias; with one, K = 0 leaves prob * bias in the rows of groups,
      whatever `alpha` is.

    Raises:
      ValueError: an operand's shape, dtype or alignment, an option, a tile that is not compiled (for this process's
        GPUs, or at all if it has none), or (outside of tracing) the values of `offsets` or `group_sizes`. In a traced
        program values cannot be seen: there each end is clamped to [previous end, M], a negative size counts as 0, and
        sizes stop at M.
      jax.errors.JaxRuntimeError: with the environment variable JAX_GROUPED_GEMM_DEBUG=1 when a call is traced, its
        values are checked on the device each time it runs, and a bad entry fails the program, as late as the result is
        waited for, with the text of the ValueError. For finding mistakes: the check waits for the values, and the
        program cannot be exported or lowered for another platform. Unset, or 0, it costs nothing.
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
    a = _array("a", a)
    by_size = offsets is None
    groups = _groups(group_sizes if by_size else offsets)
    operands = contract.Operands(
        a, _int32(groups), None, _optional("alpha", alpha), _optional("prob", prob), _optional("bias", bias), b
    )
    options = contract.Options(
        groups="group_sizes" if by_size else "offsets",
        n=n,
        b_major=b_major,
        d_dtype=d_dtype,
        generate_c=generate_c,
        c_dtype=c_dtype,
        use_dynamic_sched=use_dynamic_sched,
        mma_tiler_mn=mma_tiler_mn,
        cluster_shape_mn=cluster_shape_mn,
        overlap_margin=overlap_margin,
        implementation=implementation,
    )
    call = contract.check_call(options, weights, operands)
    if (call.mma_tiler_mn, call.cluster_shape_mn) != (None, None):  # else the process's GPUs are nobody's business yet
        contract.check_tile(call, ffi_call.architectures())
    ends = operands.offsets
    check = contract.check_group_sizes if by_size else contract.check_offsets
    if not isinstance(groups, jax.core.Tracer):
        check(np.asarray(groups), call.m)
    elif debug.enabled():
        ends = debug.checked(check, ends, call.m)
    if call.empty:
        outputs = [jnp.zeros((call.m, call.n), dtype) for dtype in call.output_dtypes]
    else:
        ends = reference.ends_of(ends, m=call.m) if by_size else ends
        present = [x for x in operands[2:6] if x is not None]
        outputs = ffi_call.grouped_gemm(call, a, ends, *present, *b)
    return tuple(outputs) if generate_c else outputs[0]


def _weights(b, b_ptrs):
    """The weight mode and its operands."""
    if b_ptrs is not None:
        return "pointers", (_pointers(b_ptrs),)
    if isinstance(b, (tuple, list)):
        return "tuple", tuple(_array(f"b[{i}]", w) for i, w in enumerate(b))
    return "dense", (_array("b", b),)


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


def _optional(name, x):
    return None if x is None else _array(name, x)


def _array(name, x):
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError):
        raise contract.not_an_array(name, x) from None
