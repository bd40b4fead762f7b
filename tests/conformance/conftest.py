"""Which module, which framework, which device. Every test here cites a statement of README.md by its number."""

import importlib
import pathlib
import re

import pytest
from subject import Subject

STATEMENTS = pathlib.Path(__file__).parent / "README.md"


def pytest_configure(config):
    config.addinivalue_line("markers", "statement(number): the statement of tests/conformance/README.md under test")


def pytest_collection_modifyitems(items):
    known = set(re.findall(r"^\| (\d+) \|", STATEMENTS.read_text(), re.MULTILINE))
    for item in items:
        if pathlib.Path(item.path).parent == STATEMENTS.parent and "subject" in item.fixturenames:
            cited = [str(number) for mark in item.iter_markers("statement") for number in mark.args]
            assert cited, f"{item.nodeid} cites no statement"
            assert set(cited) <= known, f"{item.nodeid} cites what README.md does not list"


CPU, GPU = pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(params=[CPU, GPU])
def device(request):
    return request.param


@pytest.fixture(params=["torch", "jax"])
def framework(request):
    return request.param


@pytest.fixture
def subject(request, device):
    """The names under test: with _sm100 where the GPU allows them, the neutral twins elsewhere."""
    name = request.config.getoption("--conformance-module")
    torch = pytest.importorskip("torch")
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    sm100 = device == "cuda" and torch.cuda.get_device_capability() >= (10, 0)
    if name != "jax_grouped_gemm" and not sm100:
        pytest.skip(f"{name} needs an SM100")
    return Subject(importlib.import_module(name), sm100, device)
