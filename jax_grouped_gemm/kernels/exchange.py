"""Sums of a tile whose contraction the CTAs of a cluster share.

Each CTA stores one part of the tile, the rank-th, and needs the others' sums of it. Parts are equal runs of a thread's accumulators: what a thread adds up
was sent by the same thread of the other CTAs, straight into this one's shared memory.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, pipeline

THREADS = 128  # that exchange together
WORDS = 4  # that one remote store moves


def layout(split, size, groups):
    """Of the others' sums in a CTA that has so many groups of threads: by word, thread, remote store, CTA, and group. size: of a thread's part."""
    return cute.make_layout((WORDS, THREADS, size // WORDS, split - 1, groups))


def storage(words, groups):
    """Shared memory of a CTA; words: in `layout`."""

    @cute.struct
    class Storage:
        barriers: cute.struct.MemRange[Int64, 2 * groups]
        sums: cute.struct.Align[cute.struct.MemRange[Float32, words], 4 * WORDS]

    return Storage


@dataclass(frozen=True)
class Exchange:
    """Of one group of threads, with the same group of every other CTA.

    full: the bytes of the others' sums, and one arrival of this group.
    empty: every other CTA has read what this one sent it; one arrival each.
    """

    split: int
    full: cute.Pointer
    empty: cute.Pointer
    s_sums: cute.Tensor  # `layout`, less its last mode
    thread: Int32
    barrier: pipeline.NamedBarrier  # of the group

    @staticmethod
    def init_barriers(barriers, split, groups):
        """By one thread, before the cluster's barriers are made visible to all."""
        for group in range(groups):
            cute.arch.mbarrier_init(barriers + 2 * group, 1)
            cute.arch.mbarrier_init(barriers + 2 * group + 1, split - 1)

    @cute.jit
    def sum(self, acc, part, count: Int32):
        """Into `part`: all CTAs' sums of what this one stores of the tile, of which `acc` has this thread's. count: of tiles before."""
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        size = cute.size(part)
        if count > 0:
            cute.arch.mbarrier_wait(self.empty, count - 1 & 1)
        if self.thread == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(self.full, 4 * cute.size(self.s_sums))
        words = cute.recast_tensor(acc, Int32)
        for cta in cutlass.range_constexpr(self.split):
            if cta == rank:
                for i in cutlass.range_constexpr(size):
                    part[i] = acc[cta * size + i]
            else:
                s_sent = self.s_sums[None, self.thread, None, (rank + self.split - cta - 1) % self.split]
                for i in cutlass.range_constexpr(size // WORDS):
                    value = tuple(words[cta * size + i * WORDS + j] for j in range(WORDS))
                    cute.arch.store_async_dsmem(s_sent[None, i].iterator, value, self.full, cta)
        cute.arch.mbarrier_wait(self.full, count & 1)
        for other in cutlass.range_constexpr(self.split - 1):
            for i in cutlass.range_constexpr(size):
                part[i] = part[i] + self.s_sums[i % WORDS, self.thread, i // WORDS, other]
        self.barrier.arrive_and_wait()
        if self.thread < self.split - 1:
            cute.arch.mbarrier_arrive(self.empty, (rank + 1 + self.thread) % self.split)

    @cute.jit
    def finish(self, count: Int32):
        """The others' last arrivals come to this CTA's memory: it must still be there. count: of tiles."""
        if count > 0:
            cute.arch.mbarrier_wait(self.empty, count - 1 & 1)
