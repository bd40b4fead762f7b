"""The document's names: their parameters, TupleDict, dtypes, JAX arrays, the memo. tests/test_compat_torch.py has torch."""

import contextlib
import copy
import ctypes
import inspect
import pathlib
import pickle
import re
import types

import compat_problems
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest

import jax_grouped_gemm as package
from jax_grouped_gemm import (
    TupleDict,
    calls,
    direct,
    ffi_call,
    grouped_gemm_jax_sm100,
    grouped_gemm_wrapper,
    wgrad_call,
)
from jax_grouped_gemm.compat import jax_arrays, plan, streams, strided, values
from jax_grouped_gemm.compat.dtypes import dtype_name

ROOT = pathlib.Path(__file__).resolve().parent.parent


# --- names and parameters ---------------------------------------------------------------------------------------------

REQUIRED = inspect.Parameter.empty
WRAPPER = {
    "a_tensor": REQUIRED, "padded_offsets": REQUIRED, "alpha_tensor": REQUIRED, "b_tensor": None, "bias_tensor": None,
    "b_ptrs": None, "n": None, "b_dtype": None, "b_major": "k", "prob_tensor": None, "acc_dtype": "float32",
    "c_dtype": "bfloat16", "d_dtype": "bfloat16", "c_tensor": None, "d_tensor": None, "cd_major": "n",
    "mma_tiler_mn": (256, 256), "cluster_shape_mn": None, "vector_f32": False, "m_aligned": 256, "generate_c": False,
    "use_dynamic_sched": False, "current_stream": None,
}  # fmt: skip
CLASS = {
    "sample_a": REQUIRED, "sample_c": REQUIRED, "sample_d": REQUIRED, "sample_padded_offsets": REQUIRED,
    "sample_alpha": REQUIRED, "sample_b": None, "sample_bias": None, "sample_prob": None, "num_experts": None,
    "b_shape": None, "b_dtype": None, "acc_dtype": "float32", "mma_tiler_mn": (256, 256), "cluster_shape_mn": None,
    "vector_f32": False, "m_aligned": 256, "generate_c": False, "b_major": "k", "use_dynamic_sched": False,
}  # fmt: skip
EXECUTE = {
    "a_tensor": REQUIRED, "c_tensor": REQUIRED, "d_tensor": REQUIRED, "padded_offsets": REQUIRED,
    "alpha_tensor": REQUIRED, "b_tensor": None, "b_ptrs": None, "bias_tensor": None, "prob_tensor": None,
    "current_stream": None,
}  # fmt: skip
JAX_ENTRY = {
    "a_tensor": REQUIRED, "padded_offsets": REQUIRED, "alpha_tensor": REQUIRED, "b_ptrs": REQUIRED, "n": REQUIRED,
    "prob_tensor": REQUIRED, "c_dtype": "bfloat16", "d_dtype": "bfloat16", "acc_dtype": "float32",
    "mma_tiler_mn": (256, 256), "cluster_shape_mn": None, "vector_f32": False, "generate_c": False,
    "use_dynamic_sched": False,
}  # fmt: skip
# As cuDNN's front-end 1.32 has them.
WGRAD = {
    "a_tensor": REQUIRED, "b_tensor": REQUIRED, "sfa_tensor": REQUIRED, "sfb_tensor": REQUIRED,
    "offsets_tensor": REQUIRED, "output_mode": "dense", "wgrad_tensor": None, "wgrad_ptrs": None,
    "global_scale_a": None, "global_scale_b": None, "acc_dtype": None, "wgrad_dtype": None,
    "mma_tiler_mn": (256, 256), "cluster_shape_mn": None, "sf_vec_size": 16, "sf_fp8_dtype_override": None,
    "accumulate_on_output": False, "input_order": "tensor2d", "current_stream": None, "descriptor_workspace": None,
}  # fmt: skip
WGRAD_JAX = {
    "a_tensor": REQUIRED, "b_tensor": REQUIRED, "offsets_tensor": REQUIRED, "wgrad_ptrs": None,
    "wgrad_dtype": "bfloat16", "acc_dtype": "float32", "mma_tiler_mn": (256, 256), "cluster_shape_mn": None,
    "accumulate_on_output": False, "input_order": "tensor2d", "sfa_tensor": None, "sfb_tensor": None,
    "global_scale_a": None, "global_scale_b": None, "sf_vec_size": 32,
}  # fmt: skip
NEUTRAL = {"mma_tiler_mn": None, "overlap_margin": None}


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (package.grouped_gemm_wrapper_sm100, WRAPPER),
        (package.grouped_gemm_wrapper, WRAPPER | NEUTRAL),
        (package.GroupedGemmSm100, CLASS),
        (package.GroupedGemm, CLASS | NEUTRAL),
        (package.GroupedGemmSm100.execute, {"self": REQUIRED} | EXECUTE),
        (package.GroupedGemm.execute, {"self": REQUIRED} | EXECUTE),
        (package.grouped_gemm_jax_sm100, JAX_ENTRY),
        (package.grouped_gemm_wgrad_wrapper_sm100, WGRAD),
        (package.grouped_gemm_wgrad_wrapper, WGRAD | NEUTRAL),
        (package.grouped_gemm_wgrad_jax_sm100, WGRAD_JAX),
    ],
)
def test_parameters_and_defaults_in_order(function, expected):
    parameters = inspect.signature(function).parameters
    assert [(name, p.default) for name, p in parameters.items()] == list(expected.items())
    if "overlap_margin" in parameters:
        assert parameters["overlap_margin"].kind is inspect.Parameter.KEYWORD_ONLY


# --- TupleDict --------------------------------------------------------------------------------------------------------


def test_tuple_dict_by_name_position_and_unpacking():
    x, y = object(), object()
    result = TupleDict(d_tensor=x, c_tensor=y)
    d, c = result
    assert d is x is result.d_tensor is result["d_tensor"] is result[0] is result[-2]
    assert c is y is result.c_tensor is result["c_tensor"] is result[1] is result[-1]
    assert result[:] == (x, y)
    assert len(result) == 2
    assert list(result) == list(result.values()) == [x, y]
    assert list(result.keys()) == ["d_tensor", "c_tensor"]
    assert dict(result) == dict(result.items()) == {"d_tensor": x, "c_tensor": y}
    assert repr(TupleDict(d_tensor=1, c_tensor=None)) == "TupleDict(d_tensor=1, c_tensor=None)"
    assert "d_tensor" in dir(result)
    assert isinstance(result, dict)
    assert "d_tensor" in result
    assert "e_tensor" not in result
    assert (result.get("c_tensor"), result.get("e_tensor", 3)) == (y, 3)
    assert result == TupleDict(d_tensor=x, c_tensor=y) != TupleDict(d_tensor=x, c_tensor=None)
    assert {**result} == {"d_tensor": x, "c_tensor": y}


def test_tuple_dict_lacks_other_names():
    result = TupleDict(d_tensor=1, c_tensor=None)
    with pytest.raises(AttributeError, match="e_tensor"):
        _ = result.e_tensor
    with pytest.raises(KeyError, match="e_tensor"):
        result["e_tensor"]
    with pytest.raises(IndexError):
        result[2]


def test_tuple_dict_is_a_pytree():
    result = jax.jit(lambda x: TupleDict(d_tensor=x + 1, c_tensor=None))(jnp.zeros(3))
    assert isinstance(result, TupleDict)
    assert result.c_tensor is None
    assert result.d_tensor.tolist() == [1, 1, 1]
    paths = jax.tree_util.tree_flatten_with_path(TupleDict(d_tensor=1, c_tensor=2))[0]
    assert [jax.tree_util.keystr(path) for path, _ in paths] == ["['d_tensor']", "['c_tensor']"]
    assert jax.tree.map(lambda x: x + 1, TupleDict(d_tensor=1, c_tensor=2))["c_tensor"] == 3


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_tuple_dict_copies(duplicate):
    assert dict(duplicate(TupleDict(d_tensor=1, c_tensor=None))) == {"d_tensor": 1, "c_tensor": None}


# --- dtypes and streams -----------------------------------------------------------------------------------------------


def cutlass_type(name):
    """Like the types of the DSL: classes of a module within the package cutlass."""
    return type(name, (), {"__module__": "cutlass.base_dsl.typing"})


@pytest.mark.parametrize(
    ("name", "spellings"),
    [
        ("bfloat16", ["bfloat16", "torch.bfloat16", jnp.bfloat16, ml_dtypes.bfloat16, np.dtype(jnp.bfloat16)]),
        ("float16", ["float16", np.float16, jnp.float16, np.dtype("float16"), cutlass_type("Float16")]),
        ("float32", ["float32", np.float32, jnp.float32, np.dtype("float32"), cutlass_type("Float32")]),
    ],
)
def test_spellings_of_dtypes(name, spellings):
    assert [dtype_name(x) for x in spellings] == [name] * len(spellings)
    assert dtype_name(cutlass_type("BFloat16")) == "bfloat16"


def test_what_is_no_dtype_is_shown():
    assert dtype_name(None) is None
    assert dtype_name("number") == "number"
    assert dtype_name([1]) == "[1]"


class CudaProtocol:
    def __cuda_stream__(self):
        return 0, 9


class DriverStream:
    def __int__(self):
        return 11


@pytest.mark.parametrize(
    ("stream", "handle"),
    [
        (0, 0),
        (5, 5),
        (np.int64(6), 6),
        (types.SimpleNamespace(cuda_stream=7), 7),
        (CudaProtocol(), 9),
        (DriverStream(), 11),
    ],
)
def test_spellings_of_streams(stream, handle):
    assert streams.handle(stream) == handle


@pytest.mark.parametrize("stream", ["7", 7.0, object(), True, b"7", -1, 2**64, types.SimpleNamespace(cuda_stream=None)])
def test_what_is_no_stream(stream):
    with pytest.raises(ValueError, match=re.escape(f"got {stream!r}; pass None for the current stream")):
        streams.handle(stream)


# --- what is imported, and when ---------------------------------------------------------------------------------------


def test_torch_and_cutlass_are_not_imported_for_jax_arrays():
    compat_problems.run_python(
        "import sys, numpy as np\n"
        "import compat_problems, oracle, jax_grouped_gemm\n"
        "case = compat_problems.aligned_case(np.random.default_rng(0), generate_c=True)\n"
        "arguments, alive = compat_problems.jax_arguments(case)\n"
        "compat_problems.check(jax_grouped_gemm.grouped_gemm_wrapper(**arguments), case)\n"
        "assert not {'torch', 'cutlass'} & set(sys.modules)\n"
    )


# --- JAX arrays on a CPU ----------------------------------------------------------------------------------------------

OUTPUTS = [("bfloat16", None), ("float16", "float32"), ("float32", "bfloat16"), ("bfloat16", "float16")]


@pytest.mark.parametrize("b_major", ["k", "n"])
@pytest.mark.parametrize(("d_dtype", "c_dtype"), OUTPUTS)
def test_jax_arrays(rng, b_major, d_dtype, c_dtype):
    case = compat_problems.aligned_case(
        rng, b_major=b_major, d_dtype=d_dtype, c_dtype=c_dtype, generate_c=c_dtype is not None
    )
    arguments, _alive = compat_problems.jax_arguments(case)
    result = grouped_gemm_wrapper(**arguments)
    assert list(result.keys()) == ["d_tensor", "c_tensor"]
    assert result.d_tensor.shape == (case.a.shape[0], 48, 1)
    compat_problems.check(result, case)


def test_any_offsets_with_m_aligned_1(rng):
    case = oracle.make_case(rng, 5, 77, 24, 40)
    arguments, _alive = compat_problems.jax_arguments(case)
    compat_problems.check(grouped_gemm_wrapper(**arguments, m_aligned=1), case)
    with pytest.raises(ValueError, match=r"M \(a_tensor.shape\[0\]\) must be a multiple of m_aligned = 256; got 77"):
        grouped_gemm_wrapper(**arguments)


def test_no_rows(rng):
    case = oracle.make_case(rng, 3, 0, 24, 40)
    arguments, _alive = compat_problems.jax_arguments(case)
    assert grouped_gemm_wrapper(**arguments).d_tensor.shape == (0, 24, 1)


def test_int64_pointers(rng):
    case = compat_problems.aligned_case(rng)
    arguments, _alive = compat_problems.jax_arguments(case)
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64(True):
        arguments["b_ptrs"] = jnp.asarray(np.asarray(arguments["b_ptrs"]).view(np.int64))
        assert arguments["b_ptrs"].dtype == jnp.int64
        compat_problems.check(grouped_gemm_wrapper(**arguments), case)


OPTIONS_OF_JIT = ("b_major", "n", "b_dtype", "d_dtype", "c_dtype", "generate_c")


def jitted(function, arguments, **options):
    options |= {name: arguments.pop(name) for name in OPTIONS_OF_JIT if name in arguments}
    return jax.jit(lambda arrays: function(**arrays, **options))(arguments)


def test_wrapper_under_jit(rng):
    case = compat_problems.aligned_case(rng, generate_c=True, c_dtype="float32")
    arguments, _alive = compat_problems.jax_arguments(case)
    compat_problems.check(jitted(grouped_gemm_wrapper, arguments), case)


@pytest.mark.parametrize("generate_c", [False, True])
def test_jax_entry_under_jit(rng, generate_c):
    case = compat_problems.aligned_case(rng, generate_c=generate_c, c_dtype="float32" if generate_c else None)
    arguments, _alive = compat_problems.jax_arguments(case)
    del arguments["b_major"], arguments["b_dtype"]
    result = jitted(grouped_gemm_jax_sm100, arguments)
    assert type(result) is tuple
    compat_problems.check(result, case)


def test_jax_entry_eagerly_needs_sm100(rng):
    arguments, _alive = compat_problems.jax_arguments(compat_problems.aligned_case(rng))
    del arguments["b_major"], arguments["b_dtype"]
    with pytest.raises(
        RuntimeError, match=r"grouped_gemm_jax_sm100 needs a GPU of .* 10.0 or newer; found (TFRT_CPU_0|cpu)"
    ):
        grouped_gemm_jax_sm100(**arguments)


@pytest.mark.parametrize(("found", "refused"), [((), False), (("10.0",), False), (("9.0", "10.0"), True)])
def test_jax_entry_traced_on_a_machine_with_gpus(monkeypatch, fresh_plans, found, refused):
    monkeypatch.setattr(ffi_call, "cuda_capabilities", lambda: found)

    def run(a, prob):
        rest = jnp.zeros(2, jnp.int32), jnp.ones(2), jnp.zeros(16, jnp.uint8), 16
        return grouped_gemm_jax_sm100(a, *rest, prob)

    shapes = jax.ShapeDtypeStruct((512, 32, 1), jnp.bfloat16), jax.ShapeDtypeStruct((512, 1, 1), jnp.float32)
    if refused:
        with pytest.raises(RuntimeError, match="found compute capability 9.0; use grouped_gemm, which runs there"):
            jax.eval_shape(run, *shapes)
    else:
        assert jax.eval_shape(run, *shapes)[0].shape == (512, 16, 1)


def test_jax_shapes_are_checked_under_tracing():
    with pytest.raises(ValueError, match=re.escape("alpha_tensor must be (L,) = (2,); got (3,)")):
        jax.eval_shape(
            lambda a, alpha: grouped_gemm_jax_sm100(
                a, jnp.zeros(2, jnp.int32), alpha, jnp.zeros(16, jnp.uint8), 16, jnp.ones((512, 1, 1))
            ),
            jax.ShapeDtypeStruct((512, 32, 1), jnp.bfloat16), jax.ShapeDtypeStruct((3,), jnp.float32),
        )  # fmt: skip


def test_jax_outputs_are_written_in_place(rng):
    case = compat_problems.aligned_case(rng, generate_c=True, c_dtype="float32")
    arguments, _alive = compat_problems.jax_arguments(case)
    d = jax.block_until_ready(jnp.full((1280, 48, 1), 7, jnp.bfloat16))
    c = jax.block_until_ready(jnp.full((1280, 48, 1), 7, jnp.float32))
    addresses = d.unsafe_buffer_pointer(), c.unsafe_buffer_pointer()
    result = grouped_gemm_wrapper(**arguments, d_tensor=d, c_tensor=c)
    assert result.d_tensor is d
    assert result.c_tensor is c
    assert addresses == (d.unsafe_buffer_pointer(), c.unsafe_buffer_pointer())
    compat_problems.check(result, case)


def test_jax_class(rng):
    case = compat_problems.aligned_case(rng)
    arguments, _alive = compat_problems.jax_arguments(case)
    d = jax.block_until_ready(jnp.zeros((1280, 48, 1), jnp.bfloat16))
    options = {name: arguments.pop(name) for name in ("n", "b_dtype", "b_major", "d_dtype")}
    made = package.GroupedGemm(
        arguments["a_tensor"], None, d, arguments["padded_offsets"], arguments["alpha_tensor"],
        sample_prob=arguments["prob_tensor"], num_experts=4, b_shape=(options["n"], 32), b_dtype=jnp.bfloat16,
    )  # fmt: skip
    assert made.check_support() is True
    made.compile()
    assert made.execute(**arguments, c_tensor=None, d_tensor=d) is None
    compat_problems.check((d, None), case)


def test_several_devices_are_refused():
    compat_problems.run_python(
        "import os; os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=2'\n"
        "import jax, numpy as np, compat_problems, jax_grouped_gemm\n"
        "arguments, alive = compat_problems.jax_arguments(compat_problems.aligned_case(np.random.default_rng(0)))\n"
        "def message(**changes):\n"
        "    try: jax_grouped_gemm.grouped_gemm_wrapper(**arguments | changes)\n"
        "    except ValueError as error: return str(error)\n"
        "prob = arguments['prob_tensor']\n"
        "there = message(prob_tensor=jax.device_put(prob, jax.devices('cpu')[1]))\n"
        "assert 'prob_tensor must be on the device of a_tensor' in there, there\n"
        "mesh = jax.sharding.Mesh(np.array(jax.devices('cpu')), 'x')\n"
        "sharded = jax.device_put(prob, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('x')))\n"
        "assert 'every operand must be on one device; got' in message(prob_tensor=sharded)\n"
    )


# --- JAX by address, with the library replaced ------------------------------------------------------------------------


@pytest.fixture
def launches(fake_launches, monkeypatch):
    """Of CPU arrays, as if they lay on a GPU."""
    monkeypatch.setattr(jax_arrays, "capability", lambda device: "9.0")
    return fake_launches


def test_jax_launch_by_address(rng, launches):
    case = compat_problems.aligned_case(rng)
    arguments, _alive = compat_problems.jax_arguments(case)
    result = grouped_gemm_wrapper(**arguments, current_stream=77, use_dynamic_sched=True)
    (launch,) = launches
    assert (launch.device, launch.stream) == (0, 77)
    names = {
        "a": "a_tensor",
        "offsets": "padded_offsets",
        "alpha": "alpha_tensor",
        "b": "b_ptrs",
        "prob": "prob_tensor",
    }
    for field, name in names.items():
        assert getattr(launch, field) == arguments[name].unsafe_buffer_pointer(), field
    assert launch.d == result.d_tensor.unsafe_buffer_pointer()
    assert (launch.c, launch.bias) == (0, 0)
    assert launch.forward.call.dynamic
    (scratch,) = jax_arrays._scratch_of[id(result.d_tensor)]
    assert launch.scratch == scratch.unsafe_buffer_pointer()
    assert scratch.size == 128 * 4 + 128
    # Another launch into the same D uses the same scratch; it goes with D.
    grouped_gemm_wrapper(**arguments, d_tensor=result.d_tensor)
    assert launches[1].scratch == launch.scratch
    assert launches[1].stream == 0
    key = id(result.d_tensor)
    del result
    assert key not in jax_arrays._scratch_of


def test_nothing_is_read_during_a_capture(rng, launches, reads, monkeypatch):
    arguments, _alive = compat_problems.jax_arguments(compat_problems.aligned_case(rng))
    monkeypatch.setattr(direct, "capturing", lambda device, stream: stream == 77)
    grouped_gemm_wrapper(**arguments, current_stream=77)
    assert reads == []
    grouped_gemm_wrapper(**arguments, current_stream=78)
    assert len(reads) == len(launches) == 2


def test_no_launch_by_address_under_tracing(launches, rng):
    arguments, _alive = compat_problems.jax_arguments(compat_problems.aligned_case(rng))
    with pytest.raises(ValueError, match="a_tensor must be concrete: with d_tensor, c_tensor or current_stream"):
        jitted(grouped_gemm_wrapper, arguments, current_stream=0)
    assert not launches


def test_compile_loads(launches, rng):
    arguments, _alive = compat_problems.jax_arguments(compat_problems.aligned_case(rng))
    d = jnp.zeros((1280, 48, 1), jnp.bfloat16)
    made = package.GroupedGemm(
        arguments["a_tensor"], None, d, arguments["padded_offsets"], arguments["alpha_tensor"],
        sample_prob=arguments["prob_tensor"], num_experts=4, b_shape=(48, 32), b_dtype="bfloat16",
    )  # fmt: skip
    made.compile()
    assert launches == ["load"]


def test_scratch_of_another_size(rng, launches):
    """A launch into the same D that needs more gets more."""
    case = compat_problems.aligned_case(rng)
    arguments, _alive = compat_problems.jax_arguments(case)
    d = grouped_gemm_wrapper(**arguments, current_stream=0).d_tensor
    grouped_gemm_wrapper(**arguments, d_tensor=d, use_dynamic_sched=True)
    sizes = {x.unsafe_buffer_pointer(): x.size for x in jax_arrays._scratch_of[id(d)]}
    assert [sizes[launch.scratch] for launch in launches] == [4 * 128, 4 * 128 + 128]


def test_outputs_by_address_share_no_memory(rng, launches):
    arguments, _alive = compat_problems.jax_arguments(compat_problems.aligned_case(rng, n=32, k=32))
    with pytest.raises(ValueError, match="d_tensor must share no memory with a_tensor"):
        grouped_gemm_wrapper(**arguments, d_tensor=arguments["a_tensor"])
    assert not launches


# --- the library's struct ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "structure"), [("jgg_call", direct.LibraryCall), ("jgg_wgrad_call", direct.LibraryWgradCall)]
)
def test_struct_is_that_of_the_header(name, structure):
    header = (ROOT / "ffi" / "c_api.h").read_text()
    body = re.sub(
        r"/\*.*?\*/",
        "",
        re.search(rf"typedef struct {name} \{{(.*?)\}} {name};", header, re.DOTALL)[1],
        flags=re.DOTALL,
    )
    kinds = {
        "int64_t": ctypes.c_int64, "uint64_t": ctypes.c_uint64, "const char*": ctypes.c_char_p,
        "const uint64_t*": ctypes.POINTER(ctypes.c_uint64),
    }  # fmt: skip
    declared = [
        (name.strip(), kinds[kind.strip()])
        for kind, names in re.findall(r"((?:const )?\w+ ?\*?)\s*(\w+(?:, \w+)*);", body)
        for name in names.split(",")
    ]
    assert declared == structure._fields_


@pytest.fixture
def library_calls(monkeypatch):
    """What reaches jgg_forward and jgg_wgrad; the library answers with the text under "error"."""
    seen = {"error": None}

    def entry(function):
        def answer(call):
            seen["call"] = {name: getattr(call._obj, name) for name, _ in type(call._obj)._fields_}
            seen["function"] = function
            return seen["error"]

        return answer

    entries = {function: entry(function) for function in ("jgg_forward", "jgg_wgrad")}
    monkeypatch.setattr(direct, "_library", lambda: types.SimpleNamespace(**entries))
    monkeypatch.setattr(direct, "PrimaryContext", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(direct.library, "registered", lambda: None)
    return seen


def example_call(**changes):
    options = {"m": 512, "n": 16, "k": 32, "l": 2, "b_major": "k", "weights": "tuple", "d_dtype": "float16"}
    options |= {"has_alpha": True, "has_prob": True, "implementation": None, "has_bias": True, "c_dtype": "float32"}
    return calls.Call(**options | {"dynamic": True, "overlap_margin": 6} | changes)


def test_fields_of_a_launch(library_calls):
    forward = direct.Forward(example_call(), "bfloat16")
    assert forward.scratch_bytes == 2 * 128 + 128
    forward(0, 5, a=1, offsets=2, alpha=3, bias=4, d=6, c=7, scratch=8, weight_addresses=[16, 32])
    call = library_calls["call"]
    addresses = call.pop("weight_addresses")
    assert addresses[:2] == [16, 32]
    assert call.pop("sm90") == ffi_call.kernel_name(90, example_call()).encode()
    assert call.pop("sm100") == ffi_call.kernel_name(100, example_call()).encode()
    assert call == {
        "struct_size": ctypes.sizeof(direct.LibraryCall), "weights": b"tuple", "b_major": b"k", "d_dtype": b"float16",
        "c_dtype": b"float32", "bias_dtype": b"bfloat16", "m": 512, "n": 16, "k": 32, "l": 2, "groups": 2,
        "dynamic": 1, "overlap_margin": 6, "a": 1, "offsets": 2, "experts": 0, "alpha": 3, "prob": 0, "bias": 4, "b": 0, "d": 6, "c": 7,
        "scratch": 8, "stream": 5,
    }  # fmt: skip
    forward(0, 5, a=1, offsets=2, d=3)
    assert library_calls["call"]["bias"] == 0, "a launch leaves nothing behind for the next"


def example_wgrad(**changes):
    options = {"m": 512, "n": 16, "k": 32, "l": 2, "d_dtype": "float32", "has_alpha": True, "implementation": None}
    return calls.WgradCall(**options | {"accumulate": True, "dynamic": True, "overlap_margin": 6} | changes)


def test_fields_of_a_wgrad_launch(library_calls):
    wgrad = direct.Wgrad(example_wgrad())
    assert wgrad.scratch_bytes == 128
    wgrad(0, 5, x=1, y=2, offsets=3, alpha=4, d=6, scratch=7)
    assert library_calls["function"] == "jgg_wgrad"
    call = library_calls["call"]
    assert call.pop("sm90") == wgrad_call.kernel_name(90, example_wgrad()).encode()
    assert call.pop("sm100") == wgrad_call.kernel_name(100, example_wgrad()).encode()
    assert call == {
        "struct_size": ctypes.sizeof(direct.LibraryWgradCall), "d_dtype": b"float32", "m": 512, "n": 16, "k": 32,
        "l": 2, "groups": 2, "dynamic": 1, "accumulate": 1, "overlap_margin": 6, "x": 1, "y": 2, "offsets": 3,
        "experts": 0, "alpha": 4, "d": 6, "scratch": 7, "stream": 5,
    }  # fmt: skip
    wgrad(0, 5, x=1, y=2, offsets=3, d=6)
    assert library_calls["call"]["alpha"] == 0


def test_load_launches_nothing(library_calls):
    for launcher in (direct.Forward(example_call()), direct.Wgrad(example_wgrad())):
        launcher.load(0, stream=5)
        assert (library_calls["call"]["n"], library_calls["call"]["stream"]) == (0, 5)
        assert library_calls["call"]["m"] == 512


def test_errors_of_the_library(library_calls):
    library_calls["error"] = b"no kernel for device 0"
    with pytest.raises(RuntimeError, match="no kernel for device 0"):
        direct.Forward(example_call())(0, 0, a=1, offsets=2, d=3)


def test_the_context_is_current_during_a_call_only(monkeypatch):
    calls = []

    class Driver:
        def __getattr__(self, name):
            return lambda *arguments: calls.append(name) or 0

    monkeypatch.setattr(direct, "_driver", Driver)
    monkeypatch.setattr(direct, "_retained", lambda device: device)
    with direct.PrimaryContext(3):
        assert calls == ["cuCtxPushCurrent_v2"]
    assert calls == ["cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2"]


def test_errors_of_the_driver(monkeypatch):
    monkeypatch.setattr(direct, "_driver", lambda: types.SimpleNamespace(cuInit=lambda flags: 100))
    with pytest.raises(RuntimeError, match="the CUDA driver refused cuInit with code 100"):
        direct.synchronize(12345, 0)


# --- what is remembered -----------------------------------------------------------------------------------------------


NEUTRAL_ENTRY = strided.Entry("grouped_gemm_wrapper", False, "grouped_gemm")
OPTIONS = strided.StridedOptions(
    n=48, b_dtype="bfloat16", b_major="k", acc_dtype="float32", c_dtype="bfloat16", d_dtype="bfloat16", cd_major="n",
    mma_tiler_mn=None, cluster_shape_mn=None, m_aligned=256, generate_c=False, use_dynamic_sched=False,
    overlap_margin=None,
)  # fmt: skip


def call_of(rng, **options):
    """The native call that a wrapper's call with these options becomes."""
    arguments, _alive = compat_problems.jax_arguments(compat_problems.aligned_case(rng))
    operands = {name: arguments[name] for name in strided.StridedOperands._fields if name in arguments}
    request = plan.request(NEUTRAL_ENTRY, strided.StridedOperands(**operands), OPTIONS._replace(**options))
    return plan.plan_for(request).call


def test_repeated_calls_check_descriptors_once(rng, monkeypatch, fresh_plans):
    arguments, _alive = compat_problems.jax_arguments(compat_problems.aligned_case(rng))
    checks = []
    original = strided.check_layouts
    monkeypatch.setattr(strided, "check_layouts", lambda *given: (checks.append(1), original(*given))[1])
    for _ in range(3):
        grouped_gemm_wrapper(**arguments)
    assert len(checks) == 1
    grouped_gemm_wrapper(**arguments, mma_tiler_mn=[256, 256])  # a list cannot be remembered, but is legal
    grouped_gemm_wrapper(**arguments, mma_tiler_mn=[256, 256])
    assert len(checks) == 3


@pytest.mark.parametrize(
    "options",
    [{"generate_c": 1}, {"use_dynamic_sched": 0}, {"overlap_margin": 0.0}, {"m_aligned": 256.0}, {"mma_tiler_mn": (256.0, 256)}],
)  # fmt: skip
def test_memo_tells_equal_values_of_other_types_apart(rng, options):
    """What is refused is refused after a legal call that is equal to it, too."""
    arguments, _alive = compat_problems.jax_arguments(compat_problems.aligned_case(rng))
    legal = {"generate_c": True, "use_dynamic_sched": False, "overlap_margin": 0, "m_aligned": 256, "mma_tiler_mn": (256, 256)}  # fmt: skip
    grouped_gemm_wrapper(**arguments, **{name: legal[name] for name in options})
    with pytest.raises(ValueError, match=next(iter(options))):
        grouped_gemm_wrapper(**arguments, **options)


def test_memo_is_bounded(fresh_plans):
    assert plan._remembered.cache_info().maxsize == plan.REMEMBERED == 256

    def operands(m):
        f32, struct = np.dtype(np.float32), lambda shape, dtype: (shape, None, dtype, None)
        a, offsets = struct((m, 32, 1), np.dtype(jnp.bfloat16)), struct((2,), np.dtype(np.int32))
        rest = {"b_ptrs": struct((16,), np.dtype(np.uint8)), "prob_tensor": struct((m, 1, 1), f32)}
        return strided.StridedOperands(a, offsets, struct((2,), f32), **rest)

    for m in range(1, 301):
        plan.plan_for(plan.Request(NEUTRAL_ENTRY, jax_arrays, operands(m), OPTIONS._replace(m_aligned=1), None))
    assert plan._remembered.cache_info().currsize == 256


@pytest.mark.parametrize(
    "changes",
    [
        {"d_dtype": "float32"}, {"generate_c": True}, {"generate_c": True, "c_dtype": "float16"},
        {"use_dynamic_sched": True}, {"mma_tiler_mn": (256, 128)}, {"cluster_shape_mn": (2, 1)}, {"overlap_margin": 4},
        {"b_major": "n"},
    ],
)  # fmt: skip
def test_options_are_told_apart(rng, changes):
    """A plan of one call never serves another."""
    one, other = call_of(rng), call_of(rng, **changes)
    assert one != other
    assert call_of(rng) == one


def test_values_of_jax_arrays_are_looked_at_once(rng, reads):
    arguments, _alive = compat_problems.jax_arguments(compat_problems.aligned_case(rng))
    for _ in range(3):
        grouped_gemm_wrapper(**arguments)
    assert reads == ["check_padded_offsets", "check_pointers"]
    grouped_gemm_wrapper(**arguments, m_aligned=128)  # checked for 256 only
    assert len(reads) == 3
    arguments["padded_offsets"] = arguments["padded_offsets"] + 0
    grouped_gemm_wrapper(**arguments)
    assert len(reads) == 4


def test_what_is_remembered_of_values_goes_with_the_array(rng):
    arguments, _alive = compat_problems.jax_arguments(compat_problems.aligned_case(rng))
    before = len(values._checked)
    grouped_gemm_wrapper(**arguments)
    assert len(values._checked) == before + 2
    del arguments
    assert len(values._checked) == before


def test_wrong_values_are_not_remembered(rng):
    arguments, _alive = compat_problems.jax_arguments(compat_problems.aligned_case(rng))
    arguments["padded_offsets"] = jnp.asarray([256, 0, 512, 512], jnp.int32)
    for _ in range(2):
        with pytest.raises(ValueError, match=re.escape("got padded_offsets[1] = 0 after 256")):
            grouped_gemm_wrapper(**arguments)


# --- the overlap margin -----------------------------------------------------------------------------------------------


def test_margin_in_clusters_and_in_sms(rng, monkeypatch):
    pair, alone = {"mma_tiler_mn": (256, 256)}, {"mma_tiler_mn": (64, 128)}
    assert call_of(rng, **pair).overlap_margin == 0
    monkeypatch.setenv("CUDNNFE_CLUSTER_OVERLAP_MARGIN", "3")
    assert call_of(rng, **pair).overlap_margin == 6
    assert call_of(rng, **alone).overlap_margin == 3
    assert call_of(rng, **alone, cluster_shape_mn=(1, 4)).overlap_margin == 12
    assert call_of(rng, **pair | {"overlap_margin": 5}).overlap_margin == 5
    assert call_of(rng, **pair | {"overlap_margin": 0}).overlap_margin == 0
    monkeypatch.delenv("CUDNNFE_CLUSTER_OVERLAP_MARGIN")
    assert call_of(rng, **pair).overlap_margin == 0
    for wrong in ("-1", "1.5", ""):
        monkeypatch.setenv("CUDNNFE_CLUSTER_OVERLAP_MARGIN", wrong)
        with pytest.raises(ValueError, match=re.escape(f"must be a non-negative number of clusters; got '{wrong}'")):
            call_of(rng, **pair)
