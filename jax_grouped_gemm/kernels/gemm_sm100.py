"""Grouped GEMM for Blackwell: copy engine loads, tcgen05 matrix instructions, accumulators in tensor memory.

Warps of a CTA (224 threads):
  warps 0 to 3   epilogue: tensor memory -> registers -> shared memory -> D
  warp 4         math: issues the matrix instructions (two-CTA: only in the pair's leader, for both)
  warp 5         load: fills the stages of A and B
  warp 6         scheduler: publishes tiles

Of a swapped tile, the matrix unit makes D^T = B A^T: its 128 rows are the tile's columns, its columns the tile's rows, which may be few.

Pipelines:
  stages of A and B. Full: bytes of the copies (two-CTA: of both CTAs, at the leader's barrier). Empty: one arrival by the commit that follows the stage's
  matrix instructions.
  accumulators, two in tensor memory, so that the epilogue of a tile overlaps the math of the next. Full: one arrival by the commit after a tile's last
  matrix instruction. Empty: one by every epilogue warp (two-CTA: of both CTAs).
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, memory, pipeline, utils
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.utils import blackwell_helpers, hopper_helpers

from . import epilogue, operands, scheduler
from .forward import Forward
from .kernel import GroupedKernel
from .scheduler import RING_STAGES
from .wgrad import Wgrad

EPILOGUE_WARPS = 4
EPILOGUE_THREADS = 32 * EPILOGUE_WARPS
MATH_WARP = 4
LOAD_WARP = 5
SCHEDULER_WARP = 6
ACCUMULATORS = 2
UNIT_ROWS = 128  # of the matrix unit, one CTA's
SLAB_BARRIER, TENSOR_MEMORY_BARRIER = 1, 2


def order_after_wait():
    """Tensor memory instructions of this thread come after the barrier wait that it has passed."""
    cute.arch.inline_ptx("tcgen05.fence::after_thread_sync;")


def order_before_arrive():
    """Tensor memory instructions of this thread come before the barrier arrival that follows."""
    cute.arch.inline_ptx("tcgen05.fence::before_thread_sync;")


class Blackwell(GroupedKernel):
    unit_rows = UNIT_ROWS

    def __init__(self, variant):
        tile = variant.tile
        self.pair = 2 if tile.two_cta else 1  # CTAs that execute a matrix instruction together
        self.mma_tile = (tile.n, tile.m, tile.k) if tile.swapped else (tile.m * self.pair, tile.n, tile.k)
        super().__init__(
            variant,
            threads=32 * (SCHEDULER_WARP + 1),
            slab_rows=tile.m,
            slab_groups=1,
            slab_stages=2,
            stage_bytes=2 * tile.k * (tile.m + tile.n // self.pair),
            tile_readers=2 + EPILOGUE_WARPS,
        )

    def operand_boxes(self):
        """What one CTA brings of A and of B by one copy."""
        tile = self.tile

        def box(major, rows):
            return (tile.k, rows) if major == "k" else (64, tile.k)

        return box(self.a_major, tile.m), box(self.b_major, tile.n // self.pair)

    @cute.jit
    def launch(self, a_tensor, b_tensor, d_tensor, c_tensor, problem: operands.Problem, clusters: Int32, stream):
        tile = self.tile
        tiled_mma = self._tiled_mma()
        cta_layout = self._cta_layout(tiled_mma)
        s_layout_first = blackwell_helpers.make_smem_layout_a(tiled_mma, self.mma_tile, BFloat16, self.stages)
        s_layout_second = blackwell_helpers.make_smem_layout_b(tiled_mma, self.mma_tile, BFloat16, self.stages)
        s_layout_a, s_layout_b = self.in_order(s_layout_first, s_layout_second)
        first, second = self.in_order(a_tensor, b_tensor)
        s_layout_d, s_layout_c = self._slab_layout("d"), self._slab_layout("c")

        cluster = tile.cluster_shape_mn
        load_first = cute.nvgpu.make_tiled_tma_atom_A(
            blackwell_helpers.cluster_shape_to_tma_atom_A(cluster, tiled_mma.thr_id),
            first,
            cute.slice_(s_layout_first, (None, None, None, 0)),
            self.mma_tile,
            tiled_mma,
            cta_layout.shape,
        )
        load_second = cute.nvgpu.make_tiled_tma_atom_B(
            blackwell_helpers.cluster_shape_to_tma_atom_B(cluster, tiled_mma.thr_id),
            second,
            cute.slice_(s_layout_second, (None, None, None, 0)),
            self.mma_tile,
            tiled_mma,
            cta_layout.shape,
        )
        (atom_a, m_a), (atom_b, m_b) = self.in_order(load_first, load_second)
        atom_d, m_d = self.store_atom("d", self.seen(d_tensor), s_layout_d)
        atom_c, m_c = self.store_atom("c", self.seen(c_tensor), s_layout_c)

        bias_type, d_dtype = self.bias_storage(), self.outputs["d"]

        @cute.struct
        class Storage:
            stage_barriers: cute.struct.MemRange[cutlass.Int64, 2 * self.stages]
            accumulator_barriers: cute.struct.MemRange[cutlass.Int64, 2 * ACCUMULATORS]
            free_barrier: cutlass.Int64
            tensor_memory: Int32
            scheduler: scheduler.Storage
            bias: bias_type
            a: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(s_layout_a.outer)], 1024]
            b: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(s_layout_b.outer)], 1024]
            slabs: cute.struct.Align[cute.struct.MemRange[d_dtype, cute.cosize(s_layout_d.outer)], 1024]

        self.storage, self.shared_bytes = Storage, Storage.size_in_bytes()
        self.kernel(
            atom_a, m_a, atom_b, m_b, atom_d, m_d, atom_c, m_c, problem, s_layout_a, s_layout_b, s_layout_d, s_layout_c
        ).launch(**self.launch_options(clusters, self.shared_bytes, stream))  # fmt: skip

    def _slab_layout(self, output):
        """Slabs of D or C: the same bytes for both."""
        if output not in self.outputs:
            return None
        # Hopper's: of FP32 with columns first, Blackwell's has a swizzle that the copy engine cannot store.
        return hopper_helpers.make_smem_layout_epi(
            self.outputs[output], self.d_major, self.staged(output), self.slab_stages * self.buffer_step(output)
        )

    def _tiled_mma(self):
        modes = {"k": tcgen05.OperandMajorMode.K, "mn": tcgen05.OperandMajorMode.MN}
        return blackwell_helpers.make_trivial_tiled_mma(
            BFloat16,
            *self.in_order(modes[self.a_major], modes[self.b_major]),
            Float32,
            tcgen05.CtaGroup.TWO if self.tile.two_cta else tcgen05.CtaGroup.ONE,
            self.mma_tile[:2],
        )

    def in_order(self, a, b):
        """As the matrix unit takes what belongs to A and to B, and back."""
        return (b, a) if self.tile.swapped else (a, b)

    def _cta_layout(self, tiled_mma):
        """CTAs of a cluster: (of a pair, pairs along M, along N, along K)."""
        cluster = cute.make_layout((self.tile.cluster_m, 1, 1))
        return cute.tiled_divide(cluster, (tiled_mma.thr_id.shape,))

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
        tile = self.tile
        tidx, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == LOAD_WARP:
            cpasync.prefetch_descriptor(atom_a)
            cpasync.prefetch_descriptor(atom_b)
            cpasync.prefetch_descriptor(atom_d)
            if cutlass.const_expr(atom_c is not None):
                cpasync.prefetch_descriptor(atom_c)

        tiled_mma = self._tiled_mma()
        cta_layout = self._cta_layout(tiled_mma)
        storage = utils.SmemAllocator().allocate(self.storage)
        one_thread = pipeline.CooperativeGroup(pipeline.Agent.Thread)
        stages = pipeline.PipelineTmaUmma.create(
            barrier_storage=storage.stage_barriers.data_ptr(),
            num_stages=self.stages,
            producer_group=one_thread,
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, tile.cluster_m // self.pair),
            tx_count=self.stage_bytes * self.pair,
            cta_layout_vmnk=cta_layout,
            defer_sync=True,
        )
        accumulators = pipeline.PipelineUmmaAsync.create(
            barrier_storage=storage.accumulator_barriers.data_ptr(),
            num_stages=ACCUMULATORS,
            producer_group=one_thread,
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, EPILOGUE_WARPS * self.pair),
            cta_layout_vmnk=cta_layout,
            defer_sync=True,
        )
        ring = self.scheduler.make_ring(storage.scheduler, warp)
        tensor_memory = memory.TmemAllocator(
            storage.tensor_memory.ptr,
            barrier_for_retrieve=pipeline.NamedBarrier(
                barrier_id=TENSOR_MEMORY_BARRIER, num_threads=EPILOGUE_THREADS + 32
            ),
            allocator_warp_id=0,
            is_two_cta=tile.two_cta,
            two_cta_tmem_dealloc_mbar_ptr=storage.free_barrier.ptr,
        )
        pipeline.pipeline_init_arrive(cluster_shape_mn=cta_layout, is_relaxed=True)
        s_a = storage.a.get_tensor(s_layout_a.outer, swizzle=s_layout_a.inner)
        s_b = storage.b.get_tensor(s_layout_b.outer, swizzle=s_layout_b.inner)
        s_d = storage.slabs.get_tensor(s_layout_d.outer, swizzle=s_layout_d.inner)
        s_c = None
        if cutlass.const_expr(atom_c is not None):
            s_c = storage.slabs.get_tensor(s_layout_c.outer, swizzle=s_layout_c.inner, dtype=self.outputs["c"])
        s_bias = storage.bias.get_tensor(self.bias_layout())
        acc_shape = tiled_mma.partition_shape_C(self.mma_tile[:2])
        acc_layout = tiled_mma.make_fragment_C(cute.append(acc_shape, ACCUMULATORS)).layout
        pipeline.pipeline_init_wait(cluster_shape_mn=cta_layout)

        if warp == SCHEDULER_WARP:
            self.scheduler.publish_tiles(ring, problem)
        if warp == LOAD_WARP:
            self.load(stages, ring, tiled_mma, atom_a, m_a, s_a, atom_b, m_b, s_b, problem, cta_layout)
        if warp == MATH_WARP:
            tensor_memory.wait_for_alloc()
            acc = cute.make_tensor(tensor_memory.retrieve_ptr(Float32), acc_layout)
            self.compute(stages, accumulators, ring, tiled_mma, s_a, s_b, acc, problem)
        if warp < EPILOGUE_WARPS:
            tensor_memory.allocate(ACCUMULATORS * self.mma_tile[1])
            tensor_memory.wait_for_alloc()
            base = tensor_memory.retrieve_ptr(Float32)
            acc = cute.make_tensor(base, acc_layout)
            self.finish(accumulators, ring, acc, s_bias, atom_d, m_d, s_d, atom_c, m_c, s_c, problem, tidx, warp)
            # Every warp's last load of tensor memory came before a barrier of its last slab: it may go.
            tensor_memory.relinquish_alloc_permit()
            tensor_memory.free(base)

    @cute.jit
    def load(self, stages, ring, tiled_mma, atom_a, m_a, s_a, atom_b, m_b, s_b, problem, cta_layout):
        """The load warp: for every tile, this CTA's part of every stage of A and B."""
        tile = self.tile
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        coord = cta_layout.get_flat_coord(rank)
        mask_a = cpasync.create_tma_multicast_mask(cta_layout, coord, mcast_mode=2)
        mask_b = cpasync.create_tma_multicast_mask(cta_layout, coord, mcast_mode=1)
        thr_mma = tiled_mma.get_slice(coord[0])

        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        ring_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, RING_STAGES)
        expert, _, begin, end, row, col, _ = self.scheduler.read_tile(ring, ring_state, keep=True)
        while expert >= 0:
            num_blocks = self.num_blocks(problem, expert, begin, end)
            if self.without_blocks(num_blocks):
                self.scheduler.give_back(ring, ring_state)
            else:
                # A pair's tile begins at that of its first CTA.
                pair_row = row - coord[0] * tile.m
                map_b, map_expert = self.expert_map(problem, expert)
                last_blocks = cutlass.max(num_blocks - self.stages, 0)
                for block in cutlass.range(num_blocks, unroll=1):
                    if block == last_blocks:
                        self.scheduler.give_back(ring, ring_state)
                    partition_a, partition_b = self.in_order(thr_mma.partition_A, thr_mma.partition_B)
                    g_a = partition_a(self.block_of_a(problem, m_a, tile.m * self.pair, begin, end, pair_row, block))
                    g_b = partition_b(self.block_of_b(m_b, tile.n, begin, end, col, map_expert, block))
                    part_s_a, part_g_a = self.part(atom_a, g_a, s_a, cta_layout, coord, 2)
                    part_s_b, part_g_b = self.part(atom_b, g_b, s_b, cta_layout, coord, 1)
                    stages.producer_acquire(state)
                    barrier = stages.producer_get_barrier(state)
                    cute.copy(
                        atom_a, part_g_a, part_s_a[None, state.index], tma_bar_ptr=barrier, mcast_mask=mask_a
                    )  # fmt: skip
                    cute.copy(
                        atom_b, part_g_b, part_s_b[None, state.index],
                        tma_bar_ptr=barrier, mcast_mask=mask_b, tma_desc_ptr=map_b,
                    )  # fmt: skip
                    state.advance()
            ring_state.advance()
            expert, _, begin, end, row, col, _ = self.scheduler.read_tile(ring, ring_state, keep=True)
        self.scheduler.give_back(ring, ring_state)
        stages.producer_tail(state)

    @staticmethod
    def part(atom, g_block, s_stages, cta_layout, coord, mode):
        """One CTA's part of a block and of the stages, shared along a mode of the cluster."""
        ctas = cute.make_layout(cute.size(cta_layout, mode=[mode]))
        return cpasync.tma_partition(
            atom, coord[mode], ctas, cute.group_modes(s_stages, 0, 3), cute.group_modes(g_block, 0, 3)
        )

    @cute.jit
    def compute(self, stages, accumulators, ring, tiled_mma, s_a, s_b, acc, problem):
        """The math warp. A pair's other CTA only keeps step with the tiles."""
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        leader = rank % self.pair == 0
        s_first, s_second = self.in_order(s_a, s_b)
        r_a = tiled_mma.make_fragment_A(s_first)
        r_b = tiled_mma.make_fragment_B(s_second)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        acc_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, ACCUMULATORS)
        ring_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, RING_STAGES)
        expert, _, begin, end, _, _, _ = self.scheduler.read_tile(ring, ring_state)
        ring_state.advance()
        while expert >= 0:
            num_blocks = self.num_blocks(problem, expert, begin, end)
            if num_blocks > 0:
                if leader:
                    accumulators.producer_acquire(acc_state)
                    order_after_wait()
                    tile_acc = acc[None, None, None, acc_state.index]
                    tiled_mma.set(tcgen05.Field.ACCUMULATE, False)
                    for _ in cutlass.range(num_blocks, unroll=1):
                        stages.consumer_wait(state)
                        for block in cutlass.range_constexpr(cute.size(r_a, mode=[2])):
                            at = (None, None, block, state.index)
                            cute.gemm(tiled_mma, tile_acc, r_a[at], r_b[at], tile_acc)
                            tiled_mma.set(tcgen05.Field.ACCUMULATE, True)
                        stages.consumer_release(state)
                        state.advance()
                    accumulators.producer_commit(acc_state)
                acc_state.advance()
            expert, _, begin, end, _, _, _ = self.scheduler.read_tile(ring, ring_state)
            ring_state.advance()
        accumulators.producer_tail(acc_state)

    @cute.jit
    def finish(self, accumulators, ring, acc, s_bias, atom_d, m_d, s_d, atom_c, m_c, s_c, problem, thread, warp):
        """The epilogue warps: thread t holds row t of a slab; scales, converts and stores it."""
        barrier = pipeline.NamedBarrier(barrier_id=SLAB_BARRIER, num_threads=EPILOGUE_THREADS)
        bias = epilogue.BiasTile(s_bias[None, 0], thread, barrier)
        # (rows of this CTA, columns, accumulator)
        t_acc = utils.gemm.sm100.transform_partitioned_tensor_layout(acc)
        slabs_d = self.slab_store("d", atom_d, m_d, s_d, problem.d_type, t_acc, thread, warp, barrier)
        if cutlass.const_expr(s_c is not None):
            slabs_c = self.slab_store("c", atom_c, m_c, s_c, problem.c_type, t_acc, thread, warp, barrier)

        acc_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, ACCUMULATORS)
        ring_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, RING_STAGES)
        stage_d = Int32(0)
        expert, group, begin, end, row, col, _ = self.scheduler.read_tile(ring, ring_state)
        ring_state.advance()
        while expert >= 0:
            if cutlass.const_expr(self.has_bias):
                bias.store(bias.fetch(problem, expert, group, col), problem.bias_type)
            computed = self.num_blocks(problem, expert, begin, end) > 0  # else the accumulators are not touched
            factors = ()
            if cutlass.const_expr(self.scaling is not None):
                factors = (epilogue.load_scale(problem.alpha, group, computed),)
            if cutlass.const_expr(self.scaling == "rows"):
                row_end = end if computed else Int32(0)
                rows = [row + self.row_of(i, thread) for i in self.row_indices()]
                factors = (*factors, tuple(epilogue.row_factors(problem, row, row_end) for row in rows))
            if computed:
                accumulators.consumer_wait(acc_state)
                order_after_wait()
            if cutlass.const_expr(s_c is not None):
                stage_d = self.store(
                    "c", slabs_c, accumulators, acc_state, computed, factors, s_bias, expert, row, end, col, stage_d
                )
            stage_d = self.store(
                "d", slabs_d, accumulators, acc_state, computed, factors, s_bias, expert, row, end, col, stage_d
            )
            if computed:
                acc_state.advance()
            expert, group, begin, end, row, col, _ = self.scheduler.read_tile(ring, ring_state)
            ring_state.advance()
        if warp == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    def slab_store(self, output, atom, m, s_slabs, type_code, t_acc, thread, warp, barrier):
        """(copy out of tensor memory, the accumulators as it reads them, shape of a thread's part of a slab, how slabs are stored) for C or D."""
        slabs_acc = cute.flat_divide(t_acc, self.staged(output))
        if self.tile.swapped:
            load = tcgen05.Ld16x256bOp(tcgen05.Repetition(self.tile.m // 8), tcgen05.Pack.NONE)
        else:
            load = tcgen05.Ld32x32bOp(tcgen05.Repetition(self.slab(output)[1]), tcgen05.Pack.NONE)
        load_atom = cute.make_copy_atom(load, Float32)
        tiled_load = tcgen05.make_tmem_copy(load_atom, slabs_acc[None, None, 0, 0, 0])
        thr_load = tiled_load.get_slice(thread)
        dtype = self.outputs[output]
        store_atom = blackwell_helpers.get_smem_store_op(self.d_major, dtype, Float32, tiled_load)
        tiled_copy = cute.make_tiled_copy_D(store_atom, tiled_load)
        thr_s = tiled_copy.get_slice(thread).partition_D(s_slabs)
        slabs = epilogue.SlabStore(
            atom, m, type_code, s_slabs, thr_s, tiled_copy, warp, barrier, self.slab_stages, self.buffer_step(output)
        )
        shape = thr_load.partition_D(s_slabs)[None, None, None, 0].shape
        return tiled_load, thr_load.partition_S(slabs_acc), shape, slabs

    @cute.jit
    def store(
        self,
        output: cutlass.Constexpr,
        slab_store,
        accumulators,
        acc_state,
        computed,
        factors,
        s_bias,
        expert,
        row,
        end,
        col,
        stage,
    ):
        """All slabs of C or D; the stage after the last. The accumulator is handed back after the last load of D, which is stored last."""
        tiled_load, part_acc, shape, slabs = slab_store
        columns = self.slab(output)[1]
        for slab in cutlass.range(self.num_slabs(output), unroll=1):
            r_acc = cute.make_rmem_tensor(shape, Float32)
            r_acc.fill(0.0)
            if computed:
                cute.copy(tiled_load, part_acc[None, None, None, 0, slab, acc_state.index], r_acc)
                cute.arch.fence_view_async_tmem_load()
                if cutlass.const_expr(output == "d"):
                    if slab == self.num_slabs("d") - 1:
                        order_before_arrive()
                        cute.arch.sync_warp()
                        with cute.arch.elect_one():
                            accumulators.consumer_release(acc_state)
            if cutlass.const_expr(self.scaling is not None):
                self.scale(output, r_acc, factors, s_bias, slab)
            place = self.place(expert, row, end, col + slab * columns, self.slab_rows)
            if cutlass.const_expr(self.tile.swapped):
                place = (place[1], place[0], place[2])
            slabs.store(slabs.tiled_copy.retile(r_acc), stage, place)
            stage = (stage + 1) % self.slab_stages
        return stage

    @cute.jit
    def scale(self, output: cutlass.Constexpr, r_acc, factors, s_bias, slab):
        """From A B^T to C or D."""
        if cutlass.const_expr(self.scaling == "alpha"):
            (a,) = factors
            for i in cutlass.range_constexpr(cute.size(r_acc)):
                r_acc[i] = r_acc[i] * a
        else:
            a, of_rows = factors
            if cutlass.const_expr(self.has_bias):
                r_bias = self.bias_of_thread(output, s_bias, slab)
            for i in cutlass.range_constexpr(cute.size(r_acc)):
                prob, of_bias, of_c = of_rows[self.row_index(i)]
                if cutlass.const_expr(self.has_bias):
                    r_acc[i] = r_acc[i] * a + of_bias * r_bias[self.column_index(i)]
                    if cutlass.const_expr(output == "d" and "c" in self.outputs):
                        r_acc[i] = r_acc[i] * of_c
                else:
                    r_acc[i] = r_acc[i] * a * prob

    # Where a thread's part of a slab lies: it has a row, or, of a swapped tile, what a thread of Hopper has, twice: from tensor memory, `.16x256b` brings 16
    # lanes (columns of the tile) in the order of accumulators of wgmma.

    def row_indices(self):
        return range(self.tile.m // 4 if self.tile.swapped else 1)

    def row_index(self, i):
        """Which of a thread's rows element i is in."""
        return i // 4 * 2 % (self.tile.m // 4) + i % 2 if self.tile.swapped else 0

    def row_of(self, index, thread):
        """Of the tile."""
        return index // 2 * 8 + thread % 4 * 2 + index % 2 if self.tile.swapped else thread

    def column_index(self, i):
        """Which of a thread's columns element i is in."""
        return i // (2 * self.tile.m // 4) * 2 + i // 2 % 2 if self.tile.swapped else i

    def bias_of_thread(self, output, s_bias, slab):
        """In registers, by `column_index`."""
        if self.tile.swapped:
            thread = cute.arch.thread_idx()[0]
            first = thread // 32 * 32 + thread % 32 // 4
            return [s_bias[first + 8 * index, 0] for index in range(4)]
        s_slab = cute.local_tile(s_bias[None, 0], (self.slab(output)[1],), (slab,))
        r_bias = cute.make_rmem_tensor(s_slab.shape, Float32)
        cute.autovec_copy(s_slab, r_bias)
        return r_bias


class GroupedGemm(Blackwell, Forward):
    """Forward and dgrad."""


class GroupedWgrad(Blackwell, Wgrad):
    """Weight gradients."""
