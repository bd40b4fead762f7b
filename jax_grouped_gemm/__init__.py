"""Mixture-of-experts grouped GEMM for JAX on NVIDIA GPUs, with kernels compiled ahead of time."""

from jax_grouped_gemm.api import grouped_gemm

__version__ = "0.1.0"

__all__ = ["__version__", "grouped_gemm"]
