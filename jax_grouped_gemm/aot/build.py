"""Compiles what changed, in parallel, and writes the tables, the manifest last."""

import concurrent.futures
import json
import multiprocessing
import tempfile
import time

from . import kernels as kernels_module
from . import table


def compile_to(kernel, out):
    """In a worker process: writes <name>.ptx, <name>.cubin, and <name>.json as the mark that both are complete."""
    started = time.monotonic()
    cubin, ptx, facts = kernels_module.compile_kernel(kernel)
    (out / f"{kernel.name}.ptx").write_text(ptx)
    (out / f"{kernel.name}.cubin").write_bytes(cubin)
    (out / f"{kernel.name}.json").write_text(json.dumps({"key": kernel.key(), "facts": facts}))
    return time.monotonic() - started


def facts_if_current(kernel, out):
    """The recorded facts, if the kernel was compiled from just these sources; else None."""
    try:
        record = json.loads((out / f"{kernel.name}.json").read_text())
        complete = (out / f"{kernel.name}.cubin").stat().st_size == record["facts"]["cubin_bytes"]
    except (OSError, ValueError, KeyError):
        return None
    return record["facts"] if complete and record["key"] == kernel.key() else None


def workers(jobs, arch, scratch):
    spawn = multiprocessing.get_context("spawn")
    return concurrent.futures.ProcessPoolExecutor(jobs, spawn, kernels_module.prepare_process, (arch, scratch))


def build(out, jobs):
    out.mkdir(parents=True, exist_ok=True)
    kernels = kernels_module.all_kernels()
    stale = [kernel for kernel in kernels if facts_if_current(kernel, out) is None]
    done = 0
    for arch in sorted({kernel.arch for kernel in stale}):
        with tempfile.TemporaryDirectory() as scratch, workers(jobs, arch, scratch) as pool:
            futures = {pool.submit(compile_to, kernel, out): kernel for kernel in stale if kernel.arch == arch}
            for future in concurrent.futures.as_completed(futures):
                done += 1
                print(f"[{done:3}/{len(stale)}] {futures[future].name} {future.result():.1f} s", flush=True)

    facts = [facts_if_current(kernel, out) for kernel in kernels]
    wanted = {kernel.name for kernel in kernels}
    for leftover in out.glob("sm*_*"):
        if leftover.stem not in wanted:
            leftover.unlink()
    table.write_if_changed(out / "kernel_table.inc", table.kernel_table(facts))
    table.write_if_changed(out / "cubins.S", table.cubins_assembly(facts))
    table.write_if_changed(out / "manifest.json", table.manifest(facts, kernels_module.dsl_version()))
    size = sum(fact["cubin_bytes"] for fact in facts)
    print(
        f"{len(kernels)} kernels, {len(stale)} compiled, {size / 2**20:.1f} MiB of cubins, build {table.build_id(facts)}"
    )
