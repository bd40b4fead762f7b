"""What is compiled: one `Kernel` per cubin. Knows names and sources, imports the DSL only to compile."""

import dataclasses
import functools
import hashlib
import importlib
import importlib.metadata
import os
import pathlib
import re
import sys
import tempfile

from .. import config

PACKAGE = pathlib.Path(__file__).parent.parent
# One cubin for every Hopper; the family target covers B200 (10.0) and B300 (10.3).
TARGETS = {90: "sm_90a", 100: "sm_100f"}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """kind: "forward" or "wgrad" with its variant, or "maps_from_memory", "maps_by_value"."""

    arch: int
    kind: str
    variant: config.Variant | config.WgradVariant | None = None

    @property
    def name(self):
        if self.variant:
            return self.variant.name
        return config.prologue_name(self.arch, "memory" if self.kind == "maps_from_memory" else "value")

    def key(self):
        """Hash of everything the compiled kernel depends on."""
        modules = ["operands", "tensor_maps"]
        if self.variant:
            modules += ["kernel", self.kind, "scheduler", "epilogue", f"gemm_sm{self.arch}"]
            modules += ["exchange"] if self.arch == 90 else []
        sources = [PACKAGE / "kernels" / f"{module}.py" for module in modules] + [pathlib.Path(__file__)]
        digest = hashlib.sha256(f"{self} {TARGETS[self.arch]} {_compiler()}".encode())
        for source in sources:
            digest.update(source.read_bytes())
        return digest.hexdigest()


def dsl_version():
    return importlib.metadata.version("nvidia-cutlass-dsl")


@functools.cache
def _compiler():
    """Versions of all that compiles: the DSL's several distributions, and the Python whose syntax trees it reads."""
    names = {d.name: d.version for d in importlib.metadata.distributions() if d.name.startswith("nvidia-cutlass-dsl")}
    return f"{sorted(names.items())} {sys.version_info[:2]}"


def all_kernels():
    kernels = []
    for arch in config.TILES:
        kernels += [Kernel(arch, "maps_from_memory"), Kernel(arch, "maps_by_value")]
        kernels += [Kernel(arch, "forward", variant) for variant in config.variants(arch)]
        kernels += [Kernel(arch, "wgrad", variant) for variant in config.wgrad_variants(arch)]
    return kernels


def prepare_process(arch, scratch):
    """The DSL reads its settings once, at import: a process compiles for one architecture only.

    It passes cubin and PTX through files whose names do not tell variants apart: each process needs a folder of its own.
    """
    for name in [name for name in os.environ if name.startswith("CUTE_DSL_")]:
        del os.environ[name]  # no setting of the user's shell goes into a kernel
    os.environ["CUTE_DSL_ARCH"] = TARGETS[arch]
    os.environ["CUTE_DSL_KEEP"] = "ptx,cubin"
    os.environ["CUTE_DSL_DUMP_DIR"] = tempfile.mkdtemp(dir=scratch)


def compile_kernel(kernel):
    """(cubin, PTX, facts), in a process prepared for its architecture."""
    program, compiled = _trace(kernel)
    cubin, ptx = compiled.__cubin__, compiled.__ptx__
    symbol, parameters = parse_entry(ptx)
    facts = {
        "name": kernel.name,
        "arch": kernel.arch,
        "target": TARGETS[kernel.arch],
        "kind": kernel.kind,
        "symbol": symbol,
        "threads": program.threads,
        "smem_bytes": program.shared_bytes,
        "param_bytes": parameters[-1][0] + parameters[-1][1],
        "params": parameters,
        "fields": place_fields(kernel.name, program.fields(), parameters),
        "cubin_bytes": len(cubin),
        "sha256": hashlib.sha256(cubin).hexdigest(),
        "ptx_sha256": hashlib.sha256(ptx.encode()).hexdigest(),
    }
    if kernel.variant:
        tile = kernel.variant.tile
        facts |= {
            "tile": [tile.m, tile.n],
            "cluster": list(tile.cluster_shape_mn),
            "d_dtype": kernel.variant.d_dtype,
            "maps": {field: list(box) for field, box in program.boxes().items()},
        }
    if kernel.kind == "forward":
        facts |= {name: getattr(kernel.variant, name) for name in ("b_major", "epilogue", "c_dtype")}
    if kernel.kind == "wgrad":
        facts |= {"accumulate": kernel.variant.accumulate}
    return cubin, ptx, facts


def _trace(kernel):
    """(kernel object, compiled function), with example arguments of which only the types matter."""
    import cutlass.cute as cute
    from cutlass import BFloat16, Float32, Int32, Int64, Uint16
    from cutlass.cute.runtime import make_fake_stream, make_ptr

    def pointer(dtype, align):
        return make_ptr(dtype, 0, cute.AddressSpace.gmem, assumed_align=align)

    if kernel.variant:
        from ..kernels import operands

        module = importlib.import_module(f"..kernels.gemm_sm{kernel.arch}", __package__)
        variant = kernel.variant
        d = pointer(operands.DTYPES[variant.d_dtype], 16)
        extents = (Int32(1), Int32(8), Int32(8), Int32(1), Int32(1), Int32(1))  # M, N, K, L, groups, clusters
    if kernel.kind == "forward":
        program = module.GroupedGemm(variant)
        c = pointer(operands.DTYPES[variant.c_dtype], 16) if variant.c_dtype else None
        scale = None if variant.epilogue == "plain" else pointer(Float32, 4)
        bias, bias_type = (pointer(Uint16, 2), Int32(1)) if variant.has_bias else (None, None)
        maps = None if variant.weights == "dense" else pointer(Int64, 128)
        arguments = [
            *(pointer(BFloat16, 16), pointer(BFloat16, 16), d, c),
            *(maps, pointer(Int32, 4), pointer(Int32, 4), pointer(Int32, 4), scale, scale, bias, bias_type),
            *(Int32(1) if dtype == "16bit" else None for dtype in (variant.d_dtype, variant.c_dtype)),
            *extents,
        ]
    elif kernel.kind == "wgrad":
        program = module.GroupedWgrad(variant)
        arguments = [
            *(pointer(BFloat16, 16), pointer(BFloat16, 16), d),
            *(pointer(Int32, 4), pointer(Int32, 4), pointer(Int32, 4), pointer(Float32, 4)),
            *extents,
        ]
    else:
        from ..kernels import tensor_maps

        program = tensor_maps.WriteMaps(from_memory=kernel.kind == "maps_from_memory")
        addresses = pointer(Int64, 8) if program.from_memory else (Int64(0),) * tensor_maps.ADDRESSES
        arguments = [(Int64(0),) * tensor_maps.WORDS, pointer(Int64, 128), addresses, Int32(0), Int32(1)]
    return program, cute.compile(program, *arguments, make_fake_stream())


def parse_entry(ptx):
    """(symbol, [[offset, bytes] of every parameter]) from the one .entry of a PTX module."""
    ((symbol, declarations),) = re.findall(r"\.entry\s+(\S+)\s*\((.*?)\n\)", ptx, re.DOTALL)
    parameters, end = [], 0
    for declaration in declarations.splitlines():
        if not declaration.strip():
            continue
        array = re.search(r"\.param \.align (\d+) \.b8 \S+\[(\d+)\]", declaration)
        scalar = re.search(r"\.param \.[usbf](\d+) ", declaration)
        if array:
            align, size = int(array[1]), int(array[2])
        elif scalar:
            align = size = int(scalar[1]) // 8
        else:
            raise ValueError(f"unknown kernel parameter in the PTX: {declaration}")
        offset = -(-end // align) * align
        parameters.append([offset, size])
        end = offset + size
    return symbol, parameters


def field_bytes(field):
    if field.startswith("MAP_"):
        return 128
    return 8 if field.startswith(("PTR_", "ADDRESS_")) else 4


def place_fields(name, fields, parameters):
    """[field, offset, bytes] of every field; the declared fields must fill the compiled parameters exactly."""
    if len(fields) != len(parameters):
        raise ValueError(f"{name} declares {len(fields)} parameters, its PTX has {len(parameters)}: {parameters}")
    placed = []
    for declared, (offset, _) in zip(fields, parameters, strict=True):
        for field in declared:
            placed.append([field, offset, field_bytes(field)])
            offset += field_bytes(field)
    covered = sorted((offset, offset + size) for _, offset, size in placed)
    wanted = sorted((offset, offset + size) for offset, size in parameters)
    if _bytes(covered) != _bytes(wanted):
        raise ValueError(f"{name}: fields {placed} do not fill the parameters {parameters}")
    return placed


def _bytes(ranges):
    return {byte for begin, end in ranges for byte in range(begin, end)}
