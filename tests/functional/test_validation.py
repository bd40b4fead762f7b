"""The model's arithmetic and results against what an H200 gave."""

import ctypes
import json

import device
import jax
import ml_dtypes
import numpy as np
import ptx
import pytest
import validation

from jax_grouped_gemm import config, direct

HOPPER = config.variants(90)


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
    """The same call of the library as `device.forward` makes, on the first GPU."""
    gpu = jax.devices("cuda")[0]
    keep = []

    def put(array):
        keep.append(jax.device_put(array, gpu).block_until_ready())
        return keep[-1].unsafe_buffer_pointer()

    def output(dtype):
        put(np.full((m, n), np.nan, dtype))
        return keep[-1]

    m, k = case.a.shape
    l, n = case.offsets.size, case.b.shape[1 if case.b_major == "k" else 2]
    call = direct.LibraryCall(struct_size=ctypes.sizeof(direct.LibraryCall))
    call.sm90 = variant.name.encode()
    call.b_major, call.d_dtype = case.b_major.encode(), case.d_dtype.encode()
    call.m, call.n, call.k, call.l, call.dynamic = m, n, k, l, dynamic
    call.a, call.offsets = put(case.a), put(case.offsets)
    if variant.weights == "dense":
        call.weights, call.b = b"dense", put(case.b)
    else:
        addresses = [put(case.b[i]) for i in range(l)]
        if b_ptrs == "value":
            keep.append((ctypes.c_uint64 * l)(*addresses))
            call.weights = b"tuple"
            call.weight_addresses = ctypes.cast(keep[-1], ctypes.POINTER(ctypes.c_uint64))
        else:
            # 64-bit integers pass through JAX's default types as pairs of 32.
            call.weights, call.b = b"pointers", put(np.array(addresses, np.uint64).view(np.uint32))
    for operand in ("alpha", "prob"):
        if (array := getattr(case, operand)) is not None:
            setattr(call, operand, put(array))
    if case.bias is not None:
        call.bias_dtype, call.bias = case.bias.dtype.name.encode(), put(case.bias)
    scratch = (0 if variant.weights == "dense" else 128 * l) + (128 if dynamic else 0)
    if scratch:
        call.scratch = put(np.full(scratch, 0xEE, np.uint8))
    d = output(getattr(ml_dtypes, case.d_dtype, case.d_dtype))
    call.d = d.unsafe_buffer_pointer()
    if case.generate_c:
        c = output(getattr(ml_dtypes, case.c_dtype, case.c_dtype))
        call.c_dtype, call.c = case.c_dtype.encode(), c.unsafe_buffer_pointer()
    with direct.PrimaryContext(0):
        error = direct._library().jgg_forward(ctypes.byref(call))
    assert error is None, error
    direct.synchronize(0, 0)
    return (np.asarray(d), np.asarray(c)) if case.generate_c else np.asarray(d)


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
