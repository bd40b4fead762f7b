"""Grouping: which rows of which expert a cluster works on next.

Shared by every architecture. One warp of each CTA, the scheduler warp, walks the group offsets and publishes work tiles
through a small ring in shared memory; all other warps only read tiles.

Order. Groups in order of expert, and after the last group a pseudo-group of the rows at or past the last offset, whose tiles have no
contraction and so store zeros. Inside a group, bands of BAND cluster rows; inside a band, cluster rows fastest: clusters that run at the same time then
share few row panels of A and few column panels of B in L2.

Any int32 offsets are safe: every end is clamped to [previous end, M].
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, pipeline

LANES = 32
BAND = 8
RING_STAGES = 3
# A published tile: (expert, first row, end of the group's rows, first column).
TILE_WORDS = 4
NO_MORE_TILES = -1


class TileScheduler:
    """Static persistent schedule: cluster c of C takes tiles c, c + C, c + 2 C, ..."""

    def __init__(self, tile, num_consumer_warps):
        self.tile = tile
        self.cluster_size = tile.cluster_m * tile.cluster_n
        self.num_consumer_warps = num_consumer_warps

    @staticmethod
    def storage():
        """Shared memory of the ring: (full and empty barriers, tiles)."""
        return (
            cute.struct.MemRange[cutlass.Int64, 2 * RING_STAGES],
            cute.struct.Align[cute.struct.MemRange[Int32, TILE_WORDS * RING_STAGES], 16],
        )

    def make_ring(self, barriers, tiles):
        """(pipeline, tiles in shared memory). Full: one arrival, by the scheduler warp. Empty: one per consumer warp."""
        ring = pipeline.PipelineAsync.create(
            num_stages=RING_STAGES,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 1),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, self.num_consumer_warps),
            barrier_storage=barriers,
            defer_sync=True,
        )
        return ring, cute.make_tensor(tiles, cute.make_layout((TILE_WORDS, RING_STAGES)))

    @cute.jit
    def publish_tiles(self, ring, s_tiles: cute.Tensor, problem):
        """The scheduler warp's whole work. Lane i of the walk holds group chunk + i."""
        m, n, l = problem.m, problem.n, problem.l
        lane = cute.arch.lane_idx()
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        rank_m = rank % self.tile.cluster_m
        rank_n = rank // self.tile.cluster_m
        cluster_rows = self.tile.m * self.tile.cluster_m
        cluster_cols = self.tile.n * self.tile.cluster_n
        num_cols = cute.ceil_div(n, cluster_cols)
        g_offsets = cute.make_tensor(problem.offsets, cute.make_layout(l))

        bidx, _, _ = cute.arch.block_idx()
        gdim, _, _ = cute.arch.grid_dim()
        index = bidx // self.cluster_size
        num_clusters = gdim // self.cluster_size

        chunk = Int32(-LANES)
        begin = Int32(0)  # this lane's group: first row,
        end = Int32(0)  # end of its rows,
        tiles_end = Int32(0)  # and index after its last tile
        last_end = Int32(0)  # end of the rows, and of the tiles, of the groups walked so far
        last_tiles_end = Int32(0)

        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, RING_STAGES)
        more = cutlass.Boolean(True)
        while more:
            # Groups 0 ... l - 1, and l for the rows past them.
            while index >= last_tiles_end and chunk + LANES <= l:
                chunk += LANES
                end = m
                if chunk + lane < l:
                    end = cutlass.min(g_offsets[chunk + lane], m)
                end = cutlass.max(end, last_end)
                for shift in cutlass.range_constexpr(5):
                    other = cute.arch.shuffle_sync_up(end, 1 << shift)
                    if lane >= 1 << shift:
                        end = cutlass.max(end, other)
                begin = cute.arch.shuffle_sync_up(end, 1)
                if lane == 0:
                    begin = last_end
                last_end = cute.arch.shuffle_sync(end, LANES - 1)

                tiles_end = cute.ceil_div(end - begin, cluster_rows) * num_cols
                for shift in cutlass.range_constexpr(5):
                    other = cute.arch.shuffle_sync_up(tiles_end, 1 << shift)
                    if lane >= 1 << shift:
                        tiles_end += other
                tiles_end += last_tiles_end
                last_tiles_end = cute.arch.shuffle_sync(tiles_end, LANES - 1)

            more = index < last_tiles_end
            expert = Int32(NO_MORE_TILES)
            row = Int32(0)
            row_end = Int32(0)
            col = Int32(0)
            if more:
                owner = cute.arch.popc(cute.arch.vote_ballot_sync(tiles_end <= index))
                row_begin = cute.arch.shuffle_sync(begin, owner)
                row_end = cute.arch.shuffle_sync(end, owner)
                num_rows = cute.ceil_div(row_end - row_begin, cluster_rows)
                local = index - (cute.arch.shuffle_sync(tiles_end, owner) - num_rows * num_cols)

                band = local // (BAND * num_cols)
                local -= band * (BAND * num_cols)
                band_rows = cutlass.min(num_rows - band * BAND, BAND)
                cluster_col = local // band_rows
                cluster_row = band * BAND + local - cluster_col * band_rows

                expert = chunk + owner
                row = row_begin + cluster_row * cluster_rows + rank_m * self.tile.m
                col = cluster_col * cluster_cols + rank_n * self.tile.n

            ring.producer_acquire(state)
            if lane == 0:
                s_tiles[0, state.index] = expert
                s_tiles[1, state.index] = row
                s_tiles[2, state.index] = row_end
                s_tiles[3, state.index] = col
                ring.producer_commit(state)
            state.advance()
            index += num_clusters

    @cute.jit
    def read_tile(self, ring, s_tiles: cute.Tensor, state):
        """(expert, row, row_end, col) of the next tile, for one consumer warp; expert < 0 after the last. The caller advances `state`."""
        ring.consumer_wait(state)
        expert = s_tiles[0, state.index]
        row = s_tiles[1, state.index]
        row_end = s_tiles[2, state.index]
        col = s_tiles[3, state.index]
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            ring.consumer_release(state)
        return (
            cute.arch.make_warp_uniform(expert),
            cute.arch.make_warp_uniform(row),
            cute.arch.make_warp_uniform(row_end),
            cute.arch.make_warp_uniform(col),
        )
