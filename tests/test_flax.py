"""The modules for Flax, against every expert applied to every token in float64."""

import functools
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_grouped_gemm import api, log
from jax_grouped_gemm.nn import functional, routing

pytest.importorskip("flax")

import flax
from flax import linen as nn
from flax import nnx

from jax_grouped_gemm.nn import linen
from jax_grouped_gemm.nn import nnx as ours

pytestmark = pytest.mark.usefixtures("compiled_fast")

E, D, F = 4, 16, 24
x64 = functools.partial(jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64, True)


def tokens(rng, *shape, dtype=jnp.float32):
    """Values that bfloat16 holds: routing is the same in every dtype."""
    return jnp.asarray(rng.standard_normal((*shape, D)), jnp.bfloat16).astype(dtype)


def init(module, x, **options):
    """Its variables, with biases and a router that are not as good as zero."""
    variables = module.init(jax.random.key(1), x, **options)
    noise = lambda path, p: p + 0.5 * jax.random.normal(jax.random.key(7), p.shape, p.dtype) if p.ndim == 2 else p
    return jax.tree_util.tree_map_with_path(noise, variables)


def dense(params, x, k, mask=None, normalize=True):
    """The same layer without any routing of rows."""
    x = x if mask is None else jnp.where(mask[:, None], x, 0)
    probs = jax.nn.softmax(x @ params["router"]["kernel"])
    rank = jnp.argsort(jnp.argsort(-jax.lax.stop_gradient(probs), axis=1), axis=1)
    probs = jnp.where(rank < k, probs, 0)
    probs = probs / probs.sum(axis=1, keepdims=True) if normalize else probs

    def product(name, x):
        out = jnp.einsum("t...i,eif->tef" if x.ndim == 2 else "tei,eif->tef", x, params[name]["kernel"])
        return out + params[name]["bias"][None] if "bias" in params[name] else out

    out = product("down", jax.nn.silu(product("gate", x)) * product("up", x))
    out = (probs[:, :, None] * out).sum(axis=1)
    return out if mask is None else jnp.where(mask[:, None], out, 0)


def wide(tree):
    return jax.tree.map(lambda p: jnp.asarray(np.asarray(p, np.float64)), tree)


def oracle(params, x, *rest):
    """Value and gradients of sum(layer^2) in float64, and the output."""
    with x64():
        function = lambda params, x: (jnp.sum((y := dense(params, x, *rest)) ** 2), y)
        (_, out), gradients = jax.value_and_grad(function, (0, 1), has_aux=True)(wide(params), wide(x))
        return jax.tree.map(np.asarray, (out, gradients))


def assert_close(got, want, tolerance):
    """By the norm of each array."""

    def check(a, b):
        a = np.asarray(a, np.float64)
        assert np.isfinite(a).all()
        assert np.linalg.norm(a - b) <= tolerance * max(np.linalg.norm(b), 1e-6)

    jax.tree.map(check, got, want)


def value_and_gradients(function, params, x):
    function_and_output = lambda params, x: (
        jnp.sum((y := function(params, x)).astype(jnp.float32) ** 2),
        y.reshape(-1, y.shape[-1]),
    )
    (_, out), gradients = jax.jit(jax.value_and_grad(function_and_output, (0, 1), has_aux=True))(params, x)
    return out, gradients


TOLERANCE = {None: 1e-5, jnp.float32: 1e-5, jnp.bfloat16: 2e-2}


# --- the layer against the oracle -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("k", "use_bias", "normalize", "dtype"),
    [
        (1, False, False, None),
        (2, True, True, jnp.bfloat16),
        (2, False, True, jnp.bfloat16),
        (3, True, False, None),
        (4, False, True, None),
    ],
)
def test_layer(rng, k, use_bias, normalize, dtype):
    layer = linen.MoEMLP(E, F, k, use_bias=use_bias, normalize=normalize, dtype=dtype)
    x = tokens(rng, 21)
    params = init(layer, x)["params"]
    got = value_and_gradients(lambda params, x: layer.apply({"params": params}, x), params, x)
    assert jax.tree.map(lambda g: g.dtype, got[1]) == jax.tree.map(lambda p: p.dtype, (params, x))
    assert got[0].dtype == (dtype or jnp.float32)
    assert_close(got, oracle(params, x, k, None, normalize), TOLERANCE[dtype])


def test_some_experts_get_nothing_and_one_everything(rng):
    layer = linen.MoEMLP(E, F, 1)
    x = jnp.abs(tokens(rng, 9))
    params = init(layer, x)["params"]
    params["router"]["kernel"] = params["router"]["kernel"].at[:, 2].set(9)
    assert (routing.top_k_route(x @ params["router"]["kernel"], 1).expert == 2).all()
    got = value_and_gradients(lambda params, x: layer.apply({"params": params}, x), params, x)
    want = oracle(params, x, 1)
    assert_close(got[0], want[0], 1e-5)
    for name in ("gate", "up", "down"):
        gradient = got[1][0][name]["kernel"]
        assert_close(gradient, want[1][0][name]["kernel"], 1e-5)
        assert not gradient[jnp.asarray([0, 1, 3])].any()


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_padding_that_holds_nan(rng, dtype):
    layer = linen.MoEMLP(E, F, 2, dtype=dtype, use_bias=True)
    mask = jnp.asarray(rng.random(21) < 0.6)
    clean = tokens(rng, 21)
    x = jnp.where(mask[:, None], clean, jnp.nan)
    params = init(layer, clean)["params"]
    apply = lambda params, x: layer.apply({"params": params}, x.reshape(3, 7, D), mask.reshape(3, 7))
    out, gradients = value_and_gradients(apply, params, x)
    assert_close((out, gradients), oracle(params, clean, 2, mask), TOLERANCE[dtype])
    assert not out[~mask].any()
    assert not gradients[1][~mask].any()


@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (2, 1, 3), (0,)])
def test_leading_dimensions(rng, shape):
    layer = linen.MoEMLP(E, F, 2)
    x = tokens(rng, *shape)
    variables = layer.init(jax.random.key(0), tokens(rng, 5))
    out = layer.apply(variables, x)
    assert out.shape == x.shape
    np.testing.assert_allclose(out.reshape(-1, D), layer.apply(variables, x.reshape(-1, D)), rtol=1e-4, atol=1e-6)


def test_another_activation(rng):
    x = tokens(rng, 6)
    layer = linen.MoEMLP(E, F, E, activation=jnp.zeros_like)
    assert not layer.apply(layer.init(jax.random.key(0), x), x).any()


# --- parameters -------------------------------------------------------------------------------------------------------


def shapes(tree):
    return {"/".join(path): p.shape for path, p in flax.traverse_util.flatten_dict(tree).items()}


def test_parameters():
    want = {
        "router/kernel": (D, E),
        "gate/kernel": (E, D, F),
        "gate/bias": (E, F),
        "up/kernel": (E, D, F),
        "up/bias": (E, F),
        "down/kernel": (E, F, D),
        "down/bias": (E, D),
    }
    x = jnp.zeros((3, D))
    variables = linen.MoEMLP(E, F, 2, use_bias=True).init(jax.random.key(0), x)
    assert list(variables) == ["params"]  # no losses
    assert shapes(variables["params"]) == want
    state = nnx.to_pure_dict(nnx.state(ours.MoEMLP(E, D, F, 2, use_bias=True, rngs=nnx.Rngs(0)), nnx.Param))
    assert shapes(state) == want
    for use_bias, names in ((False, {"kernel"}), (True, {"kernel", "bias"})):
        found = linen.GroupedDense(E, F, use_bias).init(jax.random.key(0), x, jnp.asarray([1, 1, 1, 0]))["params"]
        assert set(found) == names
        assert (ours.GroupedDense(E, D, F, use_bias=use_bias, rngs=nnx.Rngs(0)).bias is not None) == use_bias


@pytest.mark.parametrize("framework", ["linen", "nnx"])
@pytest.mark.parametrize("param_dtype", [jnp.float32, jnp.bfloat16])
def test_each_expert_is_initialised_as_a_dense_layer(framework, param_dtype):
    """By standard deviation, bounds and independence; the fan-in is that of one expert."""
    wide, rows, sizes = 256, jnp.zeros((1, 256)), jnp.asarray([1, 0, 0, 0])
    if framework == "linen":
        layer = linen.GroupedDense(E, wide, True, param_dtype=param_dtype)
        found = layer.init(jax.random.key(0), rows.astype(param_dtype), sizes)["params"]
        kernel, bias = found["kernel"], found["bias"]
    else:
        layer = ours.GroupedDense(E, wide, wide, use_bias=True, param_dtype=param_dtype, rngs=nnx.Rngs(0))
        kernel, bias = layer.kernel[...], layer.bias[...]
    dense = nn.Dense(wide, param_dtype=param_dtype)
    of_dense = jax.vmap(lambda key: dense.init(key, rows.astype(param_dtype))["params"])(
        jax.random.split(jax.random.key(1), E)
    )
    assert kernel.dtype == bias.dtype == param_dtype
    assert (kernel.shape, bias.shape) == (of_dense["kernel"].shape, of_dense["bias"].shape)
    np.testing.assert_array_equal(bias, of_dense["bias"])
    kernel, want = (np.asarray(y, np.float64).reshape(E, -1) for y in (kernel, of_dense["kernel"]))
    np.testing.assert_allclose(kernel.std(axis=1), want.std(axis=1), rtol=0.02)  # its own error is 0.3 %
    np.testing.assert_allclose(abs(kernel).max(), abs(want).max(), rtol=0.05)  # both are truncated
    assert abs(np.corrcoef(kernel) - np.eye(E)).max() < 0.03


def test_initialisers_of_ones_own(rng):
    layer = linen.MoEMLP(
        E, F, 2, use_bias=True, kernel_init=nn.initializers.constant(2), bias_init=nn.initializers.ones,
        router_init=nn.initializers.constant(3),
    )  # fmt: skip
    params = layer.init(jax.random.key(0), tokens(rng, 3))["params"]
    of_nnx = ours.MoEMLP(
        E, D, F, 2, use_bias=True, kernel_init=nn.initializers.constant(2), bias_init=nn.initializers.ones,
        router_init=nn.initializers.constant(3), rngs=nnx.Rngs(0),
    )  # fmt: skip
    for found in (params, nnx.to_pure_dict(nnx.state(of_nnx))):
        assert (found["router"]["kernel"] == 3).all()
        for name in ("gate", "up", "down"):
            assert (found[name]["kernel"] == 2).all()
            assert (found[name]["bias"] == 1).all()


@pytest.mark.parametrize("wrap", [nn.with_partitioning, nn.with_logical_partitioning])
def test_partitioning_of_linen(rng, wrap):
    names = ("expert", "in", "out")
    layer = linen.MoEMLP(E, F, 2, kernel_init=wrap(functional.default_kernel_init, names))
    x = tokens(rng, 5)
    boxed = layer.init(jax.random.key(0), x)
    kernel = boxed["params"]["gate"]["kernel"]
    assert isinstance(kernel, nn.Partitioned)
    assert kernel.names == names
    assert nn.get_partition_spec(boxed)["params"]["down"]["kernel"] == jax.sharding.PartitionSpec(*names)
    np.testing.assert_array_equal(layer.apply(boxed, x), layer.apply(nn.unbox(boxed), x))


@pytest.mark.skipif(not hasattr(jax, "set_mesh"), reason="Flax that asks for a mesh asks for a JAX that sets one")
def test_partitioning_of_nnx(rng):
    names = ("expert", None, None)
    wrapped = nnx.with_partitioning(functional.default_kernel_init, names)
    x = tokens(rng, 5)
    with jax.set_mesh(jax.make_mesh((1,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))):
        layer = ours.MoEMLP(E, D, F, 2, kernel_init=wrapped, rngs=nnx.Rngs(0))
        out = layer(x)
    assert names in layer.gate.kernel.get_metadata().values()
    np.testing.assert_allclose(out, ours.MoEMLP(E, D, F, 2, rngs=nnx.Rngs(0))(x), rtol=1e-5, atol=1e-6)


# --- dtypes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x_dtype", "param_dtype", "dtype", "want"),
    [
        ("float32", "float32", None, "float32"),
        ("bfloat16", "bfloat16", None, "bfloat16"),
        ("float32", "float32", "bfloat16", "bfloat16"),
        ("bfloat16", "float32", "bfloat16", "bfloat16"),
        ("bfloat16", "float32", None, "float32"),
        ("float16", "float16", None, "float16"),
        ("int32", "float32", None, "float32"),
    ],
)
def test_dtypes_are_those_of_dense(x_dtype, param_dtype, dtype, want):
    x, sizes = jnp.ones((6, D), x_dtype), jnp.asarray([2, 4, 0, 0])
    layer = linen.GroupedDense(E, F, True, dtype=dtype, param_dtype=param_dtype)
    of_nnx = ours.GroupedDense(E, D, F, use_bias=True, dtype=dtype, param_dtype=param_dtype, rngs=nnx.Rngs(0))
    dense = nn.Dense(F, dtype=dtype, param_dtype=param_dtype)
    with jax.numpy_dtype_promotion("standard"):
        assert dense.init_with_output(jax.random.key(0), x)[0].dtype == want
        out, variables = layer.init_with_output(jax.random.key(0), x, sizes)
        assert out.dtype == of_nnx(x, sizes).dtype == want
    assert variables["params"]["kernel"].dtype == variables["params"]["bias"].dtype == param_dtype


@pytest.mark.parametrize(
    ("dtype", "width", "kernels"),
    [("bfloat16", D, True), ("float32", D, False), ("float16", D, False), ("bfloat16", 12, False)],
)
@pytest.mark.parametrize("use_bias", [False, True])
def test_what_goes_to_the_kernels(rng, monkeypatch, caplog, dtype, width, kernels, use_bias):
    calls = []
    monkeypatch.setattr(api, "grouped_gemm", lambda *a, f=api.grouped_gemm, **o: calls.append(a) or f(*a, **o))
    log.once.cache_clear()
    rows = jnp.asarray(rng.standard_normal((7, width)), dtype)
    kernel = jnp.asarray(rng.standard_normal((3, width, F)), dtype)
    bias = jnp.asarray(rng.standard_normal((3, F)), dtype) if use_bias else None
    prob = jnp.asarray(rng.random(7), jnp.float32)
    with caplog.at_level(logging.WARNING, "jax_grouped_gemm"):
        out = functional.grouped_dense(rows, kernel, bias, jnp.asarray([2, 0, 3]), prob)
    assert len(calls) == kernels
    assert bool(caplog.messages) != kernels
    assert out.dtype == dtype
    want = np.zeros((7, F))
    for row, expert in enumerate([0, 0, 2, 2, 2]):
        want[row] = np.asarray(rows[row], float) @ np.asarray(kernel[expert], float)
        want[row] += 0 if bias is None else np.asarray(bias[expert], float)
        want[row] *= float(prob[row])
    assert not out[5:].any()
    assert_close(out, want, 2e-2 if dtype == "bfloat16" else 2e-3 if dtype == "float16" else 1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("use_bias", [False, True])
@pytest.mark.parametrize("jit", [False, True])
def test_rows_past_the_groups_that_hold_nan(rng, dtype, use_bias, jit):
    """Neither rows, factors nor cotangents of theirs are seen."""
    sizes = jnp.asarray([2, 0, 5])
    rows, prob = jnp.asarray(rng.standard_normal((9, D)), dtype), jnp.asarray(rng.random(9), jnp.float32)
    kernel = jnp.asarray(rng.standard_normal((3, D, F)), dtype)
    bias = jnp.asarray(rng.standard_normal((3, F)), dtype) if use_bias else None
    operands = (rows, prob, kernel, bias)

    def call(operands, tail):
        function = lambda rows, prob, kernel, bias: functional.grouped_dense(rows, kernel, bias, sizes, prob)
        out, transpose = jax.vjp(function, *operands)
        return out, transpose(jnp.ones_like(out).at[7:].set(tail))

    call = jax.jit(call) if jit else call
    out, gradients = call((rows.at[7:].set(jnp.nan), prob.at[7:].set(jnp.nan), kernel, bias), jnp.nan)
    assert not out[7:].any()
    assert not any(gradient[7:].any() for gradient in gradients[:2])
    jax.tree.map(np.testing.assert_array_equal, (out, gradients), call(operands, 0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sizes_past_the_rows_are_clamped_in_a_traced_program(rng, dtype):
    rows, kernel = jnp.asarray(rng.standard_normal((9, D)), dtype), jnp.asarray(rng.standard_normal((3, D, F)), dtype)
    bias, prob = jnp.asarray(rng.standard_normal((3, F)), dtype), jnp.asarray(rng.random(9), jnp.float32)
    call = jax.jit(lambda sizes: functional.grouped_dense(rows, kernel, bias, sizes, prob))
    np.testing.assert_array_equal(call(jnp.asarray([2, -3, 70])), call(jnp.asarray([2, 0, 7])))


def test_float64(rng):
    with x64():
        rows, kernel = jnp.asarray(rng.standard_normal((5, D))), jnp.asarray(rng.standard_normal((2, D, F)))
        out = functional.grouped_dense(rows, kernel, None, jnp.asarray([2, 3], jnp.int32))
        want = jnp.concatenate([rows[:2] @ kernel[0], rows[2:] @ kernel[1]])
        np.testing.assert_allclose(out, want, rtol=1e-12)


def test_the_router_is_float32_whatever_the_dtype(rng):
    x = tokens(rng, 5, dtype=jnp.bfloat16)
    layer = linen.MoEMLP(E, F, 2, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    variables = layer.init(jax.random.key(0), x)
    assert variables["params"]["router"]["kernel"].dtype == jnp.float32
    assert variables["params"]["gate"]["kernel"].dtype == jnp.bfloat16
    seen = []
    watch = lambda call, args, options, context: seen.append((context.module.name, y := call(*args, **options))) or y
    with nn.intercept_methods(watch):
        layer.apply(variables, x)
    logits = dict(seen)["router"]
    assert logits.dtype == jnp.float32
    want = x.astype(jnp.float32) @ variables["params"]["router"]["kernel"]
    np.testing.assert_allclose(logits, want, rtol=1e-5)


# --- losses -----------------------------------------------------------------------------------------------------------


def test_losses(rng):
    x, mask = tokens(rng, 2, 6), jnp.arange(12).reshape(2, 6) % 3 > 0
    layer = linen.MoEMLP(E, F, 2)
    variables = init(layer, x)
    logits = (x @ variables["params"]["router"]["kernel"]).reshape(12, E)
    for given in (None, mask):
        flat = None if given is None else given.reshape(-1)
        routed = routing.top_k_route(logits, 2, mask=flat)
        want = {
            "load_balancing_loss": routing.load_balancing_loss(logits, routed),
            "router_z_loss": routing.router_z_loss(logits, mask=flat),
        }
        (out, losses), sown = layer.apply(variables, x, given, return_losses=True, mutable=["intermediates"])
        np.testing.assert_array_equal(out, layer.apply(variables, x, given))
        assert set(losses._asdict()) == set(sown["intermediates"]) == set(want)
        for name, value in want.items():
            np.testing.assert_allclose(getattr(losses, name), value, rtol=1e-5)
            np.testing.assert_array_equal(sown["intermediates"][name], (getattr(losses, name),))


# --- both frameworks --------------------------------------------------------------------------------------------------


def as_nnx(params, **options):
    """The module of nnx with the parameters of linen's."""
    layer = ours.MoEMLP(E, D, F, 2, rngs=nnx.Rngs(0), **options)
    state = nnx.state(layer)
    nnx.replace_by_pure_dict(state, params)
    nnx.update(layer, state)
    return layer


@pytest.mark.parametrize("options", [{}, {"dtype": jnp.bfloat16, "use_bias": True}, {"normalize": False}])
def test_both_give_the_same_numbers(rng, options):
    x, mask = tokens(rng, 3, 5), jnp.arange(15).reshape(3, 5) % 4 > 0
    layer = linen.MoEMLP(E, F, 2, **options)
    params = init(layer, x)["params"]
    other = as_nnx(params, **options)

    def square(apply):
        def loss(weights, x):
            out, losses = apply(weights, x)
            return jnp.sum(out.astype(jnp.float32) ** 2) + sum(losses), out

        return loss

    of_linen = square(lambda params, x: layer.apply({"params": params}, x, mask, return_losses=True))
    (a, out_a), grads_a = jax.jit(jax.value_and_grad(of_linen, has_aux=True))(params, x)
    of_nnx = square(lambda other, x: other(x, mask, return_losses=True))
    (b, out_b), grads_b = nnx.jit(nnx.value_and_grad(of_nnx, has_aux=True))(other, x)
    np.testing.assert_allclose(a, b, rtol=1e-6)
    np.testing.assert_array_equal(out_a, out_b)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), grads_a, nnx.to_pure_dict(grads_b)
    )
    np.testing.assert_array_equal(other(x, mask), other(x, mask, return_losses=True)[0])


# --- transformations --------------------------------------------------------------------------------------------------


class Block(nn.Module):
    dtype: object = None

    @nn.compact
    def __call__(self, x, _):
        return x + linen.MoEMLP(E, F, 2, dtype=self.dtype, name="moe")(x).astype(x.dtype), None


@pytest.mark.slow
@pytest.mark.parametrize(("remat", "dtype"), [(False, None), (True, jnp.bfloat16)])
def test_scan_over_layers(rng, remat, dtype):
    block = nn.remat(Block, prevent_cse=False) if remat else Block
    stack = nn.scan(block, {"params": 0, "intermediates": 0}, split_rngs={"params": True}, length=3)(dtype)
    x = tokens(rng, 9)
    variables = stack.init(jax.random.key(0), x, None)
    assert variables["params"]["moe"]["gate"]["kernel"].shape == (3, E, D, F)
    (got, _), sown = stack.apply(variables, x, None, mutable=["intermediates"])
    assert sown["intermediates"]["moe"]["router_z_loss"][0].shape == (3,)

    def loop(params, x):
        for i in range(3):
            x, _ = Block(dtype).apply({"params": jax.tree.map(lambda p, i=i: p[i], params)}, x, None)
        return x

    close = 1e-4 if dtype is None else 1e-2
    assert_close(got, np.asarray(loop(variables["params"], x), np.float64), close)
    gradient = lambda f: jax.jit(jax.grad(lambda params, x: jnp.sum(f(params, x) ** 2), (0, 1)))(variables["params"], x)
    want = jax.tree.map(lambda g: np.asarray(g, np.float64), gradient(loop))
    assert_close(gradient(lambda params, x: stack.apply({"params": params}, x, None)[0]), want, close)


def test_vmap_and_remat(rng):
    """Of the kernels' products; JAX's ragged_dot has no vmap with weights that are not batched."""
    layer = linen.MoEMLP(E, F, 2, dtype=jnp.bfloat16)
    x = tokens(rng, 2, 6)
    params = init(layer, x)["params"]
    whole = lambda params, x: jnp.sum(layer.apply({"params": params}, x).astype(jnp.float32) ** 2)
    batched = lambda params, x: jax.vmap(jax.checkpoint(whole), (None, 0))(params, x).sum()
    want = jax.tree.map(lambda g: np.asarray(g, np.float64), jax.jit(jax.grad(whole, (0, 1)))(params, x))
    assert_close(jax.jit(jax.grad(batched, (0, 1)))(params, x), want, 1e-2)


@pytest.mark.slow
def test_an_ensemble(rng):
    """Batched parameters."""
    layer = linen.MoEMLP(E, F, 2, dtype=jnp.bfloat16)
    x = tokens(rng, 6)
    variables = jax.vmap(layer.init, (0, None))(jax.random.split(jax.random.key(0), 2), x)
    got = jax.vmap(layer.apply, (0, None))(variables, x)
    for i in range(2):
        np.testing.assert_array_equal(got[i], layer.apply(jax.tree.map(lambda p, i=i: p[i], variables), x))


def test_an_empty_batch(rng):
    layer = linen.MoEMLP(E, F, 2, dtype=jnp.bfloat16)
    variables = layer.init(jax.random.key(0), tokens(rng, 6))
    assert jax.vmap(layer.apply, (None, 0))(variables, jnp.zeros((0, 6, D))).shape == (0, 6, D)


def explicit(x, *spec):
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices("cpu")[:2], axis_types=(jax.sharding.AxisType.Explicit,))
    return jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec)))


def test_rows_sharded_over_explicit_axes(rng):
    rows, prob = tokens(rng, 8, dtype=jnp.bfloat16), jnp.asarray(rng.random(8), jnp.float32)
    kernel, bias = jnp.asarray(rng.standard_normal((3, D, F)), jnp.bfloat16), jnp.ones((3, F), jnp.bfloat16)
    sizes = jnp.asarray([2, 0, 5])
    want = functional.grouped_dense(rows, kernel, bias, sizes, prob)
    out = functional.grouped_dense(explicit(rows, "x"), explicit(kernel), explicit(bias), sizes, explicit(prob, "x"))
    assert jax.typeof(out).sharding.spec[0] == "x"
    np.testing.assert_array_equal(out, want)


@pytest.mark.parametrize("spec", [("x",), (None, "x"), ()])
def test_tokens_on_a_mesh_with_explicit_axes(rng, spec):
    layer = ours.MoEMLP(E, D, F, 2, rngs=nnx.Rngs(0))
    with pytest.raises(NotImplementedError, match="top_k_route, dispatch and combine have no rule"):
        layer(explicit(tokens(rng, 2, 4), *spec))


def test_forward_mode(rng):
    layer = linen.MoEMLP(E, F, 2)
    x = tokens(rng, 6)
    variables = init(layer, x)
    f = lambda variables: layer.apply(variables, x).sum()
    tangent = jax.tree.map(jnp.ones_like, variables)
    _, forward = jax.jvp(f, (variables,), (tangent,))
    reverse = sum(g.sum() for g in jax.tree.leaves(jax.grad(f)(variables)))
    np.testing.assert_allclose(forward, reverse, rtol=1e-4)


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_nothing_of_the_layer_adds_by_index(rng, dtype):
    """Sums over a group in no fixed order are what the routing is made to avoid."""
    layer = linen.MoEMLP(E, F, 2, dtype=dtype, use_bias=True)
    x = tokens(rng, 6)
    variables = layer.init(jax.random.key(0), x)
    f = lambda variables, x: jnp.sum(layer.apply(variables, x).astype(jnp.float32) ** 2)
    assert "scatter" not in jax.jit(jax.grad(f, (0, 1))).lower(variables, x).as_text()


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_training_of_linen(rng, dtype):
    layer = linen.MoEMLP(E, F, 2, dtype=dtype)
    x, y = tokens(rng, 64), tokens(rng, 64)
    params = layer.init(jax.random.key(0), x)["params"]

    def loss(params):
        out, losses = layer.apply({"params": params}, x, return_losses=True)
        return jnp.mean((out.astype(jnp.float32) - y) ** 2) + 0.01 * losses.load_balancing_loss

    step = jax.jit(lambda params: jax.tree.map(lambda p, g: p - 0.5 * g, params, jax.grad(loss)(params)))
    before = loss(params)
    for _ in range(20):
        params = step(params)
    assert loss(params) < 0.95 * before
    assert jax.tree.leaves(params)[0].dtype == jnp.float32


def test_training_of_nnx(rng):
    layer = ours.MoEMLP(E, D, F, 2, rngs=nnx.Rngs(0))
    x, y = tokens(rng, 64), tokens(rng, 64)

    @nnx.jit
    def step(layer):
        def loss(layer):
            out, losses = layer(x, return_losses=True)
            return jnp.mean((out - y) ** 2) + 0.01 * losses.load_balancing_loss

        value, gradients = nnx.value_and_grad(loss)(layer)
        nnx.update(layer, jax.tree.map(lambda p, g: p - 0.5 * g, nnx.state(layer, nnx.Param), gradients))
        return value

    losses = [step(layer) for _ in range(20)]
    assert losses[-1] < 0.95 * losses[0]


# --- mistakes ---------------------------------------------------------------------------------------------------------


def test_lists_and_numpy_arrays(rng):
    x, mask = tokens(rng, 5), jnp.arange(5) % 3 > 0
    layer = ours.MoEMLP(E, D, F, 2, rngs=nnx.Rngs(0))
    dense = linen.GroupedDense(E, F)
    sizes, prob = jnp.asarray([2, 0, 3, 0]), jnp.asarray([1, 2, 3, 4, 5], jnp.float32)
    variables = variables_of(dense, x, sizes)
    for convert in (np.asarray, lambda x: np.asarray(x).tolist()):
        np.testing.assert_array_equal(layer(convert(x), convert(mask)), layer(x, mask))
        got = dense.apply(variables, convert(x), convert(sizes), convert(prob))
        np.testing.assert_array_equal(got, dense.apply(variables, x, sizes, prob))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (jnp.asarray([2, 0, 2, 0]), "group_sizes must be non-negative with a sum of at most M = rows.shape[0] = 3"),
        (jnp.asarray([2, -1, 2, 0]), "got group_sizes[1] = -1"),
        (jnp.asarray([1, 1, 1, 0], jnp.uint8), "group_sizes must be int32; got uint8; cast it"),
        (jnp.asarray([1.0, 1.0, 1.0, 0.0]), "group_sizes must be int32; got float32; cast it"),
        (np.asarray([1.0, 1.0, 1.0, 0.0]), "group_sizes must be int32; got float64; cast it"),
        (jnp.zeros(5, jnp.int32), "group_sizes must be (E,) = (4,); got (5,); pass the rows of each expert"),
    ],
)
def test_group_sizes_are_checked_whatever_the_dtype(dtype, sizes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        functional.grouped_dense(jnp.zeros((3, D), dtype), jnp.zeros((E, D, F), dtype), None, sizes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x, s: linen.MoEMLP(0, F, 1).init(jax.random.key(0), x), "num_experts must be a positive integer; got 0;"),
        (lambda x, s: linen.MoEMLP(E, 0, 1).init(jax.random.key(0), x), "hidden_features must be a positive integer; got 0;"),
        (lambda x, s: linen.MoEMLP(E, F, "2").init(jax.random.key(0), x), "k must be an integer from 1 to E = 4; got '2'"),
        (lambda x, s: linen.MoEMLP(E, F, 1).init(jax.random.key(0), x[:, :0]), "inputs.shape[-1] must be a positive integer; got 0;"),
        (lambda x, s: linen.GroupedDense(-1, F).init(jax.random.key(0), x, s), "num_experts must be a positive integer; got -1;"),
        (lambda x, s: linen.GroupedDense(E, 0).init(jax.random.key(0), x, s), "features must be a positive integer; got 0;"),
        (lambda x, s: linen.GroupedDense(E, F).init(jax.random.key(0), x[:, :0], s), "rows.shape[1] must be a positive integer; got 0;"),
        (lambda x, s: linen.GroupedDense(E, F).init(jax.random.key(0), 1.0, s), "rows must be (M, in); got ()"),
        (lambda x, s: ours.MoEMLP(0, D, F, 1, rngs=nnx.Rngs(0)), "num_experts must be a positive integer; got 0;"),
        (lambda x, s: ours.MoEMLP(E, D, -8, 1, rngs=nnx.Rngs(0)), "hidden_features must be a positive integer; got -8;"),
        (lambda x, s: ours.MoEMLP(E, 0, F, 1, rngs=nnx.Rngs(0)), "in_features must be a positive integer; got 0;"),
        (lambda x, s: ours.GroupedDense(E, D, 0, rngs=nnx.Rngs(0)), "out_features must be a positive integer; got 0;"),
        (lambda x, s: ours.GroupedDense(E, D, 8.0, rngs=nnx.Rngs(0)), "out_features must be a positive integer; got 8.0;"),
        *((lambda x, s, k=k: ours.MoEMLP(E, D, F, k, rngs=nnx.Rngs(0)), f"k must be an integer from 1 to E = 4; got {k!r}")
          for k in (0, 5, "2", True)),
    ],
)  # fmt: skip
def test_sizes_that_no_layer_has(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make(jnp.zeros((3, D)), jnp.zeros(E, jnp.int32))


def test_inputs_of_another_width_are_flax_s_error_in_linen():
    """The parameters have the width, and Flax compares it before anything is computed."""
    layer = linen.MoEMLP(E, F, 2)
    variables = variables_of(layer, jnp.zeros((3, D)))
    with pytest.raises(flax.errors.ScopeParamShapeError, match=re.escape("(8, 4)")):
        layer.apply(variables, jnp.zeros((3, 8)))


def variables_of(layer, *operands):
    return layer.init(jax.random.key(0), *operands)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda d, v, m, w: d.apply(v, jnp.zeros((2, 3, D)), jnp.zeros(E, jnp.int32)), "rows must be (M, in); got (2, 3, 16)"),
        (lambda d, v, m, w: d.apply(v, jnp.zeros((3, D)), jnp.zeros(5, jnp.int32)), "group_sizes must be (E,) = (4,); got (5,)"),
        (lambda d, v, m, w: d.apply(v, jnp.zeros((3, D)), jnp.zeros(E, jnp.int32), jnp.ones(2)), "prob must be (M,) = (3,); got (2,)"),
        (lambda d, v, m, w: ours.GroupedDense(E, D, F, rngs=nnx.Rngs(0))(jnp.zeros((3, 8)), jnp.zeros(E, jnp.int32)),
         "kernel must be (E, in, features) with in = rows.shape[1] = 8; got (4, 16, 24); pass rows of the width"),
        (lambda d, v, m, w: m.apply(w, jnp.zeros((2, 3, D)), jnp.ones((3, 2), bool)), "mask must be bool (2, 3), inputs.shape without D; got bool (3, 2)"),
        (lambda d, v, m, w: m.apply(w, jnp.zeros((3, D)), jnp.ones(3)), "mask must be bool (3,), inputs.shape without D; got float32 (3,)"),
        (lambda d, v, m, w: linen.MoEMLP(E, F, 5).init(jax.random.key(0), jnp.zeros((3, D))), "k must be an integer from 1 to E = 4; got 5"),
        (lambda d, v, m, w: d.apply(v, jnp.zeros((3, D)), jnp.zeros(E, jnp.int32), 2.0), "prob must be (M,) = (3,); got ()"),
        (lambda d, v, m, w: d.apply(v, jnp.zeros((3, D)), jnp.zeros(E, jnp.int32), "prob"), "prob must be a JAX or NumPy array; got str; convert it"),
        (lambda d, v, m, w: m.apply(w, 1.0), "inputs must be (..., D); got (); pass a vector for each token"),
        (lambda d, v, m, w: m.apply(w, [[1.0], []]), "inputs must be a JAX or NumPy array; got list; convert it"),
        (lambda d, v, m, w: m.apply(w, jnp.zeros((3, D)), "mask"), "mask must be a JAX or NumPy array; got str; convert it"),
        (lambda d, v, m, w: m.apply(w, jnp.zeros((2, D)), [1, 0]), "mask must be bool (2,), inputs.shape without D; got int32 (2,)"),
        (lambda d, v, m, w: ours.MoEMLP(E, D, F, 2, rngs=nnx.Rngs(0))(jnp.zeros((3, 8))),
         "inputs must be (..., D) with D = in_features = 16; got (3, 8); pass tokens of the width"),
        (lambda d, v, m, w: functional.grouped_dense(jnp.zeros((3, D)), jnp.zeros((E, D, F)), jnp.zeros(F), jnp.zeros(E, jnp.int32)), "bias must be (E, features) = (4, 24); got (24,)"),
    ],
)  # fmt: skip
def test_mistakes(call, message):
    dense, layer = linen.GroupedDense(E, F), linen.MoEMLP(E, F, 2)
    x = jnp.zeros((3, D))
    with pytest.raises(ValueError, match=re.escape(message)):
        call(dense, variables_of(dense, x, jnp.zeros(E, jnp.int32)), layer, variables_of(layer, x))
