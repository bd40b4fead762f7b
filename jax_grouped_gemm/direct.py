"""A call of the library by address, on a stream that XLA does not know."""

import ctypes
import functools
import struct

from jax_grouped_gemm import contract, ffi_call, library, wgrad_call


class LibraryCall(ctypes.Structure):
    """jgg_call of ffi/c_api.h."""

    _fields_ = (
        [("struct_size", ctypes.c_int64)]
        + [(name, ctypes.c_char_p) for name in ("sm90", "sm100", "weights", "b_major", "d_dtype", "c_dtype", "bias_dtype")]
        + [(name, ctypes.c_int64) for name in ("m", "n", "k", "l", "groups", "dynamic", "overlap_margin")]
        + [(name, ctypes.c_uint64) for name in ("a", "offsets", "experts", "alpha", "prob", "bias", "b")]
        + [("weight_addresses", ctypes.POINTER(ctypes.c_uint64))]
        + [(name, ctypes.c_uint64) for name in ("d", "c", "scratch", "stream")]
    )  # fmt: skip


class LibraryWgradCall(ctypes.Structure):
    """jgg_wgrad_call of ffi/c_api.h."""

    _fields_ = (
        [("struct_size", ctypes.c_int64)]
        + [(name, ctypes.c_char_p) for name in ("sm90", "sm100", "d_dtype")]
        + [(name, ctypes.c_int64) for name in ("m", "n", "k", "l", "groups", "dynamic", "accumulate", "overlap_margin")]
        + [(name, ctypes.c_uint64) for name in ("x", "y", "offsets", "experts", "alpha", "d", "scratch", "stream")]
    )  # fmt: skip


class _Launcher:
    """Launches one call again and again: all but the addresses is prepared once.

    Whoever calls it keeps every buffer alive until the stream is past the call, and has checked the operands: the
    library checks only that it stays in bounds.
    """

    def __init__(self, function, structure, kernel_name, call):
        why = library.registered()
        if why is not None:
            raise contract.no_library(why)
        self.scratch_bytes = call.scratch_bytes
        self._function = function
        # Copies of a struct share its pointers but do not keep their targets alive: this one does.
        self._template = structure(
            struct_size=ctypes.sizeof(structure),
            sm90=kernel_name(90, call).encode(),
            sm100=kernel_name(100, call).encode(),
            d_dtype=call.d_dtype.encode(),
            m=call.m,
            n=call.n,
            k=call.k,
            l=call.l,
            groups=call.groups,
            dynamic=call.dynamic,
            overlap_margin=call.overlap_margin,
        )

    def load(self, device, stream=0):
        """Loads the kernels, which a call does at its first use; a stream capture allows no loading."""
        call = self._copy()
        call.n, call.stream = 0, stream  # no columns: nothing is launched
        self._launch(device, call)

    def _copy(self):
        return type(self._template).from_buffer_copy(self._template)

    def _launch(self, device, call):
        with PrimaryContext(device):
            error = getattr(_library(), self._function)(ctypes.byref(call))
        if error is not None:
            raise RuntimeError(error.decode())


class Forward(_Launcher):
    """Of a `calls.Call`."""

    _addresses = struct.Struct("12Q")  # from `a` to the end

    def __init__(self, call, bias_dtype=None):
        super().__init__("jgg_forward", LibraryCall, ffi_call.kernel_name, call)
        self._template.weights = call.weights.encode()
        self._template.b_major = call.b_major.encode()
        self._template.c_dtype = _encoded(call.c_dtype)
        self._template.bias_dtype = _encoded(bias_dtype)

    def __call__(
        self, device, stream, *, a, offsets, d, b=0, alpha=0, prob=0, bias=0, c=0, scratch=0, weight_addresses=None
    ):
        """Enqueues the call. device: the GPU's ordinal; stream: a CUstream as an integer, 0 for the legacy default one.

        The rest are addresses, as in jgg_call; weight_addresses, for weights "tuple", is a sequence, and b is 0 then.

        Raises:
          RuntimeError: what the library, or the driver, refuses.
        """
        call = self._copy()
        table, weights = 0, None
        if weight_addresses is not None:
            weights = (ctypes.c_uint64 * len(weight_addresses))(*weight_addresses)
            table = ctypes.addressof(weights)
        # All at once: an assignment to each field costs more than the call.
        self._addresses.pack_into(
            call, LibraryCall.a.offset, a, offsets, 0, alpha, prob, bias, b, table, d, c, scratch, stream
        )
        self._launch(device, call)


class Wgrad(_Launcher):
    """Of a `calls.WgradCall`."""

    _addresses = struct.Struct("8Q")  # from `x` to the end

    def __init__(self, call):
        super().__init__("jgg_wgrad", LibraryWgradCall, wgrad_call.kernel_name, call)
        self._template.accumulate = call.accumulate

    def __call__(self, device, stream, *, x, y, offsets, d, alpha=0, scratch=0):
        """As that of `Forward`, with the addresses of jgg_wgrad_call."""
        call = self._copy()
        self._addresses.pack_into(call, LibraryWgradCall.x.offset, x, y, offsets, 0, alpha, d, scratch, stream)
        self._launch(device, call)


def _encoded(text):
    return None if text is None else text.encode()


@functools.cache
def _library():
    loaded = library.load()
    for function, structure in ((loaded.jgg_forward, LibraryCall), (loaded.jgg_wgrad, LibraryWgradCall)):
        function.argtypes = [ctypes.POINTER(structure)]
        function.restype = ctypes.c_char_p
    return loaded


# --- the driver, for what the caller's framework would do -------------------------------------------------------------


class PrimaryContext:
    """Makes the context that every framework uses on a GPU current on this thread, which may have none."""

    def __init__(self, device):
        self._context = _retained(device)

    def __enter__(self):
        _checked("cuCtxPushCurrent_v2", self._context)

    def __exit__(self, *error):
        _driver().cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


@functools.cache
def _retained(device):
    """Once per process and GPU; never released, as frameworks keep it as long."""
    _checked("cuInit", 0)
    context = ctypes.c_void_p()
    _checked("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    return context


def capturing(device, stream):
    """The stream is being captured into a graph, so that nothing may be copied to the host."""
    status = ctypes.c_int()
    with PrimaryContext(device):
        _checked("cuStreamIsCapturing", ctypes.c_void_p(stream), ctypes.byref(status))
    return status.value != 0


def synchronize(device, stream):
    """Waits for a stream; JAX has no name for streams that XLA does not know."""
    with PrimaryContext(device):
        _checked("cuStreamSynchronize", ctypes.c_void_p(stream))


@functools.cache
def _driver():
    return ctypes.CDLL("libcuda.so.1")


def _checked(name, *arguments):
    code = getattr(_driver(), name)(*arguments)
    if code:
        raise contract.driver_failed(name, code)
