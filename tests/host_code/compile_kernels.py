"""compile_kernels.py ARCH OUT NAME...: the host code that the DSL generates for kernels, OUT/<name>.o and its entry point's name.

A program of its own: the DSL reads its settings once, at import, and compiles for one architecture only.
"""

import pathlib
import sys

from jax_grouped_gemm.aot import kernels


def main():
    arch, out, *names = sys.argv[1:]
    out = pathlib.Path(out)
    kernels.prepare_process(int(arch), out)
    wanted = {kernel.name: kernel for kernel in kernels.all_kernels()}
    for name in names:
        _, compiled = kernels._trace(wanted[name])
        # `export_to_c` writes a header too, and cannot for a stream whose parameter has no type.
        (out / f"{name}.o").write_bytes(compiled.dump_to_object("host"))
        (out / f"{name}.entry").write_text(f"_mlir_host__mlir_ciface_{compiled.function_name}")
        (out / f"{name}.cubin").write_bytes(compiled.__cubin__)


if __name__ == "__main__":
    main()
