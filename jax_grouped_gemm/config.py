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
# Every switch of the epilogue -> what it writes D as. "16bit" is bfloat16 or float16, told at run time: kernels that also
# write C, of its own type, would be too many otherwise.
EPILOGUES = {
    "plain": D_DTYPES,
    "scaled": D_DTYPES,
    "bias": D_DTYPES,
    "c_16bit": ("16bit", "float32"),
    "c_float32": ("16bit", "float32"),
}


@dataclasses.dataclass(frozen=True)
class Tile:
    """What one CTA computes, and how CTAs are clustered.

    m, n: rows and columns of D per CTA; k: contraction per pipeline stage.
    cluster_m, cluster_n: CTAs of a cluster along rows and columns, which share operands by multicast.
    two_cta: SM100 only, the pair of CTAs along M executes one matrix instruction together.

    A caller names it by `mma_tiler_mn` and `cluster_shape_mn`.
    """

    m: int
    n: int
    k: int = 64
    cluster_m: int = 1
    cluster_n: int = 1
    two_cta: bool = False

    @property
    def mma_tiler_mn(self):
        """Rows and columns of D that a pair of CTAs along M, or one CTA where there are no pairs, computes."""
        return self.m * (2 if self.cluster_m % 2 == 0 else 1), self.n

    @property
    def cluster_shape_mn(self):
        return self.cluster_m, self.cluster_n

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

    epilogue:
      "plain": D = A B^T.
      "scaled": times alpha and prob; either may be absent at run time.
      "bias": D = alpha A B^T + prob bias; alpha and prob may be absent.
      "c_16bit", "c_float32": writes C too, in that type; alpha, prob and bias may be absent.
    """

    arch: int
    tile: Tile
    b_major: str
    weights: str
    d_dtype: str
    epilogue: str

    @property
    def c_dtype(self):
        return self.epilogue.removeprefix("c_") if self.epilogue.startswith("c_") else None

    @property
    def has_bias(self):
        return self.epilogue == "bias" or self.c_dtype is not None

    @property
    def name(self):
        return f"sm{self.arch}_forward_{self.tile}_b{self.b_major}_{self.weights}_{self.d_dtype}_{self.epilogue}"


@dataclasses.dataclass(frozen=True)
class WgradVariant:
    """One compiled kernel of weight gradients. accumulate: adds to what D holds."""

    arch: int
    tile: Tile
    d_dtype: str
    accumulate: bool

    @property
    def name(self):
        return f"sm{self.arch}_wgrad_{self.tile}_{self.d_dtype}{'_accumulate' if self.accumulate else ''}"


# What wgrad writes -> whether it can add to it instead.
WGRAD_RESULTS = (("bfloat16", False), ("float32", False), ("float32", True))


def wgrad_variants(arch):
    """Every wgrad kernel compiled for an architecture."""
    return [WgradVariant(arch, tile, *result) for tile, result in itertools.product(TILES[arch], WGRAD_RESULTS)]


def prologue_name(arch, source):
    """Kernel that writes one tensor map per expert; source is "memory" or "value"."""
    return f"sm{arch}_maps_{'from_memory' if source == 'memory' else 'by_value'}"


def variants(arch):
    """Every forward kernel compiled for an architecture."""
    return [
        Variant(arch, tile, b_major, weights, d_dtype, epilogue)
        for tile, b_major, weights in itertools.product(TILES[arch], B_MAJORS, WEIGHTS)
        for epilogue, d_dtypes in EPILOGUES.items()
        for d_dtype in d_dtypes
    ]


def epilogue_of(*, scaled, bias, d_dtype, c_dtype):
    """(epilogue, the variant's D type) for a call; c_dtype is None where C is not asked for."""
    if c_dtype is not None:
        return f"c_{_storage(c_dtype)}", _storage(d_dtype)
    return "bias" if bias else "scaled" if scaled else "plain", d_dtype


def _storage(dtype):
    return "float32" if dtype == "float32" else "16bit"


def tiles(arch, mma_tiler_mn=None, cluster_shape_mn=None):
    """Compiled tiles of an architecture that a caller's wish allows; None allows all."""
    return tuple(
        tile
        for tile in TILES[arch]
        if mma_tiler_mn in (None, tile.mma_tiler_mn) and cluster_shape_mn in (None, tile.cluster_shape_mn)
    )


def select_tile(arch, l, m, n, k, mma_tiler_mn=None, cluster_shape_mn=None):
    """The tile for a call, from static facts only: L experts, (M, K) rows, N columns. None if the wish allows none.

    The first tile of an architecture is its fastest per column when groups fill the rows of a cluster; the last is for
    groups that do not. Between them, a tile that pads N less wins if it saves more than its own lower speed costs.
    """
    del k  # every tile's pipeline is deep enough for any K
    allowed = tiles(arch, mma_tiler_mn, cluster_shape_mn)
    if len(allowed) < 2:
        return allowed[0] if allowed else None
    fast, *_, small = TILES[arch]
    if m < l * fast.m * fast.cluster_m:
        return small if small in allowed else allowed[-1]

    def cost(tile):
        return _padded(n, tile.n * tile.cluster_n) * (1.0 if tile == fast else 1.03)

    return min((tile for tile in allowed if tile != small), key=cost)


# SMs of the GPUs that the rule below has in mind: H100 SXM and H200; B200.
SMS = {90: 132, 100: 148}
# What a row of a group costs each tile of wgrad, per column and relative to the first tile: where N and K are multiples of 16, and
# how much more for each that is not. Its rows then begin inside of 32-byte sectors, of which a narrow tile moves more in vain.
# Measured for SM90 (docs/architecture.md); for SM100 not: the ratio of the bytes loaded.
WGRAD_ROW_COSTS = {90: ((1.0, 0.0), (1.0, 0.04), (1.1, 0.35)), 100: ((1.0, 0.0), (1.5, 0.0))}
# What comes with every tile of D, in such rows: above all, it is written.
WGRAD_ROWS_PER_TILE = 300


def select_wgrad_tile(arch, l, rows, n, k, mma_tiler_mn=None, cluster_shape_mn=None):
    """The tile for D (L, N, K), from static facts only; rows: of a group, in the mean. None if the wish allows none.

    Clusters do one tile of D after another, so the time is that of as many as the busiest one has.
    """
    misaligned = (n % 16 != 0) + (k % 16 != 0)

    def cost(tile):
        count = l * -(-n // (tile.m * tile.cluster_m)) * -(-k // (tile.n * tile.cluster_n))
        waves = -(-count // (SMS[arch] // (tile.cluster_m * tile.cluster_n)))
        aligned, more = WGRAD_ROW_COSTS[arch][TILES[arch].index(tile)]
        return waves * tile.n * (rows * (aligned + more * misaligned) + WGRAD_ROWS_PER_TILE)

    return min(tiles(arch, mma_tiler_mn, cluster_shape_mn), key=cost, default=None)


def _padded(size, unit):
    return -(-size // unit) * unit
