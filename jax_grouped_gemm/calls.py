"""The static facts of a call, and its operands by name: what every part of the package computes with."""

import dataclasses
from typing import Any, NamedTuple

SCRATCH_UNIT = 128  # bytes: a tensor map; the counter has as much to itself


class Operands(NamedTuple):
    """A call's arrays by name; experts, alpha, prob and bias are None where absent, b is the tuple of weight operands."""

    a: Any
    offsets: Any
    experts: Any
    alpha: Any
    prob: Any
    bias: Any
    b: tuple


class _Grouped:
    """Of both calls."""

    mapped_groups: int | None
    l: int
    parts: int
    stacks: int | None

    @property
    def matrices(self):
        """Leading dimensions of the weights as one array, or of their gradient."""
        return (self.l,) if self.stacks is None else (self.stacks, self.l // max(self.stacks, 1))

    @property
    def gradient_dtype(self):
        """That the gradients of its two factors are made in; those of a call in parts are rounded after that, if at all."""
        return "bfloat16" if self.parts == 1 else "float32"

    @property
    def has_experts(self):
        return self.mapped_groups is not None

    @property
    def groups(self):
        return self.l if self.mapped_groups is None else self.mapped_groups


@dataclasses.dataclass(frozen=True)
class Call(_Grouped):
    """The static facts of one grouped GEMM: (M, K) rows, L experts, N output columns.

    weights: "dense" (one stacked array), "pointers" (L device addresses) or "tuple" (L arrays).
    c_dtype: None where C is not an output.
    dynamic: tiles are handed out by a counter; None where the package chooses, which `selection.scheduled` then does.
    overlap_margin: SMs left free.
    mma_tiler_mn, cluster_shape_mn: pairs, or None where the package chooses.
    mapped_groups: None where group g is expert g's. Else the number of groups, whose experts are an operand: (groups,)
      int32, and the rows of a group with an index outside [0, L) are zero. alpha is (groups,) then, bias (groups, N).
    distinct_experts: with mapped_groups, each expert has one group, neither none nor several.
    parts: above 1, one of a and b is float32, the other bfloat16, and the product is the sum of those with as many bfloat16
      that add up to it (`parts.of`). There are dense weights and no factors then, and D may have any floating type.
    stacks: None, or the dense weights are (stacks, L / stacks, ...), as a vmap has them: either dimension may be sharded.
    drop_in: it stands for a product of JAX's, which runs anywhere: where this one could not, on several devices, the reference does.
    """

    m: int
    n: int
    k: int
    l: int
    b_major: str
    weights: str
    d_dtype: str
    has_alpha: bool
    has_prob: bool
    implementation: str | None
    has_bias: bool = False
    c_dtype: str | None = None
    dynamic: bool | None = None
    mma_tiler_mn: tuple[int, int] | None = None
    cluster_shape_mn: tuple[int, int] | None = None
    overlap_margin: int = 0
    mapped_groups: int | None = None
    distinct_experts: bool = False
    parts: int = 1
    stacks: int | None = None
    drop_in: bool = False

    @property
    def empty(self):
        """The outputs have no elements, or each is zero: no row has an expert, or it is an empty sum without a bias."""
        return 0 in (self.m, self.n, self.l, self.groups) or (self.k == 0 and not self.has_bias)

    @property
    def output_dtypes(self):
        """Of the outputs (M, N): D, and C if asked for."""
        return (self.d_dtype,) if self.c_dtype is None else (self.d_dtype, self.c_dtype)

    @property
    def scratch_bytes(self):
        """What a launch of the kernels needs: a tensor map per expert whose weights lie alone, then the tile counter."""
        return SCRATCH_UNIT * ((0 if self.weights == "dense" else self.l) + bool(self.dynamic))

    @property
    def b_shape(self):
        """Shape of the weights as one array, its leading dimensions joined."""
        return (self.l, self.n, self.k) if self.b_major == "k" else (self.l, self.k, self.n)

    def split(self, operands):
        """Names the flat operands of the primitive: a, offsets, experts, alpha, prob and bias if present, then the weights."""
        a, offsets, *rest = operands
        experts = rest.pop(0) if self.has_experts else None
        alpha = rest.pop(0) if self.has_alpha else None
        prob = rest.pop(0) if self.has_prob else None
        bias = rest.pop(0) if self.has_bias else None
        return Operands(a, offsets, experts, alpha, prob, bias, tuple(rest))

    @staticmethod
    def flat(operands):
        """The operands that are present, in that order."""
        return [x for x in operands[:-1] if x is not None] + list(operands.b)


@dataclasses.dataclass(frozen=True)
class WgradCall(_Grouped):
    """The static facts of D[g] (N, K) = alpha[g] * x[rows of g].T @ y[rows of g], x (M, N), y (M, K), D (L, N, K).

    accumulate: D is an operand too, float32, and is added to.
    mapped_groups: None where group g makes D[g]. Else the number of groups, whose results' indices are an operand:
      (groups,) int32, none twice; a group with an index outside [0, L) makes none. Each D[i] must have a group. alpha is
      (groups,).
    parts: as in `Call`, of x and y; without a sum so far. stacks: as there, of D.
    The rest as in `Call`.
    """

    m: int
    n: int
    k: int
    l: int
    d_dtype: str
    has_alpha: bool
    implementation: str | None
    accumulate: bool = False
    dynamic: bool | None = None
    mma_tiler_mn: tuple[int, int] | None = None
    cluster_shape_mn: tuple[int, int] | None = None
    overlap_margin: int = 0
    mapped_groups: int | None = None
    parts: int = 1
    stacks: int | None = None
    drop_in: bool = False

    @property
    def empty(self):
        """The result has no elements, or nothing is added up."""
        return 0 in (self.m, self.n, self.k, self.l)

    @property
    def d_shape(self):
        return (*self.matrices, self.n, self.k)

    @property
    def scratch_bytes(self):
        return SCRATCH_UNIT * bool(self.dynamic)

    def split(self, operands):
        """Names the flat operands of the primitive: x, y, offsets, then experts, alpha and the sum so far if present."""
        x, y, offsets, *rest = operands
        experts = rest.pop(0) if self.has_experts else None
        alpha = rest.pop(0) if self.has_alpha else None
        total = rest.pop(0) if self.accumulate else None
        return WgradOperands(x, y, offsets, experts, alpha, total)

    @staticmethod
    def flat(operands):
        """The operands that are present, in that order."""
        return [x for x in operands if x is not None]


class WgradOperands(NamedTuple):
    """By name; experts, alpha and total, the sum so far, are None where absent."""

    x: Any
    y: Any
    offsets: Any
    experts: Any
    alpha: Any
    total: Any
