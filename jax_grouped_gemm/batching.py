"""vmap of the two primitives: a batch of calls is one call with more groups, where its rows can be laid end to end.

Every call of the batch has its groups and, so that the rows past its last group belong to none, a last one without an
expert. Weights that are not batched are shared by way of `experts`, and not copied; rows that are not are repeated, so that
XLA, which would gather what a loop takes slices of, can leave sharded weights where they are. Weights that are batched stay
a batch of stacks (`calls.Call.stacks`), for the same reason. Where arrays of a tuple are batched, or extents pass the
contract's limits, the calls run one after the other in a loop.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import batching

from jax_grouped_gemm import calls, contract, reference
from jax_grouped_gemm.ffi_call import grouped_gemm, grouped_gemm_p
from jax_grouped_gemm.wgrad_call import grouped_wgrad, grouped_wgrad_p


def _batch_gemm(operands, dims, *, call):
    size, operands = _leading(operands, dims)
    batched = call.split([dim is not None for dim in dims])
    arrays_alone = call.weights == "tuple" and any(batched.b)
    if not arrays_alone and _fits(size, call):
        outputs = _flat_gemm(size, call, batched, call.split(operands))
    else:
        outputs = _loop(lambda *flat: grouped_gemm(call, call.split(flat)), operands, dims)
    return outputs, [0] * len(outputs)


def _flat_gemm(size, call, batched, at):
    own_weights = any(batched.b)
    ends, experts, l = _groups(size, call, at, batched, own_weights)
    distinct = own_weights and (call.distinct_experts or not call.has_experts)
    flat = dataclasses.replace(
        call, m=size * call.m, l=l, mapped_groups=size * (call.groups + 1), distinct_experts=distinct,
        stacks=_stacks(size, call) if own_weights and call.weights == "dense" else call.stacks,
    )  # fmt: skip
    operands = calls.Operands(
        _rows(size, at.a, batched.a),
        ends,
        experts,
        _padded(size, at.alpha, batched.alpha),
        _rows(size, at.prob, batched.prob),
        _padded(size, at.bias, batched.bias),
        _weights(call, at.b) if own_weights else at.b,
    )
    return [x.reshape(size, call.m, call.n) for x in grouped_gemm(flat, operands)]


def _batch_wgrad(operands, dims, *, call):
    size, operands = _leading(operands, dims)
    batched = call.split([dim is not None for dim in dims])
    if _fits(size, call):
        d = _flat_wgrad(size, call, batched, call.split(operands))
    else:
        d = _loop(lambda *flat: grouped_wgrad(call, call.split(flat)), operands, dims)
    return [d], [0]


def _flat_wgrad(size, call, batched, at):
    ends, experts, l = _groups(size, call, at, batched, True)
    flat = dataclasses.replace(
        call, m=size * call.m, l=l, mapped_groups=size * (call.groups + 1), stacks=_stacks(size, call)
    )
    operands = calls.WgradOperands(
        _rows(size, at.x, batched.x),
        _rows(size, at.y, batched.y),
        ends,
        experts,
        _padded(size, at.alpha, batched.alpha),
        _stacked(at.total if batched.total else _repeated(size, at.total), call) if call.accumulate else None,
    )
    return grouped_wgrad(flat, operands).reshape(size, *call.d_shape)


# --- the parts --------------------------------------------------------------------------------------------------------


def _leading(operands, dims):
    """(size of the batch, the operands with it in front)."""
    (size, *_) = (x.shape[dim] for x, dim in zip(operands, dims, strict=True) if dim is not None)
    return size, [x if dim is None else jnp.moveaxis(x, dim, 0) for x, dim in zip(operands, dims, strict=True)]


def _fits(size, call):
    return size * max(call.m, call.l, call.groups + 1) < contract.SIZE_LIMIT


def _loop(run, operands, dims):
    batched = [x for x, dim in zip(operands, dims, strict=True) if dim is not None]

    def one(slices):
        slices = iter(slices)
        return run(*(x if dim is None else next(slices) for x, dim in zip(operands, dims, strict=True)))

    return lax.map(one, batched)


def _groups(size, call, at, batched, own_matrices):
    """(ends, experts, how many experts): every call's groups, then one for its rows past them, which has no expert.

    own_matrices: the calls have different weights, or results.
    """

    def of_call(i, offsets, experts):
        ends = jnp.append(reference.clamp_offsets(offsets, call.m), jnp.int32(call.m))
        experts = jnp.arange(call.l, dtype=jnp.int32) if experts is None else experts
        none = jnp.int32(call.l * (size if own_matrices else 1))
        of_all = jnp.where(reference.has_expert(call, experts), experts + (i * call.l if own_matrices else 0), none)
        return ends + i * call.m, jnp.append(of_all, none)

    axes = (0, 0 if batched.offsets else None, 0 if batched.experts else None)
    ends, experts = jax.vmap(of_call, axes)(jnp.arange(size, dtype=jnp.int32), at.offsets, at.experts)
    return ends.reshape(-1), experts.reshape(-1), call.l * (size if own_matrices else 1)


def _weights(call, b):
    (of_all,) = b  # a tuple's arrays are not batched here
    return (_stacked(of_all, call) if call.weights == "dense" else _joined(of_all),)


def _stacks(size, call):
    return size * (call.stacks or 1)


def _stacked(x, call):
    """Matrices of all calls. A batch of them is not joined with the experts: where those are sharded, XLA would gather them."""
    return x if call.stacks is None else _joined(x)


def _rows(size, x, batched):
    """Of all calls, end to end."""
    return None if x is None else _joined(x if batched else _repeated(size, x))


def _padded(size, x, batched):
    """Per group, with any value for the group that has no expert."""
    if x is None:
        return None
    x = x if batched else _repeated(size, x)
    return _joined(jnp.pad(x, ((0, 0), (0, 1)) + ((0, 0),) * (x.ndim - 2)))


def _repeated(size, x):
    return jnp.broadcast_to(x, (size, *x.shape))


def _joined(x):
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


batching.primitive_batchers[grouped_gemm_p] = _batch_gemm
batching.primitive_batchers[grouped_wgrad_p] = _batch_wgrad
