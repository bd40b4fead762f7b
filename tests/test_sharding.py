"""Several devices: shard_map, automatic partitioning and explicit axes, on virtual CPU devices, against the float64 oracle."""

import contextlib
import functools
import inspect
import math
import os
import re
import subprocess
import sys
import types

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_grouped_gemm as jgg
from jax_grouped_gemm import (
    acceleration,
    calls,
    ffi_call,
    grouped_gemm,
    grouped_gemm_wgrad,
    library,
    partitioning,
    ragged,
)

L, M, N, K = 16, 96, 64, 32
OFFSETS = [3, 3, 15, 17, 30, 31, 31, 45, 50, 57, 60, 66, 67, 78, 85, 90]
KINDS = {
    "plain": {"alpha": False, "prob": False},
    "scaled": {"generate_c": True, "c_dtype": "float32"},
    "bias": {"bias": "float32", "generate_c": True},
}
needs_eight = pytest.mark.skipif(len(jax.devices("cpu")) < 8, reason="fewer than 8 CPU devices")
pytestmark = needs_eight


@pytest.fixture
def mesh():
    return make_mesh()


def make_mesh(**options):
    return jax.sharding.Mesh(np.array(jax.devices("cpu")[:8]).reshape(4, 2), ("x", "y"), **options)


def explicit_mesh():
    return make_mesh(axis_types=(jax.sharding.AxisType.Explicit,) * 2)


def put(mesh, x, spec):
    return jax.device_put(x, NamedSharding(mesh, spec))


def make(kind="plain", seed=0, **options):
    return oracle.make_case(np.random.default_rng(seed), L, M, N, K, **({"offsets": OFFSETS} | KINDS[kind] | options))


def split(case):
    """(arrays by name, options)."""
    arguments = case.arguments()
    arrays = {name: x for name, x in arguments.items() if isinstance(x, jax.Array)}
    return arrays, {name: x for name, x in arguments.items() if name not in arrays}


def specs(rows, weights):
    """Of all operands, for those of a and b."""
    columns = [*weights, None, None][1]
    return {"a": rows, "b": weights, "offsets": P(), "alpha": P(), "prob": P(*rows[:1]), "bias": P(None, columns)}


def collectives(text):
    """[(operation, shape)] of a compiled program."""
    found = []
    for line in text.splitlines():
        match = re.search(
            r" = (.*?) (all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute)(-start)?\(", line
        )
        if match:
            for shape in re.findall(r"\w+\[([\d,]*)\]", match[1]):
                found.append((match[2], tuple(map(int, filter(None, shape.split(","))))))
    return found


def assert_weights_stay(found):
    """Nothing of the size of the weights of a quarter of the experts, which is more than all rows have, is moved; sums may be."""
    for operation, shape in found:
        assert operation in ("all-reduce", "reduce-scatter") or math.prod(shape) <= M * max(N, K), (operation, shape)


@pytest.fixture
def lowered_for_cuda(monkeypatch):
    monkeypatch.setattr(ffi_call, "cuda_capabilities", tuple)
    monkeypatch.setattr(library, "manifest", lambda: {"build_id": "the build"})


@pytest.fixture(params=["shardy", "gspmd"])
def partitioner(request):
    with use_partitioner(request.param):
        yield request.param


@contextlib.contextmanager
def use_partitioner(name):
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", name == "shardy")
    try:
        yield
    finally:
        jax.config.update("jax_use_shardy_partitioner", before)


# --- automatic partitioning -------------------------------------------------------------------------------------------

# Specs of a and of b (L, N, K), what the forward pass moves, and whether it may take other ways on some versions.
LAYOUTS = {
    "rows": (P("x"), P(), set()),
    "columns": (P(), P(None, "x"), set()),
    "contraction": (P(), P(None, None, "x"), {"all-reduce"}),
    "contraction of a alone": (P(None, "x"), P(), {"all-reduce"}),
    "experts": (P(), P("x"), {"all-reduce"}),
    "rows and columns": (P("x"), P(None, "y"), set()),
    "rows and contraction": (P("y", "x"), P(None, None, "x"), {"all-reduce"}),
    "rows and experts": (P("y"), P("x"), {"all-reduce"}),
    "columns and contraction": (P(None, "x"), P(None, "y", "x"), {"all-reduce"}),
    "columns and experts": (P(), P("x", "y"), {"all-reduce"}),
    "contraction and experts": (P(None, "y"), P("x", None, "y"), {"all-reduce"}),
    "rows and experts over one axis": (P("x"), P("x"), {"all-gather", "reduce-scatter"}),
    "rows over two, experts over the first": (P(("x", "y")), P("x"), {"all-gather", "reduce-scatter", "collective-permute"}),
    "rows over two, experts over the second": (P(("x", "y")), P("y"), {"all-gather", "reduce-scatter"}),
    "rows and experts, and columns": (P("x"), P("x", "y"), {"all-gather", "reduce-scatter"}),
    "rows and columns over one axis": (P("x"), P(None, "x"), None),
    "rows and contraction over one axis": (P("x"), P(None, None, "x"), None),
}  # fmt: skip


def of_result(rows, weights):
    """The spec of D that its user asks for."""
    columns = [*weights, None, None][1]
    return P(rows[0] if rows else None, None if rows and columns == rows[0] else columns)


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


def pulled(case, outputs):
    """The cotangents of all floating operands, by name."""
    _, options = split(case)

    def run(arrays, outputs):
        offsets = arrays["offsets"]
        moving = {name: arrays[name] for name in oracle.present(case)}
        _, pull = jax.vjp(lambda moving: grouped_gemm(**moving, offsets=offsets, **options), moving)
        return pull(outputs if case.generate_c else outputs[0])[0]

    return run


def random_outputs(case, seed=7):
    """Cotangents of D and C that bfloat16 holds, NaN in rows of no group."""
    rng = np.random.default_rng(seed)
    found = []
    for output in "DC" if case.generate_c else "D":
        values = rng.standard_normal((M, N)).astype(oracle.BF16)
        values[case.end() :] = np.nan
        found.append(values.astype(case.dtype_of(output)))
    return tuple(found)


def assert_gradients(got, case, outputs, roundings=3):
    want = oracle.cotangents(case, *outputs)
    terms = {"a": N, "b": M, "alpha": M * N, "prob": N, "bias": M}
    for name, x in got.items():
        oracle.assert_near(x, want[name], terms[name], roundings=roundings, what=name)


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
    run = jax.jit(pulled(case, outputs), in_shardings=(shardings, result), out_shardings=wanted)
    compiled = run.lower(arrays, outputs).compile()
    got = compiled(jax.device_put(arrays, shardings), jax.device_put(outputs, result))
    assert_gradients(got, case, outputs)
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
    assert_gradients(got, case, outputs)
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


def refused(text):
    """By a rule that XLA calls."""
    return pytest.raises(Exception, match=re.escape(text))


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


@pytest.mark.parametrize(("l", "m", "rows", "weights", "text"), [
    (L, 62, P("x"), P(), "M must be a multiple of 4, the devices that 'x' shards it over; got 62; pad it"),
    (14, M, P(), P("x"), "L must be a multiple of 4, the devices that 'x' shards it over; got 14; pad it"),
])  # fmt: skip
def test_refused_divisions(mesh, l, m, rows, weights, text):
    """A constraint, unlike an argument, may be uneven."""
    case = oracle.make_case(np.random.default_rng(0), l, m, N, K, alpha=False, prob=False)

    def run(a, b, offsets):
        a, b = (jax.lax.with_sharding_constraint(x, NamedSharding(mesh, s)) for x, s in ((a, rows), (b, weights)))
        return grouped_gemm(a, b, offsets=offsets)

    with refused(text):
        jax.jit(run)(*(put(mesh, x, P()) for x in (case.a, case.b, case.offsets)))


def test_refused_tuples(mesh, partitioner):
    case = make()
    b = [put(mesh, w, P("x" if i % 2 else "y")) for i, w in enumerate(case.b)]
    with refused("N must be sharded alike in all weights, each over axes of its own; got 'x' and 'y'; move some"):
        jax.jit(lambda a, b: grouped_gemm(a, b, offsets=case.offsets))(put(mesh, case.a, P()), b)


@pytest.mark.parametrize("batched", ["b", "a and b"])
def test_a_batch_that_is_sharded(mesh, partitioner, batched):
    """Of weights, which stay where they are; rows are gathered."""
    case = make(poison=False)
    a, b = jnp.asarray(case.a), jnp.stack([jnp.asarray(case.b)] * 8)
    axes = (None, 0)
    if batched == "a and b":
        a, axes = jnp.stack([a] * 8), (0, 0)
    run = jax.vmap(lambda a, b: grouped_gemm(a, b, offsets=case.offsets), axes)
    gradient = jax.grad(lambda a, b: run(a, b).astype(jnp.float32).sum(), (0, 1))
    arrays = put(mesh, a, P()), put(mesh, b, P(("x", "y")))
    for function in (run, gradient):
        compiled = jax.jit(function).lower(*arrays).compile()
        for operation, shape in collectives(compiled.as_text()):
            assert operation in ("all-reduce", "reduce-scatter") or math.prod(shape) < b.size, (operation, shape)
        for got, want in zip(jax.tree.leaves(compiled(*arrays)), jax.tree.leaves(function(a, b)), strict=True):
            np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), rtol=0.02, atol=0.1)


@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
def test_the_debug_switch_is_refused(axis_type, monkeypatch):
    """A failure on one device would leave the others waiting."""
    monkeypatch.setenv("JAX_GROUPED_GEMM_DEBUG", "1")
    mesh = make_mesh(axis_types=(jax.sharding.AxisType[axis_type],) * 2)
    case = make(poison=False)
    with jax.set_mesh(mesh), pytest.raises(NotImplementedError, match="cannot check a program that XLA partitions"):
        jax.jit(lambda a, b, offsets: grouped_gemm(a, b, offsets=offsets))(
            put(mesh, case.a, P("x")), put(mesh, case.b, P()), put(mesh, case.offsets, P())
        )


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


# --- shard_map --------------------------------------------------------------------------------------------------------


def local_ends(offsets, m):
    """Of the rows of this device along x."""
    return jnp.clip(offsets - jax.lax.axis_index("x") * m, 0, m)


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

    assert_gradients(pull(arrays, outputs), case, outputs, roundings=4)


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_inside_a_shard_map(mesh, kind):
    case = make(kind)
    outputs = random_outputs(case)
    arrays, _ = split(case)
    of = {name: spec for name, spec in specs(P("x"), P()).items() if name in arrays}

    def local(arrays, outputs):
        ends = local_ends(arrays["offsets"], arrays["a"].shape[0])
        return pulled(case, outputs)(arrays | {"offsets": ends}, outputs)

    wanted = {name: of[name] for name in oracle.present(case)}
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(of, P("x")), out_specs=wanted))
    assert_gradients(run(arrays, outputs), case, outputs, roundings=4)


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


def set_mesh(mesh):
    return jax.set_mesh(mesh) if hasattr(jax, "set_mesh") else jax.sharding.use_mesh(mesh)


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
        got = jax.jit(pulled(case, outputs))(sharded, tuple(put(mesh, x, result) for x in outputs))
        for name, x in got.items():
            assert x.sharding.is_equivalent_to(sharded[name].sharding, x.ndim), name
        assert_gradients(got, case, outputs)


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
    here = types.SimpleNamespace(choose=lambda *_: ffi_call.Choice(True, ""), log_once=pytest.fail)
    monkeypatch.setattr(acceleration, "ffi_call", here)
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

CALL = """
import sys
import jax, numpy as np
import jax.export, ml_dtypes
import jax_grouped_gemm
program, operands, results = sys.argv[1:]
jax.config.update("jax_num_cpu_devices", 8)
exported = jax.export.deserialize(bytearray(open(program, "rb").read()))
operands = np.load(operands)
operands = [operands[name] for name in "abo"]
operands = [x.view(ml_dtypes.bfloat16) if x.dtype == np.uint16 else x for x in operands]
if exported.nr_devices > 1:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[: exported.nr_devices]).reshape(4, 2), ("x", "y"))
    specs = jax.sharding.PartitionSpec("x"), jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec()
    operands = [jax.device_put(x, jax.sharding.NamedSharding(mesh, spec)) for x, spec in zip(operands, specs)]
got = jax.tree.leaves(jax.jit(exported.call)(*operands))
np.savez(results, *[np.asarray(x).astype(np.float32) for x in got])
"""


def elsewhere(exported, operands, folder):
    """What a fresh process gets of the serialised program."""
    pytest.importorskip("flatbuffers")
    (folder / "program").write_bytes(exported.serialize())
    bits = [np.asarray(x).view(np.uint16) if x.dtype == jnp.bfloat16 else np.asarray(x) for x in operands]
    np.savez(folder / "operands.npz", **dict(zip("abo", bits, strict=True)))
    arguments = [folder / name for name in ("program", "operands.npz", "results.npz")]
    done = subprocess.run(
        [sys.executable, "-c", CALL, *map(str, arguments)],
        env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert not done.returncode, done.stderr
    return list(np.load(folder / "results.npz").values())


def export(function, operands, platforms):
    targets = library.FORWARD, library.WGRAD
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in targets]
    return jax.export.export(jax.jit(function), platforms=platforms, disabled_checks=checks)(*operands)


def assert_same(got, want):
    for g, w in zip(got, jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, np.asarray(w).astype(np.float32), rtol=0.01, atol=0.01)


@pytest.mark.usefixtures("lowered_for_cuda")
@pytest.mark.parametrize("function", FORWARD_AND_GRADIENT)
def test_exported_for_one_device(function, tmp_path):
    case = make(poison=False)
    operands = [jnp.asarray(x) for x in (case.a, case.b, case.offsets)]
    exported = export(function, operands, ("cpu", "cuda"))
    assert exported.nr_devices == 1
    assert f"@{library.FORWARD}" in exported.mlir_module() or f"@{library.WGRAD}" in exported.mlir_module()
    assert "CustomSPMDPartitioning" not in exported.mlir_module()
    assert_same(elsewhere(exported, operands, tmp_path), function(*operands))


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
    exported = export(lambda *x: (mapped(*x), *jax.grad(loss, (0, 1))(*x)), operands, ("cpu", "cuda"))
    assert exported.nr_devices == 8
    here = [jnp.asarray(x) for x in (case.a, case.b, case.offsets)]
    got = elsewhere(exported, here, tmp_path)
    assert_same(got[:2], (function(*here), jax.grad(plain)(*here)))
    np.testing.assert_allclose(got[2], jax.grad(plain, 1)(*here).astype(np.float32), rtol=0.02, atol=0.25)


def test_automatic_partitioning_is_not_exported(mesh):
    case = make()
    operands = [put(mesh, x, spec) for x, spec in ((case.a, P("x")), (case.b, P()), (case.offsets, P()))]
    with pytest.raises(
        NotImplementedError, match="the rule for it is Python.*inside jax.shard_map, or export the program for one"
    ):
        jax.export.export(jax.jit(lambda a, b, offsets: grouped_gemm(a, b, offsets=offsets)))(*operands)
