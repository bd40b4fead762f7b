"""One traced program, lowered for CPU and for CUDA on a machine without a GPU."""

import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from jax_grouped_gemm import config, ffi_call, grouped_gemm, library


@pytest.fixture(autouse=True)
def _built(monkeypatch):
    monkeypatch.setattr(ffi_call, "cuda_capabilities", tuple)
    monkeypatch.setattr(library, "manifest", lambda: {"build_id": "the build"})


def struct(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


WEIGHTS = {
    "dense": {"b": struct(4, 16, 32)},
    "tuple": {"b": (struct(16, 32),) * 4},
    "pointers": {"b_ptrs": struct(32, dtype=jnp.uint8)},
}


def lower(platforms, weights="dense", scaled=False, **options):
    arrays = {"a": struct(64, 32), "offsets": struct(4, dtype=jnp.int32)} | WEIGHTS[weights]
    if scaled:
        arrays |= {"alpha": struct(4, dtype=jnp.float32), "prob": struct(64, dtype=jnp.float32)}
    if weights == "pointers":
        options["n"] = 16
    run = jax.jit(lambda **arrays: grouped_gemm(**arrays, **options))
    return run.trace(**arrays).lower(lowering_platforms=platforms).as_text()


def custom_call(text):
    (line,) = (line for line in text.splitlines() if f"@{library.FORWARD}" in line)
    return line


def test_cpu_has_no_custom_call():
    assert "custom_call" not in lower(("cpu",))


def test_one_program_for_both_platforms():
    text = lower(("cpu", "cuda"))
    custom_call(text)
    assert "stablehlo.while" in text
    assert "stablehlo.case" in text


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("d_dtype", ["bfloat16", "float32"])
def test_attributes_and_operands(weights, scaled, d_dtype):
    line = custom_call(lower(("cuda",), weights, scaled, d_dtype=d_dtype))
    kind = "dense" if weights == "dense" else "pointers"
    scale = "scaled" if scaled else "plain"
    for arch in config.TILES:
        assert re.search(rf'sm{arch} = "sm{arch}_forward_\w+_bk_{kind}_{d_dtype}_{scale}"', line)
    for attribute in (
        f'weights = "{weights}"',
        'b_major = "k"',
        f"has_alpha = {str(scaled).lower()}",
        f"has_prob = {str(scaled).lower()}",
        "n = 16 : i64",
        'build_id = "the build"',
        "mhlo.backend_config = {",  # typed attributes
    ):
        assert attribute in line
    operands = ["64x32xbf16", "4xi32"]
    operands += ["4xf32", "64xf32"] if scaled else []
    operands += {"dense": ["4x16x32xbf16"], "tuple": ["16x32xbf16"] * 4, "pointers": ["32xui8"]}[weights]
    results = [f"64x16x{'bf16' if d_dtype == 'bfloat16' else 'f32'}"] + ([] if weights == "dense" else ["512xui8"])
    found_operands, found_results = line.rsplit(" : (", 1)[1].split(") -> ")
    assert re.findall(r"tensor<([^>]+)>", found_operands) == operands
    assert re.findall(r"tensor<([^>]+)>", found_results) == results


def test_kernel_names_are_compiled_variants():
    names = {variant.name for arch in config.TILES for variant in config.variants(arch)}
    line = custom_call(lower(("cuda",), "tuple", scaled=True, d_dtype="float16"))
    assert set(re.findall(r'"(sm\d+_forward_\w+)"', line)) <= names
    assert len(re.findall(r'"(sm\d+_forward_\w+)"', line)) == 2


def test_reference_on_cuda():
    assert "custom_call" not in lower(("cuda",), implementation="reference")


def test_kernels_only():
    custom_call(lower(("cuda",), implementation="cutedsl"))
    with pytest.raises(RuntimeError, match="the kernels are for cuda, not for cpu"):
        lower(("cpu", "cuda"), implementation="cutedsl")


def test_other_platforms_use_the_reference():
    assert "custom_call" not in lower(("tpu",))


def test_pointers_for_both_platforms(monkeypatch):
    monkeypatch.setattr(library, "registered", lambda: None)
    text = lower(("cpu", "cuda"), "pointers")
    custom_call(text)
    assert f"@{library.GATHER_WEIGHTS}" in text


def test_exported_for_both_runs_on_the_cpu():
    case = oracle.make_case(np.random.default_rng(0), 4, 64, 16, 32, alpha=False, prob=False)
    arrays = tuple(map(jnp.asarray, (case.a, case.b, case.offsets)))
    exported = jax.export.export(
        jax.jit(lambda a, b, offsets: grouped_gemm(a, b, offsets=offsets)),
        platforms=("cpu", "cuda"),
        disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(library.FORWARD)],
    )(*arrays)
    got = exported.call(*arrays)
    oracle.assert_close(got, oracle.oracle(case), case)
