"""Routing, dispatch, combine and the router's losses, against NumPy. No Flax."""

import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

from jax_grouped_gemm import grouped_gemm
from jax_grouped_gemm.nn import routing

pytestmark = pytest.mark.usefixtures("compiled_fast")

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def make(rng, tokens=11, experts=5, width=8, masked=False):
    """Logits, x, and a mask whose tokens hold NaN."""
    logits = rng.standard_normal((tokens, experts), np.float32)
    x = rng.standard_normal((tokens, width), np.float32)
    if not masked:
        return jnp.asarray(logits), jnp.asarray(x), None
    mask = rng.random(tokens) < 0.6
    logits[~mask] = x[~mask] = np.nan
    return jnp.asarray(logits), jnp.asarray(x), jnp.asarray(mask)


def softmax(logits):
    e = np.exp(np.asarray(logits, np.float64) - np.max(logits, axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def layer(logits, x, mask, k=2):
    """Something of every function that has a derivative, not linear in any."""
    routed = routing.top_k_route(logits, k, mask=mask)
    rows = jnp.sin(routing.dispatch(x, routed)) * routing.sorted_probs(routed)[:, None]
    return routing.combine(rows, routed)


def loss(logits, x, mask=None, k=2):
    routed = routing.top_k_route(logits, k, mask=mask)
    losses = routing.load_balancing_loss(logits, routed) + routing.router_z_loss(logits, mask=mask)
    return jnp.sum(layer(logits, x, mask, k) ** 2) + losses


# --- what they compute ------------------------------------------------------------------------------------------------


@settings(max_examples=10)
@given(
    seed=st.integers(0, 1000),
    tokens=st.integers(0, 12),
    experts=st.integers(1, 6),
    k=st.integers(1, 6),
    normalize=st.booleans(),
    masked=st.booleans(),
    ties=st.booleans(),
)
@example(seed=0, tokens=12, experts=4, k=4, normalize=True, masked=True, ties=True)
def test_routing(seed, tokens, experts, k, normalize, masked, ties):
    k = min(k, experts)
    logits, x, mask = make(np.random.default_rng(seed), tokens, experts, masked=masked)
    logits = jnp.round(logits) if ties else logits
    routed = routing.top_k_route(logits, k, normalize=normalize, mask=mask)
    real = np.ones(tokens, bool) if mask is None else np.asarray(mask)

    probs = softmax(np.where(real[:, None], logits, 0)) if tokens else np.zeros((0, experts))
    expert = np.argsort(-np.where(real[:, None], logits, 0), axis=1, kind="stable")[:, :k]
    prob = np.take_along_axis(probs, expert, 1)
    prob = prob / prob.sum(axis=1, keepdims=True) if normalize else prob
    expert[~real], prob[~real] = experts, 0
    order = np.argsort(expert.reshape(-1), kind="stable")

    np.testing.assert_array_equal(routed.expert, expert)
    np.testing.assert_allclose(routed.prob, prob, **CLOSE)
    np.testing.assert_array_equal(routed.order, order)
    np.testing.assert_array_equal(routed.inverse, np.argsort(order))
    np.testing.assert_array_equal(routed.group_sizes, np.bincount(expert.reshape(-1), minlength=experts + 1)[:experts])
    assert {y.dtype.name for y in (routed.expert, routed.order, routed.inverse, routed.group_sizes)} == {"int32"}
    assert routed.prob.dtype == jnp.float32

    rows = np.where(real[:, None], x, 0)[order // k]
    np.testing.assert_array_equal(routing.dispatch(x, routed), rows)
    np.testing.assert_allclose(routing.sorted_probs(routed), prob.reshape(-1)[order], **CLOSE)
    poisoned = np.where(np.arange(len(rows))[:, None] < int(routed.group_sizes.sum()), rows + 1, np.nan)
    sums = np.where(real[:, None], poisoned[np.argsort(order)].reshape(tokens, k, 8).sum(1), 0)
    np.testing.assert_allclose(routing.combine(jnp.asarray(poisoned, jnp.float32), routed), sums, **CLOSE)


def test_all_tokens_to_one_expert(rng):
    logits = jnp.zeros((6, 4)).at[:, 2].set(9)
    routed = routing.top_k_route(logits, 1)
    np.testing.assert_array_equal(routed.group_sizes, [0, 0, 6, 0])
    np.testing.assert_array_equal(routed.order, np.arange(6))


def test_logits_of_other_dtypes_are_routed_in_float32(rng):
    logits, _, _ = make(rng)
    routed = routing.top_k_route(logits.astype(jnp.bfloat16), 2)
    want = routing.top_k_route(logits.astype(jnp.bfloat16).astype(jnp.float32), 2)
    np.testing.assert_array_equal(routed.prob, want.prob)


def test_experts_whose_probability_is_zero_are_in_the_order_of_their_logits():
    got = routing.top_k_route(jnp.array([[-200.0, -150.0, 0.0]]), 2)
    np.testing.assert_array_equal(got.expert, [[2, 1]])
    np.testing.assert_array_equal(got.prob, [[1, 0]])


def test_combine_adds_in_float32(rng):
    routed = routing.top_k_route(make(rng, 1, 3)[0], 3)
    rows = jnp.asarray([[256], [1], [1]], jnp.bfloat16)  # 256 + 1 is 256 in bfloat16
    out = routing.combine(rows, routed)
    assert out.dtype == jnp.bfloat16
    assert out.item() == 258


@pytest.mark.parametrize("masked", [False, True])
def test_experts_by_grouped_gemm(rng, masked):
    """With `prob=` of the product, combine is a plain sum."""
    logits, x, mask = make(rng, 13, 4, masked=masked)
    weights = jnp.asarray(rng.standard_normal((4, 8, 16)), jnp.bfloat16)
    routed = routing.top_k_route(logits, 2, mask=mask)
    rows = routing.dispatch(x.astype(jnp.bfloat16), routed)
    prob = routing.sorted_probs(routed)
    out = grouped_gemm(rows, weights, group_sizes=routed.group_sizes, b_major="n", prob=prob, d_dtype="float32")
    real = np.ones(13, bool) if mask is None else np.asarray(mask)
    want = np.zeros((13, 16))
    for t in np.flatnonzero(real):
        for e, p in zip(routed.expert[t], routed.prob[t], strict=True):
            want[t] += float(p) * (np.asarray(x[t].astype(jnp.bfloat16), float) @ np.asarray(weights[e], float))
    np.testing.assert_allclose(routing.combine(out, routed), want, rtol=1e-5, atol=1e-5)


# --- derivatives ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("k", "masked"), [(1, False), (3, True), (5, False)])
def test_derivatives_of_both_modes(rng, k, masked):
    logits, x, mask = make(rng, masked=masked)
    logits, x = jnp.nan_to_num(logits), jnp.nan_to_num(x)  # finite differences of NaN are NaN
    function = jax.jit(lambda logits, x: layer(logits, x, mask, k))
    check_grads(function, (logits, x), order=2, rtol=2e-2, atol=2e-2, eps=1e-3)


def test_each_is_the_transpose_of_the_other(rng):
    logits, x, mask = make(rng, masked=True)
    routed = routing.top_k_route(logits, 2, mask=mask)
    rows = jnp.asarray(rng.standard_normal((22, 8)), jnp.float32)
    (of_rows,) = jax.linear_transpose(lambda x: routing.dispatch(x, routed), x)(rows)
    np.testing.assert_array_equal(of_rows, routing.combine(rows, routed))
    (of_x,) = jax.linear_transpose(lambda rows: routing.combine(rows, routed), rows)(x)
    np.testing.assert_array_equal(of_x, routing.dispatch(x, routed))


def test_the_gradient_against_a_dense_layer(rng):
    """Every expert's share of every token, as JAX differentiates it."""
    logits, x, _ = make(rng)

    def dense(logits, x):
        probs = jax.nn.softmax(logits)
        kth = jax.lax.stop_gradient(jnp.sort(probs, axis=1)[:, -2:-1])
        probs = jnp.where(probs >= kth, probs, 0)
        return jnp.sum((jnp.sin(x) * (probs / probs.sum(1, keepdims=True)).sum(1, keepdims=True)) ** 2)

    got = jax.grad(lambda logits, x: jnp.sum(layer(logits, x, None) ** 2), (0, 1))(logits, x)
    for a, b in zip(got, jax.grad(dense, (0, 1))(logits, x), strict=True):
        np.testing.assert_allclose(a, b, **CLOSE)


def test_masked_tokens_have_no_gradients(rng):
    logits, x, mask = make(rng, masked=True)
    assert not mask.all()
    value, gradients = jax.jit(jax.value_and_grad(loss, (0, 1)))(logits, x, mask)
    assert np.isfinite(value)
    for gradient in gradients:
        assert np.isfinite(gradient).all()
        assert not gradient[~mask].any()
        assert (gradient[mask] != 0).any(axis=1).all()
    kept = jax.jit(jax.grad(loss, (0, 1)))(logits[mask], x[mask])
    for gradient, want in zip(gradients, kept, strict=True):
        np.testing.assert_allclose(gradient[mask], want, **CLOSE)


def programs():
    first = jax.grad(loss, (0, 1))
    again = jax.grad(lambda logits, x, mask: sum(jnp.sum(g**2) for g in first(logits, x, mask)), (0, 1))
    batched = jax.vmap(jax.grad(loss, (0, 1)), in_axes=(None, 0, None))
    return {
        "forward": loss,
        "backward": first,
        "second order": again,
        "batched": lambda logits, x, mask: batched(logits, jnp.stack([x, x]), mask),
        "forward mode": lambda logits, x, mask: jax.jvp(lambda *y: loss(*y, mask), (logits, x), (logits, x)),
    }


def scatters_of_floats(text):
    """Of a compiled program. XLA may make one of integers, of the argsort of a permutation: it adds nothing up."""
    return re.findall(r"= (?:f32|bf16)\[.* scatter\(", text)


@pytest.mark.parametrize("name", programs())
@pytest.mark.parametrize("masked", [False, True])
def test_both_directions_are_gathers(rng, name, masked):
    program = programs()[name]
    operands = make(rng, masked=masked)
    assert "scatter" not in str(jax.make_jaxpr(program)(*operands))
    lowered = jax.jit(program).lower(*operands)
    assert "scatter" not in lowered.as_text()
    assert not scatters_of_floats(lowered.compile().as_text())


def test_what_jax_would_do(rng):
    """The search of `test_both_directions_are_gathers` finds what it is for."""
    _, x, _ = make(rng)
    gather = jax.grad(lambda x: jnp.square(x[jnp.asarray([3, 3, 1])]).sum())
    assert "scatter" in str(jax.make_jaxpr(gather)(x))
    lowered = jax.jit(gather).lower(x)
    assert "scatter" in lowered.as_text()
    assert scatters_of_floats(lowered.compile().as_text())


# --- transformations --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0), (1, 2)])
def test_vmap(rng, axes, masked):
    cases = [make(rng, masked=masked)[:2] for _ in range(3)]
    mask = make(rng, masked=masked)[2]
    batch = [
        operands[0] if axis is None else jnp.stack(operands, axis)
        for operands, axis in zip(zip(*cases, strict=True), axes, strict=True)
    ]
    batch = [jnp.nan_to_num(x) for x in batch]
    both = lambda logits, x: (layer(logits, x, mask), jax.grad(loss, (0, 1))(logits, x, mask))
    got = jax.jit(jax.vmap(both, in_axes=axes))(*batch)
    both = jax.jit(both)
    for i in range(3):
        one = [x if axis is None else jnp.take(x, i, axis) for x, axis in zip(batch, axes, strict=True)]
        jax.tree.map(lambda a, b, i=i: np.testing.assert_allclose(a[i], b, **CLOSE), got, both(*one))


def test_one_routing_for_a_batch(rng):
    """And a batch of routings for one x."""
    logits, x, _ = make(rng)
    routed = routing.top_k_route(logits, 2)
    batch = jnp.stack([x, 2 * x])
    got = jax.vmap(routing.dispatch, (0, None))(batch, routed)
    np.testing.assert_array_equal(got, jnp.stack([routing.dispatch(y, routed) for y in batch]))
    both = jax.vmap(lambda logits: routing.top_k_route(logits, 2))(jnp.stack([logits, -logits]))
    got = jax.vmap(routing.dispatch, (None, 0))(x, both)
    want = [routing.dispatch(x, routing.top_k_route(y, 2)) for y in (logits, -logits)]
    np.testing.assert_array_equal(got, jnp.stack(want))


def test_an_empty_batch(rng):
    logits, x, mask = make(rng, masked=True)
    routed = routing.top_k_route(logits, 2, mask=mask)
    rows = jax.vmap(lambda x: routing.dispatch(x, routed))(jnp.zeros((0, *x.shape)))
    assert rows.shape == (0, 22, 8)
    assert jax.vmap(lambda rows: routing.combine(rows, routed))(rows).shape == (0, *x.shape)
    both = jax.vmap(jax.grad(lambda logits, x: loss(logits, x, mask), (0, 1)))
    got = both(jnp.zeros((0, *logits.shape)), jnp.zeros((0, *x.shape)))
    assert [g.shape for g in got] == [(0, *logits.shape), (0, *x.shape)]


@pytest.mark.parametrize(
    "wrapped", [jax.jit, jax.checkpoint, lambda f: lambda *y: jax.lax.scan(lambda c, _: (c, f(*y)), 0, None, 1)[1][0]]
)
def test_jit_remat_and_scan(rng, wrapped):
    logits, x, mask = make(rng, masked=True)
    got = jax.grad(wrapped(loss), (0, 1))(logits, x, mask)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **CLOSE), got, jax.grad(loss, (0, 1))(logits, x, mask))


def test_disable_jit(rng):
    operands = make(rng, masked=True)
    want = layer(*operands)
    with jax.disable_jit():
        np.testing.assert_allclose(layer(*operands), want, **CLOSE)


def test_x64(rng):
    logits, x, mask = make(rng, masked=True)
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64(True):
        routed = routing.top_k_route(logits, 2, mask=mask)
        assert routed.order.dtype == routed.inverse.dtype == routed.expert.dtype == routed.group_sizes.dtype == "int32"
        rows = routing.dispatch(jnp.asarray(np.asarray(x), jnp.float64), routed)
        assert routing.combine(rows, routed).dtype == "float64"


SHARDED = """
import jax, jax.numpy as jnp, numpy as np, sys
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
sys.path.insert(0, "tests")
from test_nn_routing import layer
mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
rng = np.random.default_rng(0)
logits, x = (jnp.asarray(rng.standard_normal((12, n)), jnp.float32) for n in (5, 8))
function = lambda logits, x: layer(logits, x, None)

def same(got, want, *operands):
    got, want = (jax.jit(jax.value_and_grad(lambda *y: jnp.sum(f(*y) ** 2), (0, 1)))(*operands) for f in (got, want))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)

halves = lambda logits, x: jnp.concatenate([function(logits[:6], x), function(logits[6:], x)])
for check in (False, True):
    mapped = lambda *specs: jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=P("x"), check_vma=check)
    same(mapped(P("x"), P("x")), function, logits, x)
    same(mapped(P("x"), P()), halves, logits, x[:6])  # what every device has, by a routing of its own
split = NamedSharding(mesh, P("x"))
same(function, function, jax.device_put(logits, split), jax.device_put(x, split))
from jax_grouped_gemm.nn import routing
explicit = NamedSharding(jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,)), P("x"))
columns, whole = (NamedSharding(explicit.mesh, spec) for spec in (P(None, "x"), P()))
assert (routing.top_k_route(jax.device_put(logits, whole), 2).order == routing.top_k_route(logits, 2).order).all()
mask = jax.device_put(jnp.ones(12, bool), explicit)
for call in (
    lambda: jax.jit(lambda x: routing.dispatch(x, routing.top_k_route(logits, 2)))(jax.device_put(x, explicit)),
    lambda: routing.top_k_route(jax.device_put(logits, explicit), 2),
    lambda: routing.top_k_route(jax.device_put(logits[:, :4], columns), 2),
    lambda: routing.top_k_route(jax.device_put(logits, whole), 2, mask=mask),
):
    try:
        call()
    except NotImplementedError as error:
        print(error)
"""


@pytest.mark.skipif(not hasattr(jax, "shard_map"), reason="this JAX has shard_map elsewhere")
def test_several_devices():
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", SHARDED], env=environment, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    refused = "top_k_route, dispatch and combine have no rule for operands on a mesh with explicit axes"
    assert done.stdout.count(refused) == 4


# --- losses -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("k", [1, 2, 5])
def test_load_balancing_loss(rng, k, masked):
    logits, _, mask = make(rng, masked=masked)
    routed = routing.top_k_route(logits, k, mask=mask)
    kept = np.asarray(logits)[np.ones(11, bool) if mask is None else np.asarray(mask)]
    probs = softmax(kept)
    chosen = np.argsort(-kept, axis=1)[:, :k]
    fraction = np.bincount(chosen.reshape(-1), minlength=5) / chosen.size
    want = 5 * np.sum(fraction * probs.mean(axis=0))
    np.testing.assert_allclose(routing.load_balancing_loss(logits, routed), want, rtol=1e-5)


def test_load_balancing_loss_is_least_when_balanced():
    """1 where tokens and probabilities are spread evenly, E where one expert has everything; descent leads to 1."""
    loss = jax.jit(lambda logits: routing.load_balancing_loss(logits, routing.top_k_route(logits, 1)))
    balanced = 5 * jnp.tile(jnp.eye(4), (3, 1))
    np.testing.assert_allclose(loss(balanced), 1, rtol=1e-5)
    np.testing.assert_allclose(loss(jnp.zeros((12, 4)).at[:, 1].set(50)), 4, rtol=1e-5)
    logits = jax.random.normal(jax.random.key(0), (64, 4)) + jnp.asarray([[1.5, 0.5, 0, 0]])
    before, step = loss(logits), jax.jit(jax.grad(loss))
    for _ in range(100):
        logits -= 20 * step(logits)
    assert before > 1.2
    assert loss(logits) < 1.05


def test_fractions_are_constants(rng):
    logits, _, _ = make(rng)
    fraction = routing.top_k_route(logits, 1).group_sizes / 11
    want = jax.grad(lambda y: 5 * jnp.sum(fraction * jax.nn.softmax(y).mean(0)))(logits)
    got = jax.grad(lambda y: routing.load_balancing_loss(y, routing.top_k_route(y, 1)))(logits)
    np.testing.assert_allclose(got, want, **CLOSE)
    assert got.any()


@pytest.mark.parametrize("masked", [False, True])
def test_router_z_loss(rng, masked):
    logits, _, mask = make(rng, masked=masked)
    kept = np.asarray(logits, np.float64)[np.ones(11, bool) if mask is None else np.asarray(mask)]
    want = np.mean(np.log(np.exp(kept).sum(axis=1)) ** 2)
    np.testing.assert_allclose(routing.router_z_loss(logits, mask=mask), want, rtol=1e-5)


@pytest.mark.parametrize("mask", [None, np.zeros(3, bool)])
def test_losses_without_tokens(mask):
    logits = jnp.zeros((0 if mask is None else 3, 4))
    mask = None if mask is None else jnp.asarray(mask)
    routed = routing.top_k_route(logits, 2, mask=mask)
    assert routing.load_balancing_loss(logits, routed) == 0
    assert routing.router_z_loss(logits, mask=mask) == 0


# --- mistakes ---------------------------------------------------------------------------------------------------------


def test_lists_and_numpy_arrays(rng):
    logits, x, mask = make(rng, masked=True)
    want = routing.top_k_route(logits, 2, mask=mask)
    for convert in (np.asarray, lambda x: np.asarray(x).tolist()):
        routed = routing.top_k_route(convert(logits), 2, mask=convert(mask))
        jax.tree.map(np.testing.assert_array_equal, routed, want)
        np.testing.assert_array_equal(routing.dispatch(convert(x), routed), routing.dispatch(x, want))
        rows = jnp.ones((22, 8))
        np.testing.assert_array_equal(routing.combine(convert(rows), routed), routing.combine(rows, want))
        losses = lambda logits, mask: (
            routing.load_balancing_loss(logits, want),
            routing.router_z_loss(logits, mask=mask),
        )
        assert losses(convert(logits), convert(mask)) == losses(logits, mask)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda r: routing.top_k_route(jnp.zeros(4), 1), "logits must be (T, E); got (4,); reshape it"),
        (lambda r: routing.top_k_route(jnp.zeros((4, 4), jnp.int32), 1), "logits must be floating; got int32; cast it"),
        (lambda r: routing.top_k_route(jnp.zeros((4, 3)), 4), "k must be an integer from 1 to E = 3; got 4; pass"),
        (lambda r: routing.top_k_route(jnp.zeros((4, 3)), 0), "k must be an integer from 1 to E = 3; got 0; pass"),
        (lambda r: routing.top_k_route(jnp.zeros((4, 3)), 1, mask=jnp.ones(3, bool)), "mask must be (T,) = (4,); got (3,)"),
        (lambda r: routing.top_k_route(jnp.zeros((4, 3)), 1, mask=jnp.ones(4)), "mask must be bool; got float32; cast"),
        (lambda r: routing.top_k_route([[1.0, 2.0], [1.0]], 1), "logits must be a JAX or NumPy array; got list; convert it"),
        (lambda r: routing.top_k_route(1.0, 1), "logits must be (T, E); got ()"),
        (lambda r: routing.top_k_route(jnp.zeros((4, 3)), 1, mask="yes"), "mask must be a JAX or NumPy array; got str; convert it"),
        (lambda r: routing.load_balancing_loss(jnp.zeros((5, 3)), r), "logits must be (T, E) = (4, 3), those that were routed; got (5, 3); pass"),
        (lambda r: routing.load_balancing_loss(jnp.zeros((4, 2)), r), "logits must be (T, E) = (4, 3), those that were routed; got (4, 2); pass"),
        (lambda r: routing.router_z_loss("logits"), "logits must be a JAX or NumPy array; got str; convert it"),
        (lambda r: routing.dispatch(2.0, r), "x must be (T, D) with T = 4; got ()"),
        (lambda r: routing.combine("rows", r), "rows must be a JAX or NumPy array; got str; convert it"),
        (lambda r: routing.dispatch(jnp.zeros((5, 8)), r), "x must be (T, D) with T = 4; got (5, 8); pass the tokens"),
        (lambda r: routing.combine(jnp.zeros((4, 8)), r), "rows must be (T * k, D) with T * k = 8; got (4, 8); pass a row"),
    ],
)  # fmt: skip
def test_mistakes(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call(routing.top_k_route(jnp.zeros((4, 3)), 2))


WITHOUT_FLAX = """
import sys
sys.modules["flax"] = None
import jax_grouped_gemm.nn.routing, jax_grouped_gemm.nn.functional
for name in ("linen", "nnx"):
    try:
        __import__(f"jax_grouped_gemm.nn.{name}")
    except ImportError as error:
        print(error)
"""


def test_flax_is_not_needed_but_by_its_modules():
    done = subprocess.run([sys.executable, "-c", WITHOUT_FLAX], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    want = "jax_grouped_gemm.nn.{} needs flax; got none; install it, e.g. pip install flax\n"
    assert done.stdout == want.format("linen") + want.format("nnx")


def test_flax_is_not_imported():
    program = "import sys, jax_grouped_gemm.nn.functional; sys.exit('flax' in sys.modules)"
    assert not subprocess.run([sys.executable, "-c", program], check=False).returncode
