"""torch tensors. torch is never imported: whoever has a tensor has imported it."""

import contextlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

from jax_grouped_gemm import contract
from jax_grouped_gemm.compat import streams, through_xla, values


def _torch():
    return sys.modules["torch"]


def layout(tensor):
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def pointers_layout(l, device):
    """Of an operand b_ptrs for L experts; device as in another layout."""
    return (l,), (1,), _torch().int64, device


def device_of(device):
    """The device that a layout tells of."""
    return device


def capability(device):
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        raise contract.no_such_device(device)
    return "{}.{}".format(*_torch().cuda.get_device_capability(device))


def load(plan, device):
    """Kernels of a later launch."""
    if device.type == "cuda":
        plan.forward.load(device.index)


def run(plan, operands, stream, by_address=True):
    """(D, C or None), into d_tensor and c_tensor where given."""
    del by_address  # always
    run_on = _on_cpu if operands.a_tensor.device.type == "cpu" else _on_cuda
    return run_on(plan, operands, stream)


# --- CUDA -------------------------------------------------------------------------------------------------------------


def _on_cuda(plan, operands, stream):
    cuda, call, device = _torch().cuda, plan.call, operands.a_tensor.device
    with cuda.device(device):
        current = cuda.current_stream()
        capturing = cuda.is_current_stream_capturing()
        handle = current.cuda_stream if stream is None else streams.handle(stream)
        launch_on = current if handle == current.cuda_stream else cuda.ExternalStream(handle, device=device)
        # What is allocated here belongs to the launch's stream: memory that another stream has freed may be in use there.
        with contextlib.nullcontext() if launch_on is current else cuda.stream(launch_on):
            # Either being captured forbids to wait for a copy to the host.
            if not (capturing or cuda.is_current_stream_capturing()):
                _check_values(plan, operands, _from_device)
            d = _output(operands.d_tensor, call, call.d_dtype, device)
            c = None if call.c_dtype is None else _output(operands.c_tensor, call, call.c_dtype, device)
            scratch = None
            if call.scratch_bytes:
                scratch = _torch().empty(call.scratch_bytes, dtype=_torch().uint8, device=device)
        # Their memory is not given away before the launch is through, wherever it came from.
        for tensor in (scratch, operands.b_ptrs):
            if tensor is not None:
                tensor.record_stream(launch_on)
        tensors = operands._replace(d_tensor=d, c_tensor=c)
        addresses = contract.StridedOperands(*[0 if x is None else x.data_ptr() for x in tensors])
        plan.launch(device.index, handle, addresses, 0 if scratch is None else scratch.data_ptr())
    return d, c


def _output(given, call, dtype, device):
    if given is not None:
        return given
    m, n = call.m, call.n
    return _torch().empty_strided((m, n, 1), (n, 1, m * n), dtype=getattr(_torch(), dtype), device=device)


def _check_values(plan, operands, read):
    offsets, b_ptrs = operands.padded_offsets, operands.b_ptrs
    values.check_offsets(plan, offsets, _version(offsets), read)
    if b_ptrs is not None:
        values.check_pointers(b_ptrs, _version(b_ptrs), read)


def _version(tensor):
    """Counts writes in place; tensors of inference mode have none."""
    return None if tensor.is_inference() else tensor._version


def _from_device(tensor):
    return tensor.cpu().numpy()


# --- CPU --------------------------------------------------------------------------------------------------------------


def _on_cpu(plan, operands, stream):
    """By the native call's reference, on NumPy views."""
    del stream  # nothing here runs on one
    _check_values(plan, operands, _view)
    device, call = operands.a_tensor.device, plan.call
    results = through_xla.forward(_native(operands, call), call=call)
    outputs = []
    for result, given, dtype in zip(
        results, (operands.d_tensor, operands.c_tensor), (call.d_dtype, call.c_dtype), strict=True
    ):
        outputs.append(None if result is None else _output(given, call, dtype, device))
        if result is not None:
            _view(outputs[-1])[...] = np.asarray(result)
    return tuple(outputs)


def _native(operands, call):
    """JAX arrays on the CPU, as `through_xla` wants them."""
    views = {name: _view(x) for name, x in operands._asdict().items() if x is not None}
    views = {name: x for name, x in views.items() if name not in ("c_tensor", "d_tensor")}
    if "b_tensor" in views:
        views["b_tensor"] = views["b_tensor"].transpose((2, 0, 1) if call.b_major == "k" else (2, 1, 0))
    if "bias_tensor" in views:
        views["bias_tensor"] = views["bias_tensor"].T
    if "b_ptrs" in views:
        views["b_ptrs"] = views["b_ptrs"].view(np.uint8)  # without x64, JAX would truncate int64
    cpu = jax.devices("cpu")[0]
    return contract.StridedOperands(**dict.fromkeys(operands._fields) | jax.device_put(views, cpu))


def _view(tensor):
    """The same memory as NumPy, whose own types have no bfloat16."""
    tensor = tensor.detach()
    if tensor.dtype == _torch().bfloat16:
        return tensor.view(_torch().int16).numpy().view(jnp.bfloat16)
    return tensor.numpy()
