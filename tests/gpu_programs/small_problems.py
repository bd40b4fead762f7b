"""A sweep of small problems over every kind of kernel, for compute-sanitizer (`make sanitize`): few launches, checked."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import itertools

import jax
import numpy as np
import oracle

from jax_grouped_gemm import config, ffi_call, grouped_gemm


def main():
    rng = np.random.default_rng(0)
    arch = ffi_call.architecture(jax.devices("cuda")[0].compute_capability)
    count = 0
    for tile, b_major, weights, d_dtype in itertools.product(
        config.TILES[arch], config.B_MAJORS, ("dense", "tuple", "pointers"), ("bfloat16", "float32")
    ):
        config.select_tile = lambda asked, *_, tile=tile: tile if asked == arch else config.TILES[asked][0]
        offsets = [[100, 100, 257, 290], [-3, 500, 20, 2**31 - 1], [0, 0, 0, 0]][count % 3]
        case = oracle.make_case(
            rng, 4, 301, 264, 136, offsets=offsets, b_major=b_major, d_dtype=d_dtype, alpha=bool(count % 2), prob=bool(count % 2)
        )  # fmt: skip
        # NumPy operands, so that the only device code is ours.
        arrays = {"a": case.a, "offsets": case.offsets, "alpha": case.alpha, "prob": case.prob}
        arrays = {name: jax.device_put(x) for name, x in arrays.items() if x is not None}
        experts = tuple(jax.device_put(np.ascontiguousarray(case.b[g])) for g in range(4))
        if weights == "dense":
            arrays["b"] = jax.device_put(case.b)
        elif weights == "tuple":
            arrays["b"] = experts
        else:
            addresses = np.array([w.unsafe_buffer_pointer() for w in experts], np.int64)
            arrays["b_ptrs"] = jax.device_put(addresses.view(np.uint8))
        n = 264 if weights == "pointers" else None
        jax.clear_caches()
        call = jax.jit(
            lambda arrays, n=n, m=b_major, d=d_dtype: grouped_gemm(
                **arrays, n=n, b_major=m, d_dtype=d, implementation="cutedsl"
            )
        )
        oracle.assert_close(call(arrays), oracle.oracle(case), case)
        count += 1
    print(f"{count} problems right")


if __name__ == "__main__":
    main()
