"""What is installed, what this machine has, and which implementation a call would use."""

import collections
import json
import os
import platform

import jax
import jaxlib

import jax_grouped_gemm
from jax_grouped_gemm import acceleration, config, ffi_call, library, tuned


def collect():
    """Everything as plain data; each part works without the library and without a GPU."""
    return {
        "versions": {
            "jax_grouped_gemm": jax_grouped_gemm.__version__,
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,
            "python": platform.python_version(),
        },
        "build": _build(),
        "library": _library(),
        "devices": _devices(),
        "implementation": _implementation(),
        "ragged_dot_accelerated": acceleration.active(),
        "tuned": _tuned(),
    }


def _build():
    try:
        manifest = library.manifest()
    except RuntimeError:
        manifest = None  # `_library` says why
    if manifest is None:
        return None
    kernels = collections.defaultdict(list)
    for kernel in sorted(manifest.get("kernels", []), key=lambda kernel: kernel["arch"]):
        kernels[str(kernel["arch"])].append(kernel)
    return {
        "build_id": manifest["build_id"],
        "dsl_version": manifest.get("dsl_version"),
        "architectures": {arch: _architecture(found) for arch, found in kernels.items()},
    }


def _architecture(kernels):
    forward, wgrad = ([kernel for kernel in kernels if kernel["kind"] == kind] for kind in ("forward", "wgrad"))
    found = sorted({(*kernel["tile"], *kernel["cluster"]) for kernel in forward})
    tiles = [config.Tile(m, n, cluster_m=rows, split=split) for m, n, rows, split in found]
    return {
        "target": kernels[0]["target"],
        "kernels": len(kernels),
        "forward_kernels": len(forward),
        "wgrad_kernels": len(wgrad),
        "tiles": [f"mma_tiler_mn={tile.mma_tiler_mn}, cluster_shape_mn={tile.cluster_shape_mn}" for tile in tiles],
    }


def _library():
    why = library.registered()
    runtime = library.runtime_api_version()
    facts = {"path": str(library.LIBRARY), "problem": why, "ffi_api_runtime": _version(runtime)}
    try:
        loaded = library.load()
    except (OSError, AttributeError):
        return facts | {"ffi_api_built": None, "driver": None}
    driver = library.driver_status(loaded)
    return facts | {"ffi_api_built": _version(library.api_version(loaded)), "driver": driver or "available"}


def _version(version):
    return None if version is None else ".".join(map(str, version))


def _devices():
    try:
        return list(map(_device, jax.devices()))
    except Exception:  # JAX has several types for a backend that does not start; `_implementation` says why
        return []


def _device(device):
    capability = getattr(device, "compute_capability", None)
    return {"id": device.id, "platform": device.platform, "kind": device.device_kind, "compute_capability": capability}


def _implementation():
    try:
        name = "cuda" if jax.default_backend() == "gpu" else jax.default_backend()
        choice = ffi_call.choose(name, None)
    except Exception as error:
        return {"name": None, "why": str(error) or "JAX found no device"}
    return {"name": "cutedsl" if choice.kernels else "reference", "why": choice.why}


def _tuned():
    """Calls for which something else than the rule chooses, and the file that the environment names."""
    try:
        return {"calls": len(tuned.in_use()), "file": os.environ.get(tuned.FILE) or None, "problem": None}
    except ValueError as error:
        return {"calls": 0, "file": os.environ[tuned.FILE], "problem": str(error)}


def as_json():
    return json.dumps(collect(), indent=2)


def as_text():
    facts = collect()
    lines = ["versions"]
    lines += [f"  {name}: {version}" for name, version in facts["versions"].items()]
    lines += ["library", *_library_lines(facts["library"])]
    lines += ["kernels", *_build_lines(facts["build"])]
    lines += ["devices", *map(_device_line, facts["devices"])]
    choice = facts["implementation"]
    lines += [f"a call would use: {choice['name'] or 'nothing, it would fail'} ({choice['why']})"]
    accelerated = (
        "accelerated on CUDA" if facts["ragged_dot_accelerated"] else f"JAX's own ({acceleration.SWITCH} is not 1)"
    )
    lines += [f"jax.lax.ragged_dot: {accelerated}"]
    of_tuned = facts["tuned"]
    of_file = f", of {of_tuned['file']}" if of_tuned["file"] else ""
    lines += ["tuned: " + (of_tuned["problem"] or f"{of_tuned['calls']} calls{of_file}")]
    return "\n".join(lines)


def _library_lines(facts):
    return [
        f"  handlers: {'registered' if facts['problem'] is None else 'not registered: ' + facts['problem']}",
        f"  XLA FFI API: built against {facts['ffi_api_built'] or 'unknown'}, "
        f"runtime {facts['ffi_api_runtime'] or 'unknown'}",
        f"  CUDA driver: {facts['driver'] or 'unknown'}",
    ]


def _build_lines(build):
    if build is None:
        return ["  none: nothing was built"]
    lines = [f"  build {build['build_id']}, CUTLASS DSL {build['dsl_version'] or 'unknown'}"]
    for arch in build["architectures"].values():
        others = arch["kernels"] - arch["forward_kernels"] - arch["wgrad_kernels"]
        kinds = (
            f"{arch['forward_kernels']} forward, {arch['wgrad_kernels']} for weight gradients, {others} for tensor maps"
        )
        lines.append(f"  {arch['target']}: {arch['kernels']} kernels, {kinds}")
        lines += [f"    {tile}" for tile in arch["tiles"]]
    return lines


def _device_line(device):
    capability = device["compute_capability"]
    suffix = f", compute capability {capability}" if capability else ""
    return f"  {device['platform']}:{device['id']} {device['kind']}{suffix}"
