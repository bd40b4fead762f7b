"""Grouped GEMM of the cuDNN front-end, SM100: D = prob alpha A B^T, and C without prob."""

import dataclasses
from ctypes import c_int32, c_uint64

import numpy as np

from tests.functional.others.kernel import BF16, SIZES, Broken, Kernel, grouped_product, integers, pointer, stored

PACKAGES = ("cudnn",)
ENDS = (256, 256, 768, 1280)  # groups begin at multiples of 256 rows; one is empty
AMENDMENTS = ("wait for loads", "fence before", "fence after")
CLUSTERS = 2


@dataclasses.dataclass(frozen=True)
class CudnnGrouped(Kernel):
    tile: tuple = (128, 128)
    cluster: tuple = (1, 1)
    discrete: bool = False
    dynamic: bool = False
    b_major: str = "k"
    dtype: np.dtype = BF16
    generate_c: bool = False
    vectorized: bool = False

    def compile(self):
        import cutlass
        import cutlass.cute as cute
        from cuda.bindings.driver import CUstream
        from cudnn.gemm.cutedsl.grouped.moe_utils import MoEWeightMode
        from cudnn.gemm.cutedsl.grouped.unfused.moe_grouped_gemm import MoEGroupedGemmBf16Kernel
        from cutlass import BFloat16, Float16, Float32, Int32, Int64, Uint8
        from cutlass.cute import Pointer, make_layout, make_tensor
        from cutlass.cute.nvgpu import OperandMajorMode

        experts = len(ENDS)
        gemm = MoEGroupedGemmBf16Kernel(
            acc_dtype=Float32,
            use_2cta_instrs=self.tile[0] == 256,
            mma_tiler_mn=self.tile,
            cluster_shape_mn=self.cluster,
            vectorized_f32=self.vectorized,
            generate_c=self.generate_c,
            enable_bias=False,
            expert_cnt=experts,
            weight_mode=MoEWeightMode.DISCRETE if self.discrete else MoEWeightMode.DENSE,
            use_dynamic_sched=self.dynamic,
        )
        discrete, k_major = self.discrete, self.b_major == "k"
        b_mode = OperandMajorMode.K if k_major else OperandMajorMode.MN

        @cute.jit
        def call(
            a: Pointer, b: Pointer, c: Pointer, d: Pointer, workspace: Pointer, ends: Pointer, alpha: Pointer, prob: Pointer,
            m: Int32, n: Int32, k: Int32, stream: CUstream,
        ):  # fmt: skip
            # 64-bit strides: products of extents may need them.
            rows, columns, depth = Int64(m), Int64(n), Int64(k)
            a = make_tensor(a, make_layout((m, k, 1), stride=(depth, 1, rows * depth)))
            outputs = make_layout((m, n, 1), stride=(columns, 1, rows * columns))
            if cutlass.const_expr(not discrete):
                strides = (depth, 1, columns * depth) if k_major else (1, columns, columns * depth)
                b = make_tensor(b, make_layout((n, k, experts), stride=strides))
            gemm(
                a, b, n, k, depth if k_major else columns, b_mode, workspace, make_tensor(c, outputs),
                make_tensor(d, outputs), make_tensor(ends, make_layout((experts,))),
                make_tensor(alpha, make_layout((experts,))), None, make_tensor(prob, make_layout((m, 1, 1))), CLUSTERS, stream,
            )  # fmt: skip

        output = {"bfloat16": BFloat16, "float16": Float16, "float32": Float32}[np.dtype(self.dtype).name]
        pointers = [BFloat16, Int64 if self.discrete else BFloat16, output, output, Uint8, Int32, Float32, Float32]
        aligns = [128 if dtype is Uint8 else 16 for dtype in pointers]
        sizes = (Int32(256), Int32(64), Int32(64))
        return cute.compile(call, *map(pointer, pointers, aligns), *sizes, cute.runtime.make_fake_stream())

    def problem(self, rng, number, memory):
        (n, k), m, experts = SIZES[number], ENDS[-1], len(ENDS)
        a, b = integers(rng, m, k), integers(rng, experts, n, k)
        alpha = rng.choice([0.5, 1, 2, -1], experts).astype(np.float32)
        prob = rng.choice([0.25, 0.5, 1, 2], m).astype(np.float32)
        c = grouped_product(a, b, ENDS) * np.repeat(alpha, np.diff(ENDS, prepend=0))[:, None]
        b = stored(b, self.b_major == "k")
        if self.discrete:
            b = np.array([memory.put(f"b[{i}]", each) for i, each in enumerate(b)], np.uint64)
        output_bytes = c.size * np.dtype(self.dtype).itemsize
        # The workspace holds the experts' maps, then the counter of a dynamic schedule.
        pointers = {
            "a": memory.put("a", a),
            "b": memory.put("b", b),
            "c": memory.new("c", output_bytes),
            "d": memory.new("d", output_bytes),
            "workspace": memory.new("workspace", 128 * experts + 4),
            "ends": memory.put("ends", np.array(ENDS, np.int32)),
            "alpha": memory.put("alpha", alpha),
            "prob": memory.put("prob", prob),
        }
        results = [("d", pointers["d"], (c * prob[:, None]).astype(self.dtype))]
        if self.generate_c:
            results.append(("c", pointers["c"], c.astype(self.dtype)))
        return [*map(c_uint64, pointers.values()), *map(c_int32, (m, n, k)), c_uint64(0)], results


MAPS = (*AMENDMENTS, "release maps", "acquire maps")
KERNELS = (
    CudnnGrouped("dense", 100, AMENDMENTS),
    CudnnGrouped("dense_cluster", 100, AMENDMENTS, cluster=(2, 1), dtype=np.dtype(np.float16)),
    CudnnGrouped(
        "discrete", 100, MAPS, tile=(128, 64), discrete=True, b_major="n", dtype=np.dtype(np.float32), vectorized=True
    ),
    CudnnGrouped("dense_pair", 100, AMENDMENTS, tile=(256, 256), cluster=(2, 1), b_major="n", dynamic=True),
    CudnnGrouped(
        "discrete_pair", 100, MAPS, tile=(256, 128), cluster=(2, 1), discrete=True, dynamic=True, generate_c=True
    ),
)
BROKEN = (
    # The mbarriers of its dynamic schedule are initialized before an arrive.relaxed at the cluster's barrier, without the
    # fence.mbarrier_init that this form needs: the warps that use them may be too early. Pairs do not show it: after these mbarriers
    # they initialize one more, for tensor memory, with the fence.
    Broken(
        CudnnGrouped("dense_dynamic_cluster", 100, AMENDMENTS, cluster=(2, 1), dynamic=True),
        0, "eager", "barrier", "whose initialization is not ordered before it",
    ),
)  # fmt: skip
