"""Grouping: which rows of which expert a cluster works on next.

Shared by every architecture. One warp of each CTA, the scheduler warp, walks the group offsets and publishes work tiles
through a small ring in shared memory; all other warps only read tiles.

Groups. Group g is expert g's, or that of the call's list of experts. A group whose expert does not exist has rows, but no weights and no weight gradient.

Tiles. `RaggedRows`: tiles of the result's rows, of every group, and after the last group of a pseudo-group of the rows at or past the last offset; those of
rows without an expert have no contraction and so store zeros. `RaggedContraction`: tiles of the whole result of every group that has an expert.

Pairs. The two CTAs of a cluster have their tiles stacked. Where the last rows of a group are no more than one tile's, a pair that can turn has them side by
side instead: no CTA is without rows. The two CTAs of Blackwell's matrix instruction cannot.

Order. Groups in order; inside a group, bands of BAND cluster rows; inside a band, cluster rows fastest: clusters that run at the same time then
share few row panels of A and few column panels of B in L2. A turned row comes with the last band, after every two of its columns.

Schedule. The first tile of a cluster is that of its own index. Static: then every C-th, where C is the number of clusters. Dynamic, where the call has
a counter: then whichever the counter, shared by all clusters, says is next. The first CTA of a cluster asks it and tells the others. It does so no earlier than
all warps of its CTA have given the tile before back, which the load warp does when it has few blocks left to bring: no cluster holds a tile that another could
do sooner, and tiles of one group, which share what is in L2, begin at about the same time.

Any int32 offsets are safe: every end is clamped to [previous end, M].
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, pipeline

LANES = 32
BAND = 8
RING_STAGES = 3
# A published tile: (expert, group, first row of the contraction or of the tile, end of the group's rows, and of the tile in the
# result, first row, first column, whether the pair's tiles lie side by side).
TILE_WORDS = 7
NO_MORE_TILES = -1
CLAIM_BYTES = 4


@cute.struct
class Storage:
    """Shared memory of a CTA's scheduler."""

    ring_barriers: cute.struct.MemRange[cutlass.Int64, 2 * RING_STAGES]
    told: cutlass.Int64
    heard: cutlass.Int64
    tiles: cute.struct.Align[cute.struct.MemRange[Int32, TILE_WORDS * RING_STAGES], 16]
    claim: Int32


@dataclass(frozen=True)
class Ring:
    """Tiles on their way to a CTA's warps, and in a cluster of several CTAs claims on their way to each.

    pipe. Full: one arrival, by the scheduler warp. Empty: one per warp that reads tiles.
    told, in every CTA. Full when the first CTA of the cluster has written `claim`: its bytes, and one arrival of the CTA itself.
    heard, used in the first CTA. Full when every CTA of the cluster has read its claim: one arrival each.
    """

    pipe: pipeline.PipelineAsync
    s_tiles: cute.Tensor  # (TILE_WORDS, RING_STAGES)
    told: cute.Pointer
    heard: cute.Pointer
    claim: cute.Pointer


class TileScheduler:
    """What a group's tiles are, a subclass says: `result_rows` of a group, and where a tile of it lies, `place`."""

    def __init__(self, tile, num_consumer_warps):
        self.tile = tile
        self.cluster_size = tile.cluster_size
        self.cluster_rows = tile.m * tile.cluster_m
        self.num_consumer_warps = num_consumer_warps

    def make_ring(self, storage, warp):
        """Before the CTA's or cluster's barriers are made visible to all."""
        ring = Ring(
            pipeline.PipelineAsync.create(
                num_stages=RING_STAGES,
                producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 1),
                consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, self.num_consumer_warps),
                barrier_storage=storage.ring_barriers.data_ptr(),
                defer_sync=True,
            ),
            storage.tiles.get_tensor(cute.make_layout((TILE_WORDS, RING_STAGES))),
            storage.told.ptr,
            storage.heard.ptr,
            storage.claim.ptr,
        )
        self._init_barriers(ring, warp)
        return ring

    @cute.jit
    def _init_barriers(self, ring, warp: Int32):
        if cutlass.const_expr(self.cluster_size > 1):
            if warp == 0:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_init(ring.told, 1)
                    cute.arch.mbarrier_init(ring.heard, self.cluster_size)

    @cute.jit
    def publish_tiles(self, ring: Ring, problem):
        """The scheduler warp's whole work. Lane i of the walk holds group chunk + i."""
        lane = cute.arch.lane_idx()
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        place = rank if cutlass.const_expr(self.tile.split == 1) else 0  # of the CTA's tile among the cluster's
        num_cols = cute.ceil_div(self.result_cols(problem), self.tile.n)
        g_offsets = cute.make_tensor(problem.offsets, cute.make_layout(problem.groups))

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

        dynamic = problem.counter.toint() != 0
        claims = Int32(0)  # so far
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, RING_STAGES)
        more = cutlass.Boolean(True)
        while more:
            # Past the last group: one of the rows past them.
            while index >= last_tiles_end and chunk + LANES <= problem.groups:
                chunk += LANES
                end = problem.m
                if chunk + lane < problem.groups:
                    end = cutlass.min(g_offsets[chunk + lane], problem.m)
                end = cutlass.max(end, last_end)
                for shift in cutlass.range_constexpr(5):
                    other = cute.arch.shuffle_sync_up(end, 1 << shift)
                    if lane >= 1 << shift:
                        end = cutlass.max(end, other)
                begin = cute.arch.shuffle_sync_up(end, 1)
                if lane == 0:
                    begin = last_end
                last_end = cute.arch.shuffle_sync(end, LANES - 1)

                stacked, turned = self.cluster_rows_of(problem, chunk + lane, begin, end)
                tiles_end = stacked * num_cols + turned * cute.ceil_div(num_cols, 2)
                for shift in cutlass.range_constexpr(5):
                    other = cute.arch.shuffle_sync_up(tiles_end, 1 << shift)
                    if lane >= 1 << shift:
                        tiles_end += other
                tiles_end += last_tiles_end
                last_tiles_end = cute.arch.shuffle_sync(tiles_end, LANES - 1)

            more = index < last_tiles_end
            expert, group = Int32(NO_MORE_TILES), Int32(0)
            group_begin, group_end = Int32(0), Int32(0)
            row, col, beside = Int32(0), Int32(0), Int32(0)
            if more:
                owner = cute.arch.popc(cute.arch.vote_ballot_sync(tiles_end <= index))
                group = chunk + owner
                expert = self.expert_of(problem, group)
                group_begin = cute.arch.shuffle_sync(begin, owner)
                group_end = cute.arch.shuffle_sync(end, owner)
                num_rows, turned = self.cluster_rows_of(problem, group, group_begin, group_end)
                local = index - cute.arch.shuffle_sync(tiles_end, owner)
                local += num_rows * num_cols + turned * cute.ceil_div(num_cols, 2)

                band = cutlass.min(local // (BAND * num_cols), cutlass.max(num_rows - 1, 0) // BAND)
                local -= band * (BAND * num_cols)
                band_rows = cutlass.min(num_rows - band * BAND, BAND)
                if num_rows > (band + 1) * BAND:
                    turned = Int32(0)
                # Two columns of the band, and what is turned.
                pair = local // (2 * band_rows + turned)
                local -= pair * (2 * band_rows + turned)
                if turned != 0 and local >= band_rows * cutlass.min(num_cols - 2 * pair, 2):
                    row = num_rows * self.cluster_rows
                    col = (2 * pair + rank) * self.tile.n
                    beside = Int32(1)
                else:
                    column = local // band_rows
                    row = (band * BAND + local - column * band_rows) * self.cluster_rows + place * self.tile.m
                    col = (2 * pair + column) * self.tile.n

            ring.pipe.producer_acquire(state)
            # The first lane's tile starts the entry's next round. A lane that had not begun to wait for this one would miss it, and wait for ever.
            cute.arch.sync_warp()
            if lane == 0:
                for i, word in enumerate(self.place(expert, group, group_begin, group_end, row, col)):
                    ring.s_tiles[i, state.index] = word
                ring.s_tiles[TILE_WORDS - 1, state.index] = beside
                ring.pipe.producer_commit(state)
            if dynamic:
                if more:
                    # The tile has been given back by all when its entry may be written again: the other phase of its barrier.
                    ring.pipe.sync_object_empty.wait(state.index, state.phase ^ 1)
                    index = num_clusters + self.claim(ring, problem.counter, rank, claims)
                    claims += 1
            else:
                index += num_clusters
            state.advance()
        if cutlass.const_expr(self.cluster_size > 1):
            # The others' last arrivals come to the first CTA's memory: it must still be there.
            if rank == 0 and claims > 0:
                cute.arch.mbarrier_wait(ring.heard, claims - 1 & 1)

    @cute.jit
    def claim(self, ring: Ring, counter: cute.Pointer, rank: Int32, claims: Int32):
        """The next value of the counter, the same one in all CTAs of the cluster. `claims`: how many came before."""
        lane = cute.arch.lane_idx()
        value = Int32(0)
        if rank == 0:
            if lane == 0:
                value = cute.arch.atomic_add(counter.llvm_ptr, Int32(1), sem="relaxed", scope="gpu")
            value = cute.arch.shuffle_sync(value, 0)
        if cutlass.const_expr(self.cluster_size > 1):
            if rank == 0:
                if claims > 0:
                    cute.arch.mbarrier_wait(ring.heard, claims - 1 & 1)
                if lane < self.cluster_size:
                    cute.arch.store_async_dsmem(ring.claim, value, ring.told, lane)
            if lane == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(ring.told, CLAIM_BYTES)
            cute.arch.mbarrier_wait(ring.told, claims & 1)
            value = cute.make_tensor(ring.claim, cute.make_layout(1))[0]
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive(ring.heard, 0)
        return value

    @cute.jit
    def cluster_rows_of(self, problem, group: Int32, begin: Int32, end: Int32):
        """(stacked, turned): of a group's tiles; at most one is turned."""
        rows = self.result_rows(problem, group, begin, end)
        turned = Int32(0)
        if cutlass.const_expr(self.tile.turns):
            stacked = (rows + self.tile.m - 1) // self.cluster_rows
            if rows > stacked * self.cluster_rows:
                turned = Int32(1)
        else:
            stacked = cute.ceil_div(rows, self.cluster_rows)
        return stacked, turned

    @cute.jit
    def expert_of(self, problem, group: Int32):
        """problem.l: none."""
        expert = problem.l
        if group < problem.groups:
            expert = group
            if problem.experts.toint() != 0:
                expert = cute.make_tensor(problem.experts, cute.make_layout(problem.groups))[group]
                if expert < 0 or expert >= problem.l:
                    expert = problem.l
        return expert

    @cute.jit
    def read_tile(self, ring: Ring, state, keep: cutlass.Constexpr = False):
        """The words of the next tile, for one consumer warp; expert < 0 after the last. keep: `give_back` is left to the caller. So is to advance `state`."""
        ring.pipe.consumer_wait(state)
        words = [ring.s_tiles[i, state.index] for i in range(TILE_WORDS)]
        cute.arch.sync_warp()
        if cutlass.const_expr(not keep):
            self.give_back(ring, state)
        return tuple(cute.arch.make_warp_uniform(word) for word in words)

    @cute.jit
    def give_back(self, ring: Ring, state):
        """The entry of a tile that the warp has read."""
        if cute.arch.lane_idx() == 0:
            ring.pipe.consumer_release(state)


class RaggedRows(TileScheduler):
    """Forward and dgrad: the groups' rows are the result's. A tile's `begin` is its own first row, in A as in the result."""

    def result_cols(self, problem):
        return problem.n

    def result_rows(self, problem, group, begin, end):
        return end - begin

    def place(self, expert, group, begin, end, row, col):
        return expert, group, begin + row, end, begin + row, col


class RaggedContraction(TileScheduler):
    """Weight gradients: the groups' rows are contracted, and every group with an expert has a whole result.

    accumulate: adds to the result, so that a group without rows has nothing to do.
    """

    def __init__(self, tile, num_consumer_warps, accumulate):
        super().__init__(tile, num_consumer_warps)
        self.accumulate = accumulate

    def result_cols(self, problem):
        return problem.k

    @cute.jit
    def result_rows(self, problem, group: Int32, begin: Int32, end: Int32):
        rows = Int32(0)
        if group < problem.groups and self.expert_of(problem, group) < problem.l:
            rows = problem.n
        if cutlass.const_expr(self.accumulate):
            if begin == end:
                rows = Int32(0)
        return rows

    def place(self, expert, group, begin, end, row, col):
        return expert, group, begin, end, row, col
