"""Small PTX programs, and how to run them on the model."""

import ctypes
import dataclasses
import re

import device
import numpy as np

from jax_grouped_gemm import direct

CLUSTER_SYNC = "barrier.cluster.arrive; barrier.cluster.wait;"


def wait(barrier, parity):
    """Until the phase of this parity is over."""
    return fill("{ L: mbarrier.try_wait.parity.shared.b64 %p0, [{}], {}; @%p0 bra D; bra L; D: }", barrier, parity)


def fill(template, *parts):
    """Like str.format, where other braces are PTX's."""
    for part in parts:
        template = template.replace("{}", str(part), 1)
    return template


def program(body, parameters=("out",), target="sm_90a", threads=32):
    """One kernel. Parameters are 64-bit, or tensor maps where their names begin with "map".

    Registers: %p0-31, %h0-31 (16 bits), %r0-299, %d0-31 (64 bits). smem is the start of dynamic shared memory. %r0 holds
    %tid.x, %d0 the first parameter.
    """
    declared = ",\n".join(
        f".param .align 64 .b8 {name}[128]" if name.startswith("map") else f".param .u64 {name}" for name in parameters
    )
    first = "" if not parameters or parameters[0].startswith("map") else f"ld.param.b64 %d0, [{parameters[0]}];"
    return f"""
.version 8.8
.target {target}
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry test(
{declared}
)
.reqntid {threads}, 1, 1
{{
.reg .pred %p<32>;
.reg .b16 %h<32>;
.reg .b32 %r<300>;
.reg .b64 %d<32>;
mov.u32 %r0, %tid.x;
{first}
{body}
ret;
}}
"""


def store_lanes(register, bits=32):
    """out[thread] = register"""
    shift = {32: 2, 64: 3}[bits]
    return f"""
        {{ .reg .b64 at; .reg .b32 by;
        shl.b32 by, %r0, {shift}; cvt.u64.u32 at, by; add.s64 at, at, %d0;
        st.global.b{bits} [at], {register}; }}"""


TYPES = {np.uint16: 9, np.float16: 6, np.float32: 7}  # of cuTensorMapEncodeTiled; uint16 stands for bfloat16


def tensor_map(driver, address, dims, strides, box, *, dtype=np.uint16, swizzle=3):
    """128 bytes, as the driver encodes them. dims innermost first; strides in bytes, of all but the innermost.

    swizzle: 0 none, 1 to 3 32 to 128 bytes.
    """
    return encode(driver, TYPES[dtype], address, dims, strides, box, swizzle, 0)


def encode(driver, type_code, address, dims, strides, box, swizzle, l2_promotion):
    raw = (ctypes.c_ubyte * 256)()
    at = -(-ctypes.addressof(raw) // 64) * 64
    rank = len(dims)
    result = driver.cuTensorMapEncodeTiled(
        ctypes.c_void_p(at), type_code, rank, ctypes.c_void_p(address), (ctypes.c_uint64 * rank)(*dims),
        (ctypes.c_uint64 * max(rank - 1, 1))(*strides), (ctypes.c_uint32 * rank)(*box), (ctypes.c_uint32 * rank)(*[1] * rank),
        0, swizzle, l2_promotion, 0,
    )  # fmt: skip
    assert result == 0
    return ctypes.string_at(at, 128)


@dataclasses.dataclass(frozen=True)
class Shape:
    """Of a launch: threads of a CTA, CTAs, CTAs of a cluster, bytes of dynamic shared memory."""

    threads: int = 32
    ctas: int = 1
    cluster: int = 1
    shared: int = 0


def parameters_of(text, addresses, maps, driver):
    """[bytes of each parameter]: addresses, out's first, as many as there are 64-bit parameters; then the maps.

    maps: functions from (driver, addresses) to a map's bytes.
    """
    count = len(re.findall(r"\.param \.u64", text))
    return [np.uint64(address).tobytes() for address in addresses[:count]] + [
        encode(driver, addresses) for encode in maps
    ]


def run(text, out, *, inputs=(), maps=(), policy="random", seed=0, **shape):
    """What the kernel wrote to `out`, an array of which only shape and dtype count, on the model.

    inputs: arrays whose addresses follow out's. shape: see Shape.

    Raises:
      device.Fault: what it did wrong.
    """
    shape = Shape(**shape)
    device.register_program("test", text)
    device.schedule(policy, seed)
    with device.Memory() as memory:
        addresses = [memory.new("out", out.nbytes)]
        addresses += [memory.put(f"input {i}", array) for i, array in enumerate(inputs)]
        packed = b""
        for parameter in parameters_of(text, addresses, maps, device.driver()):
            packed += bytes(-len(packed) % min(len(parameter), 64)) + parameter
        grid, block, cluster = (shape.ctas, 1, 1), (shape.threads, 1, 1), (shape.cluster, 1, 1)
        device.launch("test", grid, block, cluster, shape.shared, packed)
        return memory.get(addresses[0], out.shape, out.dtype)


def fault(text, *arguments, **options):
    """The kind of fault that the program ends with; None if it ends well."""
    try:
        run(text, *arguments, **options)
    except device.Fault as found:
        return found.kind
    return None


# --- the same on a GPU ------------------------------------------------------------------------------------------------


class _LaunchAttribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint32 * 16))


class _LaunchConfig(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("num_attributes", ctypes.c_uint),
    )


CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
MAX_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


def run_on_gpu(text, out, *, inputs=(), maps=(), policy=None, seed=0, **shape):
    """`run` on the first GPU; the driver compiles the PTX. What a program leaves unwritten of `out` reads as 0xEE bytes."""
    del policy, seed
    shape = Shape(**shape)
    driver = ctypes.CDLL("libcuda.so.1")

    def call(name, *arguments):
        result = getattr(driver, name)(*arguments)
        assert result == 0, f"{name}: {result}"

    with direct.PrimaryContext(0):
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        call("cuModuleLoadData", ctypes.byref(module), text.encode())
        call("cuModuleGetFunction", ctypes.byref(function), module, b"test")
        call("cuFuncSetAttribute", function, MAX_SHARED, shape.shared)
        addresses = []
        try:
            for array in (np.full(out.nbytes, 0xEE, np.uint8), *inputs):
                address = ctypes.c_uint64()
                call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(array.nbytes))
                addresses.append(address.value)
                array = np.ascontiguousarray(array)
                call("cuMemcpyHtoD_v2", address, ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes))
            buffers = []
            for parameter in parameters_of(text, addresses, maps, driver):
                raw = (ctypes.c_ubyte * (len(parameter) + 64))()
                at = -(-ctypes.addressof(raw) // 64) * 64
                ctypes.memmove(at, parameter, len(parameter))
                buffers.append((raw, at))
            pointers = (ctypes.c_void_p * len(buffers))(*(at for _, at in buffers))
            attribute = _LaunchAttribute(CLUSTER_DIMENSION, 0, (shape.cluster, 1, 1))
            config = _LaunchConfig(
                (shape.ctas, 1, 1), (shape.threads, 1, 1), shape.shared, None, ctypes.pointer(attribute), 1
            )
            call("cuLaunchKernelEx", ctypes.byref(config), function, pointers, None)
            call("cuCtxSynchronize")
            got = np.zeros(out.shape, out.dtype)
            call(
                "cuMemcpyDtoH_v2",
                ctypes.c_void_p(got.ctypes.data),
                ctypes.c_uint64(addresses[0]),
                ctypes.c_size_t(got.nbytes),
            )
        finally:
            for address in addresses:
                driver.cuMemFree_v2(ctypes.c_uint64(address))
            driver.cuModuleUnload(module)
        return got
