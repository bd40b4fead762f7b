"""What the modules of `linen` and `nnx` compute, on plain arrays and functions. T tokens, E experts, k for each token, width D."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_grouped_gemm import api, arguments, contract, meshes, ragged
from jax_grouped_gemm.nn import checks, permutation, routing

# Dense's initialiser for each expert: the expert axis counts as no part of the fan-in.
default_kernel_init = jax.nn.initializers.lecun_normal(batch_axis=(0,))
default_bias_init = jax.nn.initializers.zeros


class RouterLosses(NamedTuple):
    """() float32 each, without coefficients; those of `routing` by these names."""

    load_balancing_loss: jax.Array
    router_z_loss: jax.Array


def grouped_dense(rows, kernel, bias, group_sizes, prob=None, *, dtype=None, precision=None):
    """prob * (rows @ kernel[e] + bias[e]) for the rows of each expert e.

    Args:
      rows: (M, in), sorted by expert.
      kernel: (E, in, features).
      bias: (E, features) or None.
      group_sizes: (E,) int32, rows of each expert.
      prob: (M,) float32, a factor per row, or None.
      dtype: that rows, kernel and bias are cast to; None for the one that theirs promote to, as in Flax. In bfloat16,
        and where in and features are multiples of 8, the kernels compute; else `ragged_dot`, whose products are JAX's.
      precision: of JAX's products.

    Returns:
      (M, features) of that dtype. Rows past the last expert's are zero, and have no gradients, whatever `rows` and `prob`
      hold there.

    Raises:
      ValueError: shapes or dtypes, or (outside of tracing) the values of `group_sizes`, as in `grouped_gemm`.
    """
    rows, kernel = arguments.array("rows", rows), arguments.array("kernel", kernel)
    bias, prob = arguments.optional("bias", bias), arguments.optional("prob", prob)
    groups = arguments.Groups(None, group_sizes)
    checks.check_grouped_dense(rows, kernel, bias, groups.operand, prob)
    ends = groups.ends(rows.shape[0], "rows")
    rows, kernel, bias = _promote(dtype, rows, kernel, bias)
    if bias is not None and prob is not None:
        # A factor of grouped_gemm is one of the bias alone; the product is linear in its rows.
        prob = _of_groups(ends, prob)
        rows = _scaled(_of_groups(ends, rows), prob)
    if rows.dtype == jnp.bfloat16 and not any(size % contract.ALIGNMENT for size in kernel.shape[1:]):
        return api.grouped_gemm(rows, kernel, offsets=ends, b_major="n", prob=prob, bias=bias)
    return _of_groups(ends, _by_ragged_dot(_of_groups(ends, rows), kernel, bias, ends, prob, precision))


def _by_ragged_dot(rows, kernel, bias, ends, prob, precision):
    sizes = jnp.diff(ends, prepend=jnp.zeros(1, ends.dtype))
    out = ragged.ragged_dot(rows, kernel, sizes, precision)
    if bias is None:
        return out if prob is None else _scaled(out, _of_groups(ends, prob))
    # Each row's bias, as a product with ones: a gather would be transposed to a scatter.
    factor = jnp.ones(rows.shape[0], rows.dtype) if prob is None else prob.astype(rows.dtype)
    return out + ragged.ragged_dot(factor[:, None], bias[:, None, :], sizes, jax.lax.Precision.HIGHEST)


def checked_inputs(inputs, in_features=None):
    """`inputs` (..., D) as an array, checked. in_features: D, where it is known before."""
    inputs = arguments.array("inputs", inputs)
    checks.check_inputs(inputs, in_features)
    return inputs


def moe_mlp(
    inputs,
    mask,
    *,
    router,
    gate,
    up,
    down,
    k,
    normalize=True,
    activation=jax.nn.silu,
    dtype=None,
):
    """A mixture of gated MLPs: for each token, sum over its k experts of prob * down(activation(gate(x)) * up(x)).

    The experts of Mixtral of Experts, Jiang et al. 2024, arXiv:2401.04088, section 2.1, with SwiGLU of Shazeer 2020,
    arXiv:2002.05202, eq. 6, by default. `prob` is a factor of the last product, so that no pass over the rows is needed for it.

    Args:
      inputs: (..., D), of `checked_inputs`.
      mask: (...) bool, or None. Where it is False, padding, the result and all gradients are zero, whatever the input holds.
      router: function of tokens (T, D) to logits (T, E).
      gate, up: functions of rows (M, D) and group sizes to (M, hidden).
      down: function of rows (M, hidden), group sizes and prob to (M, D).
      k, normalize: as for `top_k_route`.
      activation: of the gate, computed in float32.
      dtype: that tokens are cast to before they are copied to rows, if any.

    Returns:
      (..., D) of the dtype of `down`, and the `RouterLosses`.
    """
    mask = arguments.optional("mask", mask)
    checks.check_token_mask(mask, inputs)
    # Here, before JAX refuses to reshape them, or to multiply them by the router.
    if meshes.has_explicit(jax.typeof(inputs).sharding):
        raise checks.no_explicit_rows()
    tokens = inputs.reshape(-1, inputs.shape[-1])
    if mask is not None:
        mask = mask.reshape(-1)
        tokens = jnp.where(mask[:, None], tokens, jnp.zeros((), tokens.dtype))
    logits = router(tokens)
    route = routing.top_k_route(logits, k, normalize=normalize, mask=mask)
    losses = RouterLosses(routing.load_balancing_loss(logits, route), routing.router_z_loss(logits, mask=mask))
    rows = routing.dispatch(tokens if dtype is None else tokens.astype(dtype), route)
    hidden = _gated(activation, gate(rows, route.group_sizes), up(rows, route.group_sizes))
    out = routing.combine(down(hidden, route.group_sizes, routing.sorted_probs(route)), route)
    return out.reshape(*inputs.shape[:-1], out.shape[-1]), losses


def _gated(activation, gate, up):
    wide = permutation.wide(gate.dtype)
    return (activation(gate.astype(wide)) * up.astype(wide)).astype(gate.dtype)


def _of_groups(ends, x):
    """x (M,) or (M, .) with zeros past the last group, as a choice: there may be NaN, which times zero is NaN."""
    inside = jnp.arange(x.shape[0], dtype=ends.dtype) < ends.max(initial=0)
    return jnp.where(inside.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.zeros((), x.dtype))


def _scaled(rows, factor):
    wide = permutation.wide(rows.dtype)
    return (rows.astype(wide) * factor.astype(wide)[:, None]).astype(rows.dtype)


def _promote(dtype, *arrays):
    if dtype is None:
        dtype = jnp.result_type(*(x for x in arrays if x is not None))
    return [x if x is None else jnp.asarray(x, dtype) for x in arrays]
