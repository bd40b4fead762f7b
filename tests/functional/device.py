"""The functional model as a device: memory, kernels and forward calls of the real library, whose driver it is."""

import ctypes
import functools
import hashlib
import json
import pathlib
import re

import ml_dtypes
import numpy as np
import oracle

from jax_grouped_gemm import config, direct, library

ROOT = pathlib.Path(__file__).parents[2]
AOT = ROOT / "build" / "aot"
MODEL = ROOT / "build" / "model" / "libcuda.so.1"
MAX_STATEMENTS = 20_000_000  # several hundred times what a problem of the sweep takes


class Fault(Exception):
    """A kernel did wrong. kind: see model/fault.h."""

    def __init__(self, kind, report):
        super().__init__(f"{kind}: {report}")
        self.kind = kind
        self.report = report


@functools.cache
def _model():
    """Loaded before anything asks for libcuda.so.1: who opens that name then gets this library."""
    model = ctypes.CDLL(str(MODEL), mode=ctypes.RTLD_GLOBAL)
    model.model_alloc.restype = ctypes.c_uint64
    model.model_alloc.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
    model.model_free.argtypes = [ctypes.c_uint64]
    model.model_write.argtypes = [ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t]
    model.model_read.argtypes = [ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    model.model_register.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p]
    model.model_schedule.argtypes = [ctypes.c_char_p, ctypes.c_uint64, ctypes.c_uint64]
    model.model_statements.argtypes = [ctypes.c_char_p]
    model.model_statements.restype = ctypes.c_size_t
    model.model_coverage.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p]
    model.model_multiply_add.argtypes = [
        ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_int
    ]  # fmt: skip
    model.model_launch.argtypes = [
        ctypes.c_char_p, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_char_p, ctypes.c_size_t
    ]  # fmt: skip
    for name in ("model_register", "model_schedule", "model_fault", "model_statistics", "model_launch"):
        getattr(model, name).restype = ctypes.c_char_p
    return model


def driver():
    """The stand-in for libcuda.so.1, with the driver's entry points."""
    return _model()


@functools.cache
def _library():
    _model()
    return ctypes.CDLL(str(library.LIBRARY))


# --- kernels ----------------------------------------------------------------------------------------------------------


@functools.cache
def facts(name):
    return json.loads((AOT / f"{name}.json").read_text())["facts"]


def ptx(name):
    """Of the compilation that made the cubin: the build recorded both hashes."""
    text = (AOT / f"{name}.ptx").read_text()
    assert hashlib.sha256(text.encode()).hexdigest() == facts(name)["ptx_sha256"]
    return text


@functools.cache
def _cubin(name):
    cubin = (AOT / f"{name}.cubin").read_bytes()
    assert hashlib.sha256(cubin).hexdigest() == facts(name)["sha256"]
    return cubin


def register(name, text=None):
    """The library's kernel of this name runs this PTX, its own if none is given."""
    register_program(name, ptx(name) if text is None else text, _cubin(name))


def register_with_prologues(variant, text=None):
    """A variant, and the kernels that run before it where weights are in arrays of their own."""
    register(variant.name, text)
    if not isinstance(variant, config.WgradVariant):
        for source in ("memory", "value"):
            register(config.prologue_name(variant.arch, source))


def register_program(name, text, cubin=b"none"):
    error = _model().model_register(name.encode(), cubin, len(cubin), text.encode())
    if error is not None:
        raise Fault("unknown", error.decode())


def register_module(name, text, cubin):
    """The kernels of a module, each by itself."""
    head, *kernels = re.split(r"^(?=\.visible \.entry)", text, flags=re.MULTILINE)
    for i, kernel in enumerate(kernels):
        register_program(f"{name}, kernel {i}", head + kernel, cubin)


def schedule(policy, seed):
    error = _model().model_schedule(policy.encode(), seed, MAX_STATEMENTS)
    assert error is None, error


def launch(name, grid, block, cluster, shared, parameters):
    """Runs a registered program by itself."""
    dims = np.array([*grid, *block, *cluster], np.uint32)
    fault = _model().model_launch(name.encode(), dims.ctypes.data, shared, parameters, len(parameters))
    if fault is not None:
        _model().model_fault()
        raise Fault(*fault.decode().split("\n", 1))


def check_launches():
    """
    Raises:
      Fault: of a launch since the last call.
    """
    fault = _model().model_fault().decode()
    if fault:
        raise Fault(*fault.split("\n", 1))


def coverage(name):
    """(source line of every statement of the PTX, how often it ran since it was registered)."""
    n = _model().model_statements(name.encode())
    lines, executed = np.zeros(n, np.int32), np.zeros(n, np.uint64)
    _model().model_coverage(name.encode(), lines.ctypes.data, executed.ctypes.data)
    return lines, executed


def statistics():
    """What all launches since the last call did."""
    lines = _model().model_statistics().decode().splitlines()
    return {key: int(value) for key, value in (line.split("\t") for line in lines)}


def multiply_add(a, b, d):
    """D += A B^T as the model's matrix unit adds: a (m, 16), b (n, 16) bits of bfloat16, d (m, n) float32."""
    a, b = np.ascontiguousarray(a, np.uint16), np.ascontiguousarray(b, np.uint16)
    assert (a.shape[1], b.shape[1], d.shape, d.dtype) == (16, 16, (len(a), len(b)), np.float32)
    _model().model_multiply_add(a.ctypes.data, len(a), b.ctypes.data, len(b), d.ctypes.data, 1)


# --- memory -----------------------------------------------------------------------------------------------------------


class Memory:
    """Buffers of one call; freed together."""

    def __init__(self):
        self._buffers = []

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for address in self._buffers:
            _model().model_free(address)

    def new(self, name, size, align=256, *, skew=0, writable=True):
        """skew: bytes by which it misses the alignment."""
        base = _model().model_alloc(name.encode(), size + skew, align, writable)
        self._buffers.append(base)
        return base + skew

    def put(self, name, array, *, writable=False, **options):
        array = np.ascontiguousarray(array)
        address = self.new(name, max(array.nbytes, 1), writable=writable, **options)
        assert _model().model_write(address, array.ctypes.data, array.nbytes) == 0
        return address

    def get(self, address, shape, dtype):
        """An array, all of whose elements were written."""
        array = np.zeros(shape, dtype)
        written = np.zeros(array.nbytes, np.uint8)
        assert _model().model_read(address, array.ctypes.data, written.ctypes.data, array.nbytes) == 0
        if not written.all():
            raise Fault("unwritten", f"{(written == 0).sum()} of {written.size} bytes of the result were never written")
        return array


# --- calls ------------------------------------------------------------------------------------------------------------


LOOSE = ("offsets", "experts", "alpha", "prob", "bias", "b_ptrs")  # operands that need only their element's alignment


def is_wgrad(variant):
    return isinstance(variant, config.WgradVariant)


def library_call(variant, case, dynamic, b_ptrs, put, new):
    """The library's call of this variant for an `oracle.Case` or `oracle.WgradCase`, on a device with put(name, array) and new(name, bytes).

    b_ptrs: of kernels that take one address per expert, how: "memory" or "value".

    Returns:
      call: whose arrays on the host, in `call.keep`, live as long as it.
      outputs: [(name, address, shape, dtype)] of D, and of C where there is one.
    """
    return (_wgrad_call if is_wgrad(variant) else _forward_call)(variant, case, dynamic, b_ptrs, put, new)


def make_call(loaded, variant, call):
    """By this copy of the library.

    Raises:
      RuntimeError: its error.
    """
    entry = loaded.jgg_wgrad if is_wgrad(variant) else loaded.jgg_forward
    entry.argtypes, entry.restype = [ctypes.POINTER(type(call))], ctypes.c_char_p
    error = entry(ctypes.byref(call))
    if error is not None:
        raise RuntimeError(error.decode())


def _forward_call(variant, case, dynamic, b_ptrs, put, new):
    m, k = case.a.shape
    l, n = len(case.b), case.b.shape[1 if case.b_major == "k" else 2]
    call = direct.LibraryCall(struct_size=ctypes.sizeof(direct.LibraryCall))
    setattr(call, f"sm{variant.arch}", variant.name.encode())
    call.b_major, call.d_dtype = case.b_major.encode(), case.d_dtype.encode()
    call.m, call.n, call.k, call.l, call.groups, call.dynamic = m, n, k, l, case.offsets.size, dynamic
    call.a, call.offsets = put("a", case.a), put("offsets", case.offsets)
    if variant.weights == "dense":
        call.weights, call.b = b"dense", put("b", case.b)
    else:
        addresses = [put(f"b[{i}]", case.b[i]) for i in range(l)]
        if b_ptrs == "value":
            call.keep = (ctypes.c_uint64 * l)(*addresses)
            call.weights = b"tuple"
            call.weight_addresses = ctypes.cast(call.keep, ctypes.POINTER(ctypes.c_uint64))
        else:
            call.weights, call.b = b"pointers", put("b_ptrs", np.array(addresses, np.uint64))
    for operand in ("experts", "alpha", "prob"):
        if (array := getattr(case, operand)) is not None:
            setattr(call, operand, put(operand, array))
    if case.bias is not None:
        call.bias_dtype, call.bias = case.bias.dtype.name.encode(), put("bias", case.bias)
    scratch = (0 if variant.weights == "dense" else 128 * l) + (128 if dynamic else 0)
    if scratch:
        call.scratch = new("scratch", scratch)
    outputs = []
    for name, dtype in {"d": case.d_dtype, **({"c": case.c_dtype} if case.generate_c else {})}.items():
        setattr(call, f"{name}_dtype", dtype.encode())
        dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
        setattr(call, name, new(name, m * n * dtype.itemsize))
        outputs.append((name, getattr(call, name), (m, n), dtype))
    return call, outputs


def _wgrad_call(variant, case, dynamic, b_ptrs, put, new):
    (m, n), k, l = case.x.shape, case.y.shape[1], case.l
    call = direct.LibraryWgradCall(struct_size=ctypes.sizeof(direct.LibraryWgradCall), d_dtype=variant.d_dtype.encode())
    setattr(call, f"sm{variant.arch}", variant.name.encode())
    call.m, call.n, call.k, call.l, call.groups, call.dynamic = m, n, k, l, case.offsets.size, dynamic
    for operand in ("x", "y", "offsets", "experts", "alpha"):
        if (array := getattr(case, operand)) is not None:
            setattr(call, operand, put(operand, array))
    dtype = np.dtype(getattr(ml_dtypes, variant.d_dtype, variant.d_dtype))
    call.d = new("d", l * n * k * dtype.itemsize) if case.total is None else put("d", case.total, writable=True)
    call.accumulate = variant.accumulate
    if dynamic:
        call.scratch = new("scratch", 128)
    return call, [("d", call.d, (l, n, k), dtype)]


def run(variant, case, *, dynamic=False, clusters=2, policy="random", seed=0, b_ptrs=None):
    """What a variant computes on the model: D, or (D, C). clusters: that the device runs at once.

    Raises:
      Fault: what the kernel did wrong.
    """
    _model().model_device(variant.arch // 10, 0, clusters)
    schedule(policy, seed)
    with Memory() as memory:

        def put(name, array, **options):
            loose = {"align": 64, "skew": array.itemsize} if name in LOOSE else {}
            return memory.put(name, array, **loose, **options)

        call, outputs = library_call(variant, case, dynamic, b_ptrs, put, memory.new)
        try:
            make_call(_library(), variant, call)
        finally:
            check_launches()
        got = tuple(memory.get(address, shape, dtype) for _, address, shape, dtype in outputs)
        return got if len(got) > 1 else got[0]


# --- comparison -------------------------------------------------------------------------------------------------------


def exact_case(
    rng, variant, ends, n, k, m, *, alpha=False, prob=False, bias=None, c_dtype=None, d_dtype=None, experts=None
):  # fmt: skip
    """An `oracle.Case` of small integers and powers of two, whose sums are exact in float32 in any order."""
    groups = len(ends)
    l = groups if experts is None else oracle.num_experts(experts)
    shape = (l, n, k) if variant.b_major == "k" else (l, k, n)
    case = oracle.Case(
        rng.integers(-4, 5, (m, k)).astype(oracle.BF16),
        rng.integers(-4, 5, shape).astype(oracle.BF16),
        np.array(ends, np.int32),
        rng.choice([0.5, 1, 2, -1], groups).astype(np.float32) if alpha else None,
        rng.choice([0.25, 0.5, 1, 2], m).astype(np.float32) if prob else None,
        variant.b_major,
        d_dtype or variant.d_dtype,
        None if bias is None else rng.integers(-8, 9, (groups, n)).astype(bias),
        variant.c_dtype is not None,
        c_dtype,
        None if experts is None else np.array(experts, np.int32),
    )
    oracle._poison(case)
    return case


def check_exact(got, case):
    """Bit for bit what exact arithmetic and one rounding give."""
    wants = case.results() if hasattr(case, "results") else _outputs(case)
    for (output, want), array in zip(wants.items(), got if isinstance(got, tuple) else (got,), strict=True):
        want = want.astype(array.dtype)
        wrong = array != want
        if wrong.any():
            at = tuple(np.argwhere(wrong)[0])
            raise Fault(
                "result",
                f"{output}{list(map(int, at))} is {array[at]}, expected {want[at]}; "
                f"{wrong.sum()} of {wrong.size} elements differ; groups {case.groups()}",
            )


def _outputs(case):
    return {output: oracle.oracle(case, output)[0] for output in ("D", "C")[: 1 + case.generate_c]}
