"""Kernel configurations per architecture, and the rule that picks one.

This module is plain Python: the build reads it to know what to compile, the lowering to know what to call.
"""

import dataclasses
import itertools
import math

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
    cluster_m: CTAs of a cluster, one or a pair along the rows, which share an operand by multicast. On SM90 a pair turns where a group's last rows
      are no more than one CTA's: it then lies along the columns.
    two_cta: SM100 only, the pair of CTAs along M executes one matrix instruction together.
    swapped: for few rows: the matrix unit, whose rows come by 64 or 128, takes the weights for them, and the rows for columns.
    split: of a swapped tile, on SM90, for few tiles: so many CTAs, a cluster, share its contraction.

    A caller names it by `mma_tiler_mn` and `cluster_shape_mn`.
    """

    m: int
    n: int
    k: int = 64
    cluster_m: int = 1
    two_cta: bool = False
    swapped: bool = False
    split: int = 1

    @property
    def cluster_size(self):
        """CTAs of a cluster."""
        return self.cluster_m * self.split

    @property
    def turns(self):
        """Whether the CTAs of a pair may lie side by side."""
        return self.cluster_m == 2 and not self.two_cta

    @property
    def mma_tiler_mn(self):
        """Rows and columns of D that a pair of CTAs along M, or one CTA where there are no pairs, computes."""
        return self.m * (2 if self.cluster_m % 2 == 0 else 1), self.n

    @property
    def cluster_shape_mn(self):
        """CTAs of a cluster along the rows, each with a tile of its own; CTAs that share the contraction of one."""
        return self.cluster_m, self.split

    def __str__(self):
        how = "_pair" if self.two_cta else "_swapped" if self.swapped else ""
        return f"{self.m}x{self.n}x{self.k}_cluster{self.cluster_m}x{self.split}{how}"


TILES = {
    90: (
        Tile(128, 256, cluster_m=2),
        Tile(128, 192, cluster_m=2),
        Tile(128, 128, cluster_m=2),
        Tile(64, 128, swapped=True),
        Tile(64, 128, swapped=True, split=2),
        Tile(64, 128, swapped=True, split=4),
    ),
    100: (Tile(128, 256, cluster_m=2, two_cta=True), Tile(128, 256), Tile(64, 128, swapped=True)),
}
# Those that weight gradients are compiled for.
WGRAD_TILES = {
    90: (
        Tile(128, 256, cluster_m=2),
        Tile(192, 192),
        Tile(128, 128, cluster_m=2),
    ),
    100: TILES[100][:2],
}


def tiles(product):
    """By architecture, those that "forward" or "wgrad" is compiled for."""
    return {"forward": TILES, "wgrad": WGRAD_TILES}[product]


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
    return [WgradVariant(arch, tile, *result) for tile, result in itertools.product(WGRAD_TILES[arch], WGRAD_RESULTS)]


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


def wished(tiles, mma_tiler_mn=None, cluster_shape_mn=None):
    """Those that a caller's wish allows; None allows all."""
    return tuple(
        tile
        for tile in tiles
        if mma_tiler_mn in (None, tile.mma_tiler_mn) and cluster_shape_mn in (None, tile.cluster_shape_mn)
    )


# Clusters of so many CTAs that run at once on the GPUs that the rules below have in mind: H200, as its driver says (of four, some SMs are in none); B200.
CLUSTERS = {90: {1: 132, 2: 66, 4: 30}, 100: {1: 148, 2: 74}}
MEASURED = 90  # the architecture whose times chose when to hand out tiles by a counter; others are static unless a caller says else


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a tile costs, in microseconds of an H200; between tiles of one table only ratios count.

    block: of the contraction, `Tile.k` long. result: what comes with every tile, above all that D is written.
    misaligned: the share that a block costs more for each operand whose rows are no multiple of 16 elements. They then begin
      inside of 32-byte sectors, of which a tile that shares less with others moves more in vain.
    memory: the share of the time of reading operands and writing D once that comes on top.
    """

    block: float
    result: float
    misaligned: float
    memory: float


# Of TILES. For SM90 fitted to times on an H200 (docs/performance.md); for SM100 a guess: the ratio of bytes loaded.
FORWARD_COSTS = {
    90: (
        Cost(0.66, 1.23, 0.00, 0.44),
        Cost(0.51, 1.19, 0.03, 0.43),
        Cost(0.37, 0.94, 0.09, 0.32),
        Cost(0.24, 1.23, 0.21, 0.49),
        Cost(0.26, 1.94, 0.13, 0.29),
        Cost(0.27, 2.65, 0.15, 0.16),
    ),
    100: (Cost(1.0, 4.7, 0.0, 0.0), Cost(1.5, 4.7, 0.0, 0.0), Cost(0.75, 1.2, 0.0, 0.0)),
}
# Of WGRAD_TILES.
WGRAD_COSTS = {
    90: (
        Cost(0.68, 2.04, 0.03, 0.14),
        Cost(0.76, 2.08, 0.21, 0.14),
        Cost(0.35, 1.29, 0.14, 0.21),
    ),
    100: (Cost(1.0, 4.7, 0.0, 0.0), Cost(1.5, 4.7, 0.0, 0.0)),
}
BYTES_PER_MICROSECOND = 4.2e6  # of an H200's memory, as copies reach
# A cluster does one tile after another. Of few such waves the last counts as a whole one; of more, half.
FEW_WAVES = 4
# Of fewer, a counter has nothing to even out, and resetting it takes longer than what it could save.
DYNAMIC_WAVES = 2


def _time(arch, tile, cost, tiles_of_result, blocks, pitches, elements):
    """tiles_of_result: of a whole cluster. blocks: of one CTA. pitches: of the operands' rows. elements: read and written."""
    waves = tiles_of_result / CLUSTERS[arch][tile.cluster_size]
    waves = max(math.ceil(waves), 1) if waves < FEW_WAVES else waves + 0.5
    misaligned = sum(pitch % 16 != 0 for pitch in pitches)
    of_a_wave = blocks * cost.block * (1 + cost.misaligned * misaligned) + cost.result
    return waves * of_a_wave + cost.memory * 2 * elements / BYTES_PER_MICROSECOND


def _cluster_tiles(tile, rows, columns):
    """Of one matrix of the result; the last rows of a pair that turns may be one for two columns (`kernels/scheduler.py`)."""
    pair, across = tile.m * tile.cluster_m, math.ceil(columns / tile.n)
    beside = tile.turns and 0 < rows % pair <= tile.m
    return (math.ceil(rows / pair) - beside) * across + beside * math.ceil(across / 2)


def _fastest(tiles, costs, wish, time):
    allowed = wished(tiles, *wish)
    priced = [(tile, cost) for tile, cost in zip(tiles, costs, strict=True) if tile in allowed]
    return min(priced, key=lambda pair: time(*pair), default=(None, None))[0]


def select_tile(arch, l, m, n, k, b_major, mma_tiler_mn=None, cluster_shape_mn=None):
    """The tile for a forward call, from static facts only: M rows in L groups, (M, K) by (N, K). None if the wish allows none.

    As for groups of one size: only the device knows the real ones.
    """
    groups = l * (1 - math.exp(-2 * m / l)) if l > 1 else 1  # that have rows, as a guess

    def time(tile, cost):
        count = groups * _cluster_tiles(tile, m / l, n)
        pitches = k, k if b_major == "k" else n
        return _time(
            arch, tile, cost, count, math.ceil(k / (tile.k * tile.split)), pitches, groups * n * k + m * k + m * n
        )

    return _fastest(TILES[arch], FORWARD_COSTS[arch], (mma_tiler_mn, cluster_shape_mn), time)


def select_schedule(groups, matrices, rows, columns):
    """Whether a counter hands out the tiles: where there are several groups, of sizes unknown, and several tiles for every SM.

    matrices of the result, with as many rows in the mean, and columns.
    """
    tiles = matrices * max(rows / 128, 1) * math.ceil(columns / 256)
    return groups > 1 and tiles >= DYNAMIC_WAVES * CLUSTERS[MEASURED][1]


def select_wgrad_tile(arch, l, rows, n, k, mma_tiler_mn=None, cluster_shape_mn=None):
    """The tile for D (L, N, K), from static facts only; rows: of a group, in the mean. None if the wish allows none."""

    def time(tile, cost):
        # Of several groups, the last block is seldom full.
        blocks = rows / tile.k + 0.5 if l > 1 else math.ceil(rows / tile.k)
        count = l * _cluster_tiles(tile, n, k)
        return _time(arch, tile, cost, count, blocks, (n, k), l * (n * k + rows * k + rows * n))

    return _fastest(WGRAD_TILES[arch], WGRAD_COSTS[arch], (mma_tiler_mn, cluster_shape_mn), time)
