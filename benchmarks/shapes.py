"""The problems that are timed, and how their rows are shared among the experts."""

import dataclasses
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Row:
    """One line of the table: a layer of l experts with m rows in all, A (m, k), weights B (l, n, k) and D (m, n).

    product: which of the layer's three is timed, 2MNK operations each: "forward", D = A B^T; "dgrad", dA = dD B;
      "wgrad", dB = dD^T A of each group's rows.
    shares: "balanced" (equal groups), "skew" (Dirichlet(2) shares), "heavy" (Dirichlet(0.2): a few groups have most rows),
      "routed" (each row picks an expert) or "one_hot" (one group has all rows).
    align: every group is a multiple of it.
    sweep: which one it is a point of, none for the listed rows; x: where on the plot's axis.
    """

    name: str
    l: int
    m: int
    n: int
    k: int
    shares: str
    align: int = 1
    product: str = "forward"
    sweep: str = ""
    x: int | str = ""

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
        # The gradient of weights without rows is zero, but written.
        matrices = self.l if self.product == "wgrad" else int(np.count_nonzero(sizes))
        return 2 * (self.m * self.k + matrices * self.n * self.k + self.m * self.n)

    def group_sizes(self, seed):
        """(l,) int32 that sums to m."""
        rng = np.random.default_rng(seed)
        if self.shares == "routed":
            return rng.multinomial(self.m, np.full(self.l, 1 / self.l)).astype(np.int32)
        units = self.m // self.align
        match self.shares:
            case "balanced":
                shares = np.full(self.l, 1 / self.l)
            case "one_hot":
                shares = np.eye(self.l)[self.l // 2]
            case "skew" | "heavy":
                shares = rng.dirichlet(np.full(self.l, {"skew": 2.0, "heavy": 0.2}[self.shares]))
            case _:
                raise ValueError(f"unknown shares {self.shares}")
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


def _skew_row(product, shares, aligned=True):
    name = f"skew_{shares}{'' if aligned else '_unaligned'}{'' if product == 'forward' else '_' + product}"
    x = shares if aligned else f"{shares}, unaligned"
    align = 256 if aligned and shares != "routed" else 1
    return Row(name, 64, 65536, 2048, 2048, shares, align, product, "skew", x)


# One quantity varies, everything else stays.
SWEEPS = (
    *(
        Row(f"rows_per_group_{rows}", 32, 32 * rows, 4096, 2048, "balanced", sweep="rows_per_group", x=rows)
        for rows in (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 8192)
    ),
    *(
        _skew_row(product, *shares)
        for product in ("forward", "wgrad")
        for shares in (("balanced",), ("skew",), ("heavy",), ("heavy", False), ("routed",), ("one_hot",))
    ),
    *(
        Row(f"experts_{l}", l, 32768, 2048, 2048, "balanced", sweep="experts", x=l)
        for l in (1, 2, 4, 8, 16, 32, 64, 128, 256)
    ),
)

SMOKE = (
    Row("smoke_aligned", 4, 512, 64, 128, "skew", 64),
    Row("smoke_decode", 8, 16, 64, 128, "routed"),
    Row("smoke_dgrad", 4, 512, 64, 128, "routed", product="dgrad"),
    Row("smoke_wgrad", 4, 512, 64, 128, "routed", product="wgrad"),
    Row("smoke_rows_per_group", 4, 64, 64, 128, "balanced", sweep="rows_per_group", x=16),
    Row("smoke_skew", 4, 512, 64, 128, "heavy", 64, sweep="skew", x="heavy"),
    Row("smoke_experts", 2, 64, 64, 128, "balanced", sweep="experts", x=2),
)


def select(names=None, smoke=False):
    """Rows by their names or those of sets, comma-separated: "forward" and "backward" (the listed rows), "sweeps" or one
    sweep's. All by default. Raises ValueError for an unknown name."""
    every = SMOKE if smoke else FORWARD + BACKWARD + SWEEPS
    if names is None:
        return list(every)
    found = {row.name: [row] for row in every}
    for row in every:
        sets = ("sweeps", row.sweep) if row.sweep else ("forward" if row.product == "forward" else "backward",)
        for name in sets:
            found.setdefault(name, []).append(row)
    given = names.split(",")
    if unknown := [name for name in given if name not in found]:
        raise ValueError(f"unknown row {', '.join(unknown)}; there are {', '.join(found)}")
    return list(dict.fromkeys(row for name in given for row in found[name]))
