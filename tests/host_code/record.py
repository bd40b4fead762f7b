"""record.py FOLDER BUILD < calls > launches: what a call of our library passes to CUDA, and what the DSL's host code does.

Both are JSON lists. FOLDER holds the stand-in (as libcuda.so.1) and the DSL's host code of every kernel as a shared library.
A program of its own: it has a stand-in for CUDA, and a crash in generated code should not be the tests'.
"""

import ctypes
import json
import pathlib
import sys
from ctypes import POINTER, c_char_p, c_int32, c_int64, c_uint32, c_uint64

from tests.host_code.host_code import HostCode

FOLDER, BUILD = map(pathlib.Path, sys.argv[1:3])


class Call(ctypes.Structure):
    """jgg_call of ffi/c_api.h."""

    _fields_ = (
        [("struct_size", c_int64)]
        + [(name, c_char_p) for name in ("sm90", "sm100", "weights", "b_major", "d_dtype", "c_dtype", "bias_dtype")]
        + [(name, c_int64) for name in ("m", "n", "k", "l", "groups", "dynamic", "overlap_margin")]
        + [(name, c_uint64) for name in ("a", "offsets", "experts", "alpha", "prob", "bias", "b")]
        + [("weight_addresses", POINTER(c_uint64))]
        + [(name, c_uint64) for name in ("d", "c", "scratch", "stream")]
    )


class WgradCall(ctypes.Structure):
    """jgg_wgrad_call of ffi/c_api.h."""

    _fields_ = (
        [("struct_size", c_int64)]
        + [(name, c_char_p) for name in ("sm90", "sm100", "d_dtype")]
        + [(name, c_int64) for name in ("m", "n", "k", "l", "groups", "dynamic", "accumulate", "overlap_margin")]
        + [(name, c_uint64) for name in ("x", "y", "offsets", "experts", "alpha", "d", "scratch", "stream")]
    )


class StandIn:
    def __init__(self):
        # Its name is libcuda.so.1: the library, which opens that later, gets this one.
        self.library = ctypes.CDLL(str(FOLDER / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)
        self.log = FOLDER / "log"

    def device(self, arch, max_clusters, kernels):
        self.library.stand_in_device(arch, max_clusters)
        for kernel in kernels:
            offsets, sizes = (
                (c_uint32 * len(kernel["params"]))(*values) for values in zip(*kernel["params"], strict=True)
            )
            self.library.stand_in_kernel(kernel["symbol"].encode(), len(offsets), offsets, sizes)

    def record(self, function, *arguments):
        """(launches, arguments of tensor maps, memsets) during a call."""
        self.library.stand_in_log(str(self.log).encode())
        function(*arguments)
        self.library.stand_in_flush()
        lines = [json.loads(line) for line in self.log.read_text().splitlines()]
        return tuple([line for line in lines if key in line] for key in ("grid", "dims", "memset"))


class Recorder:
    def __init__(self):
        self.stand_in = StandIn()
        self.library = ctypes.CDLL(str(BUILD / "libjax_grouped_gemm.so"))
        self.library.jgg_forward.restype = self.library.jgg_wgrad.restype = c_char_p
        manifest = json.loads((BUILD / "aot" / "manifest.json").read_text())
        self.kernels = {kernel["name"]: kernel for kernel in manifest["kernels"]}
        self.host_code = {}

    def launch_ours(self, call):
        addresses = call["weight_addresses"]
        values = {key: value.encode() if isinstance(value, str) else value for key, value in call["problem"].items()}
        if addresses:
            values["weight_addresses"] = (c_uint64 * len(addresses))(*addresses)
        entry, kind = {"forward": (self.library.jgg_forward, Call), "wgrad": (self.library.jgg_wgrad, WgradCall)}[
            call["kind"]
        ]
        error = entry(ctypes.byref(kind(struct_size=ctypes.sizeof(kind), **values)))
        if error is not None:
            raise RuntimeError(error.decode())

    def launch_theirs(self, name, arguments):
        if name not in self.host_code:
            self.host_code[name] = HostCode(FOLDER, name)
        self.host_code[name].launch(*arguments)

    def record(self, call):
        prologue, main = call["prologue"], call["kernel"]
        arguments_of = {"forward": forward_arguments, "wgrad": wgrad_arguments}[call["kind"]]
        names = [name for name in (prologue, main) if name]
        self.stand_in.device(call["arch"], call["max_clusters"], [self.kernels[name] for name in names])
        ours, maps, memsets = self.stand_in.record(self.launch_ours, call)
        for launch in ours:
            launch["kernel"] = main if launch is ours[-1] else prologue
            launch["fields"] = fields_of(self.kernels[launch["kernel"]], launch["parameters"])
        theirs = []
        for launch in ours:
            kernel = launch["kernel"]
            arguments = arguments_of(call, launch) if kernel == main else prologue_arguments(call, launch)
            (their,), _, _ = self.stand_in.record(self.launch_theirs, kernel, arguments)
            theirs.append(their | {"kernel": kernel, "fields": fields_of(self.kernels[kernel], their["parameters"])})
        return {"ours": ours, "theirs": theirs, "maps": maps, "memsets": memsets}


def fields_of(kernel, parameters):
    """[field, its bytes in hexadecimal] of every field: they lie at offsets from the first parameter, perhaps over several."""
    packed = bytearray(kernel["param_bytes"])
    for (offset, size), value in zip(kernel["params"], parameters, strict=True):
        packed[offset : offset + size] = bytes.fromhex(value)
    return [[field, packed[offset : offset + size].hex()] for field, offset, size in kernel["fields"]]


TYPES = {None: 0, "bfloat16": 1, "float16": 2, "float32": 3}


def forward_arguments(call, launch):
    """Of `GroupedGemm.__call__`: what is None there has no argument here."""
    p, takes = call["problem"], call["takes"]
    dense = p["weights"] == "dense"
    counter = p["scratch"] + (0 if dense else 128 * p["l"]) if p["dynamic"] else 0
    # Without an array of weights, the map that is passed describes one expert at A's address.
    pointers = [p["a"], p["b"] if dense else p["a"], p["d"], *([p["c"]] if takes["c"] else [])]
    pointers += [*([] if dense else [p["scratch"]]), p["offsets"], p["experts"], counter]
    pointers += [p["alpha"], p["prob"]] if takes["scales"] else []
    pointers += [p["bias"]] if takes["bias"] else []
    taken = {"bias": "bias_dtype", "d_type": "d_dtype", "c_type": "c_dtype"}
    types = [TYPES[p[dtype]] for name, dtype in taken.items() if takes[name]]
    return [*map(c_uint64, pointers), *map(c_int32, types), *extents(p, launch)]


def wgrad_arguments(call, launch):
    """Of `Wgrad.__call__`."""
    p = call["problem"]
    pointers = [p["x"], p["y"], p["d"], p["offsets"], p["experts"], p["scratch"] if p["dynamic"] else 0, p["alpha"]]
    return [*map(c_uint64, pointers), *extents(p, launch)]


def extents(p, launch):
    """Theirs is told the number of clusters, which ours computes."""
    clusters = launch["grid"][0] // launch["cluster"][0]
    return [*map(c_int32, (p["m"], p["n"], p["k"], p["l"], p["groups"], clusters)), c_uint64(p["stream"])]


def prologue_arguments(call, launch):
    """Of `WriteMaps.__call__`. The template is copied from our launch: the forward kernel's parameters show what is in it."""
    ours = {field: bytes.fromhex(value) for field, value in launch["fields"]}
    first, count = (int.from_bytes(ours[field], "little") for field in ("FIRST", "COUNT"))
    template = [int.from_bytes(ours["MAP_B"][i : i + 8], "little") for i in range(0, 128, 8)]
    p = call["problem"]
    if p["weights"] == "tuple":
        room = sum(field.startswith("ADDRESS_") for field in ours)
        addresses = call["weight_addresses"][first : first + count]
        addresses += [0] * (room - count)
    else:
        addresses = [p["b"]]
    return [
        *map(c_uint64, (*template, p["scratch"], *addresses)),
        c_int32(first),
        c_int32(count),
        c_uint64(p["stream"]),
    ]


if __name__ == "__main__":
    recorder = Recorder()
    json.dump([recorder.record(call) for call in json.load(sys.stdin)], sys.stdout)
