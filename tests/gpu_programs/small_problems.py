"""A sweep of small problems over every kind of kernel, for compute-sanitizer (`make sanitize`): few launches, checked."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

import itertools

import jax
import numpy as np
import oracle

from jax_grouped_gemm import calls, config, ffi_call, grouped_gemm, wgrad_call

OFFSETS = [100, 100, 257, 290], [-3, 500, 20, 2**31 - 1], [0, 0, 0, 0]
M, N, K = 301, 264, 136


def forward(rng, arch):
    """Every tile with every kind of weights."""
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
        case = oracle.make_case(
            rng, 4, M, N, K, offsets=OFFSETS[count % 3], b_major=b_major, d_dtype=d_dtype, alpha=bool(count % 2), prob=bool(count % 2),
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
        n = N if weights == "pointers" else None
        jax.clear_caches()
        options = {name: x for name, x in case.arguments().items() if not isinstance(x, jax.Array)}
        options |= {"n": n, "use_dynamic_sched": count // 3 % 2 == 1, "implementation": "cutedsl"}
        call = jax.jit(lambda arrays, options=options: grouped_gemm(**arrays, **options))
        oracle.check(call(arrays), case)
        count += 1
    return count


def of_groups_with_experts(rng, arch):
    """Seven groups, of which some share experts and some have none: forward kernels of every tile."""
    for count, (tile, weights) in enumerate(itertools.product(config.TILES[arch], ("dense", "tuple", "pointers"))):
        experts = (2, 0, 2, -1, 1, 7, 0)
        feature = {} if count % 2 else {"bias": "float32", "generate_c": True, "c_dtype": "float32"}
        case = oracle.make_case(rng, 7, M, N, K, experts=experts, **feature)
        call = calls.Call(
            m=M, n=N, k=K, l=len(case.b), b_major="k", weights=weights, d_dtype="bfloat16", has_alpha=True,
            has_prob=True, has_bias=case.bias is not None, c_dtype=case.c_dtype, dynamic=count // 2 % 2 == 1,
            mapped_groups=7, implementation="cutedsl", **named(tile),
        )  # fmt: skip
        matrices = tuple(jax.device_put(np.ascontiguousarray(b)) for b in case.b)
        addresses = np.array([w.unsafe_buffer_pointer() for w in matrices], np.int64)
        b = {"dense": (case.b,), "tuple": matrices, "pointers": (addresses.view(np.uint8),)}[weights]
        operands = calls.Operands(case.a, case.offsets, case.experts, case.alpha, case.prob, case.bias, b)
        outputs = run(ffi_call.grouped_gemm, call, operands)
        oracle.check(tuple(outputs) if case.generate_c else outputs[0], case)
    return count + 1


def wgrad(rng, arch):
    """Every kernel of weight gradients, with groups that are each an expert's and with others."""
    count = 0
    for tile, (d_dtype, accumulate), mapped in itertools.product(
        config.WGRAD_TILES[arch], config.WGRAD_RESULTS, (False, True)
    ):
        experts, offsets = ((2, 0, -1, 1, 9, 3), None) if mapped else (None, OFFSETS[count // 2 % 3])
        groups = 6 if mapped else 4
        case = oracle.make_wgrad_case(
            rng, groups, M, N, K, offsets=offsets, alpha=count % 4 < 2, d_dtype=d_dtype, accumulate=accumulate,
            experts=experts,
        )  # fmt: skip
        call = calls.WgradCall(
            m=M, n=N, k=K, l=case.l, d_dtype=d_dtype, has_alpha=case.alpha is not None, accumulate=accumulate,
            dynamic=count // 3 % 2 == 1, mapped_groups=groups if mapped else None, implementation="cutedsl",
            **named(tile),
        )  # fmt: skip
        operands = calls.WgradOperands(case.x, case.y, case.offsets, case.experts, case.alpha, case.total)
        oracle.wgrad_check(run(wgrad_call.grouped_wgrad, call, operands), case)
        count += 1
    return count


def named(tile):
    return {"mma_tiler_mn": tile.mma_tiler_mn, "cluster_shape_mn": tile.cluster_shape_mn}


def run(primitive, call, operands):
    """The public functions have no groups with experts: vmap and gradients do."""
    flat = list(map(jax.device_put, call.flat(operands)))
    return jax.block_until_ready(jax.jit(lambda *flat: primitive(call, call.split(flat)))(*flat))


def main():
    rng = np.random.default_rng(0)
    arch = ffi_call.architecture(jax.devices("cuda")[0].compute_capability)
    select = config.select_tile
    count = forward(rng, arch)
    config.select_tile = select
    count += of_groups_with_experts(rng, arch) + wgrad(rng, arch)
    print(f"{count} problems right")


if __name__ == "__main__":
    main()
