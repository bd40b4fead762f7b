"""Meshes in the types of operands: axes that a value varies over inside shard_map, and shardings on explicit axes.

What versions of JAX spell differently is here.
"""

import dataclasses
import functools
import importlib

import jax
from jax._src.mesh import empty_abstract_mesh, use_abstract_mesh
from jax.interpreters import mlir

from jax_grouped_gemm import contract

# --- varying axes -----------------------------------------------------------------------------------------------------


def alike(operands):
    """The operands, each varying over the axes that any of them does, as those of jax.lax's functions are made to.

    Where one that does not is differentiated, its cotangent is summed over these axes.
    """
    axes = _union(map(jax.typeof, operands))
    return [_varying_over(x, tuple(sorted(axes - _varying(jax.typeof(x))))) for x in operands]


def result(shape, dtype, operands):
    """The type of a primitive's result, given those of its operands, which are `alike`."""
    mesh = next((x.sharding.mesh for x in operands if not x.sharding.mesh.empty), None)
    if mesh is None:
        return jax.core.ShapedArray(shape, dtype)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*[None] * len(shape)))
    axes = _union(operands)
    varying: dict = {"vma": axes}
    if hasattr(jax.sharding, "ManualAxisType"):  # since JAX 0.10
        varying = {"manual_axis_type": jax.sharding.ManualAxisType(varying=axes)}
    return jax.core.ShapedArray(shape, dtype, sharding=sharding, **varying)


def _union(avals):
    return frozenset().union(*map(_varying, avals))


def _varying(aval):
    manual = getattr(aval, "manual_axis_type", None)  # since JAX 0.10; before, `vma`
    return frozenset(getattr(aval, "vma", ()) if manual is None else manual.varying)


def _varying_over(x, axes):
    if not axes:
        return x
    if hasattr(jax.lax, "pcast"):  # since JAX 0.8
        return jax.lax.pcast(x, axes, to="varying")
    return jax.lax.pvary(x, axes)  # type: ignore[attr-defined]


# --- explicit axes ----------------------------------------------------------------------------------------------------


def explicit(dims, operands):
    """(mesh, for each operand the axes of each of its dimensions) where a mesh has explicit axes, else (None, None).

    dims: for each operand the letters of its dimensions.
    """
    found = None
    for x in operands:
        sharding = jax.typeof(x).sharding
        if not has_explicit(sharding):
            continue
        mesh = sharding.mesh
        if found is not None and mesh != found:
            raise contract.different_meshes(found, mesh)
        found = mesh
    if found is None:
        return None, None
    return found, [axes_of(letters, jax.typeof(x).sharding.spec) for letters, x in zip(dims, operands, strict=True)]


def has_explicit(sharding):
    """Whether it is one on a mesh with explicit axes, in a type; None is not."""
    return sharding is not None and jax.sharding.AxisType.Explicit in (sharding.mesh.axis_types or ())


def has_automatic(sharding):
    """Whether it is one that XLA is to complete, in a type."""
    kinds = sharding.mesh.axis_types or ()
    return sharding.mesh.size > 1 and jax.sharding.AxisType.Auto in kinds and jax.sharding.AxisType.Manual not in kinds


def computed(run, mesh, specs, operands):
    """run(*operands), which returns a list, with the explicit axes made automatic; its results have these specs."""
    axes = tuple(
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == jax.sharding.AxisType.Explicit
    )
    out = [jax.sharding.NamedSharding(mesh, spec) for spec in specs]
    # What is kept for a backward pass is then the operands as they are, and not as they are inside, where their types have
    # another mesh, which JAX refuses to mix. Nothing is computed again, since results are not kept.
    compute = _since_jax_0_7("auto_axes")(run, axes=axes, out_sharding=out)
    return jax.checkpoint(compute, prevent_cse=False)(*operands)


def replicated(x):
    """x, with no dimension sharded over explicit axes."""
    sharding = jax.typeof(x).sharding
    if not has_explicit(sharding) or not any(sharding.spec):
        return x
    spec = jax.sharding.PartitionSpec(*[None] * x.ndim)
    return _since_jax_0_7("reshard")(x, jax.sharding.NamedSharding(sharding.mesh, spec))


def _since_jax_0_7(name):
    """Of jax.sharding, or of where it was before."""
    module = jax.sharding if hasattr(jax.sharding, name) else importlib.import_module("jax.experimental.shard")
    return getattr(module, name)


# --- one device's part ------------------------------------------------------------------------------------------------


def without(function):
    """The function, which does not know of any mesh, traced as if there were none: the context is that of the whole program."""

    @functools.wraps(function)
    def run(*arguments):
        with use_abstract_mesh(empty_abstract_mesh):
            return function(*arguments)

    return run


def lower(function, ctx, operands, multiple_results=True):
    """Lowers the function in place of a primitive, with the types of its operands and results as they are without a mesh."""
    plain = lambda avals: [jax.core.ShapedArray(aval.shape, aval.dtype) for aval in avals]
    ctx = ctx.replace(avals_in=plain(ctx.avals_in), avals_out=plain(ctx.avals_out))
    return mlir.lower_fun(without(function), multiple_results=multiple_results)(ctx, *operands)


def in_context(ctx):
    """The context of a lowering, with the mesh of the operands' types where it has none: that of a program whose only sharded
    arrays are constants of it. Without it, XLA's shardings could not be told in names of axes.
    """
    context = ctx.module_context.axis_context
    if getattr(context, "abstract_mesh", True) is not None:
        return ctx
    mesh = next((x.sharding.mesh for x in ctx.avals_in if not x.sharding.mesh.empty), None)
    if mesh is None or mesh.size != context.num_devices:
        return ctx
    context = dataclasses.replace(context, abstract_mesh=mesh)
    return ctx.replace(module_context=ctx.module_context.replace(axis_context=context))


# --- specs ------------------------------------------------------------------------------------------------------------


def axes_of(letters, spec):
    """The mesh axes of each dimension, by its letter, of those that are sharded."""
    entries = [() if x is None else x if isinstance(x, tuple) else (x,) for x in spec]
    return {letter: entry for letter, entry in zip(letters, entries, strict=False) if entry}


def spec_of(letters, axes):
    """The opposite."""
    return jax.sharding.PartitionSpec(*(axes.get(letter) or None for letter in letters))
