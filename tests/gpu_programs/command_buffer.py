"""A program with our calls between others, run repeatedly as a command buffer, with data and offsets changed in place.

Run with XLA_FLAGS that make XLA capture small graphs with custom calls. Fails unless our calls were captured, were also
replayed without being launched again, and every result is right.
"""

import ctypes
import functools
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import numpy as np
import oracle

from jax_grouped_gemm import grouped_gemm, library

CALLS = 3  # dense twice, tuple once


def counts():
    launches, captured = ctypes.c_int64(), ctypes.c_int64()
    library.load().jgg_launch_counts(ctypes.byref(launches), ctypes.byref(captured))
    return launches.value, captured.value


@jax.jit
def program(a, b, experts, offsets, alpha, prob):
    x = grouped_gemm(a + a, b, offsets, alpha=alpha, prob=prob)
    y = grouped_gemm(a, b, offsets)
    z = grouped_gemm(a, experts, offsets, alpha=alpha)
    return x * jnp.bfloat16(0.5), y, z


# One function, compiled once per type: XLA drops its command buffers whenever it compiles another program.
@functools.partial(jax.jit, donate_argnums=0)
def write(target, value):
    """The same buffer with new contents: what a captured graph must notice."""
    return value + jnp.zeros_like(target)


def main():
    rng = np.random.default_rng(0)
    l, m, n, k = 8, 1000, 264, 136
    library.load().jgg_count_launches(1)
    arrays, runs, replayed = None, 20, 0
    for _ in range(runs):
        case = oracle.make_case(rng, l, m, n, k, poison=False)
        new = {name: x for name, x in case.arguments().items() if isinstance(x, jax.Array)}
        new["experts"] = tuple(jnp.asarray(case.b[g]) for g in range(l))
        arrays = new if arrays is None else jax.tree.map(write, arrays, new)
        before = counts()[0]
        x, y, z = program(
            arrays["a"], arrays["b"], arrays["experts"], arrays["offsets"], arrays["alpha"], arrays["prob"]
        )
        jax.block_until_ready((x, y, z))
        replayed += counts()[0] == before
        plain = oracle.Case(case.a, case.b, case.offsets)
        by_alpha = oracle.Case(case.a, case.b, case.offsets, case.alpha)
        for got, this in ((x, case), (y, plain), (z, by_alpha)):
            oracle.assert_close(got, oracle.oracle(this), this)
        del x, y, z
    launches, captured = counts()
    print(f"{runs} runs of {CALLS} calls: {launches} launches, {captured} captured, {replayed} runs without a launch")
    assert captured > 0, "never captured"
    assert replayed > 0, "never replayed"
    print("captured and replayed")


if __name__ == "__main__":
    main()
