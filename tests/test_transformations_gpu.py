"""JAX's transformations around the kernels on a GPU, and around the reference on a CPU, against the float64 oracle."""

import functools

import exports
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import test_ragged
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_grouped_gemm as jgg
from jax_grouped_gemm import ffi_call, grouped_gemm, grouped_gemm_wgrad, library

L, M, N, K = 5, 700, 136, 72
BATCH = 3


@pytest.fixture(params=["reference", pytest.param("cutedsl", marks=pytest.mark.gpu)])
def implementation(request):
    return request.param


# Without one, `prob` is a factor of the product, and its gradient is made of another.
biases = pytest.mark.parametrize("bias", [None, "float32"])


def make(seed, **options):
    return oracle.make_case(np.random.default_rng(seed), L, M, N, K, **{"bias": "float32"} | options)


def cotangent(case, seed):
    return oracle.random_cotangent(np.random.default_rng(100 + seed), case, "D")


def arrays_of(case):
    return {name: jnp.asarray(getattr(case, name)) for name in (*oracle.present(case), "offsets")}


def pulled(arrays, d, **options):
    """(D, the cotangents of all floating operands by name)."""
    moving = {name: x for name, x in arrays.items() if name != "offsets"}
    out, pull = jax.vjp(lambda moving: grouped_gemm(**moving, offsets=arrays["offsets"], **options), moving)
    return out, pull(d)[0]


@biases
@pytest.mark.parametrize("shared", [(), ("b", "alpha", "bias"), ("a", "prob")], ids=str)
def test_vmap(implementation, shared, bias):
    """One launch for the batch. Values and gradients, those of what is shared one call's at a time."""
    first = make(0, poison=False, bias=bias)
    cases = [make(seed, poison=not shared, bias=bias) for seed in range(BATCH)]
    for case in cases:
        for name in shared:
            setattr(case, name, getattr(first, name))
    ds = [np.nan_to_num(cotangent(case, seed)) if shared else cotangent(case, seed) for seed, case in enumerate(cases)]
    arrays = {
        name: jnp.asarray(getattr(first, name) if name in shared else np.stack([getattr(case, name) for case in cases]))
        for name in arrays_of(first)
    }
    axes = {name: None if name in shared else 0 for name in arrays}
    run = jax.jit(jax.vmap(functools.partial(pulled, implementation=implementation), (axes, 0)))
    out, gradients = run(arrays, jnp.stack([jnp.asarray(d) for d in ds]))
    for i, (case, d) in enumerate(zip(cases, ds, strict=True)):
        oracle.check(out[i], case)
        oracle.check_cotangents({name: x[i] for name, x in gradients.items()}, case, (d,))


def test_vmap_of_wgrad(implementation):
    cases = [oracle.make_wgrad_case(np.random.default_rng(seed), L, M, N, K, accumulate=True) for seed in range(BATCH)]
    arguments = [case.arguments() for case in cases]
    arrays = {name: jnp.stack([each[name] for each in arguments]) for name in arguments[0] if name != "d_dtype"}
    got = jax.jit(jax.vmap(lambda arrays: grouped_gemm_wgrad(**arrays, implementation=implementation)))(arrays)
    for d, case in zip(got, cases, strict=True):
        oracle.wgrad_check(d, case)


def layers(implementation, checkpoint):
    """A loss of four layers by scan, each a square product and a nonlinearity."""
    offsets = jnp.array([100, 100, 333, 650], jnp.int32)

    def layer(x, weights):
        y = grouped_gemm(x, weights, offsets=offsets, d_dtype="float32", implementation=implementation)
        return jnp.tanh(y).astype(jnp.bfloat16), None

    def loss(x, stack):
        body = jax.checkpoint(layer) if checkpoint else layer
        return jnp.sum(jnp.square(jax.lax.scan(body, x, stack)[0].astype(jnp.float32)))

    return loss


def test_scan_and_remat(implementation):
    """With remat, bit for bit what it is without; and what plain JAX makes of the same program."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((M, K)), jnp.bfloat16)
    stack = jnp.asarray(rng.standard_normal((4, 4, K, K)) / 8, jnp.bfloat16)
    run = lambda implementation, checkpoint: jax.jit(jax.value_and_grad(layers(implementation, checkpoint), (0, 1)))(
        x, stack
    )
    got = run(implementation, False)
    for with_remat, without in zip(jax.tree.leaves(run(implementation, True)), jax.tree.leaves(got), strict=True):
        np.testing.assert_array_equal(np.asarray(with_remat), np.asarray(without))
    for ours, plain in zip(jax.tree.leaves(got), jax.tree.leaves(run("reference", False)), strict=True):
        ours, plain = np.asarray(ours, np.float64), np.asarray(plain, np.float64)
        assert np.linalg.norm(ours - plain) <= 0.01 * np.linalg.norm(plain)


def test_forward_mode(implementation):
    """The tangent along one direction is the sum over D's cotangent's, by the transposed."""
    case = make(1, poison=False, d_dtype="float32")
    d = np.nan_to_num(cotangent(case, 1))
    arrays = arrays_of(case)
    offsets = arrays.pop("offsets")
    rng = np.random.default_rng(2)
    along = {name: jnp.asarray(rng.standard_normal(x.shape), x.dtype) for name, x in arrays.items()}
    run = lambda moving: grouped_gemm(**moving, offsets=offsets, d_dtype="float32", implementation=implementation)
    out, tangent = jax.jit(lambda moving, along: jax.jvp(run, (moving,), (along,)))(arrays, along)
    oracle.check(out, case)
    want = oracle.cotangents(case, d)
    forward = np.sum(np.asarray(tangent, np.float64) * d)
    terms = [np.asarray(along[name], np.float64) * want[name][0] for name in along]
    backward, scale = (sum(f(term) for term in terms) for f in (np.sum, lambda term: np.sqrt(np.sum(term**2))))
    assert abs(forward - backward) <= 0.02 * scale


@biases
@pytest.mark.parametrize("kind", ["shard_map", "automatic", "explicit"])
def test_on_a_mesh_of_one_device(implementation, kind, bias):
    case = make(3, bias=bias)
    d = cotangent(case, 3)
    types = jax.sharding.AxisType
    device = jax.devices("cuda" if implementation == "cutedsl" else "cpu")[0]
    mesh = jax.sharding.Mesh(
        np.array([device]), ("x",), axis_types=(types.Explicit if kind == "explicit" else types.Auto,)
    )
    of = {"a": P("x"), "prob": P("x")}
    arrays = {name: jax.device_put(x, NamedSharding(mesh, of.get(name, P()))) for name, x in arrays_of(case).items()}
    d_placed = jax.device_put(d, NamedSharding(mesh, P("x")))
    run = functools.partial(pulled, implementation=implementation)
    if kind == "shard_map":
        specs = {name: of.get(name, P()) for name in arrays}
        moving = {name: spec for name, spec in specs.items() if name != "offsets"}
        run = jax.shard_map(run, mesh=mesh, in_specs=(specs, P("x")), out_specs=(P("x"), moving))
    out, gradients = jax.jit(run)(arrays, d_placed)
    oracle.check(out, case)
    oracle.check_cotangents(gradients, case, (d,))


def test_exported_to_a_fresh_process(implementation, tmp_path):
    """Forward and backward; the same bits."""
    case = make(4, poison=False, alpha=False, prob=False, bias=None)
    operands = case.a, case.b, case.offsets

    def run(a, b, offsets):
        out, gradients = pulled({"a": a, "b": b, "offsets": offsets}, jnp.ones((M, N), jnp.bfloat16))
        return out, gradients["a"], gradients["b"]

    platform = "cuda" if implementation == "cutedsl" else "cpu"
    exported = exports.export(run, operands, [platform])
    assert (f"@{library.WGRAD}" in exported.mlir_module()) == (implementation == "cutedsl")
    here = jax.jit(run)(*map(jnp.asarray, operands))
    for fresh, x in zip(exports.elsewhere(exported, operands, tmp_path, platform), here, strict=True):
        np.testing.assert_array_equal(fresh, np.asarray(x).astype(np.float32))


@pytest.mark.parametrize("wide", [None, 0, 1], ids=["bfloat16", "lhs of float32", "rhs of float32"])
@pytest.mark.parametrize("name", test_ragged.MIXED)
def test_every_mode_of_ragged_dot(implementation, name, wide):
    """By the public function, which chooses by platform, and its gradients; against float64."""
    lhs, rhs, sizes, dims, *_ = test_ragged.problem(name) if wide is None else test_ragged.mixed(name, wide)
    with jax.default_device(jax.devices("cpu")[0]):
        product = lambda lhs, rhs: test_ragged.masked(lhs, rhs, sizes, dims)
        want = test_ragged.in_float64(product, lhs, rhs)
        ct = np.random.default_rng(8).standard_normal(want.shape, np.float32)
        exact = test_ragged.in_float64(lambda lhs, rhs, ct: jax.vjp(product, lhs, rhs)[1](ct), lhs, rhs, ct)
    platform = "cuda" if implementation == "cutedsl" else "cpu"
    assert ffi_call.choose(platform, None).kernels == (implementation == "cutedsl")

    @jax.jit
    def run(lhs, rhs, sizes, ct):
        of_sizes = lambda lhs, rhs: jgg.ragged_dot_general(lhs, rhs, sizes, dims, None, jnp.float32)
        out, pull = jax.vjp(of_sizes, lhs, rhs)
        return out, pull(ct)

    got, gradients = run(*jax.device_put((lhs, rhs, sizes, ct), jax.devices(platform)[0]))
    test_ragged.close(np.asarray(got), want, 2.0**-20 if wide is None else 2.0**-15)
    for i, (x, y) in enumerate(zip(gradients, exact, strict=True)):
        assert x.dtype == (lhs, rhs)[i].dtype
        if i == wide:
            test_ragged.close(x, y, 2.0**-15)
        else:
            assert np.linalg.norm(np.asarray(x, np.float64) - y) <= 2.0**-8 * np.linalg.norm(y)
