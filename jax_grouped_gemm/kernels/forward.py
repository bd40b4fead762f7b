"""What the forward kernels of all architectures share on the host side: arguments, tensors, parameters, launch."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

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
        self.d_dtype = operands.DTYPES[variant.d_dtype]
        self.cluster_size = tile.cluster_m * tile.cluster_n
        self.scheduler = TileScheduler(tile, tile_readers)
        self.slab = (slab_rows, epilogue.columns(self.d_dtype))
        self.num_slabs = tile.n // self.slab[1]
        self.stage_bytes = stage_bytes  # of A and B, one CTA's
        slab_bytes = slab_groups * epilogue.SLAB_STAGES * slab_rows * epilogue.SLAB_BYTES
        self.stages = (SHARED_BYTES - slab_bytes) // stage_bytes

    def fields(self):
        return operands.forward_fields(self.variant.weights, self.variant.scaled)

    @cute.jit
    def __call__(
        self,
        a: cute.Pointer,
        b: cute.Pointer,
        d: cute.Pointer,
        maps: cute.Pointer | None,
        offsets: cute.Pointer,
        alpha: cute.Pointer | None,
        prob: cute.Pointer | None,
        m: Int32,
        n: Int32,
        k: Int32,
        l: Int32,
        clusters: Int32,
        stream,
    ):
        """maps: for weights that are not one array. alpha and prob: for scaled variants."""
        m, n, k = operands.extents(m, n, k)
        experts_in_map = l if cutlass.const_expr(self.variant.weights == "dense") else Int32(1)
        self.launch(
            operands.rows_of_a(a, m, k),
            operands.experts_of_b(b, n, k, experts_in_map, self.variant.b_major),
            operands.ragged_rows_of_d(d, m, n, self.slab[0]),
            operands.Problem(maps, offsets, alpha, prob, m, n, k, l),
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
