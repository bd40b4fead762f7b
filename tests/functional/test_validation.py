"""The model's arithmetic and results against what an H200 gave."""

import ctypes
import json

import device
import jax
import numpy as np
import ptx
import pytest
import validation

from jax_grouped_gemm import config, direct

HOPPER = config.variants(90) + config.wgrad_variants(90)


@pytest.mark.parametrize("variant", HOPPER, ids=lambda variant: variant.name)
def test_model_gives_the_recorded_results(variant):
    assert validation.on_the_model(variant) == validation.recorded()[variant.name]


@pytest.mark.gpu
@pytest.mark.parametrize("variant", HOPPER, ids=lambda variant: variant.name)
def test_hardware_gives_the_recorded_results(variant):
    if jax.devices("cuda")[0].compute_capability != "9.0":
        pytest.skip("not a Hopper GPU")
    found = {
        problem.name: validation.digest(on_the_gpu(variant, case, problem.dynamic, validation.sweep.b_ptrs(i)))
        for i, problem, case in validation.cases(variant)
    }
    assert found == validation.recorded()[variant.name]


def on_the_gpu(variant, case, dynamic, b_ptrs):
    """The same call of the library as `device.run` makes, on the first GPU."""
    gpu = jax.devices("cuda")[0]
    arrays = {}

    def put(name, array, writable=False):
        if array.dtype == np.uint64:  # passes through JAX's default types as pairs of 32 bits
            array = array.view(np.uint32)
        arrays[name] = jax.device_put(array, gpu).block_until_ready()
        return arrays[name].unsafe_buffer_pointer()

    def new(name, nbytes):
        return put(name, np.full(nbytes, 0xFF, np.uint8))  # NaN in every type

    call, outputs = device.library_call(variant, case, dynamic, b_ptrs, put, new)
    with direct.PrimaryContext(0):
        device.make_call(direct._library(), variant, call)
    direct.synchronize(0, 0)
    got = tuple(np.asarray(arrays[name]).view(dtype).reshape(shape) for name, _, shape, dtype in outputs)
    return got if len(got) > 1 else got[0]


def _maps_differ(driver):
    """Of the recorded tensor maps, those whose meaningful half the driver encodes otherwise."""
    recorded = json.loads(validation.RESULTS.with_name("h200_tensor_maps.json").read_text())
    assert len(recorded) > 100
    arguments = ("type", "address", "dims", "strides", "box", "swizzle", "l2_promotion")
    return [
        each for each in recorded if ptx.encode(driver, *(each[name] for name in arguments))[:64].hex() != each["bytes"]
    ]


def test_the_stand_in_encodes_tensor_maps_as_the_driver_did():
    assert _maps_differ(device.driver()) == []


@pytest.mark.gpu
def test_the_driver_encodes_tensor_maps_as_recorded():
    """The bytes are documented nowhere: a driver that writes others needs another model, and another prologue."""
    with direct.PrimaryContext(0):
        assert _maps_differ(ctypes.CDLL("libcuda.so.1")) == []


def test_matrix_unit():
    """Sums of products, of numbers near and far apart, tiny, huge and special: every bit as on an H200."""
    recorded = np.load(validation.RESULTS.with_name("h200_matrix_unit.npz"))
    names = sorted(name.removesuffix("_d") for name in recorded.files if name.endswith("_d"))
    assert len(names) == 8
    for name in names:
        a, b, want = (recorded[f"{name}_{operand}"] for operand in "abd")
        pad = [(0, 0), (0, -a.shape[1] % 16)]
        a, b = np.pad(a, pad), np.pad(b, pad)
        d = np.zeros(want.shape, np.float32)
        for first in range(0, a.shape[1], 16):
            device.multiply_add(a[:, first : first + 16], b[:, first : first + 16], d)
        np.testing.assert_array_equal(d.view(np.uint32), want, err_msg=name)
