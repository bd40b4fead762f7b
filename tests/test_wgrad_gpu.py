"""Weight gradients, groups that share experts, and gradients end to end against the float64 oracle: by the kernels on a GPU, and where that says something too, by
the reference on a CPU.
"""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from functional import device

from jax_grouped_gemm import calls, config, direct, ffi_call, grouped_gemm, grouped_gemm_wgrad, wgrad_call

gpu = pytest.mark.gpu


def kernels(tile=None, dynamic=False):
    return {"implementation": "cutedsl", "use_dynamic_sched": dynamic, "tile": tile}


REFERENCE = {"implementation": "reference"}
SCHEDULES = [False, True]
# Who computes: the reference on a CPU, the kernels on a GPU.
arms = pytest.mark.parametrize(
    "arm",
    [REFERENCE, *(pytest.param(kernels(dynamic=dynamic), marks=gpu) for dynamic in SCHEDULES)],
    ids=["reference", "static", "dynamic"],
)
# The same with the rule's tile, and with each compiled tile of this GPU's architecture.
tiles = pytest.mark.parametrize(
    "arm",
    [
        pytest.param(REFERENCE, id="reference"),
        *(
            pytest.param(kernels(tile, dynamic), marks=gpu, id=f"{name}-{'dynamic' if dynamic else 'static'}")
            for tile, name in ((None, "rule"), (0, "first"), (1, "second"), (2, "third"), (3, "fourth"))
            for dynamic in SCHEDULES
        ),
    ],
)
results = pytest.mark.parametrize(("d_dtype", "accumulate"), config.WGRAD_RESULTS)


def arch_of_this_gpu():
    return ffi_call.architecture(jax.devices("cuda")[0].compute_capability)


def options_of(arm, **more):
    """Of `grouped_gemm_wgrad`. An arm's tile is the n-th of this GPU's, None for the rule's."""
    options = arm | more
    tile = options.pop("tile", None)
    if tile is None:
        return options
    found = config.WGRAD_TILES[arch_of_this_gpu()]
    if tile >= len(found):
        pytest.skip("this architecture has fewer tiles")
    return options | {"mma_tiler_mn": found[tile].mma_tiler_mn, "cluster_shape_mn": found[tile].cluster_shape_mn}


@functools.partial(jax.jit, static_argnums=1)
def _jitted(arrays, options):
    return grouped_gemm_wgrad(**arrays, **dict(options))


def wgrad(case, arm, **more):
    """Freed memory of D's size holds NaN: an element that nobody writes does not look right."""
    arguments = case.arguments()
    arrays = {name: x for name, x in arguments.items() if isinstance(x, jax.Array)}
    options = options_of(arm, **more) | {"d_dtype": arguments["d_dtype"]}
    shape = (case.l, case.x.shape[1], case.y.shape[1])
    jax.block_until_ready([jnp.full(shape, jnp.nan, case.d_dtype) for _ in range(3)])
    return jax.block_until_ready(_jitted(arrays, tuple(options.items())))


def check(case, arm, **more):
    oracle.wgrad_check(wgrad(case, arm, **more), case)


# --- results ----------------------------------------------------------------------------------------------------------


@tiles
@results
@pytest.mark.parametrize("alpha", [False, True])
def test_every_variant(rng, arm, d_dtype, accumulate, alpha):
    case = oracle.make_wgrad_case(
        rng, 4, 700, 392, 200, offsets=[100, 100, 333, 650], alpha=alpha, d_dtype=d_dtype, accumulate=accumulate
    )
    check(case, arm)


@arms
def test_results_in_the_other_order(rng, arm):
    case = oracle.make_wgrad_case(rng, 4, 700, 392, 200)
    got = wgrad(case, arm)
    turned = jax.jit(lambda x, y, ends, alpha: grouped_gemm_wgrad(
        x, y, offsets=ends, alpha=alpha, d_major="n", **options_of(arm)
    ))(*map(jnp.asarray, (case.x, case.y, case.offsets, case.alpha)))  # fmt: skip
    oracle.wgrad_check(got, case)
    oracle.wgrad_check(jnp.swapaxes(turned, 1, 2), case)


@tiles
def test_all_patterns_of_empty_groups(rng, arm):
    """Zeros where a group has no rows, and what was there where it accumulates. One shape for all, so that it is compiled once."""
    for pattern in range(0, 256, 37 if arm == REFERENCE else 1):
        sizes = [int(rng.integers(1, 300)) if pattern >> g & 1 else 0 for g in range(8)]
        for accumulate in (False, True):
            case = oracle.make_wgrad_case(rng, 8, 2400, 136, 72, offsets=oracle.ends(sizes), accumulate=accumulate)
            check(case, arm)


@tiles
@pytest.mark.parametrize(
    "offsets",
    [
        [0] * 8,
        [700] * 5,
        [0, 0, 0, 700],
        [1, 2, 3, 4],
        [63, 64, 65, 700],
        [64, 128, 192, 256],
        [-5, 10, 3, 2**31 - 1],
        [5, 600, 100, -(2**31)],
        [2**31 - 1] * 3,
        [-(2**31)] * 3,
    ],
)
def test_hostile_and_odd_offsets(rng, arm, offsets):
    for accumulate in (False, True):
        case = oracle.make_wgrad_case(rng, len(offsets), 700, 264, 104, offsets=offsets, accumulate=accumulate)
        check(case, arm)


@tiles
@pytest.mark.parametrize(
    "shape", [(1, 1, 8, 8), (3, 1000, 264, 8), (3, 1000, 8, 264), (2, 2**14 + 5, 136, 72), (5, 513, 1000, 1000)]
)
def test_odd_shapes(rng, arm, shape):
    for accumulate in (False, True):
        case = oracle.make_wgrad_case(rng, *shape, accumulate=accumulate)
        check(case, arm)


@arms
@pytest.mark.parametrize("groups", [31, 32, 33, 128, 1000])
def test_many_groups(rng, arm, groups):
    for accumulate in (False, True):
        case = oracle.make_wgrad_case(rng, groups, 3000, 72, 64, accumulate=accumulate)
        check(case, arm)


@arms
def test_rows_of_others_do_not_matter(rng, arm):
    """A group between groups of NaN: the copy engine reads whole boxes of rows, whose ends belong to the neighbours."""
    for begin, end in itertools.product((1, 63, 64, 65, 130), (1, 5, 63, 64, 65, 300)):
        offsets = [begin, begin + end, 500]
        case = oracle.make_wgrad_case(rng, 3, 500, 136, 72, offsets=offsets, alpha=False, d_dtype="float32")
        case.x[: offsets[0]] = case.x[offsets[1] :] = np.nan
        case.y[: offsets[0]] = case.y[offsets[1] :] = np.inf
        got = np.asarray(wgrad(case, arm))
        assert np.isnan(got[[0, 2]]).all()
        of_its_own = oracle.WgradCase(case.x[slice(*offsets[:2])], case.y[slice(*offsets[:2])], np.array([end]), 1)
        of_its_own.d_dtype = "float32"
        oracle.wgrad_check(got[1:2], of_its_own)


@gpu
def test_random_problems(rng):
    for _ in range(40):
        groups, m = int(rng.integers(1, 40)), int(rng.integers(1, 5000))
        n, k = 8 * int(rng.integers(1, 100)), 8 * int(rng.integers(1, 100))
        d_dtype, accumulate = config.WGRAD_RESULTS[rng.integers(3)]
        case = oracle.make_wgrad_case(
            rng, groups, m, n, k, alpha=bool(rng.integers(2)), d_dtype=d_dtype, accumulate=accumulate
        )
        check(case, kernels(dynamic=bool(rng.integers(2))))


@gpu
def test_bitwise_repeatable(rng):
    """From run to run, and with one schedule as with the other: each result is one CTA's sum, in one order."""
    case = oracle.make_wgrad_case(rng, 32, 8192, 1024, 1024, accumulate=True)
    first = np.asarray(wgrad(case, kernels())).view(np.int32)
    for i in range(20):
        got = wgrad(case, kernels(dynamic=i % 2 == 0))
        np.testing.assert_array_equal(np.asarray(got).view(np.int32), first)


@gpu
def test_overlap_margin(rng):
    case = oracle.make_wgrad_case(rng, 16, 4000, 1024, 512)
    for margin, dynamic in itertools.product((1, 37, 126), (False, True)):
        check(case, kernels(dynamic=dynamic), overlap_margin=margin)


# --- groups and experts -----------------------------------------------------------------------------------------------

SHARED = (2, 0, 2, -1, 1, 7, 0, -(2**31))  # of eight groups, two of which have experts that are none
DISTINCT = (2, 0, -1, 1, 9, 2**31 - 1, 3)  # for wgrad: none twice, each result once


def facts_of(arm):
    return {"implementation": arm["implementation"], "dynamic": arm.get("use_dynamic_sched", False)}


@arms
@pytest.mark.parametrize("weights", ["dense", "tuple", "pointers"])
@pytest.mark.parametrize(
    "feature", [{}, {"bias": "float32"}, {"generate_c": True, "c_dtype": "float32", "bias": "bfloat16"}]
)
def test_groups_that_share_experts(rng, arm, weights, feature):
    case = oracle.make_case(rng, len(SHARED), 700, 136, 72, experts=SHARED, **feature)
    outputs = forward_of_groups(case, weights, arm)
    oracle.check(tuple(outputs) if case.generate_c else outputs[0], case)


def forward_of_groups(case, weights, arm):
    """No public function takes experts of groups: vmap and the gradients of others do."""
    (m, k), l = case.a.shape, len(case.b)
    call = calls.Call(
        m=m, n=case.b.shape[1], k=k, l=l, b_major="k", weights=weights, d_dtype=case.d_dtype, has_alpha=True,
        has_prob=True, has_bias=case.bias is not None, c_dtype=case.c_dtype if case.generate_c else None,
        mapped_groups=case.offsets.size, **facts_of(arm),
    )  # fmt: skip
    experts = tuple(map(jnp.asarray, case.b))
    addresses = np.array([x.unsafe_buffer_pointer() for x in experts], np.int64)
    b = {"dense": (case.b,), "tuple": experts, "pointers": (addresses.view(np.uint8),)}[weights]
    operands = calls.Operands(case.a, case.offsets, case.experts, case.alpha, case.prob, case.bias, b)
    flat = list(map(jnp.asarray, call.flat(operands)))
    outputs = jax.jit(lambda *flat: ffi_call.grouped_gemm(call, call.split(flat)))(*flat)
    return jax.block_until_ready(outputs)  # before the matrices behind the addresses go


@arms
@results
def test_gradients_of_groups_with_experts(rng, arm, d_dtype, accumulate):
    case = oracle.make_wgrad_case(
        rng, len(DISTINCT), 700, 136, 72, d_dtype=d_dtype, accumulate=accumulate, experts=DISTINCT
    )
    call = calls.WgradCall(
        m=700, n=136, k=72, l=case.l, d_dtype=d_dtype, has_alpha=True, accumulate=accumulate,
        mapped_groups=len(DISTINCT), **facts_of(arm),
    )  # fmt: skip
    operands = calls.WgradOperands(case.x, case.y, case.offsets, case.experts, case.alpha, case.total)
    flat = list(map(jnp.asarray, call.flat(operands)))
    oracle.wgrad_check(jax.jit(lambda *flat: wgrad_call.grouped_wgrad(call, call.split(flat)))(*flat), case)


# --- memory -----------------------------------------------------------------------------------------------------------


@gpu
@results
@pytest.mark.parametrize("shape", [(301, 264, 136), (1, 8, 8), (700, 72, 520)])
def test_writes_nothing_outside_d(rng, shape, d_dtype, accumulate):
    """D between guards: compute-sanitizer does not check the copy engine's stores to the byte."""
    (m, n, k), guard = shape, 1 << 17
    hostile = [[100, 100, 257, 290], [-3, 500, 20, 2**31 - 1], [0, 0, 0, 0], [2**31 - 1] * 4]
    arch = arch_of_this_gpu()
    for i, (tile, offsets) in enumerate(itertools.product(config.WGRAD_TILES[arch], hostile)):
        variant = config.WgradVariant(arch, tile, d_dtype, accumulate)
        case = oracle.make_wgrad_case(
            rng, 4, m, n, k, offsets=offsets, alpha=i % 3 != 0, d_dtype=d_dtype, accumulate=accumulate
        )
        buffers = {}

        def put(name, array, writable=False, buffers=buffers):
            buffers[name] = jax.device_put(array).block_until_ready()
            return buffers[name].unsafe_buffer_pointer()

        # The library's own call, as the functional model's tests make it; D moves to the middle of a larger buffer.
        call, ((_, _, shape_of_d, dtype),) = device.library_call(
            variant, case, i % 2 == 1, None, put, lambda name, nbytes: put(name, np.zeros(nbytes, np.uint8))
        )
        around = np.full(2 * guard + int(np.prod(shape_of_d)), 7, dtype)
        if case.total is not None:
            around[guard:-guard] = case.total.ravel()
        call.d = put("d", around) + guard * dtype.itemsize
        with direct.PrimaryContext(0):
            device.make_call(direct._library(), variant, call)
        direct.synchronize(0, 0)
        before, values, after = np.split(np.asarray(buffers["d"]), [guard, len(around) - guard])
        assert (before == 7).all()
        assert (after == 7).all()
        oracle.wgrad_check(values.reshape(shape_of_d), case)


@gpu
@pytest.mark.parametrize("dynamic", SCHEDULES)
def test_accumulates_in_place(rng, dynamic):
    """Into a buffer that is donated, without a copy; one that is not is left as it was."""
    case = oracle.make_wgrad_case(rng, 8, 3000, 512, 256, accumulate=True)
    arguments = case.arguments()
    total = arguments.pop("accumulate_into")
    d_dtype = arguments.pop("d_dtype")

    def program(total, arrays):
        return grouped_gemm_wgrad(
            **arrays, accumulate_into=total, d_dtype=d_dtype, use_dynamic_sched=dynamic, implementation="cutedsl"
        )

    compiled = jax.jit(program, donate_argnums=0).lower(total, arguments).compile()
    analysis = compiled.memory_analysis()
    assert analysis.alias_size_in_bytes == total.nbytes
    # Two results, D and the counter, make a tuple, whose table of addresses is XLA's.
    assert analysis.temp_size_in_bytes <= (128 + 256 if dynamic else 0)
    assert re.findall(r"\bcopy(?:-start)?\(", compiled.as_text()) == []
    kept = jnp.array(total, copy=True)
    address = kept.unsafe_buffer_pointer()
    got = compiled(kept, arguments)
    assert kept.is_deleted()
    assert got.unsafe_buffer_pointer() == address
    oracle.wgrad_check(got, case)

    got = jax.jit(program)(total, arguments)
    oracle.wgrad_check(got, case)
    np.testing.assert_array_equal(np.asarray(total), case.total)


@gpu
@results
def test_no_temporaries_but_the_counter(d_dtype, accumulate):
    l, m, n, k = 64, 4096, 1024, 512
    x, y = (jax.ShapeDtypeStruct((m, columns), jnp.bfloat16) for columns in (n, k))
    offsets = jax.ShapeDtypeStruct((l,), jnp.int32)
    total = jax.ShapeDtypeStruct((l, n, k), jnp.float32) if accumulate else None
    run = jax.jit(
        lambda x, y, offsets, total: grouped_gemm_wgrad(
            x, y, offsets=offsets, d_dtype=d_dtype, accumulate_into=total, implementation="cutedsl"
        ),
        donate_argnums=3,
    )
    analysis = run.lower(x, y, offsets, total).compile().memory_analysis()
    assert analysis.temp_size_in_bytes <= 128 + 256
    assert analysis.output_size_in_bytes == l * n * k * (2 if d_dtype == "bfloat16" else 4)


def _matches(got, x, y):
    """A result, or a slice of its rows, against XLA's float32 product, a part of the rows of X and Y at a time."""
    want = 0
    for row in range(0, len(x), 1 << 16):
        part = slice(row, row + (1 << 16))
        want += jax.lax.dot_general(x[part], y[part], (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    error = jnp.abs(got.astype(jnp.float32) - want).max()
    assert error <= 0.01 * jnp.abs(want).max(), error


@gpu
@results
def test_more_than_2_31_elements_of_d(d_dtype, accumulate):
    """2.7e9 of them; some groups are empty."""
    key, (l, m, n, k) = jax.random.key(0), (40, 4096, 8192, 8192)
    x, y = (jax.random.normal(jax.random.fold_in(key, i), (m, n), jnp.bfloat16) for i in range(2))
    sizes = np.full(l, 100)
    sizes[[3, 38]] = 0
    ends = oracle.ends(sizes)
    run = jax.jit(
        lambda x, y, ends, total: grouped_gemm_wgrad(
            x, y, offsets=ends, d_dtype=d_dtype, accumulate_into=total, use_dynamic_sched=True, implementation="cutedsl"
        ),
        donate_argnums=3,
    )
    total = jax.jit(lambda: jnp.full((l, n, k), 3, jnp.float32))() if accumulate else None
    got = run(x, y, jnp.asarray(ends), total)
    held = 3 if accumulate else 0
    for g in (0, 1, 31, 32, 37, 39):
        begin = ends[g] - sizes[g]
        for rows in (slice(0, 64), slice(n - 64, n)):
            _matches(got[g, rows] - jnp.asarray(held, d_dtype), x[begin : ends[g], rows], y[begin : ends[g]])
    for g in (3, 38):
        assert (got[g] == held).all()


@gpu
@pytest.mark.parametrize("of", ["x", "y"])
def test_more_than_2_31_elements_of_an_operand(of):
    """2.5e9 of them: rows far past 2^31 elements, and addresses of ragged loads that go around."""
    key, m = jax.random.key(0), 300_001
    n, k = (8200, 64) if of == "x" else (64, 8200)
    x = jax.jit(lambda: jax.random.normal(key, (m, n), jnp.bfloat16))()
    y = jax.jit(lambda: jax.random.normal(jax.random.fold_in(key, 1), (m, k), jnp.bfloat16))()
    ends = np.array([m // 2 + 5, m - 500, m - 3], np.int32)
    got = jax.jit(
        lambda x, y, ends: grouped_gemm_wgrad(x, y, offsets=ends, d_dtype="float32", implementation="cutedsl")
    )(x, y, jnp.asarray(ends))
    for g, (begin, end) in enumerate(itertools.pairwise([0, *ends.tolist()])):
        _matches(got[g], x[begin:end], y[begin:end])


# --- gradients; more in test_autodiff.py --------------------------------------------------------------------------------------------------------


@arms
@pytest.mark.parametrize("offsets", [[100, 100, 333, 650], [64, 128, 640, 700]])
def test_gradients(rng, arm, offsets):
    """Of a product with alpha and prob; operands of others, NaN, touch nothing. Cotangents and results are rounded to bfloat16."""
    case = oracle.make_case(rng, 4, 700, 264, 136, offsets=offsets)
    cotangent = rng.standard_normal((700, 264), np.float32).astype(oracle.BF16)
    arguments = case.arguments()
    constant = {name: arguments.pop(name) for name in ("offsets", "b_major", "d_dtype")}

    def loss(operands):
        d = grouped_gemm(**operands, **constant, **options_of(arm))
        return jnp.vdot(d.astype(jnp.float32), jnp.asarray(cotangent).astype(jnp.float32))

    got = jax.jit(jax.grad(loss))(arguments)
    m, n, k = 700, 264, 136
    terms = {"a": n, "b": m, "alpha": m * k + n, "prob": n + k}
    for name, want in oracle.cotangents(case, cotangent).items():
        assert got[name].dtype == arguments[name].dtype
        # Of the product that alpha's and prob's gradients share with a's, or of prob times the cotangent.
        oracle.assert_near(got[name], want, terms[name], roundings=1, what=f"the gradient of {name}")
