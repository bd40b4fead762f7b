"""One program over the devices of two processes, as on several hosts: both passes, by automatic partitioning."""

import os
import socket
import subprocess
import sys

import jax
import numpy as np
import oracle
import pytest
import sharding_problems
from jax.experimental import multihost_utils

from jax_grouped_gemm import grouped_gemm, library

LAYOUTS = "rows", "columns", "contraction", "experts", "rows and experts over one axis"
PROGRAM = """
import sys
import jax
platform, implementation, address, rank = sys.argv[1:]
jax.config.update("jax_platforms", platform)
own = {"local_device_ids": [int(rank)]} if platform == "cuda" else {}
jax.distributed.initialize(address, 2, int(rank), **own)
assert (len(jax.local_devices()), len(jax.devices())) == (1, 2)
import test_processes
for layout in test_processes.LAYOUTS:
    test_processes.compute_and_check(layout, implementation)
"""


def compute_and_check(layout, implementation):
    """In each of the processes."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    case = sharding_problems.make("bias")
    arrays, options = sharding_problems.split(case)
    outputs = sharding_problems.random_outputs(case)
    rows, weights, _ = sharding_problems.LAYOUTS[layout]
    of = sharding_problems.specs(rows, weights)
    result = sharding_problems.of_result(rows, weights)

    def place(x, spec):
        sharding = jax.sharding.NamedSharding(mesh, spec)
        return jax.make_array_from_callback(x.shape, sharding, lambda part: np.asarray(x)[part])

    placed = {name: place(x, of[name]) for name, x in arrays.items()}
    call = lambda arrays: grouped_gemm(**arrays, **options, implementation=implementation)
    run = jax.jit(sharding_problems.both(case, call)).lower(placed, tuple(place(x, result) for x in outputs)).compile()
    for target in (library.FORWARD, library.WGRAD):
        assert (target in run.as_text()) == (implementation == "cutedsl")
    results = run(placed, tuple(place(x, result) for x in outputs))
    found, gradients = multihost_utils.process_allgather(results, tiled=True)
    oracle.check(found, case)
    oracle.check_cotangents(gradients, case, outputs, roundings=4)


@pytest.mark.parametrize("implementation", ["reference", pytest.param("cutedsl", marks=pytest.mark.gpu)])
def test_two_processes(implementation):
    platform = "cuda" if implementation == "cutedsl" else "cpu"
    if platform == "cuda" and len(jax.devices("cuda")) < 2:
        pytest.skip("one GPU")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = "127.0.0.1:{1}".format(*probe.getsockname())
    command = [sys.executable, "-c", PROGRAM, platform, implementation, address]
    # Beside this process, which has most of a GPU's memory.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    processes = [
        subprocess.Popen([*command, str(rank)], env=environment, stderr=subprocess.PIPE, text=True) for rank in (0, 1)
    ]
    try:
        errors = [process.communicate(timeout=300)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)
