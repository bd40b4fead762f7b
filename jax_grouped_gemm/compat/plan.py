"""What a call's descriptors decide: checked once, then remembered."""

import dataclasses
import functools
import os
import sys
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_grouped_gemm import calls, config, contract, direct, ffi_call, selection, tuned
from jax_grouped_gemm.compat import jax_arrays, strided, strided_wgrad, torch_tensors
from jax_grouped_gemm.compat.dtypes import dtype_name

MARGIN_VARIABLE = "CUDNNFE_CLUSTER_OVERLAP_MARGIN"
REMEMBERED = 256  # plans, the least recently used is dropped


class Request(NamedTuple):
    """The key of a plan: everything about a call but the addresses and values of its tensors.

    operands: (shape, strides, dtype, device) of each, by its framework's types. options: as given, dtypes in the caller's spelling.
    margin: of the environment, in clusters, as text; None where the call says it in SMs.
    """

    entry: strided.Entry
    framework: types.ModuleType
    operands: strided.StridedOperands | strided_wgrad.Tensors
    options: strided.StridedOptions | strided_wgrad.Options
    margin: str | None
    types: tuple = ()  # of the options: 1 equals True, but is refused


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """A checked call. fixed: by name, what an object of the class keeps from its samples."""

    call: calls.Call
    m_aligned: int
    bias_dtype: str | None
    fixed: dict[str, Any]

    def check_offsets(self, offsets):
        """Concrete ends."""
        strided.check_padded_offsets(offsets, self.call.m, self.m_aligned)

    @functools.cached_property
    def forward(self):
        """The launch by address."""
        return direct.Forward(self.call, self.bias_dtype)

    def check_outputs_apart(self, addresses):
        """For outputs that the caller brought."""
        strided.check_outputs_apart(addresses, self._bytes)

    @functools.cached_property
    def _bytes(self):
        """Of every operand, as `strided.StridedOperands`."""
        m, n, k, l = self.call.m, self.call.n, self.call.k, self.call.l
        width = {dtype: jnp.dtype(dtype).itemsize for dtype in config.D_DTYPES} | {None: 0}
        return strided.StridedOperands(
            a_tensor=2 * m * k,
            padded_offsets=4 * l,
            alpha_tensor=4 * l,
            b_tensor=2 * l * n * k,
            b_ptrs=8 * l,
            bias_tensor=width[self.bias_dtype] * l * n,
            prob_tensor=4 * m,
            c_tensor=width[self.call.c_dtype] * m * n,
            d_tensor=width[self.call.d_dtype] * m * n,
        )

    def launch(self, device, stream, addresses, scratch):
        """By address, on a stream. addresses: `strided.StridedOperands`, 0 where a tensor is absent."""
        strided.check_addresses(addresses)
        if self.call.m == 0:
            return  # the outputs have no elements
        self.forward(
            device,
            stream,
            a=addresses.a_tensor,
            offsets=addresses.padded_offsets,
            alpha=addresses.alpha_tensor,
            prob=addresses.prob_tensor,
            bias=addresses.bias_tensor,
            b=addresses.b_tensor or addresses.b_ptrs,
            c=addresses.c_tensor,
            d=addresses.d_tensor,
            scratch=scratch,
        )


@dataclasses.dataclass(frozen=True, eq=False)
class WgradPlan:
    """A checked call for weight gradients, whose x is A transposed and whose y is B.

    a_copied, b_copied: the tokens of that operand are contiguous, not their columns, which the kernels want.
    """

    call: calls.WgradCall
    m_aligned: int
    a_copied: bool
    b_copied: bool

    def check_offsets(self, offsets):
        """Concrete ends."""
        strided_wgrad.check_token_offsets(offsets, self.call.m, self.m_aligned)

    @functools.cached_property
    def wgrad(self):
        """The launch by address."""
        return direct.Wgrad(self.call)

    def check_outputs_apart(self, addresses):
        """For an output that the caller brought."""
        m, n, k, l = self.call.m, self.call.n, self.call.k, self.call.l
        width = jnp.dtype(self.call.d_dtype).itemsize
        strided.check_outputs_apart(addresses, strided_wgrad.Tensors(2 * m * n, 2 * m * k, 4 * l, width * l * n * k))


def request(entry, operands, options):
    """The request that these tensors make."""
    framework = framework_of(operands)
    return Request(entry, framework, layouts(framework, operands), options, margin_of(options), types_of(options))


def types_of(options):
    tiles = [tuple(map(type, x)) for x in (options.mma_tiler_mn, options.cluster_shape_mn) if isinstance(x, tuple)]
    return (*map(type, options), *tiles)


def margin_of(options):
    """What the environment says of the overlap margin, unless the call does."""
    return os.environ.get(MARGIN_VARIABLE, "0") if options.overlap_margin is None else None


def framework_of(operands):
    """The adapter for these tensors; torch is in `sys.modules` if one of its tensors can be here."""
    framework: types.ModuleType
    torch_tensor = getattr(sys.modules.get("torch"), "Tensor", ())
    if isinstance(operands.a_tensor, torch_tensor):
        framework, expected, article = torch_tensors, torch_tensor, "a torch tensor"
    elif isinstance(operands.a_tensor, jax.Array):
        framework, expected, article = jax_arrays, jax.Array, "a JAX array"
    else:
        raise strided.foreign_operand("a_tensor", operands.a_tensor, "a torch tensor or a JAX array")
    for name, x in zip(operands._fields, operands, strict=True):
        if x is not None and not isinstance(x, expected):
            raise strided.foreign_operand(name, x, article)
    return framework


def layouts(framework, operands):
    return type(operands)(*[None if x is None else framework.layout(x) for x in operands])


def plan_for(request):
    """The `Plan` for a request, or the ValueError or RuntimeError that says what is wrong with it."""
    try:
        return _remembered(request)
    except TypeError:
        try:
            hash(request)
        except TypeError:  # a list among the options: legal or not, it is not worth remembering
            return _plan(request)
        raise


def _plan(request):
    operands = type(request.operands)(*[None if x is None else _named(request.framework, *x) for x in request.operands])
    options = _named_options(request.options)
    make = _wgrad_plan if isinstance(operands, strided_wgrad.Tensors) else _forward_plan
    return make(request, options, operands)


def _forward_plan(request, options, operands):
    entry, framework = request.entry, request.framework
    strided.check_arguments(entry, options, operands)
    if framework is jax_arrays:
        strided.check_no_jax_strides(operands)
    device = operands.a_tensor.device
    arch = _target(request, device)
    extents = strided.check_layouts(options, operands)
    strided.check_outputs(options, operands)
    call = _with_margin(request, device, arch, _call(request, options, operands, extents))
    bias = operands.bias_tensor
    fixed = {
        "the device": device,
        "N": call.n,
        "K": call.k,
        "L": call.l,
        "the dtype of bias_tensor": None if bias is None else bias.dtype,
    }
    return Plan(call, options.m_aligned, None if bias is None else bias.dtype, fixed)


def _wgrad_plan(request, options, operands):
    strided_wgrad.check_arguments(options, operands)
    if request.framework is jax_arrays:
        strided_wgrad.check_functional(accumulate_on_output=options.accumulate_on_output)
    device = operands.a_tensor.device
    arch = _target(request, device)
    extents, a_major, b_major = strided_wgrad.check_layouts(request.entry, operands)
    m, n, tokens, l = (extents[symbol] for symbol in "MNTL")
    native = contract.WgradOptions(
        groups="offsets",
        d_dtype=options.wgrad_dtype if operands.wgrad_tensor is None else operands.wgrad_tensor.dtype,
        d_major="k",
        use_dynamic_sched=False,
        mma_tiler_mn=options.mma_tiler_mn,
        cluster_shape_mn=options.cluster_shape_mn,
        overlap_margin=0 if options.overlap_margin is None else options.overlap_margin,
        implementation=None,
    )
    # Added to an output that nobody brought, zeros, it is the same as not added.
    adds = options.accumulate_on_output and operands.wgrad_tensor is not None
    arrays = calls.WgradOperands(
        x=_struct((tokens, m), "bfloat16"),
        y=_struct((tokens, n), "bfloat16"),
        offsets=_struct((l,), "int32"),
        experts=None,
        alpha=None,
        total=_struct((l, m, n), "float32") if adds else None,
    )
    call = _with_margin(request, device, arch, contract.check_wgrad_call(native, arrays))
    aligned = strided.SM100_M_ALIGNED if request.entry.sm100 else 1
    return WgradPlan(call, aligned, a_copied=a_major != "m", b_copied=b_major != "n")


def _target(request, device):
    """The architecture of the device, which can run this name; None where it is not known."""
    capability = None if device is None else request.framework.capability(device)
    # A traced program may be for another machine: it is refused only for what this one's GPUs cannot run.
    for found in ffi_call.cuda_capabilities() if device is None else (capability,):
        strided.check_target(request.entry, device, found, kernels_only=request.framework is torch_tensors)
    return None if capability is None else ffi_call.architecture(capability)


def _with_margin(request, device, arch, call):
    """The call, whose tile is compiled, with the environment's margin."""
    contract.check_tile(call, () if arch is None else (arch,))
    if request.margin is None:
        return call
    if device is None:  # only now: asking JAX for GPUs makes it claim their memory, which may be torch's to use
        arch = next(iter(ffi_call.architectures()), None)
    tile = selection.tile_of(arch or (100 if request.entry.sm100 else 90), call)
    return dataclasses.replace(call, overlap_margin=_margin(request.margin, tile))


_remembered = functools.lru_cache(maxsize=REMEMBERED)(_plan)
tuned.forget.append(_remembered.cache_clear)  # its launchers name kernels


def _named(framework, shape, strides, dtype, device):
    return strided.Layout(tuple(shape), strides, dtype_name(dtype), framework.device_of(device))


def _named_options(options):
    dtypes = {name: dtype_name(x) for name, x in options._asdict().items() if name.endswith("_dtype")}
    return options._replace(**dtypes)


def _call(request, options, operands, extents):
    """The native call of the same bytes; what is left to check is checked as there."""
    m, n, k, l = (extents[symbol] for symbol in "MNKL")
    weights = "dense" if operands.b_ptrs is None else "pointers"
    b = {"dense": _struct((l, n, k) if options.b_major == "k" else (l, k, n), "bfloat16")}.get(weights)
    native = contract.Options(
        groups="offsets",
        n=None if weights == "dense" else n,
        b_major=options.b_major,
        d_dtype=options.d_dtype,
        implementation=None,
        generate_c=options.generate_c,
        c_dtype=options.c_dtype if options.generate_c else None,
        use_dynamic_sched=contract.check_flag("use_dynamic_sched", options.use_dynamic_sched),
        mma_tiler_mn=options.mma_tiler_mn,
        cluster_shape_mn=options.cluster_shape_mn,
        overlap_margin=0 if options.overlap_margin is None else options.overlap_margin,
    )
    arrays = calls.Operands(
        a=_struct((m, k), "bfloat16"),
        offsets=_struct((l,), "int32"),
        experts=None,
        alpha=_struct((l,), "float32"),
        prob=_struct((m,), "float32"),
        bias=None if operands.bias_tensor is None else _struct((l, n), operands.bias_tensor.dtype),
        b=(_struct((8 * l,), "uint8") if b is None else b,),
    )
    return contract.check_call(native, weights, arrays)


def _struct(shape, dtype):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def _margin(text, tile):
    """The environment counts clusters; the kernels leave SMs free."""
    if not text.strip().isdecimal():
        raise strided.wrong_margin(MARGIN_VARIABLE, text)
    # None: this wish is compiled for the other architecture only, where a program lowered from here may run.
    return int(text) * (1 if tile is None else tile.cluster_size)
