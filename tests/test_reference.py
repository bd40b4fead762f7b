"""The reference against the float64 oracle."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_grouped_gemm import calls, ffi_call, grouped_gemm, library, reference

STATIC = ("b_major", "d_dtype", "generate_c", "c_dtype")
DTYPES = ["bfloat16", "float16", "float32"]
INT32 = st.integers(-(2**31), 2**31 - 1)


def check(case, **arguments):
    got = jax.jit(grouped_gemm, static_argnames=STATIC)(**(case.arguments() | arguments))
    oracle.check(got, case)
    return got


@given(
    seed=st.integers(0, 2**32 - 1),
    l=st.integers(1, 12),
    m=st.integers(1, 300),
    n=st.integers(1, 10),
    k=st.integers(1, 20),
    b_major=st.sampled_from(["k", "n"]),
    d_dtype=st.sampled_from(DTYPES),
    alpha=st.booleans(),
    prob=st.booleans(),
    bias=st.sampled_from([None, *DTYPES]),
    generate_c=st.booleans(),
    c_dtype=st.sampled_from([None, *DTYPES]),
)
def test_random_problems(seed, l, m, n, k, **options):
    check(oracle.make_case(np.random.default_rng(seed), l, m, 8 * n, 8 * k, **options))


@given(offsets=st.lists(INT32 | st.integers(-5, 70), min_size=5, max_size=5), seed=st.integers(0, 2**32 - 1))
def test_hostile_offsets(offsets, seed):
    rng = np.random.default_rng(seed)
    check(oracle.make_case(rng, 5, 64, 16, 16, offsets=offsets))
    check(oracle.make_case(rng, 5, 64, 16, 16, offsets=offsets, bias="bfloat16", generate_c=True))


@pytest.mark.parametrize(
    "offsets",
    [
        [-1, -(2**31), 10, 20],
        [30, 20, 10, 40],
        [10, 100, 2**31 - 1, 64],
        [2**31 - 1] * 4,
        [-(2**31)] * 4,
        [2**31 - 1, -(2**31), 2**31 - 1, 0],
    ],
)
def test_hostile_offsets_by_hand(rng, offsets):
    check(oracle.make_case(rng, 4, 64, 16, 16, offsets=offsets))


@pytest.fixture
def op_by_op(monkeypatch):
    """Operations run one by one, each compiled once for all calls: compiling a call takes longer than hundreds of them."""
    monkeypatch.setattr(
        ffi_call, "grouped_gemm", lambda call, x: ffi_call._implementation("cpu", *call.flat(x), call=call)
    )
    with jax.disable_jit():
        yield


@pytest.mark.slow
@pytest.mark.parametrize("bias", [None, *DTYPES])
@pytest.mark.parametrize(
    "weights",
    [
        "dense",
        "tuple",
        pytest.param(
            "pointers",
            marks=pytest.mark.skipif(not library.LIBRARY.exists(), reason="the library is not built (make build)"),
        ),
    ],
)
def test_every_combination(rng, op_by_op, weights, bias):
    for d_dtype, c_dtype, alpha, prob in itertools.product(DTYPES, [None, *DTYPES], [False, True], [False, True]):
        case = oracle.make_case(
            rng, 4, 70, 24, 16, offsets=[10, 10, 41, 60], d_dtype=d_dtype, alpha=alpha, prob=prob,
            bias=bias, generate_c=c_dtype is not None, c_dtype=c_dtype,
        )  # fmt: skip
        experts = [np.array(w) for w in case.b]
        addresses = np.array([w.ctypes.data for w in experts], np.int64)
        arguments = (
            case.arguments()
            | {
                "dense": {},
                "tuple": {"b": tuple(experts)},
                "pointers": {"b": None, "b_ptrs": addresses, "n": 24},
            }[weights]
        )
        oracle.check(grouped_gemm(**arguments), case)


def test_all_patterns_of_empty_groups(rng):
    for empty in itertools.product([False, True], repeat=8):
        sizes = np.where(empty, 0, rng.integers(1, 20, 8))
        check(oracle.make_case(rng, 8, 170, 16, 16, offsets=oracle.ends(sizes), bias="float32", generate_c=True))


@pytest.mark.parametrize("hot", [0, 3, 7])
def test_one_hot_group(rng, hot):
    sizes = np.eye(8, dtype=int)[hot] * 600
    check(oracle.make_case(rng, 8, 640, 24, 32, offsets=oracle.ends(sizes)))


@pytest.mark.parametrize("l", [1, 3])
@pytest.mark.parametrize("end", [0, 1, 50])
@pytest.mark.parametrize("bias", [None, *DTYPES])
def test_nan_in_the_tail_stays_there(rng, l, end, bias):
    case = oracle.make_case(rng, l, 100, 16, 16, offsets=[end] * l, bias=bias, generate_c=True)
    assert np.isnan(case.a[end:].astype(np.float32)).all()
    if bias is not None:
        assert np.isnan(case.bias[1 if end else 0 :].astype(np.float32)).all()
    assert np.isnan(case.prob[end:]).all()
    check(case)


def test_nan_of_a_group_stays_in_its_rows(rng):
    case = oracle.make_case(rng, 3, 90, 16, 16, offsets=[30, 61, 90])
    case.b[1] = np.nan
    _only_nan(grouped_gemm(**case.arguments()), slice(30, 61))


def _only_nan(got, rows):
    got = np.asarray(got, np.float32)
    assert np.isnan(got[rows]).all()
    assert not np.isnan(np.delete(got, rows, axis=0)).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_of_bias_and_prob_stays_in_its_rows(rng, dtype):
    def both(*, bias_row=(), prob_row=(), bias=dtype):
        case = oracle.make_case(rng, 3, 90, 16, 16, offsets=[30, 61, 80], bias=bias, generate_c=True)
        for rows, values in ((bias_row, case.bias), (prob_row, case.prob)):
            for row in rows:
                values[row] = np.nan
        return grouped_gemm(**case.arguments())

    for got in both(bias_row=[1]):
        _only_nan(got, slice(30, 61))
    for got in both(prob_row=[40]):
        _only_nan(got, slice(40, 41))
    d, c = both(prob_row=[40], bias=None)  # C is before prob then
    _only_nan(d, slice(40, 41))
    assert not np.isnan(np.asarray(c, np.float32)).any()


@pytest.mark.parametrize("k", [8, 2**16])
@pytest.mark.parametrize("d_dtype", ["bfloat16", "float32"])
def test_extreme_k(rng, k, d_dtype):
    check(oracle.make_case(rng, 3, 20, 16, k, d_dtype=d_dtype))


@pytest.mark.parametrize("n", [8, 136, 264])
def test_n_not_a_multiple_of_a_tile(rng, n):
    check(oracle.make_case(rng, 4, 300, n, 64))


def test_many_experts(rng):
    check(oracle.make_case(rng, 1024, 700, 16, 16))


@pytest.mark.parametrize("d_dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("bias", [None, "bfloat16"])
def test_as_accurate_as_xla(rng, d_dtype, bias):
    case = oracle.make_case(rng, 4, 256, 64, 512, d_dtype=d_dtype, bias=bias)
    want = oracle.oracle(case)
    ours, xla = (oracle.relative_error(d, want, case) for d in (check(case), oracle.xla_product(case)))
    assert ours <= 1.5 * xla


@pytest.mark.parametrize("bias", [None, *DTYPES])
@pytest.mark.parametrize("c_dtype", DTYPES)
def test_one_rounding(rng, bias, c_dtype):
    """alpha, prob and bias come before the rounding, and D is not made of C's: values rounded first would differ."""
    case = oracle.make_case(rng, 2, 64, 64, 64, bias=bias, poison=False)
    arguments = case.arguments()
    d, c = grouped_gemm(**(arguments | {"d_dtype": "float32"}), generate_c=True, c_dtype="float32")
    got_d, got_c = grouped_gemm(**arguments, generate_c=True, c_dtype=c_dtype)
    np.testing.assert_array_equal(got_d, d.astype(jnp.bfloat16))
    np.testing.assert_array_equal(got_c, c.astype(c_dtype))
    np.testing.assert_array_equal(got_d, grouped_gemm(**arguments))
    assert (bias is None) == bool((np.asarray(d) != np.asarray(c)).any())


def test_without_k_the_bias_is_left(rng):
    """A sum of nothing, and no weights to read: addresses of nothing do."""
    case = oracle.make_case(rng, 3, 40, 16, 0, offsets=[10, 10, 30], bias="float16", generate_c=True, c_dtype="float32")
    arguments = case.arguments()
    d, c = check(case)
    assert np.asarray(d, np.float32)[:30].all()
    arguments["alpha"] = jnp.full(3, jnp.nan)
    assert not np.isnan(np.asarray(grouped_gemm(**arguments)[0], np.float32)).any()
    assert not np.asarray(grouped_gemm(**(arguments | {"bias": None, "prob": jnp.full(40, jnp.nan)}))[0]).any()
    for weights in ({"b": tuple(arguments["b"])}, {"b": None, "b_ptrs": np.zeros(3, np.int64), "n": 16}):
        got = grouped_gemm(**(arguments | weights))
        for left, right in zip(got, (d, c), strict=True):
            np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize(
    "options",
    [
        {"use_dynamic_sched": True},
        {"overlap_margin": 16},
        {"mma_tiler_mn": (256, 192), "cluster_shape_mn": [2, 1]},
    ],
)
def test_options_of_the_kernels_make_no_difference(rng, options):
    arguments = oracle.make_case(rng, 4, 70, 24, 16, poison=False).arguments()
    np.testing.assert_array_equal(grouped_gemm(**arguments, **options), grouped_gemm(**arguments))


# --- how much work ----------------------------------------------------------------------------------------------------


def call_of(m, n, k, l, **options):
    return calls.Call(m, n, k, l, "k", "dense", "bfloat16", False, False, None, **options)


@given(
    m=st.integers(1, 5000),
    l=st.integers(1, 64),
    seed=st.integers(0, 2**32 - 1),
)
def test_tiles_cover_each_row_once(m, l, seed):
    call = call_of(m, 8, 8, l)
    rows = reference.tile_rows(call)
    offsets = oracle.random_offsets(np.random.default_rng(seed), l, m)
    tiles = jax.jit(reference.tiles, static_argnums=(0, 3))(call, offsets, None, rows)
    count, expert, first, end = map(np.asarray, tiles)
    sizes = np.diff(offsets, prepend=0)
    owner = np.full(m, -1)
    for i in range(count):
        assert (owner[first[i] : end[i]] == -1).all()
        owner[first[i] : end[i]] = expert[i]
    np.testing.assert_array_equal(owner[: offsets[-1]], np.repeat(np.arange(l), sizes))
    assert (owner[offsets[-1] :] == -1).all()
    # 2 M N K operations and the rounding of each non-empty group to whole tiles: nothing for the rest.
    assert count * rows < sizes.sum() + (sizes > 0).sum() * rows + (count == 0)


def equations(jaxpr, primitive):
    """Every equation of this primitive in a jaxpr, nested ones included."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == primitive:
            found.append(equation)
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                found += equations(inner, primitive)
    return found


@pytest.mark.parametrize("bias", [None, *DTYPES])
@pytest.mark.parametrize("c_dtype", [None, *DTYPES])
def test_one_product_per_tile_and_no_copy_of_the_operands(rng, bias, c_dtype):
    case = oracle.make_case(rng, 256, 512, 128, 256, alpha=False, prob=False, bias=bias or "float32")
    call = call_of(512, 128, 256, 256, has_bias=bias is not None, c_dtype=c_dtype)

    def run(a, offsets, bias, b):
        return reference.grouped_gemm(call, a, offsets, None, None, None, bias if call.has_bias else None, b)

    traced = jax.jit(run).trace(*map(jnp.asarray, (case.a, case.offsets, case.bias, case.b)))
    (product,) = equations(traced.jaxpr.jaxpr, "dot_general")
    (loop,) = equations(traced.jaxpr.jaxpr, "while")
    carried = [v.aval for v in loop.outvars if v.aval.shape == (512, 128)]
    assert len(carried) == (1 if c_dtype is None else 2)
    assert [v.aval.shape for v in product.invars] == [(reference.tile_rows(call), 256), (128, 256)]
    temporary = traced.lower().compile().memory_analysis().temp_size_in_bytes
    # The loop's own outputs; beside them, less than a copy of the smallest operand.
    outputs = sum(carry.size * carry.dtype.itemsize for carry in carried)
    assert temporary < outputs + case.bias.nbytes
