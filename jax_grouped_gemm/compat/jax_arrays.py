"""JAX arrays: through XLA, or by address on a stream that XLA does not know."""

import ctypes
import weakref

import jax
import jax.numpy as jnp
import numpy as np

from jax_grouped_gemm import direct
from jax_grouped_gemm.compat import streams, strided, strided_wgrad, through_xla, values

_scratch_of: dict[int, list[jax.Array]] = {}  # id of D -> scratch of the launches that write it


def layout(array):
    traced = isinstance(array, jax.core.Tracer)
    return array.shape, None, array.dtype, None if traced else array.sharding  # cheaper to get than the device


def pointers_layout(l, device):
    """Of an operand b_ptrs for L experts; device as in another layout."""
    return (l,), None, np.dtype(np.int64), device


def device_of(sharding):
    """The device that a layout tells of; None under tracing."""
    if sharding is None:
        return None
    if len(sharding.device_set) != 1:
        raise strided.several_devices(sharding)
    (device,) = sharding.device_set
    return device


def capability(device):
    return getattr(device, "compute_capability", None)


def load(plan, device):
    """Kernels of a later launch by address."""
    if capability(device) is not None:
        plan.forward.load(device.local_hardware_id)


def run(plan, operands, stream, by_address):
    """(D, C or None). by_address: into d_tensor and c_tensor where given, on a stream; else through XLA."""
    traced = [name for name, x in operands._asdict().items() if isinstance(x, jax.core.Tracer)]
    if by_address and traced:
        raise strided.values_traced(traced[0])
    if not by_address:
        _check_values(plan, operands)
        return through_xla.forward(operands._replace(c_tensor=None, d_tensor=None), call=plan.call)
    if capability(operands.a_tensor.device) is None:
        if stream is not None:
            streams.handle(stream)  # nothing here runs on one, but it has to be one
        _check_values(plan, operands)
        return _write_on_cpu(plan, operands)
    device, handle = operands.a_tensor.device.local_hardware_id, 0 if stream is None else streams.handle(stream)
    if not direct.capturing(device, handle):
        _check_values(plan, operands)
    return _launch(plan, operands, handle)


def run_wgrad(plan, operands, stream):
    """The gradient, through XLA."""
    strided_wgrad.check_functional(wgrad_tensor=operands.wgrad_tensor, current_stream=stream)
    if not isinstance(operands.offsets_tensor, jax.core.Tracer):
        values.check_offsets(plan, operands.offsets_tensor, 0, np.asarray)
    return through_xla.wgrad(operands.a_tensor.T, operands.b_tensor, operands.offsets_tensor, call=plan.call)


def _check_values(plan, operands):
    """JAX arrays never change: once is enough for each."""
    if not isinstance(operands.padded_offsets, jax.core.Tracer):
        values.check_offsets(plan, operands.padded_offsets, 0, np.asarray)
    if operands.b_ptrs is not None and not isinstance(operands.b_ptrs, jax.core.Tracer):
        values.check_pointers(operands.b_ptrs, 0, np.asarray)


def _write_on_cpu(plan, operands):
    plan.check_outputs_apart(_addresses(operands if plan.call.c_dtype else operands._replace(c_tensor=None)))
    results = through_xla.forward(operands._replace(c_tensor=None, d_tensor=None), call=plan.call)
    return tuple(
        result if given is None or result is None else _overwritten(given, np.asarray(result))
        for result, given in zip(results, (operands.d_tensor, operands.c_tensor), strict=True)
    )


def _overwritten(array, content):
    ctypes.memmove(jax.block_until_ready(array).unsafe_buffer_pointer(), content.ctypes.data, content.nbytes)
    return array


def _launch(plan, operands, stream):
    call, device = plan.call, operands.a_tensor.device
    d = _output(operands.d_tensor, call, call.d_dtype, device)
    c = None if call.c_dtype is None else _output(operands.c_tensor, call, call.c_dtype, device)
    addresses = _addresses(operands._replace(d_tensor=d, c_tensor=c))
    plan.check_outputs_apart(addresses)
    plan.launch(device.local_hardware_id, stream, addresses, _scratch(call.scratch_bytes, d))
    return d, c


def _addresses(operands):
    return strided.StridedOperands(*[0 if x is None else x.unsafe_buffer_pointer() for x in operands])


def _output(given, call, dtype, device):
    # XLA fills a new array on a stream of its own: the launch must not come before that.
    return given if given is not None else jax.block_until_ready(jnp.zeros((call.m, call.n, 1), dtype, device=device))


def _scratch(size, d):
    """The address of scratch from XLA's pool, which gives away what is dropped, though a kernel may still use it.

    The caller keeps D until its stream is past the launch, and launches that write one D come one after the other: so
    D's scratch may be used again by the next, and goes with D.
    """
    if size == 0:
        return 0
    if id(d) not in _scratch_of:
        _scratch_of[id(d)] = []
        weakref.finalize(d, _scratch_of.pop, id(d))
    found = next((x for x in _scratch_of[id(d)] if x.size >= size), None)
    if found is None:
        found = jax.block_until_ready(jnp.zeros(size, jnp.uint8, device=d.device))
        _scratch_of[id(d)].append(found)
    return found.unsafe_buffer_pointer()
