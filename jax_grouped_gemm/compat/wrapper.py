"""The document's wrapper: one call, outputs allocated or given."""

from jax_grouped_gemm.compat import plan
from jax_grouped_gemm.compat.strided import Entry, StridedOperands, StridedOptions
from jax_grouped_gemm.compat.tuple_dict import TupleDict

SM100 = Entry("grouped_gemm_wrapper_sm100", sm100=True, instead="grouped_gemm_wrapper")
NEUTRAL = Entry("grouped_gemm_wrapper", sm100=False, instead="grouped_gemm")


def grouped_gemm_wrapper_sm100(
    a_tensor,
    padded_offsets,
    alpha_tensor,
    b_tensor=None,
    bias_tensor=None,
    b_ptrs=None,
    n=None,
    b_dtype=None,
    b_major="k",
    prob_tensor=None,
    acc_dtype="float32",
    c_dtype="bfloat16",
    d_dtype="bfloat16",
    c_tensor=None,
    d_tensor=None,
    cd_major="n",
    mma_tiler_mn=(256, 256),
    cluster_shape_mn=None,
    vector_f32=False,
    m_aligned=256,
    generate_c=False,
    use_dynamic_sched=False,
    current_stream=None,
):
    """`grouped_gemm_wrapper` as the document has it: on GPUs of compute capability 10.0 or newer only.

    M and every offset are multiples of 256, weights are K-major, and the tile is given. Everything else, errors
    included, is as there, and RuntimeError on other devices.
    """
    del vector_f32
    operands = StridedOperands(
        a_tensor, padded_offsets, alpha_tensor, b_tensor, b_ptrs, bias_tensor, prob_tensor, c_tensor, d_tensor
    )
    options = StridedOptions(
        n, b_dtype, b_major, acc_dtype, c_dtype, d_dtype, cd_major, mma_tiler_mn, cluster_shape_mn, m_aligned,
        generate_c, use_dynamic_sched, overlap_margin=None,
    )  # fmt: skip
    return _call(SM100, operands, options, current_stream)


def grouped_gemm_wrapper(
    a_tensor,
    padded_offsets,
    alpha_tensor,
    b_tensor=None,
    bias_tensor=None,
    b_ptrs=None,
    n=None,
    b_dtype=None,
    b_major="k",
    prob_tensor=None,
    acc_dtype="float32",
    c_dtype="bfloat16",
    d_dtype="bfloat16",
    c_tensor=None,
    d_tensor=None,
    cd_major="n",
    mma_tiler_mn=None,
    cluster_shape_mn=None,
    vector_f32=False,
    m_aligned=256,
    generate_c=False,
    use_dynamic_sched=False,
    current_stream=None,
    *,
    overlap_margin=None,
):
    """The grouped GEMM of torch tensors or JAX arrays, on any GPU with kernels and, in plain JAX, on a CPU.

    For the rows of expert g, which end before padded_offsets[g]::

        C = alpha[g] * A @ B_g.T + prob[:, None] * bias[g]      and D = C, with a bias
        C = alpha[g] * A @ B_g.T and D = prob[:, None] * C      without

    with FP32 accumulation, C and D each rounded once. Rows at or past the last end are zero.

    Args (torch strides in elements; the stride of a dimension of one element is free; JAX arrays are row-major):
      a_tensor: (M, K, 1), strides (K, 1, M*K), bfloat16.
      padded_offsets: (L,) int32, ends of the experts' rows, multiples of `m_aligned`.
      alpha_tensor: (L,) float32, a factor per expert.
      b_tensor: (N, K, L), strides (K, 1, N*K), or (1, N, N*K) with b_major="n", bfloat16. torch only.
      bias_tensor: (N, L), strides (1, N), bfloat16, float16 or float32, optional. torch only.
      b_ptrs: instead of `b_tensor`, the addresses of L matrices (N, K), or (K, N) with b_major="n": (L,) int64, from
        JAX also the same bytes as (8 L,) uint8. The matrices stay alive and unchanged until the stream is past the call.
      n, b_dtype: N and bfloat16; with `b_ptrs` both, with `b_tensor` neither.
      prob_tensor: (M, 1, 1) float32, a factor per row; it has to be given, though the document gives it a default.
      acc_dtype: float32.
      c_dtype, d_dtype: bfloat16, float16 or float32 each. Any dtype may be one of torch, NumPy, JAX or cutlass, or a name.
      c_tensor, d_tensor: outputs to write into, (M, N, 1), strides (N, 1, M*N), of those dtypes. C is written only
        with `generate_c`.
      cd_major: "n".
      mma_tiler_mn, cluster_shape_mn: a compiled tile; None leaves the choice to the package.
      vector_f32: has no effect: the kernels have one way to multiply in FP32.
      m_aligned: a positive integer that divides M and every offset; 1 allows any.
      generate_c: also return C.
      use_dynamic_sched: tiles are handed out by a counter on the device instead of a fixed order.
      current_stream: an integer handle, torch stream, CUstream, or object with __cuda_stream__. By default torch's
        current stream of the operands' device. JAX arrays go through XLA by default; with a stream, or outputs of the
        caller's, the call writes by address on that stream (the legacy default one if it is None), of which XLA does not
        know: `jax.block_until_ready` every operand before the call, keep them all alive, and synchronise the stream before
        reading a result. On a CPU there is no stream, and a call has finished when it returns.
      overlap_margin: SMs left free for other kernels. None: as the environment variable CUDNNFE_CLUSTER_OVERLAP_MARGIN
        says, in clusters.

    Returns:
      `TupleDict` of d_tensor and c_tensor, in this order; c_tensor is None unless `generate_c`. New torch tensors belong
      to the launch's stream.

    Raises:
      ValueError: what docs/errors.md lists, before anything is launched. Values of offsets and addresses are looked at
        once per tensor and change of it; not in a traced program, nor while the stream is captured into a graph.
      RuntimeError: this machine, or the library, cannot.
      NotImplementedError: a torch operand requires a gradient, and torch records it.
    """
    del vector_f32
    operands = StridedOperands(
        a_tensor, padded_offsets, alpha_tensor, b_tensor, b_ptrs, bias_tensor, prob_tensor, c_tensor, d_tensor
    )
    options = StridedOptions(
        n, b_dtype, b_major, acc_dtype, c_dtype, d_dtype, cd_major, mma_tiler_mn, cluster_shape_mn, m_aligned,
        generate_c, use_dynamic_sched, overlap_margin,
    )  # fmt: skip
    return _call(NEUTRAL, operands, options, current_stream)


def _call(entry, operands, options, stream):
    by_address = stream is not None or operands.d_tensor is not None or operands.c_tensor is not None
    request = plan.request(entry, operands, options)
    d, c = request.framework.run(plan.plan_for(request), operands, stream, by_address)
    return TupleDict(d_tensor=d, c_tensor=c)
