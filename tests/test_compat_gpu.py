"""The document's names on a GPU: torch tensors on its streams and from its allocator, JAX arrays by address."""

import ctypes
import threading

import compat_problems
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jax_grouped_gemm as package
from jax_grouped_gemm import direct, grouped_gemm_wrapper, library

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")]

DISCRETE = pytest.mark.parametrize("discrete", [False, True], ids=["dense", "discrete"])
DYNAMIC = pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
EVERY_OUTPUT = [(d, c) for d in ("bfloat16", "float16", "float32") for c in (None, "bfloat16", "float16", "float32")]


def on_gpu(case, discrete=False):
    return compat_problems.torch_arguments(case, "cuda", discrete)


def problem(rng, **options):
    return compat_problems.aligned_case(rng, **{"m": 2048, "n": 392, "k": 200, "bias": "float32"} | options)


@pytest.fixture(autouse=True)
def _poisoned_allocator():
    """Freed memory of torch's holds NaN, so that an element that no kernel writes does not look right."""
    if torch.cuda.is_available():
        poison = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(8)]
        torch.cuda.synchronize()
        del poison


# --- results ----------------------------------------------------------------------------------------------------------


@DISCRETE
@DYNAMIC
@pytest.mark.parametrize("b_major", ["k", "n"])
@pytest.mark.parametrize("bias", [None, "bfloat16", "float16", "float32"])
def test_results(rng, discrete, dynamic, b_major, bias):
    for d_dtype, c_dtype in EVERY_OUTPUT:
        case = problem(
            rng, b_major=b_major, bias=bias, d_dtype=d_dtype, c_dtype=c_dtype, generate_c=c_dtype is not None
        )
        arguments, _alive = on_gpu(case, discrete)
        result = grouped_gemm_wrapper(**arguments, use_dynamic_sched=dynamic)
        assert result.d_tensor.stride() == (392, 1, 2048 * 392)
        compat_problems.check(result, case)


@DISCRETE
def test_any_offsets(rng, discrete):
    for _ in range(10):
        case = oracle.make_case(rng, 9, 1001, 136, 72, bias="bfloat16")
        arguments, _alive = on_gpu(case, discrete)
        compat_problems.check(grouped_gemm_wrapper(**arguments, m_aligned=1), case)


@DYNAMIC
def test_operands_that_are_views(rng, dynamic):
    case = problem(rng)
    arguments, _alive = on_gpu(case)
    a, b = (compat_problems.to_torch(x, "cuda") for x in (case.a, case.b))
    a = torch.cat([torch.zeros_like(a[:8]), a])[8:]
    b = torch.cat([torch.zeros_like(b[:1]), b])[1:]
    arguments |= {"a_tensor": a[:, :, None], "b_tensor": b.permute(1, 2, 0)}
    assert a.storage_offset()
    assert b.storage_offset()
    storage = torch.full((3, 2048, 392), 7.0, dtype=torch.bfloat16, device="cuda")
    result = grouped_gemm_wrapper(**arguments, d_tensor=storage[1][:, :, None], use_dynamic_sched=dynamic)
    compat_problems.check(result, case)
    assert (storage[0] == 7).all()
    assert (storage[2] == 7).all()


def test_an_address_that_is_not_aligned(rng):
    case = problem(rng)
    arguments, _alive = on_gpu(case)
    storage = torch.zeros(case.a.size + 1, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(ValueError, match="a_tensor must start at a multiple of 16 bytes"):
        grouped_gemm_wrapper(**arguments | {"a_tensor": storage[1:].view(2048, 200, 1)})


def test_wrong_values_on_the_device(rng):
    arguments, _alive = on_gpu(problem(rng), discrete=True)
    arguments["padded_offsets"][1] = 100
    with pytest.raises(ValueError, match=r"got padded_offsets\[1\] = 100 after 256"):
        grouped_gemm_wrapper(**arguments)
    arguments["padded_offsets"][1] = 256
    arguments["b_ptrs"][2] = 0
    with pytest.raises(ValueError, match=r"got b_ptrs\[2\] = 0x0"):
        grouped_gemm_wrapper(**arguments)


@pytest.mark.parametrize("name", ["prob_tensor", "padded_offsets", "alpha_tensor", "b_tensor"])
def test_operands_on_two_devices(rng, name):
    arguments, _alive = on_gpu(problem(rng))
    with pytest.raises(ValueError, match=f"{name} must be on the device of a_tensor, cuda:0; got cpu"):
        grouped_gemm_wrapper(**arguments | {name: arguments[name].cpu()})


def test_sm100_names_on_this_gpu(rng):
    arguments, _alive = on_gpu(problem(rng))
    if torch.cuda.get_device_capability() >= (10, 0):
        package.grouped_gemm_wrapper_sm100(**arguments)
    else:
        with pytest.raises(
            RuntimeError, match="found compute capability 9.0; use grouped_gemm_wrapper, which runs there"
        ):
            package.grouped_gemm_wrapper_sm100(**arguments)


def test_overlap_margin(rng):
    case = problem(rng)
    arguments, _alive = on_gpu(case)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    for margin in (1, 2, sms // 2):
        compat_problems.check(grouped_gemm_wrapper(**arguments, overlap_margin=margin), case)
    with pytest.raises(RuntimeError, match="overlap_margin"):
        grouped_gemm_wrapper(**arguments, overlap_margin=sms + 1)


@DYNAMIC
def test_bitwise_repeatable(rng, dynamic):
    arguments, _alive = on_gpu(problem(rng, d_dtype="float32"))
    first = grouped_gemm_wrapper(**arguments).d_tensor
    for _ in range(10):
        assert torch.equal(grouped_gemm_wrapper(**arguments, use_dynamic_sched=dynamic).d_tensor, first)


@DISCRETE
@DYNAMIC
def test_the_class_with_another_m(rng, discrete, dynamic):
    operation = None
    for m in (2048, 512, 4096):
        case = problem(rng, m=m, generate_c=True, c_dtype="float16")
        arguments, _alive = on_gpu(case, discrete)
        for name in ("b_major", "d_dtype", "generate_c", "c_dtype", "n", "b_dtype"):
            arguments.pop(name, None)
        d = torch.full((m, 392, 1), torch.nan, dtype=torch.bfloat16, device="cuda")
        c = torch.full((m, 392, 1), torch.nan, dtype=torch.float16, device="cuda")
        if operation is None:
            weights = {"num_experts": 4, "b_shape": (392, 200), "b_dtype": torch.bfloat16} if discrete else {}
            operation = package.GroupedGemm(
                arguments["a_tensor"], c, d, arguments["padded_offsets"], arguments["alpha_tensor"],
                arguments.get("b_tensor"), arguments["bias_tensor"], arguments["prob_tensor"],
                generate_c=True, use_dynamic_sched=dynamic, **weights,
            )  # fmt: skip
            operation.compile()
        operation.execute(**arguments, c_tensor=c, d_tensor=d)
        compat_problems.check((d, c), case)


# --- weight gradients -------------------------------------------------------------------------------------------------


def wgrad_problem(rng, **options):
    return oracle.make_wgrad_case(rng, 9, 1001, 136, 72, alpha=False, **options)


def wgrad_on_gpu(case, **layout):
    return compat_problems.torch_wgrad_arguments(case, "cuda", **layout)


@pytest.mark.parametrize("a_major", ["m", "k"])
@pytest.mark.parametrize("b_major", ["n", "k"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_weight_gradients(rng, a_major, b_major, dtype):
    for _ in range(4):
        case = wgrad_problem(rng, d_dtype=dtype)
        arguments = wgrad_on_gpu(case, a_major=a_major, b_major=b_major)
        result = package.grouped_gemm_wgrad_wrapper(**arguments, wgrad_dtype=getattr(torch, dtype))
        oracle.wgrad_check(compat_problems.to_numpy(result.wgrad_tensor), case)


def test_weight_gradients_are_added_to_an_output(rng):
    case = wgrad_problem(rng, accumulate=True)
    output = compat_problems.to_torch(case.total, "cuda")
    package.grouped_gemm_wgrad_wrapper(**wgrad_on_gpu(case), wgrad_tensor=output, accumulate_on_output=True)
    oracle.wgrad_check(compat_problems.to_numpy(output), case)


def test_weight_gradients_overwrite_an_output(rng):
    case = wgrad_problem(rng)
    output = torch.full((9, 136, 72), torch.nan, dtype=torch.bfloat16, device="cuda")
    package.grouped_gemm_wgrad_wrapper(**wgrad_on_gpu(case), wgrad_tensor=output)
    oracle.wgrad_check(compat_problems.to_numpy(output), case)


@pytest.mark.parametrize("a_major", ["m", "k"])
def test_weight_gradients_on_the_given_stream(rng, a_major):
    """The copy of an operand whose tokens are contiguous is made there too."""
    case = wgrad_problem(rng)
    arguments = wgrad_on_gpu(case, a_major=a_major)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    package.grouped_gemm_wgrad_wrapper(**arguments, current_stream=side)
    late = torch.zeros_like(arguments["a_tensor"])
    assert late.stride() == arguments["a_tensor"].stride()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)  # about 0.1 s
        late.copy_(arguments["a_tensor"])
    result = package.grouped_gemm_wgrad_wrapper(**arguments | {"a_tensor": late}, current_stream=side)
    torch.cuda.default_stream().synchronize()
    assert not side.query(), "the call waited for its stream"
    side.synchronize()
    oracle.wgrad_check(compat_problems.to_numpy(result.wgrad_tensor), case)


def test_capture_and_replay_of_weight_gradients(rng):
    arguments = wgrad_on_gpu(wgrad_problem(rng))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        package.grouped_gemm_wgrad_wrapper(**arguments)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = package.grouped_gemm_wgrad_wrapper(**arguments)
    for _ in range(3):
        case = wgrad_problem(rng)
        for name, x in wgrad_on_gpu(case).items():
            if x is not None:
                arguments[name].copy_(x)
        graph.replay()
        torch.cuda.synchronize()
        oracle.wgrad_check(compat_problems.to_numpy(result.wgrad_tensor), case)


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
def test_weight_gradients_of_jax_arrays(rng, jitted):
    case = wgrad_problem(rng, d_dtype="float32")
    gpu = jax.devices("cuda")[0]
    a, b, offsets = jax.device_put((case.x.T, case.y, case.offsets), gpu)
    run = lambda a, b, offsets: package.grouped_gemm_wgrad_wrapper(a, b, None, None, offsets, wgrad_dtype="float32")
    result = (jax.jit(run) if jitted else run)(a, b, offsets)
    assert result.wgrad_tensor.device == gpu
    oracle.wgrad_check(result.wgrad_tensor, case)


def test_sm100_names_of_weight_gradients_on_this_gpu(rng):
    case = oracle.make_wgrad_case(rng, 3, 768, 136, 72, offsets=[256, 256, 512], alpha=False)
    if torch.cuda.get_device_capability() >= (10, 0):
        result = package.grouped_gemm_wgrad_wrapper_sm100(**wgrad_on_gpu(case))
        oracle.wgrad_check(compat_problems.to_numpy(result.wgrad_tensor), case)
    else:
        with pytest.raises(RuntimeError, match="found compute capability 9.0; use grouped_gemm_wgrad_wrapper"):
            package.grouped_gemm_wgrad_wrapper_sm100(**wgrad_on_gpu(case))


# --- streams, the allocator, graphs -----------------------------------------------------------------------------------


def as_handle(stream):
    return stream.cuda_stream


@DISCRETE
@pytest.mark.parametrize("spelling", [None, lambda stream: stream, as_handle], ids=["current", "object", "handle"])
def test_runs_on_the_given_stream(rng, discrete, spelling):
    """What the stream does before the call is seen, what another one does is not waited for."""
    case = problem(rng)
    arguments, _alive = on_gpu(case, discrete)
    late = torch.zeros_like(arguments["a_tensor"])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    grouped_gemm_wrapper(**arguments, current_stream=side)  # kernels loaded, values seen, memory at hand
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)  # about 0.1 s
        late.copy_(arguments["a_tensor"])
    given = {} if spelling is None else {"current_stream": spelling(side)}
    with torch.cuda.stream(side if spelling is None else torch.cuda.current_stream()):
        result = grouped_gemm_wrapper(**arguments | {"a_tensor": late}, **given)
    torch.cuda.default_stream().synchronize()
    assert not side.query(), "the call waited for its stream"
    side.synchronize()
    compat_problems.check(result, case)


@DYNAMIC
def test_memory_is_not_given_away_while_the_stream_is_busy(rng, dynamic):
    """b_ptrs and scratch are dropped before the kernel starts; what is then allocated must not be their memory."""
    case = problem(rng)
    arguments, _experts = on_gpu(case, discrete=True)
    poison = [torch.full((392, 200), torch.nan, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
    elsewhere = torch.tensor([w.data_ptr() for w in poison], device="cuda")
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    # Kernels loaded, memory at hand, and values seen, so that no look at them waits for the stream.
    grouped_gemm_wrapper(**arguments, use_dynamic_sched=dynamic, current_stream=side)
    torch.full((128,), 255, dtype=torch.uint8, device="cuda")  # whose kernel would be loaded below
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(1_000_000_000)  # about 0.5 s
    result = grouped_gemm_wrapper(**arguments, use_dynamic_sched=dynamic, current_stream=side)
    del arguments["b_ptrs"]
    taken = [elsewhere.clone() for _ in range(64)]
    taken += [torch.full((128 * 4 + 128,), 255, dtype=torch.uint8, device="cuda") for _ in range(64)]
    torch.cuda.current_stream().synchronize()
    assert not side.query(), "the stream was not busy: the test shows nothing"
    side.synchronize()
    compat_problems.check(result, case)
    del taken


@DISCRETE
@DYNAMIC
def test_allocates_outputs_and_scratch_only(rng, discrete, dynamic):
    case = problem(rng, generate_c=True, c_dtype="float32")
    arguments, _alive = on_gpu(case, discrete)
    grouped_gemm_wrapper(**arguments, use_dynamic_sched=dynamic)
    allocated = lambda: torch.cuda.memory_stats()["requested_bytes.all.allocated"]  # of all times, not at present
    before = allocated()
    result = grouped_gemm_wrapper(**arguments, use_dynamic_sched=dynamic)
    sizes = [2048 * 392 * 2, 2048 * 392 * 4, (128 * 4 if discrete else 0) + (128 if dynamic else 0)]
    assert allocated() - before == sum(sizes)
    compat_problems.check(result, case)


@DISCRETE
@DYNAMIC
def test_capture_and_replay(rng, discrete, dynamic):
    """A graph of the call computes with what its tensors hold when it is replayed."""
    first = problem(rng, generate_c=True, c_dtype="float16")
    arguments, _alive = on_gpu(first, discrete)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        grouped_gemm_wrapper(**arguments, use_dynamic_sched=dynamic)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = grouped_gemm_wrapper(**arguments, use_dynamic_sched=dynamic)
    for offsets in ([256, 256, 768, 1024], [0, 0, 0, 2048], [1792, 1792, 2048, 2048], [0, 0, 0, 0]):
        case = oracle.make_case(
            rng, 4, 2048, 392, 200, offsets=offsets, bias="float32", generate_c=True, c_dtype="float16"
        )
        changed, _experts = on_gpu(case, discrete)  # whose addresses the graph finds from now on
        for name, x in changed.items():
            if isinstance(x, torch.Tensor):
                arguments[name].copy_(x)
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        compat_problems.check(result, case)


def test_capture_needs_a_loaded_kernel_or_has_it_from_compile(rng):
    """compile() loads, so that the first execute may be captured."""
    case = problem(rng, n=520)
    arguments, _alive = on_gpu(case)
    for name in ("b_major", "d_dtype"):
        del arguments[name]
    d = torch.zeros(2048, 520, 1, dtype=torch.bfloat16, device="cuda")
    operation = package.GroupedGemm(
        arguments["a_tensor"], None, d, arguments["padded_offsets"], arguments["alpha_tensor"],
        arguments["b_tensor"], arguments["bias_tensor"], arguments["prob_tensor"],
    )  # fmt: skip
    operation.compile()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        operation.execute(**arguments, c_tensor=None, d_tensor=d)
    graph.replay()
    torch.cuda.synchronize()
    compat_problems.check((d, None), case)


def test_from_a_thread_without_a_context(rng):
    """The legacy default stream means the current context's, which a new thread has not."""
    case = problem(rng)
    arguments, _alive = on_gpu(case)
    grouped_gemm_wrapper(**arguments)
    found = []
    thread = threading.Thread(target=lambda: found.append(grouped_gemm_wrapper(**arguments)))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    compat_problems.check(found[0], case)


def test_on_the_second_gpu(rng):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    torch.cuda.set_device(0)  # JAX leaves the device that it used last
    case = problem(rng)
    arguments, _alive = compat_problems.torch_arguments(case, "cuda:1", discrete=True)
    result = grouped_gemm_wrapper(**arguments, use_dynamic_sched=True)
    assert result.d_tensor.device == torch.device("cuda", 1)
    assert torch.cuda.current_device() == 0
    compat_problems.check(result, case)


# --- JAX --------------------------------------------------------------------------------------------------------------


def jax_output(shape, dtype=jnp.bfloat16):
    return jax.block_until_ready(jnp.full(shape, jnp.nan, dtype))


def ready(arguments, alive):
    jax.block_until_ready([x for x in arguments.values() if isinstance(x, jax.Array)])
    jax.block_until_ready(alive)


@DYNAMIC
@pytest.mark.parametrize("b_major", ["k", "n"])
def test_jax_through_xla(rng, dynamic, b_major):
    case = problem(rng, bias=None, b_major=b_major, generate_c=True, c_dtype="float32")
    arguments, _alive = compat_problems.jax_arguments(case)
    compat_problems.check(grouped_gemm_wrapper(**arguments, use_dynamic_sched=dynamic), case)


@DYNAMIC
def test_jax_execute_by_address(rng, dynamic):
    operation, d = None, jax_output((2048, 392, 1))
    c = jax_output((2048, 392, 1), jnp.float32)
    for _ in range(5):
        case = problem(rng, bias=None, generate_c=True, c_dtype="float32")
        arguments, alive = compat_problems.jax_arguments(case)
        for name in ("n", "b_dtype", "b_major", "d_dtype", "generate_c", "c_dtype"):
            del arguments[name]
        if operation is None:
            operation = package.GroupedGemm(
                arguments["a_tensor"], c, d, arguments["padded_offsets"], arguments["alpha_tensor"],
                sample_prob=arguments["prob_tensor"], num_experts=4, b_shape=(392, 200), b_dtype=jnp.bfloat16,
                generate_c=True, use_dynamic_sched=dynamic,
            )  # fmt: skip
            operation.compile()
        ready(arguments, alive)
        operation.execute(**arguments, c_tensor=c, d_tensor=d)
        direct.synchronize(d.device.local_hardware_id, 0)
        # Copies: np.asarray would remember what the first one saw.
        compat_problems.check((jnp.copy(d), jnp.copy(c)), case)


@pytest.fixture
def driver_stream():
    """A stream of nobody's: neither XLA nor torch knows it."""
    stream = ctypes.c_void_p()
    with direct.PrimaryContext(0):
        assert direct._driver().cuStreamCreate(ctypes.byref(stream), 1) == 0
    yield stream.value
    with direct.PrimaryContext(0):
        assert direct._driver().cuStreamDestroy_v2(stream) == 0


@pytest.mark.parametrize("given", [False, True], ids=["new outputs", "given outputs"])
def test_jax_on_a_stream(rng, driver_stream, given):
    case = problem(rng, bias=None)
    arguments, alive = compat_problems.jax_arguments(case)
    ready(arguments, alive)
    outputs = {"d_tensor": jax_output((2048, 392, 1))} if given else {}
    result = grouped_gemm_wrapper(**arguments, **outputs, use_dynamic_sched=True, current_stream=driver_stream)
    direct.synchronize(0, driver_stream)
    compat_problems.check(result, case)


def test_jax_calls_by_address_reach_the_kernels(rng):
    """Not the reference: the library counts them."""
    arguments, alive = compat_problems.jax_arguments(problem(rng, bias=None))
    ready(arguments, alive)
    loaded = library.load()
    loaded.jgg_count_launches(1)
    try:
        result = grouped_gemm_wrapper(**arguments, current_stream=0)
        direct.synchronize(0, 0)
        launches, captured = ctypes.c_int64(), ctypes.c_int64()
        loaded.jgg_launch_counts(ctypes.byref(launches), ctypes.byref(captured))
    finally:
        loaded.jgg_count_launches(0)
    assert (launches.value, captured.value) == (1, 0)
    assert np.isfinite(np.asarray(result.d_tensor).astype(np.float32)).all()


def test_errors_of_the_library_are_runtime_errors():
    case = oracle.make_case(np.random.default_rng(0), 2, 512, 16, 32, offsets=[256, 512])
    arguments, alive = compat_problems.jax_arguments(case)
    ready(arguments, alive)
    with pytest.raises(RuntimeError, match="overlap_margin"):
        grouped_gemm_wrapper(**arguments, current_stream=0, overlap_margin=10**6)
