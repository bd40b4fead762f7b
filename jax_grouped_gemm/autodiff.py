"""Derivatives of the two primitives, made of the same two primitives, so that there are derivatives of every order.

A tangent of grouped_gemm is a sum of calls with one operand replaced by its tangent. All of them are one linear
primitive, grouped_gemm_tangent, whose transpose makes every cotangent at once and shares products among them. Between
the forward and the backward pass only operands are kept, those that the cotangents asked for are made of:

    cotangent of   keeps (without bias)   keeps (with bias)   products
    a              b, alpha, prob         b, alpha            one grouped_gemm, for any of a, alpha and prob
    b              a, alpha, prob         a, alpha            one grouped_wgrad
    alpha          a, b, prob             a, b                and a narrow grouped_wgrad, the sum over a group's rows
    prob           a, b, alpha            bias                none with bias
    bias                                  prob                a narrow grouped_wgrad

and always offsets and experts; on several devices the weights for b's too, for their sharding alone. The kernels take
bfloat16: the cotangent of D is rounded to it, or what those of D and C are together, which is one temporary (M, N); then
that of prob, which is a factor of D alone, takes a product of its own. Where a or b is float32 (`calls.Call.parts`), its
cotangent is made of all of D's. Addresses (b_ptrs) have no cotangents, and what lies behind them is a constant.

grouped_wgrad is linear in each of its operands: its tangent is a sum of such calls too, and the cotangents of x and y
are grouped_gemm with D's cotangent, rounded to bfloat16 or likewise, as the weights.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from jax_grouped_gemm import calls, cotangents, ffi_call, meshes, partitioning, parts, rows
from jax_grouped_gemm.calls import Operands, WgradOperands
from jax_grouped_gemm.ffi_call import grouped_gemm, grouped_gemm_p
from jax_grouped_gemm.wgrad_call import grouped_wgrad, grouped_wgrad_p

KEEPS = {
    "a": {"b", "alpha", "prob"},
    "b": {"a", "alpha", "prob"},
    "alpha": {"a", "b", "prob"},
    "prob": {"a", "b", "alpha"},
}
KEEPS_WITH_BIAS = {"a": {"b", "alpha"}, "b": {"a", "alpha"}, "alpha": {"a", "b"}, "prob": {"bias"}, "bias": {"prob"}}

grouped_gemm_tangent_p = Primitive("grouped_gemm_tangent")
grouped_gemm_tangent_p.multiple_results = True
sharded_like_p = Primitive("sharded_like")  # its `call` is the number of dimensions
sharded_like_p.multiple_results = True


@dataclasses.dataclass(frozen=True)
class Tangent:
    """The static facts of a grouped_gemm_tangent, whose operands are some of those of a call and then some tangents.

    kept, moved: for each of the call's flat operands whether it, and whether its tangent, is there.
    """

    call: calls.Call
    kept: tuple[bool, ...]
    moved: tuple[bool, ...]

    def split(self, operands):
        """(operands of the call, their tangents), both `Operands` with None for what is not there."""
        left = iter(operands)
        return tuple(
            self.call.split([next(left) if there else None for there in which]) for which in (self.kept, self.moved)
        )


# --- tangents of grouped_gemm -----------------------------------------------------------------------------------------


def _jvp(primals, tangents, *, call):
    moved = tuple(type(tangent) is not ad.Zero for tangent in tangents)
    keeps = KEEPS_WITH_BIAS if call.has_bias else KEEPS
    names = _names(call)
    wanted = {"offsets", "experts"}.union(*(keeps[name] for name, moves in zip(names, moved, strict=True) if moves))
    kept = tuple(name in wanted for name in names)
    tangents = [
        _sharded_like(tangent, x) if name == "b" and moves else tangent
        for name, x, tangent, moves in zip(names, primals, tangents, moved, strict=True)
    ]
    operands = [x for x, there in zip((*primals, *tangents), kept + moved, strict=True) if there]
    outputs = grouped_gemm_p.bind(*primals, call=call)
    return outputs, grouped_gemm_tangent_p.bind(*meshes.alike(operands), call=Tangent(call, kept, moved))


def _names(call):
    """Of the flat operands; every array of a tuple is b."""
    optional = {"experts": call.has_experts, "alpha": call.has_alpha, "prob": call.has_prob, "bias": call.has_bias}
    weights = call.l if call.weights == "tuple" else 1
    return ["a", "offsets", *(name for name, there in optional.items() if there), *["b"] * weights]


def _sharded_like(x, like):
    """x, sharded like `like` where XLA shards it, and so its cotangent: nothing else says where each matrix of a weights' gradient
    is wanted, of which every device would have all.
    """
    if not meshes.has_automatic(jax.typeof(like).sharding):
        return x
    (x,) = sharded_like_p.bind(*meshes.alike([x, like]), call=like.ndim)
    return x


def _tangent(*operands, call):
    """What a grouped_gemm_tangent is made of: the tangents of D and, if it is an output, of C."""
    of = call.call
    at, moving = call.split(operands)
    moving = moving._replace(b=_whole(of, moving.b))
    factors = [name for name in KEEPS if getattr(moving, name) is not None and not (name == "prob" and of.has_bias)]
    bias_term = of.has_bias and not (moving.prob is None and moving.bias is None)
    # Several terms are rounded once, after they are added up.
    dtypes = ["float32" if len(factors) + bias_term > 1 else dtype for dtype in of.output_dtypes]
    terms: list[list] = [[] for _ in dtypes]
    for name in factors:
        writes = dtypes[: 1 if name == "prob" else 2]  # it is no factor of C
        term = dataclasses.replace(
            of, d_dtype=dtypes[0], c_dtype=(*writes, None)[1], has_prob=of.has_prob and not of.has_bias, has_bias=False
        )
        replaced = at._replace(bias=None, prob=at.prob if term.has_prob else None)
        for found, values in zip(
            terms, grouped_gemm(term, replaced._replace(**{name: getattr(moving, name)})), strict=False
        ):
            found.append(values)
    if bias_term:
        values = _bias_tangent(of, at, moving)
        for found in terms:
            found.append(values)
    return [
        sum(found[1:], found[0]).astype(dtype) if found else jnp.zeros((of.m, of.n), dtype)
        for found, dtype in zip(terms, of.output_dtypes, strict=True)
    ]


def _whole(call, b):
    """The tangents of all weights, or None. Where some arrays of a tuple have one, it is zero for the others."""
    if all(w is None for w in b):
        return None
    return tuple(jnp.zeros(call.b_shape[1:], jnp.bfloat16) if w is None else w for w in b)


def _bias_tangent(call, at, moving):
    """Of prob * bias, (M, N) float32."""
    owners = rows.Owners(call, at.offsets, at.experts)
    terms = []
    if moving.prob is not None:
        terms.append(owners.mask(moving.prob)[:, None] * owners.of_groups(at.bias).astype(jnp.float32))
    if moving.bias is not None:
        of_rows = owners.of_groups(moving.bias).astype(jnp.float32)
        terms.append(of_rows if at.prob is None else owners.mask(at.prob)[:, None] * of_rows)
    return sum(terms[1:], terms[0])


@grouped_gemm_tangent_p.def_abstract_eval
def _abstract_eval(*operands, call):
    of = call.call
    return [meshes.result((of.m, of.n), jnp.dtype(dtype), operands) for dtype in of.output_dtypes]


def _tangent_jvp(primals, tangents, *, call):
    """That of the sum; only what moves is differentiated."""
    moves = [type(tangent) is not ad.Zero for tangent in tangents]

    def of_moving(*moving):
        left = iter(moving)
        operands = [next(left) if there else x for x, there in zip(primals, moves, strict=True)]
        return _tangent(*operands, call=call)

    moving, along = ([x for x, there in zip(xs, moves, strict=True) if there] for xs in (primals, tangents))
    return jax.jvp(of_moving, moving, along)


def _tangent_batch(operands, dims, *, call):
    outputs = jax.vmap(functools.partial(_tangent, call=call), in_axes=dims)(*operands)
    return outputs, [0] * len(outputs)


def _like_jvp(primals, tangents, *, call):
    tangent = tangents[0]
    moves = type(tangent) is not ad.Zero
    return sharded_like_p.bind(*primals, call=call), [_sharded_like(tangent, primals[1]) if moves else tangent]


def _like_transpose(outputs, x, like, *, call):
    (d,) = outputs
    return [d if type(d) is ad.Zero else _sharded_like(d, like), None]


def _like_batch(operands, dims, *, call):
    if None in dims:  # there is nothing of this shape to be like
        return operands[:1], dims[:1]
    x, like = (jnp.moveaxis(x, dim, 0) for x, dim in zip(operands, dims, strict=True))
    return sharded_like_p.bind(x, like, call=call + 1), [0]


# --- transposes of both -----------------------------------------------------------------------------------------------


def _transpose(outputs, *operands, call):
    """Where it is itself linear in some operands, which are undefined then."""
    wanted = call.split([ad.is_undefined_primal(x) for x in operands])
    at = call.split([None if ad.is_undefined_primal(x) else x for x in operands])
    return _listed(wanted, cotangents.of_operands(call, wanted, at, *_of_outputs(outputs)), operands)


def _tangent_transpose(outputs, *operands, call):
    at, moving = call.split(operands)
    # A tangent that is defined is a zero of which JAX has made an array.
    wanted = jax.tree.map(ad.is_undefined_primal, moving, is_leaf=ad.is_undefined_primal)
    kept, tangents = [None] * sum(call.kept), operands[sum(call.kept) :]
    return kept + _listed(moving, cotangents.of_operands(call.call, wanted, at, *_of_outputs(outputs)), tangents)


def _of_outputs(outputs):
    """The cotangents of D and C, None for zero and where C is no output."""
    d, c = [None if type(x) is ad.Zero else x for x in (*outputs, None)[:2]]
    return d, c


def _listed(there, named, operands):
    """The cotangents in the order of the operands, those named that are there, in the operands' types."""
    flat = [x for x, present in zip(named[:-1], there[:-1], strict=True) if present is not None]
    flat += [x for x, present in zip(named.b, there.b, strict=True) if present is not None]
    return _in_types(flat, operands)


def _in_types(flat, operands):
    """The cotangents, None where there is none, in the types of the operands that they are of, which are undefined."""
    return [None if x is None else x.astype(operand.aval.dtype) for x, operand in zip(flat, operands, strict=True)]


# --- grouped_wgrad ----------------------------------------------------------------------------------------------------


def _wgrad_jvp(primals, tangents, *, call):
    at = call.split(primals)
    moving = call.split([None if type(tangent) is ad.Zero else tangent for tangent in tangents])
    factors = [name for name in ("x", "y", "alpha") if getattr(moving, name) is not None]
    terms = [] if moving.total is None else [moving.total]
    d_dtype = "float32" if len(factors + terms) > 1 else call.d_dtype
    term = dataclasses.replace(call, accumulate=False, d_dtype=d_dtype)
    at = at._replace(total=None)
    terms += [grouped_wgrad(term, at._replace(**{name: getattr(moving, name)})) for name in factors]
    return grouped_wgrad_p.bind(*primals, call=call), [sum(terms[1:], terms[0]).astype(call.d_dtype)]


def _wgrad_transpose(outputs, *operands, call):
    (d,) = outputs
    if type(d) is ad.Zero:
        return [None] * len(operands)
    wanted = call.split([ad.is_undefined_primal(x) for x in operands])
    at = call.split([None if ad.is_undefined_primal(x) else x for x in operands])
    of_rows = calls.Call(
        call.m, call.n, call.k, call.l, "k", "dense", call.gradient_dtype,
        has_alpha=call.has_alpha, has_prob=False, mapped_groups=call.mapped_groups, distinct_experts=True,
        parts=call.parts, stacks=call.stacks, **rows.kernel_options(call),
    )  # fmt: skip
    by = lambda a: Operands(a, at.offsets, at.experts, at.alpha, None, None, (parts.beside(a, call, d),))
    found = WgradOperands(*[None] * 6)
    if wanted.x:
        found = found._replace(x=grouped_gemm(of_rows, by(at.y))[0])
    if wanted.y:
        transposed = dataclasses.replace(of_rows, n=call.k, k=call.n, b_major="n")
        found = found._replace(y=grouped_gemm(transposed, by(at.x))[0])
    if wanted.alpha:
        (u,) = grouped_gemm(dataclasses.replace(of_rows, has_alpha=False), by(at.y))
        along = rows.Owners(call, at.offsets, at.experts).mask(rows.dots(u, at.x))
        found = found._replace(alpha=rows.total(call, at.offsets, along))
    if wanted.total:
        found = found._replace(total=d)
    return _in_types([x for x, there in zip(found, wanted, strict=True) if there is not None], operands)


ffi_call.register(grouped_gemm_tangent_p, lambda platform, *operands, call: _tangent(*operands, call=call))
ffi_call.register(sharded_like_p, lambda platform, x, like, call: [x], partitioning.Like)
sharded_like_p.def_abstract_eval(lambda x, like, call: [x])
ad.primitive_jvps[grouped_gemm_p] = _jvp
ad.primitive_jvps[sharded_like_p] = _like_jvp
ad.primitive_jvps[grouped_gemm_tangent_p] = _tangent_jvp
ad.primitive_jvps[grouped_wgrad_p] = _wgrad_jvp
ad.primitive_transposes[grouped_gemm_p] = _transpose
ad.primitive_transposes[grouped_gemm_tangent_p] = _tangent_transpose
ad.primitive_transposes[grouped_wgrad_p] = _wgrad_transpose
ad.primitive_transposes[sharded_like_p] = _like_transpose
batching.primitive_batchers[grouped_gemm_tangent_p] = _tangent_batch
batching.primitive_batchers[sharded_like_p] = _like_batch
