"""Weight gradients: the contraction is ragged, each group makes a whole (N, K) matrix of its rows of X (M, N) and Y (M, K)."""

import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from . import operands
from .kernel import GroupedKernel
from .scheduler import RaggedContraction


class Wgrad(GroupedKernel):
    """`config.WgradVariant` says what its fields switch. X is the mainloop's A, Y its B, both contracted along memory's outer dimension."""

    a_major = b_major = "mn"
    ones_a = ones_b = (1, 1)
    scaling = "alpha"

    def __init__(self, variant, **facts):
        self.outputs = {"d": operands.DTYPES[variant.d_dtype]}
        if variant.accumulate:
            self.store_op = cpasync.CopyReduceBulkTensorTileS2GOp  # adds
        super().__init__(variant, **facts)

    def make_scheduler(self, tile, tile_readers):
        return RaggedContraction(tile, tile_readers, self.variant.accumulate)

    def fields(self):
        return operands.wgrad_fields()

    @cute.jit
    def __call__(
        self,
        x: cute.Pointer,
        y: cute.Pointer,
        d: cute.Pointer,
        offsets: cute.Pointer,
        experts: cute.Pointer,
        counter: cute.Pointer,
        alpha: cute.Pointer,
        m: Int32,
        n: Int32,
        k: Int32,
        l: Int32,
        groups: Int32,
        clusters: Int32,
        stream,
    ):
        m, n, k = operands.extents(m, n, k)
        self.launch(
            operands.ragged_loads(x, m, n),
            operands.ragged_loads(y, m, k),
            operands.results(d, n, k, l),
            None,
            operands.Problem(
                None, offsets, experts, counter, alpha, None, None, None, None, None, m, n, k, l, groups
            ),
            clusters,
            stream,
        )  # fmt: skip

    # --- on the device ------------------------------------------------------------------------------------------------

    def num_blocks(self, problem, expert, begin, end):
        """Of the contraction, `tile.k` rows each."""
        return cute.ceil_div(end - begin, self.tile.k)

    def without_blocks(self, num_blocks):
        """A tile has nothing to multiply; such tiles there are not where results are added to."""
        return False if self.variant.accumulate else num_blocks == 0

    def rows_end(self, problem, end):
        return problem.n

    def block_of_a(self, problem, m_a, columns, begin, end, row, block):
        return self._block(m_a, columns, begin, end, row, block)

    def expert_map(self, problem, expert):
        return None, 0

    def block_of_b(self, m_b, columns, begin, end, col, expert, block):
        return self._block(m_b, columns, begin, end, col, block)

    def _block(self, m, columns, begin, end, column, block):
        """(columns, tile.k rows) of a group: those at or past its end arrive as zeros."""
        x, y, z = operands.ragged_load(begin + block * self.tile.k, end, self.tile.k)
        return cute.local_tile(cute.domain_offset((column, x, y, z), m), (columns, self.tile.k), (0, 0, 0, 0))

    def place(self, expert, row, end, col, rows):
        """Coordinates in D of a slab."""
        return row, col, expert
