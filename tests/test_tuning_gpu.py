"""`tune` on a GPU: what it finds is used, gives the same results, and is not slower than the rule's choice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_grouped_gemm import accelerate, grouped_gemm, tune, use_tuned

gpu = pytest.mark.gpu


@pytest.fixture(autouse=True)
def nothing_tuned():
    use_tuned(None)
    yield
    use_tuned(None)


@gpu
def test_a_training_step(tmp_path):
    l, m, n, k = 16, 4096, 768, 1024
    keys = jax.random.split(jax.random.key(0))
    a, b = (jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, ((m, k), (l, n, k)), strict=True))
    ends = jnp.arange(1, l + 1, dtype=jnp.int32) * (m // l)

    def step(a, b, ends):
        def loss(a, b):
            return jnp.sum(grouped_gemm(a, b, offsets=ends).astype(jnp.float32) ** 2)

        return jax.grad(loss, (0, 1))(a, b)

    expected = jax.jit(step)(a, b, ends)
    found = tune(step, a, b, ends, path=tmp_path / "tuned.json")
    assert sorted(each.facts["product"] for each in found) == ["forward", "forward", "wgrad"]
    for each in found:
        assert 0 < each.seconds <= 1.02 * each.seconds_of_rule
    text = jax.jit(lambda *args: step(*args)).lower(a, b, ends).as_text()
    for each in found:
        assert f"dynamic = {str(each.use_dynamic_sched).lower()}" in text
    for got, want in zip(jax.jit(lambda *args: step(*args))(a, b, ends), expected, strict=True):
        # Another tile adds up in another order: D may be rounded to its other neighbour, 2 away in the cotangent, which B's 4.5 at most multiply.
        # Elements are of the size of 1,800.
        np.testing.assert_allclose(got.astype(jnp.float32), want.astype(jnp.float32), rtol=2e-2, atol=20)


@gpu
def test_ragged_dot_of_a_program(tmp_path):
    """What `accelerate` puts on the kernels is found too."""
    a, b = jnp.ones((512, 256), jnp.bfloat16), jnp.ones((4, 256, 128), jnp.bfloat16)
    sizes = jnp.full(4, 128, jnp.int32)
    with accelerate():
        (found,) = tune(jax.lax.ragged_dot, a, b, sizes, path=tmp_path / "tuned.json")
    assert (found.facts["product"], found.facts["b_major"], found.facts["n"]) == ("forward", "n", 128)
