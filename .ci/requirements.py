"""Prints requirements out of pyproject.toml, for `pip install -r`.

dev      what a working tree needs: run time (with JAX for the GPU that is there), build and development tools
headers  the jaxlib whose FFI headers the library is built on; not installed, since the newest runs beside it
others   kernels of others, which the functional model is tested with; to be installed without what they depend on
torch    for the tests of torch tensors: a build without CUDA's libraries where there is no GPU, which not every index has
"""

import subprocess
import sys
import tomllib
from pathlib import Path


def driver_version():
    """Major version of the NVIDIA driver, or None."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split(".")[0])
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def jax_for_this_machine():
    """JAX with CUDA where there is an NVIDIA driver: CUDA 13 needs driver 580 or newer. Plain JAX elsewhere."""
    driver = driver_version()
    return [] if driver is None else ["jax[cuda13]" if driver >= 580 else "jax[cuda12]"]


project_file = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
project = project_file["project"]
build = project_file["build-system"]["requires"]
oldest_jax = [line for line in build if line.startswith("jax")]
wanted = {
    "dev": [line for line in build if line not in oldest_jax]
    + project["dependencies"]
    + project["optional-dependencies"]["dev"]
    + jax_for_this_machine(),
    # The first one, without its marker: the headers do not depend on the Python that fetches them.
    "headers": [oldest_jax[0].split(";")[0]],
    "others": project_file["dependency-groups"]["others"],
    "torch": ["torch==2.13.0+cpu" if driver_version() is None else "torch"],
}
print("\n".join(wanted[sys.argv[1]]))
