"""Figures beside throughput: host time of a call, what a process's first call costs, size of the wheel."""

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp

from jax_grouped_gemm import library

ROOT = Path(__file__).resolve().parent.parent


def host_microseconds(repeats=30, calls=16):
    """Host time to queue one jitted call, beside that of a plain product of the same size. Small operands, so that the
    queue never fills and only the host is measured."""
    from jax_grouped_gemm import grouped_gemm

    a = jnp.ones((256, 256), jnp.bfloat16)
    b = jnp.ones((2, 256, 256), jnp.bfloat16)
    ends = jnp.asarray([100, 256], jnp.int32)
    ours = jax.jit(lambda a, b, offsets: grouped_gemm(a, b, offsets=offsets))
    dense = jax.jit(lambda a, b: a @ b[0])

    def median(function, *args):
        jax.block_until_ready(function(*args))
        samples = []
        for _ in range(repeats):
            start = time.perf_counter()
            for _ in range(calls):
                result = function(*args)
            samples.append((time.perf_counter() - start) / calls)
            jax.block_until_ready(result)
        return 1e6 * statistics.median(samples)

    return {"ours": median(ours, a, b, ends), "jnp_dot": median(dense, a, b)}


_FIRST_CALL = """
import json, time
import jax, jax.numpy as jnp

def first(function, *args):
    start = time.perf_counter()
    jax.block_until_ready(jax.jit(function)(*args))
    return time.perf_counter() - start

a = jnp.ones((256, 256), jnp.bfloat16)
b = jnp.ones((2, 256, 256), jnp.bfloat16)
ends = jnp.asarray([100, 256], jnp.int32)
first(lambda a, b: a @ b[1], a, b)  # JAX's own start-up
plain = first(lambda a, b: a @ b[0], a, b)
start = time.perf_counter()
from jax_grouped_gemm import grouped_gemm
imported = time.perf_counter() - start
print(json.dumps({"import": imported, "ours": first(lambda a, b, ends: grouped_gemm(a, b, offsets=ends), a, b, ends), "jnp_dot": plain}))
"""


def first_call_seconds():
    """In a fresh process, after JAX has run one product: importing the package, the first jitted call of ours (trace,
    compile, load the kernel, run), and the first call of another plain product for comparison."""
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run([sys.executable, "-c", _FIRST_CALL], capture_output=True, text=True, env=env, timeout=120)
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def wheel_bytes():
    """Size of the newest wheel in dist/, or None."""
    wheels = sorted((ROOT / "dist").glob("*.whl"), key=lambda path: path.stat().st_mtime)
    return wheels[-1].stat().st_size if wheels else None


def machine():
    """Device, driver and versions."""
    from importlib import metadata

    def version(package):
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return None

    facts = {
        "device": jax.devices()[0].device_kind,
        "platform": jax.devices()[0].platform,
        "build": (library.manifest() or {}).get("build_id"),
        "python": sys.version.split()[0],
        **{name: version(name) for name in ("jax", "jaxlib", "torch", "tokamax", "numpy")},
    }
    query = [
        "nvidia-smi",
        "--query-gpu=name,driver_version,power.limit,clocks.max.sm",
        "--format=csv,noheader",
        "-i",
        "0",
    ]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
        facts["nvidia_smi"] = done.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        facts["nvidia_smi"] = None
    return facts
