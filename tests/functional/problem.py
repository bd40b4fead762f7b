"""What a kernel is run on, but for the numbers."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Problem:
    """ends: of the groups, in rows, as the caller gives them. experts: of the groups; None: one each, in order.
    n, k: of a weight gradient's result. clusters: that the device runs at once.
    """

    name: str
    ends: tuple
    m: int
    n: int
    k: int
    clusters: int = 1
    dynamic: bool = False
    experts: tuple | None = None


def cluster_tiles(tile, rows, columns):
    """How many clusters' tiles make a result, as (stacked, with a pair's tiles side by side)."""
    cluster, across = tile.m * tile.cluster_m, -(-columns // tile.n)
    beside = tile.turns and 0 < rows % cluster <= tile.m
    return (-(-rows // cluster) - beside) * across, beside * -(-across // 2)


def loaded_rows(tile, stacked, beside):
    """Of A and B, `tile.k` long, that are brought for such tiles: what a pair shares once."""
    return stacked * (tile.m * tile.cluster_m + tile.n) + beside * (tile.m + 2 * tile.n)
