"""The arguments of the public functions as canonical operands."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_grouped_gemm import contract, debug, meshes, reference


class Groups:
    """Groups of rows, by `offsets` or `group_sizes`: the operand as it was given, and the ends that a call computes with."""

    def __init__(self, offsets, group_sizes):
        contract.exactly_one(offsets=offsets, group_sizes=group_sizes)
        self._by_size = offsets is None
        self.name = "group_sizes" if self._by_size else "offsets"
        self._given = _groups(self.name, group_sizes if self._by_size else offsets)
        self.operand = _int32(self._given)

    def ends(self, m, operand="a"):
        """Of M rows, those of the operand. Values that can be seen are checked, others where the debug switch is on."""
        check = contract.check_group_sizes if self._by_size else contract.check_offsets
        groups = meshes.replicated(self.operand)
        if not isinstance(self._given, jax.core.Tracer):
            check(np.asarray(self._given), m, operand)
        elif debug.enabled():
            groups = debug.checked(check, groups, m, operand)
        return reference.ends_of(groups, m=m) if self._by_size else groups


def weights(b, b_ptrs):
    """The weight mode and its operands."""
    if b_ptrs is not None:
        return "pointers", (_pointers(b_ptrs),)
    if isinstance(b, (tuple, list)):
        return "tuple", tuple(array(f"b[{i}]", w) for i, w in enumerate(b))
    return "dense", (array("b", b),)


def _groups(name, groups):
    """Offsets or sizes: a JAX array (or lists of traced scalars), or the host's integers, whatever their width."""
    if isinstance(groups, jax.Array) or any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(groups)):
        return jnp.asarray(groups)
    try:
        groups = np.asarray(groups)
    except ValueError:  # lists of different lengths
        raise contract.not_an_array(name, groups) from None
    return groups.astype(np.int32) if groups.size == 0 else groups


def _int32(groups):
    """The operand. Host integers that do not fit are clipped here and refused by the check of values."""
    if isinstance(groups, jax.Array) or groups.dtype == np.int32:
        return jnp.asarray(groups)
    if not all(isinstance(x, (int, np.integer)) for x in groups.flat):
        return groups  # its dtype is refused
    # As Python's integers: NumPy 2.0 cannot clip a dtype to bounds that it does not hold.
    return jnp.asarray(np.asarray(np.clip(groups.astype(object), -(2**31), 2**31 - 1)).astype(np.int32))


def _pointers(b_ptrs):
    """Host addresses keep all 64 bits: without x64, JAX would truncate int64 to int32."""
    if not isinstance(b_ptrs, jax.Array):
        b_ptrs = np.asarray(b_ptrs)
        if b_ptrs.dtype == np.uint64 or b_ptrs.size == 0:
            b_ptrs = b_ptrs.astype(np.int64)
        if b_ptrs.dtype == np.int64 and not jax.config.read("jax_enable_x64"):
            b_ptrs = np.ascontiguousarray(b_ptrs).view(np.uint8)
    return jnp.asarray(b_ptrs)


def optional(name, x):
    return None if x is None else array(name, x)


def array(name, x):
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError):
        raise contract.not_an_array(name, x) from None
