"""The debug switch: offsets of a traced program, whose values cannot be seen, are checked where it runs."""

import functools
import math
import os

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental import io_callback
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jax_grouped_gemm import contract, partitioning

SWITCH = "JAX_GROUPED_GEMM_DEBUG"


def enabled():
    """Whether a call that is traced now checks its offsets on the device."""
    return contract.switched_on(os.environ.get(SWITCH))


def checked(check, groups, m, operand):
    """These ends or sizes, for a traced call: a bad entry fails the program with the text of `check`, that of contract.

    The device decides whether there is one; only then the host is asked, which finds the same entry and raises.
    """

    def fail(state):
        bad, groups = state
        shape = jax.ShapeDtypeStruct(groups.shape, groups.dtype)
        nothing = io_callback(functools.partial(_raise, check, m, operand), shape, groups)
        return (
            ~bad,
            groups + nothing,
        )  # of the types of `state`: in a shard_map, a callback's result varies over no axis

    groups = _here_p.bind(groups)
    # A loop that ends at once, for want of a conditional that JAX would batch: a bad entry takes one turn. Its result goes
    # on to the call, so that nothing between the two is free to drop the check.
    _, groups = lax.while_loop(lambda state: state[0], fail, (_in_any(check, groups, m), groups))
    return groups


# Its operand: where the program is lowered, it refuses one that a failure on one device would leave hanging.
_here_p = Primitive("debugged_groups")
_here_p.def_impl(lambda groups: groups)
_here_p.def_abstract_eval(lambda groups: groups)
batching.primitive_batchers[_here_p] = lambda operands, dims: (_here_p.bind(*operands), dims[0])


def _lower_here(ctx, groups):
    if partitioning.is_automatic(ctx.module_context):
        raise contract.debugged_on_one()
    return [groups]


mlir.register_lowering(_here_p, _lower_here)


def _in_any(check, groups, m):
    """Whether an entry is bad; under vmap, in any call of the batch, as the loop may not have an end for each."""

    @custom_vmap
    def decided(groups):
        calls = groups.reshape(math.prod(groups.shape[:-1]), groups.shape[-1])
        return jnp.any(jax.vmap(lambda groups: _any_bad(check, groups, m))(calls))

    @decided.def_vmap
    def _of_batch(size, batched, groups):
        del size, batched
        return decided(groups), False

    return decided(groups)


def _raise(check, m, operand, groups):
    check(np.asarray(groups), m, operand)
    return np.zeros_like(groups)  # of a batch, a call whose entries are good


def _any_bad(check, groups, m):
    """As `check` decides it. Up to the first bad entry the ends before it are right; it does not matter what follows."""
    if check is contract.check_offsets:
        before = jnp.concatenate([jnp.zeros(1, jnp.int32), groups])[:-1]
        return jnp.any((groups < before) | (groups > m))
    before = lax.cumsum(groups) - groups
    return jnp.any((groups < 0) | (groups > m - before))
