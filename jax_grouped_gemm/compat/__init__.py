"""The document's names, for torch tensors and JAX arrays: a translation of arguments, nothing else.

wrapper, operation, jax_entry, wgrad   the names, with the document's parameters
  -> plan                        descriptors -> a checked call, remembered
  -> torch_tensors | jax_arrays  the same functions for each framework
       -> direct                 by address on a stream
       -> through_xla            the native grouped_gemm, grouped_gemm_wgrad
"""

from jax_grouped_gemm.compat.jax_entry import grouped_gemm_jax_sm100
from jax_grouped_gemm.compat.operation import GroupedGemm, GroupedGemmSm100
from jax_grouped_gemm.compat.tuple_dict import TupleDict
from jax_grouped_gemm.compat.wgrad import (
    grouped_gemm_wgrad_jax_sm100,
    grouped_gemm_wgrad_wrapper,
    grouped_gemm_wgrad_wrapper_sm100,
)
from jax_grouped_gemm.compat.wrapper import grouped_gemm_wrapper, grouped_gemm_wrapper_sm100

__all__ = [
    "GroupedGemm",
    "GroupedGemmSm100",
    "TupleDict",
    "grouped_gemm_jax_sm100",
    "grouped_gemm_wgrad_jax_sm100",
    "grouped_gemm_wgrad_wrapper",
    "grouped_gemm_wgrad_wrapper_sm100",
    "grouped_gemm_wrapper",
    "grouped_gemm_wrapper_sm100",
]
