"""Mistakes in the kernels' sources, as one could make them: compiled, run, and found."""

import os
import pathlib
import shutil
import subprocess
import sys

import device
import pytest
import sweep

import jax_grouped_gemm
from jax_grouped_gemm import config

PACKAGE = pathlib.Path(jax_grouped_gemm.__file__).parent
HOPPER = "sm90_forward_128x192x64_cluster2x1_bn_pointers_bfloat16_bias"
HOPPER_SHORT = "sm90_forward_128x128x64_cluster2x1_bn_pointers_16bit_c_float32"
HOPPER_DEFERS = "sm90_forward_128x256x64_cluster2x1_bk_dense_16bit_c_float32"
HOPPER_DEFERS_HALF = "sm90_forward_128x256x64_cluster2x1_bn_pointers_float32_bias"
HOPPER_SWAPPED = "sm90_forward_64x128x64_cluster1x1_swapped_bn_pointers_16bit_c_float32"
HOPPER_SPLIT = "sm90_forward_64x128x64_cluster1x4_swapped_bn_pointers_16bit_c_float32"
HOPPER_HALVES = "sm90_forward_64x128x64_cluster1x2_swapped_bk_dense_float32_bias"
BLACKWELL_SWAPPED = "sm100_forward_64x128x64_cluster1x1_swapped_bn_pointers_16bit_c_float32"
BLACKWELL = "sm100_forward_128x256x64_cluster2x1_pair_bk_dense_float16_scaled"
BLACKWELL_ONE = "sm100_forward_128x256x64_cluster1x1_bn_pointers_16bit_c_16bit"
WGRAD_TURNS = "sm90_wgrad_128x128x64_cluster2x1_bfloat16"
WGRAD_ADDS = "sm90_wgrad_192x192x64_cluster1x1_float32_accumulate"
WGRAD_PAIR = "sm100_wgrad_128x256x64_cluster2x1_pair_bfloat16"
WGRAD_STORES = "sm100_wgrad_128x256x64_cluster1x1_float32"

# kernel, module, what stands there (once), what is put in its place, kinds of fault that would be right
MISTAKES = {
    "lanes part before a tile is published": (
        HOPPER_SHORT,
        "scheduler",
        "and wait for ever.\n            cute.arch.sync_warp()",
        "and wait for ever.",
        {"deadlock"},
    ),
    "a tile is given back before all lanes have read it": (
        BLACKWELL,
        "scheduler",
        "for i in range(TILE_WORDS)]\n        cute.arch.sync_warp()",
        "for i in range(TILE_WORDS)]",
        {"race"},
    ),
    "a claim is overwritten before every CTA has heard it": (
        HOPPER,
        "scheduler",
        "                if claims > 0:\n                    cute.arch.mbarrier_wait(ring.heard, claims - 1 & 1)\n                if lane",
        "                if lane",
        {"race", "barrier", "deadlock"},
    ),
    "a claim is expected with the wrong size": (
        BLACKWELL,
        "scheduler",
        "(ring.told, CLAIM_BYTES)",
        "(ring.told, 2 * CLAIM_BYTES)",
        {"deadlock"},
    ),
    "ends are not clamped": (
        HOPPER,
        "scheduler",
        "end = cutlass.min(g_offsets[chunk + lane], problem.m)",
        "end = g_offsets[chunk + lane]",
        {"bounds", "result", "limit", "work", "unwritten"},
    ),
    "a slab is written while it is being stored": (
        BLACKWELL_ONE,
        "epilogue",
        "cp_async_bulk_wait_group(self.stages - 1, read=True)",
        "cp_async_bulk_wait_group(self.stages, read=True)",
        {"race"},
    ),
    "a slab is stored without the proxy fence": (
        HOPPER,
        "epilogue",
        '        cute.arch.fence_proxy("async.shared", space="cta")\n',
        "",
        {"proxy"},
    ),
    "a store is cut one row late": (
        BLACKWELL,
        "operands",
        "box_rows - (row_end - row), 0)",
        "box_rows - (row_end - row) - 1, 0)",
        {"bounds", "race", "result"},
    ),
    "a stage is released while it is still multiplied": (
        HOPPER,
        "gemm_sm90",
        "warpgroup.wait_group(1)",
        "warpgroup.wait_group(2)",
        {"race"},
    ),
    "an accumulator is handed back before its last load": (
        BLACKWELL,
        "gemm_sm100",
        'if slab == self.num_slabs("d") - 1:',
        "if slab == 0:",
        {"race"},
    ),
    "loads of an accumulator are not waited for": (
        BLACKWELL_ONE,
        "gemm_sm100",
        "                cute.arch.fence_view_async_tmem_load()\n",
        "",
        {"race"},
    ),
    "tensor memory is kept": (
        BLACKWELL_ONE,
        "gemm_sm100",
        "            tensor_memory.free(base)\n",
        "",
        {"tensor_memory"},
    ),
    "a pair's stage expects the bytes of one CTA": (
        BLACKWELL,
        "gemm_sm100",
        "tx_count=self.stage_bytes * self.pair",
        "tx_count=self.stage_bytes",
        {"race", "barrier", "deadlock", "uninitialized"},
    ),
    "a tensor map in memory is not acquired": (
        HOPPER,
        "forward",
        "        cpasync.fence_tma_desc_acquire(map_b)\n",
        "",
        {"proxy"},
    ),
    # --- groups that share experts, or have none: two problems of the sweep's forward ones. (An index past the last expert need not be looked for: who
    # compares with L finds no expert there either.)
    "the list of experts is not read": (
        HOPPER,
        "scheduler",
        "if problem.experts.toint() != 0:",
        "if problem.experts.toint() == 1:",
        {"bounds", "result"},
    ),
    "an expert before the first is taken for one": (
        BLACKWELL,
        "scheduler",
        "if expert < 0 or expert >= problem.l:",
        "if expert >= problem.l:",
        {"deadlock", "unwritten", "result", "race"},
    ),
    "rows without an expert are multiplied": (
        BLACKWELL,
        "forward",
        " if expert < problem.l else 0",
        "",
        {"result", "work", "bounds"},
    ),
    "the last row of few is not loaded": (
        HOPPER_SWAPPED,
        "forward",
        "            loaded_end = end\n",
        "            loaded_end = end - 1\n",
        {"result"},
    ),
    "rows are loaded as if more than few were none": (
        HOPPER_SWAPPED,
        "forward",
        "        loaded_end = problem.m\n",
        "        loaded_end = row + CUT_ROWS\n",
        {"result"},
    ),
    "the bias is the expert's, not the group's": (
        HOPPER,
        "gemm_sm90",
        "bias.fetch(problem, expert, group, col)",
        "bias.fetch(problem, expert, expert, col)",
        {"result"},
    ),
    "alpha is the expert's, not the group's": (
        BLACKWELL,
        "gemm_sm100",
        "epilogue.load_scale(problem.alpha, group, computed)",
        "epilogue.load_scale(problem.alpha, expert, computed)",
        {"result", "bounds"},
    ),
    # --- weight gradients
    "rows of X past a group's end are loaded": (
        WGRAD_TURNS,
        "wgrad",
        "self._block(m_a, columns, begin, end, row, block)",
        "self._block(m_a, columns, begin, end + self.tile.k, row, block)",
        {"result"},
    ),
    "rows of Y past a group's end are loaded": (
        WGRAD_PAIR,
        "wgrad",
        "self._block(m_b, columns, begin, end, col, block)",
        "self._block(m_b, columns, begin, end + self.tile.k, col, block)",
        {"result"},
    ),
    "a load is cut one row late": (
        WGRAD_ADDS,
        "operands",
        "rows = cutlass.min(row_end - row, box_rows)",
        "rows = cutlass.min(row_end - row + 1, box_rows)",
        {"result"},
    ),
    "a load does not go around": (
        WGRAD_TURNS,
        "operands",
        "return WRAP - rows, row + rows, WRAP",
        "return WRAP - rows, row + rows, WRAP - 1",
        {"bounds"},
    ),
    "the last rows of a group are left out": (
        WGRAD_PAIR,
        "wgrad",
        "cute.ceil_div(end - begin, self.tile.k)",
        "(end - begin) // self.tile.k",
        {"result", "work"},
    ),
    "begin and end are exchanged": (
        WGRAD_ADDS,
        "scheduler",
        "return expert, group, begin, end, row, col",
        "return expert, group, end, begin, row, col",
        {"result", "work", "deadlock"},
    ),
    "a result goes where the group is, not its expert": (
        WGRAD_TURNS,
        "scheduler",
        "return expert, group, begin, end, row, col",
        "return group, group, begin, end, row, col",
        {"result", "unwritten", "race", "deadlock"},
    ),
    "a result before the first is made": (
        WGRAD_PAIR,
        "scheduler",
        "if expert < 0 or expert >= problem.l:",
        "if expert >= problem.l:",
        {"deadlock", "unwritten", "result", "race"},
    ),
    "alpha of a group without rows is not zeroed": (
        WGRAD_TURNS,
        "gemm_sm90",
        "problem.alpha, group, all_blocks > 0)",
        "problem.alpha, group, all_blocks >= 0)",
        {"result"},
    ),
    "what should be added is stored": (
        WGRAD_ADDS,
        "wgrad",
        "if variant.accumulate:",
        "if not variant:",
        {"result"},
    ),
    "what should be stored is added": (
        WGRAD_STORES,
        "wgrad",
        "if variant.accumulate:",
        "if variant:",
        {"uninitialized", "result", "unwritten"},
    ),
    "groups without rows add zeros": (
        WGRAD_ADDS,
        "scheduler",
        "            if begin == end:\n                rows = Int32(0)\n",
        "            pass\n",
        {"work"},
    ),
    "groups without rows store nothing": (
        WGRAD_STORES,
        "scheduler",
        "if cutlass.const_expr(self.accumulate):",
        "if cutlass.const_expr(True):",
        {"unwritten"},
    ),
    "a band that is not full is taken for a full one": (
        WGRAD_PAIR,
        "scheduler",
        "band_rows = cutlass.min(num_rows - band * BAND, BAND)",
        "band_rows = Int32(BAND)",
        {"result", "unwritten", "work"},
    ),
    "tiles of the result are counted by the wrong extent": (
        WGRAD_ADDS,
        "scheduler",
        "        return problem.k\n",
        "        return problem.n\n",
        {"result", "unwritten", "work"},
    ),
    "a slab that waits is left out where the next tile is short": (
        HOPPER_DEFERS,
        "gemm_sm90",
        "            if slab >= first:",
        "            if slab > first:",
        {"unwritten", "result", "work"},
    ),
    "slabs that wait are stored where the next tile lies": (
        HOPPER_DEFERS,
        "gemm_sm90",
        "self.flush(slabs_d, pending, pending_slab, stage_d, pending_place)",
        "self.flush(slabs_d, pending, pending_slab, stage_d, place)",
        {"unwritten", "result", "race"},
    ),
    "slabs that do not wait are stored after the last tile too": (
        HOPPER_DEFERS_HALF,
        "gemm_sm90",
        '                    if more:\n                        stage_d = self.store("d"',
        '                    if True:\n                        stage_d = self.store("d"',
        {"work"},
    ),
    "a slab that does not wait waits too": (
        HOPPER_DEFERS_HALF,
        "gemm_sm90",
        "self.convert(slabs_d, sums, pending, problem.d_type)\n                pending_slab = Int32(self.at_once)",
        "self.convert(slabs_d, sums, pending, problem.d_type)\n                pending_slab = Int32(self.at_once + 1)",
        {"unwritten", "result", "work"},
    ),
    "the entry of a tile without blocks is kept": (
        HOPPER,
        "gemm_sm90",
        "            if self.without_blocks(num_blocks):\n                self.scheduler.give_back(ring, ring_state)\n            else:",
        "            if num_blocks > 0:",
        {"deadlock"},
    ),
    "the entry of a tile is given back twice": (
        BLACKWELL_ONE,
        "gemm_sm100",
        "if block == last_blocks:",
        "if block >= last_blocks:",
        {"barrier", "race", "deadlock"},
    ),
    # --- pairs that turn
    "a pair's tiles are loaded as if they were stacked": (
        HOPPER,
        "gemm_sm90",
        "self.bring(atom_a, g_a, s_a, None, state.index, barrier, beside != 0)",
        "self.bring(atom_a, g_a, s_a, None, state.index, barrier, beside > 1)",
        {"deadlock", "barrier", "work", "race"},
    ),
    "both CTAs bring the same half of what they share": (
        WGRAD_TURNS,
        "gemm_sm90",
        "half, mask = rank, Int32(3)",
        "half, mask = Int32(0), Int32(3)",
        {"race", "uninitialized", "result"},
    ),
    "what a pair shares is brought to one CTA": (
        HOPPER_SHORT,
        "gemm_sm90",
        "half, mask = rank, Int32(3)",
        "half, mask = rank, Int32(1) << rank",
        {"deadlock"},
    ),
    "rows of both CTAs are turned": (
        HOPPER,
        "scheduler",
        "(rows + self.tile.m - 1) // self.cluster_rows",
        "rows // self.cluster_rows",
        {"result", "unwritten", "work"},
    ),
    "a turned tile is looked for after two columns where there is one": (
        HOPPER,
        "scheduler",
        "band_rows * cutlass.min(num_cols - 2 * pair, 2)",
        "band_rows * 2",
        {"result", "unwritten", "work"},
    ),
    "a turned row comes with every band": (
        HOPPER,
        "scheduler",
        "                if num_rows > (band + 1) * BAND:\n                    turned = Int32(0)\n",
        "",
        {"result", "unwritten", "work", "race"},
    ),
    "the second column of a turned tile is the first": (
        HOPPER_SHORT,
        "scheduler",
        "col = (2 * pair + rank) * self.tile.n",
        "col = 2 * pair * self.tile.n",
        {"result", "unwritten", "work", "race"},
    ),
    "a tile is narrow that has more columns": (
        HOPPER,
        "gemm_sm90",
        "problem) - col <= self.narrow:",
        "problem) - col <= 2 * self.narrow:",
        {"result"},
    ),
    "a tile adds to what the one before left": (
        HOPPER,
        "gemm_sm90",
        "i > 0 if block == 0 else True",
        "True",
        {"result"},
    ),
    "rows without an expert keep what the tile before left": (
        HOPPER_DEFERS,
        "gemm_sm90",
        "            if num_blocks == 0:\n                acc.fill(0.0)",
        "",
        {"result"},
    ),
    "the next tile is read where there is none": (
        HOPPER_DEFERS,
        "gemm_sm90",
        "            if more:\n                expert, group",
        "            if num_blocks >= 0:\n                expert, group",
        {"deadlock", "barrier"},
    ),
    "lanes part before a stage is handed back that nobody multiplied": (
        WGRAD_ADDS,
        "gemm_sm90",
        "might miss it.\n                    cute.arch.sync_warp()\n",
        "might miss it.\n",
        {"deadlock"},
    ),
    "a warpgroup with one row is taken for one without": (
        HOPPER,
        "gemm_sm90",
        "return row >= self.rows_end(problem, end)",
        "return row + 1 >= self.rows_end(problem, end)",
        {"result"},
    ),
    "a stage that nobody multiplied is kept": (
        WGRAD_TURNS,
        "gemm_sm90",
        "                    stages.consumer_release(state)\n",
        "",
        {"deadlock"},
    ),
    "of weight gradients, rows end where the group's do": (
        WGRAD_ADDS,
        "wgrad",
        "        return problem.n\n",
        "        return end\n",
        {"result"},
    ),
    "of a swapped tile, warpgroups share rows instead of columns": (
        HOPPER_SWAPPED,
        "gemm_sm90",
        "                col += wg * SLAB_ROWS\n                if cutlass",
        "                row += wg * SLAB_ROWS\n                if cutlass",
        {"result", "unwritten", "race"},
    ),
    "of a swapped tile, the bias is that of the other columns": (
        HOPPER_SWAPPED,
        "gemm_sm90",
        "return wg * SLAB_ROWS + thread // 32 * 16",
        "return thread // 32 * 16",
        {"result"},
    ),
    "of a swapped tile, rows are scaled as if they were columns": (
        HOPPER_SWAPPED,
        "gemm_sm90",
        "return i // 4 * 2 + i % 2 if self.swapped else i // 2 % 2",
        "return i // 2 % 2",
        {"result"},
    ),
    "of Blackwell's swapped tile, the bias is that of other columns": (
        BLACKWELL_SWAPPED,
        "gemm_sm100",
        "first = thread // 32 * 32 + thread % 32 // 4",
        "first = thread // 32 * 32 + thread % 4",
        {"result"},
    ),
    "of Blackwell's swapped tile, rows take each other's factors": (
        BLACKWELL_SWAPPED,
        "gemm_sm100",
        "return index // 2 * 8 + thread % 4 * 2 + index % 2 if",
        "return index // 2 * 8 + thread % 8 + index % 2 if",
        {"result"},
    ),
    "of Blackwell's swapped tile, fewer bytes are waited for": (
        BLACKWELL_SWAPPED,
        "gemm_sm100",
        "            tx_count=self.stage_bytes * self.pair,\n",
        "            tx_count=self.stage_bytes - 64 * 64 * 2,\n",
        {"race", "barrier", "deadlock"},
    ),
    "sums of the tile before are overwritten": (
        HOPPER_SPLIT,
        "exchange",
        "        if count > 0:\n            cute.arch.mbarrier_wait(self.empty, count - 1 & 1)\n        if self.thread",
        "        if self.thread",
        {"race", "barrier", "deadlock"},
    ),
    "sums are said to be read while another warp reads them": (
        HOPPER_HALVES,
        "exchange",
        "        self.barrier.arrive_and_wait()\n",
        "",
        {"race"},
    ),
    "sums are read before they have come": (
        HOPPER_SPLIT,
        "exchange",
        "        cute.arch.mbarrier_wait(self.full, count & 1)\n",
        "",
        {"race", "uninitialized"},
    ),
    "two CTAs send their sums to one place": (
        HOPPER_SPLIT,
        "exchange",
        "(rank + self.split - cta - 1) % self.split",
        "(rank + self.split - cta - 1) % self.split * 0",
        {"race"},
    ),
    "a CTA leaves before the others' last arrivals": (
        HOPPER_SPLIT,
        "gemm_sm90",
        "            among_ctas.finish(exchanges)\n",
        "            pass\n",
        {"race"},
    ),
    "CTAs of a split tile contract the same blocks": (
        HOPPER_HALVES,
        "gemm_sm90",
        "            first = cutlass.min(rank * most, num_blocks)\n",
        "            first = cutlass.min(rank * most, num_blocks) * 0\n",
        {"result", "work", "race", "deadlock"},
    ),
    "CTAs of a split tile store the same rows": (
        HOPPER_HALVES,
        "gemm_sm90",
        "block_idx_in_cluster()) * self.stored_rows",
        "block_idx_in_cluster()) * 0",
        {"result", "unwritten", "race"},
    ),
    "buffers of C and D overlap": (
        HOPPER_SWAPPED,
        "epilogue",
        "        stage = stage * self.step\n",
        "",
        {"race"},
    ),
}


@pytest.fixture(scope="module", params=MISTAKES)
def planted(request, tmp_path_factory):
    """(variant, PTX, kinds that would be right)"""
    name, module, old, new, kinds = MISTAKES[request.param]
    folder = tmp_path_factory.mktemp("planted")
    shutil.copytree(PACKAGE, folder / "jax_grouped_gemm", ignore=shutil.ignore_patterns("_data", "__pycache__"))
    source = folder / "jax_grouped_gemm" / "kernels" / f"{module}.py"
    text = source.read_text()
    assert text.count(old) == 1, "the sources have changed: plant it anew"
    source.write_text(text.replace(old, new))
    every = (variant for arch in config.TILES for variant in config.variants(arch) + config.wgrad_variants(arch))
    (variant,) = (variant for variant in every if variant.name == name)
    program = pathlib.Path(__file__).with_name("compile_planted.py")
    subprocess.run(
        [sys.executable, program, str(variant.arch), name, folder / "ptx"],
        check=True,
        env={**os.environ, "PYTHONPATH": str(folder)},
        cwd=folder,
    )
    return variant, (folder / "ptx").read_text(), kinds


def test_a_mistake_is_found(planted):
    variant, text, kinds = planted
    assert text != device.ptx(variant.name)
    device.register_with_prologues(variant, text)
    with pytest.raises(device.Fault) as found:
        sweep.run_all(variant)
    assert found.value.kind in kinds, found.value
