"""Every arm's output is compared with a float32 reference before it is timed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def poison(row, dtypes=("bfloat16",)):
    """Fills the blocks that the next outputs are likely to get with NaN, so that an element never written shows."""
    for block in jax.block_until_ready([jnp.full(row.result, jnp.nan, dtype) for dtype in dtypes]):
        block.delete()


def torch_poison(torch, row):
    """The same for torch's allocator."""
    del_me = torch.full(row.result, float("nan"), dtype=torch.bfloat16, device="cuda")
    torch.cuda.synchronize()
    del del_me


@functools.partial(jax.jit, static_argnums=3)
def _reference(a, b, ends, window):
    """One expert after the other: a window over its rows, exact bfloat16 products, float32 sums."""
    out = jnp.zeros((a.shape[0] + window, b.shape[1]), jnp.float32)
    a = jnp.pad(a, ((0, window), (0, 0)))

    def group(out, operands):
        weights, begin, end = operands
        rows = lax.dynamic_slice_in_dim(a, begin, window)
        product = lax.dot_general(rows, weights, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        inside = jnp.arange(window)[:, None] < end - begin
        old = lax.dynamic_slice_in_dim(out, begin, window)
        return lax.dynamic_update_slice_in_dim(out, jnp.where(inside, product, old), begin, 0), None

    begins = jnp.concatenate([jnp.zeros(1, ends.dtype), ends[:-1]])
    return lax.scan(group, out, (b, begins, ends))[0][:-window]


@functools.partial(jax.jit, static_argnums=3)
def _wgrad_reference(x, y, ends, window):
    x, y = (jnp.pad(operand, ((0, window), (0, 0))) for operand in (x, y))

    def group(_, span):
        begin, end = span
        inside = jnp.arange(window)[:, None] < end - begin
        of_x, of_y = (jnp.where(inside, lax.dynamic_slice_in_dim(operand, begin, window), 0) for operand in (x, y))
        return None, lax.dot_general(of_x, of_y, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)

    begins = jnp.concatenate([jnp.zeros(1, ends.dtype), ends[:-1]])
    return lax.scan(group, None, (begins, ends))[1]


def grouped_reference(product, a, b, ends):
    """float32 of A_g @ B_g^T ("forward", b (l, n, k)) or A_g @ B_g ("dgrad", b (l, k, n)), (m, n); of A_g^T @ B_g ("wgrad"), (l, n, k)."""
    window = int(np.diff(np.asarray(ends), prepend=0).max())
    if product == "wgrad":
        return _wgrad_reference(a, b, ends, window)
    return _reference(a, b if product == "forward" else jnp.swapaxes(b, 1, 2), ends, window)


@jax.jit
def epilogue(product, ends, alpha=None, prob=None, bias=None):
    """(D, C) in float32 of the product's float32 (m, n): the formula of `grouped_gemm`. All rows are of a group."""
    group = jnp.searchsorted(ends, jnp.arange(len(product)), side="right")
    by_row = 1.0 if prob is None else prob[:, None]
    c = product if alpha is None else alpha[group][:, None] * product
    if bias is None:
        return by_row * c, c
    c = c + by_row * bias[group].astype(jnp.float32)
    return c, c


def contraction(row, sizes):
    """Its length; the longest one where groups have one each."""
    return {"forward": row.k, "dgrad": row.n, "wgrad": int(sizes.max())}[row.product]


@jax.jit
def _worst(out, expected, k):
    # One rounding to the result's dtype; plus a term in the result's scale for sums that cancel.
    # Operands are standard normal, so results have a standard deviation of sqrt(k).
    limit = float(jnp.finfo(out.dtype).eps) / 2 * jnp.abs(expected) + 2.0**-12 * jnp.sqrt(k)
    return jnp.max(jnp.abs(out.astype(jnp.float32) - expected) / limit)


def worst_error(out, expected, k):
    """Largest error of an element in units of what it may be: at most 1 is right, NaN is wrong."""
    return float(_worst(jnp.asarray(out), expected, float(k)))
