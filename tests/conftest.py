import compat_problems
import hypothesis
import jax
import numpy as np
import pytest

from jax_grouped_gemm import direct
from jax_grouped_gemm.compat import plan, strided

# Compiling a new shape takes longer than hypothesis expects of one example.
hypothesis.settings.register_profile("jax", deadline=None, max_examples=25, derandomize=True)
hypothesis.settings.load_profile("jax")

# For tests/test_sharding.py; all others run on the first of them.
jax.config.update("jax_num_cpu_devices", 8)

# The package must work for users of JAX's strictest settings.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_addoption(parser):
    parser.addoption(
        "--conformance-module",
        default="jax_grouped_gemm",
        help="the module whose names tests/conformance tests; any but ours needs torch and a GPU",
    )


def _has_gpu():
    try:
        return bool(jax.devices("cuda"))
    except RuntimeError:
        return False


def pytest_collection_modifyitems(items):
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _has_gpu():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU"))


@pytest.fixture(autouse=True)
def _device(request):
    """Tests run on the CPU, whatever the machine has, unless they are marked `gpu`."""
    if request.node.get_closest_marker("gpu"):
        yield
    else:
        with jax.default_device(jax.devices("cpu")[0]):
            yield


@pytest.fixture
def rng():
    return np.random.default_rng(0)


# --- of the document's names ------------------------------------------------------------------------------------------


@pytest.fixture
def fresh_plans():
    """No remembered plans before, and none of those made with parts replaced after."""
    plan._remembered.cache_clear()
    yield
    plan._remembered.cache_clear()


@pytest.fixture
def fake_launches(fresh_plans, monkeypatch):
    """What would have been launched by address; nothing is."""
    launches: list = []
    monkeypatch.setattr(direct, "Forward", compat_problems.fake_forward(launches))
    monkeypatch.setattr(direct, "capturing", lambda device, stream: False)
    return launches


@pytest.fixture
def reads(fresh_plans, monkeypatch):
    """The names of the checks that looked at values."""
    seen = []
    for name in ("check_padded_offsets", "check_pointers"):
        original = getattr(strided, name)

        def looking(*given, original=original, name=name):
            seen.append(name)
            return original(*given)

        monkeypatch.setattr(strided, name, looking)
    return seen
