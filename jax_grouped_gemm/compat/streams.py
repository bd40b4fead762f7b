"""Every way to pass a stream -> its handle, a CUstream as an integer."""

import contextlib

from jax_grouped_gemm import contract


def handle(stream):
    """For an integer, a torch stream, CUDA's own Python objects, and what implements __cuda_stream__."""
    if hasattr(stream, "cuda_stream"):
        return int(stream.cuda_stream)
    if hasattr(stream, "__cuda_stream__"):
        _version, found = stream.__cuda_stream__()
        return int(found)
    if not isinstance(stream, (str, float)):
        with contextlib.suppress(TypeError, ValueError):
            return int(stream)
    raise contract.no_stream(stream)
