import functools
import types

import compat_problems
import hypothesis
import jax
import numpy as np
import pytest
import sharding_problems

from jax_grouped_gemm import direct, ffi_call, library
from jax_grouped_gemm.compat import plan, strided, torch_tensors

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


@pytest.fixture(scope="module")
def compiled_fast():
    """XLA optimises little: for modules that compile much and run it once. Their numbers are the same."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


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
def cuda(monkeypatch, fake_launches):
    """torch's CUDA on CPU tensors."""
    torch = pytest.importorskip("torch")
    fake = compat_problems.FakeCuda(fake_launches)
    stand_in = types.SimpleNamespace(cuda=fake)
    stand_in.is_grad_enabled = torch.is_grad_enabled
    stand_in._C = types.SimpleNamespace(_cuda_getCurrentRawStream=lambda index: fake.current.cuda_stream)
    torch_tensors._stream.cache_clear()
    for name in ("bfloat16", "float16", "float32", "uint8", "int64", "empty", "empty_strided"):
        setattr(stand_in, name, getattr(torch, name))
    monkeypatch.setattr(torch_tensors, "_torch", lambda: stand_in)
    monkeypatch.setattr(torch_tensors, "capability", lambda device: "9.0")
    for on_cpu, launch in (("_on_cpu", torch_tensors._launch), ("_wgrad_on_cpu", torch_tensors._launch_wgrad)):
        monkeypatch.setattr(torch_tensors, on_cpu, functools.partial(torch_tensors._on_cuda, launch))
    monkeypatch.setattr(
        torch.Tensor,
        "record_stream",
        lambda tensor, stream: fake.recorded.append((tensor.data_ptr(), stream.cuda_stream)),
    )
    return fake


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


# --- several devices ---------------------------------------------------------------------------------------------------


@pytest.fixture
def mesh():
    return sharding_problems.make_mesh()


@pytest.fixture
def lowered_for_cuda(monkeypatch):
    monkeypatch.setattr(ffi_call, "cuda_capabilities", tuple)
    monkeypatch.setattr(library, "manifest", lambda: {"build_id": "the build"})


@pytest.fixture(params=["shardy", "gspmd"])
def partitioner(request):
    with sharding_problems.use_partitioner(request.param):
        yield request.param
