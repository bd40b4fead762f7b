"""What all kernels that multiply share on the host side: stages, slabs, shared memory, launch.

An architecture (`gemm_sm90.py`, `gemm_sm100.py`) brings `launch` and the device code: pipelines, mainloop, accumulators. An operation (`forward.py`,
`wgrad.py`) brings the operands, and says which rows of them a tile contracts and where its result goes. A kernel is a class of both.
"""

import math

import cutlass.cute as cute
from cutlass import Float32, utils
from cutlass.cute.nvgpu import cpasync

from . import epilogue

SHARED_BYTES = 232448 - 1024  # of an SM, less what barriers, ring and alignment take


class GroupedKernel:
    """One variant of `config`.

    threads: of a CTA. slab_rows: rows of D that one group of 128 threads stages and stores. slab_groups: such groups. slab_stages: buffers of each.
    tile_readers: warps that read the scheduler's tiles. other_bytes: of shared memory, beside stages and slabs.

    An operation sets, before this:
      outputs: dtype of what is stored by name, in the order in which it is.
      a_major, b_major: "k" where an operand's contracted dimension is contiguous, else "mn".
      scaling: None, "alpha" (a factor per group), or "rows" (alpha, prob and, where has_bias, the bias).
      store_op: the copy of a result to memory.
    """

    has_bias = False
    store_op = cpasync.CopyBulkTensorTileS2GOp

    def __init__(
        self, variant, *, threads, slab_rows, slab_groups, slab_stages, stage_bytes, tile_readers, other_bytes=0
    ):
        tile = variant.tile
        self.variant = variant
        self.tile = tile
        self.threads = threads
        self.cluster_size = tile.cluster_size
        self.scheduler = self.make_scheduler(tile, tile_readers)
        self.slab_rows = slab_rows
        self.slab_groups = slab_groups
        self.slab_stages = slab_stages
        self.stage_bytes = stage_bytes  # of A and B, one CTA's
        self.stages = (SHARED_BYTES - other_bytes - slab_groups * slab_stages * self.buffer_bytes()) // stage_bytes

    def slab(self, output):
        """(rows, columns) of C or D in one copy."""
        return self.slab_rows, epilogue.columns(self.outputs[output])

    def staged(self, output):
        """Shape of what a group of threads stages and stores at a time, as the matrix unit sees it."""
        return (self.unit_rows, self.slab_rows) if self.tile.swapped else self.slab(output)

    def buffer_bytes(self):
        """Of what is staged at a time, C or D."""
        if self.tile.swapped:
            return self.unit_rows * self.slab_rows * max(dtype.width for dtype in self.outputs.values()) // 8
        return self.slab_rows * epilogue.SLAB_BYTES

    def buffer_step(self, output):
        """Buffers of C and D are the same bytes: of the narrower type's, which are more, only some are used."""
        return self.buffer_bytes() * 8 // (math.prod(self.staged(output)) * self.outputs[output].width)

    def num_slabs(self, output):
        return 1 if self.tile.swapped else self.tile.n // self.slab(output)[1]

    @property
    def d_major(self):
        return utils.LayoutEnum.COL_MAJOR if self.tile.swapped else utils.LayoutEnum.ROW_MAJOR

    def seen(self, tensor):
        """D or C as the matrix unit sees it."""
        if not self.tile.swapped or tensor is None:
            return tensor
        return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=[1, 0, 2]))

    def boxes(self):
        """Box of each tensor map, innermost dimension first: what one CTA brings or stores by one copy."""
        box_a, box_b = self.operand_boxes()
        outputs = {f"MAP_{name.upper()}": (*reversed(self.slab(name)), 1) for name in self.outputs}
        return {"MAP_A": (*box_a, *self.ones_a), "MAP_B": (*box_b, *self.ones_b), **outputs}

    def store_atom(self, output, tensor, s_layout):
        """(copy atom, tensor of coordinates) of D or C; of an output that is not there, nothing."""
        if output not in self.outputs:
            return None, None
        return cpasync.make_tiled_tma_atom(
            self.store_op(), tensor, cute.slice_(s_layout, (None, None, 0)), self.staged(output)
        )

    def bias_layout(self):
        """(columns of a tile, groups of threads) of the bias in shared memory; a word each where there is none."""
        return cute.make_layout((self.tile.n if self.has_bias else 1, self.slab_groups))

    def bias_storage(self):
        return cute.struct.Align[cute.struct.MemRange[Float32, cute.size(self.bias_layout())], 16]

    def launch_options(self, clusters, shared_bytes, stream):
        return {
            "grid": (clusters * self.cluster_size, 1, 1),
            "block": (self.threads, 1, 1),
            "cluster": (self.cluster_size, 1, 1),
            "smem": shared_bytes,
            "min_blocks_per_mp": 1,
            "stream": stream,
        }
