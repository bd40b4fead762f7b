"""Interleaved timing: every arm in turn, round after round, so that a hot or throttled GPU slows all of them alike."""

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass
class Arm:
    """One competitor. `call(i)` queues call number i and returns its result; `wait(result)` blocks until it is there."""

    call: Callable[[int], object]
    wait: Callable[[object], object]
    calls: int = 0  # per burst; 0 until calibrated
    rounds: int = 0
    samples: list[float] = field(default_factory=list)  # seconds per call, one per burst

    def burst(self, calls: int, clock: Callable[[], float] = time.perf_counter) -> float:
        """Seconds per call of `calls` calls that are queued together and waited for once."""
        start = clock()
        for i in range(calls):
            result = self.call(i)
        self.wait(result)
        return (clock() - start) / calls


def calibrate(arm: Arm, rounds: int, burst_seconds: float = 0.02, slow_seconds: float = 0.02) -> None:
    """Chooses calls per burst from a few warm calls. A slow arm gets few rounds: it needs no precision."""
    arm.burst(3)
    once = min(arm.burst(3) for _ in range(2))
    arm.calls = max(1, min(500, round(burst_seconds / once)))
    arm.rounds = rounds if once < slow_seconds else min(rounds, 3)


def interleave(arms: Mapping[str, Arm], clock: Callable[[], float] = time.perf_counter, seed: int = 0) -> None:
    """Takes every arm's samples, round after round, an arm with fewer rounds leaving early.

    A GPU at its power limit takes a while to find the clock for what it runs: a burst right behind another arm's still has
    that arm's. So each is preceded by one that is not timed, and each round has an order of its own.
    """
    order = random.Random(seed)
    for round_ in range(max((arm.rounds for arm in arms.values()), default=0)):
        turn = [arm for arm in arms.values() if round_ < arm.rounds]
        order.shuffle(turn)
        for arm in turn:
            arm.burst(arm.calls, clock)
            arm.samples.append(arm.burst(arm.calls, clock))


@dataclass(frozen=True)
class Summary:
    """Statistics of one arm's samples, in seconds per call."""

    median: float
    low: float
    high: float
    count: int


def summarize(samples: list[float]) -> Summary:
    """Median and range; raises ValueError when there is nothing to summarise."""
    if not samples:
        raise ValueError("no samples: the arm was never timed")
    return Summary(statistics.median(samples), min(samples), max(samples), len(samples))


def geometric_mean(ratios: list[float]) -> float:
    """Geometric mean, the fair average of ratios."""
    return statistics.geometric_mean(ratios)
