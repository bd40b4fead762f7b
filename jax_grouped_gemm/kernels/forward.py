"""What the forward kernels of all architectures share on the host side: arguments, tensors, parameters, launch."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync

from . import epilogue, operands
from .scheduler import TileScheduler

SHARED_BYTES = 232448 - 1024  # of an SM, less what barriers, ring and alignment take


class ForwardKernel:
    """One variant; `config.Variant` says what its fields switch. An architecture adds `launch` and the device code.

    threads: of a CTA. slab_rows: rows of D that one group of 128 threads stages and stores. slab_groups: such groups.
    """

    def __init__(self, variant, *, threads, slab_rows, slab_groups, stage_bytes, tile_readers):
        tile = variant.tile
        self.variant = variant
        self.tile = tile
        self.threads = threads
        # What is stored: C, if at all, before D is made of it.
        self.outputs = {"c": variant.c_dtype, "d": variant.d_dtype} if variant.c_dtype else {"d": variant.d_dtype}
        self.outputs = {name: operands.DTYPES[dtype] for name, dtype in self.outputs.items()}
        self.cluster_size = tile.cluster_m * tile.cluster_n
        self.scheduler = TileScheduler(tile, tile_readers)
        self.slab_rows = slab_rows
        self.slab_groups = slab_groups
        self.stage_bytes = stage_bytes  # of A and B, one CTA's
        slab_bytes = slab_groups * epilogue.SLAB_STAGES * slab_rows * epilogue.SLAB_BYTES
        self.stages = (SHARED_BYTES - slab_bytes) // stage_bytes

    def fields(self):
        return operands.forward_fields(self.variant)

    def slab(self, output):
        """(rows, columns) of C or D that go through shared memory at a time."""
        return self.slab_rows, epilogue.columns(self.outputs[output])

    def num_slabs(self, output):
        return self.tile.n // self.slab(output)[1]

    def output_boxes(self):
        return {f"MAP_{name.upper()}": (*reversed(self.slab(name)), 1) for name in self.outputs}

    def store_atom(self, output, tensor, s_layout):
        """(copy atom, tensor of coordinates) of D or C; of an output that is not there, nothing."""
        if output not in self.outputs:
            return None, None
        return cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(), tensor, cute.slice_(s_layout, (None, None, 0)), self.slab(output)
        )

    def bias_layout(self):
        """(columns of a tile, groups of threads) of the bias in shared memory; a word each where there is none."""
        return cute.make_layout((self.tile.n if self.variant.has_bias else 1, self.slab_groups))

    def bias_storage(self):
        return cute.struct.Align[cute.struct.MemRange[Float32, cute.size(self.bias_layout())], 16]

    @cute.jit
    def __call__(
        self,
        a: cute.Pointer,
        b: cute.Pointer,
        d: cute.Pointer,
        c: cute.Pointer | None,
        maps: cute.Pointer | None,
        offsets: cute.Pointer,
        counter: cute.Pointer,
        alpha: cute.Pointer | None,
        prob: cute.Pointer | None,
        bias: cute.Pointer | None,
        bias_type: Int32 | None,
        d_type: Int32 | None,
        c_type: Int32 | None,
        m: Int32,
        n: Int32,
        k: Int32,
        l: Int32,
        clusters: Int32,
        stream,
    ):
        """None is what this variant does not take: see `operands.forward_fields`."""
        m, n, k = operands.extents(m, n, k)
        experts_in_map = l if cutlass.const_expr(self.variant.weights == "dense") else Int32(1)
        self.launch(
            operands.rows_of_a(a, m, k),
            operands.experts_of_b(b, n, k, experts_in_map, self.variant.b_major),
            operands.ragged_rows(d, m, n, self.slab_rows),
            operands.ragged_rows(c, m, n, self.slab_rows) if cutlass.const_expr("c" in self.outputs) else None,
            operands.Problem(maps, offsets, counter, alpha, prob, bias, bias_type, d_type, c_type, m, n, k, l),
            clusters,
            stream,
        )

    def launch_options(self, clusters, shared_bytes, stream):
        return {
            "grid": (clusters * self.cluster_size, 1, 1),
            "block": (self.threads, 1, 1),
            "cluster": (self.cluster_size, 1, 1),
            "smem": shared_bytes,
            "min_blocks_per_mp": 1,
            "stream": stream,
        }
