"""The problems that are timed, and how their rows are shared among the experts."""

import dataclasses
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Row:
    """One line of the table: a layer of l experts with m rows in all, A (m, k), weights B (l, n, k) and D (m, n).

    product: which of the layer's three is timed, 2MNK operations each: "forward", D = A B^T; "dgrad", dA = dD B;
      "wgrad", dB = dD^T A of each group's rows.
    shares: "balanced" (equal groups), "skew" (Dirichlet(2) shares) or "routed" (each row picks an expert).
    align: every group is a multiple of it.
    """

    name: str
    l: int
    m: int
    n: int
    k: int
    shares: str
    align: int = 1
    product: str = "forward"

    @property
    def result(self):
        """Its shape."""
        return {"forward": (self.m, self.n), "dgrad": (self.m, self.k), "wgrad": (self.l, self.n, self.k)}[self.product]

    @property
    def flops(self):
        return 2 * self.m * self.n * self.k

    @property
    def decode(self):
        """A few rows per expert, as when tokens are generated: bound by reading the weights."""
        return self.m <= 64 * self.l

    def bytes(self, sizes):
        """Bytes that must move at least: A, the weights of experts that have rows, and D, in bfloat16, or their gradients."""
        return 2 * (self.m * self.k + int(np.count_nonzero(sizes)) * self.n * self.k + self.m * self.n)

    def group_sizes(self, seed):
        """(l,) int32 that sums to m."""
        rng = np.random.default_rng(seed)
        if self.shares == "routed":
            return rng.multinomial(self.m, np.full(self.l, 1 / self.l)).astype(np.int32)
        units = self.m // self.align
        shares = np.full(self.l, 1 / self.l) if self.shares == "balanced" else rng.dirichlet(np.full(self.l, 2.0))
        # Cumulative rounding: the sizes are whole units and their sum is exact.
        ends = np.rint(np.cumsum(shares) * units).astype(np.int64)
        ends[-1] = units
        return (np.diff(ends, prepend=0) * self.align).astype(np.int32)


FORWARD = (
    Row("dsv3_up", 8, 32768, 4096, 7168, "balanced", 256),
    Row("dsv3_down", 8, 32768, 7168, 2048, "balanced", 256),
    Row("mixtral_up", 8, 16384, 14336, 4096, "skew", 256),
    Row("qwen3_up", 128, 65536, 1536, 2048, "skew", 256),
    Row("gptoss_up", 128, 32768, 5760, 2880, "balanced", 256),
    Row("qwen3_routed", 128, 65536, 1536, 2048, "routed"),
    Row("qwen3_decode", 128, 512, 1536, 2048, "routed"),
    Row("mixtral_decode", 8, 128, 14336, 4096, "routed"),
    Row("dsv3_decode", 32, 256, 4096, 7168, "routed"),
)


def _backward(row, product):
    return dataclasses.replace(row, name=f"{row.name}_{product}", product=product)


BACKWARD = tuple(_backward(row, product) for product in ("dgrad", "wgrad") for row in FORWARD if not row.decode)

SMOKE = (
    Row("smoke_aligned", 4, 512, 64, 128, "skew", 64),
    Row("smoke_decode", 8, 16, 64, 128, "routed"),
    Row("smoke_dgrad", 4, 512, 64, 128, "routed", product="dgrad"),
    Row("smoke_wgrad", 4, 512, 64, 128, "routed", product="wgrad"),
)
