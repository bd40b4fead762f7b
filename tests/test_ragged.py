"""`ragged_dot` and `ragged_dot_general`: JAX's own in float32 is the oracle, on bfloat16 operands."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from jax_grouped_gemm import ffi_call, library, log, ragged

pytestmark = pytest.mark.usefixtures("compiled_fast")

Numbers = jax.lax.RaggedDotDimensionNumbers


def numbers(contracted, batch=((), ()), ragged=0, group=()):
    return Numbers((contracted, batch), [ragged], group)


# name: (lhs, rhs, group_sizes, dimension numbers)
PRODUCTS = {
    "kept, (g, k, n)": ((21, 16), (3, 16, 24), (3,), numbers(((1,), (1,)), group=[0])),
    "kept, (g, n, k)": ((21, 16), (3, 24, 16), (3,), numbers(((1,), (2,)), group=[0])),
    "kept, (k, g, n)": ((21, 16), (16, 3, 24), (3,), numbers(((1,), (0,)), group=[1])),
    "kept, rows second": ((16, 21), (3, 16, 24), (3,), numbers(((0,), (1,)), ragged=1, group=[0])),
    "kept, batch": ((2, 21, 16), (3, 2, 16, 24), (2, 3), numbers(((2,), (2,)), ((0,), (1,)), 1, [0])),
    "kept, batch outside": ((2, 21, 16), (2, 3, 24, 16), (2, 3), numbers(((2,), (3,)), ((0,), (0,)), 1, [1])),
    "kept, one size for the batch": ((2, 21, 16), (2, 3, 24, 16), (3,), numbers(((2,), (3,)), ((0,), (0,)), 1, [1])),
    "kept, rows in rows": ((2, 4, 9, 5, 16), (3, 2, 16, 24), (2, 4, 3), numbers(((4,), (2,)), ((0,), (1,)), 2, [0])),
    "kept, two contracted": ((21, 4, 8), (3, 8, 24, 4), (3,), numbers(((1, 2), (3, 1)), group=[0])),
    "kept, two columns": ((21, 16), (3, 16, 4, 6), (3,), numbers(((1,), (1,)), group=[0])),
    "contracted": ((21, 16), (21, 24), (3,), numbers(((0,), (0,)))),
    "contracted, rows second": ((16, 21), (24, 21), (3,), numbers(((1,), (1,)), ragged=1)),
    "contracted, batch": ((2, 16, 21), (2, 21, 24), (2, 3), numbers(((2,), (1,)), ((0,), (0,)), 2)),
    "contracted, more than the rows": (
        (2, 4, 9, 5, 16), (2, 4, 9, 5, 24), (2, 4, 3), numbers(((1, 2, 3), (1, 2, 3)), ((0,), (0,)), 2)
    ),
    "batch": ((8, 11, 16), (8, 16, 24), (3,), numbers(((2,), (1,)), ((0,), (0,)), 0)),
}  # fmt: skip


def problem(name, seed=0):
    lhs, rhs, sizes, dims = PRODUCTS[name]
    rng = np.random.default_rng(seed)
    lhs, rhs = (jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16) for shape in (lhs, rhs))
    # Empty groups, and rows past the last one.
    return lhs, rhs, jnp.asarray(rng.choice([0, 1, 3, 5], sizes), jnp.int32), dims


def of_jax(lhs, rhs, sizes, dims):
    return jax.lax.ragged_dot_general(lhs.astype(jnp.float32), rhs.astype(jnp.float32), sizes, dims)


def close(got, want, eps=2.0**-8):
    got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
    np.testing.assert_allclose(got, want, rtol=eps, atol=eps * np.abs(want).max(initial=1e-3) / 8)


# Every product with one type of result, those that are JAX's names with each.
TYPES = (None, jnp.bfloat16, jnp.float32, jnp.float16)
EVERY_MODE = [(name, TYPES[i % 4]) for i, name in enumerate(PRODUCTS)]
EVERY_MODE += [(name, dtype) for name in ("kept, (g, k, n)", "contracted", "batch") for dtype in TYPES]


@pytest.mark.parametrize(("name", "dtype"), dict.fromkeys(EVERY_MODE))
def test_every_mode(name, dtype):
    lhs, rhs, sizes, dims = problem(name)
    got = jax.jit(jgg.ragged_dot_general, static_argnums=(3, 4, 5))(lhs, rhs, sizes, dims, None, dtype)
    assert got.dtype == (dtype or jnp.bfloat16)
    want = of_jax(lhs, rhs, sizes, dims)
    assert got.shape == want.shape
    close(got, want, 2.0**-20 if dtype == jnp.float32 else 2.0**-8)


@pytest.mark.parametrize("name", [name for name in PRODUCTS if name != "batch"])
def test_the_kernels_do_it(name):
    *operands, dims = problem(name)
    assert callable(ragged.reduce(*operands, dims, None, jnp.bfloat16, False))
    assert callable(ragged.reduce(*operands, dims, None, jnp.bfloat16, True))


@pytest.mark.parametrize("name", PRODUCTS)
def test_gradients(name):
    lhs, rhs, sizes, dims = problem(name)
    shape = of_jax(lhs, rhs, sizes, dims).shape
    ct = jnp.asarray(np.random.default_rng(1).standard_normal(shape, np.float32), jnp.bfloat16)

    def of_dense(lhs, rhs):
        """JAX has no gradient where the ragged dimension is contracted: differentiate what it says the product is."""
        return jnp.sum(masked(lhs, rhs, sizes, dims) * ct.astype(jnp.float32))

    def of_ours(lhs, rhs):
        return jnp.sum(jgg.ragged_dot_general(lhs, rhs, sizes, dims) * ct)

    want = jax.grad(of_dense, (0, 1))(lhs.astype(jnp.float32), rhs.astype(jnp.float32))
    got = jax.jit(jax.grad(of_ours, (0, 1)))(lhs, rhs)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.dtype == jnp.bfloat16
        close(ours, theirs)


EMPTY = {
    "kept, no batch": ((0, 21, 16), (0, 3, 24, 16), (0, 3), numbers(((2,), (3,)), ((0,), (0,)), 1, [1])),
    "kept, no groups in a batch": ((2, 21, 16), (2, 0, 24, 16), (2, 0), numbers(((2,), (3,)), ((0,), (0,)), 1, [1])),
    "contracted, no batch": ((0, 16, 21), (0, 21, 24), (0, 3), numbers(((2,), (1,)), ((0,), (0,)), 2)),
    "contracted, none of what else is": ((0, 9, 16), (0, 9, 24), (0, 3), numbers(((0, 1), (0, 1)), ragged=1)),
    "contracted, none of what else is, in a batch": (
        (2, 0, 9, 16), (2, 0, 9, 24), (2, 0, 3), numbers(((1, 2), (1, 2)), ((0,), (0,)), 2)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EMPTY)
def test_dimensions_of_size_zero(name):
    lhs, rhs, sizes, dims = EMPTY[name]
    lhs, rhs, sizes = jnp.ones(lhs, jnp.bfloat16), jnp.ones(rhs, jnp.bfloat16), jnp.ones(sizes, jnp.int32)
    assert callable(ragged.reduce(lhs, rhs, sizes, dims, None, jnp.bfloat16, False))
    got, want = jgg.ragged_dot_general(lhs, rhs, sizes, dims), of_jax(lhs, rhs, sizes, dims)
    np.testing.assert_array_equal(got.astype(jnp.float32), want)

    def total(lhs, rhs):
        return jgg.ragged_dot_general(lhs, rhs, sizes, dims).astype(jnp.float32).sum()

    for gradient, x in zip(jax.grad(total, (0, 1))(lhs, rhs), (lhs, rhs), strict=True):
        np.testing.assert_array_equal(gradient.astype(jnp.float32), np.zeros(x.shape))


def masked(lhs, rhs, sizes, dims):
    from jax._src.lax.lax import _ragged_dot_general_impl

    return _ragged_dot_general_impl(lhs, rhs, sizes, dims)


def test_nothing_of_other_rows_leaks():
    lhs, rhs, _, dims = problem("kept, batch")
    sizes = jnp.array([[5, 0, 9], [0, 20, 0]], jnp.int32)
    want = of_jax(lhs, rhs, sizes, dims)
    lhs = lhs.at[0, 14:].set(jnp.nan).at[1, 20:].set(jnp.nan)
    rhs = rhs.at[1, 0].set(jnp.nan).at[0, 1].set(jnp.nan).at[2, 1].set(jnp.nan)
    got = jgg.ragged_dot_general(lhs, rhs, sizes, dims)
    close(got, want)
    assert not np.asarray(got[0, 14:], np.float32).any()
    dlhs, drhs = jax.grad(lambda a, b: jgg.ragged_dot_general(a, b, sizes, dims).astype(jnp.float32).sum(), (0, 1))(
        lhs, rhs
    )
    assert np.isfinite(np.asarray(dlhs, np.float32)).all()
    assert not np.asarray(dlhs[1, 20:], np.float32).any()
    assert not np.asarray(drhs[1, 0], np.float32).any()
    assert np.isfinite(np.asarray(drhs, np.float32)).all()


# --- an operand of float32 beside one of bfloat16 ---------------------------------------------------------------------


def mixed(name, wide, seed=0):
    """The problem with lhs (0) or rhs (1) of float32 that is no bfloat16, and the product of it in float64."""
    lhs, rhs, sizes, dims = problem(name, seed)
    operands = [lhs, rhs]
    shape = operands[wide].shape
    operands[wide] = jnp.asarray(np.random.default_rng(7).standard_normal(shape, np.float32))
    with jax.enable_x64(True):
        want = np.asarray(masked(*(jnp.asarray(np.asarray(x, np.float64)) for x in operands), sizes, dims))
    return *operands, sizes, dims, want


MIXED = [name for name in PRODUCTS if name != "batch"]


@pytest.mark.parametrize("wide", [0, 1], ids=["lhs", "rhs"])
@pytest.mark.parametrize(
    ("precision", "eps"),
    [(None, 2.0**-16), ("high", 2.0**-16), ("highest", 2.0**-21), (("default", "highest"), 2.0**-21)],
    ids=str,
)
@pytest.mark.parametrize("name", ["kept, (g, k, n)", "contracted"])
def test_mixed_operands(name, precision, eps, wide):
    lhs, rhs, sizes, dims, want = mixed(name, wide)
    got = jgg.ragged_dot_general(lhs, rhs, sizes, dims, precision)
    assert got.dtype == jnp.float32
    close(got, want, eps)
    if precision is None:
        narrow = [x.astype(jnp.bfloat16) for x in (lhs, rhs)]
        rounded = jgg.ragged_dot_general(*narrow, sizes, dims, preferred_element_type=jnp.float32)
        with pytest.raises(AssertionError):  # as one bfloat16 it is far off
            close(rounded, want, eps)


@pytest.mark.parametrize("name", MIXED)
def test_mixed_operands_in_every_mode(name):
    lhs, rhs, sizes, dims, want = mixed(name, 0)
    assert callable(ragged.reduce(lhs, rhs, sizes, dims, None, jnp.float32, False))
    close(jgg.ragged_dot_general(lhs, rhs, sizes, dims), want, 2.0**-15)
    got = jgg.ragged_dot_general(lhs, rhs, sizes, dims, preferred_element_type=jnp.bfloat16)
    assert got.dtype == jnp.bfloat16
    close(got, want)


def in_float64(function, *operands):
    with jax.enable_x64(True):
        found = function(*(jnp.asarray(np.asarray(x, np.float64)) for x in operands))
        return jax.tree.map(lambda x: np.asarray(x, np.float64), found)


@pytest.mark.parametrize(("precision", "eps"), [(None, 2.0**-15), ("highest", 2.0**-21)], ids=str)
@pytest.mark.parametrize("wide", [0, 1], ids=["lhs", "rhs"])
@pytest.mark.parametrize("name", MIXED)
def test_derivatives_of_mixed_operands(name, wide, precision, eps):
    """By the operand of float32 as close as the product is, with tangents and cotangents that bfloat16 does not hold."""
    lhs, rhs, sizes, dims, want = mixed(name, wide)
    rng = np.random.default_rng(1)
    ct = jnp.asarray(rng.standard_normal(want.shape, np.float32))
    tangents = [jnp.asarray(rng.standard_normal(x.shape, np.float32)).astype(x.dtype) for x in (lhs, rhs)]
    product = lambda lhs, rhs: jgg.ragged_dot_general(lhs, rhs, sizes, dims, precision)
    theirs = lambda lhs, rhs: masked(lhs, rhs, sizes, dims)

    out, pull = jax.vjp(product, lhs, rhs)
    assert out.dtype == jnp.float32
    got = pull(ct)
    assert [x.dtype for x in got] == [lhs.dtype, rhs.dtype]
    exact = in_float64(lambda lhs, rhs, ct: jax.vjp(theirs, lhs, rhs)[1](ct), lhs, rhs, ct)
    close(got[wide], exact[wide], eps)
    error = np.asarray(got[1 - wide], np.float64) - exact[1 - wide]
    assert np.linalg.norm(error) <= 2.0**-8 * np.linalg.norm(exact[1 - wide])

    along = lambda product: lambda lhs, rhs, *tangents: jax.jvp(product, (lhs, rhs), tangents)[1]
    close(along(product)(lhs, rhs, *tangents), in_float64(along(theirs), lhs, rhs, *tangents), eps)

    by_one = lambda product: (
        lambda x, other, ct: jax.linear_transpose(lambda x: product(*((x, other) if wide == 0 else (other, x))), x)(ct)[
            0
        ]
    )
    operands = ((lhs, rhs) if wide == 0 else (rhs, lhs)) + (ct,)
    close(by_one(product)(*operands), exact[wide], eps)


@pytest.mark.parametrize("wide", [0, 1], ids=["lhs", "rhs"])
@pytest.mark.parametrize("name", ["kept, (g, k, n)", "contracted"])
def test_higher_derivatives_of_mixed_operands(name, wide):
    """And of batches, and of their derivatives."""
    lhs, rhs, sizes, dims, want = mixed(name, wide)
    ct = jnp.asarray(np.random.default_rng(1).standard_normal(want.shape, np.float32))
    operands = [jnp.stack([x, x[::-1]]) for x in (lhs, rhs)]

    def of(product):
        square = lambda lhs, rhs, ct: jnp.sum(product(lhs, rhs).astype(ct.dtype) ** 2 * ct)
        inner = lambda lhs, rhs, ct: jax.grad(square, wide)(lhs, rhs, ct)
        batch = lambda lhs, rhs, ct: jax.vmap(inner, (0, 0, None))(lhs, rhs, ct)
        outer = lambda lhs, rhs, ct: jnp.sum(batch(lhs, rhs, ct) ** 2)
        return lambda lhs, rhs, ct: (batch(lhs, rhs, ct), jax.grad(outer, wide)(lhs, rhs, ct))

    got = of(lambda lhs, rhs: jgg.ragged_dot_general(lhs, rhs, sizes, dims))(*operands, ct)
    exact = in_float64(of(lambda lhs, rhs: masked(lhs, rhs, sizes, dims)), *operands, ct)
    for x, y in zip(got, exact, strict=True):
        assert x.dtype == jnp.float32
        close(x, y, 2.0**-14)


@pytest.mark.parametrize("precision", ["default", "highest"])
def test_infinities_of_the_operand_of_bfloat16(precision):
    """Beside float32 whose parts differ in sign, or are zero."""
    rhs = jnp.tile(jnp.array([1.1, -1.1, 1, 0], jnp.float32), (1, 8, 2))
    first_rows = np.array([[np.inf, 0], [-np.inf, 0], [np.inf, -np.inf]])
    lhs = jnp.asarray(np.pad(first_rows, ((0, 5), (0, 6))), jnp.bfloat16)
    dot = lambda dot, lhs, rhs: dot(lhs, rhs, jnp.array([8]), precision=precision)
    np.testing.assert_array_equal(dot(jgg.ragged_dot, lhs, rhs), dot(jax.lax.ragged_dot, lhs, rhs))
    for operand, out in ((0, jnp.zeros((8, 8)).at[0, 0].set(jnp.inf)), (1, lhs.astype(jnp.float32))):
        got, want = (
            jax.vjp(functools.partial(dot, f), jnp.ones((8, 8), jnp.bfloat16), rhs)[1](out)[operand]
            for f in (jgg.ragged_dot, jax.lax.ragged_dot)
        )
        np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))


def test_infinities_nan_and_the_largest_of_mixed_operands():
    lhs = jnp.ones((8, 16), jnp.float32).at[0, 0].set(jnp.inf).at[1, 0].set(jnp.nan).at[2].set(1 + 2.0**-9)
    lhs = lhs.at[3].set(0).at[3, 0].set(3.4e38)  # which bfloat16 would round to infinity
    got = jgg.ragged_dot(lhs, jnp.ones((1, 16, 8), jnp.bfloat16), jnp.array([8]))
    assert np.isposinf(got[0]).all()
    assert np.isnan(got[1]).all()
    np.testing.assert_array_equal(got[[2, 4, 5, 6, 7], 0], [16 + 2.0**-5, 16, 16, 16, 16])
    np.testing.assert_allclose(got[3], 3.4e38, rtol=2.0**-17)
    exact = jgg.ragged_dot(lhs, jnp.ones((1, 16, 8), jnp.bfloat16), jnp.array([8]), precision="highest")
    np.testing.assert_array_equal(exact[3], lhs[3, 0])


@pytest.mark.parametrize("name", ["kept, (g, k, n)", "contracted"])
def test_mixed_operands_with_a_result_that_is_none_of_ours(name, caplog):
    lhs, rhs, sizes, dims, _ = mixed(name, 0)
    log.once.cache_clear()
    got = jgg.ragged_dot_general(lhs, rhs, sizes, dims, preferred_element_type=jnp.int32)
    np.testing.assert_array_equal(
        got, jax.lax.ragged_dot_general(lhs, rhs, sizes, dims, preferred_element_type=jnp.int32)
    )
    assert "ragged_dot is JAX's own: the result is int32" in caplog.text


# --- group_offset -----------------------------------------------------------------------------------------------------


def expected_with_offset(lhs, rhs, sizes, offset):
    lhs, rhs = np.asarray(lhs, np.float32), np.asarray(rhs, np.float32)
    ends = np.cumsum(sizes)
    want = np.zeros((len(lhs), rhs.shape[2]), np.float32)
    for i in range(len(rhs)):
        if (g := offset + i) < len(sizes):
            rows = slice(ends[g] - sizes[g], ends[g])
            want[rows] = lhs[rows] @ rhs[i]
    return want


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("local", [0, 2, 6])
def test_group_offset(dtype, local):
    """One compilation serves every offset."""

    def run(lhs, rhs, sizes, offset):
        return jgg.ragged_dot(lhs, rhs, sizes, preferred_element_type=jnp.float32, group_offset=offset)

    forward, backward = jax.jit(run), jax.jit(jax.grad(lambda *x: run(*x).sum(), (0, 1)))
    for offset in (0, 1, 2, 4, 6):
        _check_group_offset(forward, backward, dtype, local, offset)


def _check_group_offset(forward, backward, dtype, local, offset):
    rng = np.random.default_rng(2)
    sizes = np.array([4, 5, 0, 6, 7, 3], np.int32)
    lhs = jnp.asarray(rng.standard_normal((30, 16), np.float32), jnp.bfloat16).astype(dtype)
    rhs = jnp.asarray(rng.standard_normal((local, 16, 24), np.float32), jnp.bfloat16).astype(dtype)
    want = expected_with_offset(lhs, rhs, sizes, offset)
    begin, end = ([0, *np.cumsum(sizes)][min(offset + i, 6)] for i in (0, local))
    outside = (np.arange(30) < begin) | (np.arange(30) >= end)
    lhs = jnp.where(outside[:, None], jnp.nan, lhs)
    got = forward(lhs, rhs, sizes, jnp.array([offset]))
    close(got, want, 2.0**-8 if dtype == jnp.float32 else 2.0**-20)
    dlhs, drhs = backward(lhs, rhs, sizes, jnp.array([offset]))
    assert not np.asarray(dlhs, np.float32)[outside].any()
    assert np.isfinite(np.asarray(drhs, np.float32)).all()
    ones = np.ones((30, 24), np.float32)
    for i in range(local):
        rows = slice(*([0, *np.cumsum(sizes)][min(offset + j, 6)] for j in (i, i + 1)))
        close(drhs[i], np.asarray(lhs, np.float32)[rows].T @ ones[rows])


def test_gradients_with_an_offset_move_no_rows(monkeypatch):
    """Of expert parallelism: every expert here has one group, so that nothing is gathered."""
    monkeypatch.setattr(ffi_call, "cuda_capabilities", tuple)
    monkeypatch.setattr(library, "manifest", lambda: {"build_id": "the build"})

    def run(lhs, rhs, sizes, offset):
        return jgg.ragged_dot(lhs, rhs, sizes, group_offset=offset).astype(jnp.float32).sum()

    shapes = ((64, 32), jnp.bfloat16), ((4, 32, 16), jnp.bfloat16), ((8,), jnp.int32), ((1,), jnp.int32)
    operands = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    text = jax.jit(jax.grad(run, (0, 1))).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count(f"@{library.FORWARD}(") == text.count(f"@{library.WGRAD}(") == 1
    assert "gather" not in text
    assert "scatter" not in text


@pytest.mark.parametrize("name", ["contracted", "contracted, batch", "batch", "kept, batch"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_group_offset_of_general_products(name, dtype, offset):
    lhs, rhs, sizes, dims = problem(name, 5)
    full = np.asarray(of_jax(lhs, rhs, sizes, dims))
    got = jgg.ragged_dot_general(
        lhs.astype(dtype), rhs.astype(dtype), sizes, dims, None, jnp.float32, jnp.int32(offset)
    )
    if name.startswith("contracted"):
        want = np.concatenate([full, np.zeros_like(full)])[offset : offset + 3]
    elif name == "batch":
        begin, end = np.asarray(sizes)[:offset].sum(), np.asarray(sizes).sum()
        want = np.where(((np.arange(8) >= begin) & (np.arange(8) < end))[:, None, None], full, 0)
    else:
        want = np.stack(
            [expected_with_offset(lhs[i], rhs[:, i], np.asarray(sizes)[i], offset) for i in range(len(lhs))]
        )
    close(got, want)


# --- what goes to JAX, and what is refused ----------------------------------------------------------------------------


@pytest.fixture
def logged(caplog):
    log.once.cache_clear()
    caplog.set_level(logging.WARNING, "jax_grouped_gemm")
    return caplog


@pytest.mark.parametrize(
    ("dtype", "k", "why"),
    [(jnp.float32, 16, "operands are float32 and float32"), (jnp.bfloat16, 12, "K is 12, no multiple of 8")],
)
def test_fallback_is_jax_and_says_why_once(logged, dtype, k, why):
    lhs, rhs, sizes = jnp.ones((10, k), dtype), jnp.ones((2, k, 8), dtype), jnp.array([4, 3])
    for _ in range(2):
        got = jgg.ragged_dot(lhs, rhs, sizes)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(jax.lax.ragged_dot(lhs, rhs, sizes)))
    (record,) = logged.records
    assert record.getMessage().startswith(f"ragged_dot is JAX's own: {why}")


def test_no_log_where_the_kernels_do_it(logged):
    jgg.ragged_dot(jnp.ones((10, 16), jnp.bfloat16), jnp.ones((2, 16, 8), jnp.bfloat16), jnp.array([4, 3]))
    assert logged.records == []


@pytest.mark.parametrize("sizes", [np.array([4, 3], np.uint8), np.array([4, 3], np.int16), [4, 3]])
@pytest.mark.parametrize("precision", [None, "highest", jax.lax.Precision.DEFAULT])
def test_arguments_as_for_jax(sizes, precision):
    lhs, rhs = jnp.ones((10, 16), jnp.bfloat16), jnp.ones((2, 16, 8), jnp.bfloat16)
    got = jgg.ragged_dot(lhs, rhs, sizes, precision, jnp.float32)
    np.testing.assert_array_equal(np.asarray(got), np.where(np.arange(10)[:, None] < 7, 16, 0) * np.ones((1, 8)))


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.uint16, np.uint32])
@pytest.mark.parametrize("rows", [256, 300, 40000])
@pytest.mark.parametrize("operands", [jnp.bfloat16, jnp.float32])
def test_integers_narrower_than_the_number_of_rows(dtype, rows, operands):
    sizes = jnp.array([100, 20, 30], dtype)
    lhs, rhs = jnp.ones((rows, 8), operands), jnp.stack([i * jnp.ones((8, 8), operands) for i in (1, 2, 3)])
    want = np.repeat([8, 16, 24, 0], [100, 20, 30, rows - 150])
    if operands == jnp.bfloat16:  # JAX's own may be wrong
        np.testing.assert_array_equal(jgg.ragged_dot(lhs, rhs, sizes)[:, 0].astype(int), want)
    offset = jnp.array([1], dtype)
    got = jgg.ragged_dot(lhs, rhs[1:], sizes, group_offset=offset)
    np.testing.assert_array_equal(got[:, 0].astype(int), np.where(np.arange(rows) < 100, 0, want))


def test_many_groups_with_a_narrow_offset():
    lhs, rhs = jnp.ones((300, 8), jnp.bfloat16), jnp.ones((1, 8, 8), jnp.bfloat16)
    got = jgg.ragged_dot(lhs, rhs, jnp.ones(300, jnp.int32), group_offset=jnp.array([200], jnp.uint8))
    np.testing.assert_array_equal(np.flatnonzero(got[:, 0]), [200])


def test_errors():
    lhs, rhs, sizes = jnp.ones((10, 16), jnp.bfloat16), jnp.ones((2, 16, 8), jnp.bfloat16), jnp.array([4, 3])
    with pytest.raises(TypeError):
        jgg.ragged_dot(lhs, rhs[:, :8], sizes)
    with pytest.raises(TypeError, match="group dimension size"):
        jgg.ragged_dot(lhs, rhs, jnp.array([4, 3, 1]))
    with pytest.raises(TypeError, match="integer"):
        jgg.ragged_dot(lhs, rhs, sizes.astype(jnp.float32))
    with pytest.raises(ValueError, match=r"group_offset must be \(1,\) or \(\) of integers; got \(2,\) int32; pass"):
        jgg.ragged_dot(lhs, rhs, sizes, group_offset=jnp.array([0, 1]))
    with pytest.raises(ValueError, match=r"at most as many matrices as there are groups.*= 1; got 2; pass"):
        jgg.ragged_dot(lhs, rhs, sizes[:1], group_offset=jnp.array([0]))


def test_hostile_sizes():
    lhs, rhs = jnp.ones((10, 16), jnp.bfloat16), jnp.ones((4, 16, 8), jnp.bfloat16)
    got = jax.jit(jgg.ragged_dot)(lhs, rhs, jnp.array([3, -5, 2**31 - 1, 2**31 - 1], jnp.int32))
    assert (np.asarray(got, np.float32) == 16).all()


def test_vmap_scan_and_remat():
    lhs, rhs, sizes, dims = problem("kept, batch")
    run = functools.partial(jgg.ragged_dot, preferred_element_type=jnp.float32)
    got = jax.vmap(run, (0, 1, 0))(lhs, rhs, sizes)
    close(got, of_jax(lhs, rhs, sizes, dims), 2.0**-20)
    _, scanned = jax.lax.scan(lambda _, x: (None, jax.checkpoint(run)(*x)), None, (lhs, rhs.swapaxes(0, 1), sizes))
    close(scanned, got, 2.0**-20)
