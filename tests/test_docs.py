"""The code in the pages of docs/ runs."""

import pathlib
import re

import pytest

PAGES = pathlib.Path(__file__).resolve().parent.parent / "docs"


def run_page(name):
    """Its blocks in order, as one program."""
    blocks = re.findall(r"^```python\n(.*?)^```", (PAGES / name).read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    exec(compile("\n".join(blocks), name, "exec"), {})


def test_nn_page():
    pytest.importorskip("flax")
    run_page("nn.md")


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
