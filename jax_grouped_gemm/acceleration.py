"""One line for existing code: `jax.lax.ragged_dot`, in whichever library it is called, on the kernels."""

import os
import threading
import weakref
from typing import Any

import jax
from jax._src.dispatch import prim_requires_devices_during_lowering
from jax._src.interpreters import mlir
from jax._src.lax.lax import ragged_dot_general_p

from jax_grouped_gemm import contract, ffi_call, log, meshes, partitioning, ragged

SWITCH = "JAX_GROUPED_GEMM_ACCELERATE"
PLATFORM = "cuda"

# How JAX lowers the primitive, while we do: (its rule for the platform or None, its rule for all platforms or None).
_jax_rules: Any = None


class accelerate:
    """Makes `jax.lax.ragged_dot` and `ragged_dot_general` use the kernels on CUDA, forward and backward.

    Call it once, anywhere before or after the program is built::

        jax_grouped_gemm.accelerate()

    or for a while, `with jax_grouped_gemm.accelerate(): ...`; `accelerate(False)` undoes it. With the environment variable
    JAX_GROUPED_GEMM_ACCELERATE=1 it is on from the start, wherever the package is installed: nothing needs to import it.

    What is computed stays the same, but for the order of float32 sums, and for an operand of float32 beside one of bfloat16
    (the cotangent of a product with `preferred_element_type=float32`, say), which is taken as
    `jax_grouped_gemm.ragged_dot` says. Products that the kernels do not do (two operands of float32, K or N no multiple of 8)
    stay JAX's, and so do those in a shard_map over some axes of the mesh only, and those that XLA would partition in an
    export; a warning of the logger "jax_grouped_gemm" says so, once for every reason. Where XLA gives a device a part of N or
    K that is no multiple of 8, the reference computes it, and the log says that. An export needs `disabled_checks`, as for
    `grouped_gemm`.

    Turning it on or off drops JAX's caches of compiled programs (`jax.clear_caches()`), since these hold one lowering or the
    other; programs compiled by hand (`.lower().compile()`) or exported stay as they are. Other threads must not compile at
    that moment. It is lowering that is changed, so a `with` block in a function that is being traced has no effect. While it
    is on, JAX refuses programs with a ragged_dot whose arrays are on several meshes, or on an `AbstractMesh`, on every
    platform.

    Args:
      on: False to have JAX's own lowering back.
    """

    def __init__(self, on=True):
        self._on = contract.check_flag("on", on)
        self._blocks: list = []
        with _lock:
            self._changed = _settings[-1]
            self._changed.change(self, self._on)
            _apply()

    def __enter__(self):
        with _lock:
            self._changed.withdraw(self)  # the call was for this block alone
            self._blocks.append(_Setting(self._on))
            _settings.append(self._blocks[-1])
            _apply()
        return self

    def __exit__(self, *error):
        with _lock:
            _settings.remove(self._blocks.pop())  # not the last one where another thread has entered a block since
            _apply()


class _Setting:
    """Of the process, or of a `with` block: what calls have made of it, the last one first in force."""

    def __init__(self, on):
        self._changes = [(lambda: None, on)]

    @property
    def on(self):
        return self._changes[-1][1]

    def change(self, by, on):
        """Until `by` withdraws it, which an object that is gone never will: what it changed does not matter any more."""
        final = [i for i, (of, _) in enumerate(self._changes) if of() is None]
        self._changes = [*self._changes[final[-1] :], (weakref.ref(by), on)]

    def withdraw(self, by):
        self._changes = [(of, on) for of, on in self._changes if of() is not by]


_settings = [_Setting(False)]  # the last one counts
_lock = threading.RLock()


def active():
    """Whether products of JAX's are lowered to the kernels now."""
    return _jax_rules is not None


def _apply():
    _set(_settings[-1].on)


def enabled_by_environment():
    return contract.switched_on(os.environ.get(SWITCH))


def _set(on):
    """JAX has a public way to register a lowering, and none to read or remove one."""
    global _jax_rules
    if on == active():
        return
    rules = mlir._platform_specific_lowerings[PLATFORM]
    if on:
        _jax_rules = rules.get(ragged_dot_general_p), mlir._lowerings.get(ragged_dot_general_p)
        mlir.register_lowering(ragged_dot_general_p, _lower, platform=PLATFORM)
        prim_requires_devices_during_lowering.add(ragged_dot_general_p)  # as those that it becomes do
    else:
        own, _ = _jax_rules
        if own is None:
            del rules[ragged_dot_general_p]
        else:
            rules[ragged_dot_general_p] = own
        prim_requires_devices_during_lowering.discard(ragged_dot_general_p)
        _jax_rules = None
    jax.clear_caches()


def _lower(ctx, lhs, rhs, group_sizes, **parameters):
    plan = partitioning.why_not(ctx.module_context)
    if plan is None:
        plan = _plan(ctx.avals_in, ctx.avals_out[0].dtype, **parameters)
    if not callable(plan):
        if plan:
            log.once(f"jax.lax.ragged_dot is JAX's own: {plan}")
        own, of_all = _jax_rules
        rule: Any = own or of_all
        rule = getattr(rule, "rule", rule)  # newer versions keep more than the rule
        return rule(ctx, lhs, rhs, group_sizes, **parameters)
    return meshes.lower(plan, ctx, (lhs, rhs, group_sizes), multiple_results=False)


def _plan(operands, dtype, *, ragged_dot_dimension_numbers, precision, group_offset, **parameters):
    if group_offset is not None or meshes.has_explicit(parameters.get("out_sharding")):
        return "group_offset or out_sharding is given"
    choice = ffi_call.choose(PLATFORM, None)
    if not choice.kernels:
        return choice.why
    lhs, rhs, group_sizes = operands
    return ragged.reduce(lhs, rhs, group_sizes, ragged_dot_dimension_numbers, precision, dtype, False)
