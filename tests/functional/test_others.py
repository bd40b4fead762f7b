"""Kernels of other projects on the model: what is known to be right must come out right, bit for bit.

The model is written by those who wrote the kernels that it tests: a rule that both misunderstood would show in neither. These kernels
are of others, who run them on hardware. They are compiled from an installed package, and launched by the DSL's own host code.

Where they leave out what PTX asks for, and hardware does not seem to need, their PTX is amended: by fences and waits, where they
synchronize anyway. Without an amendment the model refuses them; that is tested too.
"""

import concurrent.futures
import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import device
import numpy as np
import pytest

from tests.functional.others import cudnn_grouped, quack_gemm
from tests.host_code.host_code import HostCode

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[2]
MODULES = (cudnn_grouped, quack_gemm)


def missing(module):
    return [package for package in module.PACKAGES if importlib.util.find_spec(package) is None]


def parametrize(argument, values):
    """values: of a module, by name."""
    return pytest.mark.parametrize(
        argument,
        [
            pytest.param(value, id=name, marks=pytest.mark.skipif(bool(missing(module)), reason="not installed"))
            for module in MODULES
            for name, value in values(module).items()
        ],
    )


# What is amended: [pattern, what stands in its place], one after the other; and the fault without.
TENSOR_LOAD = r"^(\s*tcgen05\.ld\.[^;]*;)"
TENSOR_WAIT = r"^(\s*tcgen05\.wait::ld\.sync\.aligned;)"
AMENDMENTS = {
    # That a load from tensor memory is over, others learn only by this (ISA 9.7.16.8.5): before the stage is written again.
    "wait for loads": (TENSOR_LOAD, r"\1 tcgen05.wait::ld.sync.aligned;", "race"),
    # One lane then arrives for its warp, and knows only of its own loads.
    "meet after waiting for loads": (TENSOR_WAIT, r"\1 bar.warp.sync -1;", "race"),
    # Synchronization between threads orders tensor memory only with a fence on either side (ISA 9.7.16.6.4).
    "fence before": (
        r"(tcgen05\.(?:wait::)?ld\.[^;]*;)(?! tcgen05\.wait)", r"\1 tcgen05.fence::before_thread_sync;", "race"
    ),
    "fence after": (r"^(\s*tcgen05\.(ld|mma)\.)", r"tcgen05.fence::after_thread_sync; \1", "race"),
    # Tensor maps that an earlier kernel wrote (ISA 9.7.13.4; 8.9.4: the start of a kernel does not acquire them).
    "release maps": (r"^(\s*st\.global\.v4\.b64\s[^;]*, 63};)", r"\1 fence.proxy.tensormap::generic.release.gpu;", "proxy"),
    "acquire maps": (
        r"^(\s*cvta\.global\.u64\s+(%\w+),[^;]*;)", r"\1 fence.proxy.tensormap::generic.acquire.gpu [\2], 128;", "proxy"
    ),
}  # fmt: skip


def amended(text, amendments):
    for amendment, (pattern, replacement, _) in AMENDMENTS.items():
        if amendment in amendments:
            text, n = re.subn(pattern, replacement, text, flags=re.MULTILINE)
            assert n > 0, f"{amendment}: there is no such place"
    return text


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The kernels, compiled, with their host code."""
    folder = tmp_path_factory.mktemp("others")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # imports what this process would

    def compile_kernels(module, arch):
        command = [sys.executable, "-m", "tests.functional.others.compile_kernels", module.__name__, str(arch), folder]
        done = subprocess.run(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert done.returncode == 0, done.stdout

    with concurrent.futures.ThreadPoolExecutor() as pool:
        jobs = {(module, kernel.arch) for module in MODULES if not missing(module) for kernel in module.KERNELS}
        list(pool.map(lambda job: compile_kernels(*job), jobs))
    return folder


def run(folder, kernel, number, policy, amendments=None, seed=0):
    """
    Raises:
      device.Fault: what the kernel did wrong; "result", if what it computed.
    """
    text = amended((folder / f"{kernel.name}.ptx").read_text(), kernel.amendments if amendments is None else amendments)
    device.register_module(kernel.name, text, (folder / f"{kernel.name}.cubin").read_bytes())
    device.schedule(policy, seed)
    with device.Memory() as memory:
        arguments, results = kernel.problem(np.random.default_rng(number), number, memory)
        try:
            HostCode(folder, kernel.name).launch(*arguments)
        finally:
            device.check_launches()
        for name, address, want in results:
            got = memory.get(address, want.shape, want.dtype)
            if (got != want).any():
                raise device.Fault("result", f"{(got != want).sum()} of {want.size} elements of {name} are wrong")


@parametrize("kernel", lambda module: {kernel.name: kernel for kernel in module.KERNELS})
def test_kernel(folder, kernel):
    for i, policy in enumerate(kernel.policies):
        run(folder, kernel, kernel.problems[i % len(kernel.problems)], policy)


@parametrize("kernel", lambda module: {kernel.name: kernel for kernel in module.KERNELS if "pair" in kernel.name})
def test_amendments_are_needed(folder, kernel):
    for left_out in kernel.amendments:
        with pytest.raises(device.Fault) as found:
            run(folder, kernel, 0, "eager", [amendment for amendment in kernel.amendments if amendment != left_out])
        assert (left_out, found.value.kind) == (left_out, AMENDMENTS[left_out][2])


@parametrize("broken", lambda module: {broken.kernel.name: broken for broken in module.BROKEN})
def test_fault(folder, broken):
    with pytest.raises(device.Fault, match=broken.text) as found:
        run(folder, broken.kernel, broken.problem, broken.policy)
    assert found.value.kind == broken.kind
