"""Every way to pass a stream -> its handle, a CUstream as an integer."""

import contextlib

from jax_grouped_gemm.compat import strided


def handle(stream):
    """For an integer, a torch stream, CUDA's own Python objects, and what implements __cuda_stream__."""
    found = stream
    with contextlib.suppress(TypeError, ValueError):
        if hasattr(stream, "cuda_stream"):
            found = stream.cuda_stream
        elif hasattr(stream, "__cuda_stream__"):
            _version, found = stream.__cuda_stream__()
        if not isinstance(found, (bool, str, bytes, float)) and 0 <= int(found) < 2**64:
            return int(found)
    raise strided.no_stream(stream)
