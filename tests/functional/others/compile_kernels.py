"""compile_kernels.py MODULE ARCH OUT: a module's kernels of one architecture, in OUT: see `host_code.save`.

A program of its own: the DSL reads its settings once, at import, and compiles for one architecture only.
"""

import importlib
import pathlib
import sys

from jax_grouped_gemm.aot import kernels
from tests.host_code import host_code


def main():
    module, arch, out = importlib.import_module(sys.argv[1]), int(sys.argv[2]), pathlib.Path(sys.argv[3])
    kernels.prepare_process(arch, out)
    for kernel in {*module.KERNELS, *(broken.kernel for broken in module.BROKEN)}:
        if kernel.arch == arch:
            host_code.save(kernel.compile(), out, kernel.name)


if __name__ == "__main__":
    main()
