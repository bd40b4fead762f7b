"""torch tensors. torch is never imported: whoever has a tensor has imported it."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np

from jax_grouped_gemm.compat import streams, strided, through_xla, values


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
        raise strided.no_such_device(device)
    return "{}.{}".format(*_torch().cuda.get_device_capability(device))


def load(plan, device):
    """Kernels of a later launch."""
    if device.type == "cuda":
        plan.forward.load(device.index)


def run(plan, operands, stream, by_address=True):
    """(D, C or None), into d_tensor and c_tensor where given."""
    del by_address  # always
    return _run(_on_cpu, _launch, plan, operands, stream)


def run_wgrad(plan, operands, stream):
    """The gradient, in wgrad_tensor where given."""
    return _run(_wgrad_on_cpu, _launch_wgrad, plan, operands, stream)


def _run(on_cpu, launch, plan, operands, stream):
    if _torch().is_grad_enabled():
        for name, x in zip(operands._fields, operands, strict=True):
            if x is not None and x.requires_grad:
                raise strided.gradient_needed(name)
    if operands.a_tensor.device.type == "cpu":
        return on_cpu(plan, operands, stream)
    return _on_cuda(launch, plan, operands, stream)


# --- CUDA -------------------------------------------------------------------------------------------------------------


def _on_cuda(launch, plan, operands, stream):
    """Switches device and stream only where they are not torch's current ones: that costs as much as the launch."""
    cuda, device = _torch().cuda, operands.a_tensor.device
    if device.index != cuda.current_device():
        with cuda.device(device):
            return _on_cuda(launch, plan, operands, stream)
    current = _current_stream(device.index)
    handle = current if stream is None else streams.handle(stream)
    if handle == current:
        return launch(plan, operands, handle, capturing=False)
    capturing = cuda.is_current_stream_capturing()
    # What is allocated there belongs to the launch's stream: memory that another has freed may still be in use here.
    with cuda.stream(_stream(device, handle)):
        return launch(plan, operands, handle, capturing)


def _current_stream(index):
    """Its handle, as torch.compile's programs ask for it; `torch.cuda.current_stream` makes an object, slowly."""
    return _torch()._C._cuda_getCurrentRawStream(index)


@functools.lru_cache(maxsize=64)
def _stream(device, handle):
    """torch's object for a stream."""
    return _torch().cuda.ExternalStream(handle, device=device)


def _launch(plan, operands, handle, capturing):
    """On torch's current stream and device. capturing: another stream, that the caller is on, is being captured."""
    call, device = plan.call, operands.a_tensor.device
    _check_values(plan, operands, _out_of_sight if capturing else _from_device)
    d = _output(operands.d_tensor, call, call.d_dtype, device)
    c = None if call.c_dtype is None else _output(operands.c_tensor, call, call.c_dtype, device)
    scratch = None
    if call.scratch_bytes:
        scratch = _torch().empty(call.scratch_bytes, dtype=_torch().uint8, device=device)
        # Its memory is not given away before the launch is through, wherever it came from.
        scratch.record_stream(_stream(device, handle))
    if operands.b_ptrs is not None:
        operands.b_ptrs.record_stream(_stream(device, handle))
    addresses = _addresses(operands._replace(d_tensor=d, c_tensor=c))
    _brought(plan, (operands.d_tensor, operands.c_tensor), addresses)
    plan.launch(device.index, handle, addresses, 0 if scratch is None else scratch.data_ptr())
    return d, c


def _launch_wgrad(plan, operands, handle, capturing):
    """The same, without scratch: the schedule is static."""
    call, device = plan.call, operands.a_tensor.device
    _check_token_offsets(plan, operands, _out_of_sight if capturing else _from_device)
    x, y = _columns_contiguous(plan, operands)
    d = _gradient(operands.wgrad_tensor, call, device)
    addresses = _addresses(operands._replace(wgrad_tensor=d))
    strided.check_addresses(addresses)
    _brought(plan, (operands.wgrad_tensor,), addresses)
    plan.wgrad(device.index, handle, x=x.data_ptr(), y=y.data_ptr(), offsets=addresses.offsets_tensor, d=d.data_ptr())
    return d


def _columns_contiguous(plan, operands):
    """A transposed and B, (tokens, M) and (tokens, N), copied where their tokens are contiguous."""
    x, y = operands.a_tensor.t(), operands.b_tensor
    return x.contiguous() if plan.a_copied else x, y.contiguous() if plan.b_copied else y


def _gradient(given, call, device):
    if given is not None:
        return given
    return _torch().empty((call.l, call.n, call.k), dtype=getattr(_torch(), call.d_dtype), device=device)


def _check_token_offsets(plan, operands, read):
    offsets = operands.offsets_tensor
    values.check_offsets(plan, offsets, _version(offsets), read)


def _addresses(operands):
    return type(operands)(*[0 if x is None else x.data_ptr() for x in operands])


def _brought(plan, outputs, addresses):
    """Outputs of the caller's, None if not: torch is told that they change, as by its own operations in place."""
    outputs = [x for x in outputs if x is not None]
    if outputs:
        plan.check_outputs_apart(addresses)
    for x in outputs:
        if not x.is_inference():
            sys.modules["torch"].autograd.graph.increment_version(x)


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
    """A capture of the current stream forbids to wait for a copy to the host."""
    return None if _torch().cuda.is_current_stream_capturing() else tensor.cpu().numpy()


def _out_of_sight(tensor):
    del tensor


# --- CPU --------------------------------------------------------------------------------------------------------------


def _on_cpu(plan, operands, stream):
    """By the native call's reference, on NumPy views."""
    if stream is not None:
        streams.handle(stream)  # nothing here runs on one, but it has to be one
    _check_values(plan, operands, _view)
    addresses = _addresses(operands if plan.call.c_dtype else operands._replace(c_tensor=None))
    strided.check_addresses(addresses)  # as on a GPU
    _brought(plan, (operands.d_tensor, operands.c_tensor), addresses)
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


def _wgrad_on_cpu(plan, operands, stream):
    if stream is not None:
        streams.handle(stream)
    _check_token_offsets(plan, operands, _view)
    addresses = _addresses(operands)
    strided.check_addresses(addresses)
    _brought(plan, (operands.wgrad_tensor,), addresses)
    d = _gradient(operands.wgrad_tensor, plan.call, operands.a_tensor.device)
    x, y = map(_view, _columns_contiguous(plan, operands))
    arrays = [x, y, _view(operands.offsets_tensor)] + ([_view(d)] if plan.call.accumulate else [])
    result = through_xla.wgrad(*jax.device_put(arrays, jax.devices("cpu")[0]), call=plan.call)
    _view(d)[...] = np.asarray(result)
    return d


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
    return strided.StridedOperands(**dict.fromkeys(operands._fields) | jax.device_put(views, cpu))


def _view(tensor):
    """The same memory as NumPy, whose own types have no bfloat16."""
    tensor = tensor.detach()
    if tensor.dtype == _torch().bfloat16:
        return tensor.view(_torch().int16).numpy().view(jnp.bfloat16)
    return tensor.numpy()
