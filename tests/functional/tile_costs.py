"""What kernels do, by role: statements, copies, waits, per tile. Counts of the model's, not times.

make model-costs
"""

import importlib
import re
import sys

import device
import numpy as np
import sweep
import test_build
from problem import Problem

from jax_grouped_gemm import config

ROLES = {
    90: {"load": range(1), "scheduler": range(1, 2), "math, epilogue": range(4, 16)},
    100: {"load": range(5, 6), "scheduler": range(6, 7), "math": range(4, 5), "epilogue": range(4)},
}
# Whole tiles, and enough of them that starting and ending does not count for much. K is contracted: of weight gradients, the rows of a group.
ROWS, K = 4096, 1024


def measure(variant):
    """{what: number per tile of one CTA}"""
    tile = variant.tile
    if device.is_wgrad(variant):
        problem = Problem("statistics", (K,), K, ROWS, tile.n)
    else:
        problem = Problem("statistics", (ROWS,), ROWS, tile.n, K)
    case = sweep.make_case(variant, problem, 0)
    device.register_with_prologues(variant)
    device.statistics()
    device.run(variant, case, clusters=1, policy="eager")
    found = device.statistics()
    tiles = -(-ROWS // tile.m)
    row = {}
    for role, warps in ROLES[variant.arch].items():
        row[f"statements: {role}"] = sum(found.get(f"statements of warp {warp}", 0) for warp in warps) / tiles
    for what in (
        "wgmma",
        "tcgen05.mma",
        "tcgen05.ld",
        "copy: loads",
        "copy: stores",
        "mbarrier.arrive",
        "mbarrier waits",
    ):
        row[what] = found.get(what, 0) / tiles
    row |= static_facts(variant)
    row["KiB loaded"] = found["copy: bytes loaded"] / tiles / 1024
    row["KiB stored"] = found["copy: bytes stored"] / tiles / 1024
    row["bytes loaded per 1000 operations"] = found["copy: bytes loaded"] / tiles / (2e-3 * tile.m * tile.n * K)
    return row


def static_facts(variant):
    """Of the compiled kernel: what a CTA takes of an SM."""
    module = importlib.import_module(f"jax_grouped_gemm.kernels.gemm_sm{variant.arch}")
    program = (module.GroupedWgrad if device.is_wgrad(variant) else module.GroupedGemm)(variant)
    report = test_build.output(test_build.tool("cuobjdump"), "-res-usage", device.AOT / f"{variant.name}.cubin")
    registers = [int(found) for found in re.findall(r"\bREG:(\d+)", report)][-1:]
    moved = re.findall(r"setmaxnreg\.inc\S*\s+(\d+)", device.ptx(variant.name))
    return {
        "stages": program.stages,
        "KiB of shared memory": device.facts(variant.name)["smem_bytes"] / 1024,
        "threads": program.threads,
        "registers of a math or epilogue thread": int((moved or registers)[0]),
    }


def kind(variant):
    return "wgrad" if device.is_wgrad(variant) else variant.epilogue


def main():
    names = sys.argv[1:]
    variants = [v for arch in config.TILES for v in config.variants(arch)]
    of_weights = [v for arch in config.TILES for v in config.wgrad_variants(arch)]
    if names:
        chosen = [variant for variant in variants + of_weights if variant.name in names]
        if len(chosen) < len(names):
            sys.exit("no such kernel; build/aot has their names")
    else:
        chosen = [
            v
            for v in variants
            if (v.b_major, v.weights, v.epilogue) == ("k", "dense", "plain") and v.d_dtype == "bfloat16"
        ] + [v for v in of_weights if v.d_dtype == "bfloat16"]
    rows = {f"sm{v.arch} {v.tile} {v.d_dtype} {kind(v)}": measure(v) for v in chosen}
    keys = list(dict.fromkeys(key for row in rows.values() for key in row))
    print(f"per CTA and tile, K = {K}\n")
    print("| | " + " | ".join(rows) + " |")
    print("|---|" + "---|" * len(rows))
    for key in keys:
        values = [row.get(key, 0) for row in rows.values()]
        if any(values):
            print(f"| {key} | " + " | ".join(f"{np.round(value, 1):g}" if value else "" for value in values) + " |")


if __name__ == "__main__":
    main()
