"""Which rows a group has, and sums over them: what derivatives need beside the two products."""

import functools

import jax.numpy as jnp
from jax import lax

from jax_grouped_gemm import calls, contract, meshes, parts, reference, wgrad_call


class Owners:
    """Which group each row of a call is in, if it is in one that has an expert.

    Other rows are made zero here before anything is done with them: they may hold NaN, which times zero is NaN.
    """

    def __init__(self, call, offsets, experts):
        self._call, self._offsets, self._experts = call, offsets, experts

    @functools.cached_property  # many derivatives need none of it
    def _found(self):
        """(a group of each row, whether the row is in it and it has an expert)."""
        ends = reference.clamp_offsets(self._offsets, self._call.m)
        group = _last_at_most(ends, jnp.arange(self._call.m, dtype=jnp.int32))
        inside = group < self._call.groups
        group = jnp.minimum(group, self._call.groups - 1)
        if self._experts is not None:
            inside &= reference.has_expert(self._call, self._experts)[group]
        return group, inside

    def mask(self, x):
        """x (M,) or (M, .) in the rows that have an owner, zero in others."""
        _, inside = self._found
        return jnp.where(inside.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.zeros((), x.dtype))

    def of_groups(self, x):
        """Of each row, its group's x, (G,) or (G, .)."""
        group, _ = self._found
        return self.mask(x[group])


def _last_at_most(ends, row):
    """How many of the ends are at most the row: the index of the group that it is in."""
    ends, row = meshes.alike([ends, row])  # before JAX 0.8, searchsorted does not do so
    method = "scan" if hasattr(lax, "pcast") else "compare_all"  # nor could its loop be in a shard_map
    return jnp.searchsorted(ends, row, side="right", method=method).astype(jnp.int32)


def sums(call, offsets, x, factor):
    """Of each group, (G, N) float32: the sum over its rows of factor (M,) float32, or 1, times x (M, N) bfloat16.

    It is a product with so narrow a matrix that only the reading of x counts, always in the same order. XLA's segment
    sum is a scatter: atomic additions on a GPU, in whichever order.
    """
    columns = [jnp.ones(call.m, jnp.bfloat16)] if factor is None else parts.of(factor)
    y = jnp.pad(jnp.stack(columns, axis=1), ((0, 0), (0, contract.ALIGNMENT - len(columns))))
    wgrad = calls.WgradCall(
        call.m, x.shape[1], contract.ALIGNMENT, call.groups, "float32", has_alpha=False, **kernel_options(call)
    )
    d = wgrad_call.grouped_wgrad(wgrad, calls.WgradOperands(x, y, offsets, None, None, None))
    return jnp.sum(d[:, :, : len(columns)], axis=2)


def total(call, offsets, values):
    """Of each group, (G,) float32: the sum of values (M,) float32 over its rows."""
    return sums(call, offsets, jnp.ones((call.m, contract.ALIGNMENT), jnp.bfloat16), values)[:, 0]


def by_expert(call, offsets, experts, *operands):
    """The operands (M, .) with the rows of each expert's groups made neighbours, and the ends (L,) of the experts' rows.

    Several groups may have the same expert, and none may have one.
    """
    begins, ends = reference.bounds(offsets, call.m)
    expert = jnp.where(reference.has_expert(call, experts), experts, call.l)
    order = jnp.argsort(expert)
    new_ends = jnp.cumsum((ends - begins)[order], dtype=jnp.int32)
    row = jnp.arange(call.m, dtype=jnp.int32)
    slot = jnp.minimum(_last_at_most(new_ends, row), call.groups - 1)
    source = ends[order][slot] - (new_ends[slot] - row)
    moved = [jnp.take(x, source, axis=0, mode="clip") for x in operands]
    groups_before = _last_at_most(expert[order], jnp.arange(call.l, dtype=jnp.int32))
    return jnp.concatenate([jnp.zeros(1, jnp.int32), new_ends])[groups_before], *moved


def dots(x, y):
    """Of each row, (M,) float32."""
    return jnp.sum(x.astype(jnp.float32) * y.astype(jnp.float32), axis=1)


def kernel_options(call):
    """For the calls that are made of this one. They choose tiles of their own: a wish is for this one's extents."""
    same = "implementation", "dynamic", "overlap_margin", "drop_in"
    return {name: getattr(call, name) for name in same}
