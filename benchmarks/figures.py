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
import numpy as np

from benchmarks import arms
from jax_grouped_gemm import library
from jax_grouped_gemm.timing import Arm, calibrate, interleave, summarize

ROOT = Path(__file__).resolve().parent.parent


def host_microseconds(repeats=30, calls=16):
    """Host time to queue one call of each kind, by name. Small operands, so that the queue never fills and only the host is measured."""

    def median(function):
        wait = jax.block_until_ready
        result = wait(function())
        if not isinstance(result, jax.Array):
            wait = _wait_for_torch
        samples = []
        for _ in range(repeats):
            wait(result)
            start = time.perf_counter()
            for _ in range(calls):
                result = function()
            samples.append((time.perf_counter() - start) / calls)
        wait(result)
        return 1e6 * statistics.median(samples)

    found = {name: median(function) for name, function in {**_jax_calls(), **_torch_calls()}.items()}
    # What a program of several calls costs more: the handler alone, without JAX's dispatch of the program.
    of_chain = found.pop(CHAIN)
    found["each further grouped_gemm of a program"] = (of_chain - found["jitted grouped_gemm"]) / FURTHER
    return found


M, N, K, L = 512, 256, 256, 2
FURTHER = 10
CHAIN = "a chain of calls"


def _jax_calls():
    from jax_grouped_gemm import grouped_gemm, grouped_gemm_wrapper

    a, b = jnp.ones((M, K), jnp.bfloat16), jnp.ones((L, N, K), jnp.bfloat16)
    ends = jnp.asarray([256, 512], jnp.int32)
    experts = [b[0] + 0, b[1] + 0]
    pointers = np.array([w.unsafe_buffer_pointer() for w in experts], np.int64)
    packed, a3, alpha, prob = jnp.asarray(pointers.view(np.uint8)), a[:, :, None], jnp.ones(L), jnp.ones((M, 1, 1))
    jitted = jax.jit(lambda a, b, ends: grouped_gemm(a, b, offsets=ends))
    dot = jax.jit(lambda a, b: a @ b[0])

    @jax.jit
    def chain(a, b, ends):
        for _ in range(1 + FURTHER):
            a = grouped_gemm(a, b, offsets=ends)
        return a

    def wrapper(experts=experts):  # which keeps the weights alive
        return grouped_gemm_wrapper(a3, ends, alpha, b_ptrs=packed, n=N, b_dtype="bfloat16", prob_tensor=prob).d_tensor

    return {
        "jitted jnp.dot": lambda: dot(a, b),
        "jitted grouped_gemm": lambda: jitted(a, b, ends),
        CHAIN: lambda: chain(a, b, ends),
        "eager grouped_gemm": lambda: grouped_gemm(a, b, offsets=ends),
        "grouped_gemm_wrapper, JAX arrays": wrapper,
    }


def _torch_calls():
    """The document's names on CUDA tensors; nothing where there are none."""
    try:
        torch = arms.torch_on_gpu()
    except arms.UnavailableError:
        return {}
    from jax_grouped_gemm import GroupedGemm, grouped_gemm_wrapper

    def ones(*shape, dtype=torch.float32):
        return torch.ones(shape, dtype=dtype, device="cuda")

    a, b = ones(M, K, 1, dtype=torch.bfloat16), ones(L, N, K, dtype=torch.bfloat16)
    ends = torch.tensor([256, 512], dtype=torch.int32, device="cuda")
    pointers = torch.tensor([w.data_ptr() for w in b], device="cuda")
    alpha, prob = ones(L), ones(M, 1, 1)
    dense, d = b.permute(1, 2, 0), ones(M, N, 1, dtype=torch.bfloat16)
    operation = GroupedGemm(a, None, d, ends, alpha, sample_b=dense, sample_prob=prob)
    operation.compile()

    def execute():
        operation.execute(a, None, d, ends, alpha, b_tensor=dense, prob_tensor=prob)
        return d

    def by_pointer():
        return grouped_gemm_wrapper(
            a, ends, alpha, b_ptrs=pointers, n=N, b_dtype=torch.bfloat16, prob_tensor=prob, use_dynamic_sched=True
        ).d_tensor

    return {
        "torch.mm": lambda: torch.mm(a[:, :, 0], b[0]),
        "grouped_gemm_wrapper, torch": lambda: grouped_gemm_wrapper(a, ends, alpha, dense, prob_tensor=prob).d_tensor,
        "grouped_gemm_wrapper, torch, b_ptrs and dynamic": by_pointer,
        "GroupedGemm.execute, torch": execute,
    }


def _wait_for_torch(result):
    sys.modules["torch"].cuda.synchronize(result.device)


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


def copy_arm(size=1 << 30):
    """(Arm that copies so many bytes in the device's memory, the bytes that a call moves: each is read and written)."""
    x = jax.random.bits(jax.random.key(0), (size // 4,), jnp.uint32)  # zeros would take less power
    copy = jax.jit(jnp.copy).lower(x).compile()
    return Arm(lambda _: copy(x), jax.block_until_ready), 2 * x.nbytes


def copy_bytes_per_second(size=1 << 30, reps=15):
    """Bytes that a copy of so many bytes moves per second, the median of several bursts."""
    arm, moved = copy_arm(size)
    calibrate(arm, reps)
    interleave({"copy": arm})
    return moved / summarize(arm.samples).median


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
