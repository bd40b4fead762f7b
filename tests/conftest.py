import hypothesis
import jax
import numpy as np
import pytest

# Compiling a new shape takes longer than hypothesis expects of one example.
hypothesis.settings.register_profile("jax", deadline=None, max_examples=25, derandomize=True)
hypothesis.settings.load_profile("jax")

# The package must work for users of JAX's strictest settings.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


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
