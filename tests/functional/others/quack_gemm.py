"""GEMM of QuACK, SM90 and SM100: D = A B^T + C, batched, or A's rows in groups."""

import dataclasses
import importlib.util
import sys
import types
from ctypes import c_int32, c_uint64

import numpy as np

from tests.functional.others.kernel import (
    BF16,
    POLICIES,
    SIZES,
    Broken,
    Kernel,
    grouped_product,
    integers,
    pointer,
    product,
    stored,
)

PACKAGES = ("quack", "torch", "tvm_ffi")
ENDS = (100, 100, 300, 431)
BATCH, ROWS = 3, 304
CLUSTERS = 2


def _import_without_other_kernels():
    """The package's own __init__ imports all that it has, and with it Triton."""
    if "quack" in sys.modules:
        return
    package = types.ModuleType("quack")
    package.__path__ = list(importlib.util.find_spec("quack").submodule_search_locations)
    sys.modules["quack"] = package
    importlib.import_module("quack.dsl")  # which __init__ imports first


@dataclasses.dataclass(frozen=True)
class QuackGemm(Kernel):
    tile: tuple = (128, 128)
    cluster: tuple = (1, 1, 1)
    grouped: bool = False
    a_major: str = "k"
    b_major: str = "k"
    dtype: np.dtype = BF16
    add_c: bool = False
    pingpong: bool = False

    def compile(self):
        _import_without_other_kernels()
        import cutlass
        import cutlass.cute as cute
        from cuda.bindings.driver import CUstream
        from cutlass import BFloat16, Float32, Int32, Int64
        from cutlass.cute import Pointer, make_layout, make_tensor
        from quack.gemm_default_epi import GemmDefaultSm90, GemmDefaultSm100
        from quack.tile_scheduler import TileSchedulerOptions
        from quack.varlen_utils import VarlenArguments

        # SM100: without the hardware's queue of work, which the model has not.
        gemm_class = {90: GemmDefaultSm90, 100: GemmDefaultSm100}[self.arch]
        options = {"pingpong": self.pingpong} if self.arch == 90 else {"use_clc_persistence": False}
        gemm = gemm_class(Float32, BFloat16, self.tile, self.cluster, **options)
        grouped, add_c, a_k_major, b_k_major = self.grouped, self.add_c, self.a_major == "k", self.b_major == "k"

        @cute.jit
        def call(
            a: Pointer, b: Pointer, c: Pointer, d: Pointer, ends: Pointer,
            m: Int32, n: Int32, k: Int32, l: Int32, clusters: Int32, stream: CUstream,
        ):  # fmt: skip
            # 64-bit strides: its groups are cut out of a tensor of 2^30 rows.
            rows, columns, depth = Int64(m), Int64(n), Int64(k)
            groups = None
            if cutlass.const_expr(grouped):
                a_layout = make_layout((m, k), stride=(depth, 1))
                outputs = make_layout((m, n), stride=(columns, 1))
                groups = VarlenArguments(mCuSeqlensM=make_tensor(ends, make_layout((l + 1,))))
            else:
                a_strides = (rows * depth, depth, 1) if a_k_major else (rows * depth, 1, rows)
                a_layout = make_layout((l, m, k), stride=a_strides)
                outputs = make_layout((l, m, n), stride=(rows * columns, columns, 1))
            b_strides = (columns * depth, depth, 1) if b_k_major else (columns * depth, 1, columns)
            gemm(
                make_tensor(a, a_layout), make_tensor(b, make_layout((l, n, k), stride=b_strides)), make_tensor(d, outputs),
                make_tensor(c, outputs) if add_c else None, gemm_class.EpilogueArguments(),
                TileSchedulerOptions(max_active_clusters=clusters, max_swizzle_size=Int32(8)), groups, stream,
            )  # fmt: skip

        output = {"bfloat16": BFloat16, "float32": Float32}[np.dtype(self.dtype).name]
        pointers = map(pointer, (BFloat16, BFloat16, output, output, Int32))
        sizes = (Int32(256), Int32(64), Int32(64), Int32(1), Int32(1))
        return cute.compile(call, *pointers, *sizes, cute.runtime.make_fake_stream())

    def problem(self, rng, number, memory):
        (n, k), m, l = SIZES[number], ENDS[-1] if self.grouped else ROWS, len(ENDS) if self.grouped else BATCH
        a, b = integers(rng, *(() if self.grouped else (l,)), m, k), integers(rng, l, n, k)
        d = grouped_product(a, b, ENDS) if self.grouped else product(a, b)
        c = rng.integers(-9, 10, d.shape).astype(self.dtype)
        if self.add_c:
            d += c.astype(np.float32)
        pointers = {
            "a": memory.put("a", stored(a, self.a_major == "k")),
            "b": memory.put("b", stored(b, self.b_major == "k")),
            "c": memory.put("c", c),
            "d": memory.new("d", c.nbytes),
            "ends": memory.put("ends", np.array((0, *ENDS), np.int32)),
        }
        sizes = map(c_int32, (m, n, k, l, CLUSTERS))
        return [*map(c_uint64, pointers.values()), *sizes, c_uint64(0)], [("d", pointers["d"], d.astype(self.dtype))]


F32 = np.dtype(np.float32)
AMENDMENTS = ("meet after waiting for loads", "fence before", "fence after")
PINGPONG = QuackGemm(
    "sm90_pingpong",
    90,
    problems=(0,),
    tile=(128, 192),
    cluster=(2, 1, 1),
    a_major="m",
    b_major="n",
    dtype=F32,
    pingpong=True,
)
GROUPED_C = QuackGemm(
    "sm90_grouped_c",
    90,
    policies=POLICIES[:-1],
    tile=(256, 128),
    cluster=(2, 1, 1),
    grouped=True,
    dtype=F32,
    add_c=True,
)
KERNELS = (
    QuackGemm("sm90", 90, cluster=(2, 1, 1)),
    PINGPONG,
    QuackGemm("sm90_grouped_pingpong", 90, tile=(64, 128), grouped=True, b_major="n", pingpong=True),
    GROUPED_C,
    QuackGemm("sm100_grouped", 100, AMENDMENTS, grouped=True),
    QuackGemm("sm100_pair", 100, AMENDMENTS, tile=(256, 192), cluster=(2, 2, 1), b_major="n"),
    QuackGemm(
        "sm100_cluster", 100, AMENDMENTS, tile=(128, 192), cluster=(1, 2, 1), a_major="m", b_major="n", dtype=F32
    ),
)
BROKEN = (
    # A warpgroup that skips the other's tile, of twice as many K blocks as there are stages, takes the number of rounds for a parity.
    Broken(PINGPONG, 1, "eager", "barrier", "mbarrier.try_wait for parity 2"),
    # A stage of C is released by lane 0 if it is the one that elect.sync elects. Which one that is, PTX does not say: in random order
    # it is another.
    Broken(GROUPED_C, 0, "random", "deadlock", "8 of 8 arrivals missing"),
)
