"""cuDNN's names for weight gradients: torch tensors on the CPU, CUDA's side with parts replaced, JAX arrays.

Their errors are with those of the other names, in docs/errors.md; tests on a GPU in test_compat_gpu.py.
"""

import dataclasses
import types

import compat_problems
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jax_grouped_gemm as package
from jax_grouped_gemm import (
    calls,
    direct,
    ffi_call,
    grouped_gemm_wgrad_jax_sm100,
    grouped_gemm_wgrad_wrapper,
    library,
    selection,
)
from jax_grouped_gemm.compat import jax_arrays, through_xla

LAYOUTS = pytest.mark.parametrize("a_major", ["m", "k"])
B_LAYOUTS = pytest.mark.parametrize("b_major", ["n", "k"])


def problem(rng, **options):
    """Ends of any value, an empty group, and a poisoned tail."""
    return oracle.make_wgrad_case(rng, 4, 77, 24, 40, offsets=[5, 5, 40, 70], alpha=False, **options)


def jax_call(case, function=grouped_gemm_wgrad_wrapper, **options):
    a, b, offsets = jnp.asarray(case.x).T, jnp.asarray(case.y), jnp.asarray(case.offsets)
    scales = () if function is grouped_gemm_wgrad_jax_sm100 else (None, None)
    return function(a, b, *scales, offsets, **options)


# --- torch on the CPU -------------------------------------------------------------------------------------------------


@LAYOUTS
@B_LAYOUTS
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_torch_results(rng, a_major, b_major, dtype):
    torch = pytest.importorskip("torch")
    case = problem(rng, d_dtype=dtype)
    arguments = compat_problems.torch_wgrad_arguments(case, a_major=a_major, b_major=b_major)
    result = grouped_gemm_wgrad_wrapper(**arguments, wgrad_dtype=getattr(torch, dtype))
    (wgrad,) = result
    assert wgrad is result.wgrad_tensor
    assert wgrad.stride() == (24 * 40, 40, 1)
    oracle.wgrad_check(compat_problems.to_numpy(wgrad), case)


def test_by_default_it_is_bfloat16(rng):
    torch = pytest.importorskip("torch")
    case = problem(rng)
    assert (
        grouped_gemm_wgrad_wrapper(**compat_problems.torch_wgrad_arguments(case)).wgrad_tensor.dtype == torch.bfloat16
    )
    assert jax_call(case).wgrad_tensor.dtype == jnp.bfloat16


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_output_that_is_given(rng, dtype):
    torch = pytest.importorskip("torch")
    case = problem(rng, d_dtype=dtype)
    output = torch.full((4, 24, 40), torch.nan, dtype=getattr(torch, dtype))
    version = output._version
    arguments = compat_problems.torch_wgrad_arguments(case)
    result = grouped_gemm_wgrad_wrapper(**arguments, wgrad_tensor=output)
    assert result.wgrad_tensor is output
    assert output._version > version, "torch is not told of the write"
    oracle.wgrad_check(compat_problems.to_numpy(output), case)


def test_adds_to_an_output(rng):
    pytest.importorskip("torch")
    case = problem(rng, accumulate=True)
    output = compat_problems.to_torch(case.total)
    arguments = compat_problems.torch_wgrad_arguments(case)
    grouped_gemm_wgrad_wrapper(**arguments, wgrad_tensor=output, accumulate_on_output=True)
    oracle.wgrad_check(compat_problems.to_numpy(output), case)


def test_added_to_an_output_that_is_not_given_it_is_the_result(rng):
    torch = pytest.importorskip("torch")
    case = problem(rng)
    arguments = compat_problems.torch_wgrad_arguments(case)
    result = grouped_gemm_wgrad_wrapper(**arguments, accumulate_on_output=True).wgrad_tensor
    assert torch.equal(result, grouped_gemm_wgrad_wrapper(**arguments).wgrad_tensor)


@pytest.mark.parametrize("operand", ["a_tensor", "b_tensor", "offsets_tensor"])
def test_an_output_in_the_memory_of_an_operand(rng, operand):
    torch = pytest.importorskip("torch")
    storage = torch.zeros(8192, dtype=torch.int16)
    tensors = {
        "a_tensor": storage[:1024].view(torch.bfloat16).view(32, 32).t(),
        "b_tensor": storage[1024:2048].view(torch.bfloat16).view(32, 32),
        "offsets_tensor": storage[2048:2052].view(torch.int32),
        "wgrad_tensor": storage[4096:6144].view(torch.bfloat16).view(2, 32, 32),
    }
    grouped_gemm_wgrad_wrapper(sfa_tensor=None, sfb_tensor=None, **tensors)
    first = {"a_tensor": 512, "b_tensor": 1536, "offsets_tensor": 2050}[operand]
    output = storage[first : first + 8][:8].view(torch.bfloat16)
    output = torch.as_strided(output, (2, 32, 32), (1024, 32, 1))
    if operand != "offsets_tensor":
        tensors["offsets_tensor"] = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="wgrad_tensor must (share no memory with|start at)"):
        grouped_gemm_wgrad_wrapper(sfa_tensor=None, sfb_tensor=None, **tensors | {"wgrad_tensor": output})


def test_no_tokens(rng):
    torch = pytest.importorskip("torch")
    case = oracle.make_wgrad_case(rng, 2, 0, 24, 40, offsets=[0, 0], alpha=False)
    output = torch.full((2, 24, 40), torch.nan)
    grouped_gemm_wgrad_wrapper(**compat_problems.torch_wgrad_arguments(case), wgrad_tensor=output)
    assert not output.any()
    assert not np.asarray(jax_call(case).wgrad_tensor).astype(np.float32).any()


def test_operands_that_require_gradients(rng):
    torch = pytest.importorskip("torch")
    arguments = compat_problems.torch_wgrad_arguments(problem(rng))
    arguments["b_tensor"].requires_grad_()
    with pytest.raises(NotImplementedError, match="b_tensor requires a gradient"):
        grouped_gemm_wgrad_wrapper(**arguments)
    with torch.no_grad():
        grouped_gemm_wgrad_wrapper(**arguments)


# --- torch on CUDA, with parts replaced -------------------------------------------------------------------------------


@pytest.fixture
def wgrad_launches(cuda, monkeypatch):
    launches = []

    class Wgrad:
        def __init__(self, call):
            self.call = call

        def __call__(self, device, stream, **addresses):
            launches.append(types.SimpleNamespace(call=self.call, device=device, stream=stream, **addresses))

    monkeypatch.setattr(direct, "Wgrad", Wgrad)
    return launches


@LAYOUTS
@B_LAYOUTS
def test_launch(rng, cuda, wgrad_launches, a_major, b_major):
    case = problem(rng, accumulate=True)
    arguments = compat_problems.torch_wgrad_arguments(case, a_major=a_major, b_major=b_major)
    output = compat_problems.to_torch(case.total)
    options = {"accumulate_on_output": True, "overlap_margin": 3, "mma_tiler_mn": (192, 192)}
    grouped_gemm_wgrad_wrapper(**arguments, wgrad_tensor=output, current_stream=50, **options)
    (launch,) = wgrad_launches
    assert (launch.x == arguments["a_tensor"].data_ptr()) == (a_major == "m"), "copied, or not"
    assert (launch.y == arguments["b_tensor"].data_ptr()) == (b_major == "n")
    assert (launch.d, launch.offsets) == (output.data_ptr(), arguments["offsets_tensor"].data_ptr())
    assert launch.stream == 50
    assert cuda.entered == [50], "copies belong to the launch's stream"
    call = launch.call
    assert (call.m, call.n, call.k, call.l, call.d_dtype, call.accumulate) == (77, 24, 40, 4, "float32", True)
    assert (call.overlap_margin, call.mma_tiler_mn, call.scratch_bytes) == (3, (192, 192), 0)


def test_the_environments_margin_counts_clusters(rng, wgrad_launches, monkeypatch):
    arguments = compat_problems.torch_wgrad_arguments(problem(rng))
    for tile, sms in (((192, 192), 3), ((256, 256), 6)):
        monkeypatch.setenv("CUDNNFE_CLUSTER_OVERLAP_MARGIN", "3")
        grouped_gemm_wgrad_wrapper(**arguments, mma_tiler_mn=tile)
        assert wgrad_launches[-1].call.overlap_margin == sms


def test_offsets_are_looked_at_once_and_not_during_a_capture(rng, cuda, wgrad_launches):
    arguments = compat_problems.torch_wgrad_arguments(problem(rng))
    arguments["offsets_tensor"][1] = 71
    cuda.capturing = True
    grouped_gemm_wgrad_wrapper(**arguments)
    cuda.capturing = False
    with pytest.raises(ValueError, match=r"got offsets_tensor\[2\] = 40 after 71"):
        grouped_gemm_wgrad_wrapper(**arguments)
    assert len(wgrad_launches) == 1


# --- JAX --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
def test_jax_results(rng, dtype, jitted):
    case = problem(rng, d_dtype=dtype)
    run = lambda: jax_call(case, wgrad_dtype=dtype)
    result = jax.jit(run)() if jitted else run()
    oracle.wgrad_check(result.wgrad_tensor, case)


def test_the_jit_entry(rng, fresh_plans, monkeypatch):
    case = oracle.make_wgrad_case(rng, 4, 1024, 24, 40, offsets=[256, 256, 512, 768], alpha=False)
    run = jax.jit(lambda a, b, offsets: grouped_gemm_wgrad_jax_sm100(a, b, offsets))
    arguments = jnp.asarray(case.x).T, jnp.asarray(case.y), jnp.asarray(case.offsets)
    monkeypatch.setattr(ffi_call, "cuda_capabilities", lambda: ("9.0",))
    with pytest.raises(RuntimeError, match="found compute capability 9.0; use grouped_gemm_wgrad, which runs there"):
        run(*arguments)
    monkeypatch.setattr(ffi_call, "cuda_capabilities", lambda: ())
    oracle.wgrad_check(run(*arguments).wgrad_tensor, case)
    with pytest.raises(RuntimeError, match="grouped_gemm_wgrad_jax_sm100 needs a GPU of compute capability 10.0"):
        jax_call(case, grouped_gemm_wgrad_jax_sm100)
    monkeypatch.setattr(jax_arrays, "capability", lambda device: "10.0")
    oracle.wgrad_check(jax_call(case, grouped_gemm_wgrad_jax_sm100).wgrad_tensor, case)
    with pytest.raises(ValueError, match="wgrad_ptrs"):
        jax_call(case, grouped_gemm_wgrad_jax_sm100, wgrad_ptrs=jnp.zeros(32, jnp.uint8))
    with pytest.raises(ValueError, match="sfb_tensor must be left out"):
        jax_call(case, grouped_gemm_wgrad_jax_sm100, sfb_tensor=jnp.zeros(32))


def test_a_transposed_operand_is_not_transposed_back(rng):
    """cuDNN wants A (M, T): what a program makes of its (T, M) for it costs nothing."""
    case = problem(rng)

    def run(x, y, offsets):
        return grouped_gemm_wgrad_wrapper(x.T, y, None, None, offsets).wgrad_tensor

    arguments = jnp.asarray(case.x), jnp.asarray(case.y), jnp.asarray(case.offsets)
    lowered = jax.jit(run).trace(*arguments).lower(lowering_platforms=("cpu",))
    text = lowered.compile().as_text()
    assert "f32[24,40]" in text, "no product found: the test looks at nothing"
    assert "bf16[24,77]" not in text


def test_gradients_flow_through_calls_on_jax_arrays(rng):
    case = problem(rng)

    def loss(a, b, function):
        return jnp.sum(function(a, b).astype(jnp.float32) ** 2)

    a, b, offsets = jnp.asarray(case.x).T, jnp.asarray(case.y), jnp.asarray(case.offsets)
    named = lambda a, b: grouped_gemm_wgrad_wrapper(a, b, None, None, offsets).wgrad_tensor
    native = lambda a, b: package.grouped_gemm_wgrad(a.T, b, offsets=offsets)
    for got, want in zip(jax.grad(loss, (0, 1))(a, b, named), jax.grad(loss, (0, 1))(a, b, native), strict=True):
        assert jnp.array_equal(got, want)
        assert jnp.any(got != 0)


def test_an_enumeration_names_its_value(rng):
    """cuDNN's own WGradInputOrder is one."""
    case = problem(rng)
    order = types.SimpleNamespace(value="tensor2d")
    oracle.wgrad_check(jax_call(case, input_order=order).wgrad_tensor, case)


def test_static_with_every_framework(monkeypatch):
    """As the reference product, whatever the package would choose for a call of its own."""
    monkeypatch.setattr(library, "manifest", lambda: {"build_id": "the build"})
    call = calls.WgradCall(65536, 2048, 2048, 64, "bfloat16", False, None, dynamic=False)
    assert selection.scheduled((90,), dataclasses.replace(call, dynamic=None)).dynamic is True
    x = jax.ShapeDtypeStruct((call.m, call.n), jnp.bfloat16)
    ends = jax.ShapeDtypeStruct((call.l,), jnp.int32)
    text = (
        through_xla._wgrad.trace(x, x, ends, None, call=call, checked=False)
        .lower(lowering_platforms=("cuda",))
        .as_text()
    )
    assert "dynamic = false" in text
