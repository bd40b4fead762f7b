"""The document's names with torch tensors on the CPU, every error of docs/errors.md, and CUDA's side with parts replaced."""

import contextlib
import types

import compat_problems
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

torch = pytest.importorskip("torch")

import error_table  # noqa: E402

import jax_grouped_gemm as package  # noqa: E402
from jax_grouped_gemm import grouped_gemm_wrapper  # noqa: E402
from jax_grouped_gemm.compat import torch_tensors, values  # noqa: E402
from jax_grouped_gemm.compat.dtypes import dtype_name  # noqa: E402

# --- errors -----------------------------------------------------------------------------------------------------------


def test_the_table_of_errors_is_what_is_raised():
    assert error_table.written() == error_table.table(), "run: python tests/error_table.py, and read the difference"


def test_every_text_says_what_was_expected_found_and_to_do():
    for rows in error_table.ROWS.values():
        for condition, trigger in rows.items():
            _, text = error_table.error_of(trigger)
            assert "got " in text or "found " in text or "cannot be used" in text, condition
            assert ";" in text or "cannot be used" in text, condition


def test_the_call_without_changes_is_legal():
    assert error_table.call().d_tensor.shape == (error_table.M, error_table.N, 1)
    assert error_table.support() is True


# --- results ----------------------------------------------------------------------------------------------------------


# bias, D, C: each dtype at each place.
DTYPES = [
    (None, "bfloat16", None), (None, "float16", "bfloat16"), ("bfloat16", "float16", "float32"),
    ("float16", "float32", "bfloat16"), ("float32", "float32", "float16"), ("bfloat16", "bfloat16", None),
]  # fmt: skip


@pytest.mark.parametrize("discrete", [False, True], ids=["dense", "discrete"])
@pytest.mark.parametrize("b_major", ["k", "n"])
@pytest.mark.parametrize(("bias", "d_dtype", "c_dtype"), DTYPES)
def test_results(rng, discrete, b_major, bias, d_dtype, c_dtype):
    case = compat_problems.aligned_case(
        rng, b_major=b_major, bias=bias, d_dtype=d_dtype, c_dtype=c_dtype, generate_c=c_dtype is not None
    )
    arguments, _alive = compat_problems.torch_arguments(case, discrete=discrete)
    result = grouped_gemm_wrapper(**arguments)
    m, n = case.a.shape[0], 48
    for x in (result.d_tensor, *([] if c_dtype is None else [result.c_tensor])):
        assert (x.shape, x.stride()) == ((m, n, 1), (n, 1, m * n))
    assert (result.c_tensor is None) == (c_dtype is None)
    compat_problems.check(result, case)


@pytest.mark.parametrize("options", [{"use_dynamic_sched": True}, {"vector_f32": True}, {"overlap_margin": 8}])
def test_options_without_effect_on_the_reference(rng, options):
    case = compat_problems.aligned_case(rng, bias="float32")
    arguments, _alive = compat_problems.torch_arguments(case)
    compat_problems.check(grouped_gemm_wrapper(**arguments, **options), case)


def test_any_offsets_with_m_aligned_1(rng):
    case = oracle.make_case(rng, 7, 301, 24, 40, bias="bfloat16")
    arguments, _alive = compat_problems.torch_arguments(case)
    compat_problems.check(grouped_gemm_wrapper(**arguments, m_aligned=1), case)


def test_no_rows(rng):
    arguments, _alive = compat_problems.torch_arguments(oracle.make_case(rng, 3, 0, 24, 40))
    assert grouped_gemm_wrapper(**arguments).d_tensor.shape == (0, 24, 1)


def test_one_expert_has_free_strides(rng):
    """Dimensions of one element: M*K of a, N*K of b, N of bias may be anything."""
    case = oracle.make_case(rng, 1, 256, 24, 40, offsets=[256], bias="float32")
    arguments, _alive = compat_problems.torch_arguments(case)
    for name in ("a_tensor", "b_tensor", "bias_tensor", "prob_tensor"):
        x = arguments[name]
        strides = [s if size > 1 else 3 for s, size in zip(x.stride(), x.shape, strict=True)]
        arguments[name] = torch.as_strided(x, x.shape, strides)
    compat_problems.check(grouped_gemm_wrapper(**arguments), case)


def test_operands_that_are_views(rng):
    """Parts of larger tensors, from an offset on."""
    case = compat_problems.aligned_case(rng, bias="float16")
    arguments, _alive = compat_problems.torch_arguments(case)
    b = torch.cat([torch.zeros(1, 48, 32).bfloat16(), compat_problems.to_torch(case.b)])[1:]
    a = torch.cat([torch.zeros(8, 32).bfloat16(), compat_problems.to_torch(case.a)])[8:]
    arguments |= {"a_tensor": a[:, :, None], "b_tensor": b.permute(1, 2, 0)}
    assert a.storage_offset()
    assert b.storage_offset()
    compat_problems.check(grouped_gemm_wrapper(**arguments), case)


def test_outputs_of_the_caller(rng):
    case = compat_problems.aligned_case(rng, generate_c=True, c_dtype="float32")
    arguments, _alive = compat_problems.torch_arguments(case)
    storage = torch.full((2, 1280, 48), 7.0)
    d, c = torch.full((1280, 48, 1), 7.0).bfloat16(), storage[1][:, :, None]
    result = grouped_gemm_wrapper(**arguments, d_tensor=d, c_tensor=c)
    assert result.d_tensor is d
    assert result.c_tensor is c
    compat_problems.check((d, c), case)
    assert (storage[0] == 7).all()


def test_c_is_written_only_if_asked_for(rng):
    case = compat_problems.aligned_case(rng)
    arguments, _alive = compat_problems.torch_arguments(case)
    c = torch.full((1280, 48, 1), 7.0).bfloat16()
    result = grouped_gemm_wrapper(**arguments, c_tensor=c)
    assert result.c_tensor is None
    assert (c == 7).all()
    compat_problems.check(result, case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, jnp.bfloat16, "bfloat16", np.dtype(jnp.bfloat16)])
def test_dtypes_of_any_framework(rng, dtype):
    arguments, _alive = compat_problems.torch_arguments(compat_problems.aligned_case(rng), discrete=True)
    arguments |= {"b_dtype": dtype, "d_dtype": dtype, "c_dtype": dtype, "acc_dtype": torch.float32}
    assert grouped_gemm_wrapper(**arguments).d_tensor.dtype == torch.bfloat16


def test_names_of_torch_dtypes():
    assert [dtype_name(x) for x in (torch.bfloat16, torch.float16, torch.float32, torch.half)] == [
        "bfloat16", "float16", "float32", "float16",
    ]  # fmt: skip


# --- the class --------------------------------------------------------------------------------------------------------


def samples_of(arguments, d, c, discrete):
    names = {"a": "a_tensor", "padded_offsets": "padded_offsets", "alpha": "alpha_tensor", "b": "b_tensor"}
    names |= {"bias": "bias_tensor", "prob": "prob_tensor"}
    given = {f"sample_{short}": arguments[name] for short, name in names.items() if name in arguments}
    if discrete:
        given |= {"num_experts": 4, "b_shape": (48, 32), "b_dtype": torch.bfloat16}
    return given | {"sample_c": c, "sample_d": d}


@pytest.mark.parametrize("discrete", [False, True], ids=["dense", "discrete"])
@pytest.mark.parametrize("generate_c", [False, True])
def test_life_of_an_operation(rng, discrete, generate_c):
    def problem(m):
        case = compat_problems.aligned_case(rng, m=m, bias="float32", generate_c=generate_c, c_dtype="float16")
        arguments, alive = compat_problems.torch_arguments(case, discrete=discrete)
        for name in ("b_major", "d_dtype", "generate_c", "c_dtype", "n", "b_dtype"):
            arguments.pop(name, None)
        d = torch.full((m, 48, 1), 7.0).bfloat16()
        c = torch.full((m, 48, 1), 7.0).half()
        return case, arguments, alive, d, c

    case, arguments, _alive, d, c = problem(1280)
    made = package.GroupedGemm(**samples_of(arguments, d, c, discrete), generate_c=generate_c)
    with pytest.raises(RuntimeError, match="execute must come after compile"):
        made.execute(**arguments, c_tensor=c, d_tensor=d)
    assert made.check_support() is True
    with pytest.raises(RuntimeError, match="execute must come after compile"):
        made.execute(**arguments, c_tensor=c, d_tensor=d)
    made.compile()
    for m in (1280, 2048, 512):  # M may change
        case, arguments, _alive, d, c = problem(m)
        assert made.execute(**arguments, c_tensor=c, d_tensor=d) is None
        compat_problems.check((d, c if generate_c else None), case)
        assert generate_c or (c == 7).all()


def test_samples_are_not_kept_alive():
    import gc
    import weakref

    given = error_table.samples()
    made = package.GroupedGemm(**given)
    made.compile()
    reference = weakref.ref(given["sample_a"])
    del given
    gc.collect()
    assert reference() is None


def test_compile_checks_too():
    with pytest.raises(ValueError, match="use_dynamic_sched must be True or False"):
        package.GroupedGemm(**error_table.samples(), use_dynamic_sched=1.5).compile()


# --- values -----------------------------------------------------------------------------------------------------------


def test_values_are_looked_at_once_per_change(rng, reads):
    case = compat_problems.aligned_case(rng)
    arguments, _alive = compat_problems.torch_arguments(case, discrete=True)
    for _ in range(3):
        grouped_gemm_wrapper(**arguments)
    assert reads == ["check_padded_offsets", "check_pointers"]
    arguments["padded_offsets"][0] = 0  # in place: a new version of the same tensor
    grouped_gemm_wrapper(**arguments)
    assert reads == ["check_padded_offsets", "check_pointers", "check_padded_offsets"]
    arguments["padded_offsets"][0] = 1
    with pytest.raises(ValueError, match="multiples of m_aligned = 256"):
        grouped_gemm_wrapper(**arguments)


def test_tensors_of_inference_mode_are_looked_at_every_time(rng, reads):
    with torch.inference_mode():
        arguments, _alive = compat_problems.torch_arguments(compat_problems.aligned_case(rng))
        for _ in range(3):
            grouped_gemm_wrapper(**arguments)
    assert len(reads) == 3


@pytest.mark.parametrize("name", ["a_tensor", "b_tensor", "prob_tensor", "bias_tensor"])
def test_a_gradient_is_refused_where_it_would_be_lost(rng, name):
    case = compat_problems.aligned_case(rng, bias="float32")
    arguments, _alive = compat_problems.torch_arguments(case)
    arguments[name] = arguments[name].detach().requires_grad_()
    with pytest.raises(NotImplementedError, match=f"{name} requires a gradient, and none flows through this call"):
        grouped_gemm_wrapper(**arguments)
    with torch.no_grad():
        compat_problems.check(grouped_gemm_wrapper(**arguments), case)


def test_what_is_remembered_of_values_goes_with_the_tensor(rng):
    arguments, _alive = compat_problems.torch_arguments(compat_problems.aligned_case(rng), discrete=True)
    before = len(values._checked)
    grouped_gemm_wrapper(**arguments)
    assert len(values._checked) == before + 2
    del arguments
    assert len(values._checked) == before


# --- CUDA, with torch.cuda and the library replaced -------------------------------------------------------------------


NAMES = {
    "a": "a_tensor", "offsets": "padded_offsets", "alpha": "alpha_tensor", "bias": "bias_tensor", "prob": "prob_tensor",
}  # fmt: skip


@pytest.mark.parametrize("discrete", [False, True], ids=["dense", "discrete"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_launch(rng, cuda, discrete, dynamic):
    case = compat_problems.aligned_case(rng, bias="float16", generate_c=True, c_dtype="float32")
    arguments, _alive = compat_problems.torch_arguments(case, discrete=discrete)
    result = grouped_gemm_wrapper(**arguments, use_dynamic_sched=dynamic)
    (launch,) = cuda.launches
    for field, name in NAMES.items():
        assert getattr(launch, field) == arguments[name].data_ptr(), field
    assert launch.b == arguments["b_ptrs" if discrete else "b_tensor"].data_ptr()
    assert (launch.d, launch.c) == (result.d_tensor.data_ptr(), result.c_tensor.data_ptr())
    assert launch.stream == 40
    assert launch.forward.bias_dtype == "float16"
    assert cuda.entered == []
    recorded = [(launch.scratch, 40)] if discrete or dynamic else []
    assert cuda.recorded == recorded + ([(launch.b, 40)] if discrete else [])
    assert bool(launch.scratch) == (discrete or dynamic)
    call = launch.forward.call
    assert (call.weights, call.dynamic, call.has_bias) == ("pointers" if discrete else "dense", dynamic, True)
    assert (call.m, call.n, call.k, call.l, call.c_dtype, call.d_dtype) == (1280, 48, 32, 4, "float32", "bfloat16")


@pytest.mark.parametrize("stream", [50, types.SimpleNamespace(cuda_stream=50)], ids=["handle", "object"])
def test_launch_on_another_stream(rng, cuda, stream):
    arguments, _alive = compat_problems.torch_arguments(compat_problems.aligned_case(rng), discrete=True)
    grouped_gemm_wrapper(**arguments, current_stream=stream)
    (launch,) = cuda.launches
    assert launch.stream == 50
    assert cuda.entered == [50], "outputs and scratch belong to the launch's stream"
    assert [on for _, on in cuda.recorded] == [50, 50]


def test_nothing_is_read_during_a_capture(rng, cuda, reads):
    arguments, _alive = compat_problems.torch_arguments(compat_problems.aligned_case(rng), discrete=True)
    cuda.capturing = True
    grouped_gemm_wrapper(**arguments)
    assert reads == []
    assert len(cuda.launches) == 1
    cuda.capturing = False
    grouped_gemm_wrapper(**arguments)
    assert len(reads) == 2


def test_nothing_is_read_while_the_callers_stream_is_captured(rng, cuda, reads, monkeypatch):
    """Though the call goes to another, which is not."""
    arguments, _alive = compat_problems.torch_arguments(compat_problems.aligned_case(rng), discrete=True)
    cuda.capturing = True

    @contextlib.contextmanager
    def elsewhere(stream):
        cuda.capturing = False
        yield
        cuda.capturing = True

    monkeypatch.setattr(cuda, "stream", elsewhere)
    grouped_gemm_wrapper(**arguments, current_stream=50)
    assert reads == []
    assert len(cuda.launches) == 1


def test_runs_on_the_device_of_its_operands(rng, cuda, monkeypatch):
    """Which is torch's current one during the call, whatever it was before."""
    arguments, _alive = compat_problems.torch_arguments(compat_problems.aligned_case(rng))
    current = [1]

    @contextlib.contextmanager
    def on(device):
        before, current[0] = current[0], device.index
        yield
        current[0] = before

    cuda.device = on
    monkeypatch.setattr(cuda, "current_device", lambda: current[0])
    seen = []
    monkeypatch.setattr(torch_tensors, "_current_stream", lambda index: seen.append((index, current[0])) or 40)
    grouped_gemm_wrapper(**arguments)
    assert seen == [(None, None)]  # a CPU tensor's index
    assert current == [1]


def test_compile_loads_on_the_device_of_the_samples(fake_launches):
    devices = []
    plan = types.SimpleNamespace(forward=types.SimpleNamespace(load=devices.append))
    torch_tensors.load(plan, torch.device("cuda", 1))
    torch_tensors.load(plan, torch.device("cpu"))
    assert devices == [1]


@pytest.mark.parametrize("name", ["a_tensor", "c_tensor", "prob_tensor"])
def test_outputs_share_no_memory(rng, name):
    arguments, _alive = compat_problems.torch_arguments(
        compat_problems.aligned_case(rng, n=32, k=32, generate_c=True, c_dtype="bfloat16")
    )
    storage = torch.zeros(1280 * 32 * 2 + 1280 * 32).bfloat16()
    d = storage[: 1280 * 32].view(1280, 32, 1)
    if name == "prob_tensor":
        last_of_d = storage[1280 * 32 - 8 :].view(torch.float32)[:1280]
        arguments[name] = last_of_d.copy_(arguments[name][:, 0, 0])[:, None, None]
    elif name == "a_tensor":
        arguments[name] = d
    else:
        arguments[name] = storage[1280 * 32 - 8 :][: 1280 * 32].view(1280, 32, 1)
    with pytest.raises(ValueError, match=r"[cd]_tensor must share no memory with"):
        grouped_gemm_wrapper(**arguments, d_tensor=d)
    # Side by side is no overlap.
    arguments |= compat_problems.torch_arguments(compat_problems.aligned_case(rng, n=32, k=32))[0]
    arguments["c_tensor"] = storage[1280 * 32 :][: 1280 * 32].view(1280, 32, 1)
    grouped_gemm_wrapper(**arguments, d_tensor=d)


def test_torch_knows_that_outputs_changed(rng):
    """So that a gradient that needs what was there before is an error, as after torch's own writes."""
    case = compat_problems.aligned_case(rng)
    arguments, _alive = compat_problems.torch_arguments(case)
    d, x = torch.ones(1280, 48, 1).bfloat16(), torch.ones(1, requires_grad=True)
    loss = (d * x).sum()
    grouped_gemm_wrapper(**arguments, d_tensor=d)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_no_copy_and_no_allocation_but_outputs_and_scratch(rng, cuda, monkeypatch):
    arguments, _alive = compat_problems.torch_arguments(compat_problems.aligned_case(rng, bias="float32"))
    d = torch.zeros(1280, 48, 1).bfloat16()
    for name in ("empty", "empty_strided"):
        monkeypatch.setattr(torch_tensors._torch(), name, None)
    grouped_gemm_wrapper(**arguments, d_tensor=d)
    assert cuda.launches[0].d == d.data_ptr()


def test_a_c_that_is_not_asked_for_is_not_launched(rng, cuda):
    arguments, _alive = compat_problems.torch_arguments(compat_problems.aligned_case(rng))
    result = grouped_gemm_wrapper(**arguments, c_tensor=torch.zeros(1280, 48, 1).bfloat16())
    assert result.c_tensor is None
    assert cuda.launches[0].c == 0


def test_wrong_values_are_not_launched(rng, cuda):
    arguments, _alive = compat_problems.torch_arguments(compat_problems.aligned_case(rng))
    arguments["padded_offsets"][1] = 100
    with pytest.raises(ValueError, match="padded_offsets"):
        grouped_gemm_wrapper(**arguments)
    assert not cuda.launches


def test_unaligned_operands_are_not_launched(rng, cuda):
    arguments, _alive = compat_problems.torch_arguments(compat_problems.aligned_case(rng))
    d = torch.zeros(1280 * 48 + 1).bfloat16()[1:].view(1280, 48, 1)
    with pytest.raises(ValueError, match="d_tensor must start at a multiple of 16 bytes"):
        grouped_gemm_wrapper(**arguments, d_tensor=d)
    assert not cuda.launches


def test_no_rows_are_not_launched(rng, cuda):
    arguments, _alive = compat_problems.torch_arguments(oracle.make_case(rng, 3, 0, 24, 40))
    grouped_gemm_wrapper(**arguments)
    assert not cuda.launches


def test_compile_loads(cuda, monkeypatch):
    monkeypatch.setattr(torch_tensors, "load", lambda plan, device: plan.forward.load(0))
    error_table.operation()
    assert cuda.launches == ["load"]


@pytest.mark.parametrize(
    ("capability", "fits"),
    [("9.0", False), ("8.9", False), ("10.0", True), ("10.3", True), ("12.0", False), ("gfx942", False)],
)
def test_targets_of_the_sm100_names(cuda, monkeypatch, capability, fits):
    monkeypatch.setattr(torch_tensors, "capability", lambda device: capability)
    if fits:
        error_table.call("grouped_gemm_wrapper_sm100")
        (launch,) = cuda.launches
        assert launch.forward.call.mma_tiler_mn == (256, 256)
    else:
        with pytest.raises(RuntimeError, match=rf"found (compute capability )?{capability}"):
            error_table.call("grouped_gemm_wrapper_sm100")


def test_tiles_are_those_of_the_gpu(cuda):
    with pytest.raises(ValueError, match=r"must name a compiled tile, for this process's GPUs of SM90"):
        error_table.call(mma_tiler_mn=(64, 64))
    error_table.call(mma_tiler_mn=(256, 192))
    assert cuda.launches[0].forward.call.mma_tiler_mn == (256, 192)


def test_a_call_on_cuda_leaves_jax_without_devices():
    """JAX claims most of a GPU's memory when asked for devices; that is torch's here."""
    compat_problems.run_python(
        "import torch\n"
        "from jax_grouped_gemm.compat import plan, strided, torch_tensors\n"
        "from jax._src import xla_bridge\n"
        "torch_tensors.capability = lambda device: '9.0'\n"
        "gpu = torch.device('cuda', 0)\n"
        "operands = strided.StridedOperands(\n"
        "    ((512, 32, 1), (32, 1, 16384), torch.bfloat16, gpu), ((2,), (1,), torch.int32, gpu),\n"
        "    ((2,), (1,), torch.float32, gpu), b_tensor=((16, 32, 2), (32, 1, 512), torch.bfloat16, gpu),\n"
        "    prob_tensor=((512, 1, 1), (1, 1, 1), torch.float32, gpu))\n"
        "options = strided.StridedOptions(\n"
        "    None, None, 'k', 'float32', 'bfloat16', 'bfloat16', 'n', None, None, 256, False, False, None)\n"
        "entry = strided.Entry('grouped_gemm_wrapper', False, 'grouped_gemm')\n"
        "found = plan.plan_for(plan.Request(entry, torch_tensors, operands, options, '2'))\n"
        "assert found.call.overlap_margin, found\n"
        "assert not xla_bridge._backends\n"
    )


def test_the_same_shapes_on_another_device_are_another_key():
    assert torch_tensors.layout(torch.zeros(2)) != torch_tensors.layout(torch.zeros(2, device="meta"))
