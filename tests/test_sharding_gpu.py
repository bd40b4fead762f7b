"""Several GPUs: the kernels and the reference under shard_map, automatic partitioning and explicit axes."""

import jax
import numpy as np
import oracle
import pytest
import sharding_problems
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_grouped_gemm import ffi_call, grouped_gemm, library

OFFSETS = [100, 100, 333, 500, 650, 651, 900, 1000]
L, M, N, K = 8, 1024, 512, 256


def gpus():
    try:
        return jax.devices("cuda")
    except RuntimeError:
        return []


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(len(gpus()) < 2, reason="fewer than two GPUs"),
    pytest.mark.parametrize(
        "implementation",
        [
            pytest.param(
                "cutedsl", marks=pytest.mark.skipif(not ffi_call.architectures(), reason="no kernels for them")
            ),
            "reference",
        ],
    ),
]

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
