"""grouped_gemm_wgrad: against a float64 oracle, its lowering, its errors, its own gradients."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_reference import equations

from jax_grouped_gemm import calls, config, ffi_call, grouped_gemm_wgrad, library, reference, wgrad_call

pytestmark = pytest.mark.usefixtures("compiled_fast")

INT32 = st.integers(-(2**31), 2**31 - 1)
OFFSETS = [10, 10, 41, 60]


class Problem:
    """x, y and what else; NaN in rows of no group, and in alpha of empty groups."""

    def __init__(self, rng, l=4, m=70, n=24, k=16, offsets=None, alpha=True, total=False, d_major="k"):
        offsets = oracle.random_offsets(rng, l, m) if offsets is None else np.asarray(offsets, np.int32)
        self.case = oracle.Case(a=rng.standard_normal((m, k)).astype(oracle.BF16), b=None, offsets=offsets)
        self.groups = self.case.groups()
        self.x = rng.standard_normal((m, n)).astype(oracle.BF16)
        self.y = self.case.a
        self.alpha = rng.uniform(0.5, 2, l).astype(np.float32) if alpha else None
        shape = (l, n, k) if d_major == "k" else (l, k, n)
        self.total = rng.standard_normal(shape).astype(np.float32) if total else None
        self.d_major = d_major
        self.x[self.case.end() :] = self.y[self.case.end() :] = np.nan
        if alpha:
            self.alpha[[begin == end for begin, end in self.groups]] = np.nan

    def arguments(self):
        found = {"x": self.x, "y": self.y, "alpha": self.alpha, "accumulate_into": self.total}
        arrays = {name: jnp.asarray(x) for name, x in found.items() if x is not None}
        return arrays | {"offsets": jnp.asarray(self.case.offsets), "d_major": self.d_major}

    def check(self, got):
        operands = (self.x, self.y) if self.d_major == "k" else (self.y, self.x)
        want = oracle.wgrad(*operands, self.groups, self.alpha, self.total)
        oracle.assert_near(got, want, self.x.shape[0], what="D")


run = jax.jit(grouped_gemm_wgrad, static_argnames=("d_dtype", "d_major", "implementation"))


@given(
    seed=st.integers(0, 2**32 - 1),
    l=st.integers(1, 12),
    m=st.integers(1, 300),
    n=st.integers(1, 10),
    k=st.integers(1, 20),
    alpha=st.booleans(),
    total=st.booleans(),
    d_major=st.sampled_from(["k", "n"]),
    d_dtype=st.sampled_from([None, "bfloat16", "float32"]),
)
def test_random_problems(seed, l, m, n, k, d_dtype, **options):
    problem = Problem(np.random.default_rng(seed), l, m, 8 * n, 8 * k, **options)
    d_dtype = None if options["total"] and d_dtype == "bfloat16" else d_dtype
    got = run(**problem.arguments(), d_dtype=d_dtype)
    assert got.dtype == (d_dtype or ("float32" if options["total"] else "bfloat16"))
    problem.check(got)


@given(offsets=st.lists(INT32 | st.integers(-5, 75), min_size=4, max_size=4), seed=st.integers(0, 2**32 - 1))
def test_hostile_offsets(offsets, seed):
    problem = Problem(np.random.default_rng(seed), offsets=offsets)
    problem.check(run(**problem.arguments(), d_dtype="float32"))


@pytest.mark.parametrize("total", [False, True])
def test_empty_groups_make_zeros_or_add_nothing(rng, total):
    problem = Problem(rng, offsets=[0, 30, 30, 30], total=total)
    got = np.asarray(run(**problem.arguments(), d_dtype="float32"))
    problem.check(got)
    for g in (0, 2, 3):
        np.testing.assert_array_equal(got[g], problem.total[g] if total else np.zeros((24, 16), np.float32))


def test_nan_of_a_row_stays_in_its_group(rng):
    """Both operands' windows reach into the neighbours."""
    for poisoned in ("x", "y"):
        problem = Problem(rng, alpha=False, offsets=[10, 25, 41, 60])
        getattr(problem, poisoned)[15] = np.nan
        got = np.isnan(np.asarray(run(**problem.arguments()), np.float32))
        assert got[1].any()
        assert not got[[0, 2, 3]].any()


@pytest.mark.parametrize("empty", ["l", "m", "n", "k"])
@pytest.mark.parametrize("total", [False, True])
def test_zero_sizes(rng, empty, total):
    problem = Problem(rng, **{"l": 3, "m": 20, "n": 16, "k": 16} | {empty: 0}, total=total)
    problem.check(grouped_gemm_wgrad(**problem.arguments()))
    problem.check(run(**problem.arguments()))


def test_group_sizes_and_offsets_agree(rng):
    for l in (4, 0):
        problem = Problem(rng, l=l)
        arguments = problem.arguments()
        want = grouped_gemm_wgrad(**arguments)
        arguments["group_sizes"] = np.diff(problem.case.offsets, prepend=0)
        del arguments["offsets"]
        np.testing.assert_array_equal(grouped_gemm_wgrad(**arguments), want)


@pytest.mark.parametrize("x64", [False, True])
def test_eager_and_wide_integers(rng, x64):
    problem = Problem(rng)
    with jax.enable_x64(x64) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64(x64):
        np.testing.assert_array_equal(grouped_gemm_wgrad(**problem.arguments()), run(**problem.arguments()))
        with jax.disable_jit():
            problem.check(grouped_gemm_wgrad(**problem.arguments()))


def test_accumulated_over_calls(rng):
    problem = Problem(rng, offsets=OFFSETS)
    arguments = problem.arguments()
    twice = run(**arguments, accumulate_into=run(**arguments, d_dtype="float32"))
    np.testing.assert_array_equal(twice, 2 * run(**arguments, d_dtype="float32"))


def test_groups_that_make_other_matrices(rng):
    """By `experts`, as vmap calls it: any order, and groups that make none."""
    experts = [4, 2, -1, 0, 3, 1, 2**31 - 1]
    problem = Problem(rng, l=7, m=90, offsets=[10, 22, 30, 30, 61, 75, 90], total=True)
    problem.total = problem.total[:5]
    call = calls.WgradCall(90, 24, 16, 5, "float32", True, None, accumulate=True, mapped_groups=7)
    arrays = problem.arguments()
    operands = calls.WgradOperands(
        arrays["x"], arrays["y"], arrays["offsets"], jnp.asarray(experts, jnp.int32), arrays["alpha"], jnp.asarray(problem.total)
    )  # fmt: skip
    got = wgrad_call.grouped_wgrad(call, operands)
    want = [np.zeros((5, 24, 16)) for _ in range(2)]
    for part, of_groups in zip(want, oracle.wgrad(problem.x, problem.y, problem.groups, problem.alpha), strict=True):
        for group, expert in enumerate(experts):
            if 0 <= expert < 5:
                part[expert] = of_groups[group]
    oracle.assert_near(got, (want[0] + problem.total, want[1] + np.abs(problem.total)), 90)


def test_one_product_per_tile_and_no_copy_of_the_operands(rng):
    """For two tiles of rows per group: nothing of an operand's size beside the result, and one matrix of float32."""
    call = calls.WgradCall(1024, 128, 256, 8, "bfloat16", False, None)
    x, y = (jnp.zeros((1024, columns), jnp.bfloat16) for columns in (128, 256))
    traced = jax.jit(lambda x, y, offsets: reference.grouped_wgrad(call, x, y, offsets, None, None, None)).trace(
        x, y, jnp.arange(128, 1025, 128, dtype=jnp.int32)
    )
    (product,) = equations(traced.jaxpr.jaxpr, "dot_general")
    assert [v.aval.shape for v in product.invars] == [(256, 128), (256, 256)]
    temporary = traced.lower().compile().memory_analysis().temp_size_in_bytes
    acc, result = 4 * 128 * 256, 2 * 8 * 128 * 256
    window = 256 * (128 + 256) * 4
    assert temporary < result + 4 * acc + 2 * window


# --- gradients --------------------------------------------------------------------------------------------------------


def plain(x, y, alpha, total, groups, offsets):
    row = jnp.arange(x.shape[0])
    member = (jnp.searchsorted(offsets, row, side="right")[None] == jnp.arange(groups)[:, None]).astype(jnp.float32)
    d = jnp.einsum("gm,mn,mk->gnk", member, x, y, precision="highest")
    return total + alpha[:, None, None] * d


@pytest.mark.parametrize("d_major", ["k", "n"])
def test_gradients_of_every_order(rng, d_major):
    problem = Problem(rng, offsets=OFFSETS, total=True, d_major=d_major)
    arrays = problem.arguments()
    offsets = arrays.pop("offsets")
    del arrays["d_major"]
    along = {name: jnp.asarray(rng.standard_normal(x.shape), x.dtype) for name, x in arrays.items()}
    clean, clean_along = (
        {name: jnp.nan_to_num(x.astype(jnp.float32)) for name, x in t.items()} for t in (arrays, along)
    )

    def ours(arrays):
        return jnp.sum(jnp.sin(grouped_gemm_wgrad(**arrays, offsets=offsets, d_major=d_major)))

    def double(arrays):
        x, y = (arrays["x"], arrays["y"]) if d_major == "k" else (arrays["y"], arrays["x"])
        return jnp.sum(jnp.sin(plain(x, y, arrays["alpha"], arrays["accumulate_into"], 4, offsets)))

    def second(f):
        return lambda x, t: jax.jvp(jax.grad(f), (x,), (t,))[1]

    def reverse(f):
        return lambda x, t: jax.grad(lambda x: jax.jvp(f, (x,), (t,))[1])(x)

    first = [jax.jit(jax.grad(ours))(arrays)], [jax.grad(double)(clean)]
    seconds = (
        [jax.jit(order(ours))(arrays, along) for order in (second, reverse)],
        [order(double)(clean, clean_along) for order in (second, reverse)],
    )
    for got, want in zip(first[0] + seconds[0], first[1] + seconds[1], strict=True):
        for name, x in got.items():
            assert x.dtype == arrays[name].dtype
            x, y = np.asarray(x, np.float64), np.asarray(want[name], np.float64)
            assert np.linalg.norm(x - y) <= 0.02 * np.linalg.norm(y), name
            if name in ("x", "y"):
                assert not x[60:].any()
    got = jax.jvp(ours, (arrays,), (along,))[1]
    np.testing.assert_allclose(got, jax.jvp(double, (clean,), (clean_along,))[1], rtol=1e-3)


@pytest.mark.parametrize(
    ("wanted", "gemms", "wgrads"),
    [("x", 1, 1), ("y", 1, 1), ("alpha", 1, 2), ("accumulate_into", 0, 1), (("x", "y"), 2, 1)],
)
def test_products_of_the_gradients(rng, wanted, gemms, wgrads):
    problem = Problem(rng, offsets=OFFSETS, total=True)
    wanted = (wanted,) if isinstance(wanted, str) else wanted
    arrays = problem.arguments()

    def run(moving):
        return jnp.sum(grouped_gemm_wgrad(**arrays | moving))

    jaxpr = jax.make_jaxpr(jax.grad(run))({name: arrays[name] for name in wanted}).jaxpr
    assert len(equations(jaxpr, "grouped_gemm")) == gemms
    assert len(equations(jaxpr, "grouped_wgrad")) == wgrads


# --- lowering ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def built(monkeypatch):
    monkeypatch.setattr(ffi_call, "cuda_capabilities", tuple)
    monkeypatch.setattr(library, "manifest", lambda: {"build_id": "the build"})


def struct(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


ARRAYS = {"x": struct(64, 16), "y": struct(64, 32), "offsets": struct(4, dtype=jnp.int32)}


def lower(platforms=("cuda",), arrays=None, donate=(), **options):
    run = jax.jit(lambda **arrays: grouped_gemm_wgrad(**arrays, **options), donate_argnames=donate)
    return run.trace(**ARRAYS | (arrays or {})).lower(lowering_platforms=platforms).as_text()


def custom_call(text):
    (line,) = (line for line in text.splitlines() if f"@{library.WGRAD}" in line)
    return line


def types(part):
    return re.findall(r"tensor<([^>]+)>", part)


@pytest.mark.parametrize("alpha", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("result", config.WGRAD_RESULTS)
def test_attributes_and_operands(built, alpha, dynamic, result):
    d_dtype, accumulate = result
    arrays = {"alpha": struct(4, dtype=jnp.float32)} if alpha else {}
    if accumulate:
        arrays["accumulate_into"] = struct(4, 16, 32, dtype=jnp.float32)
    line = custom_call(lower(arrays=arrays, d_dtype=d_dtype, use_dynamic_sched=dynamic, overlap_margin=6))
    names = {variant.name for arch in config.TILES for variant in config.wgrad_variants(arch)}
    for arch in config.TILES:
        (name,) = re.findall(rf'sm{arch} = "(\w+)"', line)
        assert name in names
        assert name.endswith(f"{d_dtype}_accumulate" if accumulate else d_dtype)
    for attribute in (
        "has_experts = false",
        f"has_alpha = {str(alpha).lower()}",
        f"accumulate = {str(accumulate).lower()}",
        f"dynamic = {str(dynamic).lower()}",
        "overlap_margin = 6 : i64",
        'build_id = "the build"',
        "mhlo.backend_config = {",
    ):
        assert attribute in line
    operands, results = line.rsplit(" : (", 1)[1].split(") -> ")
    want = ["64x16xbf16", "64x32xbf16", "4xi32"] + ["4xf32"] * alpha + ["4x16x32xf32"] * accumulate
    assert types(operands) == want
    d = f"4x16x32x{'bf16' if d_dtype == 'bfloat16' else 'f32'}"
    assert types(results) == [d] + ["128xui8"] * dynamic
    assert ("output_operand_alias" in line) == accumulate
    if accumulate:
        assert f"operand_index = {len(want) - 1}" in line


def test_d_major_exchanges_the_operands(built):
    line = custom_call(lower(d_major="n"))
    operands, results = line.rsplit(" : (", 1)[1].split(") -> ")
    assert types(operands) == ["64x32xbf16", "64x16xbf16", "4xi32"]
    assert types(results) == ["4x32x16xbf16"]


def test_a_donated_sum_is_added_to_in_place(built, rng):
    total = {"accumulate_into": struct(4, 16, 32, dtype=jnp.float32)}
    text = lower(arrays=total, donate=("accumulate_into",))
    assert "tf.aliasing_output = 0" in text
    problem = Problem(rng, total=True)
    arguments = problem.arguments()
    donated = jax.jit(functools.partial(grouped_gemm_wgrad, d_major="k"), donate_argnames=("accumulate_into",))
    del arguments["d_major"]
    got = donated(**arguments)
    assert arguments["accumulate_into"].is_deleted()
    problem.check(got)


def test_one_program_for_both_platforms(built):
    text = lower(("cpu", "cuda"))
    custom_call(text)
    assert "stablehlo.while" in text
    assert "custom_call" not in lower(("cpu",))
    assert "custom_call" not in lower(implementation="reference")
    with pytest.raises(RuntimeError, match="the kernels are for cuda, not for cpu"):
        lower(("cpu", "cuda"), implementation="cutedsl")


@pytest.mark.parametrize(
    ("l", "rows", "n", "k", "tile"),
    [
        (8, 4096, 4096, 7168, "128x256x64_cluster2x1"),
        (2, 3604, 664, 10480, "128x256x64_cluster2x1"),
        (33, 14087 / 33, 584, 8616, "128x256x64_cluster2x1"),
        # Few blocks per tile, or less padding,
        (128, 256, 5760, 2880, "192x192x64_cluster1x1"),
        (119, 1697 / 119, 8104, 800, "192x192x64_cluster1x1"),
        (4, 4891 / 4, 1688, 1312, "192x192x64_cluster1x1"),
        # or padding that no other has as little of.
        (28, 34456 / 28, 736, 896, "128x128x64_cluster2x1"),
        (1, 5543, 608, 2504, "128x128x64_cluster2x1"),
    ],
)
def test_the_tile_makes_few_and_short_waves(l, rows, n, k, tile):
    """Each the fastest on an H200."""
    assert str(config.select_wgrad_tile(90, l, rows, n, k)) == tile


@pytest.mark.parametrize(("n", "tile"), [(64, "128x256x64_cluster1x1"), (1024, "128x256x64_cluster2x1_pair")])
def test_a_pair_of_ctas_has_rows_for_both(n, tile):
    assert str(config.select_wgrad_tile(100, 128, 512, n, 1024)) == tile


@pytest.mark.parametrize("arch", config.TILES)
def test_every_tile_has_a_name_for_callers(built, arch):
    for tile in config.WGRAD_TILES[arch]:
        wish = {"mma_tiler_mn": tile.mma_tiler_mn, "cluster_shape_mn": tile.cluster_shape_mn}
        line = custom_call(lower(**wish))
        assert re.search(rf'sm{arch} = "sm{arch}_wgrad_{tile}_bfloat16"', line)
    assert config.select_wgrad_tile(90, 1, 64, 64, 64, (1, 1)) is None
    assert wgrad_call.kernel_name(90, calls.WgradCall(64, 8, 8, 1, "float32", False, None, mma_tiler_mn=(1, 1))) == ""


# --- errors -----------------------------------------------------------------------------------------------------------

WRONG_CALLS = {
    "no groups": ({"offsets": None}, "exactly one of offsets and group_sizes must be given; got neither"),
    "x rank": ({"x": struct(2, 64, 16)}, "x must be (M, N); got (2, 64, 16); reshape it to 2 dimensions"),
    "y rank": ({"y": struct(64)}, "y must be (M, K); got (64,); reshape it to 2 dimensions"),
    "x dtype": (
        {"x": struct(64, 16, dtype=jnp.float32)},
        "x must be bfloat16; got float32; cast it, e.g. x.astype(jnp.bfloat16)",
    ),
    "y dtype": ({"y": struct(64, 32, dtype=jnp.float16)}, "y must be bfloat16; got float16; cast it"),
    "rows": (
        {"y": struct(63, 32)},
        "y must be (M, K) with M = x.shape[0] = 64; got (63, 32); pass both for the same rows",
    ),
    "offsets rank": (
        {"offsets": struct(4, 1, dtype=jnp.int32)},
        "offsets must be (L,); got (4, 1); reshape it to 1 dimensions",
    ),
    "offsets dtype": (
        {"offsets": struct(4, dtype=jnp.uint32)},
        "offsets must be int32; got uint32; cast it, e.g. offsets.astype(jnp.int32)",
    ),
    "sizes dtype": (
        {"offsets": None, "group_sizes": struct(4, dtype=jnp.int16)},
        "group_sizes must be int32; got int16",
    ),
    "alpha": (
        {"alpha": struct(5, dtype=jnp.float32)},
        "alpha must be (L,) = (4,); got (5,); pass one factor per group",
    ),
    "N": ({"x": struct(64, 12)}, "N (x.shape[1]) must be a multiple of 8; got 12; pad it with zeros to 16"),
    "K": ({"y": struct(64, 12)}, "K (y.shape[1]) must be a multiple of 8; got 12; pad it with zeros to 16"),
    "M": (
        {"x": struct(2**31, 16), "y": struct(2**31, 32)},
        "M must be less than 2^31 - 2^10; got 2147483648; split the call",
    ),
    "d_major": ({"d_major": "m"}, "d_major must be one of 'k', 'n'; got 'm'"),
    "implementation": ({"implementation": "fast"}, "implementation must be one of None, 'cutedsl', 'reference'; got"),
    "d_dtype": ({"d_dtype": "float16"}, "d_dtype must be one of 'bfloat16', 'float32'; got 'float16'"),
    "sum's shape": (
        {"accumulate_into": struct(4, 32, 16, dtype=jnp.float32)},
        'accumulate_into must be (L, N, K) = (4, 16, 32); got (4, 32, 16); pass d_major="n" for that',
    ),
    "sum's shape, N-major": (
        {"accumulate_into": struct(4, 16, 32, dtype=jnp.float32), "d_major": "n"},
        'accumulate_into must be (L, K, N) = (4, 32, 16); got (4, 16, 32); pass d_major="k" for that',
    ),
    "sum's dtype": (
        {"accumulate_into": struct(4, 16, 32)},
        "accumulate_into must be float32; got bfloat16; cast it, e.g. accumulate_into.astype(jnp.float32)",
    ),
    "sum and d_dtype": (
        {"accumulate_into": struct(4, 16, 32, dtype=jnp.float32), "d_dtype": "bfloat16"},
        "d_dtype must be float32 with accumulate_into, which is added to in place; got bfloat16; leave it out",
    ),
    "tile": ({"mma_tiler_mn": (64, 64)}, "mma_tiler_mn and cluster_shape_mn must name a compiled tile"),
    "a forward tile": (
        {"mma_tiler_mn": (64, 128)},
        "mma_tiler_mn and cluster_shape_mn must name a compiled tile (SM90: (256, 256) with (2, 1), "
        "(192, 192) with (1, 1), (256, 128) with (2, 1); SM100: (256, 256) with (2, 1), (128, 256) with (1, 1)); got (64, 128)",
    ),
    "schedule": ({"use_dynamic_sched": 1}, "use_dynamic_sched must be True, False or None; got 1"),
    "margin": ({"overlap_margin": -1}, "overlap_margin must be an integer within [0, 2^31); got -1"),
}


@pytest.mark.parametrize(("changes", "message"), WRONG_CALLS.values(), ids=WRONG_CALLS)
def test_wrong_calls(built, changes, message):
    given = ARRAYS | changes
    arrays = {name: x for name, x in given.items() if isinstance(x, jax.ShapeDtypeStruct)}
    options = {name: x for name, x in given.items() if name not in arrays and x is not None}
    with pytest.raises(ValueError, match=re.escape(message)):
        jax.eval_shape(lambda **arrays: grouped_gemm_wgrad(**arrays, **options), **arrays)


def test_values_of_eager_offsets(rng):
    arguments = Problem(rng).arguments()
    text = "offsets must be non-decreasing ends of groups within [0, M = x.shape[0] = 70]; got offsets[1] = 5 after 9"
    with pytest.raises(ValueError, match=re.escape(text)):
        grouped_gemm_wgrad(**arguments | {"offsets": [9, 5, 30, 40]})
    text = "group_sizes must be non-negative with a sum of at most M = x.shape[0] = 70; got group_sizes[1] = -5"
    with pytest.raises(ValueError, match=re.escape(text)):
        grouped_gemm_wgrad(**arguments | {"offsets": None, "group_sizes": [9, -5, 30, 40]})


def test_values_of_traced_offsets_under_the_debug_switch(rng, monkeypatch):
    monkeypatch.setenv("JAX_GROUPED_GEMM_DEBUG", "1")
    arguments = Problem(rng).arguments() | {"offsets": jnp.asarray([9, 5, 30, 40], jnp.int32)}
    del arguments["d_major"]
    checked = jax.jit(lambda arguments: grouped_gemm_wgrad(**arguments))  # traced here, not before
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"M = x.shape\[0\] = 70\]; got offsets\[1\] = 5 after 9"):
        jax.block_until_ready(checked(arguments))
