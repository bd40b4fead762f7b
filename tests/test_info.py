"""`python -m jax_grouped_gemm info`, with and without a build."""

import json
import os
import subprocess
import sys

import jax
import pytest

import jax_grouped_gemm
from jax_grouped_gemm import ffi_call, info, library, tuned


def kernel(name, arch, kind, tile=(128, 256), cluster=(2, 1)):
    return {
        "name": name,
        "arch": arch,
        "target": f"sm_{arch}{'a' if arch == 90 else 'f'}",
        "kind": kind,
        "tile": list(tile),
        "cluster": list(cluster),
    }


MANIFEST = {
    "build_id": "abc",
    "dsl_version": "4.8.1",
    "kernels": [
        kernel("second", 100, "forward"),
        kernel("first", 90, "forward"),
        kernel("same tile", 90, "forward"),
        kernel("split", 90, "forward", (64, 128), (1, 4)),
        kernel("gradients", 90, "wgrad"),
        kernel("prologue", 90, "maps_from_memory"),
    ],
}


@pytest.fixture
def built(monkeypatch):
    monkeypatch.setattr(library, "manifest", lambda: MANIFEST)


@pytest.fixture
def bare(monkeypatch, tmp_path):
    monkeypatch.setattr(library, "LIBRARY", tmp_path / "libjax_grouped_gemm.so")
    monkeypatch.setattr(library, "registered", lambda: "nothing was built")
    monkeypatch.setattr(library, "manifest", lambda: None)
    library.load.cache_clear()
    yield
    library.load.cache_clear()


def test_the_command():
    command = [sys.executable, "-W", "error", "-m", "jax_grouped_gemm", "info"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "a call would use: " in text
    facts = json.loads(subprocess.run([*command, "--json"], check=True, capture_output=True, text=True).stdout)
    assert facts["versions"]["jax_grouped_gemm"] == jax_grouped_gemm.__version__
    assert facts["versions"]["jax"] == jax.__version__


def test_without_a_backend():
    command = [sys.executable, "-m", "jax_grouped_gemm", "info"]
    environment = os.environ | {"JAX_PLATFORMS": "tpu"}
    text = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    assert "a call would use: nothing, it would fail (" in text


def test_with_a_damaged_manifest(monkeypatch, tmp_path):
    (tmp_path / "manifest.json").write_text("{")
    monkeypatch.setattr(library, "MANIFEST", tmp_path / "manifest.json")
    monkeypatch.setattr(library, "manifest", library.manifest.__wrapped__)
    monkeypatch.setattr(library, "registered", library.registered.__wrapped__)
    assert "manifest.json could not be loaded" in info.as_text()


def test_without_a_build(bare):
    facts = json.loads(info.as_json())
    assert facts["build"] is None
    assert facts["library"]["problem"] == "nothing was built"
    assert facts["library"]["ffi_api_built"] is None
    assert "none: nothing was built" in info.as_text()


def test_kernels_per_architecture(built):
    text = info.as_text()
    assert "build abc, CUTLASS DSL 4.8.1" in text
    hopper, blackwell = (
        "sm_90a: 5 kernels, 3 forward, 1 for weight gradients, 1 for tensor maps",
        "sm_100f: 1 kernels, 1 forward, 0 for weight gradients, 0 for tensor maps",
    )
    assert text.index(hopper) < text.index(blackwell)
    assert text.count("mma_tiler_mn=(256, 256), cluster_shape_mn=(2, 1)") == 2
    assert text.count("mma_tiler_mn=(64, 128), cluster_shape_mn=(1, 4)") == 1


def test_what_a_call_would_use_on_a_gpu(built, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(library, "registered", lambda: None)
    for capability, name in (("9.0", "cutedsl"), ("8.0", "reference")):
        monkeypatch.setattr(ffi_call, "cuda_capabilities", lambda capability=capability: (capability,))
        assert info.collect()["implementation"]["name"] == name
    monkeypatch.setattr(ffi_call, "cuda_capabilities", lambda: ("9.0",))
    monkeypatch.setattr(library, "registered", lambda: "it is broken")
    assert "nothing, it would fail (the GPU kernels cannot be used: it is broken" in info.as_text()


def test_import_needs_no_kernel_compiler_and_no_device():
    code = (
        "import sys, jax_grouped_gemm\n"
        "from jax._src import xla_bridge\n"
        "assert not [name for name in sys.modules if name.split('.')[0] in ('cutlass', 'torch')]\n"
        "assert not xla_bridge.backends_are_initialized()\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_whether_ragged_dot_is_accelerated():
    assert "jax.lax.ragged_dot: JAX's own (JAX_GROUPED_GEMM_ACCELERATE is not 1)" in info.as_text()
    command = [sys.executable, "-m", "jax_grouped_gemm", "--json"]
    environment = os.environ | {"JAX_GROUPED_GEMM_ACCELERATE": "1"}
    facts = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout)
    assert facts["tuned"] == {"calls": 0, "file": None, "problem": None}
    assert facts["ragged_dot_accelerated"] is True


def test_a_tuned_file_that_is_not_there_is_told(monkeypatch):
    monkeypatch.setattr(tuned, "_chosen", None)
    monkeypatch.setenv(tuned.FILE, "/nowhere.json")
    tuned._of_environment.cache_clear()
    assert info.as_text().splitlines()[-1].startswith("tuned: JAX_GROUPED_GEMM_TUNED must name a file")
