"""Mixture-of-experts layers: routing in plain JAX, and modules for Flax, which is imported by those alone."""

from jax_grouped_gemm.nn import routing

__all__ = ["routing"]
