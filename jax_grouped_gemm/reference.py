"""The same operation in plain JAX: the CPU path, the test oracle's peer, and the fallback on other devices.

Rows are cut into tiles that stay inside a group. A loop over the tiles that exist multiplies each by its expert's
weights, so the work is 2 M N K operations plus the rounding of each group to whole tiles; nothing is computed for
empty groups and rows past the last group, and no expert's product is masked away.
"""

import jax
import jax.numpy as jnp
from jax import lax

SMALLEST_TILE, LARGEST_TILE = 16, 256  # rows; measured on CPU: smaller wastes calls, larger pads groups


def grouped_gemm(call, a, offsets, experts, alpha, prob, bias, b):
    """(D,) or (D, C), both (M, N), for canonical operands; b is one stacked array of shape call.b_shape."""
    rows = tile_rows(call)
    count, expert, first, end = tiles(call, offsets, rows)
    contract_b = 1 if call.b_major == "k" else 0
    # XLA's CPU backend slices and updates 16-bit floats by converting the whole array to float32, D once per tile: so
    # they are moved as integers, and bound to the loop's counter, lest whole integer copies be made ahead of the loop.
    outputs = tuple(_bits(jnp.zeros((call.m, call.n), dtype)) for dtype in call.output_dtypes)

    def tile(i, outputs):
        i, tied = lax.optimization_barrier((i, (a, b, bias)))
        a_bits, b_bits, bias_bits = jax.tree.map(_bits, tied)
        # The window is moved up at the end of A so that it stays inside; the mask keeps the tile's own rows.
        start = jnp.minimum(first[i], call.m - rows)
        window = _floats(lax.dynamic_slice_in_dim(a_bits, start, rows), jnp.bfloat16)
        weights = _floats(lax.dynamic_index_in_dim(b_bits, expert[i], keepdims=False), jnp.bfloat16)

        def by_prob(values):
            return values if prob is None else lax.dynamic_slice_in_dim(prob, start, rows)[:, None] * values

        c = lax.dot_general(window, weights, (((1,), (contract_b,)), ((), ())), preferred_element_type=jnp.float32)
        if alpha is not None:
            c = alpha[expert[i]] * c
        if bias is None:
            d = by_prob(c)
        else:
            of_expert = _floats(lax.dynamic_index_in_dim(bias_bits, expert[i]), bias.dtype)
            d = c = c + by_prob(of_expert.astype(jnp.float32))
        row = start + jnp.arange(rows, dtype=jnp.int32)
        mine = ((row >= first[i]) & (row < end[i]))[:, None]

        def store(output, values, dtype):
            kept = lax.dynamic_slice_in_dim(output, start, rows)
            return lax.dynamic_update_slice_in_dim(output, jnp.where(mine, _bits(values.astype(dtype)), kept), start, 0)

        values = (d, c)[: len(outputs)]
        return tuple(map(store, outputs, values, call.output_dtypes))

    return tuple(map(_floats, lax.fori_loop(0, count, tile, outputs), call.output_dtypes))


def _bits(x):
    return lax.bitcast_convert_type(x, {2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize])


def _floats(x, dtype):
    return lax.bitcast_convert_type(x, dtype)


def tile_rows(call):
    """The power of two next above the average group, within bounds; never more than M."""
    above = 1 << (call.m // call.l).bit_length()
    return min(call.m, max(SMALLEST_TILE, min(LARGEST_TILE, above)))


def tiles(call, offsets, rows):
    """How many tiles the groups make and, for each possible tile, its expert, first row and end of its rows."""
    ends = clamp_offsets(offsets, call.m)
    begins = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    tile_ends = jnp.cumsum(-(-(ends - begins) // rows), dtype=jnp.int32)
    possible = jnp.arange(-(-call.m // rows) + call.l, dtype=jnp.int32)
    expert = jnp.minimum(jnp.searchsorted(tile_ends, possible, side="right").astype(jnp.int32), call.l - 1)
    tile_begins = jnp.concatenate([jnp.zeros(1, jnp.int32), tile_ends[:-1]])
    first = begins[expert] + (possible - tile_begins[expert]) * rows
    # Not min(end, first + rows): that sum may pass 2^31.
    return tile_ends[-1], expert, first, first + jnp.minimum(ends[expert] - first, rows)


def clamp_offsets(offsets, m):
    """Each end within [previous end, M], for any int32 values: what every implementation computes with."""
    return jnp.minimum(lax.cummax(jnp.maximum(offsets, 0)), m)


def ends_of(group_sizes, m):
    """Offsets (L,) of group sizes (L,), saturating at M: the sum of hostile sizes passes 2^31."""
    sizes = jnp.clip(group_sizes, 0, m)
    return lax.associative_scan(lambda x, y: x + jnp.minimum(y, m - x), sizes)


ends_of = jax.jit(ends_of, static_argnames="m")
