"""What the package logs: that something slower took the place of the kernels, and why."""

import functools
import logging

_logger = logging.getLogger("jax_grouped_gemm")


@functools.cache
def once(message):
    _logger.warning(message)
