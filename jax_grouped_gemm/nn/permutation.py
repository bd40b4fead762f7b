"""Two linear maps of rows, each the other's transpose and both made of gathers.

JAX would transpose a gather to a scatter-add, which is slow and, on GPUs, adds in no fixed order. But here the indices are
a permutation, so that the transpose is a gather too, by the inverse. The maps are primitives, which makes them
differentiable in both modes and to any order.
"""

import functools

import jax
import jax.numpy as jnp
from jax._src.dispatch import apply_primitive
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_grouped_gemm import meshes
from jax_grouped_gemm.nn import checks

spread_p = Primitive("spread_rows")
gather_sum_p = Primitive("gather_sum_rows")


def argsort(x):
    """The stable permutation that sorts x (n,): int32.

    Not jnp.argsort: in a shard_map that checks varying axes, JAX 0.10 takes its result for one that is the same on all devices,
    and a gradient is then made with the first device's.
    """
    keys, index = meshes.alike([x, jax.lax.iota(jnp.int32, x.size)])
    return jax.lax.sort([keys, index], num_keys=1, is_stable=True)[1]


def spread(x, order, inverse, k):
    """k copies of each row of x (T, D), permuted: row i of the result (T * k, D) is x[order[i] // k]."""
    return spread_p.bind(*meshes.alike([x, order, inverse]), k=k)


def gather_sum(rows, order, inverse, k):
    """Its transpose: row t of the result (T, D) is the sum of rows[inverse[t * k + s]] over s < k, in float32."""
    return gather_sum_p.bind(*meshes.alike([rows, order, inverse]), k=k)


def _spread(x, order, inverse, *, k):
    return _rows(x, order // k)


def _gather_sum(rows, order, inverse, *, k):
    of_tokens = _rows(rows, inverse).reshape(rows.shape[0] // k, k, rows.shape[1])
    return of_tokens.sum(axis=1, dtype=wide(rows.dtype)).astype(rows.dtype)


def wide(dtype):
    """float32, or more. Not jnp.promote_types, which some users have made strict."""
    return jnp.float32 if jnp.dtype(dtype).itemsize < 4 else dtype


def _rows(x, index):
    return x.at[index].get(mode="promise_in_bounds")


def _define(primitive, transpose, function, rows):
    """rows: of how many rows and k, how many the result has."""

    def aval(x, order, inverse, *, k):
        if meshes.has_explicit(x.sharding):
            raise checks.no_explicit_rows()
        return x.update(shape=(rows(x.shape[0], k), x.shape[1]), weak_type=False)

    def batch(operands, dims, *, k):
        """A batch is one call: its rows end to end."""
        size = next(x.shape[dim] for x, dim in zip(operands, dims, strict=True) if dim is not None)
        x, order, inverse = (
            jnp.broadcast_to(x, (size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)
            for x, dim in zip(operands, dims, strict=True)
        )
        first = jnp.arange(size, dtype=order.dtype)[:, None] * order.shape[1]
        flat = primitive.bind(
            x.reshape(size * x.shape[1], x.shape[2]), (order + first).reshape(-1), (inverse + first).reshape(-1), k=k
        )
        return flat.reshape(size, rows(x.shape[1], k), x.shape[2]), 0

    def transposed(cotangent, x, order, inverse, *, k):
        found = None if type(cotangent) is ad.Zero else transpose.bind(cotangent, order, inverse, k=k)
        return found, None, None

    primitive.def_impl(functools.partial(apply_primitive, primitive))
    primitive.def_abstract_eval(aval)
    mlir.register_lowering(primitive, mlir.lower_fun(function, multiple_results=False))
    ad.defjvp(primitive, lambda tangent, x, *permutation, k: primitive.bind(tangent, *permutation, k=k), None, None)
    ad.primitive_transposes[primitive] = transposed
    batching.primitive_batchers[primitive] = batch


_define(spread_p, gather_sum_p, _spread, lambda rows, k: rows * k)
_define(gather_sum_p, spread_p, _gather_sum, lambda rows, k: rows // k)
