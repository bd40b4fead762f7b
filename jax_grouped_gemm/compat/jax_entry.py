"""The document's entry for jitted JAX programs."""

from jax_grouped_gemm.compat import plan, strided

ENTRY = strided.Entry("grouped_gemm_jax_sm100", sm100=True, instead="grouped_gemm")


def grouped_gemm_jax_sm100(
    a_tensor,
    padded_offsets,
    alpha_tensor,
    b_ptrs,
    n,
    prob_tensor,
    c_dtype="bfloat16",
    d_dtype="bfloat16",
    acc_dtype="float32",
    mma_tiler_mn=(256, 256),
    cluster_shape_mn=None,
    vector_f32=False,
    generate_c=False,
    use_dynamic_sched=False,
):
    """(D, C or None) of JAX arrays and raw weight addresses, under `jax.jit` or eagerly, without manual synchronisation.

    Operands, options and errors are those of `grouped_gemm_wrapper_sm100`; there is no bias. The weights behind `b_ptrs`
    must stay alive and where they are during every execution of a traced program.

    A program may be traced where it will not run, so under tracing the target is refused only if this process has GPUs
    and one of them is older than 10.0. Without GPUs the program is lowered for the platform that JAX says; on a CPU it
    computes by the reference.
    """
    del vector_f32
    operands = strided.StridedOperands(a_tensor, padded_offsets, alpha_tensor, b_ptrs=b_ptrs, prob_tensor=prob_tensor)
    options = strided.StridedOptions(
        n, "bfloat16", "k", acc_dtype, c_dtype, d_dtype, "n", mma_tiler_mn, cluster_shape_mn,
        strided.SM100_M_ALIGNED, generate_c, use_dynamic_sched, overlap_margin=None,
    )  # fmt: skip
    request = plan.request(ENTRY, operands, options)
    return request.framework.run(plan.plan_for(request), operands, None, by_address=False)
