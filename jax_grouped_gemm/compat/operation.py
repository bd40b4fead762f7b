"""The document's class: sample tensors first, then calls into given outputs."""

from jax_grouped_gemm.compat import plan, strided
from jax_grouped_gemm.compat.strided import Entry, StridedOperands, StridedOptions


class GroupedGemm:
    """The grouped GEMM of torch tensors or JAX arrays, `check_support()`, `compile()`, then `execute(...)`.

    The parameters are those of `grouped_gemm_wrapper`, the samples standing for the tensors of later calls: their dtypes,
    sizes and device stay, but for M. The samples themselves are not kept. Without `sample_b` the weights come by
    address: `num_experts` = L, `b_shape` = (N, K) and `b_dtype` are given instead. `sample_c` may be None without
    `generate_c`.
    """

    _entry = Entry("GroupedGemm", sm100=False, instead="grouped_gemm")

    def __init__(
        self,
        sample_a,
        sample_c,
        sample_d,
        sample_padded_offsets,
        sample_alpha,
        sample_b=None,
        sample_bias=None,
        sample_prob=None,
        num_experts=None,
        b_shape=None,
        b_dtype=None,
        acc_dtype="float32",
        mma_tiler_mn=None,
        cluster_shape_mn=None,
        vector_f32=False,
        m_aligned=256,
        generate_c=False,
        b_major="k",
        use_dynamic_sched=False,
        *,
        overlap_margin=None,
    ):
        del vector_f32
        samples = StridedOperands(
            sample_a,
            sample_padded_offsets,
            sample_alpha,
            sample_b,
            bias_tensor=sample_bias,
            prob_tensor=sample_prob,
            c_tensor=sample_c,
            d_tensor=sample_d,
        )
        self._framework = plan.framework_of(samples)
        self._samples = plan.layouts(self._framework, samples)
        self._weights = {"num_experts": num_experts, "b_shape": b_shape, "b_dtype": b_dtype}
        self._options = StridedOptions(
            n=None,
            b_dtype=b_dtype,
            b_major=b_major,
            acc_dtype=acc_dtype,
            c_dtype="bfloat16" if sample_c is None else self._samples.c_tensor[2],
            d_dtype="bfloat16" if sample_d is None else self._samples.d_tensor[2],
            cd_major="n",
            mma_tiler_mn=mma_tiler_mn,
            cluster_shape_mn=cluster_shape_mn,
            m_aligned=m_aligned,
            generate_c=generate_c,
            use_dynamic_sched=use_dynamic_sched,
            overlap_margin=overlap_margin,
        )
        self._plan: plan.Plan | None = None  # of the samples, once checked
        self._sampled = self._options  # with N, once checked
        self._compiled = False

    def check_support(self):
        """True, or the ValueError or RuntimeError that says why not."""
        self._support()
        return True

    def _support(self):
        """The plan of the samples."""
        samples, options = self._samples, self._options
        strided.check_outputs_given(options, sample_d=samples.d_tensor, sample_c=samples.c_tensor)
        strided.check_sample_weights(samples.b_tensor is not None, **self._weights)
        if samples.b_tensor is None:
            device = samples.a_tensor[3]
            samples = samples._replace(b_ptrs=self._framework.pointers_layout(self._weights["num_experts"], device))
            options = options._replace(n=self._weights["b_shape"][0])
        found = plan.plan_for(
            plan.Request(
                self._entry, self._framework, samples, options, plan.margin_of(options), plan.types_of(options)
            )
        )
        if samples.b_tensor is None:
            strided.check_b_shape(self._weights["b_shape"], found.call.k)
        self._plan, self._sampled = found, options
        return found

    def compile(self):
        """Loads what the samples' call needs; nothing is compiled, here or ever."""
        found = self._support()
        self._framework.load(found, found.fixed["the device"])
        self._compiled = True

    def execute(
        self,
        a_tensor,
        c_tensor,
        d_tensor,
        padded_offsets,
        alpha_tensor,
        b_tensor=None,
        b_ptrs=None,
        bias_tensor=None,
        prob_tensor=None,
        current_stream=None,
    ):
        """Writes D, and C with `generate_c`, into the given tensors, on `current_stream` or torch's current stream.

        JAX arrays are read and written by address, on the legacy default stream unless one is given, of which XLA does not
        know. So `jax.block_until_ready` every one of them before the call, outputs too, keep them alive, and synchronise
        the stream before reading. XLA does not see the write either: an output must share its memory with no other
        array, and NumPy copies of it made before (`np.asarray` remembers its first) are stale; docs/compat.md has the whole
        example. On a CPU the call has finished when it returns.
        """
        if self._plan is None or not self._compiled:
            raise strided.not_compiled(self._entry.name)
        operands = StridedOperands(
            a_tensor, padded_offsets, alpha_tensor, b_tensor, b_ptrs, bias_tensor, prob_tensor, c_tensor, d_tensor
        )
        strided.check_outputs_given(self._options, d_tensor=d_tensor, c_tensor=c_tensor)
        strided.check_same_weights(self._samples.b_tensor is not None, b_tensor=b_tensor, b_ptrs=b_ptrs)
        request = plan.request(self._entry, operands, self._sampled)
        found = plan.plan_for(request)
        if found.fixed != self._plan.fixed:
            strided.check_as_sampled(self._plan.fixed, found.fixed)
        request.framework.run(found, operands, current_stream, by_address=True)


class GroupedGemmSm100(GroupedGemm):
    """`GroupedGemm` as the document has it: on GPUs of compute capability 10.0 or newer only.

    M and every offset are multiples of 256, weights are K-major, and the tile is given.
    """

    _entry = Entry("GroupedGemmSm100", sm100=True, instead="GroupedGemm")

    def __init__(
        self,
        sample_a,
        sample_c,
        sample_d,
        sample_padded_offsets,
        sample_alpha,
        sample_b=None,
        sample_bias=None,
        sample_prob=None,
        num_experts=None,
        b_shape=None,
        b_dtype=None,
        acc_dtype="float32",
        mma_tiler_mn=(256, 256),
        cluster_shape_mn=None,
        vector_f32=False,
        m_aligned=256,
        generate_c=False,
        b_major="k",
        use_dynamic_sched=False,
    ):
        super().__init__(
            sample_a, sample_c, sample_d, sample_padded_offsets, sample_alpha, sample_b, sample_bias, sample_prob,
            num_experts, b_shape, b_dtype, acc_dtype, mma_tiler_mn, cluster_shape_mn, vector_f32, m_aligned,
            generate_c, b_major, use_dynamic_sched,
        )  # fmt: skip
