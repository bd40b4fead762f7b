"""Grouped GEMM for Hopper: copy engine loads, warpgroup matrix instructions, copy engine stores.

Warps of a CTA (384 or 512 threads):
  warpgroup 0, warp 0     load: fills the stages of A and B
               warp 1     scheduler: publishes tiles
               warps 2, 3 leave at once
  warpgroups 1, 2 (and 3) math and epilogue, each for 64 of the tile's rows, on its own: while one is in its epilogue the others have the matrix unit.
                          Where nothing of what it would make is stored, it only hands the stages back.

Of the widest tile, math warps keep the last slabs of what they converted in registers and store one with every block of the next tile, behind the matrix
unit's back: all of D of 16 bits, half of 32. Narrower tiles have too little to multiply per block for that: they store at once.

Of a swapped tile, the matrix unit makes D^T = B A^T: each math warpgroup has 64 of the tile's columns, and all of its rows, which may be few.

Of a split tile, which is swapped too, a cluster's CTAs contract a share each, add their sums up (`exchange.py`), and store as many rows each.

Any other cluster is one CTA, or a pair that shares an operand: each CTA brings one half of it for both, and both halves of the other operand for itself. What is shared
is B where the pair's tiles are stacked, A where they lie side by side (`scheduler.py`), as the tile says.

Pipelines: stages of A and B. Full: bytes of the copies. Empty: one arrival by every math warp of the cluster.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, pipeline, utils
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.utils import hopper_helpers

from . import epilogue, exchange, operands, scheduler
from .forward import Forward
from .kernel import GroupedKernel
from .scheduler import RING_STAGES
from .wgrad import Wgrad

WARPGROUP = 128
SLAB_ROWS = 64
LOAD_WARP = 0
SCHEDULER_WARP = 1
# Math warpgroups of a CTA -> registers of a thread that loads, and of one of theirs.
REGISTERS = {2: (40, 232), 3: (32, 160)}
DEFERRED_COLUMNS = 256
DEFERRED_SLABS = 4  # of 16 registers each: no more are free


class Hopper(GroupedKernel):
    unit_rows = SLAB_ROWS  # of the matrix unit, that a group of threads stages

    def __init__(self, variant):
        self.swapped = variant.tile.swapped
        self.cuts_loads = self.swapped
        self.ctas = variant.tile.cluster_m
        self.split = variant.tile.split
        # By a math warpgroup, of its accumulators.
        self.stored_rows = variant.tile.m // self.split if self.swapped else SLAB_ROWS
        self.math_warpgroups = (variant.tile.n if self.swapped else variant.tile.m) // SLAB_ROWS
        super().__init__(
            variant,
            threads=WARPGROUP * (1 + self.math_warpgroups),
            slab_rows=self.stored_rows,
            slab_groups=self.math_warpgroups,
            # Three have each other to hide behind, and need the memory for stages.
            slab_stages=2 if self.math_warpgroups == 2 else 1,
            stage_bytes=2 * variant.tile.k * (variant.tile.m + variant.tile.n),
            tile_readers=1 + 4 * self.math_warpgroups,
            other_bytes=self.math_warpgroups * (self.split - 1) * SLAB_ROWS * self.stored_rows * 4,
        )
        # Of the columns, as many as are multiplied where the last ones of D are no more: half, in whole swizzle atoms.
        self.narrow = None if self.swapped else -(-self.tile.n // 128) * 64
        self.defers = self.tile.n == DEFERRED_COLUMNS
        self.at_once = self.num_slabs("d") - (DEFERRED_SLABS if self.defers else 0)

    def operand_boxes(self):
        """What one CTA brings of A and of B by one copy: of a pair half of a stage, cut along its outer dimension in memory."""

        def box(major, rows):
            return (self.tile.k, rows // self.ctas) if major == "k" else (64, self.tile.k // self.ctas)

        return box(self.a_major, self.tile.m), box(self.b_major, self.tile.n)

    @cute.jit
    def launch(self, a_tensor, b_tensor, d_tensor, c_tensor, problem: operands.Problem, clusters: Int32, stream):
        tile = self.tile
        tile_mnk = (tile.m, tile.n, tile.k)
        layouts = {"k": utils.LayoutEnum.ROW_MAJOR, "mn": utils.LayoutEnum.COL_MAJOR}
        s_layout_a = hopper_helpers.make_smem_layout_a(layouts[self.a_major], tile_mnk, BFloat16, self.stages)
        s_layout_b = hopper_helpers.make_smem_layout_b(layouts[self.b_major], tile_mnk, BFloat16, self.stages)
        s_layout_d, s_layout_c = self._slab_layout("d"), self._slab_layout("c")

        atom_a, m_a = self._load_atom(a_tensor, s_layout_a, (tile.m, tile.k))
        atom_b, m_b = self._load_atom(b_tensor, s_layout_b, (tile.n, tile.k))
        atom_d, m_d = self.store_atom("d", self.seen(d_tensor), s_layout_d)
        atom_c, m_c = self.store_atom("c", self.seen(c_tensor), s_layout_c)

        bias_type, d_dtype = self.bias_storage(), self.outputs["d"]

        @cute.struct
        class Storage:
            stage_barriers: cute.struct.MemRange[cutlass.Int64, 2 * self.stages]
            scheduler: scheduler.Storage
            bias: bias_type
            a: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(s_layout_a)], 1024]
            b: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(s_layout_b)], 1024]
            slabs: cute.struct.Align[cute.struct.MemRange[d_dtype, cute.cosize(s_layout_d)], 1024]

        self.storage, self.shared_bytes = Storage, Storage.size_in_bytes()
        if cutlass.const_expr(self.split > 1):
            self.exchange_storage = exchange.storage(cute.size(self.exchange_layout()), self.math_warpgroups)
            self.shared_bytes += self.exchange_storage.size_in_bytes()
        self.kernel(
            atom_a, m_a, atom_b, m_b, atom_d, m_d, atom_c, m_c, problem, s_layout_a, s_layout_b, s_layout_d, s_layout_c
        ).launch(**self.launch_options(clusters, self.shared_bytes, stream))  # fmt: skip

    def _slab_layout(self, output):
        """Slabs of D or C, all stages of all math warpgroups: the same bytes for both."""
        if output not in self.outputs:
            return None
        return hopper_helpers.make_smem_layout_epi(
            self.outputs[output],
            self.d_major,
            self.staged(output),
            self.math_warpgroups * self.slab_stages * self.buffer_step(output),
        )

    def exchange_layout(self):
        size = SLAB_ROWS * self.stored_rows // WARPGROUP
        return exchange.layout(self.split, size, self.math_warpgroups)

    def _tiled_mma(self, columns):
        """One warpgroup: 64 rows and so many of the tile's columns, or 64 columns and so many rows."""
        modes = {"k": warpgroup.OperandMajorMode.K, "mn": warpgroup.OperandMajorMode.MN}
        majors = (modes[self.a_major], modes[self.b_major])
        return hopper_helpers.make_trivial_tiled_mma(
            BFloat16,
            BFloat16,
            *(reversed(majors) if self.swapped else majors),
            Float32,
            (1, 1, 1),
            tiler_mn=(SLAB_ROWS, columns),
        )

    def _load_atom(self, tensor, s_layout, box):
        op = cpasync.CopyBulkTensorTileG2SOp() if self.ctas == 1 else cpasync.CopyBulkTensorTileG2SMulticastOp()
        return cpasync.make_tiled_tma_atom(
            op, tensor, cute.slice_(s_layout, (None, None, 0)), box, num_multicast=self.ctas
        )

    @cute.kernel
    def kernel(
        self,
        atom_a: cute.CopyAtom,
        m_a: cute.Tensor,
        atom_b: cute.CopyAtom,
        m_b: cute.Tensor,
        atom_d: cute.CopyAtom,
        m_d: cute.Tensor,
        atom_c: cute.CopyAtom | None,
        m_c: cute.Tensor | None,
        problem: operands.Problem,
        s_layout_a: cute.ComposedLayout,
        s_layout_b: cute.ComposedLayout,
        s_layout_d: cute.ComposedLayout,
        s_layout_c: cute.ComposedLayout | None,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == LOAD_WARP:
            cpasync.prefetch_descriptor(atom_a)
            cpasync.prefetch_descriptor(atom_b)
            cpasync.prefetch_descriptor(atom_d)
            if cutlass.const_expr(atom_c is not None):
                cpasync.prefetch_descriptor(atom_c)

        memory = utils.SmemAllocator()
        storage = memory.allocate(self.storage)
        stages = pipeline.PipelineTmaAsync.create(
            barrier_storage=storage.stage_barriers.data_ptr(),
            num_stages=self.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, self.ctas * 4 * self.math_warpgroups),
            tx_count=self.stage_bytes,
            cta_layout_vmnk=cute.make_layout((1, self.ctas, 1, 1)),
            defer_sync=True,
        )
        ring = self.scheduler.make_ring(storage.scheduler, warp)
        exchange_barriers = s_sums = None
        if cutlass.const_expr(self.split > 1):
            exchanged = memory.allocate(self.exchange_storage)
            exchange_barriers, s_sums = exchanged.barriers.data_ptr(), exchanged.sums.get_tensor(self.exchange_layout())
            if warp == 0:
                with cute.arch.elect_one():
                    exchange.Exchange.init_barriers(exchange_barriers, self.split, self.math_warpgroups)
        cluster_mn = (self.cluster_size, 1)
        pipeline.pipeline_init_arrive(cluster_shape_mn=cluster_mn, is_relaxed=True)
        s_a = storage.a.get_tensor(s_layout_a.outer, swizzle=s_layout_a.inner)
        s_b = storage.b.get_tensor(s_layout_b.outer, swizzle=s_layout_b.inner)
        s_d = storage.slabs.get_tensor(s_layout_d.outer, swizzle=s_layout_d.inner)
        s_c = None
        if cutlass.const_expr(atom_c is not None):
            s_c = storage.slabs.get_tensor(s_layout_c.outer, swizzle=s_layout_c.inner, dtype=self.outputs["c"])
        s_bias = storage.bias.get_tensor(self.bias_layout())
        pipeline.pipeline_init_wait(cluster_shape_mn=cluster_mn)

        warpgroup_index = cute.arch.make_warp_uniform(tidx // WARPGROUP)
        if warpgroup_index == 0:
            cute.arch.setmaxregister_decrease(REGISTERS[self.math_warpgroups][0])
            if warp == SCHEDULER_WARP:
                self.scheduler.publish_tiles(ring, problem)
            if warp == LOAD_WARP:
                self.load(stages, ring, atom_a, m_a, s_a, atom_b, m_b, s_b, problem)
        else:
            cute.arch.setmaxregister_increase(REGISTERS[self.math_warpgroups][1])
            self.compute(
                stages, ring, s_a, s_b, s_bias, atom_d, m_d, s_d, atom_c, m_c, s_c,
                problem, warpgroup_index - 1, tidx % WARPGROUP, exchange_barriers, s_sums,
            )  # fmt: skip

    @cute.jit
    def load(self, stages, ring, atom_a, m_a, s_a, atom_b, m_b, s_b, problem):
        """The load warp: for every tile, what this CTA brings of every stage of A and B."""
        tile = self.tile
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        ring_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, RING_STAGES)
        expert, _, begin, end, row, col, beside = self.scheduler.read_tile(ring, ring_state, keep=True)
        while expert >= 0:
            first, num_blocks = self.share(self.num_blocks(problem, expert, begin, end))
            if self.without_blocks(num_blocks):
                self.scheduler.give_back(ring, ring_state)
            else:
                map_b, map_expert = self.expert_map(problem, expert)
                last_blocks = cutlass.max(num_blocks - self.stages, 0)
                for block in cutlass.range(num_blocks, unroll=1):
                    if block == last_blocks:
                        self.scheduler.give_back(ring, ring_state)
                    g_a = self.block_of_a(problem, m_a, tile.m, begin, end, row, first + block)
                    g_b = self.block_of_b(m_b, tile.n, begin, end, col, map_expert, first + block)
                    stages.producer_acquire(state)
                    barrier = stages.producer_get_barrier(state)
                    self.bring(atom_a, g_a, s_a, None, state.index, barrier, beside != 0)
                    self.bring(atom_b, g_b, s_b, map_b, state.index, barrier, beside == 0)
                    state.advance()
            ring_state.advance()
            expert, _, begin, end, row, col, beside = self.scheduler.read_tile(ring, ring_state, keep=True)
        self.scheduler.give_back(ring, ring_state)
        stages.producer_tail(state)

    @cute.jit
    def share(self, num_blocks):
        """(first, count): of a tile's blocks, those that this CTA contracts."""
        first = Int32(0)
        if cutlass.const_expr(self.split > 1):
            rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
            most = cute.ceil_div(num_blocks, self.split)
            first = cutlass.min(rank * most, num_blocks)
            num_blocks = cutlass.min(most, num_blocks - first)
        return first, num_blocks

    @cute.jit
    def bring(self, atom, g_block, s_stages, tensor_map, stage, barrier, shared):
        """A block of one operand to a stage. Of a pair, shared: this CTA's half, for both CTAs; else both halves, for itself."""
        if cutlass.const_expr(self.ctas == 1):
            self.copy(atom, g_block, s_stages, tensor_map, stage, barrier, 0, 0)
        else:
            rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
            half, mask = Int32(0), Int32(1) << rank
            if shared:
                half, mask = rank, Int32(3)
            self.copy(atom, g_block, s_stages, tensor_map, stage, barrier, half, mask)
            if not shared:
                self.copy(atom, g_block, s_stages, tensor_map, stage, barrier, 1, mask)

    @cute.jit
    def copy(self, atom, g_block, s_stages, tensor_map, stage, barrier, part, mask):
        """One part of a block, as many as CTAs, to the CTAs of the mask."""
        s_part, g_part = cpasync.tma_partition(
            atom, part, cute.make_layout(self.ctas), cute.group_modes(s_stages, 0, 2), cute.group_modes(g_block, 0, 2)
        )
        cute.copy(
            atom, g_part, s_part[None, stage],
            tma_bar_ptr=barrier, mcast_mask=cutlass.Int16(mask), tma_desc_ptr=tensor_map,
        )  # fmt: skip

    @cute.jit
    def compute(
        self, stages, ring, s_a, s_b, s_bias, atom_d, m_d, s_d, atom_c, m_c, s_c,
        problem, wg, thread, exchange_barriers, s_sums,
    ):  # fmt: skip
        """A math warpgroup: accumulates rows [64 wg, 64 wg + 64) of the tile, or these columns, then scales, converts and stores them."""
        warp = cute.arch.make_warp_uniform(thread // 32)
        if cutlass.const_expr(self.swapped):
            s_a, s_b = s_b, s_a
        columns = self.tile.m if cutlass.const_expr(self.swapped) else self.tile.n
        tiled_mma = self._tiled_mma(columns)
        s_a_wg = cute.local_tile(s_a, (SLAB_ROWS, self.tile.k, self.stages), (wg, 0, 0))
        acc = cute.make_rmem_tensor(tiled_mma.partition_shape_C((SLAB_ROWS, columns)), Float32)
        acc.fill(0.0)

        barrier = pipeline.NamedBarrier(barrier_id=1 + wg, num_threads=WARPGROUP)
        bias = epilogue.BiasTile(s_bias[None, wg], thread, barrier)
        stored_mma = tiled_mma
        if cutlass.const_expr(self.split > 1):
            stored_mma = self._tiled_mma(self.stored_rows)
            among_ctas = exchange.Exchange(
                self.split, exchange_barriers + 2 * wg, exchange_barriers + 2 * wg + 1,
                s_sums[None, None, None, None, wg], thread, barrier,
            )  # fmt: skip
        exchanges = Int32(0)  # so far
        slabs_d = self.slab_store("d", atom_d, m_d, s_d, problem.d_type, stored_mma, wg, thread, barrier)
        if cutlass.const_expr(s_c is not None):
            slabs_c = self.slab_store("c", atom_c, m_c, s_c, problem.c_type, stored_mma, wg, thread, barrier)

        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        release = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        ring_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, RING_STAGES)
        stage_d = Int32(0)
        # The last slabs of the tile before, in words; which of them is stored next; where.
        pending = cute.make_rmem_tensor(16 * DEFERRED_SLABS if self.defers else 1, Int32)
        pending_slab = Int32(self.num_slabs("d"))
        pending_place = (Int32(0), Int32(0), Int32(0), Int32(0))
        expert, group, begin, end, row, col, _ = self.scheduler.read_tile(ring, ring_state)
        ring_state.advance()
        more = cutlass.Boolean(True) if cutlass.const_expr(self.defers) else expert >= 0
        while more:
            if cutlass.const_expr(self.defers):
                # One turn more than tiles, with none: flushing after the loop instead makes the compiler spill.
                more = expert >= 0
                if not more:
                    expert = problem.l
            if cutlass.const_expr(self.has_bias):
                bias_bits = bias.fetch(problem, expert, group, col)
            all_blocks = self.num_blocks(problem, expert, begin, end)
            _, num_blocks = self.share(all_blocks)
            if self.stores_nothing(problem, end, row, col, wg):
                for _ in cutlass.range(num_blocks, unroll=1):
                    stages.consumer_wait(state)
                    # No matrix instruction holds the lanes together: one that had not seen this stage when it is handed back might miss it.
                    cute.arch.sync_warp()
                    stages.consumer_release(state)
                    state.advance()
                    release.advance()
                all_blocks = num_blocks = Int32(0)
            blocks = (stages, s_a_wg, s_b, acc, num_blocks, state, release)
            deferred = (slabs_d, pending, pending_slab, stage_d, pending_place)
            if cutlass.const_expr(self.narrow is None):
                state, release, pending_slab, stage_d = self.multiply(columns, thread, *blocks, *deferred)
            else:
                if self.scheduler.result_cols(problem) - col <= self.narrow:
                    state, release, pending_slab, stage_d = self.multiply(self.narrow, thread, *blocks, *deferred)
                else:
                    state, release, pending_slab, stage_d = self.multiply(columns, thread, *blocks, *deferred)
            # While the last block is multiplied: the factors, and the next tile.
            if cutlass.const_expr(self.swapped):
                col += wg * SLAB_ROWS
                if cutlass.const_expr(self.split > 1):
                    row += cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()) * self.stored_rows
            else:
                row += wg * SLAB_ROWS
            if cutlass.const_expr(self.scaling is not None):
                a = epilogue.load_scale(problem.alpha, group, all_blocks > 0)
                if cutlass.const_expr(self.scaling == "rows"):
                    row_end = end if all_blocks > 0 else Int32(0)
                    factors = tuple(
                        epilogue.row_factors(problem, row + self.row_of(i, thread), row_end) for i in self.row_indices()
                    )
            place = (expert, row, end, col)
            if more:
                expert, group, begin, end, row, col, _ = self.scheduler.read_tile(ring, ring_state)
                ring_state.advance()
            warpgroup.wait_group(0)
            if num_blocks > 0:
                stages.consumer_release(release)
                release.advance()
            if cutlass.const_expr(self.defers):
                if pending_slab < self.num_slabs("d"):
                    stage_d = self.flush(slabs_d, pending, pending_slab, stage_d, pending_place)
            if num_blocks == 0:
                acc.fill(0.0)
            sums = acc
            if cutlass.const_expr(self.split > 1):
                sums = cute.make_rmem_tensor(stored_mma.partition_shape_C((SLAB_ROWS, self.stored_rows)), Float32)
                sums.fill(0.0)
                if all_blocks > 0:
                    among_ctas.sum(acc, sums, exchanges)
                    exchanges += 1

            if cutlass.const_expr(self.has_bias):
                bias.store(bias_bits, problem.bias_type)
            if cutlass.const_expr(self.scaling == "rows"):
                self.scale(sums, a, factors, bias.s_bias, wg, thread)
            elif cutlass.const_expr(self.scaling == "alpha"):
                for i in cutlass.range_constexpr(cute.size(sums)):
                    sums[i] = sums[i] * a
            if cutlass.const_expr(s_c is not None):
                if more:
                    stage_d = self.store("c", slabs_c, sums, self.num_slabs("c"), stage_d, place)
                for i in cutlass.range_constexpr(cute.size(sums)):
                    sums[i] = sums[i] * factors[self.row_index(i)][2]
            if cutlass.const_expr(self.defers):
                if cutlass.const_expr(self.at_once > 0):
                    if more:
                        stage_d = self.store("d", slabs_d, sums, self.at_once, stage_d, place)
                self.convert(slabs_d, sums, pending, problem.d_type)
                pending_slab = Int32(self.at_once)
                pending_place = place
            else:
                stage_d = self.store("d", slabs_d, sums, self.at_once, stage_d, place)
                more = expert >= 0
        if warp == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        if cutlass.const_expr(self.split > 1):
            among_ctas.finish(exchanges)

    @cute.jit
    def multiply(
        self, columns: cutlass.Constexpr, thread, stages, s_a, s_b, acc, num_blocks, state, release,
        slabs_d, pending, pending_slab, stage_d, pending_place,
    ):  # fmt: skip
        """All blocks of a tile, of its first columns; meanwhile stores what is pending. The last stage is still to be handed back."""
        tiled_mma = self._tiled_mma(columns)
        thr_mma = tiled_mma.get_slice(thread)
        s_b = cute.local_tile(s_b, (columns, self.tile.k, self.stages), (0, 0, 0))
        r_a = tiled_mma.make_fragment_A(thr_mma.partition_A(s_a))
        r_b = tiled_mma.make_fragment_B(thr_mma.partition_B(s_b))
        shape = tiled_mma.partition_shape_C((SLAB_ROWS, columns))
        acc = cute.make_tensor(acc.iterator, tiled_mma.make_fragment_C(shape).layout)
        for i in cutlass.range(num_blocks, unroll=1):
            stages.consumer_wait(state)
            warpgroup.fence()
            for block in cutlass.range_constexpr(cute.size(r_a, mode=[2])):
                tiled_mma.set(warpgroup.Field.ACCUMULATE, i > 0 if block == 0 else True)
                at = (None, None, block, state.index)
                cute.gemm(tiled_mma, acc, r_a[at], r_b[at], acc)
            warpgroup.commit_group()
            state.advance()
            warpgroup.wait_group(1)
            if i > 0:
                stages.consumer_release(release)
                release.advance()
            if cutlass.const_expr(self.defers):
                for slab in cutlass.range_constexpr(self.at_once, self.num_slabs("d")):
                    if pending_slab == slab:
                        stage_d = self.store_pending(slabs_d, pending, slab, stage_d, pending_place)
                pending_slab += 1
        return state, release, pending_slab, stage_d

    def slab_store(self, output, atom, m, s_slabs, type_code, tiled_mma, wg, thread, barrier):
        """How a math warpgroup stores C or D."""
        dtype = self.outputs[output]
        # The layout of accumulators over threads is that of the matrix store, whatever the type.
        matrix_store = hopper_helpers.get_smem_store_op(self.d_major, Float16, Float32)
        copy_atom = hopper_helpers.get_smem_store_op(self.d_major, dtype, Float32)
        tiled_copy = cute.make_tiled_copy_S(copy_atom, cute.make_tiled_copy_C_atom(matrix_store, tiled_mma))
        step = self.buffer_step(output)
        s_wg = cute.local_tile(s_slabs, (*self.staged(output), self.slab_stages * step), (0, 0, wg))
        thr_s = tiled_copy.get_slice(thread).partition_D(s_wg)
        warp = cute.arch.make_warp_uniform(thread // 32)
        return epilogue.SlabStore(atom, m, type_code, s_wg, thr_s, tiled_copy, warp, barrier, self.slab_stages, step)

    @staticmethod
    def slab_of(slabs, acc, slab):
        """This thread's accumulators of a slab, in the order in which they are stored."""
        r_acc = slabs.tiled_copy.retile(acc)
        r_slab = cute.make_rmem_tensor(slabs.thr_s[None, None, None, 0].shape, Float32)
        for i in range(cute.size(r_slab)):
            r_slab[i] = r_acc[slab * cute.size(r_slab) + i]
        return r_slab

    def place_slab(self, output, place, slab):
        expert, row, end, col = place
        if self.swapped:
            x, col, y = self.place(expert, row, end, col, self.stored_rows)
            return col, x, y
        return self.place(expert, row, end, col + slab * self.slab(output)[1], SLAB_ROWS)

    @cute.jit
    def store(self, output: cutlass.Constexpr, slabs, acc, count: cutlass.Constexpr, stage, place):
        """The first slabs of a warpgroup's rows; the stage after the last."""
        for slab in cutlass.range_constexpr(count):
            slabs.store(self.slab_of(slabs, acc, slab), stage, self.place_slab(output, place, slab))
            stage = (stage + 1) % self.slab_stages
        return stage

    @cute.jit
    def convert(self, slabs, acc, pending, type_code):
        """The last slabs' accumulators to D's type, into words: as 16-bit elements each would have a register of its own."""
        for slab in cutlass.range_constexpr(self.at_once, self.num_slabs("d")):
            r_d = epilogue.convert(self.slab_of(slabs, acc, slab), self.outputs["d"], type_code)
            words = cute.recast_tensor(r_d, Int32)
            for i in cutlass.range_constexpr(cute.size(words)):
                word = words[i]
                if cutlass.const_expr(self.outputs["d"].width == 32):
                    # Not converted: else it and the accumulator are one value, and the next tile's matrix instructions, which
                    # overwrite only the latter, wait for each other.
                    word = cute.arch.inline_ptx(
                        "mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[word]
                    )
                pending[(slab - self.at_once) * cute.size(words) + i] = word

    @cute.jit
    def store_pending(self, slabs, pending, slab: cutlass.Constexpr, stage, place):
        """One slab of what `convert` made; the stage after it."""
        r_d = cute.make_rmem_tensor(slabs.thr_s[None, None, None, 0].shape, self.outputs["d"])
        words = cute.recast_tensor(r_d, Int32)
        for i in cutlass.range_constexpr(cute.size(words)):
            words[i] = pending[(slab - self.at_once) * cute.size(words) + i]
        slabs.stage(r_d, stage, self.place_slab("d", place, slab))
        return (stage + 1) % self.slab_stages

    @cute.jit
    def flush(self, slabs, pending, first, stage, place):
        """The slabs of what `convert` made from `first` on; the stage after the last."""
        for slab in cutlass.range_constexpr(self.at_once, self.num_slabs("d")):
            if slab >= first:
                stage = self.store_pending(slabs, pending, slab, stage, place)
        return stage

    @cute.jit
    def stores_nothing(self, problem, end, row, col, wg):
        """Nothing of a math warpgroup's part of a tile is stored: its rows are past the group's end (of weight gradients, past N), or its columns past the last."""
        if cutlass.const_expr(self.swapped):
            col += wg * SLAB_ROWS
        else:
            row += wg * SLAB_ROWS
        return row >= self.rows_end(problem, end) or col >= self.scheduler.result_cols(problem)

    # Where a thread's accumulators lie. The matrix unit's row of accumulator i is 16 warp + lane / 4 + 8 (i / 2 % 2) of the
    # warpgroup's, its column 8 (i / 4) + 2 (lane % 4) + i % 2.

    def row_index(self, i):
        """Which of a thread's rows of D accumulator i is in."""
        return i // 4 * 2 + i % 2 if self.swapped else i // 2 % 2

    def row_indices(self):
        return range(self.stored_rows // 4 if self.swapped else 2)

    def row_of(self, index, thread):
        lane = thread % 32
        if self.swapped:
            return index // 2 * 8 + lane % 4 * 2 + index % 2
        return thread // 32 * 16 + lane // 4 + index * 8

    def column_of(self, i, wg, thread):
        """Of the tile, accumulator i's."""
        lane = thread % 32
        if self.swapped:
            return wg * SLAB_ROWS + thread // 32 * 16 + lane // 4 + i // 2 % 2 * 8
        return i // 4 * 8 + lane % 4 * 2 + i % 2

    @cute.jit
    def scale(self, acc, a, factors, s_bias, wg, thread):
        """From A B^T to what is stored first: C, or D where C is not."""
        for i in cutlass.range_constexpr(cute.size(acc)):
            prob, of_bias, _ = factors[self.row_index(i)]
            if cutlass.const_expr(self.has_bias):
                acc[i] = acc[i] * a + of_bias * s_bias[self.column_of(i, wg, thread)]
            else:
                acc[i] = acc[i] * (a * prob)


class GroupedGemm(Hopper, Forward):
    """Forward and dgrad."""


class GroupedWgrad(Hopper, Wgrad):
    """Weight gradients."""
