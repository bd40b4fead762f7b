"""Weight gradients: problems that reach every statement of a kernel, and their results."""

import numpy as np
import oracle
from problem import Problem, cluster_tiles, loaded_rows


def problems(tile):
    """For one tile: rows and columns of a cluster, and tails of everything."""
    rows, cols = tile.m * tile.cluster_m, tile.n
    rng = np.random.default_rng(0)
    sizes = rng.choice([0, 0, 0, 1, 5, 64], 70)
    experts = [i - 6 for i in rng.permutation(70).tolist()]
    experts[experts.index(-1)] = 2**31 - 1
    return (
        # One cluster does it all: several tiles, more of them than three times the accumulators, and contractions longer
        # than the ring of stages.
        Problem("ragged", tuple(np.cumsum([1, 0, 67, 130, 8 * 64 + 9]).tolist()), 8 * 64 + 220, rows + 8, cols + 8),
        # More groups than the scheduler warp has lanes twice; results in another order than the groups, some groups without.
        Problem(
            "many groups", tuple(np.cumsum(sizes).tolist()), int(sizes.sum()), 24, 16, clusters=2, dynamic=True,
            experts=tuple(experts),
        ),
        # Ends of any value: every one is clamped. The result ends in the second half of a tile.
        Problem("hostile ends", (-5, 70, 30, -(2**31), 9, 2**31 - 1), 100, 88, 168, clusters=2, dynamic=True),
        # Nine cluster rows, one more than a band; the ring ends elsewhere than it began.
        Problem("one group", (7 * 64,), 7 * 64 + 1, 8 * rows + 8, 40, clusters=2, dynamic=True),
        # No row belongs to a group.
        Problem("no rows", (0, 0), 70, 136, 64, clusters=2),
    )  # fmt: skip


def make_case(rng, variant, problem, alpha, exact):
    """exact: small integers and powers of two, whose sums are exact in any order; else numbers of any kind."""
    groups, l = len(problem.ends), len(problem.ends)
    if problem.experts is not None:
        l = oracle.num_experts(problem.experts)

    def numbers(*shape):
        return rng.integers(-4, 5, shape) if exact else rng.standard_normal(shape, np.float32)

    case = oracle.WgradCase(
        numbers(problem.m, problem.n).astype(oracle.BF16),
        numbers(problem.m, problem.k).astype(oracle.BF16),
        np.array(problem.ends, np.int32),
        l,
        rng.choice([0.5, 1, 2, -1], groups).astype(np.float32) if alpha else None,
        numbers(l, problem.n, problem.k).astype(np.float32) if variant.accumulate else None,
        variant.d_dtype,
        None if problem.experts is None else np.array(problem.experts, np.int32),
    )
    case.poison()
    return case


def work(variant, case):
    """(bytes that the copy engine must load, bytes that it must store): every tile once, none twice, none in vain."""
    tile = variant.tile
    tiles = cluster_tiles(tile, case.x.shape[1], case.y.shape[1])
    loaded = stored = 0
    for begin, end, expert in case.groups():
        if expert is not None:
            loaded += loaded_rows(tile, *tiles) * -(-(end - begin) // tile.k) * tile.k * 2
            if begin < end or not variant.accumulate:
                stored += sum(tiles) * tile.cluster_m * tile.m * tile.n * (4 if variant.d_dtype == "float32" else 2)
    return loaded, stored
