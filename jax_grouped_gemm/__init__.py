"""Mixture-of-experts grouped GEMM for JAX on NVIDIA GPUs, with kernels compiled ahead of time."""

from jax_grouped_gemm import acceleration
from jax_grouped_gemm.acceleration import accelerate
from jax_grouped_gemm.api import grouped_gemm, grouped_gemm_wgrad
from jax_grouped_gemm.compat import (
    GroupedGemm,
    GroupedGemmSm100,
    TupleDict,
    grouped_gemm_jax_sm100,
    grouped_gemm_wgrad_jax_sm100,
    grouped_gemm_wgrad_wrapper,
    grouped_gemm_wgrad_wrapper_sm100,
    grouped_gemm_wrapper,
    grouped_gemm_wrapper_sm100,
)
from jax_grouped_gemm.ragged import ragged_dot, ragged_dot_general
from jax_grouped_gemm.tuned import use as use_tuned
from jax_grouped_gemm.tuning import Tuned, tune

__version__ = "0.1.0"

__all__ = [
    "GroupedGemm",
    "GroupedGemmSm100",
    "Tuned",
    "TupleDict",
    "__version__",
    "accelerate",
    "grouped_gemm",
    "grouped_gemm_jax_sm100",
    "grouped_gemm_wgrad",
    "grouped_gemm_wgrad_jax_sm100",
    "grouped_gemm_wgrad_wrapper",
    "grouped_gemm_wgrad_wrapper_sm100",
    "grouped_gemm_wrapper",
    "grouped_gemm_wrapper_sm100",
    "ragged_dot",
    "ragged_dot_general",
    "tune",
    "use_tuned",
]

if acceleration.enabled_by_environment():
    accelerate()
