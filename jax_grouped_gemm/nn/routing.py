"""Top-k routing without a capacity: tokens to rows sorted by expert, and back.

Nothing here is dropped or padded, and nothing is scattered, neither forward nor backward: both directions are gathers, so
that results are bitwise repeatable. T tokens, E experts, k of them for each token, width D.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_grouped_gemm import arguments
from jax_grouped_gemm.nn import checks, permutation


class Routing(NamedTuple):
    """Which experts each token goes to, and the permutation that sorts the (token, slot) pairs by expert. A pytree."""

    expert: jax.Array  # (T, k) int32, the most probable first; E for tokens that are masked out
    prob: jax.Array  # (T, k) float32; 0 for tokens that are masked out
    order: jax.Array  # (T * k,) int32: the pair token * k + slot that each row is of; stable, masked tokens last
    inverse: jax.Array  # (T * k,) int32: the row of each pair
    group_sizes: jax.Array  # (E,) int32, rows of each expert; their sum is k times the tokens not masked out
    mask: jax.Array | None  # (T,) bool, False for tokens of no expert; None where there are none


def top_k_route(logits, k, *, normalize=True, mask=None):
    """Chooses for each token the k experts of the largest logits, and so of the largest softmax probabilities.

    With `normalize` the probabilities of a token's k experts are divided by their sum: the softmax over the logits of these
    alone (Mixtral of Experts, Jiang et al. 2024, arXiv:2401.04088, section 2.1). Without, they are those among all experts
    (Switch Transformers, Fedus et al. 2021, arXiv:2101.03961, eq. 1).

    Args:
      logits: (T, E) floating; the softmax is of float32.
      k: experts per token, from 1 to E.
      normalize: as above.
      mask: (T,) bool, optional. Tokens where it is False, padding, go to no expert: their rows lie past the last group,
        where grouped_gemm makes zeros, and they have no gradients, whatever their logits are.

    Returns:
      A `Routing`. Gradients flow to the logits through its `prob`. Equal logits: the expert of the lower index.

    Raises:
      ValueError: shapes or dtypes of `logits` and `mask`, or k.
      NotImplementedError: `logits` or `mask` sharded over explicit axes.
    """
    logits, mask = _logits(logits, mask)
    checks.check_unsharded(logits, mask)
    checks.check_top_k(k, logits.shape[1])
    num_experts = logits.shape[1]
    logits = _of_tokens(mask, logits.astype(jnp.float32))
    probs = jax.nn.softmax(logits)
    # Of the logits: probabilities may be zero, and so equal, where these are not. top_k would have -0 below 0.
    ranked = jax.lax.stop_gradient(logits)
    _, expert = jax.lax.top_k(jnp.where(ranked == 0, 0, ranked), k)
    # Not the values of top_k, nor take_along_axis: these are transposed to scatters.
    prob = jnp.where(_one_hot(expert, num_experts), probs[:, None, :], 0).sum(axis=2)
    if normalize:
        prob /= prob.sum(axis=1, keepdims=True)
    if mask is not None:
        expert = jnp.where(mask[:, None], expert, num_experts)
        prob = _of_tokens(mask, prob)
    flat = expert.reshape(-1)
    order = permutation.argsort(flat)
    group_sizes = _one_hot(flat, num_experts).sum(axis=0, dtype=jnp.int32)
    return Routing(expert, prob, order, permutation.argsort(order), group_sizes, mask)


def dispatch(x, routing):
    """The rows of the experts: a copy of each token's x for each of its slots, sorted by expert.

    Args:
      x: (T, D) of any floating dtype.
      routing: of `top_k_route`.

    Returns:
      (T * k, D) of the same dtype, for `grouped_gemm(..., group_sizes=routing.group_sizes)`. Rows past the last group, those
      of masked tokens, are zero.

    Raises:
      ValueError: x has another number of tokens.

    It is linear in x, and the transpose of `combine`, which its gradient is. Differentiable in both modes and to any order.
    """
    x = arguments.array("x", x)
    checks.check_rows("x", x, routing.expert.shape[0], "T", "the tokens that were routed")
    return permutation.spread(_of_tokens(routing.mask, x), routing.order, routing.inverse, routing.expert.shape[1])


def combine(rows, routing):
    """The sum over each token's slots, in float32: the inverse way of `dispatch`, and its transpose.

    The rows are to be scaled by `sorted_probs` before, for which the last product's `prob=` is there.

    Args:
      rows: (T * k, D) of any floating dtype, sorted by expert.
      routing: of `top_k_route`.

    Returns:
      (T, D), rounded once to the dtype of the rows. Masked tokens are zero, whatever their rows hold.

    Raises:
      ValueError: another number of rows.
    """
    rows = arguments.array("rows", rows)
    checks.check_rows("rows", rows, routing.order.shape[0], "T * k", "a row for every token and slot")
    return _of_tokens(
        routing.mask, permutation.gather_sum(rows, routing.order, routing.inverse, routing.expert.shape[1])
    )


def sorted_probs(routing):
    """Each row's factor, (T * k,) float32: `prob=` of the last product of the experts, after which `combine` is a plain sum."""
    return permutation.spread(routing.prob.reshape(-1, 1), routing.order, routing.inverse, 1)[:, 0]


def load_balancing_loss(logits, routing):
    """E * sum over e of fraction[e] * mean_prob[e]: 1 where both are uniform.

    fraction: of the (token, slot) pairs, those that go to expert e; a constant to derivatives. mean_prob: the mean over the
    tokens of the softmax over all experts. Switch Transformers, Fedus et al. 2021, arXiv:2101.03961, eqs. 4 to 6, without
    their factor alpha; for k > 1 fractions are of pairs, so that the value does not depend on k (implementations that sum
    fractions of tokens over the slots have k times this one).

    Args:
      logits: (T, E), those that were routed. Masked tokens count nowhere.
      routing: of `top_k_route`.

    Returns:
      () float32; 0 if there are no tokens.

    Raises:
      ValueError: shape or dtype of `logits`, or `routing` of others.
    """
    logits, _ = _logits(logits, routing.mask)
    checks.check_routed(logits.shape, (len(routing.expert), len(routing.group_sizes)))
    probs = jax.nn.softmax(_of_tokens(routing.mask, logits.astype(jnp.float32)))
    pairs = routing.group_sizes.sum()
    fraction = routing.group_sizes.astype(jnp.float32) / jnp.maximum(pairs, 1).astype(jnp.float32)
    return logits.shape[1] * jnp.sum(fraction * _mean(routing.mask, probs))


def router_z_loss(logits, *, mask=None):
    """The mean over the tokens of logsumexp(logits)^2, which keeps logits small.

    ST-MoE, Zoph et al. 2022, arXiv:2202.08906, eq. 5, without their coefficient.

    Args:
      logits: (T, E) floating; the loss is of float32.
      mask: (T,) bool, optional, as for `top_k_route`.

    Returns:
      () float32; 0 if there are no tokens.
    """
    logits, mask = _logits(logits, mask)
    return _mean(mask, jnp.square(jax.nn.logsumexp(_of_tokens(mask, logits.astype(jnp.float32)), axis=1)))


def _logits(logits, mask):
    """Both as arrays, checked."""
    logits, mask = arguments.array("logits", logits), arguments.optional("mask", mask)
    checks.check_logits(logits, mask)
    return logits, mask


def _one_hot(expert, num_experts):
    return expert[..., None] == jax.lax.broadcasted_iota(expert.dtype, (*expert.shape, num_experts), expert.ndim)


def _of_tokens(mask, x):
    """x (T, .) with zeros for masked tokens, as a choice: they may hold NaN, which times zero is NaN."""
    return x if mask is None else jnp.where(mask[:, None], x, jnp.zeros((), x.dtype))


def _mean(mask, x):
    """Over the tokens that are not masked, whose x (T, ...) counts."""
    if mask is None:
        return x.sum(axis=0) / max(x.shape[0], 1)
    kept = jnp.where(mask.reshape(-1, *[1] * (x.ndim - 1)), x, 0)
    return kept.sum(axis=0) / jnp.maximum(mask.sum(), 1).astype(x.dtype)
