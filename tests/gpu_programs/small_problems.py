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
    features = [
        {},
        {"bias": "float32"},
        {"generate_c": True, "c_dtype": "float32"},
        {"generate_c": True, "bias": "float16"},
    ]
    for tile, b_major, weights, d_dtype in itertools.product(
        config.TILES[arch], config.B_MAJORS, ("dense", "tuple", "pointers"), ("bfloat16", "float32")
    ):
        feature = features[count // 2 % 4]
        config.select_tile = lambda asked, *_, tile=tile: tile if asked == arch else config.TILES[asked][0]
        offsets = [[100, 100, 257, 290], [-3, 500, 20, 2**31 - 1], [0, 0, 0, 0]][count % 3]
        case = oracle.make_case(
            rng, 4, 301, 264, 136, offsets=offsets, b_major=b_major, d_dtype=d_dtype, alpha=bool(count % 2), prob=bool(count % 2),
            **feature,
        )  # fmt: skip
        # NumPy operands, so that the only device code is ours.
        arrays = {"a": case.a, "offsets": case.offsets, "alpha": case.alpha, "prob": case.prob, "bias": case.bias}
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
        options = {name: x for name, x in case.arguments().items() if not isinstance(x, jax.Array)}
        options |= {"n": n, "use_dynamic_sched": count // 3 % 2 == 1, "implementation": "cutedsl"}
        call = jax.jit(lambda arrays, options=options: grouped_gemm(**arrays, **options))
        oracle.check(call(arrays), case)
        count += 1
    print(f"{count} problems right")


if __name__ == "__main__":
    main()
