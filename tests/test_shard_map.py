"""Several devices: shard_map, explicit axes, ragged_dot and exports, on virtual CPU devices, against the float64 oracle."""

import contextlib
import functools
import inspect
import types

import exports
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharding_problems import (
    KINDS,
    LAYOUTS,
    OFFSETS,
    K,
    L,
    M,
    N,
    assert_weights_stay,
    both,
    collectives,
    explicit_mesh,
    local_ends,
    make,
    needs_eight,
    of_result,
    pulled,
    put,
    random_outputs,
    set_mesh,
    specs,
    split,
)

import jax_grouped_gemm as jgg
from jax_grouped_gemm import acceleration, ffi_call, grouped_gemm, grouped_gemm_wgrad, library, ragged

pytestmark = needs_eight


# --- shard_map --------------------------------------------------------------------------------------------------------


def sharded_rows(mesh, case):
    """The case with its rows along x, the weights replicated, varying axes checked."""
    arrays, options = split(case)

    def local(arrays):
        ends = local_ends(arrays["offsets"], arrays["a"].shape[0])
        return grouped_gemm(**(arrays | {"offsets": ends}), **options)

    of = {name: spec for name, spec in specs(P("x"), P()).items() if name in arrays}
    return jax.shard_map(local, mesh=mesh, in_specs=(of,), out_specs=P("x")), arrays


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_shard_map(mesh, kind, jit):
    case = make(kind)
    run, arrays = sharded_rows(mesh, case)
    oracle.check((jax.jit(run) if jit else run)(arrays), case)


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_of_a_shard_map(mesh, kind):
    """Replicated weights are summed over the devices, and so are alpha and bias; nobody writes a psum."""
    case = make(kind)
    outputs = random_outputs(case)
    run, arrays = sharded_rows(mesh, case)

    @jax.jit
    def pull(arrays, outputs):
        moving = {name: arrays[name] for name in oracle.present(case)}
        _, pull = jax.vjp(lambda moving: run({"offsets": arrays["offsets"]} | moving), moving)
        return pull(outputs if case.generate_c else outputs[0])[0]

    oracle.check_cotangents(pull(arrays, outputs), case, outputs, roundings=4)


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_inside_a_shard_map(mesh, kind):
    case = make(kind)
    outputs = random_outputs(case)
    arrays, _ = split(case)
    of = {name: spec for name, spec in specs(P("x"), P()).items() if name in arrays}

    def local(arrays, outputs):
        ends = local_ends(arrays["offsets"], arrays["a"].shape[0])
        return pulled(case)(arrays | {"offsets": ends}, outputs)

    wanted = {name: of[name] for name in oracle.present(case)}
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(of, P("x")), out_specs=wanted))
    oracle.check_cotangents(run(arrays, outputs), case, outputs, roundings=4)


def test_forward_mode_in_a_shard_map(mesh):
    case = make("bias", poison=False)
    run, arrays = sharded_rows(mesh, case)
    offsets = arrays.pop("offsets")
    tangents = {name: x[::-1] for name, x in arrays.items()}
    along = lambda f: jax.jit(lambda arrays: jax.jvp(lambda x: f({"offsets": offsets} | x), (arrays,), (tangents,))[1])
    options = split(case)[1]
    for got, want in zip(along(run)(arrays), along(lambda x: grouped_gemm(**x, **options))(arrays), strict=True):
        np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), rtol=0.02, atol=0.02)


def test_what_varies(mesh):
    """The result does over what any operand does, integers too; a psum is needed before it is told to be replicated."""
    case = make(poison=False)

    def mapped(local, weights=(), **options):
        return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P(), P(*weights), P()), **options))

    def experts(a, b, offsets):  # expert parallelism: weights along x, all else replicated
        first = jax.lax.axis_index("x") * b.shape[0]
        ends = jax.lax.dynamic_slice_in_dim(offsets, first, b.shape[0])
        begin = jnp.where(first == 0, 0, offsets[jnp.maximum(first - 1, 0)])
        d = grouped_gemm(jnp.roll(a, -begin, 0), b, offsets=ends - begin, d_dtype="float32")
        return jnp.roll(d, begin, 0)

    operands = case.a, case.b, case.offsets
    run = mapped(lambda *x: jax.lax.psum(experts(*x), "x"), weights=("x",), out_specs=P())
    oracle.assert_close(run(*operands), oracle.oracle(case), make(poison=False, d_dtype="float32"))
    with pytest.raises(ValueError, match="vary|varying|replica"):
        mapped(experts, weights=("x",), out_specs=P())(*operands)
    only_offsets = lambda a, b, offsets: grouped_gemm(a, b, offsets=offsets + 0 * jax.lax.axis_index("y"))
    with pytest.raises(ValueError, match="vary|varying|replica"):
        mapped(only_offsets, out_specs=P())(*operands)
    oracle.check(mapped(only_offsets, out_specs=P("y"))(*operands)[:M], case)

    def gradient(a, b, offsets):
        loss = lambda a: jax.lax.psum((experts(a, b, offsets) ** 2).sum(), "x")
        return jax.grad(loss)(a)

    want = jax.grad(lambda a: (grouped_gemm(a, case.b, offsets=case.offsets, d_dtype="float32") ** 2).sum())
    got = mapped(gradient, weights=("x",), out_specs=P())(*operands)
    np.testing.assert_allclose(
        got.astype(np.float32), want(jnp.asarray(case.a)).astype(np.float32), rtol=0.02, atol=0.05
    )


def test_wgrad_in_a_shard_map(mesh):
    case = oracle.make_wgrad_case(np.random.default_rng(5), L, M, N, K, offsets=OFFSETS, alpha=False, d_dtype="float32")
    local = lambda x, y, offsets: jax.lax.psum(
        grouped_gemm_wgrad(x, y, offsets=local_ends(offsets, x.shape[0]), d_dtype="float32"), "x"
    )
    run = jax.shard_map(local, mesh=mesh, in_specs=(P("x"), P("x"), P()), out_specs=P())
    oracle.wgrad_check(jax.jit(run)(case.x, case.y, case.offsets), case)


# --- explicit axes ----------------------------------------------------------------------------------------------------

EXPLICIT = {"rows": (P("x"), P()), "columns": (P(), P(None, "y")), "both": (P("x"), P(None, "y"))}


@pytest.mark.parametrize("in_context", [False, True])
@pytest.mark.parametrize("kind", ["scaled", "bias"])
@pytest.mark.parametrize("layout", EXPLICIT)
def test_explicit_axes(layout, kind, in_context):
    rows, weights = EXPLICIT[layout]
    case = make(kind)
    outputs = random_outputs(case)
    arrays, options = split(case)
    mesh = explicit_mesh()
    result = of_result(rows, weights)
    with set_mesh(mesh) if in_context else contextlib.nullcontext():
        sharded = {name: put(mesh, x, specs(rows, weights)[name]) for name, x in arrays.items()}

        def run(arrays):
            found = grouped_gemm(**arrays, **options)
            for x in found if case.generate_c else (found,):
                assert jax.typeof(x).sharding.spec == P(*result, *[None] * (2 - len(result)))
            return found

        found = jax.jit(run)(sharded)
        oracle.check(found, case)
        assert jax.tree.leaves(found)[0].sharding.is_equivalent_to(NamedSharding(mesh, result), 2)
        oracle.check(run(sharded), case)
        got = jax.jit(pulled(case))(sharded, tuple(put(mesh, x, result) for x in outputs))
        for name, x in got.items():
            assert x.sharding.is_equivalent_to(sharded[name].sharding, x.ndim), name
        oracle.check_cotangents(got, case, outputs)


@pytest.mark.parametrize(
    "wrap", [jax.jit, jax.checkpoint, lambda f: jax.jit(jax.checkpoint(f))], ids=["jit", "remat", "both"]
)
def test_derivatives_from_outside_of_a_program(wrap):
    """On explicit axes. What is kept in between has the types of the operands, and no product is made twice."""
    case = make(d_dtype="float32")
    outputs = random_outputs(case)
    mesh = explicit_mesh()
    with set_mesh(mesh):
        arrays, options = split(case)
        arrays = {name: put(mesh, x, specs(P("x"), P(None, "y"))[name]) for name, x in arrays.items()}
        d = tuple(put(mesh, x, P("x", "y")) for x in outputs)
        run = both(case, wrap(lambda arrays: grouped_gemm(**arrays, **options)))
        found, got = run(arrays, d)
        oracle.check(found, case)
        oracle.check_cotangents(got, case, outputs)
        for name, x in got.items():
            assert x.sharding.is_equivalent_to(arrays[name].sharding, x.ndim), name
        products = str(jax.make_jaxpr(jax.jit(run))(arrays, d))
        if wrap is jax.jit:
            assert [products.count(f" = {name}[") for name in ("grouped_gemm", "grouped_wgrad")] == [2, 1]
        along = {name: jnp.ones_like(x) for name, x in arrays.items() if name in oracle.present(case)}
        linear = lambda moving: wrap(lambda moving: grouped_gemm(**(arrays | moving), **options))(moving)
        tangent = jax.linearize(linear, {name: arrays[name] for name in along})[1](along)
        assert tangent.sharding.is_equivalent_to(found.sharding, 2)


def test_explicit_axes_of_sizes():
    case = make()
    mesh = explicit_mesh()
    sizes = np.diff(case.offsets, prepend=0).astype(np.int32)
    with set_mesh(mesh):
        a, b, sizes = put(mesh, case.a, P("y")), put(mesh, case.b, P()), put(mesh, sizes, P("x"))
        oracle.check(grouped_gemm(a, b, group_sizes=sizes), case)
        oracle.check(jax.jit(lambda *x: grouped_gemm(*x[:2], group_sizes=x[2]))(a, b, sizes), case)


def test_explicit_axes_of_ragged_dot():
    case = make()
    mesh = explicit_mesh()
    sizes = np.diff(case.offsets, prepend=0).astype(np.int32)
    with set_mesh(mesh):
        a, b = put(mesh, case.a, P("x")), put(mesh, case.b.swapaxes(1, 2), P(None, None, "y"))
        for sharded in (P(), P("x")):
            found = jgg.ragged_dot(a, b, put(mesh, sizes, sharded))
            assert jax.typeof(found).sharding.spec == P("x", "y")
            oracle.check(found, case)


def test_explicit_axes_of_constants(partitioner):
    """No argument of the program is sharded: XLA's shardings name no axes, the types do."""
    case = make()
    mesh = explicit_mesh()
    with set_mesh(mesh):
        a, b, offsets = put(mesh, case.a, P("x")), put(mesh, case.b, P(None, "y")), put(mesh, case.offsets, P())
        oracle.check(jax.jit(lambda: grouped_gemm(a, b, offsets=offsets))(), case)
        linear = lambda a: grouped_gemm(a, b, offsets=offsets).astype(jnp.float32).sum()
        got = jax.jit(jax.grad(linear))(a)  # of which nothing is used
        assert got.sharding.is_equivalent_to(a.sharding, 2)
        want = jax.grad(lambda a: grouped_gemm(a, case.b, offsets=case.offsets).astype(jnp.float32).sum())(
            jnp.asarray(case.a)
        )
        np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), rtol=0.02, atol=0.1)


def test_empty_results_have_the_types_of_others(mesh):
    of_explicit = explicit_mesh()
    with set_mesh(of_explicit):
        a = put(of_explicit, jnp.zeros((8, 0), jnp.bfloat16), P("x"))
        b = put(of_explicit, jnp.zeros((3, 16, 0), jnp.bfloat16), P(None, "y"))
        d = jax.jit(lambda a, b: grouped_gemm(a, b, offsets=jnp.array([2, 2, 7])))(a, b)
        assert jax.typeof(d).sharding.spec == P("x", "y")

    for run in (jgg.ragged_dot, jax.jit(jgg.ragged_dot)):  # outside of set_mesh, as JAX's own products
        a, b = (
            put(of_explicit, jnp.zeros((0, 8), jnp.bfloat16), P()),
            put(of_explicit, jnp.ones((3, 8, 16), jnp.bfloat16), P()),
        )
        assert run(a, b, jnp.zeros(3, jnp.int32)).sharding.mesh == of_explicit
    x, y = (put(of_explicit, jnp.zeros((0, n), jnp.bfloat16), P(None, "x")) for n in (32, 64))
    d = grouped_gemm_wgrad(x, put(of_explicit, y, P(None, "y")), offsets=jnp.zeros(3, jnp.int32))
    assert d.sharding.is_equivalent_to(NamedSharding(of_explicit, P(None, "x", "y")), 3)
    assert not d.any()

    def local(a):
        b = jnp.zeros((0, 16, 32), jnp.bfloat16)
        step = lambda carry, _: (grouped_gemm(a, b, offsets=jnp.zeros(0, jnp.int32)), None)
        return jax.lax.scan(step, a[:, :16], None, 2)[0]

    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("x"), out_specs=P("x")))
    assert not run(jnp.ones((8, 32), jnp.bfloat16)).any()


@pytest.mark.parametrize("accumulate", [False, True])
def test_wgrad_on_explicit_axes(accumulate):
    case = oracle.make_wgrad_case(np.random.default_rng(6), L, M, N, K, accumulate=accumulate)
    mesh = explicit_mesh()
    of = {"x": P(None, "x"), "y": P(None, "y"), "accumulate_into": P(None, "x", "y")}
    arrays = {name: put(mesh, x, of.get(name, P())) for name, x in case.arguments().items() if name != "d_dtype"}
    d = jax.jit(lambda arrays: grouped_gemm_wgrad(**arrays, d_dtype=case.d_dtype))(arrays)
    assert d.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "x", "y")), 3)
    oracle.wgrad_check(d, case)


@pytest.mark.parametrize(("of", "text"), [
    ({"a": P(None, "x")}, "K, the contraction, must not be sharded over explicit axes: the result would be a sum over devices, and nothing says how it is to be sharded; got 'x'; reshard the operand with jax.sharding.reshard"),
    ({"b": P(None, None, ("x", "y"))}, "K, the contraction, must not be sharded over explicit axes.*got 'x', 'y'"),
    ({"b": P("x")}, "L, the experts, must not be sharded over explicit axes"),
    ({"a": P("x"), "b": P(None, "x")}, "an axis of the mesh can shard one dimension of the result; got 'x' for M and N"),
    ({"a": P("x"), "prob": P("y")}, "M, the rows, must be sharded alike in all operands that have it; got 'x' and 'y'"),
    ({"b": P(None, "x"), "bias": P(None, "y")}, "N, the output columns, must be sharded alike"),
])  # fmt: skip
def test_refused_on_explicit_axes(of, text):
    case = make("bias")
    mesh = explicit_mesh()
    arrays, options = split(case)
    arrays = {name: put(mesh, x, of.get(name, P())) for name, x in arrays.items()}
    dot = lambda a, b: jax.lax.dot_general(a, b[0], (((1,), (1,)), ((), ())))
    like_jax = type(failure(dot, put(mesh, case.a, P(None, "x")), put(mesh, case.b, P(None, None, "x"))))
    with pytest.raises(like_jax, match=text):
        jax.jit(lambda arrays: grouped_gemm(**arrays, **options))(arrays)


def failure(function, *arguments):
    try:
        function(*arguments)
    except Exception as error:
        return error
    raise AssertionError("it did not fail")


@pytest.mark.parametrize(("x", "y", "text"), [
    (P("x"), P("x"), "M, the rows, must not be sharded over explicit axes"),
    (P(None, "x"), P(None, "x"), "an axis of the mesh can shard one dimension of the result; got 'x' for N and K"),
])  # fmt: skip
def test_refused_wgrad_on_explicit_axes(x, y, text):
    case = oracle.make_wgrad_case(np.random.default_rng(6), L, M, N, K, alpha=False)
    mesh = explicit_mesh()
    with pytest.raises(Exception, match=text):
        grouped_gemm_wgrad(put(mesh, case.x, x), put(mesh, case.y, y), offsets=case.offsets)


def test_different_meshes():
    case = make()
    other = jax.sharding.Mesh(np.array(jax.devices("cpu")[:8]), ("z",), axis_types=(jax.sharding.AxisType.Explicit,))
    with pytest.raises(Exception, match="operands must be on one mesh; got|Mesh for all inputs|incompatible devices"):
        grouped_gemm(put(explicit_mesh(), case.a, P()), put(other, case.b, P()), offsets=case.offsets)


# --- ragged_dot -------------------------------------------------------------------------------------------------------


@pytest.fixture
def accelerated(monkeypatch):
    """JAX's own function with our lowering, on the CPU: there the primitive has the reference's."""
    monkeypatch.setattr(acceleration, "PLATFORM", "cpu")
    monkeypatch.setattr(acceleration, "ffi_call", types.SimpleNamespace(choose=lambda *_: ffi_call.Choice(True, "")))
    monkeypatch.setattr(acceleration, "log", types.SimpleNamespace(once=pytest.fail))
    with jgg.accelerate():
        yield jax.lax.ragged_dot


@pytest.fixture(params=["ours", "accelerated"])
def ragged_dot(request):
    return ragged.ragged_dot if request.param == "ours" else request.getfixturevalue("accelerated")


def ragged_operands():
    case = make(poison=False)
    rhs = jnp.swapaxes(jnp.asarray(case.b), 1, 2)
    return jnp.asarray(case.a), rhs, jnp.diff(jnp.asarray(case.offsets), prepend=0)


def loss_of(dot):
    return lambda lhs, rhs, sizes: jnp.sum(dot(lhs, rhs, sizes).astype(jnp.float32) ** 2)


def assert_like_ragged_dot(dot, operands, shardings=None):
    plain = ragged_operands()
    want = np.asarray(jax.jit(jax.lax.ragged_dot)(*plain)).astype(np.float32)
    np.testing.assert_allclose(jax.jit(dot)(*operands).astype(np.float32), want, rtol=0.01, atol=0.01)
    gradient = jax.jit(jax.grad(loss_of(dot), (0, 1)), out_shardings=shardings).lower(*operands).compile()
    for got, want in zip(gradient(*operands), jax.grad(loss_of(jax.lax.ragged_dot), (0, 1))(*plain), strict=True):
        np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), rtol=0.02, atol=0.25)
    return gradient


@pytest.mark.parametrize("layout", ["rows", "columns", "contraction", "experts", "rows and experts over one axis"])
def test_ragged_dot_partitioned(mesh, ragged_dot, layout):
    rows, weights, _ = LAYOUTS[layout]
    l, n, k = [*weights, None, None, None][:3]
    of = rows, P(l, k, n), P()
    operands = [put(mesh, x, spec) for x, spec in zip(ragged_operands(), of, strict=True)]
    gradient = assert_like_ragged_dot(ragged_dot, operands, tuple(x.sharding for x in operands[:2]))
    assert_weights_stay(collectives(gradient.as_text()))


def test_ragged_dot_in_a_shard_map(mesh, ragged_dot):
    def local(lhs, rhs, sizes):
        return ragged_dot(lhs, rhs, jnp.diff(local_ends(jnp.cumsum(sizes), lhs.shape[0]), prepend=0))

    assert_like_ragged_dot(
        jax.shard_map(local, mesh=mesh, in_specs=(P("x"), P(), P()), out_specs=P("x")), ragged_operands()
    )


@pytest.mark.skipif("out_sharding" not in inspect.signature(jax.lax.ragged_dot).parameters, reason="this JAX has none")
def test_out_sharding_of_ragged_dot_is_jaxs():
    mesh = explicit_mesh()
    operands = [put(mesh, x, P()) for x in ragged_operands()]
    with set_mesh(mesh):
        got = jax.jit(functools.partial(ragged.ragged_dot, out_sharding=P("x", None)))(*operands)
        want = jax.jit(functools.partial(jax.lax.ragged_dot, out_sharding=P("x", None)))(*operands)
    assert jax.typeof(got).sharding.spec == P("x", None)
    np.testing.assert_array_equal(got, want)


def test_ragged_dot_of_the_experts_here(mesh):
    def local(lhs, rhs, sizes):
        first = jax.lax.axis_index("x") * rhs.shape[0]
        d = ragged.ragged_dot(lhs, rhs, sizes, preferred_element_type=jnp.float32, group_offset=first)
        return jax.lax.psum(d, "x").astype(jnp.bfloat16)

    assert_like_ragged_dot(
        jax.shard_map(local, mesh=mesh, in_specs=(P(), P("x"), P()), out_specs=P()), ragged_operands()
    )


# --- export -----------------------------------------------------------------------------------------------------------

FORWARD_AND_GRADIENT = [
    pytest.param(lambda a, b, offsets: grouped_gemm(a, b, offsets=offsets), id="forward"),
    pytest.param(
        jax.grad(lambda a, b, offsets: grouped_gemm(a, b, offsets=offsets).astype(jnp.float32).sum(), (0, 1)),
        id="gradient",
    ),
    pytest.param(
        lambda a, b, offsets: ragged.ragged_dot(a, jnp.swapaxes(b, 1, 2), jnp.diff(offsets, prepend=0)), id="ragged_dot"
    ),
]


def assert_same(got, want):
    for g, w in zip(got, jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, np.asarray(w).astype(np.float32), rtol=0.01, atol=0.01)


@pytest.mark.usefixtures("lowered_for_cuda")
@pytest.mark.parametrize("function", FORWARD_AND_GRADIENT)
def test_exported_for_one_device(function, tmp_path):
    case = make(poison=False)
    operands = [jnp.asarray(x) for x in (case.a, case.b, case.offsets)]
    exported = exports.export(function, operands, ("cpu", "cuda"))
    assert exported.nr_devices == 1
    assert f"@{library.FORWARD}" in exported.mlir_module() or f"@{library.WGRAD}" in exported.mlir_module()
    assert "CustomSPMDPartitioning" not in exported.mlir_module()
    assert_same(exports.elsewhere(exported, operands, tmp_path), function(*operands))


@pytest.mark.usefixtures("lowered_for_cuda")
@pytest.mark.parametrize("function", FORWARD_AND_GRADIENT[:1])
def test_exported_with_shard_map(mesh, function, tmp_path):
    case = make(poison=False)

    def local(a, b, offsets):
        return function(a, b, local_ends(offsets, a.shape[0]))

    of = P("x"), P(), P()
    mapped = jax.shard_map(local, mesh=mesh, in_specs=of, out_specs=P("x"))
    loss = lambda *x: (mapped(*x).astype(jnp.float32) ** 2).sum()
    plain = lambda *x: (function(*x).astype(jnp.float32) ** 2).sum()
    operands = [put(mesh, x, spec) for x, spec in zip((case.a, case.b, case.offsets), of, strict=True)]
    exported = exports.export(lambda *x: (mapped(*x), *jax.grad(loss, (0, 1))(*x)), operands, ("cpu", "cuda"))
    assert exported.nr_devices == 8
    here = [jnp.asarray(x) for x in (case.a, case.b, case.offsets)]
    got = exports.elsewhere(exported, here, tmp_path)
    assert_same(got[:2], (function(*here), jax.grad(plain)(*here)))
    np.testing.assert_allclose(got[2], jax.grad(plain, 1)(*here).astype(np.float32), rtol=0.02, atol=0.25)


def test_automatic_partitioning_is_not_exported(mesh):
    case = make()
    operands = [put(mesh, x, spec) for x, spec in ((case.a, P("x")), (case.b, P()), (case.offsets, P()))]
    with pytest.raises(
        NotImplementedError, match="the rule for it is Python.*inside jax.shard_map, or export the program for one"
    ):
        jax.export.export(jax.jit(lambda a, b, offsets: grouped_gemm(a, b, offsets=offsets)))(*operands)
