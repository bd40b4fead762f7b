"""compile_kernels.py ARCH OUT NAME...: the host code that the DSL generates for kernels, in OUT: see `host_code.save`.

A program of its own: the DSL reads its settings once, at import, and compiles for one architecture only.
"""

import pathlib
import sys

from jax_grouped_gemm.aot import kernels
from tests.host_code import host_code


def main():
    arch, out, *names = sys.argv[1:]
    out = pathlib.Path(out)
    kernels.prepare_process(int(arch), out)
    wanted = {kernel.name: kernel for kernel in kernels.all_kernels()}
    for name in names:
        _, compiled = kernels._trace(wanted[name])
        host_code.save(compiled, out, name)


if __name__ == "__main__":
    main()
