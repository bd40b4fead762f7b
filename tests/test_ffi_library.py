"""The C++ library, built here with a small fake kernel table: its C++ tests, its exports, and its handlers in XLA.

Needs cmake, ninja, a C++ compiler and cuda.h (the package nvidia-cuda-runtime), but neither GPU nor driver.
"""

import ctypes
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parent.parent
FAKE_TABLE = ROOT / "ffi" / "tests" / "fake_table"
PATH = os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ["PATH"]])


def run(*command):
    done = subprocess.run(
        list(map(str, command)),
        env={**os.environ, "PATH": PATH},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """The build folder of a library with the fake table, and of the C++ tests."""
    missing = [tool for tool in ("cmake", "ninja", "g++") if shutil.which(tool, path=PATH) is None]
    if missing:
        pytest.skip(f"building the library needs {', '.join(missing)}")
    folder = tmp_path_factory.mktemp("ffi")
    run(
        *("cmake", "-S", ROOT, "-B", folder, "-G", "Ninja", f"-DPython3_EXECUTABLE={sys.executable}"),
        *(f"-DJGG_AOT_DIR={FAKE_TABLE}", "-DJGG_BUILD_TESTS=ON", "-DCMAKE_BUILD_TYPE=Debug"),
    )
    run("cmake", "--build", folder)
    return folder


@pytest.fixture(scope="module")
def library(build):
    library = ctypes.CDLL(str(build / "libjax_grouped_gemm.so"))
    for name in ("jgg_build_id", "jgg_kernel_name", "jgg_driver_status", "jgg_forward", "jgg_wgrad"):
        getattr(library, name).restype = ctypes.c_char_p
    return library


@pytest.mark.parametrize("name", ["launch", "errors", "module_cache", "handler", "wgrad", "wgrad_handler", "table"])
def test_cpp(build, name):
    output = run("ctest", "--test-dir", build, "--output-on-failure", "-R", f"^{name}$")
    assert "100% tests passed" in output


def test_every_cpp_test_is_run_here(build):
    assert "Total Tests: 7" in run("ctest", "--test-dir", build, "-N")


def test_exports_only_the_documented_symbols(build):
    symbols = {
        line.split()[-1] for line in run("nm", "-D", "--defined-only", build / "libjax_grouped_gemm.so").splitlines()
    }
    assert symbols == {
        "jgg_build_id",
        "jgg_count_launches",
        "jgg_driver_status",
        "jgg_ffi_api_version",
        "jgg_forward",
        "jgg_forward_execute",
        "jgg_forward_initialize",
        "jgg_forward_instantiate",
        "jgg_gather_weights",
        "jgg_kernel_count",
        "jgg_kernel_name",
        "jgg_launch_counts",
        "jgg_wgrad",
        "jgg_wgrad_execute",
        "jgg_wgrad_initialize",
        "jgg_wgrad_instantiate",
    }


def test_needs_only_the_c_library(build):
    needed = [
        line for line in run("readelf", "-d", build / "libjax_grouped_gemm.so").splitlines() if "(NEEDED)" in line
    ]
    assert needed
    for line in needed:
        assert any(f"[{name}" in line for name in ("libc.so", "libm.so", "libdl.so", "libpthread.so", "ld-linux")), line


def test_loads_without_a_gpu(library):
    assert library.jgg_build_id() == b"fake-build"
    count = library.jgg_kernel_count()
    names = [library.jgg_kernel_name(i) for i in range(count)]
    assert len(set(names)) == count == 18
    assert library.jgg_kernel_name(count) is None
    assert library.jgg_kernel_name(-1) is None
    status = library.jgg_driver_status()
    assert status is None or b"libcuda.so.1" in status or b"driver" in status
    assert b"struct_size" in library.jgg_forward(None)
    assert b"struct_size" in library.jgg_wgrad(None)


def test_built_against_an_api_that_this_runtime_has(library):
    major, minor = ctypes.c_int(-1), ctypes.c_int(-1)
    library.jgg_ffi_api_version(ctypes.byref(major), ctypes.byref(minor))
    assert (major.value, minor.value) >= (0, 1)


# --- handlers in XLA: registered under names of their own, beside those of an installed build -------------------------


@pytest.fixture(scope="module")
def gather(library):
    jax.ffi.register_ffi_target("test_gather_weights", jax.ffi.pycapsule(library.jgg_gather_weights), platform="cpu")

    def call(pointers, shape, ends=None, m=100):
        ends = jnp.arange(1, shape[0] + 1, dtype=jnp.int32) if ends is None else jnp.array(ends, jnp.int32)
        run = jax.ffi.ffi_call("test_gather_weights", jax.ShapeDtypeStruct(shape, jnp.bfloat16))
        return jax.jit(lambda *operands: run(*operands, m=np.int64(m)))(pointers, ends)

    return call


def host_weights(shape):
    return [np.asarray(jax.random.normal(key, shape, jnp.bfloat16)) for key in jax.random.split(jax.random.key(0), 5)]


def addresses(weights):
    return np.array([w.ctypes.data for w in weights], dtype=np.int64)


def on_cpu():
    return jax.default_device(jax.local_devices(backend="cpu")[0])


def test_gather_weights_from_bytes(gather):
    with on_cpu():
        weights = host_weights((24, 16))
        gathered = gather(addresses(weights).view(np.uint8), (5, 24, 16))
        np.testing.assert_array_equal(np.asarray(gathered), np.stack(weights))


def test_gather_weights_from_int64(gather):
    x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
    with on_cpu(), x64(True):
        weights = host_weights((8, 40))
        gathered = gather(jnp.asarray(addresses(weights)), (5, 8, 40))
        np.testing.assert_array_equal(np.asarray(gathered), np.stack(weights))


@pytest.mark.parametrize(
    ("ends", "live"),
    [([0, 3, 3, 7, 7], [1, 3]), ([-4, 5, 2, 9, 2**31 - 1], [1, 3]), ([9, 9, 9, 9, -1], [0]), ([-(2**31)] * 5, [])],
)
def test_gather_weights_reads_no_expert_without_rows(gather, ends, live):
    with on_cpu():
        weights = host_weights((8, 8))
        pointers = addresses(weights)
        pointers[[g for g in range(5) if g not in live]] = 16  # not a readable address
        gathered = np.asarray(gather(pointers.view(np.uint8), (5, 8, 8), ends, m=9))
        expected = [w if g in live else np.zeros_like(w) for g, w in enumerate(weights)]
        np.testing.assert_array_equal(gathered, np.stack(expected))


def test_gather_weights_errors(gather):
    with on_cpu():
        pointers = addresses(host_weights((8, 8)))
        with pytest.raises(
            Exception, match=r"b_ptrs must be S64 \(L,\) = \(4,\) or U8 \(8 L,\) = \(32,\); got U8 \(40\)"
        ):
            jax.block_until_ready(gather(pointers.view(np.uint8), (4, 8, 8)))
        pointers[3] = 0
        with pytest.raises(Exception, match=r"b_ptrs\[3\] must be the address of expert 3's weights; got null"):
            jax.block_until_ready(gather(pointers.view(np.uint8), (5, 8, 8)))


def register(library, call):
    stages = {stage: getattr(library, f"jgg_{call}_{stage}") for stage in ("instantiate", "initialize", "execute")}
    capsules = {stage: jax.ffi.pycapsule(symbol) for stage, symbol in stages.items()}
    jax.ffi.register_ffi_target(f"test_{call}", capsules, platform="cpu")


@pytest.fixture(scope="module")
def forward(library):
    register(library, "forward")

    def call(**changes):
        attributes = {
            "sm90": "sm90_dense_bk_bf16_plain",
            "sm100": "sm100_dense_bk_bf16_plain",
            "weights": "dense",
            "b_major": "k",
            "has_experts": False,
            "has_alpha": False,
            "has_prob": False,
            "has_bias": False,
            "has_c": False,
            "dynamic": False,
            "overlap_margin": np.int64(0),
            "n": np.int64(32),
            "l": np.int64(1),
            "build_id": "fake-build",
            **changes,
        }
        operands = jnp.ones((8, 16), jnp.bfloat16), jnp.array([8], jnp.int32), jnp.ones((1, 32, 16), jnp.bfloat16)
        target = jax.ffi.ffi_call("test_forward", jax.ShapeDtypeStruct((8, 32), jnp.bfloat16))
        return jax.block_until_ready(jax.jit(lambda *xs: target(*xs, **attributes))(*operands))

    return call


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"build_id": "another"}, "the program was lowered for build another, this library is build fake-build"),
        ({"sm90": "sm90_gone"}, "no forward kernel 'sm90_gone' for sm_90: the program was lowered for another build"),
        ({"weights": "sparse"}, "weights must be 'dense', 'pointers' or 'tuple'; got 'sparse'"),
        ({"n": np.int32(32)}, "Wrong scalar data type"),
        ({"l": np.int32(1)}, "Wrong scalar data type"),
        ({"overlap_margin": np.int32(0)}, "Wrong scalar data type"),
        ({"has_c": np.int64(0)}, "Wrong scalar data type"),
        ({"sm90": "", "sm100": ""}, "sm90 or sm100 must name a forward kernel; got neither"),
    ],
)
def test_instantiate_refuses(forward, changes, message):
    with on_cpu(), pytest.raises(Exception, match=message):
        forward(**changes)


@pytest.mark.parametrize(
    "changes",
    [{}, {"sm100": ""}, {"sm90": ""}, {"has_experts": True, "has_bias": True, "has_c": True, "dynamic": True}],
)
def test_instantiate_decodes_what_jax_passes(forward, changes):
    """Attributes pass instantiate; the CPU then has no stream to launch on."""
    with on_cpu(), pytest.raises(Exception, match="stream"):
        forward(**changes)


@pytest.fixture(scope="module")
def wgrad(library):
    register(library, "wgrad")

    def call(**changes):
        attributes = {
            "sm90": "sm90_wgrad_bf16",
            "sm100": "sm100_wgrad_bf16",
            "has_experts": False,
            "has_alpha": False,
            "accumulate": False,
            "dynamic": False,
            "overlap_margin": np.int64(0),
            "build_id": "fake-build",
            **changes,
        }
        operands = jnp.ones((8, 32), jnp.bfloat16), jnp.ones((8, 16), jnp.bfloat16), jnp.array([8], jnp.int32)
        target = jax.ffi.ffi_call("test_wgrad", jax.ShapeDtypeStruct((1, 32, 16), jnp.bfloat16))
        return jax.block_until_ready(jax.jit(lambda *xs: target(*xs, **attributes))(*operands))

    return call


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"build_id": "another"}, "the program was lowered for build another, this library is build fake-build"),
        ({"sm90": "sm90_dense_bk_bf16_plain"}, "no wgrad kernel 'sm90_dense_bk_bf16_plain' for sm_90"),
        ({"accumulate": np.int64(0)}, "Wrong scalar data type"),
        ({"sm90": "", "sm100": ""}, "sm90 or sm100 must name a wgrad kernel; got neither"),
    ],
)
def test_instantiate_of_wgrad_refuses(wgrad, changes, message):
    with on_cpu(), pytest.raises(Exception, match=message):
        wgrad(**changes)


@pytest.mark.parametrize(
    "changes", [{}, {"sm100": ""}, {"has_experts": True, "has_alpha": True, "accumulate": True, "dynamic": True}]
)
def test_instantiate_of_wgrad_decodes_what_jax_passes(wgrad, changes):
    with on_cpu(), pytest.raises(Exception, match="stream"):
        wgrad(**changes)
