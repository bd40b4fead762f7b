"""The public functions: canonical operands in, one primitive out."""

from jax_grouped_gemm import arguments, autodiff, batching, calls, contract, ffi_call, wgrad_call

RULES = autodiff, batching  # they register what JAX does with the primitives


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
    use_dynamic_sched=None,
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
    zero in both, whatever `a` and `prob` hold there. Groups may be empty and need no alignment. Works under `jax.jit` and
    eagerly; the implementation is chosen per platform when the traced program is lowered. What is no array is static: jit a
    function of yours that passes it, or `functools.partial(grouped_gemm, b_major="n")`.

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
      use_dynamic_sched: the kernels take tiles from a counter as they get free (True), or every CTA has its share beforehand
        (False); by default the package chooses. Results are the same, bit for bit.
      mma_tiler_mn: rows and columns of D, e.g. (256, 256), that a CTA computes, or a pair of CTAs along M where the
        cluster has one; by default the package chooses among the compiled tiles.
      cluster_shape_mn: CTAs of a cluster along M and N, e.g. (2, 1); by default the package chooses. (1, 2) and (1, 4) with
        mma_tiler_mn (64, 128), on SM90: that many share the contraction of one tile.
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
        program cannot be exported, lowered for another platform, partitioned by XLA over several devices, or
        differentiated through a `jax.checkpoint` around the call. Unset, or 0, it costs nothing.
      RuntimeError: this machine cannot run the implementation asked for; the message says why.
      NotImplementedError: a jax.shard_map over some axes of the mesh only; an export of a program that XLA partitions.

    Differentiable, in both modes and to any order, with respect to `a`, `b`, `alpha`, `prob` and `bias`; weights behind
    `b_ptrs` are constants. Gradients are made by the same kernels, and only those that are asked for, from operands
    alone: of `a` by one product, which those of `alpha` and (without bias) `prob` share, and of `b` by
    `grouped_gemm_wgrad`. The cotangents of D and C are rounded to bfloat16 for them, combined first if both are used. So are
    `prob` times an operand, for the gradient of `b`, and the shared product, unless that of `a` is not asked for. The
    gradients of a tuple's arrays are slices of one array, which are copied out of it.
    Where rows are zero, whatever their operands hold, so are the gradients. Kernels of the backward pass have the
    `implementation`, `use_dynamic_sched` and `overlap_margin` of this call, and tiles that the package chooses.

    Under `jax.vmap` a batch is one call with more groups, which share weights that are not batched; an `a` that is not is
    repeated. Where the arrays of a tuple are batched, or the extents of the whole pass the limits, it is a loop, for which
    XLA gathers what is sharded over the batch.

    On several devices: inside `jax.shard_map` on each device's part, with varying axes checked or not. On a mesh with
    explicit axes D has the sharding of `a`'s rows and of the weights' N; what would need a sum over devices is a type
    error, as in `jax.lax.dot_general`. Where XLA partitions the program, sharded weights are never gathered: each device
    computes with those it has, of rows that are gathered if need be, and sums over K or over experts are made in
    float32. A device's part of N or K must be a multiple of 8, else compilation fails with a ValueError's text.

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
    weights, b = arguments.weights(b, b_ptrs)
    groups = arguments.Groups(offsets, group_sizes)
    optional = arguments.optional
    operands = calls.Operands(
        arguments.array("a", a),
        groups.operand,
        None,
        optional("alpha", alpha),
        optional("prob", prob),
        optional("bias", bias),
        b,
    )
    options = contract.Options(
        groups=groups.name,
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
    ffi_call.check_tile(call)
    outputs = ffi_call.grouped_gemm(call, operands._replace(offsets=groups.ends(call.m)))
    return tuple(outputs) if generate_c else outputs[0]


def grouped_gemm_wgrad(
    x,
    y,
    *,
    offsets=None,
    group_sizes=None,
    alpha=None,
    d_dtype=None,
    accumulate_into=None,
    d_major="k",
    use_dynamic_sched=None,
    mma_tiler_mn=None,
    cluster_shape_mn=None,
    overlap_margin=0,
    implementation=None,
):
    """Multiplies two operands over each group's rows: the gradient of the weights of a grouped GEMM.

    For the rows of group g, from offsets[g - 1] (0 for the first) up to offsets[g]::

        D[g] = alpha[g] * x[rows].T @ y[rows]      (+ accumulate_into[g])

    in FP32, rounded once to D's dtype. A group without rows makes zeros, or leaves what is there; rows at or past the
    last offset are not read. `jax.grad` of `grouped_gemm` makes such calls by itself; this one is for gradients
    that are kept in FP32 and added up over several calls.

    Args:
      x: (M, N) bfloat16, rows sorted by expert, e.g. the cotangent of `grouped_gemm`'s D.
      y: (M, K) bfloat16, e.g. its `a`.
      offsets: (L,) int32, the exclusive end row of each group. Or give `group_sizes`.
      group_sizes: (L,) int32, rows of each group.
      alpha: (L,) float32, a factor per group; absent, it costs nothing.
      d_dtype: bfloat16 or float32; by default that of `x`, and float32 with `accumulate_into`.
      accumulate_into: float32 of D's shape, which the result is added to. The kernels add in place where the array is
        donated to the jit around the call, or made inside of it; XLA copies it first otherwise.
      d_major: "k" for D (L, N, K), the layout of weights of `b_major="k"`; "n" for (L, K, N).
      use_dynamic_sched, overlap_margin, implementation: as for `grouped_gemm`.
      mma_tiler_mn, cluster_shape_mn: as for `grouped_gemm`, of the rows and columns of each matrix of D.

    K and N must be multiples of 8; M, N, K and L must each be less than 2^31 - 2^10, their products need not.

    Returns:
      D, (L, N, K), or (L, K, N) with `d_major="n"`, of `d_dtype`.

    Raises:
      ValueError: an operand's shape, dtype or alignment, an option, a tile that is not compiled, or (outside of tracing)
        the values of `offsets` or `group_sizes`; in a traced program they are clamped as for `grouped_gemm`.
      jax.errors.JaxRuntimeError, RuntimeError, NotImplementedError: as for `grouped_gemm`.

    On several devices as `grouped_gemm`; N of D is sharded as `x`'s columns, K as `y`'s, and where XLA partitions the
    program, D as it is wanted: rows are gathered, or sums over them made, for the matrices that a device has.

    Differentiable to any order with respect to `x`, `y`, `alpha` and `accumulate_into`, and by `jax.vmap`, where a batch is
    one call with more groups.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_grouped_gemm import grouped_gemm_wgrad
      >>> x, y = jnp.ones((6, 8), jnp.bfloat16), jnp.ones((6, 16), jnp.bfloat16)
      >>> d = jax.jit(grouped_gemm_wgrad)(x, y, offsets=jnp.array([2, 2, 5], jnp.int32))
      >>> print(d.shape, d[:, 0, 0])
      (3, 8, 16) [2 0 3]
    """
    groups = arguments.Groups(offsets, group_sizes)
    operands = calls.WgradOperands(
        arguments.array("x", x),
        arguments.array("y", y),
        groups.operand,
        None,
        arguments.optional("alpha", alpha),
        arguments.optional("accumulate_into", accumulate_into),
    )
    options = contract.WgradOptions(
        groups=groups.name,
        d_dtype=d_dtype,
        d_major=d_major,
        use_dynamic_sched=use_dynamic_sched,
        mma_tiler_mn=mma_tiler_mn,
        cluster_shape_mn=cluster_shape_mn,
        overlap_margin=overlap_margin,
        implementation=implementation,
    )
    call = contract.check_wgrad_call(options, operands)
    ffi_call.check_tile(call)
    operands = operands._replace(offsets=groups.ends(call.m, "x"))
    if d_major == "n":
        operands = operands._replace(x=operands.y, y=operands.x)
    return wgrad_call.grouped_wgrad(call, operands)
