"""From accumulators to D: scale, convert, stage in shared memory, store the group's own rows.

Shared by every architecture. A kernel hands over one slab of accumulators after another (SLAB_ROWS rows by `columns(dtype)` columns); only how the
registers come to hold it differs. A slab goes through one of SLAB_STAGES buffers in shared memory, written by 128 threads, stored by the copy engine.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, pipeline

SLAB_BYTES = 128  # of a row in shared memory: one swizzle atom
SLAB_STAGES = 2


def columns(dtype):
    """Columns of a slab."""
    return SLAB_BYTES * 8 // dtype.width


@cute.jit
def ragged_row(row: Int32, row_end: Int32, box_rows: cutlass.Constexpr[int]):
    """(x, y) that store box_rows rows from `row` on, but none at or past row_end: see `operands.ragged_rows_of_d`."""
    x = cutlass.min(cutlass.max(box_rows - (row_end - row), 0), box_rows)
    return x, row + box_rows - x


@cute.jit
def load_scale(pointer: cute.Pointer, index: Int32, valid: cutlass.Boolean):
    """alpha or prob at an index; a null pointer reads as ones, a row outside the group as zero."""
    scale = Float32(0.0)
    if valid:
        scale = Float32(1.0)
        if pointer.toint() != 0:
            scale = cute.make_tensor(pointer + index, cute.make_layout(1))[0]
    return scale


@dataclass(frozen=True)
class SlabStore:
    """One group of 128 threads that stages slabs and stores them; the copies are issued by its first warp.

    A buffer is written again once the copy that read it is done: the issuing warp waits for that, and the barrier passes it on.
    """

    atom: cute.CopyAtom
    m_d: cute.Tensor  # (x, N, y) coordinates of D
    s_slabs: cute.Tensor  # (rows, columns, SLAB_STAGES) of this group of threads
    thr_s: cute.Tensor  # this thread's part of it
    tiled_copy: cute.TiledCopy
    warp: Int32
    barrier: pipeline.NamedBarrier

    @cute.jit
    def store(self, r_acc, stage: Int32, row: Int32, row_end: Int32, col: Int32):
        """Converts the slab's accumulators, and stores rows [row, row_end) of it at column `col`."""
        rows = cute.size(self.s_slabs, mode=[0])
        r_d = cute.make_rmem_tensor(r_acc.shape, self.s_slabs.element_type)
        r_d.store(r_acc.load().to(self.s_slabs.element_type))

        if self.warp == 0:
            cute.arch.cp_async_bulk_wait_group(SLAB_STAGES - 1, read=True)
        self.barrier.arrive_and_wait()
        cute.copy(self.tiled_copy, r_d, self.thr_s[None, None, None, stage])
        cute.arch.fence_proxy("async.shared", space="cta")
        self.barrier.arrive_and_wait()
        if self.warp == 0:
            x, y = ragged_row(row, row_end, rows)
            g_slab = cute.local_tile(
                cute.domain_offset((x, col, y), self.m_d), (rows, columns(self.s_slabs.element_type)), (0, 0, 0)
            )
            s_part, g_part = cute.nvgpu.cpasync.tma_partition(
                self.atom,
                0,
                cute.make_layout(1),
                cute.group_modes(self.s_slabs, 0, 2),
                cute.group_modes(g_slab, 0, 2),
            )
            cute.copy(self.atom, s_part[None, stage], g_part)
            cute.arch.cp_async_bulk_commit_group()
