"""The same operation in plain JAX: the CPU path, the test oracle's peer, and the fallback on other devices.

Rows are cut into tiles that stay inside a group. A loop over the tiles that exist multiplies each by its expert's
weights, so the work is 2 M N K operations plus the rounding of each group to whole tiles; nothing is computed for
empty groups and rows past the last group, and no expert's product is masked away.
"""

import jax
import jax.numpy as jnp
from jax import lax

SMALLEST_TILE, LARGEST_TILE = 16, 256  # rows; measured on CPU: smaller wastes calls, larger pads groups


def grouped_gemm(call, a, offsets, alpha, prob, b):
    """D (M, N) for canonical operands; b is one stacked array of shape call.b_shape."""
    rows = tile_rows(call)
    count, expert, first, end = tiles(call, offsets, rows)
    contract_b = 1 if call.b_major == "k" else 0

    def tile(i, d):
        # The window is moved up at the end of A so that it stays inside; the mask keeps the tile's own rows.
        start = jnp.minimum(first[i], call.m - rows)
        window = lax.dynamic_slice_in_dim(a, start, rows)
        weights = lax.dynamic_index_in_dim(b, expert[i], keepdims=False)
        values = lax.dot_general(window, weights, (((1,), (contract_b,)), ((), ())), preferred_element_type=jnp.float32)
        if alpha is not None:
            values = alpha[expert[i]] * values
        if prob is not None:
            values = lax.dynamic_slice_in_dim(prob, start, rows)[:, None] * values
        row = start + jnp.arange(rows, dtype=jnp.int32)
        mine = (row >= first[i]) & (row < end[i])
        kept = lax.dynamic_slice_in_dim(d, start, rows)
        return lax.dynamic_update_slice_in_dim(d, jnp.where(mine[:, None], values.astype(d.dtype), kept), start, 0)

    return lax.fori_loop(0, count, tile, jnp.zeros((call.m, call.n), call.d_dtype))


def tile_rows(call):
    """The power of two next below the average group, within bounds; never more than M."""
    average = max(call.m // call.l, 1)
    return min(call.m, max(SMALLEST_TILE, min(LARGEST_TILE, 1 << (average.bit_length() - 1))))


def tiles(call, offsets, rows):
    """How many tiles the groups make and, for each possible tile, its expert, first row and end of its rows."""
    ends = clamp_offsets(offsets, call.m)
    begins = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    whole, rest = (ends - begins) // rows, (ends - begins) % rows > 0
    tile_ends = jnp.cumsum(whole + rest, dtype=jnp.int32)
    possible = jnp.arange(-(-call.m // rows) + call.l, dtype=jnp.int32)
    expert = jnp.minimum(jnp.searchsorted(tile_ends, possible, side="right").astype(jnp.int32), call.l - 1)
    tile_begins = jnp.concatenate([jnp.zeros(1, jnp.int32), tile_ends[:-1]])
    first = begins[expert] + (possible - tile_begins[expert]) * rows
    return tile_ends[-1], expert, first, jnp.minimum(ends[expert], first + rows)


def clamp_offsets(offsets, m):
    """Each end within [previous end, M], for any int32 values: what every implementation computes with."""
    return jnp.minimum(lax.cummax(jnp.maximum(offsets, 0)), m)


def ends_of(group_sizes, m):
    """Offsets (L,) of group sizes (L,), saturating at M: the sum of hostile sizes passes 2^31."""
    sizes = jnp.clip(group_sizes, 0, m)
    return lax.associative_scan(lambda x, y: x + jnp.minimum(y, m - x), sizes)


ends_of = jax.jit(ends_of, static_argnames="m")
