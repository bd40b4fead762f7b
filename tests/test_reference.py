"""The reference against the float64 oracle."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_grouped_gemm import contract, grouped_gemm, reference

INT32 = st.integers(-(2**31), 2**31 - 1)


def check(case, **arguments):
    got = jax.jit(grouped_gemm, static_argnames=("b_major", "d_dtype"))(**(case.arguments() | arguments))
    oracle.assert_close(got, oracle.oracle(case), case)
    return got


@given(
    seed=st.integers(0, 2**32 - 1),
    l=st.integers(1, 12),
    m=st.integers(1, 300),
    n=st.integers(1, 10),
    k=st.integers(1, 20),
    b_major=st.sampled_from(["k", "n"]),
    d_dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
    alpha=st.booleans(),
    prob=st.booleans(),
)
def test_random_problems(seed, l, m, n, k, **options):
    check(oracle.make_case(np.random.default_rng(seed), l, m, 8 * n, 8 * k, **options))


@given(offsets=st.lists(INT32 | st.integers(-5, 70), min_size=5, max_size=5), seed=st.integers(0, 2**32 - 1))
def test_hostile_offsets(offsets, seed):
    check(oracle.make_case(np.random.default_rng(seed), 5, 64, 16, 16, offsets=offsets))


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


def test_all_patterns_of_empty_groups(rng):
    for empty in itertools.product([False, True], repeat=8):
        sizes = np.where(empty, 0, rng.integers(1, 20, 8))
        check(oracle.make_case(rng, 8, 170, 16, 16, offsets=oracle.ends(sizes)))


@pytest.mark.parametrize("hot", [0, 3, 7])
def test_one_hot_group(rng, hot):
    sizes = np.eye(8, dtype=int)[hot] * 600
    check(oracle.make_case(rng, 8, 640, 24, 32, offsets=oracle.ends(sizes)))


@pytest.mark.parametrize("l", [1, 3])
@pytest.mark.parametrize("end", [0, 1, 50])
def test_nan_in_the_tail_stays_there(rng, l, end):
    case = oracle.make_case(rng, l, 100, 16, 16, offsets=[end] * l)
    assert np.isnan(case.a[end:].astype(np.float32)).all()
    assert np.isnan(case.prob[end:]).all()
    check(case)


def test_nan_of_a_group_stays_in_its_rows(rng):
    case = oracle.make_case(rng, 3, 90, 16, 16, offsets=[30, 61, 90])
    case.b[1] = np.nan
    got = np.asarray(grouped_gemm(**case.arguments()), np.float32)
    assert np.isnan(got[30:61]).all()
    assert not np.isnan(got[:30]).any()
    assert not np.isnan(got[61:]).any()


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
def test_as_accurate_as_xla(rng, d_dtype):
    case = oracle.make_case(rng, 4, 256, 64, 512, d_dtype=d_dtype)
    want = oracle.oracle(case)
    ours, xla = (oracle.relative_error(d, want, case) for d in (check(case), oracle.xla_product(case)))
    assert ours <= 1.5 * xla


def test_one_rounding(rng):
    """alpha and prob multiply before the rounding: a value rounded first would differ."""
    case = oracle.make_case(rng, 2, 64, 64, 64, d_dtype="bfloat16", poison=False)
    unrounded = grouped_gemm(**(case.arguments() | {"d_dtype": "float32"}))
    np.testing.assert_array_equal(grouped_gemm(**case.arguments()), unrounded.astype(jnp.bfloat16))


# --- how much work ----------------------------------------------------------------------------------------------------


def call_of(m, n, k, l):
    return contract.Call(m, n, k, l, "k", "dense", "bfloat16", False, False, None)


@given(
    m=st.integers(1, 5000),
    l=st.integers(1, 64),
    seed=st.integers(0, 2**32 - 1),
)
def test_tiles_cover_each_row_once(m, l, seed):
    call = call_of(m, 8, 8, l)
    rows = reference.tile_rows(call)
    offsets = oracle.random_offsets(np.random.default_rng(seed), l, m)
    count, expert, first, end = map(np.asarray, jax.jit(reference.tiles, static_argnums=(0, 2))(call, offsets, rows))
    sizes = np.diff(offsets, prepend=0)
    owner = np.full(m, -1)
    for i in range(count):
        assert (owner[first[i] : end[i]] == -1).all()
        owner[first[i] : end[i]] = expert[i]
    np.testing.assert_array_equal(owner[: offsets[-1]], np.repeat(np.arange(l), sizes))
    assert (owner[offsets[-1] :] == -1).all()
    # 2 M N K operations and the rounding of each non-empty group to whole tiles: nothing for the rest.
    assert count * rows < sizes.sum() + (sizes > 0).sum() * rows + (count == 0)


def products(jaxpr):
    """Every dot_general of a jaxpr, nested ones included."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            found.append(equation)
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                found += products(inner)
    return found


def test_one_product_per_tile_and_no_copy_of_the_weights(rng):
    case = oracle.make_case(rng, 64, 512, 128, 256, alpha=False, prob=False)
    call = call_of(512, 128, 256, 64)

    def run(a, offsets, b):
        return reference.grouped_gemm(call, a, offsets, None, None, b)

    traced = jax.jit(run).trace(*map(jnp.asarray, (case.a, case.offsets, case.b)))
    (product,) = products(traced.jaxpr.jaxpr)
    assert [v.aval.shape for v in product.invars] == [(reference.tile_rows(call), 256), (128, 256)]
    temporary = traced.lower().compile().memory_analysis().temp_size_in_bytes
    assert temporary < case.a.nbytes
