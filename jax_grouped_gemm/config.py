"""Kernel configurations per architecture, and the rule that picks one.

This module is plain Python: the build reads it to know what to compile, the lowering to know what to call.
"""

import dataclasses
import itertools

# Compute capabilities of the GPUs that an architecture's kernels run on: sm_90a, and the family of sm_100f.
CAPABILITIES = {90: ("9.0",), 100: ("10.0", "10.3")}
D_DTYPES = ("bfloat16", "float16", "float32")
B_MAJORS = ("k", "n")
WEIGHTS = ("dense", "pointers")  # a tuple of arrays uses the "pointers" kernels


@dataclasses.dataclass(frozen=True)
class Tile:
    """What one CTA computes, and how CTAs are clustered.

    m, n: rows and columns of D per CTA; k: contraction per pipeline stage.
    cluster_m, cluster_n: CTAs of a cluster along rows and columns, which share operands by multicast.
    two_cta: SM100 only, the pair of CTAs along M executes one matrix instruction together.
    """

    m: int
    n: int
    k: int = 64
    cluster_m: int = 1
    cluster_n: int = 1
    two_cta: bool = False

    def __str__(self):
        pair = "_pair" if self.two_cta else ""
        return f"{self.m}x{self.n}x{self.k}_cluster{self.cluster_m}x{self.cluster_n}{pair}"


TILES = {
    90: (Tile(128, 256, cluster_m=2), Tile(128, 192, cluster_m=2), Tile(128, 128)),
    100: (Tile(128, 256, cluster_m=2, two_cta=True), Tile(128, 256)),
}


@dataclasses.dataclass(frozen=True)
class Variant:
    """One compiled forward kernel: every field is a compile-time switch of the kernel.

    scaled: multiplies by alpha and prob (either may be absent at run time).
    """

    arch: int
    tile: Tile
    b_major: str
    weights: str
    d_dtype: str
    scaled: bool

    @property
    def name(self):
        scale = "scaled" if self.scaled else "plain"
        return f"sm{self.arch}_forward_{self.tile}_b{self.b_major}_{self.weights}_{self.d_dtype}_{scale}"


def prologue_name(arch, source):
    """Kernel that writes one tensor map per expert; source is "memory" or "value"."""
    return f"sm{arch}_maps_{'from_memory' if source == 'memory' else 'by_value'}"


def variants(arch):
    """Every forward kernel compiled for an architecture."""
    return [
        Variant(arch, *fields) for fields in itertools.product(TILES[arch], B_MAJORS, WEIGHTS, D_DTYPES, (False, True))
    ]


def select_tile(arch, l, m, n, k):
    """The tile for a call, from static facts only: L experts, (M, K) rows, N columns.

    The first tile of an architecture is its fastest per column when groups fill the rows of a cluster; the last is for
    groups that do not. Between them, a tile that pads N less wins if it saves more than its own lower speed costs.
    """
    del k  # every tile's pipeline is deep enough for any K
    fast, *others, small = TILES[arch]
    if m < l * fast.m * fast.cluster_m:
        return small

    def cost(tile):
        padded_columns = -(-n // (tile.n * tile.cluster_n)) * tile.n * tile.cluster_n
        return padded_columns * (1.0 if tile == fast else 1.03)

    return min([fast, *others], key=cost)
