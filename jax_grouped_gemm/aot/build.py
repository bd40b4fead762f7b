"""Compiles what changed, in parallel, and writes the tables, the manifest last."""

import concurrent.futures
import fcntl
import hashlib
import json
import multiprocessing
import tempfile
import time

from . import kernels as kernels_module
from . import table


def compile_to(kernel, key, out):
    """In a worker process: writes <name>.ptx, <name>.cubin, and <name>.json as the mark that both are complete."""
    started = time.monotonic()
    cubin, ptx, facts = kernels_module.compile_kernel(kernel)
    (out / f"{kernel.name}.ptx").write_text(ptx)
    (out / f"{kernel.name}.cubin").write_bytes(cubin)
    (out / f"{kernel.name}.json").write_text(json.dumps({"key": key, "facts": facts}))
    return time.monotonic() - started


def facts_if_current(kernel, out):
    """The recorded facts, if this very cubin was compiled from just these sources; else None."""
    try:
        record = json.loads((out / f"{kernel.name}.json").read_text())
        cubin = (out / f"{kernel.name}.cubin").read_bytes()
        current = record["key"] == kernel.key() and record["facts"]["sha256"] == hashlib.sha256(cubin).hexdigest()
    except (OSError, ValueError, KeyError):
        return None
    return record["facts"] if current else None


def workers(jobs, arch, scratch):
    spawn = multiprocessing.get_context("spawn")
    return concurrent.futures.ProcessPoolExecutor(jobs, spawn, kernels_module.prepare_process, (arch, scratch))


def build(out, jobs):
    out.mkdir(parents=True, exist_ok=True)
    with open(out / ".lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one build at a time in a folder
        _build(out, jobs)


def _build(out, jobs):
    kernels = kernels_module.all_kernels()
    stale = [kernel for kernel in kernels if facts_if_current(kernel, out) is None]
    # Before the workers read the sources: an edit in the meantime must not pass for compiled.
    keys = {kernel: kernel.key() for kernel in stale}
    done = 0
    for arch in sorted({kernel.arch for kernel in stale}):
        with tempfile.TemporaryDirectory() as scratch, workers(jobs, arch, scratch) as pool:
            futures = {pool.submit(compile_to, k, keys[k], out): k for k in stale if k.arch == arch}
            for future in concurrent.futures.as_completed(futures):
                done += 1
                print(f"[{done:3}/{len(stale)}] {futures[future].name} {future.result():.1f} s", flush=True)

    facts = [facts_if_current(kernel, out) for kernel in kernels]
    if None in facts:
        raise RuntimeError("the kernels' sources changed during the build; run it again")
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
