"""The host code that the DSL generates for a kernel: the process that compiled it saves it, another loads it.

It imports functions of the CUDA runtime, with an underscore before their names. Whoever loads it has them at hand: a stand-in for
CUDA, or the functional model.
"""

import ctypes
import subprocess
from ctypes import addressof, c_int32, c_void_p


def save(compiled, folder, name):
    """NAME.so with the host code, NAME.entry with its entry point's name, and what it loads: NAME.cubin, NAME.ptx."""
    # `export_to_c` writes a header too, and cannot for a stream whose parameter has no type.
    (folder / f"{name}.o").write_bytes(compiled.dump_to_object("host"))
    (folder / f"{name}.entry").write_text(f"_mlir_host__mlir_ciface_{compiled.function_name}")
    (folder / f"{name}.cubin").write_bytes(compiled.__cubin__)
    (folder / f"{name}.ptx").write_text(compiled.__ptx__)
    # Without what it imports of CUDA: that is there when it is loaded.
    subprocess.run(["cc", "-shared", "-o", folder / f"{name}.so", folder / f"{name}.o"], check=True)


class HostCode:
    """Its functions take an array of the addresses of their arguments and of their result."""

    def __init__(self, folder, name):
        self.library = ctypes.CDLL(str(folder / f"{name}.so"))
        self.entry = (folder / f"{name}.entry").read_text()
        module = c_void_p()
        self.module = ctypes.pointer(ctypes.pointer(module)), module
        self.call("_mlir_host_cuda_init", self.module[0])
        self.call("_mlir_host_cuda_load_to_device", self.module[0], c_int32(0))

    def call(self, function, *arguments):
        status = c_int32(-1)
        addresses = [addressof(argument) for argument in (*arguments, status)]
        getattr(self.library, function)((c_void_p * len(addresses))(*addresses))
        if status.value != 0:
            raise RuntimeError(f"{function}: status {status.value}")

    def launch(self, *arguments):
        self.call(self.entry, *arguments)
