"""The primitive of `grouped_gemm_wgrad`, as `ffi_call` has that of `grouped_gemm`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive

from jax_grouped_gemm import config, ffi_call, library, meshes, partitioning, parts, reference, selection

grouped_wgrad_p = Primitive("grouped_wgrad")
grouped_wgrad_p.multiple_results = True


def grouped_wgrad(call, operands):
    """D (L, N, K), or in stacks, for `calls.WgradOperands`."""
    rule, flat = partitioning.Wgrad(call), call.flat(operands)
    if not call.empty:
        (d,) = partitioning.bind(grouped_wgrad_p, rule, flat)
        return d
    if operands.total is not None:
        return operands.total
    (d,) = partitioning.zeros([jax.ShapeDtypeStruct(call.d_shape, jnp.dtype(call.d_dtype))], rule, flat)
    return d


@grouped_wgrad_p.def_abstract_eval
def _abstract_eval(*operands, call):
    return [meshes.result(call.d_shape, jnp.dtype(call.d_dtype), operands)]


def _implementation(platform, *operands, call):
    if call.stacks is not None:
        of_joined, at = dataclasses.replace(call, stacks=None), call.split(operands)
        joined = at._replace(total=None if at.total is None else at.total.reshape(of_joined.d_shape))
        (d,) = _implementation(platform, *call.flat(joined), call=of_joined)
        return [d.reshape(call.d_shape)]
    if call.parts > 1:
        return parts.added(functools.partial(_implementation, platform), operands, call)
    if ffi_call.uses_kernels(platform, call):
        return _kernels(call, operands)
    return reference.grouped_wgrad(call, *call.split(operands))


def _kernels(call, operands):
    call = selection.scheduled(ffi_call.architectures(), call)
    d = jax.ShapeDtypeStruct(call.d_shape, jnp.dtype(call.d_dtype))
    scratch = [jax.ShapeDtypeStruct((call.scratch_bytes,), jnp.uint8)] if call.scratch_bytes else []
    aliases = {len(operands) - 1: 0} if call.accumulate else {}
    custom_call = jax.ffi.ffi_call(library.WGRAD, [d, *scratch], input_output_aliases=aliases)
    return custom_call(*operands, **attributes(call))[:1]


def attributes(call):
    """The custom call's attributes, as docs/architecture.md lists them."""
    return {
        "sm90": kernel_name(90, call),
        "sm100": kernel_name(100, call),
        "has_experts": call.has_experts,
        "has_alpha": call.has_alpha,
        "accumulate": call.accumulate,
        "dynamic": call.dynamic,
        "overlap_margin": np.int64(call.overlap_margin),
        "build_id": library.manifest()["build_id"],
    }


def kernel_name(arch, call):
    """The wgrad kernel for an architecture; "" where the call's tile is compiled for another one only."""
    tile = selection.tile_of(arch, call)
    return "" if tile is None else config.WgradVariant(arch, tile, call.d_dtype, call.accumulate).name


ffi_call.register(grouped_wgrad_p, _implementation, partitioning.Wgrad)
