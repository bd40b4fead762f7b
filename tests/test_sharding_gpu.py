"""Two GPUs: the kernels in shard_map, under automatic partitioning and on explicit axes, forward and backward."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_grouped_gemm import grouped_gemm

pytestmark = pytest.mark.gpu

L, M, N, K = 8, 1024, 512, 256


@pytest.fixture
def devices():
    found = jax.devices("cuda")
    if len(found) < 2:
        pytest.skip("one GPU")
    return np.array(found[:2])


def problem():
    case = oracle.make_case(np.random.default_rng(0), L, M, N, K, poison=False)
    arrays = {name: x for name, x in case.arguments().items() if isinstance(x, jax.Array)}
    return arrays, jax.random.normal(jax.random.key(1), (M, N), jnp.bfloat16)


NAMES = ("a", "b", "alpha", "prob")


def gradient(arrays, cotangent):
    """(D, the cotangents of what is differentiated)."""

    def product(moving):
        return grouped_gemm(**arrays | moving, implementation="cutedsl")

    d, back = jax.vjp(product, {name: arrays[name] for name in NAMES})
    return d, *back(cotangent)


def check(got, want):
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
        assert np.linalg.norm(ours - theirs) <= 0.005 * np.linalg.norm(theirs)


# Of a, b and the cotangent of D.
SPECS = {
    "rows": (P("x"), P(), P("x")),
    "columns": (P(), P(None, "x"), P(None, "x")),
    "contraction": (P(None, "x"), P(None, None, "x"), P()),
    "experts": (P(), P("x"), P()),
    "rows and experts": (P("x"), P("x"), P("x")),
}


@pytest.mark.parametrize("name", SPECS)
def test_automatic_partitioning(devices, name):
    arrays, cotangent = problem()
    want = jax.jit(gradient)(arrays, cotangent)
    mesh = jax.sharding.Mesh(devices, ("x",))
    specs = dict(zip(("a", "b"), SPECS[name], strict=False)) | {"prob": P(*SPECS[name][0][:1])}
    placed = {n: jax.device_put(x, NamedSharding(mesh, specs.get(n, P()))) for n, x in arrays.items()}
    cotangent = jax.device_put(cotangent, NamedSharding(mesh, SPECS[name][2]))
    compiled = jax.jit(gradient).lower(placed, cotangent).compile()
    text = compiled.as_text()
    assert "jax_grouped_gemm_forward" in text
    assert "jax_grouped_gemm_wgrad" in text
    weights = rf"\[{L},{N},{K}\]"
    assert not re.search(rf"{weights}\S* all-gather", text), "the weights were gathered"
    check(compiled(placed, cotangent), want)


def test_explicit_axes(devices):
    arrays, cotangent = problem()
    plain = jax.jit(gradient)(arrays, cotangent)
    mesh = jax.sharding.Mesh(devices, ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        placed = {
            n: jax.device_put(x, NamedSharding(mesh, P(None, "x") if n == "b" else P())) for n, x in arrays.items()
        }
        cotangent = jax.device_put(cotangent, NamedSharding(mesh, P(None, "x")))
        d, found = jax.jit(gradient)(placed, cotangent)
        assert d.sharding.spec == P(None, "x")
        assert tuple(found["b"].sharding.spec)[:2] == (None, "x")
    check((d, found), plain)


def test_shard_map(devices):
    """Weights replicated, rows of each device in groups of their own; the gradient of the weights is summed."""
    arrays, cotangent = problem()
    mesh = jax.sharding.Mesh(devices, ("x",))
    half = M // 2
    ends = np.asarray(arrays["offsets"])
    local_ends = np.concatenate([np.clip(ends, 0, half), np.clip(ends - half, 0, half)]).astype(np.int32)

    def part(arrays, cotangent):
        return gradient(arrays, cotangent)

    specs = {"a": P("x"), "b": P(), "offsets": P("x"), "alpha": P(), "prob": P("x")}
    sums = {"a": P("x"), "b": P(), "alpha": P(), "prob": P("x")}  # the checked axes: a replicated operand's is a sum
    run = jax.shard_map(part, mesh=mesh, in_specs=(specs, P("x")), out_specs=(P("x"), sums))
    got = jax.jit(run)(arrays | {"offsets": jnp.asarray(local_ends)}, cotangent)
    check(got, jax.jit(gradient)(arrays, cotangent))
