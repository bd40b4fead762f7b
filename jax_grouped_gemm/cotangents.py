"""The cotangents of grouped_gemm's operands, made together; `autodiff` says what of."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jax_grouped_gemm import calls, parts, reference, rows
from jax_grouped_gemm.calls import Operands, WgradOperands
from jax_grouped_gemm.ffi_call import grouped_gemm
from jax_grouped_gemm.wgrad_call import grouped_wgrad


def _nothing(wanted):
    return Operands(None, None, None, None, None, None, (None,) * len(wanted.b))


def of_operands(call, wanted, at, d, c):
    """`Operands`, None where zero or not wanted. wanted: `Operands` of bools; d, c: cotangents of D and C, None for zero."""
    if c is not None and call.has_prob and not call.has_bias:
        return _with_c_before_prob(call, wanted, at, d, c)
    if c is not None:
        d = c if d is None else d.astype(jnp.float32) + c.astype(jnp.float32)
    if d is None:
        return _nothing(wanted)
    g = d.astype(jnp.bfloat16) if call.parts == 1 else d
    found: dict = {}
    if call.has_bias:
        found = _of_bias(call, wanted, at, g)
        call = dataclasses.replace(call, has_bias=False, has_prob=False)  # as for a, b and alpha
        at, wanted = at._replace(prob=None), wanted._replace(prob=None)
    of_rows = wanted.a or wanted.alpha or wanted.prob
    if any(wanted.b):
        db, has_temporary = _of_weights(call, at, g)
        if of_rows and has_temporary:  # which is dead then, before the other product's result is made
            g, db = lax.optimization_barrier((g, db))
        weights = (db,) if call.weights == "dense" else db
        found["b"] = tuple(w if wants else None for w, wants in zip(weights, wanted.b, strict=True))
    if of_rows:
        found |= _of_rows(call, wanted, at, g)
    return _nothing(wanted)._replace(**found)


def _with_c_before_prob(call, wanted, at, d, c):
    """D = prob * C."""
    of_d = dataclasses.replace(call, c_dtype=None)
    found = _nothing(wanted)
    if wanted.a or wanted.alpha or any(wanted.b):
        owners = rows.Owners(call, at.offsets, at.experts)
        combined = c if d is None else _scaled(owners.mask(at.prob), d) + c.astype(jnp.float32)
        without_prob = dataclasses.replace(of_d, has_prob=False)
        found = of_operands(without_prob, wanted._replace(prob=None), at._replace(prob=None), combined, None)
    if wanted.prob:
        only = jax.tree.map(lambda _: False, wanted)._replace(prob=True)
        found = found._replace(prob=of_operands(of_d, only, at, d, None).prob)
    return found


def _of_weights(call, at, g):
    """(dB as one stacked array, whether there were temporaries of an operand's size)."""
    x, y, offsets, alpha, scale = parts.beside(at.a, call, g), at.a, at.offsets, at.alpha, None
    owners = rows.Owners(call, at.offsets, at.experts)
    if at.prob is not None:
        scale = owners.mask(at.prob)
    sums = call.has_experts and not call.distinct_experts  # of the groups of one expert
    if sums and alpha is not None:  # they may differ in it
        of_rows, alpha = owners.of_groups(alpha), None
        scale = of_rows if scale is None else scale * of_rows
    if scale is not None and call.n <= call.k:
        x = _scaled(scale, x).astype(jnp.bfloat16)
    elif scale is not None:
        y = _scaled(scale, y).astype(jnp.bfloat16)
    experts, mapped_groups = at.experts, call.mapped_groups
    if sums:
        offsets, x, y = rows.by_expert(call, offsets, experts, x, y)
        experts = mapped_groups = None
    n, k = call.n, call.k
    if call.b_major == "n":
        x, y, n, k = y, x, k, n
    wgrad = calls.WgradCall(
        call.m, n, k, call.l, call.gradient_dtype, has_alpha=alpha is not None,
        mapped_groups=mapped_groups, parts=call.parts, stacks=call.stacks, **rows.kernel_options(call),
    )  # fmt: skip
    return grouped_wgrad(wgrad, WgradOperands(x, y, offsets, experts, alpha, None)), scale is not None or sums


def _of_rows(call, wanted, at, g):
    """The cotangents of a, alpha and prob, all made of the product of g and the weights, as they are wanted.

    Where a's alone is wanted, the kernel scales. Else the factors whose cotangents are wanted come after the product,
    which is rounded before, as a's is; alpha's too, as it may be zero.
    """
    after_alpha, after_prob = bool(wanted.alpha), bool(wanted.alpha or wanted.prob)
    dgrad = calls.Call(
        call.m,
        call.k,
        call.n,
        call.l,
        "n" if call.b_major == "k" else "k",
        call.weights,
        call.gradient_dtype if wanted.a else "float32",
        has_alpha=call.has_alpha and not after_alpha,
        has_prob=call.has_prob and not after_prob,
        mapped_groups=call.mapped_groups,
        distinct_experts=call.distinct_experts,
        parts=call.parts,
        stacks=call.stacks,
        **rows.kernel_options(call),
    )
    factors = {"alpha": at.alpha if dgrad.has_alpha else None, "prob": at.prob if dgrad.has_prob else None}
    (u,) = grouped_gemm(dgrad, at._replace(a=parts.beside(at.b[0], call, g), bias=None, **factors))
    if not after_prob:
        return {"a": u}

    owners = rows.Owners(call, at.offsets, at.experts)
    along = owners.mask(rows.dots(u, at.a))
    prob = None if at.prob is None else owners.mask(at.prob)
    alpha = owners.of_groups(at.alpha) if after_alpha and at.alpha is not None else None
    found = {}
    if wanted.alpha:
        found["alpha"] = rows.total(call, at.offsets, along if prob is None else prob * along)
    if wanted.prob:
        found["prob"] = along if alpha is None else alpha * along
    if wanted.a:
        for scale in (prob, alpha):
            u = u if scale is None else _scaled(scale, u)
        found["a"] = u
    return found


def _of_bias(call, wanted, at, g):
    """The cotangents of bias, and of prob where there is a bias."""
    found = {}
    if wanted.bias:
        sums = rows.sums(call, at.offsets, g, at.prob)
        has_expert = True if at.experts is None else reference.has_expert(call, at.experts)[:, None]
        found["bias"] = jnp.where(has_expert, sums, 0)
    if wanted.prob:
        owners = rows.Owners(call, at.offsets, at.experts)
        found["prob"] = owners.mask(rows.dots(g, owners.of_groups(at.bias)))
    return found


def _scaled(scale, x):
    return scale[:, None] * x.astype(jnp.float32)
