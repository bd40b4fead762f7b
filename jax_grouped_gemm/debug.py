"""The debug switch: offsets of a traced program, whose values cannot be seen, are checked where it runs."""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import sequential_vmap
from jax.experimental import io_callback

from jax_grouped_gemm import contract

SWITCH = "JAX_GROUPED_GEMM_DEBUG"


def enabled():
    """Whether a call that is traced now checks its offsets on the device."""
    return os.environ.get(SWITCH, "") not in ("", "0")


def checked(check, groups, m, operand):
    """These ends or sizes, for a traced call: a bad entry fails the program with the text of `check`, that of contract.

    The device decides whether there is one; only then the host is asked, which finds the same entry and raises.
    """

    def fail(groups):
        shape = jax.ShapeDtypeStruct(groups.shape, groups.dtype)
        nothing = io_callback(functools.partial(_raise, check, m, operand), shape, groups)
        return groups + nothing  # of the type of `groups`: in a shard_map, a callback's result varies over no axis

    # Under vmap one after the other: a cond with a batched predicate would have to run both branches.
    @sequential_vmap
    def check_one(groups):
        return lax.cond(_any_bad(check, groups, m), fail, lambda groups: groups, groups)

    # The result goes on to the call, so that nothing between the two is free to drop the check.
    return check_one(groups)


def _raise(check, m, operand, groups):
    check(np.asarray(groups), m, operand)
    raise AssertionError("the device found a bad entry and the host did not")


def _any_bad(check, groups, m):
    """As `check` decides it. Up to the first bad entry the ends before it are right; it does not matter what follows."""
    if check is contract.check_offsets:
        before = jnp.concatenate([jnp.zeros(1, jnp.int32), groups])[:-1]
        return jnp.any((groups < before) | (groups > m))
    before = lax.cumsum(groups) - groups
    return jnp.any((groups < 0) | (groups > m - before))
