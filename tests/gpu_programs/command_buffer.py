"""Our calls in the body of a loop that XLA runs as a command buffer, with other data and offsets in every iteration.

Run with XLA_FLAGS that make XLA capture small graphs with custom calls. The body's buffers stay where they are, so an
iteration is a replay of what was captured once. Fails unless that is what happened, and every result is right.
"""

import ctypes
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import numpy as np
import oracle

from jax_grouped_gemm import grouped_gemm, grouped_gemm_wgrad, library

# In the body: dense with scales, dense with a dynamic schedule, tuple with one and bias; weight gradients, with a dynamic schedule too, and a sum of them over all
# iterations, which each adds to in place.
CALLS = 6
ITERATIONS = 20


def counts():
    launches, captured = ctypes.c_int64(), ctypes.c_int64()
    library.load().jgg_launch_counts(ctypes.byref(launches), ctypes.byref(captured))
    return launches.value, captured.value


@jax.jit
def program(a, b, experts, offsets, alpha, prob, bias, cotangents):
    def body(i, carried):
        total, *results = carried
        x = grouped_gemm(a[i], b, offsets=offsets[i], alpha=alpha[i], prob=prob[i])
        y = grouped_gemm(a[i], b, offsets=offsets[i], use_dynamic_sched=True)
        z = grouped_gemm(
            a[i], experts, offsets=offsets[i], alpha=alpha[i], bias=bias[i], prob=prob[i], use_dynamic_sched=True
        )
        u = grouped_gemm_wgrad(cotangents[i], a[i], offsets=offsets[i], alpha=alpha[i])
        v = grouped_gemm_wgrad(cotangents[i], a[i], offsets=offsets[i], d_dtype="float32", use_dynamic_sched=True)
        total = grouped_gemm_wgrad(
            cotangents[i], a[i], offsets=offsets[i], accumulate_into=total, use_dynamic_sched=True
        )
        return total, *map(lambda all_of_it, one: all_of_it.at[i].set(one), results, (x, y, z, u, v))

    nothing = jnp.full((ITERATIONS, a.shape[1], b.shape[1]), jnp.nan, jnp.bfloat16)
    gradients = [jnp.full((ITERATIONS, *b.shape), jnp.nan, dtype) for dtype in (jnp.bfloat16, jnp.float32)]
    zero = jnp.zeros(b.shape, jnp.float32)
    return jax.lax.fori_loop(0, ITERATIONS, body, (zero, nothing, nothing, nothing, *gradients))


def main():
    rng = np.random.default_rng(0)
    l, m, n, k = 8, 1000, 264, 136
    cases = [oracle.make_case(rng, l, m, n, k, bias="float32", poison=False) for _ in range(ITERATIONS)]
    for case in cases:
        case.b = cases[0].b
    stacked = {
        name: jnp.asarray(np.stack([getattr(c, name) for c in cases]))
        for name in ("a", "offsets", "alpha", "prob", "bias")
    }
    cotangents = rng.standard_normal((ITERATIONS, m, n)).astype(oracle.BF16)
    b = jnp.asarray(cases[0].b)
    experts = tuple(jnp.asarray(expert) for expert in cases[0].b)

    library.load().jgg_count_launches(1)
    for _ in range(2):
        results = jax.block_until_ready(program(b=b, experts=experts, cotangents=jnp.asarray(cotangents), **stacked))
    launches, captured = counts()
    print(f"2 runs, {2 * ITERATIONS * CALLS} calls: {launches} launches by the host, {captured} of them captured")
    total, *results = results
    sums = np.zeros((2, *b.shape))
    for i, case in enumerate(cases):
        plain = oracle.Case(case.a, case.b, case.offsets)
        scaled = oracle.Case(case.a, case.b, case.offsets, case.alpha, case.prob)
        for got, this in zip((r[i] for r in results[:3]), (scaled, plain, case), strict=True):
            oracle.assert_close(got, oracle.oracle(this), this)
        of_weights = oracle.WgradCase(cotangents[i], case.a, case.offsets, l, case.alpha)
        oracle.wgrad_check(results[3][i], of_weights)
        of_weights.alpha, of_weights.d_dtype = None, "float32"
        oracle.wgrad_check(results[4][i], of_weights)
        sums += oracle.wgrad_oracle(of_weights)
    oracle.assert_near(total, sums, ITERATIONS * m, what="the sum of all iterations")
    assert captured > 0, "never captured"
    assert launches < ITERATIONS * CALLS, "captured, but launched again for every iteration"
    print("captured and replayed")


if __name__ == "__main__":
    main()
