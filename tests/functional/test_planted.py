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
BLACKWELL = "sm100_forward_128x256x64_cluster2x1_pair_bk_dense_float16_scaled"
BLACKWELL_ONE = "sm100_forward_128x256x64_cluster1x1_bn_pointers_16bit_c_16bit"

# kernel, module, what stands there (once), what is put in its place, kinds of fault that would be right
MISTAKES = {
    "lanes part before a tile is published": (
        HOPPER,
        "scheduler",
        "and wait for ever.\n            cute.arch.sync_warp()",
        "and wait for ever.",
        {"deadlock"},
    ),
    "a tile is given back before all lanes have read it": (
        BLACKWELL,
        "scheduler",
        "col = ring.s_tiles[3, state.index]\n        cute.arch.sync_warp()",
        "col = ring.s_tiles[3, state.index]",
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
        "end = cutlass.min(g_offsets[chunk + lane], m)",
        "end = g_offsets[chunk + lane]",
        {"bounds", "result", "limit", "work", "unwritten"},
    ),
    "a slab is written while it is being stored": (
        BLACKWELL_ONE,
        "epilogue",
        "cp_async_bulk_wait_group(SLAB_STAGES - 1, read=True)",
        "cp_async_bulk_wait_group(SLAB_STAGES, read=True)",
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
        "epilogue",
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
        "gemm_sm90",
        "                    cpasync.fence_tma_desc_acquire(map_b)\n",
        "",
        {"proxy"},
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
    (variant,) = (variant for arch in config.TILES for variant in config.variants(arch) if variant.name == name)
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
