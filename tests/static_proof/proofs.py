"""What sentryward is asked: which kernels it is to prove, at which sizes, and in which it has to find a fault.

Sizes are small, since it follows every thread, but each makes every pipeline go around: more K tiles in a CTA than stages of A and B, more tiles than accumulators
and than entries of the scheduler's ring; and each has an empty group, groups that end inside a tile, rows past the last group and a last K tile that is cut.
"""

import dataclasses
import typing

from jax_grouped_gemm import config

from . import faults, verify
from .launch import Problem

PAIR, ONE, _ = config.TILES[100]
SMALL = {  # seconds each
    ONE: Problem(m=300, n=256, k=72, sizes=(100, 0, 150)),
    PAIR: Problem(m=450, n=256, k=136, sizes=(100, 0, 300)),
}
LONG = {  # three times as many tiles as accumulators, an odd number of K tiles that is more than there are stages
    ONE: Problem(m=700, n=256, k=264, sizes=(200, 0, 130, 300)),
    PAIR: Problem(m=1250, n=256, k=392, sizes=(200, 0, 300, 700)),
}
WIDE = {  # a second column of tiles, almost all of it past N; two clusters, which take turns
    ONE: Problem(m=420, n=264, k=72, sizes=(100, 0, 150, 130), clusters=2),
    PAIR: Problem(m=450, n=264, k=136, sizes=(100, 0, 300), clusters=2),
}


def kernel(tile, epilogue="plain", d_dtype="bfloat16", b_major="k"):
    return config.Variant(100, tile, b_major, "dense", d_dtype, epilogue)


@dataclasses.dataclass(frozen=True)
class Proof:
    """That a kernel, as it is compiled, has neither races nor deadlocks on a problem."""

    kernel: config.Variant
    problem: Problem

    def __str__(self):
        return f"{self.kernel.name}, {self.problem}"

    def ask(self, ptx, facts):
        """(verdict, objections): none where it is as it should be."""
        verdict = verify.verify(ptx, facts, self.problem)
        return verdict, verify.objections(verdict, facts, self.problem)


@dataclasses.dataclass(frozen=True)
class Fault(Proof):
    """That a kernel with a planted fault is found wrong, and what is wrong with it; `finding` None: that it is not found."""

    name: str
    finding: str | None
    plant: typing.Callable[[str], str] = dataclasses.field(repr=False)

    def __str__(self):
        return f"planted in {self.kernel.tile}: {self.name}"

    def ask(self, ptx, facts):
        verdict = verify.verify(self.plant(ptx), facts, self.problem)
        if self.finding is None:
            return verdict, verify.objections(verdict, facts, self.problem)
        return verdict, [] if verdict.finding == self.finding else [f"found: {verdict.finding}, not {self.finding}"]


def planted(tile):
    found = faults.FAULTS | (faults.PAIR_FAULTS if tile.two_cta else {})
    return {name: Fault(kernel(tile), SMALL[tile], name, *fault) for name, fault in found.items()}


def questions():
    for sizes in (SMALL, WIDE):
        for tile in (ONE, PAIR):
            yield Proof(kernel(tile), sizes[tile])
    # Every epilogue, type of D and order of B at least once. No bias in float32: its address is masked, and sentryward does not follow that. Nor a null
    # bias beside C: it had no answer in 13 minutes.
    yield Proof(kernel(ONE, "scaled", "float16", "n"), SMALL[ONE])
    yield Proof(
        kernel(PAIR, "scaled", "float32"), dataclasses.replace(SMALL[PAIR], absent=frozenset({"alpha", "prob"}))
    )
    yield Proof(kernel(ONE, "bias", "float32"), dataclasses.replace(SMALL[ONE], dtype="float16"))
    yield Proof(kernel(PAIR, "bias", "bfloat16", "n"), SMALL[PAIR])
    yield Proof(kernel(ONE, "c_16bit", "16bit"), dataclasses.replace(SMALL[ONE], dtype="float16"))
    yield Proof(kernel(PAIR, "c_16bit", "float32", "n"), SMALL[PAIR])
    yield Proof(kernel(ONE, "c_float32", "16bit", "n"), SMALL[ONE])
    for tile in (ONE, PAIR):
        yield from planted(tile).values()
    for name, plant in faults.UNSEEN.items():
        yield Fault(kernel(ONE), SMALL[ONE], name, None, plant)
    for tile in (ONE, PAIR):
        yield Proof(kernel(tile), LONG[tile])
