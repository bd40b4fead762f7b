"""The forward product, which is dgrad too: rows are ragged, each group has its own B."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from . import operands, tensor_maps
from .kernel import GroupedKernel
from .scheduler import RaggedRows

# Where a group has no more rows left, a cut load brings no others. All tiles of such a call read the same few rows of A: the others' would come from the
# same few parts of L2 again and again. With more rows that costs more than it saves (docs/performance.md).
CUT_ROWS = 2


class Forward(GroupedKernel):
    """`config.Variant` says what its fields switch."""

    a_major = "k"
    ones_b = (1,)
    cuts_loads = False  # copies of A may end at any row; zeros arrive for the rest

    @property
    def ones_a(self):
        return (1, 1) if self.cuts_loads else ()

    def __init__(self, variant, **facts):
        # C, if it is stored at all, before D is made of it.
        stored = {"c": variant.c_dtype, "d": variant.d_dtype} if variant.c_dtype else {"d": variant.d_dtype}
        self.outputs = {name: operands.DTYPES[dtype] for name, dtype in stored.items()}
        self.b_major = "k" if variant.b_major == "k" else "mn"
        self.has_bias = variant.has_bias
        self.scaling = None if variant.epilogue == "plain" else "rows"
        super().__init__(variant, **facts)

    def make_scheduler(self, tile, tile_readers):
        return RaggedRows(tile, tile_readers)

    def fields(self):
        return operands.forward_fields(self.variant, self.cuts_loads)

    @cute.jit
    def __call__(
        self,
        a: cute.Pointer,
        b: cute.Pointer,
        d: cute.Pointer,
        c: cute.Pointer | None,
        maps: cute.Pointer | None,
        offsets: cute.Pointer,
        experts: cute.Pointer,
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
        groups: Int32,
        clusters: Int32,
        stream,
    ):
        """None is what this variant does not take: see `operands.forward_fields`."""
        m, n, k = operands.extents(m, n, k)
        experts_in_map = l if cutlass.const_expr(self.variant.weights == "dense") else Int32(1)
        self.launch(
            operands.ragged_rows_of_a(a, m, k) if cutlass.const_expr(self.cuts_loads) else operands.rows_of_a(a, m, k),
            operands.experts_of_b(b, n, k, experts_in_map, self.variant.b_major),
            operands.ragged_rows(d, m, n, self.slab_rows),
            operands.ragged_rows(c, m, n, self.slab_rows) if cutlass.const_expr("c" in self.outputs) else None,
            operands.Problem(
                maps, offsets, experts, counter, alpha, prob, bias, bias_type, d_type, c_type, m, n, k, l, groups
            ),
            clusters,
            stream,
        )

    # --- on the device ------------------------------------------------------------------------------------------------

    @cute.jit
    def num_blocks(self, problem: operands.Problem, expert: Int32, begin: Int32, end: Int32):
        """Of the contraction, `tile.k` each."""
        return cute.ceil_div(problem.k, self.tile.k) if expert < problem.l else 0

    def without_blocks(self, num_blocks):
        """A tile has nothing to multiply."""
        return num_blocks == 0

    def rows_end(self, problem, end):
        """Of the result, for a tile of a group that ends there."""
        return end

    @cute.jit
    def loaded_end(self, problem, row, end):
        """Of the rows of A that a cut load brings for a tile."""
        loaded_end = problem.m
        if end - row <= CUT_ROWS:
            loaded_end = end
        return loaded_end

    def block_of_a(self, problem, m_a, rows, begin, end, row, block):
        """(rows, tile.k) from the tile's first row on, or from a pair's."""
        if cutlass.const_expr(self.cuts_loads):
            x, y, z = operands.ragged_load(row, self.loaded_end(problem, row, end), rows)
            at = cute.domain_offset((x, block * self.tile.k, y, z), m_a)
            return cute.local_tile(at, (rows, self.tile.k), (0, 0, 0, 0))
        return cute.local_tile(cute.domain_offset((row, 0), m_a), (rows, self.tile.k), (0, block))

    def expert_map(self, problem, expert):
        """(tensor map of B or None for the launch's own, coordinate of the expert in it)."""
        if cutlass.const_expr(self.variant.weights == "dense"):
            return None, expert
        # Every expert has a map of its own.
        map_b = tensor_maps.pointer_to_map(problem.maps, expert)
        cpasync.fence_tma_desc_acquire(map_b)
        return map_b, 0

    def block_of_b(self, m_b, rows, begin, end, col, expert, block):
        return cute.local_tile(cute.domain_offset((col, 0, expert), m_b), (rows, self.tile.k), (0, block, 0))

    def place(self, expert, row, end, col, rows):
        """Coordinates in C or D of a slab: none of its rows at or past the group's end is stored."""
        x, y = operands.ragged_row(row, end, rows)
        return x, col, y
