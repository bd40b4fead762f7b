"""The same operation in plain JAX: the CPU path, the test oracle's peer, and the fallback on other devices.

Rows are cut into tiles that stay inside a group. A loop over the tiles that exist multiplies each by its expert's
weights, so the work is 2 M N K operations plus the rounding of each group to whole tiles; nothing is computed for
empty groups, groups without an expert and rows past the last group, and no expert's product is masked away.
"""

import jax
import jax.numpy as jnp
from jax import lax

SMALLEST_TILE, LARGEST_TILE = 16, 256  # rows; measured on CPU: smaller wastes calls, larger pads groups


def grouped_gemm(call, a, offsets, experts, alpha, prob, bias, b):
    """(D,) or (D, C), both (M, N), for canonical operands; b is one stacked array of shape call.b_shape."""
    rows = tile_rows(call)
    count, group, first, end = tiles(call, offsets, experts, rows)
    expert = group if experts is None else experts[group]
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
            c = alpha[group[i]] * c
        if bias is None:
            d = by_prob(c)
        else:
            of_group = _floats(lax.dynamic_index_in_dim(bias_bits, group[i]), bias.dtype)
            d = c = c + by_prob(of_group.astype(jnp.float32))
        row = start + jnp.arange(rows, dtype=jnp.int32)
        mine = ((row >= first[i]) & (row < end[i]))[:, None]

        def store(output, values, dtype):
            kept = lax.dynamic_slice_in_dim(output, start, rows)
            return lax.dynamic_update_slice_in_dim(output, jnp.where(mine, _bits(values.astype(dtype)), kept), start, 0)

        values = (d, c)[: len(outputs)]
        return tuple(map(store, outputs, values, call.output_dtypes))

    return tuple(map(_floats, lax.fori_loop(0, count, tile, outputs), call.output_dtypes))


def grouped_wgrad(call, x, y, offsets, experts, alpha, total):
    """(D,), D (L, N, K), for canonical operands: a product per tile of rows, added up in float32 for each group."""
    rows = tile_rows(call)
    begins, ends = bounds(offsets, call.m)
    making = (begins < ends) & has_expert(call, experts)
    # The groups that make a matrix. Not by argsort: with JAX 0.6, each device in a shard_map would get the first one's.
    count = jnp.cumsum(making, dtype=jnp.int32)
    order = jnp.searchsorted(count, jnp.arange(1, call.groups + 1, dtype=jnp.int32)).astype(jnp.int32)
    # As integers, and bound to the loop's counter, for the reasons above.
    d = _bits(jnp.zeros((call.l, call.n, call.k), call.d_dtype) if total is None else total)

    def of_group(i, d):
        group = order[i]
        begin, end = begins[group], ends[group]

        def tile(j, acc):
            j, tied = lax.optimization_barrier((j, (x, y)))
            first = begin + j * rows
            start = jnp.minimum(first, call.m - rows)
            row = start + jnp.arange(rows, dtype=jnp.int32)
            mine = ((row >= first) & (row < end))[:, None]

            def window(operand):
                values = _floats(lax.dynamic_slice_in_dim(_bits(operand), start, rows), jnp.bfloat16)
                return jnp.where(mine, values, jnp.zeros_like(values))  # in both: 0 * NaN is NaN

            left, right = map(window, tied)
            return acc + lax.dot_general(left, right, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)

        acc = lax.fori_loop(0, -(-(end - begin) // rows), tile, jnp.zeros((call.n, call.k), jnp.float32))
        acc = acc if alpha is None else alpha[group] * acc
        index = group if experts is None else experts[group]
        if total is not None:
            acc = _floats(lax.dynamic_index_in_dim(d, index, keepdims=False), jnp.float32) + acc
        return lax.dynamic_update_index_in_dim(d, _bits(acc.astype(call.d_dtype)), index, 0)

    return (_floats(lax.fori_loop(0, count[-1], of_group, d), call.d_dtype),)


def _bits(x):
    return lax.bitcast_convert_type(x, {2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize])


def _floats(x, dtype):
    return lax.bitcast_convert_type(x, dtype)


def tile_rows(call):
    """The power of two next above the average group, within bounds; never more than M."""
    above = 1 << (call.m // call.groups).bit_length()
    return min(call.m, max(SMALLEST_TILE, min(LARGEST_TILE, above)))


def tiles(call, offsets, experts, rows):
    """How many tiles the groups make and, for each possible tile, its group, first row and end of its rows."""
    begins, ends = bounds(offsets, call.m)
    tile_ends = jnp.cumsum(jnp.where(has_expert(call, experts), -(-(ends - begins) // rows), 0), dtype=jnp.int32)
    possible = jnp.arange(-(-call.m // rows) + call.groups, dtype=jnp.int32)
    group = jnp.minimum(jnp.searchsorted(tile_ends, possible, side="right").astype(jnp.int32), call.groups - 1)
    tile_begins = jnp.concatenate([jnp.zeros(1, jnp.int32), tile_ends[:-1]])
    first = begins[group] + (possible - tile_begins[group]) * rows
    # Not min(end, first + rows): that sum may pass 2^31.
    return tile_ends[-1], group, first, first + jnp.minimum(ends[group] - first, rows)


def has_expert(call, experts):
    """Of each group: whether its index is within [0, L)."""
    return True if experts is None else (experts >= 0) & (experts < call.l)


def bounds(offsets, m):
    """First row and end of each group."""
    ends = clamp_offsets(offsets, m)
    return jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]]), ends


def clamp_offsets(offsets, m):
    """Each end within [previous end, M], for any int32 values: what every implementation computes with."""
    return jnp.minimum(lax.cummax(jnp.maximum(offsets, 0)), m)


def ends_of(group_sizes, m):
    """Offsets (L,) of group sizes (L,), saturating at M: the sum of hostile sizes passes 2^31."""
    sizes = jnp.clip(group_sizes, 0, m)
    return lax.associative_scan(lambda x, y: x + jnp.minimum(y, m - x), sizes)


ends_of = jax.jit(ends_of, static_argnames="m")
