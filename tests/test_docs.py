"""The code in the pages of docs/ runs."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_grouped_gemm import grouped_gemm, library

PAGES = pathlib.Path(__file__).resolve().parent.parent / "docs"


def run_page(name):
    """Its blocks in order, as one program; what they define."""
    blocks = re.findall(r"^```python\n(.*?)^```", (PAGES / name).read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    found: dict = {}
    exec(compile("\n".join(blocks), name, "exec"), found)
    return found


def test_nn_page():
    pytest.importorskip("flax")
    page = run_page("nn.md")
    # JAX's gradients: the loss by weights of float32 in the place of the sums.
    page["summing"] = lambda rows, _, weights, sizes: grouped_gemm(
        rows, weights.astype(rows.dtype), group_sizes=sizes, b_major="n"
    )
    weights = {name: page[name].astype(jnp.float32) for name in page["totals"]}
    found = [jax.grad(page["loss"])(weights, page["x"] + microbatch, page["logits"]) for microbatch in range(4)]
    want = jax.tree.map(lambda *each: np.sum(each, axis=0), *found)
    for name, x in page["totals"].items():
        np.testing.assert_allclose(x, want[name], rtol=0.02, atol=0.02 * np.abs(want[name]).max())


@pytest.mark.gpu
def test_gradients_of_the_nn_page_are_added_in_place():
    pytest.importorskip("flax")
    page = run_page("nn.md")
    compiled = page["add"].lower(page["totals"], page["x"], page["logits"]).compile()
    assert library.WGRAD in compiled.as_text()
    assert not re.search(r"= f32\[8,(64,128|128,64)\]\S* (copy|add)", compiled.as_text())
    sums = sum(x.nbytes for x in page["totals"].values())
    assert compiled.memory_analysis().alias_size_in_bytes == sums
    assert compiled.memory_analysis().temp_size_in_bytes < sums / 2


def test_compat_page():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("test_compat_page_on_a_gpu runs it here")
    run_page("compat.md")


@pytest.mark.gpu
def test_compat_page_on_a_gpu():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    run_page("compat.md")
