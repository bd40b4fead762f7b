"""compile_planted.py ARCH NAME OUT: the PTX of one kernel, from the package that Python finds.

A program of its own: the DSL reads its settings once, at import, and compiles for one architecture only.
"""

import pathlib
import sys
import tempfile

from jax_grouped_gemm.aot import kernels

if __name__ == "__main__":
    arch, name, out = int(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3])
    with tempfile.TemporaryDirectory() as scratch:
        kernels.prepare_process(arch, scratch)
        (kernel,) = (kernel for kernel in kernels.all_kernels() if kernel.name == name)
        _, ptx, _ = kernels.compile_kernel(kernel)
    out.write_text(ptx)
