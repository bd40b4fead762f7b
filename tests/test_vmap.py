"""vmap: a batch is the same as its calls one by one, in as few calls as can be."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from test_reference import equations

from jax_grouped_gemm import batching, calls, contract, grouped_gemm, grouped_gemm_wgrad, library

pytestmark = pytest.mark.usefixtures("compiled_fast")

BATCH = 3
OFFSETS = [[10, 10, 20, 27], [0, 5, 30, 30], [7, 7, 7, 9]]


def problems(rng, **options):
    """As many calls; NaN in rows of no group, and in weights, alpha and bias of groups that are empty."""
    options = {"d_dtype": "float32", "bias": "float32"} | options
    return [oracle.make_case(rng, 4, 30, 16, 24, offsets=offsets, **options) for offsets in OFFSETS]


def arrays_of(cases, shared=()):
    """Operands with the batch in front; the shared ones are those of the last call that has no NaN in them."""
    names = ["offsets", *oracle.present(cases[0])]
    found = {name: jnp.stack([jnp.asarray(getattr(case, name)) for case in cases]) for name in names}
    for name in shared:
        found[name] = found[name][0]
        if name != "offsets":
            found[name] = jnp.nan_to_num(found[name])
    return found


def axes_of(arrays, shared):
    return {name: None if name in shared else 0 for name in arrays}


def one_by_one(f, arrays, shared):
    def slice_of(i):
        return {name: x if name in shared else jax.tree.map(lambda x: x[i], x) for name, x in arrays.items()}

    return jax.tree.map(lambda *x: jnp.stack(x), *(f(slice_of(i)) for i in range(BATCH)))


def same(left, right, close=True):
    for x, y in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert x.dtype == y.dtype
        assert x.shape == y.shape
        x, y = (np.asarray(z, np.float64) for z in (x, y))
        assert not np.isnan(x).any()
        if close:  # but for the order of the sums
            np.testing.assert_allclose(x, y, rtol=8e-3, atol=1e-3)
        else:
            assert np.linalg.norm(x - y) <= 1e-2 * np.linalg.norm(y)


def counts(f, *arguments):
    """Of calls, and of loops that they are in."""
    jaxpr = jax.make_jaxpr(f)(*arguments).jaxpr
    calls = "grouped_gemm", "grouped_wgrad"
    loops = [
        loop for loop in equations(jaxpr, "scan") if any(equations(loop.params["jaxpr"].jaxpr, name) for name in calls)
    ]
    return [*(len(equations(jaxpr, name)) for name in calls), len(loops)]


def call(arrays, **options):
    return grouped_gemm(**arrays, d_dtype="float32", **options)


SHARED = [
    (),
    ("b",),
    ("b", "alpha", "bias"),
    ("offsets", "b"),
    ("offsets", "b", "alpha", "prob", "bias"),
    ("offsets", "prob"),
    ("a",),
    ("a", "offsets", "b"),
    ("a", "b", "alpha", "prob", "bias"),
]


@pytest.mark.parametrize("shared", SHARED, ids="-".join)
@pytest.mark.parametrize("generate_c", [False, True])
def test_any_operand(rng, shared, generate_c):
    options = {"generate_c": True, "c_dtype": "bfloat16"} if generate_c else {}
    for bias in (None, "float32"):
        cases = problems(rng, bias=bias)
        there = [name for name in shared if name != "bias" or bias]
        arrays = arrays_of(cases, there)
        if shared:  # which other calls of the batch may use
            arrays = {name: jnp.nan_to_num(x) if name != "offsets" else x for name, x in arrays.items()}
        f = functools.partial(call, **options)
        mapped = jax.vmap(f, in_axes=(axes_of(arrays, there),))
        same(jax.jit(mapped)(arrays), one_by_one(f, arrays, there))
        assert counts(mapped, arrays) == [1, 0, 0]


def test_results_are_the_very_same(rng):
    """Where one call's rows are multiplied by weights as ever: no rounding is between."""
    arrays = arrays_of(problems(rng, bias=None))
    got = jax.jit(jax.vmap(call))(arrays)
    for i, case in enumerate(problems(np.random.default_rng(0), bias=None)):
        oracle.check(got[i], case)


def test_no_copy_of_shared_weights(rng):
    arrays = arrays_of(problems(rng), ("b",))
    jaxpr = jax.make_jaxpr(jax.vmap(call, in_axes=(axes_of(arrays, ("b",)),)))(arrays).jaxpr
    (product,) = equations(jaxpr, "grouped_gemm")
    assert product.invars[-1].aval.shape == (4, 16, 24)
    assert product.params["call"].mapped_groups == BATCH * 5
    assert product.params["call"].l == 4


@pytest.mark.parametrize("axis", [1, 2, -1])
def test_other_axes(rng, axis):
    arrays = arrays_of(problems(rng), ("b", "alpha", "bias", "offsets"))
    a = jnp.moveaxis(arrays.pop("a"), 0, axis)
    prob = arrays.pop("prob").T
    f = lambda a, prob: grouped_gemm(a, prob=prob, **arrays)
    got = jax.vmap(f, in_axes=(axis, 1), out_axes=1)(a, prob)
    want = jax.vmap(f)(jnp.moveaxis(a, axis, 0), prob.T)
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32).transpose(1, 0, 2))


@pytest.mark.parametrize("shared", [("b",), ()])
def test_tuples(rng, shared):
    """Shared arrays are one call; batched ones a loop."""
    arrays = arrays_of(problems(rng, bias=None), shared)
    arrays = {name: jnp.nan_to_num(x) if name != "offsets" else x for name, x in arrays.items()}
    stack = arrays["b"] if shared else jnp.moveaxis(arrays["b"], 1, 0)
    separate = arrays | {"b": tuple(stack)}
    mapped = jax.vmap(call, in_axes=(axes_of(arrays, shared) | {"b": (None if shared else 0,) * 4},))
    same(jax.jit(mapped)(separate), jax.vmap(call, in_axes=(axes_of(arrays, shared),))(arrays))
    assert counts(mapped, separate) == [1, 0, 0 if shared else 1]


@pytest.mark.skipif(not library.LIBRARY.exists(), reason="the library is not built (make build)")
@pytest.mark.parametrize("shared", [(), ("b",)])
@pytest.mark.parametrize("x64", [False, True])
def test_pointers(rng, shared, x64):
    arrays = arrays_of(problems(rng), shared)
    arrays = {name: jnp.nan_to_num(x) if name != "offsets" else x for name, x in arrays.items()}
    want = jax.vmap(call, in_axes=(axes_of(arrays, shared),))(arrays)
    weights = [np.array(w) for w in arrays.pop("b").reshape(-1, 16, 24)]
    pointers = np.array([w.ctypes.data for w in weights], np.int64).reshape(-1, 4)
    if not x64:
        pointers = np.stack([row.view(np.uint8) for row in pointers])
    with jax.enable_x64(x64) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64(x64):
        pointers = jnp.asarray(pointers[0] if shared else pointers)
        f = lambda arrays, pointers: call(arrays, b_ptrs=pointers, n=16)
        mapped = jax.vmap(f, in_axes=(axes_of(arrays, shared), None if shared else 0))
        np.testing.assert_array_equal(jax.jit(mapped)(arrays, pointers), want)
        assert counts(mapped, arrays, pointers) == [1, 0, 0]


@pytest.mark.skipif(not library.LIBRARY.exists(), reason="the library is not built (make build)")
def test_addresses_of_experts_without_rows_are_not_read(rng):
    arrays = {name: x for name, x in arrays_of(problems(rng, bias=None), ("offsets",)).items() if name != "b"}
    weights = [np.ones((16, 24), oracle.BF16) for _ in range(3)]
    pointers = np.array([weights[0].ctypes.data, 0, weights[1].ctypes.data, weights[2].ctypes.data], np.int64)
    f = lambda arrays: call(arrays, b_ptrs=pointers, n=16)
    got = jax.vmap(f, in_axes=(axes_of(arrays, ("offsets",)),))(arrays | {"offsets": jnp.asarray([10, 10, 20, 27])})
    assert np.asarray(got)[0, :20].any(axis=1).all()


@pytest.mark.parametrize("b_batched", [(0, 0), (0, None), (None, 0), (None, None)])
def test_nested(rng, b_batched):
    """A call that has experts already."""
    arrays = arrays_of(problems(rng), ())
    arrays = {name: jnp.nan_to_num(x) if name != "offsets" else x for name, x in arrays.items()}
    b = arrays["b"][0]
    for axis in reversed(b_batched):
        b = b if axis is None else jnp.stack([b, 2 * b, -b])
    outer = {
        name: jnp.stack([x, x, x]) if name in ("offsets", "alpha") else jnp.stack([x, x, -x])
        for name, x in arrays.items()
    }
    outer["b"] = b
    inner_axes, outer_axes = (axes_of(outer, ()) | {"b": axis} for axis in reversed(b_batched))
    mapped = jax.vmap(jax.vmap(call, in_axes=(inner_axes,)), in_axes=(outer_axes,))
    got = jax.jit(mapped)(outer)
    assert counts(mapped, outer) == [1, 0, 0]
    for i in range(3):
        for j in range(3):
            of_b = b
            of_b = of_b[i] if b_batched[0] == 0 else of_b
            of_b = of_b[j] if b_batched[1] == 0 else of_b
            mine = {name: x[i, j] for name, x in outer.items() if name != "b"} | {"b": of_b}
            np.testing.assert_allclose(got[i, j], call(mine), rtol=1e-5, atol=1e-5)


def test_hostile_offsets(rng):
    """Of each call within its own rows."""
    arrays = arrays_of(problems(rng, poison=False), ("b",))
    arrays["offsets"] = jnp.asarray([[-5, 40, 10, 2**31 - 1], [2**31 - 1, 0, -(2**31), 5], [3, 2, 1, 31]], jnp.int32)
    jitted = jax.jit(call)
    same(jax.jit(jax.vmap(call, in_axes=(axes_of(arrays, ("b",)),)))(arrays), one_by_one(jitted, arrays, ("b",)))


def test_what_does_not_fit_is_a_loop(rng, monkeypatch):
    arrays = arrays_of(problems(rng), ("b",))
    arrays = {name: jnp.nan_to_num(x) if name != "offsets" else x for name, x in arrays.items()}
    mapped = jax.vmap(call, in_axes=(axes_of(arrays, ("b",)),))
    want = mapped(arrays)
    monkeypatch.setattr(contract, "SIZE_LIMIT", BATCH * 30)
    assert counts(mapped, arrays) == [1, 0, 1]
    same(jax.jit(lambda x: mapped(x))(arrays), want)


@pytest.mark.parametrize("size", [0, 1])
def test_small_batches(rng, size):
    arrays = {name: x[:size] for name, x in arrays_of(problems(rng)).items()}
    got = jax.vmap(call)(arrays)
    assert got.shape == (size, 30, 16)


def test_without_columns_of_a_the_bias_is_left(rng):
    cases = [
        oracle.make_case(rng, 4, 30, 16, 0, offsets=offsets, bias="float32", d_dtype="float32") for offsets in OFFSETS
    ]
    got = jax.vmap(call)(arrays_of(cases))
    for values, case in zip(got, cases, strict=True):
        oracle.check(values, case)


def test_under_the_debug_switch(rng, monkeypatch):
    arrays = arrays_of(problems(rng))
    want = jax.vmap(call)(arrays)
    monkeypatch.setenv("JAX_GROUPED_GEMM_DEBUG", "1")
    run = jax.jit(lambda arrays: jax.vmap(call)(arrays))
    np.testing.assert_array_equal(run(arrays), want)
    arrays["offsets"] = arrays["offsets"].at[2, 1].set(5)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"got offsets\[1\] = 5 after 7"):
        jax.block_until_ready(run(arrays))


# --- with gradients ---------------------------------------------------------------------------------------------------


def moving(arrays):
    return {name: x for name, x in arrays.items() if name != "offsets"}


def loss(moving, offsets, shared=()):
    f = lambda moving, offsets: jnp.sum(jnp.sin(call(moving | {"offsets": offsets})))
    axes = axes_of(moving, shared)
    return jnp.sum(jax.vmap(f, in_axes=(axes, 0))(moving, offsets))


@pytest.mark.parametrize("bias", [None, "float32"])
@pytest.mark.parametrize("shared", [(), ("b",), ("b", "alpha", "prob", "bias"), ("a",)], ids="-".join)
def test_grad_of_vmap(rng, bias, shared):
    shared = [name for name in shared if name != "bias" or bias]
    arrays = arrays_of(problems(rng, bias=bias), shared)
    if shared:
        arrays = {name: jnp.nan_to_num(x) if name != "offsets" else x for name, x in arrays.items()}
    got = jax.jit(jax.grad(functools.partial(loss, shared=shared)))(moving(arrays), arrays["offsets"])

    def one_after_another(moving, offsets):
        slices = [{name: x if name in shared else x[i] for name, x in moving.items()} for i in range(BATCH)]
        return sum(jnp.sum(jnp.sin(call(mine | {"offsets": offsets[i]}))) for i, mine in enumerate(slices))

    same(got, jax.jit(jax.grad(one_after_another))(moving(arrays), arrays["offsets"]), close=False)
    if "a" not in shared:
        assert not np.asarray(got["a"], np.float32)[0, 27:].any()
    found = counts(jax.grad(functools.partial(loss, shared=shared)), moving(arrays), arrays["offsets"])
    assert found[0] == 2
    assert found[1] == 2 + bool(bias)


@pytest.mark.parametrize("bias", [None, "float32"])
def test_vmap_of_grad(rng, bias):
    arrays = arrays_of(problems(rng, bias=bias))
    f = jax.grad(lambda moving, offsets: jnp.sum(jnp.sin(call(moving | {"offsets": offsets}))))
    got = jax.jit(jax.vmap(f))(moving(arrays), arrays["offsets"])
    for i in range(BATCH):
        mine = {name: x[i] for name, x in moving(arrays).items()}
        want = jax.jit(f)(mine, arrays["offsets"][i])
        same({name: x[i] for name, x in got.items()}, want, close=False)
    assert counts(jax.vmap(f), moving(arrays), arrays["offsets"]) == [2, 2 + bool(bias), 0]


def test_vmap_of_a_tangent(rng):
    """As jacfwd does it: the tangents are batched, the operands are not."""
    arrays = arrays_of(problems(rng))
    mine = {name: x[0] for name, x in arrays.items()}
    offsets = mine.pop("offsets")
    along = {name: jnp.stack([jnp.ones_like(x), -2 * jnp.ones_like(x)]) for name, x in mine.items()}
    tangent = lambda t: jax.jvp(lambda x: call(x | {"offsets": offsets}), (mine,), (t,))[1]
    got = jax.jit(jax.vmap(tangent))(along)
    np.testing.assert_allclose(got[1], -2 * got[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got[0], tangent({name: x[0] for name, x in along.items()}), rtol=1e-5, atol=1e-5)


# --- wgrad ------------------------------------------------------------------------------------------------------------


def wgrad_arrays(rng, total=True, alpha=True):
    cases = problems(rng)
    arrays = {
        "x": jnp.asarray(rng.standard_normal((BATCH, 30, 16)), jnp.bfloat16),
        "y": arrays_of(cases)["a"],
        "offsets": arrays_of(cases)["offsets"],
    }
    if alpha:
        arrays["alpha"] = jnp.asarray(rng.uniform(1, 2, (BATCH, 4)), jnp.float32)
    if total:
        arrays["accumulate_into"] = jnp.asarray(rng.standard_normal((BATCH, 4, 16, 24)), jnp.float32)
    return arrays


def wgrad(arrays):
    return grouped_gemm_wgrad(**arrays)


@pytest.mark.parametrize("total", [False, True])
@pytest.mark.parametrize(
    "shared", [(), ("offsets",), ("alpha",), ("accumulate_into",), ("x",), ("y",), ("x", "y", "offsets")], ids="-".join
)
def test_wgrad(rng, shared, total):
    arrays = wgrad_arrays(rng, total)
    shared = [name for name in shared if name in arrays]
    arrays |= {name: arrays[name][0] for name in shared}
    arrays["y"] = jnp.nan_to_num(arrays["y"]) if shared else arrays["y"]
    mapped = jax.vmap(wgrad, in_axes=(axes_of(arrays, shared),))
    same(jax.jit(mapped)(arrays), one_by_one(wgrad, arrays, shared))
    assert counts(mapped, arrays) == [0, 1, 0]


@pytest.mark.parametrize("sizes", [(0,), (0, 2), (2, 0)])
def test_wgrads_of_no_calls(sizes):
    mapped = functools.reduce(lambda f, _: jax.vmap(f), sizes, wgrad)
    shapes = {"x": (30, 16), "y": (30, 24)}
    arrays = {name: jnp.ones((*sizes, *shape), jnp.bfloat16) for name, shape in shapes.items()}
    assert mapped(arrays | {"offsets": jnp.ones((*sizes, 4), jnp.int32)}).shape == (*sizes, 4, 16, 24)


def test_nested_wgrad(rng):
    arrays = wgrad_arrays(rng)
    outer = {name: jnp.stack([x, x]) if name == "offsets" else jnp.stack([x, -x]) for name, x in arrays.items()}
    got = jax.jit(jax.vmap(jax.vmap(wgrad)))(outer)
    assert counts(jax.vmap(jax.vmap(wgrad)), outer) == [0, 1, 0]
    for i in range(2):
        same(got[i], one_by_one(wgrad, {name: x[i] for name, x in outer.items()}, ()))


def test_gradients_of_batched_wgrads(rng):
    arrays = wgrad_arrays(rng)
    offsets = arrays.pop("offsets")

    def of_one(moving, offsets):
        return jnp.sum(jnp.sin(wgrad(moving | {"offsets": offsets})))

    got = jax.jit(jax.vmap(jax.grad(of_one)))(arrays, offsets)
    other = jax.jit(jax.grad(lambda moving: jnp.sum(jax.vmap(of_one)(moving, offsets))))(arrays)
    for i in range(BATCH):
        want = jax.grad(of_one)({name: x[i] for name, x in arrays.items()}, offsets[i])
        same({name: x[i] for name, x in got.items()}, want, close=False)
        same({name: x[i] for name, x in other.items()}, want, close=False)


def test_a_batch_fits_by_its_largest_extent(monkeypatch):
    call = calls.Call(30, 16, 24, 4, "k", "dense", "float32", False, False, None)
    monkeypatch.setattr(contract, "SIZE_LIMIT", 90)
    assert batching._fits(2, call)
    assert not batching._fits(3, call)
    assert not batching._fits(3, dataclasses.replace(call, m=1, mapped_groups=29))
