"""The wheel: built on the kernels of this build, inspected, installed in a clean environment, and run there."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import jax_grouped_gemm

ROOT = Path(__file__).resolve().parent.parent
BUILD = Path(os.environ.get("BUILD", ROOT / "build"))
LIBRARY = "jax_grouped_gemm/_data/libjax_grouped_gemm.so"

pytestmark = pytest.mark.slow


def run(*command, **options):
    """Runs a command. Its whole output is the failure's text."""
    done = subprocess.run([*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    if not (BUILD / "aot" / "manifest.json").exists():
        pytest.skip(f"no kernels in {BUILD / 'aot'}: run make build")
    out = tmp_path_factory.mktemp("wheel")
    # Not recompiled: the kernels are those of the build. No isolation: its tools are those of this environment.
    defines = {"JGG_AOT_DIR": BUILD / "aot", "JGG_XLA_FFI_INCLUDE": BUILD / "xla_headers" / "include"}
    settings = [f"-Ccmake.define.{name}={path.resolve()}" for name, path in defines.items()]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", out, *settings, f"-Cbuild-dir={out}/build"]
    run(sys.executable, "-m", "pip", *build, ROOT)
    (path,) = out.glob("*.whl")
    return path


def test_tag_has_no_python_abi(wheel):
    assert wheel.name == f"jax_grouped_gemm-{jax_grouped_gemm.__version__}-py3-none-linux_x86_64.whl"


def test_size(wheel):
    assert wheel.stat().st_size < 5_000_000


def test_contents(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    info = f"jax_grouped_gemm-{jax_grouped_gemm.__version__}.dist-info/"
    for needed in (
        LIBRARY,
        "jax_grouped_gemm/_data/manifest.json",
        "jax_grouped_gemm/api.py",
        "jax_grouped_gemm/compat/wrapper.py",
        "jax_grouped_gemm/nn/linen.py",
        "jax_plugins/jax_grouped_gemm/__init__.py",
        info + "licenses/LICENSE",
    ):
        assert needed in names
    allowed = re.compile(
        rf"jax_grouped_gemm/((compat|nn)/)?[a-z_]+\.(py|pyi|typed)|jax_grouped_gemm/_data/[a-z_.]+|{re.escape(info)}.*"
        r"|jax_plugins/jax_grouped_gemm/__init__\.py"
    )
    assert [name for name in names if not allowed.fullmatch(name)] == []


def test_library_needs_only_the_system(wheel, tmp_path):
    if shutil.which("readelf") is None:
        pytest.skip("readelf is not installed")
    library = zipfile.ZipFile(wheel).extract(LIBRARY, tmp_path)
    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", run("readelf", "--dynamic", "--wide", library)))
    system = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "libgcc_s.so.1", "libstdc++.so.6"}
    assert needed <= system | {"ld-linux-x86-64.so.2"}
    symbols = run("readelf", "--dyn-syms", "--wide", library)
    assert re.findall(r"UND (_?Py[A-Z_]\w*|cu[A-Z]\w*|cuda[A-Z]\w*)", symbols) == []
    assert "RUNPATH" not in run("readelf", "--dynamic", "--wide", library)


def test_runs_in_a_clean_environment(wheel, tmp_path):
    python = tmp_path / "venv" / "bin" / "python"
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    run(python, "-m", "pip", "install", "--progress-bar=off", wheel)
    # Away from the source tree, and without its path: what is imported is what was installed.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    options = {"cwd": tmp_path, "env": env}
    where = run(python, "-c", "import jax_grouped_gemm; print(jax_grouped_gemm.__file__)", **options)
    assert where.startswith(str(tmp_path))
    assert jax_grouped_gemm.__version__ in run(python, "-m", "jax_grouped_gemm", "info", **options)
    # JAX finds the plugin, which looks at the switch; without it, it imports nothing of ours.
    loaded = "import sys, jax; jax.devices(); print('jax_grouped_gemm.api' in sys.modules)"
    for value, expected in (("1", "True"), ("", "False")):
        switched = {**options, "env": env | {"JAX_GROUPED_GEMM_ACCELERATE": value}}
        assert run(python, "-c", loaded, **switched).split()[-1] == expected
    sizes = ["--tokens", "64", "--width", "32", "--hidden", "32"]
    assert "OK: 64 tokens agree" in run(python, ROOT / "examples" / "moe_layer.py", *sizes, **options)
