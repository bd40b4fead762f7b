"""Several GPUs: the kernels and the reference under shard_map, automatic partitioning and explicit axes."""

import functools
import math

import exports
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import sharding_problems
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_grouped_gemm import ffi_call, grouped_gemm, library, log, ragged_dot

OFFSETS = [100, 100, 333, 500, 650, 651, 900, 1000]
L, M, N, K = 8, 1024, 512, 256


def gpus():
    try:
        return jax.devices("cuda")
    except RuntimeError:
        return []


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(len(gpus()) < 2, reason="fewer than two GPUs")]


@pytest.fixture(
    params=[
        pytest.param("cutedsl", marks=pytest.mark.skipif(not ffi_call.architectures(), reason="no kernels for them")),
        "reference",
    ]
)
def implementation(request):
    return request.param


LAYOUTS = {
    "rows": (P("x"), P()),
    "columns": (P(), P(None, "x")),
    "contraction": (P(), P(None, None, "x")),
    "experts": (P(), P("x")),
    "rows and experts": (P("x"), P("x")),
    "rows and columns": (P("x"), P(None, "x")),
}


def make_mesh(**options):
    return jax.sharding.Mesh(np.array(gpus()[:2]), ("x",), **options)


def make(kind):
    options = sharding_problems.KINDS[kind]
    return oracle.make_case(np.random.default_rng(0), L, M, N, K, offsets=OFFSETS, **options)


def outputs_of(case):
    return sharding_problems.random_outputs(case, 1)


def check(got, case, outputs):
    found, gradients = got
    oracle.check(found, case)
    oracle.check_cotangents(gradients, case, outputs, roundings=4)


def assert_runs(compiled, implementation):
    """The kernels are in the program, for both passes, or not."""
    for target in (library.FORWARD, library.WGRAD):
        assert (target in compiled.as_text()) == (implementation == "cutedsl")


@pytest.mark.parametrize("kind", sharding_problems.KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_automatic_partitioning(layout, kind, implementation):
    rows, weights = LAYOUTS[layout]
    case, mesh = make(kind), make_mesh()
    outputs = outputs_of(case)
    arrays, options = sharding_problems.split(case)
    call = lambda arrays: grouped_gemm(**arrays, **options, implementation=implementation)
    of = sharding_problems.specs(rows, weights)
    arrays = {name: jax.device_put(x, NamedSharding(mesh, of[name])) for name, x in arrays.items()}
    result = NamedSharding(mesh, sharding_problems.of_result(rows, weights))
    outputs_there = jax.device_put(outputs, result)
    wanted = result, {name: arrays[name].sharding for name in oracle.present(case)}
    run = jax.jit(sharding_problems.both(case, call), out_shardings=wanted).lower(arrays, outputs_there).compile()
    assert_runs(run, implementation)
    check(run(arrays, outputs_there), case, outputs)


@pytest.mark.parametrize("kind", sharding_problems.KINDS)
def test_shard_map(kind, implementation):
    case, mesh = make(kind), make_mesh()
    outputs = outputs_of(case)
    arrays, options = sharding_problems.split(case)

    def local(arrays):
        ends = sharding_problems.local_ends(arrays["offsets"], arrays["a"].shape[0])
        return grouped_gemm(**(arrays | {"offsets": ends}), **options, implementation=implementation)

    of = {name: spec for name, spec in sharding_problems.specs(P("x"), P()).items() if name in arrays}
    call = jax.shard_map(local, mesh=mesh, in_specs=(of,), out_specs=P("x"))
    arrays = {name: jax.device_put(x, NamedSharding(mesh, of[name])) for name, x in arrays.items()}
    outputs_there = jax.device_put(outputs, NamedSharding(mesh, P("x")))
    run = jax.jit(sharding_problems.both(case, call)).lower(arrays, outputs_there).compile()
    assert_runs(run, implementation)
    check(run(arrays, outputs_there), case, outputs)


@pytest.mark.parametrize("kind", sharding_problems.KINDS)
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_explicit_axes(layout, kind, implementation):
    rows, weights = LAYOUTS[layout]
    case, mesh = make(kind), make_mesh(axis_types=(jax.sharding.AxisType.Explicit,))
    outputs = outputs_of(case)
    arrays, options = sharding_problems.split(case)
    of = sharding_problems.specs(rows, weights)
    arrays = {name: jax.device_put(x, NamedSharding(mesh, of[name])) for name, x in arrays.items()}
    result = NamedSharding(mesh, sharding_problems.of_result(rows, weights))
    call = lambda arrays: grouped_gemm(**arrays, **options, implementation=implementation)
    outputs_there = jax.device_put(outputs, result)
    run = jax.jit(sharding_problems.both(case, call)).lower(arrays, outputs_there).compile()
    assert_runs(run, implementation)
    found, gradients = run(arrays, outputs_there)
    assert jax.tree.leaves(found)[0].sharding.is_equivalent_to(result, 2)
    for name, x in gradients.items():
        assert x.sharding.is_equivalent_to(arrays[name].sharding, x.ndim), name
    check((found, gradients), case, outputs)


@pytest.mark.parametrize("layout", ["contraction", "experts", "rows and experts"])
def test_gradients_of_weights_are_sharded_as_the_weights(layout, implementation):
    """Where nothing else says how they are wanted."""
    rows, weights = LAYOUTS[layout]
    case, mesh = make("plain"), make_mesh()
    (outputs,) = outputs_of(case)
    arrays, options = sharding_problems.split(case)
    of = sharding_problems.specs(rows, weights)
    arrays = {name: jax.device_put(x, NamedSharding(mesh, of[name])) for name, x in arrays.items()}
    call = lambda b, arrays: grouped_gemm(**(arrays | {"b": b}), **options, implementation=implementation)
    outputs_there = jax.device_put(outputs, NamedSharding(mesh, sharding_problems.of_result(rows, weights)))
    pull = jax.jit(lambda arrays, d: jax.vjp(lambda b: call(b, arrays), arrays["b"])[1](d)[0])
    got = pull(arrays, outputs_there)
    assert got.sharding.is_equivalent_to(arrays["b"].sharding, 3)
    oracle.check_cotangents({"b": got}, case, [outputs], roundings=4)


@pytest.mark.parametrize("spec", [P("x"), P(None, "x")], ids=["batch", "experts"])
def test_vmap_over_weights(spec, implementation):
    """They stay where they are, and their gradients are there."""
    case = make("plain")
    (outputs,) = outputs_of(case)
    b = jnp.stack([jnp.asarray(case.b), -jnp.asarray(case.b)])
    there = jax.device_put(b, NamedSharding(make_mesh(), spec))
    one = functools.partial(grouped_gemm, offsets=jnp.asarray(case.offsets), implementation=implementation)

    def run(b):
        found, pull = jax.vjp(lambda b: jax.vmap(one, (None, 0))(jnp.asarray(case.a), b), b)
        return found, pull(jnp.stack([outputs, outputs]))[0]

    compiled = jax.jit(run).lower(there).compile()
    assert_runs(compiled, implementation)
    for operation, shape in sharding_problems.collectives(compiled.as_text()):
        assert operation in ("all-reduce", "reduce-scatter") or math.prod(shape) < b.size // 2, (operation, shape)
    found, gradient = compiled(there)
    assert gradient.sharding.is_equivalent_to(there.sharding, 4)
    oracle.check(found[0], case)
    np.testing.assert_array_equal(found[1], -found[0])
    for i in range(2):
        oracle.check_cotangents({"b": gradient[i]}, case, [outputs], roundings=4)


def test_scan_with_remat(implementation):
    """Of layers whose experts are sharded."""
    case = make("plain")
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.standard_normal((M, K)), jnp.bfloat16)
    weights = jnp.asarray(rng.standard_normal((3, L, N, K)) * (N * K) ** -0.25, jnp.bfloat16)
    one = functools.partial(grouped_gemm, offsets=jnp.asarray(case.offsets), implementation=implementation)

    @jax.checkpoint
    def layer(x, w):
        return jnp.tanh(one(jnp.tanh(one(x, w)), w, b_major="n")), None

    def loss(weights, x):
        return jnp.sum(jax.lax.scan(layer, x, weights)[0].astype(jnp.float32) ** 2)

    run = jax.jit(jax.value_and_grad(loss, (0, 1)))
    mesh = make_mesh()
    there = jax.device_put(weights, NamedSharding(mesh, P(None, "x"))), jax.device_put(x, NamedSharding(mesh, P()))
    compiled = run.lower(*there).compile()
    assert_runs(compiled, implementation)
    got = jax.tree.leaves(compiled(*there))
    assert got[1].sharding.is_equivalent_to(there[0].sharding, 4)
    for found, want in zip(got, jax.tree.leaves(run(weights, x)), strict=True):
        found, want = (np.asarray(x).astype(np.float64) for x in (found, want))
        assert np.linalg.norm(found - want) <= 2.0**-6 * np.linalg.norm(want)


def test_exported(implementation):
    """A program of shard_map, with both passes, serialised."""
    case, mesh = make("plain"), make_mesh()
    a, b, offsets = jnp.asarray(case.a), jnp.asarray(case.b), jnp.asarray(case.offsets)

    def local(a, b, offsets):
        ends = sharding_problems.local_ends(offsets, a.shape[0])
        d, pull = jax.vjp(lambda a, b: grouped_gemm(a, b, offsets=ends, implementation=implementation), a, b)
        return d, *pull(d)

    results = P("x"), P("x"), P()
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P("x"), P(), P()), out_specs=results))
    operands = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in ((a, P("x")), (b, P()), (offsets, P()))]
    program = exports.export(run, operands, None).serialize()
    exported = jax.export.deserialize(program)
    for found, want in zip(exported.call(*operands), run(*operands), strict=True):
        np.testing.assert_array_equal(found.astype(np.float32), want.astype(np.float32))


def test_ragged_dot_has_parts_that_the_kernels_do_not_take(caplog):
    """Of 4 columns each: the reference does them, as JAX does what is of such a size in all."""
    case = oracle.make_case(
        np.random.default_rng(0), L, M, 8, K, offsets=OFFSETS, alpha=False, prob=False, poison=False
    )
    sizes, rhs = jnp.diff(jnp.asarray(case.offsets), prepend=0), jnp.swapaxes(jnp.asarray(case.b), 1, 2)

    def run(dot, lhs, rhs):
        out, pull = jax.vjp(lambda lhs, rhs: dot(lhs, rhs, sizes), lhs, rhs)
        return out, *pull(out)

    there = jax.device_put(rhs, NamedSharding(make_mesh(), P(None, None, "x")))
    log.once.cache_clear()
    got = jax.jit(functools.partial(run, ragged_dot))(case.a, there)
    if ffi_call.architectures():
        assert "the reference implementation, which is slow on a GPU: N is 4, no multiple of 8" in caplog.text
    for x, want in zip(got, run(jax.lax.ragged_dot, jnp.asarray(case.a), rhs), strict=True):
        np.testing.assert_allclose(x.astype(np.float32), want.astype(np.float32), rtol=0.02, atol=0.1)
