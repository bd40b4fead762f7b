"""The primitive of `grouped_gemm`: one lowering per platform, so that one traced program serves CPU and CUDA.

Its rules for differentiation are in `autodiff`, those for vmap in `batching`, those for several devices in `partitioning`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.dispatch import apply_primitive, prim_requires_devices_during_lowering
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jax_grouped_gemm import config, contract, library, log, meshes, partitioning, parts, reference, selection

grouped_gemm_p = Primitive("grouped_gemm")
grouped_gemm_p.multiple_results = True


def grouped_gemm(call, operands):
    """[D] or [D, C], both (M, N), for `calls.Operands`."""
    rule, flat = partitioning.Gemm(call), call.flat(operands)
    if call.empty:
        results = [jax.ShapeDtypeStruct((call.m, call.n), jnp.dtype(dtype)) for dtype in call.output_dtypes]
        return partitioning.zeros(results, rule, flat)
    return partitioning.bind(grouped_gemm_p, rule, flat)


@grouped_gemm_p.def_abstract_eval
def _abstract_eval(*operands, call):
    return [meshes.result((call.m, call.n), jnp.dtype(dtype), operands) for dtype in call.output_dtypes]


# --- which implementation ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Choice:
    kernels: bool
    why: str


def choose(platform, implementation):
    """Kernels or the reference for a call lowered for this platform; RuntimeError where the request cannot be met."""
    if implementation == "reference":
        return Choice(False, 'implementation="reference" was asked for')
    if platform != "cuda":
        why = f"the kernels are for cuda, not for {platform}"
        if implementation == "cutedsl":
            raise contract.no_kernels(why)
        return Choice(False, why)
    capabilities = cuda_capabilities()
    if not all(map(architecture, capabilities)):
        why = contract.unsupported_capability(capabilities)
        if implementation == "cutedsl":
            raise contract.no_kernels(why)
        return Choice(False, why)
    # Lowering for a GPU elsewhere needs the manifest only; a GPU here means that the program will run in this process.
    if library.manifest() is None:
        raise contract.kernels_unavailable(contract.not_built(library.MANIFEST))
    if capabilities and library.registered() is not None:
        raise contract.kernels_unavailable(library.registered())
    found = f"compute capability {', '.join(capabilities)}" if capabilities else "no GPU in this process"
    return Choice(True, f"the platform is cuda, {found}")


def architecture(capability):
    """The kernels' architecture for a device's compute capability, or None."""
    return next((arch for arch, found in config.CAPABILITIES.items() if capability in found), None)


def architectures():
    """The kernels' architectures for this process's GPUs."""
    return tuple(sorted(set(map(architecture, cuda_capabilities())) - {None}))


def check_tile(call):
    """The tile that a caller names is compiled for this process's GPUs, which are nobody's business where none is named."""
    if (call.mma_tiler_mn, call.cluster_shape_mn) != (None, None):
        contract.check_tile(call, architectures())


@functools.cache
def cuda_capabilities():
    """Distinct compute capabilities of this process's GPUs; empty without any."""
    try:
        return tuple(sorted({device.compute_capability for device in jax.local_devices(backend="cuda")}))
    except RuntimeError:
        return ()


# --- lowerings --------------------------------------------------------------------------------------------------------


def _implementation(platform, *operands, call):
    named = call.split(operands)
    if call.stacks is not None:
        joined = call.flat(named._replace(b=(named.b[0].reshape(call.b_shape),)))
        return _implementation(platform, *joined, call=dataclasses.replace(call, stacks=None))
    if call.parts > 1:
        return parts.added(functools.partial(_implementation, platform), operands, call)
    if call.k == 0:  # sums of nothing, which no weights and no alpha make anything of: the bias is left
        return reference.grouped_gemm(call, *named._replace(alpha=None, b=jnp.zeros(call.b_shape, jnp.bfloat16)))
    if uses_kernels(platform, call):
        return _kernels(call, operands)
    return reference.grouped_gemm(call, *named._replace(b=_stacked_weights(platform, call, named)))


def uses_kernels(platform, call):
    """As `choose` says, but for a device's part that the kernels do not take; that a GPU gets the reference is logged."""
    choice = choose(platform, call.implementation)
    why = contract.unfit(N=call.n, K=call.k) if choice.kernels else choice.why
    if platform == "cuda" and why is not None and call.implementation is None:
        log.once(f"grouped_gemm uses the reference implementation, which is slow on a GPU: {why}")
    return why is None


def _stacked_weights(platform, call, operands):
    if call.weights == "dense":
        return operands.b[0]
    if call.weights == "tuple":
        return jnp.stack(operands.b)
    if platform != "cpu":
        raise contract.pointers_unreadable(platform)
    if library.registered() is not None:
        raise contract.pointers_need_library(library.registered())
    ends, m = operands.offsets, call.m
    if call.has_experts:  # only weights that some group with rows needs are read: give each of those one row
        begin, end = reference.bounds(operands.offsets, m)
        needs = (begin < end)[:, None] & (operands.experts[:, None] == jnp.arange(call.l, dtype=jnp.int32)[None])
        ends, m = jnp.cumsum(needs.any(axis=0), dtype=jnp.int32), call.l
    gather = jax.ffi.ffi_call(library.GATHER_WEIGHTS, jax.ShapeDtypeStruct(call.b_shape, jnp.bfloat16))
    return gather(*operands.b, ends, m=np.int64(m))


def _kernels(call, operands):
    call = selection.scheduled(architectures(), call)
    outputs = [jax.ShapeDtypeStruct((call.m, call.n), jnp.dtype(dtype)) for dtype in call.output_dtypes]
    scratch = [jax.ShapeDtypeStruct((call.scratch_bytes,), jnp.uint8)] if call.scratch_bytes else []
    return jax.ffi.ffi_call(library.FORWARD, outputs + scratch)(*operands, **attributes(call))[: len(outputs)]


def attributes(call):
    """The custom call's attributes, as docs/architecture.md lists them."""
    return {
        "sm90": kernel_name(90, call),
        "sm100": kernel_name(100, call),
        "weights": call.weights,
        "b_major": call.b_major,
        "has_experts": call.has_experts,
        "has_alpha": call.has_alpha,
        "has_prob": call.has_prob,
        "has_bias": call.has_bias,
        "has_c": call.c_dtype is not None,
        "dynamic": call.dynamic,
        "overlap_margin": np.int64(call.overlap_margin),
        "n": np.int64(call.n),
        "l": np.int64(call.l),
        "build_id": library.manifest()["build_id"],
    }


def kernel_name(arch, call):
    """The forward kernel for an architecture; "" where the call's tile is compiled for another one only."""
    tile = selection.tile_of(arch, call)
    if tile is None:
        return ""
    weights = "dense" if call.weights == "dense" else "pointers"
    epilogue, d_dtype = config.epilogue_of(
        scaled=call.has_alpha or call.has_prob, bias=call.has_bias, d_dtype=call.d_dtype, c_dtype=call.c_dtype
    )
    return config.Variant(arch, tile, call.b_major, weights, d_dtype, epilogue).name


def register(primitive, implementation, rule=None):
    """How the primitive runs: `implementation(platform, *operands, call)`, traced where the program is lowered.

    rule: of `partitioning`, for programs that XLA partitions over several devices; None for a primitive that is made of
    others.
    """
    # JAX's own way to run one primitive: a jit of our own would call itself under jax.disable_jit and jax_debug_nans.
    primitive.def_impl(functools.partial(apply_primitive, primitive))
    prim_requires_devices_during_lowering.add(primitive)  # as does custom_partitioning, which JAX cannot see in it

    def lowering(platform):
        def lower(ctx, *operands, call):
            ctx = meshes.in_context(ctx)
            run = functools.partial(implementation, platform, call=call)
            if rule is not None:
                run = partitioning.placed(ctx.module_context, run, primitive, rule(call))
            return meshes.lower(run, ctx, operands)

        return lower

    mlir.register_lowering(primitive, lowering("this platform"))
    for platform in ("cpu", "cuda"):
        mlir.register_lowering(primitive, lowering(platform), platform=platform)


register(grouped_gemm_p, _implementation, partitioning.Gemm)

# At import, so that a deserialised program finds its target; why it failed is raised where a call needs the library.
library.registered()
