"""Several devices: automatic partitioning, on virtual CPU devices, against the float64 oracle."""

import functools
import math
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharding_problems import (
    LAYOUTS,
    OFFSETS,
    K,
    L,
    M,
    N,
    assert_weights_stay,
    collectives,
    make,
    make_mesh,
    needs_eight,
    of_result,
    pulled,
    put,
    random_outputs,
    refused,
    specs,
    split,
    use_partitioner,
)

from jax_grouped_gemm import calls, ffi_call, grouped_gemm, grouped_gemm_wgrad, library, log, partitioning, ragged

pytestmark = needs_eight


# --- automatic partitioning -------------------------------------------------------------------------------------------


def compiled_forward(mesh, case, rows, weights):
    arrays, options = split(case)
    shardings = {name: NamedSharding(mesh, spec) for name, spec in specs(rows, weights).items() if name in arrays}
    result = NamedSharding(mesh, of_result(rows, weights))
    run = jax.jit(lambda arrays: grouped_gemm(**arrays, **options), in_shardings=(shardings,), out_shardings=result)
    return run.lower(arrays).compile(), jax.device_put(arrays, shardings)


@pytest.mark.parametrize("kind", ["scaled", "bias"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_forward(mesh, layout, kind):
    rows, weights, moves = LAYOUTS[layout]
    case = make(kind)
    compiled, arrays = compiled_forward(mesh, case, rows, weights)
    oracle.check(compiled(arrays), case)
    found = collectives(compiled.as_text())
    assert_weights_stay(found)
    if moves is not None and jax.config.jax_use_shardy_partitioner:
        assert {operation for operation, _ in found} == moves


@pytest.mark.parametrize("layout", LAYOUTS)
def test_forward_of_gspmd(mesh, layout):
    rows, weights, _ = LAYOUTS[layout]
    case = make("plain")
    with use_partitioner("gspmd"):
        compiled, arrays = compiled_forward(mesh, case, rows, weights)
    oracle.check(compiled(arrays), case)
    assert_weights_stay(collectives(compiled.as_text()))


@pytest.mark.parametrize("layout", ["columns", "contraction", "experts"])
def test_weights_with_n_contiguous(mesh, layout):
    _, weights, moves = LAYOUTS[layout]
    l, n, k = [*weights, None, None][:3]
    case = make(b_major="n", seed=1)
    arrays, options = split(case)
    arrays = {name: put(mesh, x, P(l, k, n) if name == "b" else P()) for name, x in arrays.items()}
    compiled = jax.jit(lambda arrays: grouped_gemm(**arrays, **options)).lower(arrays).compile()
    oracle.check(compiled(arrays), case)
    found = collectives(compiled.as_text())
    assert_weights_stay(found)
    assert {operation for operation, _ in found} == moves


@pytest.mark.parametrize("kind", ["scaled", "bias"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradient(mesh, layout, kind):
    check_gradient(mesh, layout, kind)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradient_of_gspmd(mesh, layout):
    with use_partitioner("gspmd"):
        check_gradient(mesh, layout, "plain")


def check_gradient(mesh, layout, kind):
    rows, weights, _ = LAYOUTS[layout]
    case = make(kind)
    outputs = random_outputs(case)
    arrays, _ = split(case)
    shardings = {name: NamedSharding(mesh, spec) for name, spec in specs(rows, weights).items() if name in arrays}
    wanted = {name: shardings[name] for name in oracle.present(case)}
    result = NamedSharding(mesh, of_result(rows, weights))
    run = jax.jit(pulled(case), in_shardings=(shardings, result), out_shardings=wanted)
    compiled = run.lower(arrays, outputs).compile()
    got = compiled(jax.device_put(arrays, shardings), jax.device_put(outputs, result))
    oracle.check_cotangents(got, case, outputs)
    if layout != "contraction of a alone":  # there each device makes a part of what all were asked for
        assert_weights_stay(collectives(compiled.as_text()))


# x (M, N), y (M, K), D (L, N, K), and what is moved.
WGRAD_LAYOUTS = {
    "rows": (P("x"), P("x"), P(), {"all-reduce"}),
    "rows of one operand": (P(), P("x"), P(), {"all-reduce"}),
    "columns of x": (P(None, "x"), P(), P(None, "x"), set()),
    "columns of y": (P(), P(None, "x"), P(None, None, "x"), set()),
    "columns of both": (P(None, "x"), P(None, "y"), P(None, "x", "y"), set()),
    "experts": (P(), P(), P("x"), set()),
    "rows and experts": (P("y"), P("y"), P("x"), {"all-reduce"}),
    "rows and experts over one axis": (P("x"), P("x"), P("x"), {"all-gather"}),
    "rows over two, experts over one": (P(("y", "x")), P(("y", "x")), P("x"), {"all-gather", "all-reduce"}),
    "rows and columns over one axis": (P("x"), P("x"), P(None, "x"), None),
}


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("layout", WGRAD_LAYOUTS)
def test_wgrad(mesh, partitioner, layout, accumulate):
    x, y, d, moves = WGRAD_LAYOUTS[layout]
    case = oracle.make_wgrad_case(np.random.default_rng(2), L, M, N, K, offsets=OFFSETS, accumulate=accumulate)
    arrays = {name: value for name, value in case.arguments().items() if isinstance(value, jax.Array)}
    of = {"x": x, "y": y, "accumulate_into": d, "alpha": P(), "offsets": P()}
    shardings = {name: NamedSharding(mesh, of[name]) for name in arrays}
    run = jax.jit(
        lambda arrays: grouped_gemm_wgrad(**arrays, d_dtype=case.d_dtype),
        in_shardings=(shardings,),
        out_shardings=NamedSharding(mesh, d),
    )
    compiled = run.lower(arrays).compile()
    oracle.wgrad_check(compiled(jax.device_put(arrays, shardings)), case)
    found = collectives(compiled.as_text())
    assert_weights_stay(found)
    if moves is not None and partitioner == "shardy":
        assert {operation for operation, _ in found} == moves


def test_results_of_shards_that_nobody_asked_for(mesh):
    """Where the result's sharding is free it follows from those of the operands."""
    case = make()
    arrays, options = split(case)
    for rows, weights in ((P("x"), P(None, "y")), (P("y"), P("x"))):
        sharded = {name: put(mesh, x, specs(rows, weights)[name]) for name, x in arrays.items()}
        d = jax.jit(lambda arrays: grouped_gemm(**arrays, **options))(sharded)
        assert d.sharding.is_equivalent_to(NamedSharding(mesh, of_result(rows, weights)), 2)
        oracle.check(d, case)
        oracle.check(grouped_gemm(**sharded, **options), case)  # eagerly


@pytest.mark.parametrize("layout", ["rows", "rows and experts", "rows and experts over one axis"])
def test_hostile_ends(mesh, layout):
    """Ends are clamped to those before them, also to those that lie on other devices."""
    rows, weights, _ = LAYOUTS[layout]
    ends = [10, -(2**31), -5, 70, 20, 2**31 - 1, 3, 80, 0, 5, 6, 7, 8, 9, 10, 11]
    case = make("bias", offsets=ends)
    compiled, arrays = compiled_forward(mesh, case, rows, weights)
    oracle.check(compiled(arrays), case)


def test_weights_that_their_user_gathers(mesh):
    """As with fully sharded parameters: rows stay, and the gradient is made of a sum over devices."""
    case = make()
    arrays, options = split(case)
    outputs = random_outputs(case)
    rows, weights, _ = LAYOUTS["rows and columns over one axis"]
    shardings = {name: NamedSharding(mesh, specs(rows, weights)[name]) for name in arrays}
    whole = NamedSharding(mesh, P())

    def run(arrays, outputs):
        call = lambda a, b: grouped_gemm(
            a, jax.lax.with_sharding_constraint(b, whole), offsets=arrays["offsets"], **options
        )
        d, pull = jax.vjp(call, arrays["a"], arrays["b"])
        return d, dict(zip("ab", pull(outputs[0]), strict=True))

    by_rows = NamedSharding(mesh, P("x"))
    wanted = by_rows, {"a": by_rows, "b": shardings["b"]}
    compiled = jax.jit(run, in_shardings=(shardings, by_rows), out_shardings=wanted).lower(arrays, outputs).compile()
    d, got = compiled(jax.device_put(arrays, shardings), jax.device_put(outputs, by_rows))
    oracle.check(d, case)
    oracle.check_cotangents(got, case, outputs)
    assert [shape for operation, shape in collectives(compiled.as_text()) if operation == "all-gather"] == [(L, N, K)]


@pytest.mark.parametrize("layout", ["rows", "columns", "experts", "rows and experts over one axis"])
def test_groups_and_factors_may_be_sharded(mesh, partitioner, layout):
    rows, weights, _ = LAYOUTS[layout]
    case = make("bias")
    arrays, options = split(case)
    of = specs(rows, weights) | {"offsets": P("x"), "alpha": P("y"), "bias": P("x", "y")}
    sharded = {name: put(mesh, x, of[name]) for name, x in arrays.items()}
    oracle.check(jax.jit(lambda arrays: grouped_gemm(**arrays, **options))(sharded), case)


@pytest.mark.parametrize(
    "layout", ["rows", "columns", "contraction", "rows and columns", "rows and columns over one axis"]
)
def test_tuple_of_weights(mesh, layout):
    rows, weights, _ = LAYOUTS[layout]
    case = make("scaled")
    arrays, options = split(case)
    sharded = {name: put(mesh, x, specs(rows, weights)[name]) for name, x in arrays.items() if name != "b"}
    of_one = P(*weights[1:])
    b = tuple(put(mesh, w, of_one if i else P()) for i, w in enumerate(arrays["b"]))  # one of them not sharded
    run = jax.jit(lambda arrays, b: grouped_gemm(**arrays, b=b, **options)).lower(sharded, b).compile()
    oracle.check(run(sharded, b), case)
    found = collectives(run.as_text())
    assert (N, K) not in [shape for operation, shape in found if operation not in ("all-reduce", "reduce-scatter")]


@pytest.mark.skipif(library.registered() is not None, reason="the library is not built")
def test_pointers(mesh):
    case = make("scaled", poison=False)
    arrays, options = split(case)
    weights = [np.ascontiguousarray(w) for w in case.b]
    pointers = np.array([w.ctypes.data for w in weights])
    others = {name: x for name, x in arrays.items() if name != "b"}
    run = jax.jit(lambda arrays, b_ptrs: grouped_gemm(**arrays, b_ptrs=b_ptrs, n=N, **options))
    b_ptrs = put(mesh, pointers.view(np.uint8), P())
    oracle.check(run({name: put(mesh, x, specs(P("x"), P())[name]) for name, x in others.items()}, b_ptrs), case)
    with refused("K of a must not be sharded with b_ptrs, addresses that every device reads whole weights by; got 'x'"):
        run({name: put(mesh, x, specs(P(None, "x"), P())[name]) for name, x in others.items()}, b_ptrs)
    with refused("b_ptrs must not be sharded with b_ptrs"):
        run(others, put(mesh, b_ptrs, P("x")))


@pytest.mark.parametrize(
    ("sizes", "rows", "weights", "text"),
    [
        ((L, M, 24, K), P(), P(None, "x"), "N must be a multiple of 32, 8 for each of the 4 devices that 'x' shards it over; got 24; pad it"),
        ((L, M, N, 40), P(), P(None, None, "y"), "K must be a multiple of 16, 8 for each of the 2 devices that 'y' shards it over; got 40"),
        ((L, M, N, 40), P(None, "y"), P(), "K must be a multiple of 16"),
        ((L, M, 24, K), P(), P(None, ("y", "x")), "N must be a multiple of 64, 8 for each of the 8 devices that 'y', 'x' shards it over; got 24"),
    ],
)  # fmt: skip
def test_refused_parts(mesh, partitioner, sizes, rows, weights, text):
    case = oracle.make_case(np.random.default_rng(0), *sizes, offsets=OFFSETS, alpha=False, prob=False)
    arrays, options = split(case)
    sharded = {name: put(mesh, x, specs(rows, weights)[name]) for name, x in arrays.items()}
    with refused(text):
        jax.jit(lambda arrays: grouped_gemm(**arrays, **options))(sharded)


def divided(mesh, l, m, rows, weights):
    """A constraint, unlike an argument, may be uneven: (a program, its arguments, its case)."""
    case = oracle.make_case(np.random.default_rng(0), l, m, N, K, alpha=False, prob=False)

    def run(a, b, offsets):
        a, b = (jax.lax.with_sharding_constraint(x, NamedSharding(mesh, s)) for x, s in ((a, rows), (b, weights)))
        return grouped_gemm(a, b, offsets=offsets)

    return jax.jit(run), [put(mesh, x, P()) for x in (case.a, case.b, case.offsets)], case


def test_refused_divisions(mesh):
    run, arguments, _ = divided(mesh, 14, M, P(), P("x"))
    with refused("L must be a multiple of 4, the devices that 'x' shards it over; got 14; pad it"):
        run(*arguments)


@pytest.mark.parametrize(("rows", "weights"), [(P("x"), P()), (P(("x", "y")), P("x"))])
def test_rows_that_the_devices_do_not_divide_are_gathered(mesh, partitioner, rows, weights):
    run, arguments, case = divided(mesh, L, 62, rows, weights)
    oracle.check(run(*arguments), case)


@pytest.mark.parametrize(
    ("n", "k", "weights"), [(32, K, P(None, None, ("y", "x"))), (N, 8, P(None, "y")), (8, K, P("x", None, "y"))]
)
def test_ragged_dot_has_parts_of_any_size(mesh, partitioner, n, k, weights):
    """The kernels have not: the reference does these, as JAX does what is of such a size in all."""
    case = oracle.make_case(np.random.default_rng(0), L, M, n, k, alpha=False, prob=False, poison=False)
    sizes = jnp.diff(jnp.asarray(case.offsets), prepend=0)
    rhs = jnp.swapaxes(jnp.asarray(case.b), 1, 2)

    def run(dot, lhs, rhs):
        out, pull = jax.vjp(lambda lhs, rhs: dot(lhs, rhs, sizes), lhs, rhs)
        return out, *pull(out)

    got = jax.jit(functools.partial(run, ragged.ragged_dot))(put(mesh, case.a, P()), put(mesh, rhs, weights))
    for x, want in zip(got, run(jax.lax.ragged_dot, jnp.asarray(case.a), rhs), strict=True):
        np.testing.assert_allclose(x.astype(np.float32), want.astype(np.float32), rtol=0.02, atol=0.1)


@pytest.mark.parametrize(
    ("layout", "form"),
    [(layout, "dense") for layout, (_, weights, _) in LAYOUTS.items() if weights != P()]
    + [
        ("experts", "n-major"),
        ("rows and experts, and columns", "n-major"),
        ("experts", "batch"),
        ("columns", "tuple"),
    ],
)
def test_gradients_of_weights_are_sharded_as_the_weights(mesh, partitioner, layout, form):
    """Where nothing else says how they are wanted; each device makes its own only."""
    rows, weights, _ = LAYOUTS[layout]
    case = make(poison=False)
    b = jnp.asarray(case.b)
    call = functools.partial(grouped_gemm, offsets=jnp.asarray(OFFSETS))
    if form == "tuple":
        b, weights = tuple(b), P(*weights[1:])
    elif form == "n-major":
        b, call = jnp.swapaxes(b, 1, 2), functools.partial(call, b_major="n")
        weights = P(weights[0], *reversed([*weights[1:], None, None][:2]))
    elif form == "batch":
        b = jnp.stack([b, -b, b, -b])  # which is sharded instead
        call = jax.vmap(call, (None, 0))
    loss = lambda b, a: jnp.sin(call(a, b).astype(jnp.float32)).sum()
    run = jax.jit(jax.grad(loss))
    arrays = put(mesh, b, weights), put(mesh, case.a, rows)
    compiled = run.lower(*arrays).compile()
    got = compiled(*arrays)
    for x, w in zip(jax.tree.leaves(got), jax.tree.leaves(arrays[0]), strict=True):
        assert x.sharding.is_equivalent_to(w.sharding, x.ndim), (x.sharding, w.sharding)
    if partitioner == "shardy" and form != "batch":  # the other one asks for whole ones, of which it then takes parts
        part = math.prod(jax.tree.leaves(got)[0].sharding.shard_shape(jax.tree.leaves(got)[0].shape))
        for operation, shape in collectives(compiled.as_text()):
            assert math.prod(shape) <= max(part, M * max(N, K)), (operation, shape)
    for x, want in zip(jax.tree.leaves(got), jax.tree.leaves(jax.grad(loss)(b, jnp.asarray(case.a))), strict=True):
        np.testing.assert_allclose(x.astype(np.float32), want.astype(np.float32), rtol=0.02, atol=0.1)


def test_refused_tuples(mesh, partitioner):
    case = make()
    b = [put(mesh, w, P("x" if i % 2 else "y")) for i, w in enumerate(case.b)]
    with refused("N must be sharded alike in all weights, each over axes of its own; got 'x' and 'y'; move some"):
        jax.jit(lambda a, b: grouped_gemm(a, b, offsets=case.offsets))(put(mesh, case.a, P()), b)


@pytest.mark.parametrize(
    "spec", [P(("x", "y")), P(None, "x"), P("y", "x"), P("x", "y"), P(None, "x", "y"), P("x", None, "y")]
)
@pytest.mark.parametrize("batched", ["b", "a and b"])
def test_a_batch_that_is_sharded(mesh, partitioner, batched, spec):
    """Of weights, by the batch, the experts, or both: they stay where they are, and so do their gradients; rows are gathered."""
    case = make(poison=False)
    a, b = jnp.asarray(case.a), jnp.stack([jnp.asarray(case.b) * jnp.bfloat16(i) for i in range(1, 9)])
    axes = (None, 0)
    if batched == "a and b":
        a, axes = jnp.stack([a] * 8), (0, 0)
    run = jax.vmap(lambda a, b: grouped_gemm(a, b, offsets=case.offsets), axes)
    gradient = jax.grad(lambda a, b: run(a, b).astype(jnp.float32).sum(), (0, 1))
    arrays = put(mesh, a, P()), put(mesh, b, spec)
    for function in (run, gradient):
        compiled = jax.jit(function).lower(*arrays).compile()
        for operation, shape in collectives(compiled.as_text()):
            assert operation in ("all-reduce", "reduce-scatter") or math.prod(shape) < b.size, (operation, shape)
        found = jax.tree.leaves(compiled(*arrays))
        for got, want in zip(found, jax.tree.leaves(function(a, b)), strict=True):
            got, want = got.astype(np.float32), want.astype(np.float32)
            np.testing.assert_allclose(got, want, rtol=0.02, atol=0.01 * np.abs(want).max())
    assert found[1].sharding.is_equivalent_to(arrays[1].sharding, 4)


@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P("y", "x")])
def test_a_batch_of_ragged_dot(mesh, partitioner, spec):
    """As JAX has it under vmap, of weights (B, G, K, N)."""
    case = make("plain", poison=False)
    lhs, rhs = jnp.stack([jnp.asarray(case.a)] * 4), jnp.stack([jnp.swapaxes(jnp.asarray(case.b), 1, 2)] * 4)
    sizes = jnp.tile(jnp.diff(jnp.asarray(case.offsets), prepend=0), (4, 1))
    numbers = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((2,), (2,)), ((0,), (0,))), lhs_ragged_dimensions=[1], rhs_group_dimensions=[1]
    )

    def run(lhs, rhs):
        out, pull = jax.vjp(lambda lhs, rhs: ragged.ragged_dot_general(lhs, rhs, sizes, numbers), lhs, rhs)
        return out, *pull(out)

    arrays = put(mesh, lhs, P()), put(mesh, rhs, spec)
    compiled = jax.jit(run).lower(*arrays).compile()
    for operation, shape in collectives(compiled.as_text()):
        assert operation in ("all-reduce", "reduce-scatter") or math.prod(shape) <= lhs.shape[0] * M * max(N, K), (
            operation,
            shape,
        )
    found = compiled(*arrays)
    assert found[2].sharding.is_equivalent_to(arrays[1].sharding, 4)
    for got, want in zip(found, run(lhs, rhs), strict=True):
        got, want = got.astype(np.float32), want.astype(np.float32)
        np.testing.assert_allclose(got, want, rtol=0.02, atol=0.01 * np.abs(want).max())


@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
def test_the_debug_switch_is_refused(axis_type, monkeypatch):
    """A failure on one device would leave the others waiting."""
    monkeypatch.setenv("JAX_GROUPED_GEMM_DEBUG", "1")
    mesh = make_mesh(axis_types=(jax.sharding.AxisType[axis_type],) * 2)
    case = make(poison=False)
    a, b = put(mesh, case.a, P("x")), put(mesh, case.b, P())
    for name, spec in (("offsets", P()), ("offsets", P("x")), ("group_sizes", P("x"))):
        run = jax.jit(lambda a, b, groups, name=name: grouped_gemm(a, b, **{name: groups}))
        with jax.set_mesh(mesh), pytest.raises(NotImplementedError, match="cannot check a program that XLA partitions"):
            run(a, b, put(mesh, case.offsets, spec))


def test_refused_in_a_shard_map_over_some_axes(mesh):
    case = make()
    run = jax.jit(
        jax.shard_map(
            lambda a, b: grouped_gemm(a, b, offsets=case.offsets),
            mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"x"},
        )
    )  # fmt: skip
    with pytest.raises(NotImplementedError, match="must make all axes of the mesh manual.*got 'y' left out"):
        run(case.a, case.b)


@pytest.mark.parametrize("place", ["shard_map over some axes", "export"])
def test_ragged_dot_where_there_is_no_rule(mesh, caplog, place):
    case = make("plain", poison=False)
    sizes = jnp.diff(jnp.asarray(case.offsets), prepend=0)
    operands = jnp.asarray(case.a), jnp.swapaxes(jnp.asarray(case.b), 1, 2), sizes
    of = P("x"), P(None, None, "y"), P()

    def run(lhs, rhs, sizes):
        out, pull = jax.vjp(lambda lhs, rhs: ragged.ragged_dot(lhs, rhs, sizes), lhs, rhs)
        return out, *pull(out)

    want = run(*operands)
    log.once.cache_clear()
    if place == "export":
        jitted = jax.jit(run, in_shardings=tuple(NamedSharding(mesh, spec) for spec in of))
        run, why = jax.export.export(jitted)(*operands).call, "must not leave the partitioning to XLA"
        operands = [put(mesh, x, spec) for x, spec in zip(operands, of, strict=True)]
    else:
        run = jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"x"}, check_vma=False)
        why = "must make all axes of the mesh manual"
    got = jax.jit(run)(*operands)
    assert "ragged_dot is the reference implementation, which is slow on a GPU" in caplog.text
    assert why in caplog.text
    for x, expected in zip(got, want, strict=True):
        np.testing.assert_array_equal(x, expected)


@pytest.mark.parametrize("layout", ["rows", "experts", "rows and experts over one axis"])
def test_experts_of_groups(mesh, partitioner, layout):
    """Groups that share experts or have none, as vmap makes them."""
    rows, weights, _ = LAYOUTS[layout]
    a, b, offsets = (jnp.asarray(x) for x in (make(poison=False).a, make(poison=False).b, OFFSETS))
    offsets = offsets.astype(jnp.int32)
    batch = jnp.stack([a, a[::-1]])
    run = lambda batch, b: jax.vmap(lambda a: grouped_gemm(a, b, offsets=offsets, d_dtype="float32"))(batch)
    loss = lambda batch, b: (run(batch, b) ** 2).sum()
    sharded = put(mesh, batch, P(None, *rows)), put(mesh, b, weights)
    np.testing.assert_allclose(jax.jit(run)(*sharded), run(batch, b), rtol=1e-5, atol=1e-5)
    for got, want in zip(jax.jit(jax.grad(loss, (0, 1)))(*sharded), jax.grad(loss, (0, 1))(batch, b), strict=True):
        np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), rtol=0.02, atol=0.1)


@pytest.mark.usefixtures("lowered_for_cuda")
def test_lowered_for_cuda(mesh):
    """The whole program leaves it to XLA, which asks for each device's, with the kernel on its part of the operands."""
    case = make("plain")
    arrays, options = split(case)
    arrays = {name: put(mesh, x, specs(P("x"), P("x"))[name]) for name, x in arrays.items()}
    run = jax.jit(lambda arrays: grouped_gemm(**arrays, **options))
    text = run.trace(arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert "@CustomSPMDPartitioning" in text
    assert f"@{library.FORWARD}" not in text

    call = calls.Call(M, N, K, L, "k", "dense", "bfloat16", has_alpha=False, has_prob=False, implementation=None)
    rule = partitioning.Gemm(call)
    plan = rule.plan(partitioning._Mesh(mesh), [{"m": ("x",)}, {}, {"l": ("x",)}], {"m": ("x",)})
    of = tuple(
        P(*(axes.get(letter) for letter in letters)) for letters, axes in zip(rule.operands, plan.operands, strict=True)
    )
    local = rule.local(plan, lambda call, flat: ffi_call.grouped_gemm_p.bind(*flat, call=call))
    each = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=of, out_specs=[P("x")], check_vma=False))
    text = each.trace(*(arrays[name] for name in ("a", "offsets", "b"))).lower(lowering_platforms=("cuda",)).as_text()
    (line,) = (line for line in text.splitlines() if f"@{library.FORWARD}" in line)
    # All rows, the ends of all groups, the expert of each, the weights of a quarter of them; and a sum to be made of it.
    operands, results = line.rsplit(" : (", 1)[1].split(") -> ")
    assert re.findall(r"tensor<([^>]+)>", operands) == [
        f"{M}x{K}xbf16",
        f"{L}xi32",
        f"{L}xi32",
        f"{L // 4}x{N}x{K}xbf16",
    ]
    assert re.findall(r"tensor<([^>]+)>", results) == [f"{M}x{N}xf32"]


# --- programs around it -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wide", [0, 1], ids=["lhs", "rhs"])
@pytest.mark.parametrize("layout", ["rows", "columns", "contraction", "experts", "rows and experts over one axis"])
def test_an_operand_of_float32(mesh, layout, wide):
    """Each device cuts up its part, and sums over devices are not made part by part."""
    case = make()
    rng = np.random.default_rng(1)
    operands = [case.a, case.b.swapaxes(1, 2)]
    operands[wide] = rng.standard_normal(operands[wide].shape, np.float32)
    sizes = np.diff(case.offsets, prepend=0).astype(np.int32)
    ct = rng.standard_normal((M, N), np.float32)

    def both(lhs, rhs, ct):
        out, pull = jax.vjp(lambda lhs, rhs: ragged.ragged_dot(lhs, rhs, sizes, None, jnp.float32), lhs, rhs)
        return out, *pull(ct)

    rows, weights, moved = LAYOUTS[layout]
    transposed = P(*((tuple(weights) + (None,) * 3)[i] for i in (0, 2, 1)))
    result = of_result(rows, weights)
    placed = [put(mesh, x, spec) for x, spec in zip((*operands, ct), (rows, transposed, result), strict=True)]
    shardings = [NamedSharding(mesh, spec) for spec in (result, rows, transposed)]
    forward = jax.jit(lambda *x: both(*x)[0], out_shardings=shardings[0]).lower(*placed).compile()
    found = collectives(forward.as_text())
    assert {operation for operation, _ in found} == moved
    assert sum(operation in ("all-reduce", "reduce-scatter") for operation, _ in found) <= 1
    got = jax.jit(both, out_shardings=tuple(shardings))(*placed)
    want = jax.jit(both)(*map(jnp.asarray, (*operands, ct)))
    for x, y in zip(got, want, strict=True):
        y = np.asarray(y, np.float64)
        limit = 2.0**-8 if x.dtype == jnp.bfloat16 else 2.0**-20
        assert np.linalg.norm(np.asarray(x, np.float64) - y) <= limit * np.linalg.norm(y)


@pytest.mark.parametrize("layout", ["rows", "contraction", "rows and columns", "rows and experts over one axis"])
def test_scan_remat_and_donation(mesh, layout):
    rows, weights, _ = LAYOUTS[layout]
    rng = np.random.default_rng(3)
    a = jnp.asarray(rng.standard_normal((M, K)), jnp.bfloat16)
    layers = jnp.asarray(rng.standard_normal((3, L, K, K)) / math.sqrt(K), jnp.bfloat16)

    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable)
    def layer(a, w):
        return jnp.tanh(grouped_gemm(a, w, offsets=jnp.array(OFFSETS, jnp.int32)))

    def loss(a, layers):
        a, _ = jax.lax.scan(lambda a, w: (layer(a, w), None), a, layers)
        return jnp.sum(a.astype(jnp.float32) ** 2)

    def step(a, layers):
        return layers - (0.125 * jax.grad(loss, 1)(a, layers)).astype(layers.dtype)

    want = jax.jit(step)(a, layers)
    sharding = NamedSharding(mesh, P(None, *weights))
    run = jax.jit(step, donate_argnums=1, out_shardings=sharding)
    given = jax.device_put(layers, sharding)
    compiled = run.lower(put(mesh, a, rows), given).compile()
    got = compiled(put(mesh, a, rows), given)
    assert given.is_deleted()
    np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), rtol=0.02, atol=0.02)
    assert_weights_stay(collectives(compiled.as_text()))


def test_donated_sum(mesh):
    case = oracle.make_wgrad_case(np.random.default_rng(4), L, M, N, K, accumulate=True)
    arrays = {name: x for name, x in case.arguments().items() if name != "d_dtype"}
    total = put(mesh, arrays.pop("accumulate_into"), P("x"))
    others = {name: put(mesh, x, P()) for name, x in arrays.items()}
    run = jax.jit(lambda total, others: grouped_gemm_wgrad(**others, accumulate_into=total), donate_argnums=0)
    oracle.wgrad_check(run(total, others), case)
    assert total.is_deleted()
