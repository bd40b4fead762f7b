"""From accumulators to D and C: scale, add bias, convert, stage in shared memory, store.

With bias C = alpha acc + prob bias, D = C; without C = alpha acc, D = prob C: the kernels compute C, store it if it is asked for, and make D of it.

Shared by every architecture. A kernel hands over one slab of accumulators after another (SLAB_ROWS rows by `columns(dtype)` columns); only how the
registers come to hold it differs. A slab goes through one of a few buffers in shared memory, written by 128 threads, stored by the copy engine.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Uint16, Uint32, pipeline

from . import operands

SLAB_BYTES = 128  # of a row in shared memory: one swizzle atom
THREADS = 128  # that stage a slab, and a tile's bias, together


def columns(dtype):
    """Columns of a slab."""
    return SLAB_BYTES * 8 // dtype.width


@cute.jit
def load_scale(pointer: cute.Pointer, index: Int32, valid: cutlass.Boolean):
    """alpha or prob at an index; a null pointer reads as ones, a row outside the group as zero."""
    scale = Float32(0.0)
    if valid:
        scale = Float32(1.0)
        if pointer.toint() != 0:
            scale = cute.make_tensor(pointer + index, cute.make_layout(1))[0]
    return scale


@cute.jit
def row_factors(problem: operands.Problem, row: Int32, row_end: Int32):
    """(prob, factor of the bias in C, factor of C in D) of a row: prob goes to the bias where there is one, else to D."""
    prob = load_scale(problem.prob, row, row < row_end)
    of_bias, of_c = Float32(0.0), prob
    if cutlass.const_expr(problem.bias is not None):
        if problem.bias.toint() != 0:
            of_bias, of_c = prob, Float32(1.0)
    return prob, of_bias, of_c


@dataclass(frozen=True)
class BiasTile:
    """A tile's bias in shared memory, as float32, for one group of 128 threads: fetched early, stored, then read by column.

    A column past N, and every column of a tile without an expert, has zero.
    """

    s_bias: cute.Tensor  # (columns of the tile,)
    thread: Int32
    barrier: pipeline.NamedBarrier  # of the group of threads

    @cute.jit
    def fetch(self, problem: operands.Problem, expert: Int32, group: Int32, col: Int32):
        """This thread's columns as they lie in memory; nothing waits for them yet."""
        columns = cute.size(self.s_bias)
        bits = cute.make_rmem_tensor(cute.ceil_div(columns, THREADS), Uint32)
        for i in cutlass.range_constexpr(cute.size(bits)):
            bits[i] = Uint32(0)
            column = self.thread + i * THREADS
            valid = problem.bias.toint() != 0 and expert < problem.l and column < columns and col + column < problem.n
            if valid:
                at = cutlass.Int64(group) * problem.n + col + column
                if problem.bias_type == operands.TYPE_FLOAT32:
                    words = cute.recast_ptr(problem.bias, dtype=Uint32).align(4)
                    bits[i] = cute.make_tensor(words + at, cute.make_layout(1))[0]
                else:
                    halves = cute.recast_ptr(problem.bias, dtype=Uint16)
                    bits[i] = Uint32(cute.make_tensor(halves + at, cute.make_layout(1))[0])
        return bits

    @cute.jit
    def store(self, bits, bias_type: Int32):
        """All threads of the group call this; then all may read `s_bias`, until their next slab is stored."""
        for i in cutlass.range_constexpr(cute.size(bits)):
            column = self.thread + i * THREADS
            value = bits[i]
            if bias_type == operands.TYPE_BFLOAT16:
                value = value << 16
            value = cutlass.Float32(value.bitcast(Float32))
            if bias_type == operands.TYPE_FLOAT16:
                value = Uint16(bits[i]).bitcast(Float16).to(Float32)
            if column < cute.size(self.s_bias):
                self.s_bias[column] = value
        self.barrier.arrive_and_wait()


@cute.jit
def convert(values, dtype: cutlass.Constexpr, type_code):
    """float32 registers as `dtype`; as bfloat16 or float16, whichever the code says, where there is one."""
    converted = cute.make_rmem_tensor(values.shape, dtype)
    if cutlass.const_expr(type_code is None):
        converted.store(values.load().to(dtype))
    else:
        if type_code == operands.TYPE_FLOAT16:
            cute.recast_tensor(converted, Float16).store(values.load().to(Float16))
        else:
            converted.store(values.load().to(BFloat16))
    return converted


@dataclass(frozen=True)
class SlabStore:
    """One group of 128 threads that stages slabs and stores them; the copies are issued by its first warp.

    A buffer is written again once the copy that read it is done: the issuing warp waits for that, and the barrier passes it on.
    """

    atom: cute.CopyAtom
    m_d: cute.Tensor  # coordinates of D, or C: `ragged_rows` or `results` of operands.py
    type_code: Int32 | None  # which type of 16 bits; None: that of s_slabs
    s_slabs: cute.Tensor  # (rows, columns, stages * step) of this group of threads
    thr_s: cute.Tensor  # this thread's part of it
    tiled_copy: cute.TiledCopy
    warp: Int32
    barrier: pipeline.NamedBarrier
    stages: int  # buffers
    step: int = 1  # every step-th buffer is used, where C's or D's take as much room as several of this

    @cute.jit
    def store(self, r_acc, stage: Int32, place):
        """Converts the slab's accumulators, and stores them at these coordinates."""
        self.stage(convert(r_acc, self.s_slabs.element_type, self.type_code), stage, place)

    @cute.jit
    def stage(self, r_d, stage: Int32, place):
        """As `store`, of a slab that is converted."""
        shape = (cute.size(self.s_slabs, mode=[0]), cute.size(self.s_slabs, mode=[1]))
        stage = stage * self.step
        if self.warp == 0:
            cute.arch.cp_async_bulk_wait_group(self.stages - 1, read=True)
        self.barrier.arrive_and_wait()
        cute.copy(self.tiled_copy, r_d, self.thr_s[None, None, None, stage])
        cute.arch.fence_proxy("async.shared", space="cta")
        self.barrier.arrive_and_wait()
        if self.warp == 0:
            g_slab = cute.local_tile(cute.domain_offset(place, self.m_d), shape, (0, 0, 0))
            s_part, g_part = cute.nvgpu.cpasync.tma_partition(
                self.atom,
                0,
                cute.make_layout(1),
                cute.group_modes(self.s_slabs, 0, 2),
                cute.group_modes(g_slab, 0, 2),
            )
            cute.copy(self.atom, s_part[None, stage], g_part)
            cute.arch.cp_async_bulk_commit_group()
