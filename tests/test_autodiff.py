"""Gradients of grouped_gemm: against a float64 oracle, and those of higher order against plain float32 JAX."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from test_reference import equations

from jax_grouped_gemm import calls, config, ffi_call, grouped_gemm, library, parts, rows

pytestmark = pytest.mark.usefixtures("compiled_fast")

OFFSETS = [10, 10, 41, 60]
INT32 = st.integers(-(2**31), 2**31 - 1)


def make(rng, **options):
    return oracle.make_case(rng, 4, 70, 24, 16, **{"offsets": OFFSETS} | options)


def as_jax(case):
    return {name: jnp.asarray(getattr(case, name)) for name in oracle.present(case)}


def options_of(case):
    return {name: x for name, x in case.arguments().items() if name not in oracle.OPERANDS}


def random_cotangents(rng, case, c=True, d=True):
    """Of D and C, None for those that are not asked for."""
    found = [oracle.random_cotangent(rng, case, "D") if d else None]
    return found + ([oracle.random_cotangent(rng, case, "C") if c else None] if case.generate_c else [])


def gradients(case, wanted, outputs, jit=True, **changes):
    """{operand: cotangent}, of the wanted ones alone."""
    options = options_of(case)
    offsets = options.pop("offsets")
    pull = pulling(tuple(wanted), tuple(x is not None for x in outputs), tuple(options.items()), jit)
    return pull(as_jax(case) | changes, offsets, [jnp.asarray(x) for x in outputs if x is not None])


@functools.cache  # so that it is compiled once for each kind of call
def pulling(wanted, used, options, jit):
    def pulled(arrays, offsets, outputs):
        fixed = {name: x for name, x in arrays.items() if name not in wanted}

        def run(moving):
            found = grouped_gemm(**fixed, **moving, offsets=offsets, **dict(options))
            found = found if isinstance(found, tuple) else (found,)
            return [d for d, is_used in zip(found, used, strict=True) if is_used]

        return jax.vjp(run, {name: arrays[name] for name in wanted})[1](outputs)[0]

    return jax.jit(pulled) if jit else pulled


def check(case, outputs, wanted=None, got=None):
    wanted = oracle.present(case) if wanted is None else wanted
    got = gradients(case, wanted, outputs) if got is None else got
    d, c = (*outputs, None)[:2]
    want = oracle.cotangents(case, d, c)
    m, n, k = *case.a.shape[:1], case.b.shape[1 if case.b_major == "k" else 2], case.a.shape[1]
    combined = d is not None and c is not None  # is rounded
    after = {"alpha", "prob"} if case.bias is None else {"alpha"}  # whose gradients are of a rounded product
    roundings = {
        "a": bool(after & set(wanted)) + combined,
        "b": (case.prob is not None) + combined,
        "alpha": 1 + combined,
        "prob": 1 if case.bias is None else combined,
        "bias": combined,
    }
    terms = {"a": n, "b": m, "alpha": m * k + n, "prob": n + k, "bias": m}
    for name in wanted:
        assert got[name].dtype == getattr(case, name).dtype
        oracle.assert_near(
            got[name], want[name], terms[name], roundings=roundings[name], what=f"the gradient of {name}"
        )


@pytest.mark.parametrize(("d", "c"), [(True, None), (True, True), (True, False), (False, True)])
@pytest.mark.parametrize("bias", [None, "float16", "bfloat16"])
@pytest.mark.parametrize("alpha", [False, True])
@pytest.mark.parametrize("prob", [False, True])
def test_every_operand(rng, alpha, prob, bias, d, c):
    for b_major, d_dtype in (("k", "bfloat16"), ("n", "float32")):
        case = make(
            rng, alpha=alpha, prob=prob, bias=bias, b_major=b_major, d_dtype=d_dtype,
            generate_c=c is not None, c_dtype=None if c is None else "float32",
        )  # fmt: skip
        check(case, random_cotangents(rng, case, c, d))


@pytest.mark.parametrize("bias", [None, "float32"])
def test_each_subset_of_the_operands(rng, bias):
    """Nothing is made for an operand whose gradient is not asked for."""
    case = make(rng, bias=bias)
    outputs = random_cotangents(rng, case)
    names = oracle.present(case)
    for size in range(1, len(names) + 1):
        for wanted in itertools.combinations(names, size):
            jaxpr = jax.make_jaxpr(lambda wanted=wanted: gradients(case, wanted, outputs, jit=False))().jaxpr
            of_rows = set(wanted) & ({"a", "alpha", "prob"} if bias is None else {"a", "alpha"})
            assert len(equations(jaxpr, "grouped_gemm")) == 1 + bool(of_rows), wanted
            assert len(equations(jaxpr, "grouped_wgrad")) == len(set(wanted) & {"b", "alpha", "bias"}), wanted
            assert not equations(jaxpr, "grouped_gemm_tangent")
            if size <= 2:
                check(case, outputs, wanted)


def test_three_products(rng):
    case = make(rng, alpha=False, prob=False)
    jaxpr = jax.make_jaxpr(lambda: gradients(case, ("a", "b"), random_cotangents(rng, case)))().jaxpr
    assert len(equations(jaxpr, "grouped_gemm")) == 2
    assert len(equations(jaxpr, "grouped_wgrad")) == 1
    # Of these operands nothing is made beside the products, in whatever order they may run.
    for name in ("optimization_barrier", "mul", "gather", "sort"):
        assert not equations(jaxpr, name)


@pytest.mark.parametrize("n", [8, 24])
def test_the_smaller_operand_is_scaled_and_first(rng, n):
    case = oracle.make_case(rng, 4, 70, n, 16, offsets=OFFSETS, alpha=False)
    jaxpr = jax.make_jaxpr(lambda: gradients(case, ("a", "b"), random_cotangents(rng, case), jit=False))().jaxpr
    (scaling,) = (eqn for eqn in equations(jaxpr, "mul") if eqn.outvars[0].aval.ndim == 2)
    assert scaling.outvars[0].aval.shape == (70, min(n, 16))
    (barrier,) = equations(jaxpr, "optimization_barrier")
    (wgrad,) = equations(jaxpr, "grouped_wgrad")
    _, dgrad = equations(jaxpr, "grouped_gemm")
    assert wgrad.outvars[0] in barrier.invars
    assert dgrad.invars[0] in barrier.outvars


@pytest.mark.parametrize(("bias", "wanted", "kept"), [
    (None, ("a",), {"b", "alpha", "prob"}),
    (None, ("b",), {"a", "alpha", "prob"}),
    (None, ("alpha",), {"a", "b", "prob"}),
    (None, ("prob",), {"a", "b", "alpha"}),
    ("float32", ("a",), {"b", "alpha"}),
    ("float32", ("b",), {"a", "alpha"}),
    ("float32", ("alpha",), {"a", "b"}),
    ("float32", ("prob",), {"bias"}),
    ("float32", ("bias",), {"prob"}),
    ("float32", ("prob", "bias"), {"prob", "bias"}),
])  # fmt: skip
def test_what_is_kept(rng, bias, wanted, kept):
    case = make(rng, bias=bias)
    arrays = as_jax(case)

    def run(moving):
        return grouped_gemm(**(arrays | moving), **options_of(case))

    _, pull = jax.vjp(run, {name: arrays[name] for name in wanted})
    residuals = [x.shape for x in jax.tree.leaves(pull) if x.dtype != jnp.int32]
    assert sorted(residuals) == sorted(arrays[name].shape for name in kept)


@pytest.mark.parametrize("b_major", ["k", "n"])
def test_tuple_of_weights(rng, b_major):
    case = make(rng, b_major=b_major)
    outputs = random_cotangents(rng, case)
    got = gradients(case, ("a", "b", "alpha", "prob"), outputs, b=tuple(as_jax(case)["b"]))
    assert isinstance(got["b"], tuple)
    check(case, outputs, got=got | {"b": jnp.stack(got["b"])})


def test_some_arrays_of_a_tuple(rng):
    case = make(rng, alpha=False)
    (outputs,) = random_cotangents(rng, case)
    weights = tuple(as_jax(case)["b"])
    other = {name: x for name, x in (as_jax(case) | options_of(case)).items() if name != "b"}

    def run(second):
        return grouped_gemm(b=(weights[0], weights[1], second, weights[3]), **other)

    (got,) = jax.vjp(run, weights[2])[1](jnp.asarray(outputs))
    values, scale = oracle.cotangents(case, outputs)["b"]
    oracle.assert_near(got, (values[2], scale[2]), 31, roundings=1)
    along = jax.jvp(run, (weights[2],), (jnp.ones_like(weights[2]),))[1]
    rows = np.zeros(70, bool)
    rows[10:41] = True
    assert np.asarray(along, np.float32)[rows].any(axis=1).all()
    assert not np.asarray(along, np.float32)[~rows].any()


@pytest.mark.skipif(not library.LIBRARY.exists(), reason="the library is not built (make build)")
def test_weights_behind_addresses_are_constants(rng):
    case = make(rng)
    weights = [np.array(w) for w in case.b]
    pointers = np.array([w.ctypes.data for w in weights], np.int64)
    outputs = random_cotangents(rng, case)
    options = options_of(case) | {"b_ptrs": pointers, "n": 24}
    arrays = {name: x for name, x in as_jax(case).items() if name != "b"}
    got = jax.vjp(lambda arrays: grouped_gemm(**arrays, **options), arrays)[1](jnp.asarray(outputs[0]))[0]
    check(case, outputs, ("a", "alpha", "prob"), got)


@pytest.mark.parametrize("bias", [None, "bfloat16"])
def test_gradients_of_what_is_zero(rng, bias):
    """Operands are NaN wherever they do not matter: gradients there are zeros, and others do not notice."""
    case = make(rng, offsets=[20, 20, 20, 50], bias=bias, generate_c=True)
    outputs = random_cotangents(rng, case)
    check(case, outputs)
    got = gradients(case, oracle.present(case), outputs)
    for name in ("a", "prob"):
        assert not np.asarray(got[name], np.float32)[50:].any()
    for name in set(oracle.present(case)) - {"a", "prob"}:
        assert not np.asarray(got[name], np.float32)[1:3].any()


def test_alpha_of_zero_has_a_gradient(rng):
    case = make(rng)
    case.alpha[2] = 0
    got = gradients(case, ("a", "alpha", "prob"), random_cotangents(rng, case))
    assert np.asarray(got["alpha"])[2]
    assert not np.asarray(got["a"], np.float32)[10:41].any()
    check(case, random_cotangents(rng, case))


@given(offsets=st.lists(INT32 | st.integers(-5, 75), min_size=4, max_size=4), seed=st.integers(0, 2**32 - 1))
def test_hostile_offsets(offsets, seed):
    rng = np.random.default_rng(seed)
    for bias in (None, "float32"):
        case = make(rng, offsets=offsets, bias=bias)
        check(case, random_cotangents(rng, case))


def test_a_nan_stays_in_its_group(rng):
    case = make(rng, poison=False, bias="float32")
    case.a[15] = np.nan
    got = gradients(case, oracle.present(case), random_cotangents(rng, case))
    assert np.isnan(np.asarray(got["b"], np.float32)[2]).any()
    for name in ("b", "alpha", "bias"):
        assert not np.isnan(np.asarray(got[name], np.float32)[[0, 1, 3]]).any()
    assert not np.isnan(np.asarray(got["a"], np.float32)).any()


@pytest.mark.parametrize(("empty", "sizes"), [
    ("m", (3, 0, 16, 24)), ("l", (0, 20, 16, 24)), ("n", (3, 20, 0, 24)), ("k", (3, 20, 16, 0)),
])  # fmt: skip
@pytest.mark.parametrize("bias", [None, "float32"])
def test_zero_sizes(rng, empty, sizes, bias):
    l, m, n, k = sizes
    case = oracle.make_case(rng, l, m, n, k, bias=bias, generate_c=True)
    outputs = random_cotangents(rng, case)
    got = gradients(case, oracle.present(case), outputs)
    for name, x in got.items():
        assert x.shape == getattr(case, name).shape
    check(case, outputs, got=got)


@pytest.mark.parametrize("x64", [False, True])
def test_without_jit_and_with_wide_integers(rng, x64):
    case = make(rng, bias="float16", generate_c=True)
    outputs = random_cotangents(rng, case)
    with jax.enable_x64(x64) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64(x64):
        check(case, outputs, got=gradients(case, oracle.present(case), outputs, jit=False))


def test_group_sizes(rng):
    case = make(rng)
    (outputs,) = random_cotangents(rng, case)
    sizes = jnp.asarray(np.diff(case.offsets, prepend=0), jnp.int32)
    options = options_of(case) | {"offsets": None, "group_sizes": sizes}
    got = jax.jit(lambda arrays: jax.vjp(lambda x: grouped_gemm(**x, **options), arrays)[1](jnp.asarray(outputs))[0])
    check(case, [outputs], got=got(as_jax(case)))


# --- in programs ------------------------------------------------------------------------------------------------------


def loss(arrays, case, weight):
    return jnp.sum(jnp.sin(grouped_gemm(**arrays, **options_of(case) | {"d_dtype": "float32"})) * weight)


@pytest.fixture
def program(rng):
    case = make(rng, bias="float32", poison=False)
    return case, as_jax(case), jnp.asarray(rng.standard_normal((70, 24)), jnp.float32)


def assert_same(left, right):
    for x, y in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(np.asarray(x, np.float32), np.asarray(y, np.float32), rtol=2e-2, atol=1e-3)


def test_remat(program):
    case, arrays, weight = program
    run = functools.partial(loss, case=case, weight=weight)
    assert_same(jax.jit(jax.grad(jax.checkpoint(run)))(arrays), jax.grad(run)(arrays))


def test_scan(rng):
    """A layer applied three times to its own result."""
    case = oracle.make_case(rng, 3, 40, 16, 16, offsets=[10, 25, 40], poison=False)
    arrays, options = as_jax(case), options_of(case)

    def layer(a, arrays):
        return grouped_gemm(**arrays | {"a": a}, **options)

    def loop(arrays):
        a, _ = jax.lax.scan(lambda a, _: (layer(a, arrays), None), arrays["a"], None, length=3)
        return jnp.sum(a.astype(jnp.float32))

    def unrolled(arrays):
        a = arrays["a"]
        for _ in range(3):
            a = layer(a, arrays)
        return jnp.sum(a.astype(jnp.float32))

    left, right = jax.jit(jax.grad(loop))(arrays), jax.grad(unrolled)(arrays)
    for name in arrays:
        x, y = (np.asarray(side[name], np.float32) for side in (left, right))
        assert np.linalg.norm(x - y) <= 1e-2 * np.linalg.norm(y)


def test_a_cond_that_differentiates_one_branch(program):
    case, arrays, weight = program

    def run(arrays, which):
        other = jax.lax.stop_gradient(arrays["b"])
        b = jax.lax.cond(which, lambda b: b, lambda b: other, arrays["b"])
        return loss(arrays | {"b": b}, case, weight)

    want = jax.grad(lambda arrays: loss(arrays, case, weight))(arrays)
    assert_same(jax.jit(jax.grad(run))(arrays, True), want)
    assert not np.asarray(jax.jit(jax.grad(run))(arrays, False)["b"], np.float32).any()


def test_gradients_under_the_debug_switch(program, monkeypatch):
    _, arrays, weight = program
    run = jax.jit(jax.grad(lambda arrays, offsets: loss_at(arrays, offsets, weight)))

    def loss_at(arrays, offsets, weight):
        return jnp.sum(grouped_gemm(**arrays, offsets=offsets, d_dtype="float32") * weight)

    want = run(arrays, jnp.asarray(OFFSETS, jnp.int32))
    monkeypatch.setenv("JAX_GROUPED_GEMM_DEBUG", "1")
    jax.clear_caches()
    assert_same(run(arrays, jnp.asarray(OFFSETS, jnp.int32)), want)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"got offsets\[1\] = 3 after 5"):
        jax.block_until_ready(run(arrays, jnp.asarray([5, 3, 8, 9], jnp.int32)))


# --- forward, and higher orders ---------------------------------------------------------------------------------------


def plain(case, arrays):
    """(D, C) in float32, which JAX differentiates by itself; nothing is NaN here."""
    row = jnp.arange(case.a.shape[0])
    group = jnp.searchsorted(jnp.asarray(case.offsets), row, side="right")
    inside = (group < len(case.offsets))[:, None]
    group = jnp.minimum(group, len(case.offsets) - 1)
    x = {name: jnp.nan_to_num(x.astype(jnp.float32)) for name, x in arrays.items()}
    b = x["b"] if case.b_major == "k" else x["b"].transpose(0, 2, 1)
    c = jnp.einsum("mk,mnk->mn", x["a"], b[group], precision="highest")
    c = c if case.alpha is None else x["alpha"][group][:, None] * c
    prob = jnp.ones_like(c[:, :1]) if case.prob is None else x["prob"][:, None]
    if case.bias is None:
        return jnp.where(inside, prob * c, 0), jnp.where(inside, c, 0)
    c = jnp.where(inside, c + prob * x["bias"][group], 0)
    return c, c


def both(case):
    """The function and its double, of the same arrays: a smooth scalar of all outputs."""
    options = options_of(case)

    def ours(arrays):
        return grouped_gemm(**arrays, **options)

    def double(arrays):
        d, c = plain(case, arrays)
        return (d, c) if case.generate_c else d

    def scalar(of):
        weights = np.random.default_rng(5).standard_normal(case.a.shape[0])[:, None].astype(np.float32)
        return lambda arrays: sum(jnp.sum(jnp.sin(x) * weights) for x in jax.tree.leaves(of(arrays)))

    return ours, double, scalar


def assert_near(got, want, case, limit):
    """As norms, for each operand; nothing in rows that are zero, and nothing NaN."""
    for name, x in got.items():
        x, y = np.asarray(x, np.float64), np.asarray(want[name], np.float64)
        assert np.linalg.norm(x - y) <= limit * np.linalg.norm(y), (name, np.linalg.norm(x - y) / np.linalg.norm(y))
        if name in ("a", "prob"):
            assert not x[case.end() :].any(), name


CASES = {
    "plain": {"alpha": False, "prob": False},
    "scaled": {},
    "n-major": {"b_major": "n"},
    "bias": {"bias": "float32"},
    "c": {"generate_c": True, "c_dtype": "float32"},
    "bias and c": {"bias": "float32", "generate_c": True, "c_dtype": "float32"},
}
every_case = pytest.mark.parametrize("options", CASES.values(), ids=CASES)


@pytest.fixture
def problem(rng, options):
    """With NaN wherever it should not matter, in operands; tangents too, which must not matter there either."""
    case = make(rng, d_dtype="float32", **options)
    arrays = as_jax(case)
    along = {name: jnp.asarray(rng.standard_normal(x.shape), x.dtype) for name, x in arrays.items()}
    along |= {name: along[name].at[case.end() :].set(jnp.nan) for name in ("a", "prob") if name in along}
    return case, arrays, along


def in_float32(arrays):
    return {name: jnp.nan_to_num(x.astype(jnp.float32)) for name, x in arrays.items()}


@every_case
def test_jvp(problem):
    case, arrays, along = problem
    ours, double, _ = both(case)
    got = jax.tree.leaves(jax.jit(lambda x, t: jax.jvp(ours, (x,), (t,))[1])(arrays, along))
    want = jax.tree.leaves(jax.jvp(double, (in_float32(arrays),), (in_float32(along),))[1])
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)
        assert not np.asarray(x)[case.end() :].any()
    for name in arrays:
        got, want = (
            jax.tree.leaves(jax.jvp(lambda one, f=f, x=x, name=name: f(x | {name: one}), (x[name],), (t[name],))[1])
            for f, x, t in ((ours, arrays, along), (double, in_float32(arrays), in_float32(along)))
        )
        for x, y in zip(got, want, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


@every_case
def test_second_order(problem):
    """Forward over reverse, reverse over forward, reverse over reverse."""
    case, arrays, along = problem
    ours, double, scalar = both(case)

    def forward_over_reverse(f):
        return lambda x, t: jax.jvp(jax.grad(scalar(f)), (x,), (t,))[1]

    def reverse_over_forward(f):
        return lambda x, t: jax.grad(lambda x: jax.jvp(scalar(f), (x,), (t,))[1])(x)

    def reverse_over_reverse(f):
        def norm(x, t):
            found = jax.grad(scalar(f))(x)
            return sum(
                jnp.sum(found[name].astype(jnp.float32) * jnp.nan_to_num(t[name].astype(jnp.float32))) for name in found
            )

        return jax.grad(norm)

    for order in (forward_over_reverse, reverse_over_forward, reverse_over_reverse):
        got = jax.jit(order(ours))(arrays, along)
        want = order(double)(in_float32(arrays), in_float32(along))
        assert_near(got, want, case, 0.04)


def test_third_order(rng):
    case = make(rng, d_dtype="float32", prob=False)
    arrays, along = as_jax(case), {name: jnp.ones_like(x) for name, x in as_jax(case).items()}
    ours, double, scalar = both(case)

    def third(f):
        def second(x, t):
            return jax.jvp(lambda x: jax.jvp(scalar(f), (x,), (t,))[1], (x,), (t,))[1]

        return jax.grad(second)

    assert_near(jax.jit(third(ours))(arrays, along), third(double)(in_float32(arrays), in_float32(along)), case, 0.03)


def test_jacobians(rng):
    case = oracle.make_case(rng, 2, 10, 8, 8, offsets=[4, 7], d_dtype="float32")
    ours, double, _ = both(case)
    arrays = as_jax(case)
    for name in arrays:  # of one dtype at a time: JAX wants to join them
        want = jax.jacfwd(lambda x, name=name: double(in_float32(arrays | {name: x})))(in_float32(arrays)[name])
        for jacobian in (jax.jacfwd, jax.jacrev):
            got = jacobian(lambda x, name=name: ours(arrays | {name: x}))(arrays[name])
            np.testing.assert_allclose(np.asarray(got, np.float32), want, rtol=2e-2, atol=2e-2)


def test_linear_transpose(rng):
    """Of the primitive itself, which is linear in each operand where there is no bias."""
    case = make(rng)
    (outputs,) = random_cotangents(rng, case)
    arrays, options = as_jax(case), options_of(case)
    want = oracle.cotangents(case, outputs)
    for name, terms in (("a", 24), ("b", 70), ("prob", 40), ("alpha", 70 * 40)):
        run = lambda x, name=name: grouped_gemm(**arrays | {name: x}, **options)
        (got,) = jax.linear_transpose(run, arrays[name])(jnp.asarray(outputs))
        oracle.assert_near(got, want[name], terms, roundings=1, what=name)


# --- experts ----------------------------------------------------------------------------------------------------------


def test_groups_that_share_experts(rng):
    """Experts of several groups and of none, and groups of no expert: b's gradient is summed by expert, others by group."""
    case = oracle.make_case(rng, 6, 90, 24, 16, offsets=[10, 22, 22, 40, 61, 80], bias="float32", generate_c=True)
    experts = [2, 0, 1, 2, 7, -1]  # of four; the third has an empty group, 3 has none
    for bias in (None, "float32"):
        weights = rng.standard_normal((4, 24, 16)).astype(oracle.BF16)
        weights[[1, 3]] = np.nan
        case.b = np.stack([weights[e] if 0 <= e < 4 else np.zeros((24, 16), oracle.BF16) for e in experts])
        mine = case if bias else oracle.dataclasses.replace(case, bias=None)
        arrays = as_jax(mine) | {"b": jnp.asarray(weights)}
        call = _call_of(mine, experts)

        def run(arrays, call=call):
            operands = calls.Operands(
                *(arrays.get(name) for name in ("a",)),
                jnp.asarray(case.offsets),
                jnp.asarray(experts, jnp.int32),
                arrays["alpha"],
                arrays["prob"],
                arrays.get("bias"),
                (arrays["b"],),
            )
            return ffi_call.grouped_gemm(call, operands)

        d, c = run(arrays)
        none = slice(40, None)
        for output, values in zip("DC", (d, c), strict=True):
            assert not np.asarray(values, np.float32)[none].any()
            want, scale = oracle.oracle(mine, output)
            want[none] = scale[none] = 0
            oracle.assert_near(values, (want, scale), 17, what=output)

        outputs = random_cotangents(rng, mine)
        for x in outputs:
            x[none] = np.nan
        pull = jax.jit(lambda arrays, outputs, run=run: jax.vjp(run, arrays)[1](outputs)[0])
        got = pull(arrays, [jnp.asarray(x) for x in outputs])
        want = oracle.cotangents(mine, *(np.nan_to_num(x) for x in outputs))
        for x in want["a"], want.get("prob"):
            for part in x:
                part[none] = 0
        for name in {"alpha", "bias"} & set(want):
            for part in want[name]:
                part[4:] = 0
        of_b = tuple(np.stack([sum(part[g] for g in range(6) if experts[g] == e) + np.zeros((24, 16)) for e in range(4)])
                     for part in want["b"])  # fmt: skip
        for name, terms in {"a": 24, "alpha": 900, "prob": 40, "bias": 90}.items():
            if name in want:
                oracle.assert_near(got[name], want[name], terms, roundings=2, what=name)
        oracle.assert_near(got["b"], of_b, 90, roundings=2, what="b")


def _call_of(case, experts):
    return calls.Call(
        case.a.shape[0], 24, 16, 4, "k", "dense", case.d_dtype, has_alpha=True, has_prob=True, implementation=None,
        has_bias=case.bias is not None, c_dtype="bfloat16", mapped_groups=len(experts),
    )  # fmt: skip


# --- the parts --------------------------------------------------------------------------------------------------------


@given(values=st.lists(st.floats(width=32, allow_subnormal=False), min_size=1, max_size=20))
@example(
    values=[np.finfo(np.float32).max, -np.finfo(np.float32).max, 3.3961777e38]
)  # which bfloat16 rounds to infinity
def test_three_parts_are_exact(values):
    values = np.array(values, np.float32)
    found = [np.asarray(x, np.float64) for x in jax.jit(parts.of)(values)]
    total = sum(found)
    normal = (np.abs(values) > 1e-30) | (values == 0)  # of smaller ones the last part may be flushed to zero
    np.testing.assert_array_equal(total[normal], values[normal].astype(np.float64))
    np.testing.assert_array_equal(np.isnan(total), np.isnan(values))
    np.testing.assert_array_equal(total[np.isinf(values)], values[np.isinf(values)])


def test_sums_are_of_float32(rng):
    """Of values that bfloat16 does not hold, with a result that one or two parts would miss."""
    values = rng.uniform(0.5, 1, 70).astype(np.float32)
    call = calls.Call(70, 8, 8, 2, "k", "dense", "bfloat16", False, False, None)
    got = jax.jit(lambda v: rows.total(call, jnp.asarray([30, 60], jnp.int32), v))(values)
    want = [values[:30].astype(np.float64).sum(), values[30:60].astype(np.float64).sum()]
    np.testing.assert_allclose(got, want, rtol=2e-7 * np.sqrt(30))


# --- what a GPU runs --------------------------------------------------------------------------------------------------


def cuda_text(monkeypatch, weights="dense", bias=None, wanted=("a", "b", "alpha", "prob"), **options):
    monkeypatch.setattr(ffi_call, "cuda_capabilities", tuple)
    monkeypatch.setattr(library, "manifest", lambda: {"build_id": "the build"})

    def struct(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    b = struct(4, 16, 32) if weights == "dense" else (struct(16, 32),) * 4
    arrays = {"a": struct(64, 32), "b": b, "alpha": struct(4, dtype=jnp.float32), "prob": struct(64, dtype=jnp.float32)}
    if bias is not None:
        arrays["bias"] = struct(4, 16, dtype=bias)

    def run(arrays, offsets, d):
        fixed = {name: x for name, x in arrays.items() if name not in wanted}
        moving = {name: arrays[name] for name in wanted}
        return jax.vjp(lambda x: grouped_gemm(**x, **fixed, offsets=offsets, **options), moving)[1](d)

    traced = jax.jit(run).trace(arrays, struct(4, dtype=jnp.int32), struct(64, 16))
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("weights", ["dense", "tuple"])
@pytest.mark.parametrize("bias", [None, "float32"])
def test_no_copy_of_the_weights_and_no_scatter(monkeypatch, weights, bias):
    wanted = ("a", "b", "alpha", "prob") + (("bias",) if bias else ())
    text = cuda_text(monkeypatch, weights, bias, wanted)
    assert "scatter" not in text
    assert "transpose" not in text
    stacks = [line for line in text.splitlines() if "concatenate" in line]
    assert not any("16x32xbf16" in line for line in stacks)  # of weights
    assert text.count(f"@{library.FORWARD}(") == 1  # the forward's own is not used
    assert text.count(f"@{library.WGRAD}(") == (3 if bias else 2)
    (dgrad,) = (line for line in text.splitlines() if f"@{library.FORWARD}(" in line)
    assert 'b_major = "n"' in dgrad
    assert f'weights = "{weights}"' in dgrad


def test_kernels_of_the_backward_pass(monkeypatch):
    names = {variant.name for arch in config.TILES for variant in config.variants(arch) + config.wgrad_variants(arch)}
    text = cuda_text(monkeypatch, wanted=("a", "b"), use_dynamic_sched=True, overlap_margin=4, mma_tiler_mn=(256, 192))
    calls = [line for line in text.splitlines() if "custom_call @jax_grouped_gemm" in line]
    assert len(calls) == 2
    for line in calls:
        assert "dynamic = true" in line
        assert "overlap_margin = 4 : i64" in line
        found = {part.split('"')[0] for part in line.split('= "sm')[1:]}
        assert {f"sm{name}" for name in found} <= names
        assert len(found) == len(config.TILES)  # the wish, for one architecture's tile, was for the forward pass


def test_alpha_and_prob_without_the_rows_are_of_a_float32_product(rng):
    """With the rows' gradient they share its product, which is rounded to bfloat16."""
    case = oracle.make_case(rng, 3, 40, 64, 128, offsets=[10, 25, 40])
    arrays = case.arguments()
    a, b, alpha, prob, offsets = (arrays[name] for name in ("a", "b", "alpha", "prob", "offsets"))

    def total(a, alpha, prob):  # whose cotangent, ones, is exact
        return grouped_gemm(a, b, offsets=offsets, alpha=alpha, prob=prob, d_dtype="float32").sum()

    group = np.repeat([0, 1, 2], [10, 15, 15])
    products = np.einsum("mk,mnk->m", np.asarray(a, np.float64), np.asarray(b, np.float64)[group])
    of_prob = products * np.asarray(alpha, np.float64)[group]
    of_alpha = np.bincount(group, products * np.asarray(prob, np.float64))
    exact = jax.jit(jax.grad(total, (1, 2)))(a, alpha, prob)
    shared = jax.jit(jax.grad(total, (0, 1, 2)))(a, alpha, prob)[1:]
    for got, rounded, want in zip(exact, shared, (of_alpha, of_prob), strict=True):
        scale = np.abs(want).max()
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * scale)
        np.testing.assert_allclose(rounded, want, rtol=0, atol=1e-2 * scale)
