"""Each test cites its statements of README.md."""

import pathlib
import re

import compat_problems
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from subject import got, want

statement = pytest.mark.statement
REFUSED = (ValueError, RuntimeError)
DTYPES = ("bfloat16", "float16", "float32")
WEIGHTS = pytest.mark.parametrize("discrete", [False, True], ids=["dense", "discrete"])


# --- the operation ----------------------------------------------------------------------------------------------------


@statement(1)
@WEIGHTS
@pytest.mark.parametrize(
    "offsets", [[256, 512, 768, 1024], [0, 0, 1024, 1024], [1280] * 4, [0, 0, 0, 0], [0, 256, 256, 1280]]
)
def test_groups(subject, rng, discrete, offsets):
    case = oracle.make_case(rng, 4, 1280, 256, 128, offsets=offsets, poison=False)
    arguments, _alive = compat_problems.torch_arguments(case, subject.device, discrete)
    result = subject.wrapper(**arguments)
    subject.synchronize()
    end = offsets[-1]
    np.testing.assert_allclose(got(result["d_tensor"])[:end], want(case)[:end], rtol=2e-2, atol=2e-2)


@statement(2)
@WEIGHTS
def test_with_bias(subject, rng, discrete):
    case, arguments, _alive = subject.problem(
        rng, discrete=discrete, bias="float32", generate_c=True, c_dtype="float32", d_dtype="float32"
    )
    result = subject.wrapper(**arguments)
    subject.check(result, case)
    np.testing.assert_array_equal(got(result["d_tensor"]), got(result["c_tensor"]))


@statement(3)
@WEIGHTS
def test_without_bias(subject, rng, discrete):
    case, arguments, _alive = subject.problem(
        rng, discrete=discrete, generate_c=True, c_dtype="float32", d_dtype="float32"
    )
    result = subject.wrapper(**arguments)
    subject.check(result, case)
    d = case.prob[:1024, None] * got(result["c_tensor"])[:1024].astype(np.float32)
    np.testing.assert_allclose(got(result["d_tensor"])[:1024], d, rtol=1e-6)


@statement(4)
def test_accumulation(subject, rng):
    """In 16 bits, 4096 products of 1 would stop growing at 256."""
    case = oracle.make_case(rng, 2, 256, 256, 4096, offsets=[256, 256], poison=False)
    case.a[:], case.b[:], case.alpha[:], case.prob[:] = 1, 1, 1, 1
    case.d_dtype = "float32"
    arguments, _alive = compat_problems.torch_arguments(case, subject.device)
    assert (got(subject.wrapper(**arguments)["d_tensor"]) == 4096).all()


@statement(5)
@pytest.mark.parametrize("d_dtype", DTYPES)
@pytest.mark.parametrize("c_dtype", DTYPES)
def test_output_dtypes(subject, rng, d_dtype, c_dtype):
    case, arguments, _alive = subject.problem(rng, d_dtype=d_dtype, c_dtype=c_dtype, generate_c=True, bias="bfloat16")
    result = subject.wrapper(**arguments)
    assert str(result["d_tensor"].dtype) == f"torch.{d_dtype}"
    assert str(result["c_tensor"].dtype) == f"torch.{c_dtype}"
    subject.check(result, case)


@statement(12)
@pytest.mark.parametrize("bias", DTYPES)
def test_bias_dtypes(subject, rng, bias):
    case, arguments, _alive = subject.problem(rng, bias=bias)
    assert arguments["bias_tensor"].stride() == (1, 256)
    subject.check(subject.wrapper(**arguments), case)


# --- layouts ----------------------------------------------------------------------------------------------------------


def other_device(x):
    return x.cpu() if x.is_cuda else x.to("meta")


def gapped(x):
    """The same values, every other element of twice the memory."""
    import torch

    return torch.stack([x, x], dim=-1)[..., 0]


BREAKS = {
    "shape": lambda x: x[..., None],
    "size": lambda x: x[: x.shape[0] // 2],
    "strides": gapped,
    "dtype": lambda x: x.double(),
    "device": other_device,
}
OPERANDS = {
    "a_tensor": 6, "b_tensor": 7, "b_ptrs": 8, "padded_offsets": 9, "alpha_tensor": 10, "prob_tensor": 11,
    "bias_tensor": 12, "c_tensor": 13, "d_tensor": 13,
}  # fmt: skip


@pytest.mark.parametrize("wrong", BREAKS)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=statement(number, *[17] * (name == "b_ptrs"), 39)) for name, number in OPERANDS.items()],
)
def test_layouts(subject, rng, name, wrong):
    import torch

    case, arguments, _alive = subject.problem(rng, discrete=name == "b_ptrs", bias="float32", generate_c=True)
    for output in ("c_tensor", "d_tensor"):
        arguments[output] = torch.zeros(1280, 256, 1, dtype=torch.bfloat16, device=subject.device)
    subject.check(subject.wrapper(**arguments), case)
    with pytest.raises(REFUSED):
        subject.wrapper(**arguments | {name: BREAKS[wrong](arguments[name])})


@statement(15, 39)
def test_dense_weights_that_are_not_k_major(subject, rng):
    _case, arguments, _alive = subject.problem(rng, n=128)
    with pytest.raises(REFUSED):
        subject.wrapper(**arguments | {"b_tensor": arguments["b_tensor"].transpose(0, 1)})


@statement(15)
def test_b_major(subject, rng):
    case, arguments, _alive = subject.problem(rng, b_major="n")
    if subject.sm100:
        with pytest.raises(REFUSED):
            subject.wrapper(**arguments)
    else:
        subject.check(subject.wrapper(**arguments), case)


@statement(13, 24)
def test_outputs_lie_as_stated(subject, rng, framework):
    _case, arguments, _alive = subject.problem(rng, framework, generate_c=True, c_dtype="float32")
    for x in subject.wrapper(**arguments):
        assert tuple(x.shape) == (1280, 256, 1)
        assert framework == "jax" or x.stride() == (256, 1, 1280 * 256)


@statement(14, 39)
@pytest.mark.parametrize(
    "offsets", [[256, 300, 768, 1024], [1, 1, 1, 1], [512, 256, 768, 1024], [0, 0, 0, 1536], [-256, 0, 0, 0]]
)
def test_alignment_of_rows(subject, rng, framework, offsets):
    _case, arguments, _alive = subject.problem(rng, framework)
    offsets = np.array(offsets, np.int32)
    arguments["padded_offsets"] = (
        jnp.asarray(offsets) if framework == "jax" else compat_problems.to_torch(offsets, subject.device)
    )
    with pytest.raises(REFUSED):
        subject.wrapper(**arguments)


@statement(14, 39)
def test_alignment_of_m(subject, rng, framework):
    _case, arguments, _alive = subject.problem(rng, framework, m=1152)
    with pytest.raises(REFUSED):
        subject.wrapper(**arguments)


@statement(8, 16, 32)
@pytest.mark.parametrize("bias", [None, "bfloat16"])
def test_discrete(subject, rng, bias):
    case, arguments, _alive = subject.problem(rng, discrete=True, bias=bias)
    assert (arguments["n"], arguments["b_major"]) == (256, "k")
    subject.check(subject.wrapper(**arguments), case)


@statement(16)
@pytest.mark.parametrize("changes", [{"n": None}, {"n": 0}, {"b_dtype": None}, {"b_dtype": "float16"}])
def test_discrete_arguments(subject, rng, changes):
    _case, arguments, _alive = subject.problem(rng, discrete=True)
    with pytest.raises(REFUSED):
        subject.wrapper(**arguments | changes)


@statement(17, 18, 39)
@pytest.mark.parametrize("entry", [0, 1, 8], ids=["null", "odd", "half a row"])
def test_pointer_entries(subject, rng, entry):
    _case, arguments, _alive = subject.problem(rng, discrete=True)
    arguments["b_ptrs"][2] = arguments["b_ptrs"][2] + entry if entry else 0
    with pytest.raises(REFUSED):
        subject.wrapper(**arguments)


@statement(19)
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
def test_pointer_array_is_recorded(subject, rng):
    """Dropped while the stream is busy, its memory is not given to another tensor."""
    import torch

    case, arguments, _experts = subject.problem(rng, discrete=True)
    poison = torch.full((256, 128), torch.nan, dtype=torch.bfloat16, device="cuda")
    elsewhere = torch.full((4,), poison.data_ptr(), device="cuda")
    side = torch.cuda.Stream()
    subject.synchronize()
    subject.wrapper(**arguments, current_stream=side.cuda_stream)  # what is compiled or loaded is so now
    subject.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
    result = subject.wrapper(**arguments, current_stream=side.cuda_stream)
    del arguments["b_ptrs"]
    taken = [elsewhere.clone() for _ in range(64)]
    subject.check(result, case)
    del taken


# --- JAX --------------------------------------------------------------------------------------------------------------


@statement(21)
def test_frameworks(subject, rng, framework):
    case, arguments, _alive = subject.problem(rng, framework, discrete=True)
    subject.check(subject.wrapper(**arguments), case)


@statement(22)
@pytest.mark.parametrize("name", ["b_tensor", "bias_tensor"])
def test_jax_has_no_strides(subject, rng, name):
    _case, arguments, _alive = subject.problem(rng, "jax")
    if name == "b_tensor":
        for other in ("b_ptrs", "n", "b_dtype"):
            del arguments[other]
    shape = (256, 128, 4) if name == "b_tensor" else (256, 4)
    with pytest.raises(REFUSED):
        subject.wrapper(**arguments, **{name: jnp.zeros(shape, jnp.bfloat16)})


@statement(23)
@pytest.mark.parametrize("x64", [False, True], ids=["uint8", "int64"])
def test_jax_pointers(subject, rng, x64):
    case, arguments, _alive = subject.problem(rng, "jax")
    packed = np.asarray(arguments["b_ptrs"])
    with jax.enable_x64(x64) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64(x64):
        arguments["b_ptrs"] = jnp.asarray(packed.view(np.int64) if x64 else packed)
        assert arguments["b_ptrs"].shape == ((4,) if x64 else (32,))
        jax.block_until_ready(arguments["b_ptrs"])
        subject.check(subject.wrapper(**arguments), case)


@statement(24)
def test_jax_outputs(subject, rng):
    case, arguments, _alive = subject.problem(rng, "jax", generate_c=True)
    result = subject.wrapper(**arguments)
    assert all(isinstance(x, jax.Array) and x.shape == (1280, 256, 1) for x in result)
    subject.check(result, case)


def bfloat16_spellings():
    import torch

    return [torch.bfloat16, "bfloat16", np.dtype(ml_dtypes.bfloat16), jnp.bfloat16]


@statement(25)
@pytest.mark.parametrize("which", range(4), ids=["torch", "name", "NumPy", "JAX"])
def test_spellings_of_dtypes(subject, rng, framework, which):
    case, arguments, _alive = subject.problem(rng, framework, discrete=True, generate_c=True)
    dtype = bfloat16_spellings()[which]
    arguments |= {"b_dtype": dtype, "c_dtype": dtype, "d_dtype": dtype}
    subject.check(subject.wrapper(**arguments), case)


@statement(25)
def test_types_of_cutlass(subject, rng, framework):
    cutlass = pytest.importorskip("cutlass")
    case, arguments, _alive = subject.problem(rng, framework, discrete=True, generate_c=True, c_dtype="float32")
    arguments |= {"b_dtype": cutlass.BFloat16, "c_dtype": cutlass.Float32, "d_dtype": cutlass.BFloat16}
    subject.check(subject.wrapper(**arguments), case)


@statement(26)
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
def test_jax_stream(subject, rng):
    import torch

    case, arguments, alive = subject.problem(rng, "jax")
    stream = torch.cuda.Stream()
    jax.block_until_ready([arguments, alive])
    result = subject.wrapper(**arguments, current_stream=stream.cuda_stream)
    stream.synchronize()
    subject.check(result, case)


JIT_OPTIONS = ("n", "d_dtype", "c_dtype", "generate_c")


def entry_arguments(arguments):
    """(arrays, options) for the entry."""
    arrays = {name: x for name, x in arguments.items() if isinstance(x, jax.Array)}
    return arrays, {name: arguments[name] for name in JIT_OPTIONS if name in arguments}


@statement(27)
@pytest.mark.parametrize("c_dtype", [None, "float32"])
def test_jit(subject, rng, c_dtype):
    case, arguments, _alive = subject.problem(rng, "jax", generate_c=c_dtype is not None, c_dtype=c_dtype)
    arrays, options = entry_arguments(arguments)
    run = jax.jit(lambda arrays: subject.jax_entry(**arrays, **options))
    d, c = run(arrays)
    compat_problems.check((d, c), case)
    again, _ = run(arrays)
    assert again.unsafe_buffer_pointer() != d.unsafe_buffer_pointer()


@statement(28)
def test_tracing(subject, rng):
    """Bad offsets pass, a bad shape does not."""
    _case, arguments, _alive = subject.problem(rng, "jax")
    arrays, options = entry_arguments(arguments)
    run = jax.jit(lambda arrays: subject.jax_entry(**arrays, **options))
    jax.block_until_ready(run(arrays | {"padded_offsets": jnp.asarray([256, 0, 512, 512], jnp.int32)}))
    with pytest.raises(REFUSED):
        run(arrays | {"padded_offsets": jnp.zeros(5, jnp.int32)})
    with pytest.raises(REFUSED):
        run(arrays | {"alpha_tensor": jnp.zeros(4, jnp.bfloat16)})


# --- the wrapper ------------------------------------------------------------------------------------------------------


@statement(30)
def test_dense_example(subject, rng):
    """The document's first example, but for the import and the name."""
    import torch

    case, arguments, _alive = subject.problem(rng, bias="float32", generate_c=True, c_dtype="float32")
    a, b, bias = (arguments[name] for name in ("a_tensor", "b_tensor", "bias_tensor"))
    padded_offsets, alpha, prob = (arguments[name] for name in ("padded_offsets", "alpha_tensor", "prob_tensor"))
    result = subject.wrapper(
        a_tensor=a,
        padded_offsets=padded_offsets,
        alpha_tensor=alpha,
        b_tensor=b,
        bias_tensor=bias,
        prob_tensor=prob,
        c_dtype=torch.float32,
        d_dtype=torch.bfloat16,
        generate_c=True,
        use_dynamic_sched=True,
    )
    d, c = result
    assert d is result["d_tensor"]
    assert c is result["c_tensor"]
    subject.check(result, case)


@statement(29, 31)
def test_only_c_and_d_are_returned(subject, rng, framework):
    _case, arguments, _alive = subject.problem(rng, framework, discrete=True)
    result = subject.wrapper(**arguments, use_dynamic_sched=True)
    assert list(result.keys()) == ["d_tensor", "c_tensor"]


@statement(31)
def test_c_only_if_asked_for(subject, rng, framework):
    _case, arguments, _alive = subject.problem(rng, framework, discrete=True)
    assert subject.wrapper(**arguments)["c_tensor"] is None
    assert subject.wrapper(**arguments, generate_c=True)["c_tensor"] is not None


@statement(13, 39)
def test_outputs_of_the_caller(subject, rng):
    import torch

    case, arguments, _alive = subject.problem(rng, generate_c=True)
    d, c = (torch.full((1280, 256, 1), torch.nan, dtype=torch.bfloat16, device=subject.device) for _ in range(2))
    result = subject.wrapper(**arguments, d_tensor=d, c_tensor=c)
    assert result["d_tensor"] is d
    assert result["c_tensor"] is c
    subject.check(result, case)
    with pytest.raises(REFUSED):
        subject.wrapper(**arguments, d_tensor=d.float())


# --- the class --------------------------------------------------------------------------------------------------------


@statement(33)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_class_example(subject, rng, dynamic):
    """The document's second example, but for the import and the name."""
    import torch

    case, arguments, _alive = subject.problem(rng, bias="bfloat16", generate_c=True, c_dtype="float32")
    a, b, bias = (arguments[name] for name in ("a_tensor", "b_tensor", "bias_tensor"))
    padded_offsets, alpha, prob = (arguments[name] for name in ("padded_offsets", "alpha_tensor", "prob_tensor"))
    c = torch.full((1280, 256, 1), torch.nan, dtype=torch.float32, device=subject.device)
    d = torch.full((1280, 256, 1), torch.nan, dtype=torch.bfloat16, device=subject.device)
    op = subject.operation(
        sample_a=a,
        sample_c=c,
        sample_d=d,
        sample_padded_offsets=padded_offsets,
        sample_alpha=alpha,
        sample_b=b,
        sample_bias=bias,
        sample_prob=prob,
        acc_dtype=torch.float32,
        generate_c=True,
        use_dynamic_sched=dynamic,
    )
    assert op.check_support()
    op.compile()
    op.execute(
        a_tensor=a,
        c_tensor=c,
        d_tensor=d,
        padded_offsets=padded_offsets,
        alpha_tensor=alpha,
        b_tensor=b,
        bias_tensor=bias,
        prob_tensor=prob,
    )
    subject.check((d, c), case)


def discrete_operation(subject, arguments, c, d, **options):
    import torch

    op = subject.operation(
        arguments["a_tensor"], c, d, arguments["padded_offsets"], arguments["alpha_tensor"],
        sample_prob=arguments["prob_tensor"], num_experts=4, b_shape=(256, 128), b_dtype=torch.bfloat16, **options,
    )  # fmt: skip
    assert op.check_support()
    op.compile()
    return op


def execute(op, arguments, c, d):
    names = ("a_tensor", "padded_offsets", "alpha_tensor", "b_ptrs", "prob_tensor")
    op.execute(**{name: arguments[name] for name in names}, c_tensor=c, d_tensor=d)


def outputs(subject, m):
    import torch

    return [torch.full((m, 256, 1), torch.nan, dtype=torch.bfloat16, device=subject.device) for _ in range(2)]


@statement(34)
def test_discrete_class(subject, rng):
    case, arguments, _alive = subject.problem(rng, discrete=True, generate_c=True)
    c, d = outputs(subject, 1280)
    execute(discrete_operation(subject, arguments, c, d, generate_c=True), arguments, c, d)
    subject.check((d, c), case)


@statement(35)
@WEIGHTS
def test_schedules(subject, rng, discrete):
    case, arguments, _alive = subject.problem(rng, discrete=discrete, d_dtype="float32", bias="float16")
    static = subject.wrapper(**arguments, use_dynamic_sched=False)
    dynamic = subject.wrapper(**arguments, use_dynamic_sched=True)
    subject.check(dynamic, case)
    np.testing.assert_array_equal(got(static["d_tensor"]), got(dynamic["d_tensor"]))


@statement(36)
def test_dynamic_m(subject, rng):
    op = None
    for m in (1280, 512, 4096):
        case, arguments, _alive = subject.problem(rng, discrete=True, m=m, generate_c=True)
        c, d = outputs(subject, m)
        op = op or discrete_operation(subject, arguments, c, d, generate_c=True, use_dynamic_sched=True)
        execute(op, arguments, c, d)
        subject.check((d, c), case)


@statement(37)
def test_caches_tell_calls_apart(subject, rng):
    problems = [
        {}, {"d_dtype": "float32"}, {"generate_c": True}, {"generate_c": True, "c_dtype": "float16"},
        {"bias": "float32"}, {"bias": "bfloat16"}, {"discrete": True}, {"l": 3}, {"l": 5}, {"n": 512}, {"k": 64},
        {"m": 2048},
    ]  # fmt: skip
    for options in [*problems, *reversed(problems)]:
        for dynamic in (False, True):
            case, arguments, _alive = subject.problem(rng, **options)
            subject.check(subject.wrapper(**arguments, use_dynamic_sched=dynamic), case)


# --- refusals ---------------------------------------------------------------------------------------------------------


@statement(38)
def test_weights_exclude_each_other(subject, rng):
    _case, dense, _dense = subject.problem(rng)
    _case, discrete, _experts = subject.problem(rng, discrete=True)
    with pytest.raises(REFUSED):
        subject.wrapper(**dense | discrete)
    del dense["b_tensor"]
    with pytest.raises(REFUSED):
        subject.wrapper(**dense)


@statement(39)
@pytest.mark.parametrize(
    "changes", [{"mma_tiler_mn": (100, 100)}, {"cluster_shape_mn": (3, 1)}, {"acc_dtype": "float16"}, {"cd_major": "m"}]
)
def test_tiles(subject, rng, changes):
    _case, arguments, _alive = subject.problem(rng)
    with pytest.raises(REFUSED):
        subject.wrapper(**arguments | changes)


@statement(40)
def test_target(subject, rng):
    """Where this machine is not one, the names for SM100 say so."""
    if subject.sm100:
        pytest.skip("an SM100")
    _case, arguments, _alive = subject.problem(rng)
    with pytest.raises(RuntimeError, match="needs a GPU of compute capability 10.0 or newer"):
        subject.module.grouped_gemm_wrapper_sm100(**arguments)


@statement(41)
@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_alignment_of_the_pointer_array(subject, rng):
    """On a CPU, where torch makes such a tensor of other memory; on a GPU it makes none."""
    import torch

    _case, arguments, _alive = subject.problem(rng, discrete=True)
    memory = bytearray(8 * 4 + 8)
    start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % 8 + 4
    odd = torch.frombuffer(memory, dtype=torch.int64, count=4, offset=start % 8)
    odd.copy_(arguments["b_ptrs"])
    assert odd.data_ptr() % 8 == 4
    with pytest.raises(REFUSED):
        subject.wrapper(**arguments | {"b_ptrs": odd})


@statement(42)
@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_torch_is_imported_for_its_tensors_only(subject):
    compat_problems.run_python(
        f"import sys, jax.numpy as jnp, numpy as np, {subject.module.__name__} as module\n"
        "experts = [jnp.ones((8, 16), jnp.bfloat16)]\n"
        "addresses = np.array([w.unsafe_buffer_pointer() for w in experts], np.int64)\n"
        "result = module.grouped_gemm_wrapper(\n"
        "    jnp.ones((256, 16, 1), jnp.bfloat16), jnp.array([256], jnp.int32), jnp.ones(1), n=8, b_dtype='bfloat16',\n"
        "    b_ptrs=jnp.asarray(addresses.view(np.uint8)), prob_tensor=jnp.ones((256, 1, 1)))\n"
        "assert (np.asarray(result.d_tensor) == 16).all()\n"
        "assert 'torch' not in sys.modules\n"
    )


def test_every_statement_has_a_test():
    """Or is the caller's duty."""
    here = pathlib.Path(__file__)
    rows = re.findall(r"^\| (\d+) \| .* \| (.*) \|$", (here.parent / "README.md").read_text(), re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, len(rows) + 1))
    written = here.read_text()
    for number, tests in rows:
        for name in re.findall(r"`(test_\w+)`", tests):
            assert f"def {name}(" in written, f"{number}: {name}"
        assert tests == "duty" or "`test_" in tests, number
