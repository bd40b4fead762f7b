"""Programs that a fresh process runs, of `jax.export`."""

import os
import subprocess
import sys

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from jax_grouped_gemm import library

CALL = """
import sys
import jax, jax.export, ml_dtypes, numpy as np
import jax_grouped_gemm  # registers what the program calls
program, operands, results, platform = sys.argv[1:]
jax.config.update("jax_num_cpu_devices", 8)
exported = jax.export.deserialize(bytearray(open(program, "rb").read()))
operands = np.load(operands)
operands = [operands[name] for name in "abo"]
operands = [x.view(ml_dtypes.bfloat16) if x.dtype == np.uint16 else x for x in operands]
devices = jax.devices(platform)[: exported.nr_devices]
if len(devices) > 1:
    mesh = jax.sharding.Mesh(np.array(devices).reshape(4, 2), ("x", "y"))
    specs = jax.sharding.PartitionSpec("x"), jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec()
    operands = [jax.device_put(x, jax.sharding.NamedSharding(mesh, spec)) for x, spec in zip(operands, specs)]
else:
    operands = jax.device_put(operands, devices[0])
got = jax.tree.leaves(jax.jit(exported.call)(*operands))
np.savez(results, *[np.asarray(x).astype(np.float32) for x in got])
"""


def export(function, operands, platforms):
    """With our custom calls allowed."""
    targets = library.FORWARD, library.WGRAD
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in targets]
    return jax.export.export(jax.jit(function), platforms=platforms, disabled_checks=checks)(*operands)


def elsewhere(exported, operands, folder, platform="cpu"):
    """What a fresh process gets of the serialised program, as float32. operands: a, b and offsets."""
    pytest.importorskip("flatbuffers")
    (folder / "program").write_bytes(exported.serialize())
    bits = [np.asarray(x).view(np.uint16) if x.dtype == jnp.bfloat16 else np.asarray(x) for x in operands]
    np.savez(folder / "operands.npz", **dict(zip("abo", bits, strict=True)))
    arguments = [str(folder / name) for name in ("program", "operands.npz", "results.npz")]
    # Beside this process, which has most of a GPU's memory.
    of_platform = {"JAX_PLATFORMS": "cpu"} if platform == "cpu" else {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(
        [sys.executable, "-c", CALL, *arguments, platform],
        env=os.environ | of_platform, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert not done.returncode, done.stderr
    return list(np.load(folder / "results.npz").values())
