"""What a legal call of the document's names is: tensors with strides, their options and values, and the error texts."""

import dataclasses
import math
from typing import Any, NamedTuple

from jax_grouped_gemm import config, contract


@dataclasses.dataclass(frozen=True)
class Entry:
    """A name of the document, or its neutral twin. instead: the call for GPUs that this one refuses."""

    name: str
    sm100: bool
    instead: str


class Layout(NamedTuple):
    """How a tensor lies. strides in elements, None for a JAX array (row-major); dtype by name; device None if traced."""

    shape: tuple
    strides: tuple | None
    dtype: str
    device: Any


class Strided(NamedTuple):
    """What the document wants of a tensor, in symbols, and how to get one that lies so."""

    shape: tuple
    strides: tuple
    dtypes: tuple
    remedy: str


class StridedOperands(NamedTuple):
    """The tensors of a call by the document's names, or their layouts; None where absent."""

    a_tensor: Any
    padded_offsets: Any
    alpha_tensor: Any
    b_tensor: Any = None
    b_ptrs: Any = None
    bias_tensor: Any = None
    prob_tensor: Any = None
    c_tensor: Any = None
    d_tensor: Any = None


class StridedOptions(NamedTuple):
    """The arguments that are not tensors, dtypes by name, otherwise unchecked. overlap_margin counts SMs."""

    n: Any
    b_dtype: Any
    b_major: Any
    acc_dtype: Any
    c_dtype: Any
    d_dtype: Any
    cd_major: Any
    mma_tiler_mn: Any
    cluster_shape_mn: Any
    m_aligned: Any
    generate_c: Any
    use_dynamic_sched: Any
    overlap_margin: Any


SM100_M_ALIGNED = 256
ROW_ALIGNMENT = 16  # bytes, of what the copy engine moves
ADDRESS_ALIGNMENT = {
    "a_tensor": ROW_ALIGNMENT,
    "padded_offsets": 4,
    "alpha_tensor": 4,
    "b_tensor": ROW_ALIGNMENT,
    "b_ptrs": 8,
    "bias_tensor": 2,
    "prob_tensor": 4,
    "c_tensor": ROW_ALIGNMENT,
    "d_tensor": ROW_ALIGNMENT,
    "offsets_tensor": 4,
    "wgrad_tensor": ROW_ALIGNMENT,
}

OUTPUTS = ("c_tensor", "d_tensor", "wgrad_tensor")

_OUTPUT = Strided(
    ("M", "N", "1"), ("N", "1", "M*N"), config.D_DTYPES, "leave it out, or pass a contiguous tensor of 3 dimensions"
)
STRIDED = {
    "a_tensor": Strided(("M", "K", "1"), ("K", "1", "M*K"), ("bfloat16",), "pass a contiguous tensor of 3 dimensions"),
    "padded_offsets": Strided(("L",), ("1",), ("int32",), "pass one end per expert, contiguous"),
    "alpha_tensor": Strided(("L",), ("1",), ("float32",), "pass one factor per expert, contiguous"),
    "b_ptrs": Strided(("L",), ("1",), ("int64",), "pass one address per expert, contiguous"),
    "bias_tensor": Strided(("N", "L"), ("1", "N"), config.D_DTYPES, "transpose a contiguous (L, N)"),
    "prob_tensor": Strided(("M", "1", "1"), ("1", "1", "1"), ("float32",), "pass one factor per row, contiguous"),
    "c_tensor": _OUTPUT,
    "d_tensor": _OUTPUT,
}
STRIDED_B = {
    "k": Strided(("N", "K", "L"), ("K", "1", "N*K"), ("bfloat16",), "permute(1, 2, 0) a contiguous (L, N, K)"),
    "n": Strided(("N", "K", "L"), ("1", "N", "N*K"), ("bfloat16",), "permute(2, 1, 0) a contiguous (L, K, N)"),
}


def check_arguments(entry, options, operands):
    """Which arguments are there, and the values of those that are not tensors, as far as no size matters."""
    for name in ("a_tensor", "padded_offsets", "alpha_tensor", "prob_tensor"):
        if getattr(operands, name) is None:
            raise ValueError(f"{name} must be given; got None; pass {STRIDED[name].remedy.removeprefix('pass ')}")
    contract.exactly_one(b_tensor=operands.b_tensor, b_ptrs=operands.b_ptrs)
    check_only("acc_dtype", options.acc_dtype, "float32")
    check_only("cd_major", options.cd_major, "n")
    contract.check_one_of("b_major", options.b_major, config.B_MAJORS)
    if entry.sm100 and options.b_major != "k":
        raise ValueError(f"b_major must be 'k'; got {options.b_major!r}; {entry.instead} takes 'n' too")
    if entry.sm100 and options.m_aligned != SM100_M_ALIGNED:
        raise ValueError(
            f"m_aligned must be {SM100_M_ALIGNED}; got {options.m_aligned!r}; {entry.instead} takes any offsets"
        )
    if not contract.is_positive(options.m_aligned):
        raise ValueError(f"m_aligned must be a positive integer; got {options.m_aligned!r}; 1 allows any offsets")
    _weight_arguments(options, operands.b_ptrs is not None)


def _weight_arguments(options, discrete):
    given = {"n": options.n, "b_dtype": options.b_dtype}
    for name, value in given.items():
        if discrete and value is None:
            raise ValueError(f"{name} must be given with b_ptrs; got None; an address tells nothing of the weights")
        if not discrete and value is not None:
            raise ValueError(f"{name} must be None with b_tensor, which tells it; got {value!r}; leave it out")
    if discrete:
        check_only("b_dtype", options.b_dtype, "bfloat16")
        if not contract.is_positive(options.n):
            raise ValueError(f"n must be a positive integer; got {options.n!r}; pass the output columns")


def check_only(name, value, allowed):
    if value != allowed:
        raise ValueError(f"{name} must be {allowed!r}; got {value!r}; nothing else is computed")


def check_no_jax_strides(operands):
    """What a JAX array cannot be, though the same bytes are a legal operand of the native call."""
    native = {
        "b_tensor": "grouped_gemm(a, b, offsets=...) with a (M, K) and b (L, N, K)",
        "bias_tensor": "grouped_gemm(..., bias=bias) with bias (L, N)",
    }
    for name, call in native.items():
        if getattr(operands, name) is not None:
            expected = STRIDED_B["k"] if name == "b_tensor" else STRIDED[name]
            raise ValueError(
                f"{name} must be a torch tensor: its strides have to be ({', '.join(expected.strides)}), "
                f"which no JAX array has; got a JAX array; call jax_grouped_gemm.{call}"
            )


def check_target(entry, device, capability, kernels_only):
    """The device of a_tensor can run this name. capability: None where it is no GPU."""
    if entry.sm100 and not _at_least_10(capability):
        found = str(device) if capability is None else f"compute capability {capability}"
        raise sm100_needed(entry, found)
    known = any(capability in found for found in config.CAPABILITIES.values())
    if kernels_only and capability is not None and not known:
        raise RuntimeError(
            f"{contract.unsupported_capability((capability,))}; use jax_grouped_gemm.grouped_gemm on JAX arrays"
        )


def _at_least_10(capability):
    """Of NVIDIA's: other GPUs, and what is no GPU, have no such number."""
    major = str(capability).partition(".")[0]
    return major.isdecimal() and int(major) >= 10


def sm100_needed(entry, found):
    return RuntimeError(
        f"{entry.name} needs a GPU of compute capability 10.0 or newer; found {found}; use {entry.instead}, "
        "which runs there"
    )


def check_devices(operands):
    a = operands.a_tensor
    for name, layout in operands._asdict().items():
        if layout is not None and None not in (layout.device, a.device) and layout.device != a.device:
            raise ValueError(
                f"{name} must be on the device of a_tensor, {a.device}; got {layout.device}; move one of them"
            )


def check_layouts(options, operands):
    """Every tensor's device, shape, dtype and strides; returns the sizes by symbol."""
    a = operands.a_tensor
    check_devices(operands)
    check_strided("a_tensor", a, {})
    extents = {"M": a.shape[0], "K": a.shape[1]}
    if operands.b_tensor is not None:
        expected = STRIDED_B[options.b_major]
        check_strided("b_tensor", operands.b_tensor, extents, expected)
        extents |= {"N": operands.b_tensor.shape[0], "L": operands.b_tensor.shape[2]}
    else:
        extents |= {"N": int(options.n), "L": _pointer_count(operands.b_ptrs)}
    for symbol in "NKL":
        if extents[symbol] == 0:
            raise ValueError(f"{symbol} must be positive; got 0; only M may be 0")
    for name in ("padded_offsets", "alpha_tensor", "prob_tensor", "bias_tensor", "c_tensor", "d_tensor"):
        if getattr(operands, name) is not None:
            check_strided(name, getattr(operands, name), extents)
    if extents["M"] % options.m_aligned:
        raise ValueError(
            f"M (a_tensor.shape[0]) must be a multiple of m_aligned = {options.m_aligned}; got {extents['M']}; "
            "pad the rows, or pass m_aligned=1 to a name without _sm100"
        )
    return extents


def _pointer_count(layout):
    if layout.strides is not None:
        check_strided("b_ptrs", layout, {})
        return layout.shape[0]
    if (
        len(layout.shape) != 1
        or layout.dtype not in ("int64", "uint8")
        or (layout.dtype == "uint8" and layout.shape[0] % 8)
    ):
        raise contract.wrong_pointers(layout)
    return layout.shape[0] if layout.dtype == "int64" else layout.shape[0] // 8


def check_strided(name, layout, extents, expected=None):
    """A tensor's shape, dtype and strides. extents: symbol -> size; what it lacks is free."""
    expected = STRIDED[name] if expected is None else expected
    sizes = [_product(symbols, extents) for symbols in expected.shape]
    same_rank = len(layout.shape) == len(sizes)
    if not same_rank or any(x not in (None, y) for x, y in zip(sizes, layout.shape, strict=True)):
        got = tuple(layout.shape)
        raise ValueError(f"{name} must be {_with_values(expected.shape, sizes)}; got {got}; {expected.remedy}")
    if layout.dtype not in expected.dtypes:
        raise ValueError(f"{name} must be {' or '.join(expected.dtypes)}; got {layout.dtype}; cast it")
    strides = wrong_strides(layout, extents, expected)
    if strides is not None:
        raise ValueError(
            f"{name} must have strides {_with_values(expected.strides, strides)}; "
            f"got {tuple(layout.strides)}; {expected.remedy}"
        )


def wrong_strides(layout, extents, expected):
    """Those that it should have; None if it has them, or none matter."""
    if layout.strides is None or 0 in layout.shape:
        return None
    extents = extents | dict(zip(expected.shape, layout.shape, strict=True))
    strides = [_product(symbols, extents) for symbols in expected.strides]
    # The stride of a dimension of one element is never used.
    same = all(size == 1 or x == y for size, x, y in zip(layout.shape, strides, layout.strides, strict=True))
    return None if same else strides


def _product(symbols, extents):
    """The value of "M*K"; None where a factor is not known."""
    factors = [1 if symbol == "1" else extents.get(symbol) for symbol in symbols.split("*")]
    return None if None in factors else math.prod(factors)


def _with_values(symbols, values):
    """All the values, or those that are known."""
    text = f"({', '.join(symbols)}{',' if len(symbols) == 1 else ''})"
    if None not in values:
        return f"{text} = {tuple(values)}"
    known = [f"{symbol} = {x}" for symbol, x in zip(symbols, values, strict=True) if symbol != "1" and x is not None]
    return f"{text} with {', '.join(known)}" if known else text


def check_outputs(options, operands):
    """Outputs that the caller brought have the dtypes that the call says."""
    for name in ("c", "d"):
        layout, dtype = getattr(operands, f"{name}_tensor"), getattr(options, f"{name}_dtype")
        if layout is not None and layout.dtype != dtype:
            raise ValueError(f"{name}_tensor must be {dtype}, its {name}_dtype; got {layout.dtype}; change one of them")


def check_addresses(addresses):
    """Where tensors start; 0 where absent."""
    for name, address in zip(addresses._fields, addresses, strict=True):
        if address % ADDRESS_ALIGNMENT[name]:
            raise ValueError(
                f"{name} must start at a multiple of {ADDRESS_ALIGNMENT[name]} bytes; got address {address:#x}; "
                "take a view that starts at an aligned element, or a copy"
            )


def check_outputs_apart(addresses, sizes):
    """An output shares no memory with anything else: other tiles would still read, or also write, what one has written.

    Both `StridedOperands`, or both `strided_wgrad.Tensors`: where tensors start, and their bytes; 0 where absent.
    """
    for output in (name for name in OUTPUTS if name in addresses._fields):
        start, end = getattr(addresses, output), getattr(addresses, output) + getattr(sizes, output)
        for name, address, size in zip(addresses._fields, addresses, sizes, strict=True):
            if name != output and address and address < end and start < address + size:
                raise ValueError(
                    f"{output} must share no memory with {name}; got addresses {start:#x} to {end:#x} and {address:#x} to "
                    f"{address + size:#x}; pass a tensor of its own"
                )


def check_padded_offsets(offsets, m, m_aligned):
    """Concrete ends: non-decreasing, within [0, M], multiples of m_aligned."""
    for g, end, previous in contract.bad_ends(offsets, m, m_aligned):
        raise ValueError(
            f"padded_offsets must be non-decreasing ends within [0, M = {m}] and multiples of m_aligned = {m_aligned}; "
            f"got padded_offsets[{g}] = {end} after {previous}; pad each expert's rows"
        )


def check_pointers(addresses):
    """Concrete addresses of weight matrices."""
    bad = (addresses == 0) | (addresses % ROW_ALIGNMENT != 0)
    if bad.any():
        g = int(bad.argmax())
        raise ValueError(
            f"b_ptrs must be addresses of weight matrices, non-null and multiples of {ROW_ALIGNMENT}; "
            f"got b_ptrs[{g}] = {int(addresses[g]):#x}; pass each expert's data_ptr() or unsafe_buffer_pointer()"
        )


def foreign_operand(name, found, expected):
    return ValueError(
        f"{name} must be {expected}; got {type(found).__name__}; "
        "pass all operands as torch tensors, or all as JAX arrays"
    )


def several_devices(found):
    return ValueError(
        f"every operand must be on one device; got {found}; call grouped_gemm on each device's part inside jax.shard_map"
    )


def no_stream(found):
    return ValueError(
        f"current_stream must be an integer handle, a torch stream, a CUstream or an object with __cuda_stream__; "
        f"got {found!r}; pass None for the current stream"
    )


def wrong_margin(variable, found):
    return ValueError(f"{variable} must be a non-negative number of clusters; got {found!r}; unset it for 0")


def values_traced(name):
    return ValueError(
        f"{name} must be concrete: with d_tensor, c_tensor or current_stream, and in execute, a call writes by address, "
        "which a traced program cannot; got a tracer; "
        "call grouped_gemm_jax_sm100 or grouped_gemm there"
    )


def not_compiled(name):
    return RuntimeError(
        f"{name}.execute must come after compile(); got an operation that is not compiled; call compile()"
    )


def check_outputs_given(options, **outputs):
    """The class writes into the caller's outputs; C may be absent where it is not asked for."""
    for name, x in outputs.items():
        if x is None and (options.generate_c or not name.endswith(("c", "c_tensor"))):
            raise ValueError(f"{name} must be given; got None; pass a tensor (M, N, 1) to write into")


def check_sample_weights(dense, *, num_experts, b_shape, b_dtype):
    """What stands for the weights among the samples."""
    for name, value in {"num_experts": num_experts, "b_shape": b_shape, "b_dtype": b_dtype}.items():
        if dense and value is not None:
            raise ValueError(f"{name} must be None with sample_b, which tells it; got {value!r}; leave it out")
        if not dense and value is None:
            raise ValueError(f"{name} must be given where sample_b is not; got None; pass sample_b, or it")
    if dense:
        return
    if not contract.is_positive(num_experts):
        raise ValueError(f"num_experts must be a positive integer; got {num_experts!r}; pass L")
    if not isinstance(b_shape, (tuple, list)) or len(b_shape) != 2 or not all(map(contract.is_positive, b_shape)):
        raise ValueError(f"b_shape must be (N, K), positive integers; got {b_shape!r}; pass the shape of one expert")


def check_b_shape(b_shape, k):
    if b_shape[1] != k:
        raise ValueError(
            f"b_shape must be (N, K) with K = sample_a.shape[1] = {k}; got {tuple(b_shape)}; "
            "pass the shape of one expert"
        )


def check_same_weights(dense, *, b_tensor, b_ptrs):
    """A call brings the kind of weights that the samples were."""
    contract.exactly_one(b_tensor=b_tensor, b_ptrs=b_ptrs)
    if dense != (b_tensor is not None):
        kinds = "b_tensor", "b_ptrs"
        raise _not_as_sampled("the kind of weights", *(kinds if dense else kinds[::-1]))


def check_as_sampled(samples, found):
    """Both by name."""
    for what, sample in samples.items():
        if found[what] != sample:
            raise _not_as_sampled(what, sample, found[what])


def _not_as_sampled(what, sample, found):
    return ValueError(
        f"{what} must stay that of the samples, {sample}; got {found}; only M may change, make another object for it"
    )


def gradient_needed(name):
    return NotImplementedError(
        f"{name} requires a gradient, and none flows through this call; call it under torch.no_grad(), "
        "or in the forward of a torch.autograd.Function of yours"
    )


def no_such_device(found):
    return ValueError(f"a_tensor must be on a CUDA device or the CPU; got {found}; move it")
