"""Forward grouped GEMM for Hopper: copy engine loads, warpgroup matrix instructions, copy engine stores.

Warps of a CTA (384 threads):
  warpgroup 0, warp 0   load: fills the stages of A and B
               warp 1   scheduler: publishes tiles
               warps 2, 3 leave at once
  warpgroups 1, 2       math and epilogue, each for half of the tile's rows, on its own: while one is in its epilogue the other has the matrix unit

Pipelines: stages of A and B. Full: bytes of the copies. Empty: one arrival by every math warp of every CTA that the stage's copies read or feed.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, pipeline, utils
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.utils import hopper_helpers

from . import epilogue, operands, tensor_maps
from .forward import ForwardKernel
from .scheduler import RING_STAGES

WARPGROUP = 128
MATH_WARPGROUPS = 2
SLAB_ROWS = 64
LOAD_WARP = 0
SCHEDULER_WARP = 1
LOAD_REGISTERS = 40
MATH_REGISTERS = 232


class GroupedGemm(ForwardKernel):
    def __init__(self, variant):
        super().__init__(
            variant,
            threads=WARPGROUP * (1 + MATH_WARPGROUPS),
            slab_rows=SLAB_ROWS,
            slab_groups=MATH_WARPGROUPS,
            stage_bytes=2 * variant.tile.k * (variant.tile.m + variant.tile.n),
            tile_readers=1 + 4 * MATH_WARPGROUPS,
        )

    def boxes(self):
        """Box of each tensor map, innermost dimension first: what one CTA brings or stores by one copy."""
        tile = self.tile
        # CTAs of a cluster column bring a part each of B's stage, cut along its outer dimension in memory.
        if self.variant.b_major == "k":
            box_b = (tile.k, tile.n // tile.cluster_m, 1)
        else:
            box_b = (64, tile.k // tile.cluster_m, 1)
        return {"MAP_A": (tile.k, tile.m // tile.cluster_n), "MAP_B": box_b, "MAP_D": (self.slab[1], self.slab[0], 1)}

    @cute.jit
    def launch(self, a_tensor, b_tensor, d_tensor, problem: operands.Problem, clusters: Int32, stream):
        tile, variant = self.tile, self.variant
        tile_mnk = (tile.m, tile.n, tile.k)
        b_layout = utils.LayoutEnum.ROW_MAJOR if variant.b_major == "k" else utils.LayoutEnum.COL_MAJOR
        s_layout_a = hopper_helpers.make_smem_layout_a(utils.LayoutEnum.ROW_MAJOR, tile_mnk, BFloat16, self.stages)
        s_layout_b = hopper_helpers.make_smem_layout_b(b_layout, tile_mnk, BFloat16, self.stages)
        s_layout_d = hopper_helpers.make_smem_layout_epi(
            self.d_dtype, utils.LayoutEnum.ROW_MAJOR, self.slab, MATH_WARPGROUPS * epilogue.SLAB_STAGES
        )

        atom_a, m_a = self._load_atom(a_tensor, s_layout_a, (tile.m, tile.k), tile.cluster_n)
        atom_b, m_b = self._load_atom(b_tensor, s_layout_b, (tile.n, tile.k), tile.cluster_m)
        atom_d, m_d = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(), d_tensor, cute.slice_(s_layout_d, (None, None, 0)), self.slab
        )

        barriers_type, tiles_type = self.scheduler.storage()

        @cute.struct
        class Storage:
            stage_barriers: cute.struct.MemRange[cutlass.Int64, 2 * self.stages]
            ring_barriers: barriers_type
            ring_tiles: tiles_type
            a: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(s_layout_a)], 1024]
            b: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(s_layout_b)], 1024]
            d: cute.struct.Align[cute.struct.MemRange[self.d_dtype, cute.cosize(s_layout_d)], 1024]

        self.storage, self.shared_bytes = Storage, Storage.size_in_bytes()
        self.kernel(
            atom_a, m_a, atom_b, m_b, atom_d, m_d, problem, s_layout_a, s_layout_b, s_layout_d
        ).launch(**self.launch_options(clusters, self.shared_bytes, stream))  # fmt: skip

    def _tiled_mma(self):
        """One warpgroup, 64 rows and the tile's columns."""
        k_major, mn_major = warpgroup.OperandMajorMode.K, warpgroup.OperandMajorMode.MN
        b_mode = k_major if self.variant.b_major == "k" else mn_major
        return hopper_helpers.make_trivial_tiled_mma(
            BFloat16, BFloat16, k_major, b_mode, Float32, (1, 1, 1), tiler_mn=(SLAB_ROWS, self.tile.n)
        )

    @staticmethod
    def _load_atom(tensor, s_layout, box, multicast):
        op = cpasync.CopyBulkTensorTileG2SOp() if multicast == 1 else cpasync.CopyBulkTensorTileG2SMulticastOp()
        return cpasync.make_tiled_tma_atom(
            op, tensor, cute.slice_(s_layout, (None, None, 0)), box, num_multicast=multicast
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
        problem: operands.Problem,
        s_layout_a: cute.ComposedLayout,
        s_layout_b: cute.ComposedLayout,
        s_layout_d: cute.ComposedLayout,
    ):
        tile = self.tile
        tidx, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == LOAD_WARP:
            cpasync.prefetch_descriptor(atom_a)
            cpasync.prefetch_descriptor(atom_b)
            cpasync.prefetch_descriptor(atom_d)

        storage = utils.SmemAllocator().allocate(self.storage)
        cta_layout = cute.make_layout((tile.cluster_m, tile.cluster_n, 1))
        stages = pipeline.PipelineTmaAsync.create(
            barrier_storage=storage.stage_barriers.data_ptr(),
            num_stages=self.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(
                pipeline.Agent.Thread, (tile.cluster_m + tile.cluster_n - 1) * 4 * MATH_WARPGROUPS
            ),
            tx_count=self.stage_bytes,
            cta_layout_vmnk=cute.make_layout((1, *cta_layout.shape)),
            defer_sync=True,
        )
        ring, s_tiles = self.scheduler.make_ring(storage.ring_barriers.data_ptr(), storage.ring_tiles.data_ptr())
        cluster_mn = (tile.cluster_m, tile.cluster_n)
        pipeline.pipeline_init_arrive(cluster_shape_mn=cluster_mn, is_relaxed=True)
        s_a = storage.a.get_tensor(s_layout_a.outer, swizzle=s_layout_a.inner)
        s_b = storage.b.get_tensor(s_layout_b.outer, swizzle=s_layout_b.inner)
        s_d = storage.d.get_tensor(s_layout_d.outer, swizzle=s_layout_d.inner)
        pipeline.pipeline_init_wait(cluster_shape_mn=cluster_mn)

        k_tiles = cute.ceil_div(problem.k, tile.k)
        warpgroup_index = cute.arch.make_warp_uniform(tidx // WARPGROUP)
        if warpgroup_index == 0:
            cute.arch.setmaxregister_decrease(LOAD_REGISTERS)
            if warp == SCHEDULER_WARP:
                self.scheduler.publish_tiles(ring, s_tiles, problem)
            if warp == LOAD_WARP:
                self.load(stages, ring, s_tiles, atom_a, m_a, s_a, atom_b, m_b, s_b, problem, cta_layout, k_tiles)
        else:
            cute.arch.setmaxregister_increase(MATH_REGISTERS)
            self.compute(
                stages, ring, s_tiles, s_a, s_b, s_d, atom_d, m_d,
                problem, warpgroup_index - 1, tidx % WARPGROUP, k_tiles,
            )  # fmt: skip

    @cute.jit
    def load(self, stages, ring, s_tiles, atom_a, m_a, s_a, atom_b, m_b, s_b, problem, cta_layout, k_tiles):
        """The load warp: for every tile, every stage's part of A and B that this CTA brings (for its whole row or column of the cluster)."""
        tile = self.tile
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        coord = cta_layout.get_flat_coord(rank)
        mask_a = cute.make_layout_image_mask(cta_layout, coord, mode=1) if tile.cluster_n > 1 else 0
        mask_b = cute.make_layout_image_mask(cta_layout, coord, mode=0) if tile.cluster_m > 1 else 0

        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        ring_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, RING_STAGES)
        expert, row, _, col = self.scheduler.read_tile(ring, s_tiles, ring_state)
        ring_state.advance()
        while expert >= 0:
            if expert < problem.l:
                g_a = cute.local_tile(cute.domain_offset((row, 0), m_a), (tile.m, tile.k), (0, None))
                part_s_a, part_g_a = cpasync.tma_partition(
                    atom_a, coord[1], cute.make_layout(tile.cluster_n),
                    cute.group_modes(s_a, 0, 2), cute.group_modes(g_a, 0, 2),
                )  # fmt: skip
                # Of one stacked array the expert is a coordinate; else every expert has a map of its own.
                map_b, map_expert = None, expert
                if cutlass.const_expr(self.variant.weights == "pointers"):
                    map_b, map_expert = tensor_maps.pointer_to_map(problem.maps, expert), 0
                    cpasync.fence_tma_desc_acquire(map_b)
                g_b = cute.local_tile(cute.domain_offset((col, 0, map_expert), m_b), (tile.n, tile.k), (0, None, 0))
                part_s_b, part_g_b = cpasync.tma_partition(
                    atom_b, coord[0], cute.make_layout(tile.cluster_m),
                    cute.group_modes(s_b, 0, 2), cute.group_modes(g_b, 0, 2),
                )  # fmt: skip
                for k_tile in cutlass.range(k_tiles, unroll=1):
                    stages.producer_acquire(state)
                    barrier = stages.producer_get_barrier(state)
                    cute.copy(
                        atom_a, part_g_a[None, k_tile], part_s_a[None, state.index],
                        tma_bar_ptr=barrier, mcast_mask=mask_a,
                    )  # fmt: skip
                    cute.copy(
                        atom_b, part_g_b[None, k_tile], part_s_b[None, state.index],
                        tma_bar_ptr=barrier, mcast_mask=mask_b, tma_desc_ptr=map_b,
                    )  # fmt: skip
                    state.advance()
            expert, row, _, col = self.scheduler.read_tile(ring, s_tiles, ring_state)
            ring_state.advance()
        stages.producer_tail(state)

    @cute.jit
    def compute(self, stages, ring, s_tiles, s_a, s_b, s_d, atom_d, m_d, problem, half, thread, k_tiles):
        """A math warpgroup: accumulates rows [64 half, 64 half + 64) of the tile, then scales, converts and stores them."""
        warp = cute.arch.make_warp_uniform(thread // 32)
        tiled_mma = self._tiled_mma()
        thr_mma = tiled_mma.get_slice(thread)
        s_a_half = cute.local_tile(s_a, (SLAB_ROWS, self.tile.k, self.stages), (half, 0, 0))
        r_a = tiled_mma.make_fragment_A(thr_mma.partition_A(s_a_half))
        r_b = tiled_mma.make_fragment_B(thr_mma.partition_B(s_b))
        acc = cute.make_rmem_tensor(tiled_mma.partition_shape_C((SLAB_ROWS, self.tile.n)), Float32)

        # The layout of accumulators over threads is that of the matrix store, whatever the type.
        matrix_store = hopper_helpers.get_smem_store_op(utils.LayoutEnum.ROW_MAJOR, Float16, Float32)
        copy_atom = hopper_helpers.get_smem_store_op(utils.LayoutEnum.ROW_MAJOR, self.d_dtype, Float32)
        tiled_copy = cute.make_tiled_copy_S(copy_atom, cute.make_tiled_copy_C_atom(matrix_store, tiled_mma))
        s_half = cute.local_tile(s_d, (*self.slab, epilogue.SLAB_STAGES), (0, 0, half))
        slabs = epilogue.SlabStore(
            atom_d, m_d, s_half, tiled_copy.get_slice(thread).partition_D(s_half), tiled_copy, warp,
            pipeline.NamedBarrier(barrier_id=1 + half, num_threads=WARPGROUP),
        )  # fmt: skip
        r_acc = tiled_copy.retile(acc)

        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        release = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        ring_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, RING_STAGES)
        stage_d = Int32(0)
        expert, row, row_end, col = self.scheduler.read_tile(ring, s_tiles, ring_state)
        ring_state.advance()
        while expert >= 0:
            # For every tile, not only for those without contraction: in a branch, this spills (docs/architecture.md).
            acc.fill(0.0)
            tile_k_tiles = k_tiles if expert < problem.l else 0
            for k_tile in cutlass.range(tile_k_tiles, unroll=1):
                stages.consumer_wait(state)
                warpgroup.fence()
                for block in cutlass.range_constexpr(cute.size(r_a, mode=[2])):
                    tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
                    at = (None, None, block, state.index)
                    cute.gemm(tiled_mma, acc, r_a[at], r_b[at], acc)
                warpgroup.commit_group()
                state.advance()
                warpgroup.wait_group(1)
                if k_tile > 0:
                    stages.consumer_release(release)
                    release.advance()
            warpgroup.wait_group(0)
            if tile_k_tiles > 0:
                stages.consumer_release(release)
                release.advance()

            slab_row = row + half * SLAB_ROWS
            if cutlass.const_expr(self.variant.scaled):
                self.scale(acc, problem, expert, slab_row, row_end, warp)
            for slab in cutlass.range_constexpr(self.num_slabs):
                r_slab = cute.make_rmem_tensor(slabs.thr_s[None, None, None, 0].shape, Float32)
                for i in cutlass.range_constexpr(cute.size(r_slab)):
                    r_slab[i] = r_acc[slab * cute.size(r_slab) + i]
                slabs.store(r_slab, stage_d, slab_row, row_end, col + slab * self.slab[1])
                stage_d = (stage_d + 1) % epilogue.SLAB_STAGES
            expert, row, row_end, col = self.scheduler.read_tile(ring, s_tiles, ring_state)
            ring_state.advance()
        if warp == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def scale(self, acc, problem, expert, slab_row, row_end, warp):
        """acc *= alpha[expert], then *= prob[row]: a thread holds two rows, 8 apart."""
        a = epilogue.load_scale(problem.alpha, expert, expert < problem.l)
        row = slab_row + warp * 16 + cute.arch.lane_idx() // 4
        for pair in cutlass.range_constexpr(2):
            p = epilogue.load_scale(problem.prob, row + 8 * pair, expert < problem.l and row + 8 * pair < row_end)
            for i in cutlass.range_constexpr(cute.size(acc)):
                if cutlass.const_expr(i // 2 % 2 == pair):
                    acc[i] = acc[i] * a * p
