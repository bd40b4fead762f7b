"""The compiled library and its manifest: found beside the package, checked against each other, registered once."""

import ctypes
import functools
import json
import pathlib
import re

import jax

from jax_grouped_gemm import contract

DATA = pathlib.Path(__file__).parent / "_data"
LIBRARY = DATA / "libjax_grouped_gemm.so"
MANIFEST = DATA / "manifest.json"

FORWARD = "jax_grouped_gemm_forward"
WGRAD = "jax_grouped_gemm_wgrad"
GATHER_WEIGHTS = "jax_grouped_gemm_gather_weights"

# XLA target -> platform, and the library's symbol for each stage of the handler.
TARGETS = {
    FORWARD: (
        "CUDA",
        {
            "instantiate": "jgg_forward_instantiate",
            "initialize": "jgg_forward_initialize",
            "execute": "jgg_forward_execute",
        },
    ),
    WGRAD: (
        "CUDA",
        {
            "instantiate": "jgg_wgrad_instantiate",
            "initialize": "jgg_wgrad_initialize",
            "execute": "jgg_wgrad_execute",
        },
    ),
    GATHER_WEIGHTS: ("cpu", {"execute": "jgg_gather_weights"}),
}


@functools.cache
def manifest():
    """The build's manifest, or None where nothing was built. RuntimeError where it is damaged."""
    if not MANIFEST.exists():
        return None
    try:
        found = json.loads(MANIFEST.read_text())
        found["build_id"]  # what every reader needs
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RuntimeError(contract.load_failed(MANIFEST, repr(error))) from None
    return found


@functools.cache
def registered():
    """None once the handlers are registered with XLA, else why they are not. Needs no GPU."""
    for path in (LIBRARY, MANIFEST):
        if not path.exists():
            return contract.not_built(path)
    try:
        manifest_id = manifest()["build_id"]
    except RuntimeError as error:
        return str(error)
    try:
        library = load()
    except (OSError, AttributeError) as error:
        return contract.load_failed(LIBRARY, error)
    why = mismatch(build_id(library), manifest_id, api_version(library), runtime_api_version())
    if why is not None:
        return why
    try:
        for target, (platform, stages) in TARGETS.items():
            _register(library, target, platform, stages)
    except Exception as error:  # jaxlib's own exception types differ between versions
        return contract.registration_failed(error)
    return None


def mismatch(library_id, manifest_id, library_api, runtime_api):
    """Why library, manifest and runtime do not belong together, or None."""
    if library_id != manifest_id:
        return contract.build_id_mismatch(library_id, manifest_id)
    # A handler built on older headers runs on a newer runtime, not the reverse.
    if runtime_api is not None and (runtime_api[0] != library_api[0] or runtime_api < library_api):
        return contract.runtime_too_old(runtime_api, library_api)
    return None


def _register(library, target, platform, stages):
    capsules = {stage: jax.ffi.pycapsule(getattr(library, name)) for stage, name in stages.items()}
    jax.ffi.register_ffi_target(target, capsules, platform=platform, api_version=1)


@functools.cache
def load():
    """The library by ctypes, with the entry points that Python calls typed."""
    library = ctypes.CDLL(str(LIBRARY))
    library.jgg_build_id.restype = ctypes.c_char_p
    library.jgg_driver_status.restype = ctypes.c_char_p
    library.jgg_ffi_api_version.argtypes = [ctypes.POINTER(ctypes.c_int)] * 2
    library.jgg_ffi_api_version.restype = None
    return library


def build_id(library):
    return library.jgg_build_id().decode()


def api_version(library):
    """(major, minor) of the XLA FFI API that the library was built against."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.jgg_ffi_api_version(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def driver_status(library):
    """None when the CUDA driver could be opened, else why not."""
    status = library.jgg_driver_status()
    return None if status is None else status.decode()


def runtime_api_version():
    """(major, minor) of the installed jaxlib's XLA FFI API, read off the headers it ships; None if it ships none."""
    header = pathlib.Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    if not header.exists():
        return None
    found = dict(re.findall(r"#define\s+XLA_FFI_API_(MAJOR|MINOR)\s+(\d+)", header.read_text()))
    return (int(found["MAJOR"]), int(found["MINOR"])) if len(found) == 2 else None
