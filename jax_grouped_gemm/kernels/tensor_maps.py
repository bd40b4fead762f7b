"""Tensor maps of weights that are not one stacked array: one map per expert, in device memory.

A prologue launch writes the maps from a template (extents, strides, box, swizzle: all experts alike) and the experts' addresses; the GEMM that follows on the
stream reads them. The writer releases and the reader acquires through the tensor map proxy, which ordinary memory ordering does not cover.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.utils import TensorMapManager, TensorMapUpdateMode

BYTES = 128
WORDS = BYTES // 8
THREADS = 128
ADDRESSES = 128  # weight addresses that one launch takes by value


def pointer_to_map(maps, index):
    """The pointer that the copy engine takes, for map `index` of the array at `maps`."""
    manager = TensorMapManager(TensorMapUpdateMode.GMEM, BYTES)
    return manager.get_tensormap_ptr(maps + Int64(index) * WORDS, cute.AddressSpace.generic)


class WriteMaps:
    """maps[first + i] = the template with the address of expert first + i, for i < count; thread i of the grid writes one.

    template: the WORDS words of a tensor map, by value. from_memory: the addresses are an array in device memory; else they are parameters of the launch.
    """

    threads = THREADS
    shared_bytes = 0

    def __init__(self, from_memory):
        self.from_memory = from_memory

    def fields(self):
        """Fields of every parameter, in order."""
        addresses = [["PTR_POINTERS"]] if self.from_memory else [[f"ADDRESS_{i}"] for i in range(ADDRESSES)]
        template = [["MAP_B"]] + [[]] * (WORDS - 1)  # one field over the parameters of all its words
        return template + [["PTR_MAPS"]] + addresses + [["FIRST"], ["COUNT"]]

    @cute.jit
    def __call__(self, template, maps: cute.Pointer, addresses, first: Int32, count: Int32, stream):
        self.kernel(template, maps, addresses, first, count).launch(
            grid=(cute.ceil_div(count, THREADS), 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, template, maps: cute.Pointer, addresses, first: Int32, count: Int32):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        index = block * THREADS + thread
        if index < count:
            address = Int64(0)
            if cutlass.const_expr(self.from_memory):
                address = cute.make_tensor(addresses + first + index, cute.make_layout(1))[0]
            else:
                for i in cutlass.range_constexpr(ADDRESSES):
                    if index == i:
                        address = addresses[i]
            target = maps + Int64(first + index) * WORDS
            words = cute.make_tensor(target, cute.make_layout(WORDS))
            for i in cutlass.range_constexpr(WORDS):
                words[i] = template[i]
            cute.arch.inline_ptx(
                "tensormap.replace.tile.global_address.global.b1024.b64 [{$r0}], {$r1};",
                read_only_args=[target.toint(), address],
            )
            cpasync.fence_tma_desc_release()
