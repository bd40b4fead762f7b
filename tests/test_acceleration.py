"""`accelerate`: JAX's own ragged_dot, lowered to the kernels."""

import functools
import logging
import os
import re
import subprocess
import sys
import threading

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import jax_grouped_gemm as jgg
from benchmarks import public_layer
from jax_grouped_gemm import acceleration, contract, ffi_call, library, log


@pytest.fixture(autouse=True)
def _built(monkeypatch):
    monkeypatch.setattr(ffi_call, "cuda_capabilities", tuple)
    monkeypatch.setattr(library, "manifest", lambda: {"build_id": "the build"})
    log.once.cache_clear()
    yield
    jgg.accelerate(False)


def struct(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


OPERANDS = struct(64, 32), struct(4, 32, 16), struct(4, dtype=jnp.int32)


def custom_calls(function, *operands, platform="cuda"):
    """Names of our custom calls in the lowered program, in order."""
    text = jax.jit(function).trace(*operands).lower(lowering_platforms=(platform,)).as_text()
    return re.findall(r"custom_call @(jax_grouped_gemm_\w+)", text)


def loss(lhs, rhs, sizes):
    return jax.lax.ragged_dot(lhs, rhs, sizes).astype(jnp.float32).sum()


def test_on_and_off():
    assert custom_calls(jax.lax.ragged_dot, *OPERANDS) == []
    jgg.accelerate()
    assert acceleration.active()
    assert custom_calls(jax.lax.ragged_dot, *OPERANDS) == [library.FORWARD]
    jgg.accelerate()  # once more changes nothing
    jgg.accelerate(False)
    assert not acceleration.active()
    assert custom_calls(jax.lax.ragged_dot, *OPERANDS) == []


def test_for_a_while():
    with jgg.accelerate():
        assert custom_calls(jax.lax.ragged_dot, *OPERANDS) == [library.FORWARD]
        with jgg.accelerate(False):
            assert custom_calls(jax.lax.ragged_dot, *OPERANDS) == []
        assert custom_calls(jax.lax.ragged_dot, *OPERANDS) == [library.FORWARD]
    assert custom_calls(jax.lax.ragged_dot, *OPERANDS) == []


def test_entered_later_and_again():
    context = jgg.accelerate()
    jgg.accelerate(False)
    for _ in range(2):
        with context:
            assert custom_calls(jax.lax.ragged_dot, *OPERANDS) == [library.FORWARD]
        assert custom_calls(jax.lax.ragged_dot, *OPERANDS) == []


def test_entered_within_itself():
    context = jgg.accelerate()
    jgg.accelerate(False)
    with context:
        with context:
            pass
        assert acceleration.active()
    assert not acceleration.active()


@pytest.mark.parametrize("on", [True, False])
def test_blocks_of_threads_that_overlap(on):
    """The second begins in the first, and outlasts it."""
    first_inside, second_inside, first_left = (threading.Event() for _ in range(3))
    found = []

    def first():
        with jgg.accelerate():
            first_inside.set()
            assert second_inside.wait(10)
        first_left.set()

    def second():
        assert first_inside.wait(10)
        with jgg.accelerate(on):
            second_inside.set()
            assert first_left.wait(10)
            found.append(acceleration.active())

    threads = [threading.Thread(target=run) for run in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [on]
    assert not acceleration.active()


def test_blocks_of_others_leave_the_setting_of_the_process():
    jgg.accelerate()
    off, on, more = jgg.accelerate(False), jgg.accelerate(True), jgg.accelerate(True)
    for block, inside in ((off, False), (on, True), (off, False), (more, True)):
        with block:
            assert acceleration.active() == inside
        assert acceleration.active()


def test_called_often():
    """What is over is forgotten."""
    for _ in range(5):
        jgg.accelerate()
        jgg.accelerate(False)
    assert len(acceleration._settings[0]._changes) <= 2


def test_called_in_a_block():
    with jgg.accelerate():
        jgg.accelerate(False)
        assert not acceleration.active()
    assert not acceleration.active()


@pytest.mark.parametrize("on", ["1", 2, None, jax.lax.ragged_dot])
def test_neither_on_nor_off(on):
    with pytest.raises(ValueError, match="on must be True or False; got"):
        jgg.accelerate(on)
    assert not acceleration.active()


@pytest.mark.parametrize("text", ["", "0", "false", "False", "off", "no"])
def test_environment_says_no(monkeypatch, text):
    monkeypatch.setenv(acceleration.SWITCH, text)
    assert not acceleration.enabled_by_environment()
    monkeypatch.setenv(acceleration.SWITCH, "true")
    assert acceleration.enabled_by_environment()


@pytest.mark.skipif(len(jax.devices("cpu")) < 8, reason="fewer than 8 CPU devices")
def test_programs_without_a_rule_stay_with_jax(caplog):
    """A shard_map over some axes, and an export that leaves the partitioning to XLA."""
    caplog.set_level(logging.WARNING, "jax_grouped_gemm")
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:8]).reshape(4, 2), ("x", "y"))
    spec = jax.sharding.PartitionSpec
    part = jax.shard_map(
        lambda *x: jax.lax.ragged_dot(*x), mesh=mesh, in_specs=spec(), out_specs=spec(), axis_names={"x"},
        check_vma=False,
    )  # fmt: skip
    with jgg.accelerate():
        assert custom_calls(part, *OPERANDS) == []
    assert "a jax.shard_map must make all axes of the mesh manual" in caplog.text
    sharding = jax.sharding.NamedSharding(mesh, spec("x"))
    of_rows = jax.jit(lambda *x: jax.lax.ragged_dot(*x), in_shardings=(sharding, None, None))
    with jgg.accelerate():
        exported = jax.export.export(of_rows, platforms=["cuda"])(*OPERANDS)
    assert "jax_grouped_gemm" not in exported.mlir_module()
    assert "an export for several devices must not leave the partitioning to XLA" in caplog.text


def test_undoing_restores_what_jax_had():
    from jax._src.interpreters import mlir

    before = dict(mlir._platform_specific_lowerings["cuda"])
    with jgg.accelerate():
        assert mlir._platform_specific_lowerings["cuda"] != before
    assert mlir._platform_specific_lowerings["cuda"] == before


def test_forward_and_backward():
    with jgg.accelerate():
        calls = custom_calls(jax.value_and_grad(loss, (0, 1)), *OPERANDS)
    assert sorted(calls) == [library.FORWARD, library.FORWARD, library.WGRAD]


def test_cotangents_of_float32():
    """They go through the kernels in two parts; with preferred_element_type=float32 JAX's are so."""
    product = functools.partial(jax.lax.ragged_dot, preferred_element_type=jnp.float32)
    with jgg.accelerate():
        calls = custom_calls(jax.value_and_grad(lambda *x: jnp.square(product(*x)).sum(), (0, 1)), *OPERANDS)
    assert sorted(calls) == [library.FORWARD] * 3 + [library.WGRAD] * 2


def test_weights_of_float32():
    with jgg.accelerate():
        operands = OPERANDS[0], struct(4, 32, 16, dtype=jnp.float32), OPERANDS[2]
        assert custom_calls(lambda *x: jax.lax.ragged_dot(*x), *operands) == [library.FORWARD] * 2
        exact = functools.partial(jax.lax.ragged_dot, precision="highest")
        assert custom_calls(exact, *operands) == [library.FORWARD] * 3


def test_nothing_is_transposed_or_copied():
    with jgg.accelerate():
        text = jax.jit(jax.grad(loss, (0, 1))).trace(*OPERANDS).lower(lowering_platforms=("cuda",)).as_text()
    assert "4x16x32" not in text  # the weights with their dimensions exchanged
    assert "scatter" not in text


def test_other_platforms_are_left_alone():
    with jgg.accelerate():
        assert custom_calls(jax.lax.ragged_dot, *OPERANDS, platform="cpu") == []
        lhs, rhs, sizes = jnp.ones((64, 32), jnp.bfloat16), jnp.ones((4, 32, 16), jnp.bfloat16), jnp.array([9, 0, 5, 2])
        got = np.asarray(jax.lax.ragged_dot(lhs, rhs, sizes), np.float32)
    np.testing.assert_array_equal(got[:, 0], np.where(np.arange(64) < 16, 32, 0))


@pytest.mark.parametrize(
    ("operands", "why"),
    [
        ((struct(64, 32, dtype=jnp.float32), struct(4, 32, 16, dtype=jnp.float32)), "operands are float32 and float32"),
        ((struct(64, 36), struct(4, 36, 16)), "K is 36, no multiple of 8"),
    ],
)
def test_what_the_kernels_do_not_do_stays_with_jax(caplog, operands, why):
    caplog.set_level(logging.WARNING, "jax_grouped_gemm")
    with jgg.accelerate():
        for _ in range(2):
            assert custom_calls(lambda *x: jax.lax.ragged_dot(*x), *operands, OPERANDS[2]) == []
    (record,) = caplog.records
    assert record.getMessage().startswith(f"jax.lax.ragged_dot is JAX's own: {why}")


def test_gpu_that_the_kernels_are_not_for(monkeypatch, caplog):
    caplog.set_level(logging.WARNING, "jax_grouped_gemm")
    monkeypatch.setattr(ffi_call, "cuda_capabilities", lambda: ("8.0",))
    with jgg.accelerate():
        assert custom_calls(jax.lax.ragged_dot, *OPERANDS) == []
    assert contract.unsupported_capability(("8.0",)) in caplog.text


def test_vmapped_products():
    batched = struct(3, 64, 32), struct(3, 4, 32, 16), struct(3, 4, dtype=jnp.int32)
    with jgg.accelerate():
        assert custom_calls(jax.vmap(jax.lax.ragged_dot), *batched) == [library.FORWARD]


PROGRAM = """
import jax, jax.numpy as jnp, re
{prepare}
jax.devices()
operands = [jax.ShapeDtypeStruct(*x) for x in (((64, 32), jnp.bfloat16), ((4, 32, 16), jnp.bfloat16), ((4,), jnp.int32))]
text = jax.jit(jax.lax.ragged_dot).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
print(len(re.findall("custom_call @jax_grouped_gemm_forward", text)))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "prepare", ["import jax_grouped_gemm", ""]
)  # JAX finds the plugin where the package is installed
@pytest.mark.parametrize(("value", "calls"), [("1", 1), ("0", 0), (None, 0)])
def test_environment(prepare, value, calls):
    if library.MANIFEST.exists() is False:
        pytest.skip("nothing is built")
    env = {name: text for name, text in os.environ.items() if name != acceleration.SWITCH}
    if value is not None:
        env[acceleration.SWITCH] = value
    env["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(prepare=prepare)], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(calls)]


# --- an unmodified layer of a public library --------------------------------------------------------------------------


def make_layer(experts, width=64, hidden=32, dtype=jnp.bfloat16):
    if not public_layer.found():
        pytest.skip("google-tunix or flax is not installed")
    return public_layer.make(experts, 2, width, hidden, dtype)


@pytest.fixture
def _as_its_authors_run_it():
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def layer_loss(graph, state, x):
    return jnp.mean(jnp.square(public_layer.apply(graph, state, x).astype(jnp.float32)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.usefixtures("_as_its_authors_run_it")
def test_layer_of_a_library_is_lowered_to_the_kernels():
    graph, state = make_layer(8)
    gradient = jax.value_and_grad(lambda state, x: layer_loss(graph, state, x), (0, 1))
    x = struct(1, 128, 64)
    assert custom_calls(gradient, state, x) == []
    with jgg.accelerate():
        calls = custom_calls(gradient, state, x)
    # Two products, and the gradients of both operands of each.
    assert sorted(calls) == [library.FORWARD] * 4 + [library.WGRAD] * 2


def decisively_routed(state, experts, width):
    """Weights and tokens (2, 512, width) with which no rounding of logits, which XLA fuses in one way or another, decides on an expert."""
    router = np.linalg.qr(np.random.default_rng(2).standard_normal((width, experts)))[0]
    choices = np.random.default_rng(3).permuted(np.tile(np.arange(experts), (1024, 1)), axis=1)[:, :2]
    x = np.random.default_rng(4).standard_normal((1024, width))
    x += 20 * router.T[choices[:, 0]] + 12 * router.T[choices[:, 1]] - x @ router @ router.T
    state["router_logits"] = state["router_logits"].replace(jnp.asarray(8 * router, jnp.bfloat16))
    return state, jnp.asarray(x.reshape(2, 512, width), jnp.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", [(jnp.bfloat16, jnp.bfloat16), (jnp.bfloat16, jnp.float32)], ids=str)
def test_gradients_in_float32_on_the_kernels(monkeypatch, dtypes):
    """At least as close to float64 as JAX's own."""
    monkeypatch.undo()
    rng = np.random.default_rng(0)
    sizes = np.array([100, 0, 257, 300, 43], np.int32)  # of 768 rows
    operands = [
        jnp.asarray(rng.standard_normal(shape, np.float32)).astype(dtype)
        for shape, dtype in zip(((768, 256), (5, 256, 192)), dtypes, strict=True)
    ]
    ct = rng.standard_normal((768, 192), np.float32)

    def gradients(lhs, rhs):
        product = functools.partial(jax.lax.ragged_dot, group_sizes=sizes, preferred_element_type=jnp.float32)
        out, back = jax.vjp(product, lhs, rhs)
        return out, *back(jnp.asarray(ct))

    before = jax.jit(gradients).lower(*operands).compile()
    with jgg.accelerate():
        after = jax.jit(gradients).lower(*operands).compile()
    # The cotangent goes in two parts, as weights of float32 do; with these, the gradient of rows is JAX's.
    expected = 2 + 2 if dtypes[1] == jnp.float32 else 1 + 2 + 2
    assert after.as_text().count('custom_call_target="jax_grouped_gemm') == expected
    a, b = (np.asarray(x, np.float64) for x in operands)
    want = np.zeros((768, 192)), np.zeros_like(a), np.zeros_like(b)
    begin = 0
    for g, size in enumerate(sizes):
        rows = slice(begin, begin := begin + size)
        want[0][rows], want[1][rows], want[2][g] = a[rows] @ b[g], ct[rows] @ b[g].T, a[rows].T @ ct[rows]
    for ours, theirs, exact in zip(after(*operands), before(*operands), want, strict=True):
        errors = [np.abs(np.asarray(x, np.float64) - exact).max() / np.abs(exact).max() for x in (ours, theirs)]
        assert errors[0] <= 1.2 * errors[1] + 2.0**-16


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.usefixtures("_as_its_authors_run_it")
def test_layer_of_a_library_gives_the_same_on_the_kernels(monkeypatch):
    monkeypatch.undo()
    graph, state = make_layer(16, width=512, hidden=256)
    state, x = decisively_routed(state, 16, 512)

    def gradient(state, x):
        return jax.value_and_grad(lambda state, x: layer_loss(graph, state, x), (0, 1))(state, x)

    def products(compiled):
        return compiled.as_text().count("jax_grouped_gemm_")

    # XLA adds to the gradient of the experts' scales in bfloat16, by default in any order: 2 %, and another each time.
    options = {"xla_gpu_deterministic_ops": True}
    before = jax.jit(gradient).lower(state, x).compile(options)
    with jgg.accelerate():
        after = jax.jit(gradient).lower(state, x).compile(options)
    assert products(before) == 0 < products(after)
    exact_graph, _ = make_layer(16, width=512, hidden=256, dtype=jnp.float32)
    exactly = jax.tree.map(lambda w: w.astype(jnp.float32), (state, x))
    with jax.default_matmul_precision("highest"):
        want = jax.jit(lambda *o: jax.value_and_grad(lambda *o: layer_loss(exact_graph, *o), (0, 1))(*o))(*exactly)

    def errors(results):
        for got, exact in zip(jax.tree.leaves(results), jax.tree.leaves(want), strict=True):
            got, exact = np.asarray(got, np.float64), np.asarray(exact, np.float64)
            yield np.linalg.norm(got - exact) / np.linalg.norm(exact)

    # What float32 would give, as closely as JAX's own products in bfloat16 do.
    for ours, theirs in zip(errors(after(state, x)), errors(before(state, x)), strict=True):
        assert ours <= 1.05 * theirs + 1e-4
