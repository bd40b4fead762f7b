"""cuDNN's names for weight gradients, as of its front-end 1.32, with bfloat16 operands."""

from jax_grouped_gemm.compat import plan, strided_wgrad
from jax_grouped_gemm.compat.strided import Entry
from jax_grouped_gemm.compat.tuple_dict import TupleDict

SM100 = Entry("grouped_gemm_wgrad_wrapper_sm100", sm100=True, instead="grouped_gemm_wgrad_wrapper")
NEUTRAL = Entry("grouped_gemm_wgrad_wrapper", sm100=False, instead="grouped_gemm_wgrad")
JAX_SM100 = Entry("grouped_gemm_wgrad_jax_sm100", sm100=True, instead="grouped_gemm_wgrad")


def grouped_gemm_wgrad_wrapper_sm100(
    a_tensor,
    b_tensor,
    sfa_tensor,
    sfb_tensor,
    offsets_tensor,
    output_mode="dense",
    wgrad_tensor=None,
    wgrad_ptrs=None,
    global_scale_a=None,
    global_scale_b=None,
    acc_dtype=None,
    wgrad_dtype=None,
    mma_tiler_mn=(256, 256),
    cluster_shape_mn=None,
    sf_vec_size=16,
    sf_fp8_dtype_override=None,
    accumulate_on_output=False,
    input_order="tensor2d",
    current_stream=None,
    *,
    descriptor_workspace=None,
):
    """`grouped_gemm_wgrad_wrapper` as cuDNN has it: on GPUs of compute capability 10.0 or newer only.

    The number of tokens and every offset are multiples of 256, and the tile is given. Everything else is as there, and
    RuntimeError on other devices.
    """
    operands = strided_wgrad.Tensors(a_tensor, b_tensor, offsets_tensor, wgrad_tensor)
    options = _options(acc_dtype, wgrad_dtype, mma_tiler_mn, cluster_shape_mn, accumulate_on_output, input_order)
    return _call(
        SM100, operands, options, current_stream, output_mode=output_mode, wgrad_ptrs=wgrad_ptrs,
        sfa_tensor=sfa_tensor, sfb_tensor=sfb_tensor, global_scale_a=global_scale_a, global_scale_b=global_scale_b,
        sf_vec_size=None if sf_vec_size == 16 else sf_vec_size, sf_fp8_dtype_override=sf_fp8_dtype_override,
        descriptor_workspace=descriptor_workspace,
    )  # fmt: skip


def grouped_gemm_wgrad_wrapper(
    a_tensor,
    b_tensor,
    sfa_tensor,
    sfb_tensor,
    offsets_tensor,
    output_mode="dense",
    wgrad_tensor=None,
    wgrad_ptrs=None,
    global_scale_a=None,
    global_scale_b=None,
    acc_dtype=None,
    wgrad_dtype=None,
    mma_tiler_mn=None,
    cluster_shape_mn=None,
    sf_vec_size=16,
    sf_fp8_dtype_override=None,
    accumulate_on_output=False,
    input_order="tensor2d",
    current_stream=None,
    *,
    descriptor_workspace=None,
    overlap_margin=None,
):
    """The weight gradient of a grouped GEMM of torch tensors or JAX arrays, on any GPU with kernels and, in plain JAX, on a CPU.

    For the tokens of expert g, up to offsets_tensor[g]::

        wgrad[g] = A[:, tokens] @ B[tokens, :]

    in FP32, rounded once. An expert without tokens makes zeros; tokens at or past the last end are not read.

    Args (torch strides in elements):
      a_tensor: (M, T), bfloat16, of strides (1, M), a contiguous (T, M) transposed; or (T, 1), which is copied first.
      b_tensor: (T, N), bfloat16, of strides (N, 1); or (1, T), which is copied first.
      sfa_tensor, sfb_tensor, global_scale_a, global_scale_b, sf_vec_size, sf_fp8_dtype_override, descriptor_workspace:
        of block-scaled operands, which are not computed: None, or their defaults.
      offsets_tensor: (L,) int32, ends of the experts' tokens, of any alignment.
      output_mode: "dense".
      wgrad_tensor: the output to write into, (L, M, N), contiguous, bfloat16 or float32. torch only.
      wgrad_ptrs: None; the matrix of expert g is `wgrad_tensor[g]`.
      acc_dtype: float32.
      wgrad_dtype: bfloat16, the default, or float32, of an output that is not given.
      mma_tiler_mn, cluster_shape_mn: a compiled tile; None leaves the choice to the package.
      accumulate_on_output: add to what `wgrad_tensor` holds, which is float32 then; of one that is not given, zeros.
      input_order: "tensor2d".
      current_stream: as for `grouped_gemm_wrapper`; of torch tensors only. JAX arrays go through XLA.
      overlap_margin: as for `grouped_gemm_wrapper`.

    M and N are multiples of 8. JAX arrays are row-major; the transposition of `a_tensor`, if that is itself one, is not
    made, and there are gradients, as for `grouped_gemm_wgrad`, which new JAX code should call.

    Returns:
      `TupleDict` of wgrad_tensor.

    Raises:
      ValueError: what docs/errors.md lists, before anything is launched.
      RuntimeError: this machine, or the library, cannot.
      NotImplementedError: a torch operand requires a gradient, and torch records it.
    """
    operands = strided_wgrad.Tensors(a_tensor, b_tensor, offsets_tensor, wgrad_tensor)
    options = _options(
        acc_dtype, wgrad_dtype, mma_tiler_mn, cluster_shape_mn, accumulate_on_output, input_order, overlap_margin
    )
    return _call(
        NEUTRAL, operands, options, current_stream, output_mode=output_mode, wgrad_ptrs=wgrad_ptrs,
        sfa_tensor=sfa_tensor, sfb_tensor=sfb_tensor, global_scale_a=global_scale_a, global_scale_b=global_scale_b,
        sf_vec_size=None if sf_vec_size == 16 else sf_vec_size, sf_fp8_dtype_override=sf_fp8_dtype_override,
        descriptor_workspace=descriptor_workspace,
    )  # fmt: skip


def grouped_gemm_wgrad_jax_sm100(
    a_tensor,
    b_tensor,
    offsets_tensor,
    wgrad_ptrs=None,
    wgrad_dtype="bfloat16",
    acc_dtype="float32",
    mma_tiler_mn=(256, 256),
    cluster_shape_mn=None,
    accumulate_on_output=False,
    input_order="tensor2d",
    *,
    sfa_tensor=None,
    sfb_tensor=None,
    global_scale_a=None,
    global_scale_b=None,
    sf_vec_size=32,
):
    """`grouped_gemm_wgrad_wrapper_sm100` of JAX arrays, under `jax.jit` or eagerly: row-major A (M, T) and B (T, N).

    `sf_vec_size` is of block-scaled operands and not looked at. Where a program that is traced will run is known as for
    `grouped_gemm_jax_sm100`.
    """
    del sf_vec_size
    operands = strided_wgrad.Tensors(a_tensor, b_tensor, offsets_tensor)
    options = _options(acc_dtype, wgrad_dtype, mma_tiler_mn, cluster_shape_mn, accumulate_on_output, input_order)
    return _call(
        JAX_SM100, operands, options, None, wgrad_ptrs=wgrad_ptrs,
        sfa_tensor=sfa_tensor, sfb_tensor=sfb_tensor, global_scale_a=global_scale_a, global_scale_b=global_scale_b,
    )  # fmt: skip


def _options(acc_dtype, wgrad_dtype, mma_tiler_mn, cluster_shape_mn, accumulate, input_order, overlap_margin=None):
    return strided_wgrad.Options(
        "float32" if acc_dtype is None else acc_dtype,
        "bfloat16" if wgrad_dtype is None else wgrad_dtype,
        mma_tiler_mn,
        cluster_shape_mn,
        accumulate,
        getattr(input_order, "value", input_order),  # cuDNN has an enumeration of them
        overlap_margin,
    )


def _call(entry, operands, options, stream, output_mode="dense", wgrad_ptrs=None, **of_scales):
    strided_wgrad.check_only_bfloat16(**of_scales)
    strided_wgrad.check_dense(output_mode, wgrad_ptrs)
    request = plan.request(entry, operands, options)
    return TupleDict(wgrad_tensor=request.framework.run_wgrad(plan.plan_for(request), operands, stream))
