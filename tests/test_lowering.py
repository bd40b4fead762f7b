"""One traced program, lowered for CPU and for CUDA on a machine without a GPU."""

import dataclasses
import itertools
import json
import pathlib
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from jax_grouped_gemm import calls, config, ffi_call, grouped_gemm, grouped_gemm_wgrad, library, wgrad_call


@pytest.fixture(autouse=True)
def _built(monkeypatch):
    monkeypatch.setattr(ffi_call, "cuda_capabilities", tuple)
    monkeypatch.setattr(library, "manifest", lambda: {"build_id": "the build"})


def struct(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


WEIGHTS = {
    "dense": {"b": struct(4, 16, 32)},
    "tuple": {"b": (struct(16, 32),) * 4},
    "pointers": {"b_ptrs": struct(32, dtype=jnp.uint8)},
}


def lower(platforms, weights="dense", scaled=False, bias=None, **options):
    arrays = {"a": struct(64, 32), "offsets": struct(4, dtype=jnp.int32)} | WEIGHTS[weights]
    if scaled:
        arrays |= {"alpha": struct(4, dtype=jnp.float32), "prob": struct(64, dtype=jnp.float32)}
    if bias is not None:
        arrays |= {"bias": struct(4, 16, dtype=bias)}
    if weights == "pointers":
        options["n"] = 16
    run = jax.jit(lambda **arrays: grouped_gemm(**arrays, **options))
    return run.trace(**arrays).lower(lowering_platforms=platforms).as_text()


def custom_call(text, target=library.FORWARD):
    (line,) = (line for line in text.splitlines() if f"@{target}" in line)
    return line


def test_cpu_has_no_custom_call():
    assert "custom_call" not in lower(("cpu",))


def test_one_program_for_both_platforms():
    text = lower(("cpu", "cuda"))
    custom_call(text)
    assert "stablehlo.while" in text
    assert "stablehlo.case" in text


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("d_dtype", ["bfloat16", "float32"])
def test_attributes_and_operands(weights, scaled, d_dtype):
    line = custom_call(lower(("cuda",), weights, scaled, d_dtype=d_dtype))
    kind = "dense" if weights == "dense" else "pointers"
    scale = "scaled" if scaled else "plain"
    for arch in config.TILES:
        assert re.search(rf'sm{arch} = "sm{arch}_forward_\w+_bk_{kind}_{d_dtype}_{scale}"', line)
    for attribute in (
        f'weights = "{weights}"',
        'b_major = "k"',
        f"has_alpha = {str(scaled).lower()}",
        f"has_prob = {str(scaled).lower()}",
        "has_bias = false",
        "has_c = false",
        "dynamic = false",
        "overlap_margin = 0 : i64",
        "n = 16 : i64",
        "l = 4 : i64",
        "has_experts = false",
        'build_id = "the build"',
        "mhlo.backend_config = {",  # typed attributes
    ):
        assert attribute in line
    operands = ["64x32xbf16", "4xi32"]
    operands += ["4xf32", "64xf32"] if scaled else []
    operands += {"dense": ["4x16x32xbf16"], "tuple": ["16x32xbf16"] * 4, "pointers": ["32xui8"]}[weights]
    results = [f"64x16x{'bf16' if d_dtype == 'bfloat16' else 'f32'}"] + ([] if weights == "dense" else ["512xui8"])
    found_operands, found_results = line.rsplit(" : (", 1)[1].split(") -> ")
    assert types(found_operands) == operands
    assert types(found_results) == results


SHORT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


def types(part):
    return re.findall(r"tensor<([^>]+)>", part)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("bias", [None, *config.D_DTYPES])
@pytest.mark.parametrize("c_dtype", [None, "float16", "float32"])
def test_bias_c_and_schedule(weights, dynamic, bias, c_dtype):
    options = {} if c_dtype is None else {"generate_c": True, "c_dtype": c_dtype}
    line = custom_call(lower(("cuda",), weights, True, bias, use_dynamic_sched=dynamic, overlap_margin=6, **options))
    epilogue = {
        None: "bfloat16_bias" if bias else "bfloat16_scaled",
        "float16": "16bit_c_16bit",
        "float32": "16bit_c_float32",
    }[c_dtype]
    for arch in config.TILES:
        assert re.search(rf'sm{arch} = "sm{arch}_forward_\w+_{epilogue}"', line)
    for attribute in (
        f"has_bias = {str(bias is not None).lower()}",
        f"has_c = {str(c_dtype is not None).lower()}",
        f"dynamic = {str(dynamic).lower()}",
        "overlap_margin = 6 : i64",
    ):
        assert attribute in line
    operands, results = line.rsplit(" : (", 1)[1].split(") -> ")
    # a, offsets, alpha, prob, bias, weights; D, C, scratch.
    of_weights = {"dense": ["4x16x32xbf16"], "tuple": ["16x32xbf16"] * 4, "pointers": ["32xui8"]}[weights]
    of_bias = [f"4x16x{SHORT[bias]}"] if bias else []
    assert types(operands) == ["64x32xbf16", "4xi32", "4xf32", "64xf32", *of_bias, *of_weights]
    scratch = (0 if weights == "dense" else 4 * 128) + (128 if dynamic else 0)
    want = ["64x16xbf16"] + ([f"64x16x{SHORT[c_dtype]}"] if c_dtype else []) + ([f"{scratch}xui8"] if scratch else [])
    assert types(results) == want


def lower_for_cuda(run, *structs):
    return jax.jit(run).trace(*structs).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("epilogue", ["plain", "alpha, bias and C"])
def test_groups_that_share_experts(weights, epilogue):
    """Seven groups of four experts' weights: alpha and bias are the groups', maps and addresses the experts'."""
    everything = epilogue != "plain"
    call = calls.Call(
        m=64, n=16, k=32, l=4, b_major="k", weights=weights, d_dtype="bfloat16", has_alpha=everything, has_prob=False,
        has_bias=everything, c_dtype="float32" if everything else None, dynamic=True, mapped_groups=7, implementation=None,
    )  # fmt: skip
    given = calls.Operands(
        struct(64, 32),
        struct(7, dtype=jnp.int32),
        struct(7, dtype=jnp.int32),
        struct(7, dtype=jnp.float32) if everything else None,
        None,
        struct(7, 16) if everything else None,
        tuple(jax.tree.leaves(WEIGHTS[weights])),
    )
    line = custom_call(lower_for_cuda(lambda *flat: ffi_call.grouped_gemm(call, call.split(flat)), *call.flat(given)))
    for attribute in ("has_experts = true", "l = 4 : i64", "n = 16 : i64", f"has_alpha = {str(everything).lower()}"):
        assert attribute in line
    operands, results = line.rsplit(" : (", 1)[1].split(") -> ")
    of_weights = {"dense": ["4x16x32xbf16"], "tuple": ["16x32xbf16"] * 4, "pointers": ["32xui8"]}[weights]
    optional = ["7xf32", "7x16xbf16"] if everything else []
    assert types(operands) == ["64x32xbf16", "7xi32", "7xi32", *optional, *of_weights]
    outputs = ["64x16xbf16", *(["64x16xf32"] if everything else [])]
    assert types(results) == [*outputs, f"{(1 if weights == 'dense' else 5) * 128}xui8"]


# --- weight gradients; more in test_wgrad.py -------------------------------------------------------------------------------------------------


def test_wgrad_of_groups_with_experts():
    """Seven groups, four results."""
    call = calls.WgradCall(
        m=64, n=16, k=32, l=4, d_dtype="float32", has_alpha=True, mapped_groups=7, implementation=None
    )
    ints, floats = struct(7, dtype=jnp.int32), struct(7, dtype=jnp.float32)
    given = calls.WgradOperands(struct(64, 16), struct(64, 32), ints, ints, floats, None)
    line = custom_call(
        lower_for_cuda(lambda *flat: wgrad_call.grouped_wgrad(call, call.split(flat)), *call.flat(given)), library.WGRAD
    )
    assert "has_experts = true" in line
    operands, results = line.rsplit(" : (", 1)[1].split(") -> ")
    assert types(operands) == ["64x16xbf16", "64x32xbf16", "7xi32", "7xi32", "7xf32"]
    assert types(results) == ["4x16x32xf32"]


def test_wgrad_kernel_names_are_compiled_variants():
    names = {variant.name for arch in config.TILES for variant in config.wgrad_variants(arch)}
    sizes = (8, 64, 128, 192, 256, 384, 576, 4096)
    asked = set()
    for arch, l, rows, n, k, (d_dtype, accumulate) in itertools.product(
        config.TILES, (1, 128), (64, 4096), sizes, sizes, config.WGRAD_RESULTS
    ):
        call = calls.WgradCall(
            m=rows * l, n=n, k=k, l=l, d_dtype=d_dtype, has_alpha=False, accumulate=accumulate, implementation=None
        )
        asked.add(wgrad_call.kernel_name(arch, call))
    assert asked == names


def test_wgrad_without_anything_to_add_up():
    """No rows, or a result without elements: no kernel is called, and what was there stays."""
    for m, n, k, l in ((0, 16, 32, 4), (64, 0, 32, 4), (64, 16, 0, 4), (64, 16, 32, 0)):
        structs = struct(m, n), struct(m, k), struct(l, dtype=jnp.int32), struct(l, n, k, dtype=jnp.float32)
        text = lower_for_cuda(lambda x, y, ends, d: grouped_gemm_wgrad(x, y, offsets=ends, accumulate_into=d), *structs)
        assert "custom_call" not in text


def kernel_names(line):
    return {int(arch): name for arch, name in re.findall(r'sm(\d+) = "(\w*)"', line)}


def test_kernel_names_are_compiled_variants():
    names = {variant.name for arch in config.TILES for variant in config.variants(arch)}
    for d_dtype, c_dtype, bias, scaled in itertools.product(
        config.D_DTYPES, (None, *config.D_DTYPES), (None, "float16"), (False, True)
    ):
        options = {} if c_dtype is None else {"generate_c": True, "c_dtype": c_dtype}
        line = custom_call(lower(("cuda",), "tuple", scaled, bias, d_dtype=d_dtype, **options))
        assert set(kernel_names(line)) == set(config.TILES)
        assert set(kernel_names(line).values()) <= names


@pytest.mark.parametrize("arch", config.TILES)
def test_every_tile_has_a_name_for_callers(arch):
    for tile in config.TILES[arch]:
        wish = {"mma_tiler_mn": tile.mma_tiler_mn, "cluster_shape_mn": tile.cluster_shape_mn}
        found = kernel_names(custom_call(lower(("cuda",), **wish)))
        assert f"_{tile}_" in found[arch]
        for other in set(config.TILES) - {arch}:
            same = config.wished(config.TILES[other], **wish)
            assert found[other] == "" if not same else f"_{same[0]}_" in found[other]


@pytest.mark.parametrize(
    ("l", "m", "n", "k", "b_major", "tile"),
    [
        (8, 32768, 4096, 7168, "k", "128x256x64_cluster2x1"),
        (155, 21704, 1000, 4336, "n", "128x256x64_cluster2x1"),
        (5, 15972, 1264, 16328, "n", "128x256x64_cluster2x1"),
        (4, 2048, 2048, 2048, "k", "128x256x64_cluster2x1"),
        # Few rows.
        (128, 512, 2048, 768, "k", "64x128x64_cluster1x1_swapped"),
        (7, 157, 4592, 720, "n", "64x128x64_cluster1x1_swapped"),
        (8, 128, 14336, 4096, "k", "64x128x64_cluster1x2_swapped"),
        (2, 139, 992, 2896, "k", "64x128x64_cluster1x2_swapped"),
        (1, 26, 1368, 7992, "k", "64x128x64_cluster1x4_swapped"),
        (1, 23, 1240, 3984, "n", "64x128x64_cluster1x4_swapped"),
        # Fewer columns of padding, or fewer waves, of narrower tiles.
        (23, 81501, 544, 13184, "n", "128x192x64_cluster2x1"),
        (4, 8343, 544, 1392, "k", "128x192x64_cluster2x1"),
        (60, 18028, 1096, 3920, "n", "128x192x64_cluster2x1"),
        (1, 2019, 624, 7712, "k", "128x128x64_cluster2x1"),
        # Groups of 363 rows: of the last 107 a pair does two of 11 columns, and so 12.
        (4, 1452, 1384, 4824, "k", "128x192x64_cluster2x1"),
        (1, 2048, 1024, 7168, "k", "128x128x64_cluster2x1"),
    ],
)
def test_the_tile_fits_the_groups_and_the_columns(l, m, n, k, b_major, tile):
    """Each the fastest on an H200."""
    assert str(config.select_tile(90, l, m, n, k, b_major)) == tile


# Rows, columns and cluster of a tile by its name in the file.
TILE_NAMES = {
    "256": (128, 256, (2, 1)),
    "192": (128, 192, (2, 1)),
    "192x192": (192, 192, (1, 1)),
    "128": (128, 128, (2, 1)),
    "sw": (64, 128, (1, 1)),
    "sw2": (64, 128, (1, 2)),
    "sw4": (64, 128, (1, 4)),
}
MEASURED = json.loads(
    (
        pathlib.Path(__file__).parents[1] / "benchmarks" / "results" / "20261201-103300-NVIDIA-H200-tiles-kernel.json"
    ).read_text()
)


@pytest.mark.parametrize("kind", ["forward", "dgrad", "wgrad", "few tiles", "round shapes"])
def test_what_the_rule_loses(kind):
    """Of problems that were timed with every tile on an H200: its tile, over the fastest; of every eighth random one its schedule too."""
    losses = []
    for problem in MEASURED["problems"]:
        *sizes, _, _, of = problem["problem"].split("/")
        l, m, n, k = map(int, sizes)
        if kind != (of if problem["drawn"] == "random" else problem["drawn"]):
            continue
        if of == "wgrad":
            tile = config.select_wgrad_tile(90, l, m / l, n, k)
            dynamic = config.select_schedule(l, l, n, k)
        else:
            n, k, b_major = (n, k, "k") if of == "forward" else (k, n, "n")
            tile = config.select_tile(90, l, m, n, k, b_major)
            dynamic = config.select_schedule(l, l, m / l, n)
        (name,) = (
            name
            for name, (rows, columns, cluster) in TILE_NAMES.items()
            if (tile.m, tile.n, tile.cluster_shape_mn) == (rows, columns, cluster)
        )
        seconds = problem["seconds"]
        losses.append(seconds[f"{name}+d" if dynamic else name] / min(seconds.values()) - 1)
    assert len(losses) >= 72
    assert sum(losses) / len(losses) <= 0.02
    assert max(losses) <= {"forward": 0.43}.get(kind, 0.21)


def test_no_tile_for_a_wish_that_none_fulfils():
    assert config.select_tile(90, 8, 64, 64, 64, "k", mma_tiler_mn=(1, 1)) is None


@pytest.mark.parametrize(
    ("arch", "of_the_rule", "of_the_wish"),
    [
        (90, "64x128x64_cluster1x2_swapped", "128x128x64_cluster2x1"),
        (100, "64x128x64_cluster1x1_swapped", "128x256x64_cluster2x1_pair"),
    ],
)
def test_a_wish_leaves_the_rest_to_the_rule(arch, of_the_rule, of_the_wish):
    """Few rows per expert: a tile for them, unless the wish rules it out."""
    call = calls.Call(
        m=512, n=1536, k=2048, l=128, b_major="k", weights="dense", d_dtype="bfloat16", has_alpha=False, has_prob=False,
        implementation=None,
    )  # fmt: skip
    assert f"_{of_the_rule}_" in ffi_call.kernel_name(arch, call)
    wished = dataclasses.replace(call, cluster_shape_mn=(2, 1))
    assert f"_{of_the_wish}_" in ffi_call.kernel_name(arch, wished)


def test_without_k_nothing_is_multiplied():
    arrays = {"a": struct(64, 0), "b": struct(4, 16, 0), "offsets": struct(4, dtype=jnp.int32), "bias": struct(4, 16)}
    run = jax.jit(lambda **arrays: grouped_gemm(**arrays, implementation="cutedsl"))
    assert "custom_call" not in run.trace(**arrays).lower(lowering_platforms=("cuda",)).as_text()


def test_reference_on_cuda():
    assert "custom_call" not in lower(("cuda",), implementation="reference")


def test_kernels_only():
    custom_call(lower(("cuda",), implementation="cutedsl"))
    with pytest.raises(RuntimeError, match="the kernels are for cuda, not for cpu"):
        lower(("cpu", "cuda"), implementation="cutedsl")


def test_other_platforms_use_the_reference():
    assert "custom_call" not in lower(("tpu",))


def test_pointers_for_both_platforms(monkeypatch):
    monkeypatch.setattr(library, "registered", lambda: None)
    text = lower(("cpu", "cuda"), "pointers")
    custom_call(text)
    assert f"@{library.GATHER_WEIGHTS}" in text


def test_exported_for_both_runs_on_the_cpu():
    case = oracle.make_case(np.random.default_rng(0), 4, 64, 16, 32, alpha=False, prob=False)
    arrays = tuple(map(jnp.asarray, (case.a, case.b, case.offsets)))
    exported = jax.export.export(
        jax.jit(lambda a, b, offsets: grouped_gemm(a, b, offsets=offsets)),
        platforms=("cpu", "cuda"),
        disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(library.FORWARD)],
    )(*arrays)
    got = exported.call(*arrays)
    oracle.assert_close(got, oracle.oracle(case), case)
