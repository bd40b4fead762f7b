"""The compiled kernels, every one: that each is the code meant, within the hardware's limits; and the build around them.

Reads what `make build` left in build/aot. Needs no GPU: cuobjdump and nvdisasm, from their packages, read the cubins, and ptxas assembles the PTX again.
"""

import concurrent.futures
import hashlib
import importlib.util
import itertools
import json
import os
import pathlib
import re
import shutil
import struct
import subprocess

import pytest
from ptx_flow import Flow

from jax_grouped_gemm import config
from jax_grouped_gemm.aot import build as build_module
from jax_grouped_gemm.aot import kernels as kernels_module
from jax_grouped_gemm.aot import table

ROOT = pathlib.Path(__file__).resolve().parent.parent
AOT = pathlib.Path(os.environ.get("BUILD", ROOT / "build")) / "aot"
KERNELS = {kernel.name: kernel for kernel in kernels_module.all_kernels()}

SHARED_MEMORY_LIMIT = 232448  # of a CTA on both architectures: 228 KiB of an SM, less 1 KiB for the system
REGISTERS_OF_AN_SM = 65536
REGISTER_UNIT = 8  # a warp's registers are given out in units of 256
ACCUMULATORS = 2  # of SM100
INSTRUCTION_BYTES = 16
MATRIX_K = 16  # of one matrix instruction on 16-bit elements
SWIZZLE_COLUMNS = 64  # 16-bit elements per row that one copy brings: a swizzle atom. Of an operand that is not K-major: 64 of its M or N


def of_kind(*kinds):
    return pytest.mark.parametrize("name", [name for name, kernel in KERNELS.items() if kernel.kind in kinds])


forward = of_kind("forward")
multiplying = of_kind("forward", "wgrad")
prologues = of_kind("maps_from_memory", "maps_by_value")
every_kernel = pytest.mark.parametrize("name", KERNELS)


@pytest.fixture(scope="module")
def manifest():
    return json.loads((AOT / "manifest.json").read_text())


@pytest.fixture(scope="module")
def facts(manifest):
    return {kernel["name"]: kernel for kernel in manifest["kernels"]}


def ptx(name):
    return (AOT / f"{name}.ptx").read_text()


def tool(name):
    """Of the package that pyproject's dev extra lists, or the CUDA toolkit's."""
    spec = importlib.util.find_spec("nvidia")
    folders = [pathlib.Path(folder) for folder in (spec.submodule_search_locations or [] if spec else [])]
    packaged = sorted(path for folder in folders for path in folder.glob(f"*/bin/{name}"))
    return packaged[-1] if packaged else name


def output(*command):
    """Standard error holds only the tools' remarks about ELF formats."""
    command = list(map(str, command))
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout


def machine_code(cubin):
    """The one code section of an ELF file."""
    (table_offset,) = struct.unpack_from("<Q", cubin, 0x28)
    entry_bytes, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    # (name, offset, bytes) of each section
    entry = struct.Struct("<I20xQQ")
    sections = [entry.unpack_from(cubin, table_offset + i * entry_bytes) for i in range(count)]
    names = cubin[sections[names_index][1] :]
    (code,) = (cubin[at : at + size] for name, at, size in sections if names[name:].startswith(b".text."))
    return code


@pytest.fixture(scope="module")
def sass(tmp_path_factory):
    """Machine code of every kernel, as instructions without predicates.

    nvdisasm takes a third of a second to start: all of an architecture's code goes through it at once.
    """
    instruction = re.compile(r"/\*([0-9a-f]+)\*/\s+(?:@!?\w+\s+)?([A-Z][^;]*?)\s*;")
    found = {}
    for arch in config.TILES:
        names = [name for name, kernel in KERNELS.items() if kernel.arch == arch]
        codes = [machine_code((AOT / f"{name}.cubin").read_bytes()) for name in names]
        path = tmp_path_factory.mktemp("sass") / "code"
        path.write_bytes(b"".join(codes))
        listing = instruction.findall(output(tool("nvdisasm"), "-ndf", "-novliw", "--binary", f"SM{arch}", path))
        assert [int(address, 16) for address, _ in listing] == list(range(0, path.stat().st_size, INSTRUCTION_BYTES))
        instructions = (text for _, text in listing)
        for name, code in zip(names, codes, strict=True):
            found[name] = list(itertools.islice(instructions, len(code) // INSTRUCTION_BYTES))
    return found


@pytest.fixture(scope="module")
def usage():
    """{"REG": ..., "STACK": ..., "LOCAL": ..., ...} of every kernel."""
    reports = {name: output(tool("cuobjdump"), "-res-usage", AOT / f"{name}.cubin") for name in KERNELS}
    return {
        name: {key: int(value) for key, value in re.findall(r"(\w+)(?:\[\d\])?:(\d+)", report.rpartition("\n  ")[2])}
        for name, report in reports.items()
    }


def is_wgrad(variant):
    return isinstance(variant, config.WgradVariant)


def accumulates(variant):
    return is_wgrad(variant) and variant.accumulate


def mn_major(variant):
    """Of A and B: whether the dimension that is not contracted is contiguous."""
    return (True, True) if is_wgrad(variant) else (False, variant.b_major == "n")


def loads(variant):
    """Copies of A and of B that one CTA starts per stage."""
    tile = variant.tile
    pair = 2 if tile.two_cta else 1
    halves = 2 if tile.turns else 1
    a, b = mn_major(variant)
    return (
        halves * (tile.m // SWIZZLE_COLUMNS if a else 1),
        halves * (tile.n // pair // SWIZZLE_COLUMNS if b else 1),
    )


def ranks(variant):
    """Of the tensor maps of A and B: of four dimensions where loads end at any row."""
    if is_wgrad(variant):
        return 4, 4
    return 4 if variant.arch == 90 and variant.tile.swapped else 2, 3


def stored_rows(tile):
    """Of SM90, and of a swapped tile of SM100: of a slab."""
    return tile.m // tile.split if tile.swapped else 64


def math_warpgroups(tile):
    """Of SM90."""
    return 2 if tile.swapped else tile.m // 64


def matrix_columns(tile):
    """Of SM90: of the matrix instructions of each loop over K, that of a tile whose last columns are past D's, and that of a whole one."""
    return [tile.m] if tile.swapped else [-(-tile.n // 128) * 64, tile.n]


def outputs(variant):
    """Types of what is stored, in that order: C, if at all, then D."""
    c_dtype = None if is_wgrad(variant) else variant.c_dtype
    return [dtype for dtype in (c_dtype, variant.d_dtype) if dtype is not None]


def slab_columns(dtype):
    return 128 // {"bfloat16": 2, "float16": 2, "16bit": 2, "float32": 4}[dtype]


def stores(variant):
    """In the code, of a tile: accumulators in registers are stored by unrolled code, those in tensor memory in a loop. Four slabs that wait for the next
    tile are stored in either of its loops over K, or after them."""
    if variant.arch == 100 and not variant.tile.swapped:
        return len(outputs(variant))
    columns = 64 if variant.arch == 90 and variant.tile.swapped else variant.tile.n  # of those who store them together
    count = sum(columns // slab_columns(dtype) for dtype in outputs(variant))
    return count + (2 * 4 if variant.tile.n == 256 else 0)


def opcodes(instructions, pattern):
    return [found[0] for found in (re.match(rf"(?:{pattern})\S*", text) for text in instructions) if found]


# --- which kernels ----------------------------------------------------------------------------------------------------


def test_exactly_the_configured_kernels(facts, manifest):
    wanted = {variant.name for arch in config.TILES for variant in config.variants(arch)}
    wanted |= {variant.name for arch in config.TILES for variant in config.wgrad_variants(arch)}
    wanted |= {config.prologue_name(arch, source) for arch in config.TILES for source in ("memory", "value")}
    assert set(facts) == wanted == set(KERNELS)
    assert len(manifest["kernels"]) == len(wanted)
    assert {path.stem for path in AOT.glob("*.cubin")} == {path.stem for path in AOT.glob("*.ptx")} == wanted


@every_kernel
def test_files_are_those_of_the_manifest(name, facts):
    cubin = (AOT / f"{name}.cubin").read_bytes()
    assert len(cubin) == facts[name]["cubin_bytes"]
    assert hashlib.sha256(cubin).hexdigest() == facts[name]["sha256"]
    assert hashlib.sha256(ptx(name).encode()).hexdigest() == facts[name]["ptx_sha256"]


def test_no_two_kernels_are_the_same(facts):
    assert len({fact["sha256"] for fact in facts.values()}) == len(facts)
    assert len({fact["ptx_sha256"] for fact in facts.values()}) == len(facts)


@every_kernel
def test_target(name, facts):
    target = {90: "sm_90a", 100: "sm_100f"}[KERNELS[name].arch]
    assert facts[name]["target"] == target
    assert re.findall(r"^\.target (.*)$", ptx(name), re.MULTILINE) == [target]
    assert re.findall(r"^\.address_size (.*)$", ptx(name), re.MULTILINE) == ["64"]
    if target == "sm_100f":
        # The ELF flags: 100, and not the bit by which the same code for sm_100a differs, which 10.3 would refuse.
        (flags,) = struct.unpack_from("<I", (AOT / f"{name}.cubin").read_bytes(), 0x30)
        assert (flags >> 8 & 0xFF, flags & 8) == (100, 0)


# --- limits -----------------------------------------------------------------------------------------------------------


@every_kernel
def test_nothing_in_local_memory(name, usage, sass):
    assert usage[name]["STACK"] == usage[name]["LOCAL"] == 0
    assert opcodes(sass[name], "STL|LDL") == []


@every_kernel
def test_fits_an_sm(name, facts, usage):
    assert facts[name]["smem_bytes"] <= SHARED_MEMORY_LIMIT
    assert re.findall(r"\.reqntid (\d+), 1, 1|\.maxntid (\d+)", ptx(name)) == [(str(facts[name]["threads"]), "")]
    assert -(-usage[name]["REG"] // REGISTER_UNIT) * REGISTER_UNIT * facts[name]["threads"] <= REGISTERS_OF_AN_SM


# --- another assembler ------------------------------------------------------------------------------------------------


def assemble(name, folder, arch):
    """What ptxas of the CUDA toolkit, another release than the DSL's, says while it assembles a kernel's PTX."""
    command = [
        tool("ptxas"),
        "--verbose",
        f"--gpu-name={arch}",
        AOT / f"{name}.ptx",
        f"--output-file={folder / 'cubin'}",
    ]
    return subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@every_kernel
def test_another_ptxas_assembles_it_alike(name, facts, usage, tmp_path):
    """To as many registers, or nearly, and no spills. Nothing else is said: warnings, as of matrix instructions that are serialised, would be."""
    done = assemble(name, tmp_path, facts[name]["target"])
    assert done.returncode == 0, done.stdout
    expected = r"""ptxas info\s+: 0 bytes gmem
ptxas info\s+: Compiling entry function '\w+' for '\w+'
ptxas info\s+: Function properties for \w+
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info\s+: Used (\d+) registers(?:, used \d+ barriers)?
ptxas info\s+: Compile time = .*
"""
    said = re.fullmatch(expected, done.stdout)
    assert said, done.stdout
    assert abs(int(said[1]) - usage[name]["REG"]) < 2 * REGISTER_UNIT
    assert int(said[1]) * facts[name]["threads"] <= REGISTERS_OF_AN_SM


@pytest.mark.parametrize("tile", config.TILES[100], ids=str)
def test_family_target(tile, tmp_path):
    """The PTX is good for both capabilities of the family, and for none outside."""
    name = config.Variant(100, tile, "k", "dense", "bfloat16", "plain").name
    accepted = {arch: assemble(name, tmp_path, arch).returncode == 0 for arch in ("sm_100a", "sm_103a", "sm_120a")}
    assert accepted == {"sm_100a": True, "sm_103a": True, "sm_120a": False}


# --- the instructions meant -------------------------------------------------------------------------------------------


@multiplying
def test_matrix_instructions(name, sass):
    tile = KERNELS[name].variant.tile
    count = tile.k // MATRIX_K
    in_ptx = re.findall(r"^\s*(?:@\S+\s+)?((?:wgmma\.mma|tcgen05\.mma|mma\.)\S*)", ptx(name), re.MULTILINE)
    in_sass = opcodes(sass[name], r"\w*MMA\b")
    if KERNELS[name].arch == 90:
        every = [columns for columns in matrix_columns(tile) for _ in range(count)]
        assert in_ptx == [f"wgmma.mma_async.sync.aligned.m64n{columns}k{MATRIX_K}.f32.bf16.bf16" for columns in every]
        assert in_sass == [f"HGMMA.64x{columns}x{MATRIX_K}.F32.BF16" for columns in every]
    else:
        group = 2 if tile.two_cta else 1
        assert in_ptx == [f"tcgen05.mma.cta_group::{group}.kind::f16.collector::a::discard"] * count
        assert in_sass == ["UTCHMMA.2CTA" if tile.two_cta else "UTCHMMA"] * count


@multiplying
def test_majors(name):
    """Told to the matrix unit: as flags of each instruction on SM90, as bits 15 and 16 of its descriptor on SM100."""
    a, b = mn_major(KERNELS[name].variant)
    text = ptx(name)
    if KERNELS[name].arch == 90:
        flags = re.findall(r"wgmma\.mma_async.*\}, %rd\d+, %rd\d+, \w+, 1,\s+1, (\d), (\d);", text)
        first, second = (b, a) if KERNELS[name].variant.tile.swapped else (a, b)
        assert set(flags) == {(str(int(first)), str(int(second)))}
        return
    registers = re.findall(r"tcgen05\.mma\S* \[%r\d+\], %rd\d+, %rd\d+, (%r\d+),", text)
    for register in registers:
        (descriptor,) = re.findall(rf"mov\.b32\s+{register}, (\d+);", text)
        first, second = (b, a) if KERNELS[name].variant.tile.swapped else (a, b)
        assert (int(descriptor) >> 15 & 1, int(descriptor) >> 16 & 1) == (first, second)
    assert registers


@multiplying
def test_matrix_instructions_overlap_on_sm90(name, sass):
    """ptxas serialises wgmma if it doubts the registers: it would put waits between them. The one wait in a loop over K leaves a group running."""
    if KERNELS[name].arch != 90:
        return
    steps = KERNELS[name].variant.tile.k // MATRIX_K
    loop = ["WARPGROUP.ARRIVE"] + ["HGMMA"] * steps + ["WARPGROUP.DEPBAR.LE gsb0, 0x1"]
    wanted = loop * len(matrix_columns(KERNELS[name].variant.tile)) + ["WARPGROUP.DEPBAR.LE gsb0, 0x0"]
    found = [text for text in sass[name] if text.startswith(("HGMMA", "WARPGROUP"))]
    assert [re.sub(r"^HGMMA.*", "HGMMA", text) for text in found] == wanted


@multiplying
def test_copies(name, sass):
    """Copy engine loads of A and B, multicast just where CTAs of a cluster share an operand; copy engine stores of D."""
    variant = KERNELS[name].variant
    tile = variant.tile
    pair = 2 if tile.two_cta else 1
    of_a, of_b = loads(variant)

    space = "cluster" if tile.two_cta else "cta"
    ending = ".L2::cache_hint" + (".cta_group::2" if tile.two_cta else "")
    multicast = ("cluster", ".multicast::cluster")
    # A pair of SM90 brings both operands so: its own part of one to itself alone.
    a = b = multicast if tile.cluster_m > pair else (space, "")
    rank_a, rank_b = ranks(variant)

    def load(rank, to, many):
        return f"cp.async.bulk.tensor.{rank}d.shared::{to}.global.tile.mbarrier::complete_tx::bytes{many}{ending}"

    kind, add = ("cp.reduce", ".add") if accumulates(variant) else ("cp", "")
    store = f"{kind}.async.bulk.tensor.3d.global.shared::cta{add}.tile.bulk_group.L2::cache_hint"
    copies = [load(rank_a, *a)] * of_a + [load(rank_b, *b)] * of_b + [store] * stores(variant)
    assert re.findall(r"^\s*(cp\.(?:reduce\.)?async\.bulk\.tensor\S*)", ptx(name), re.MULTILINE) == copies

    ending = ".2CTA" if tile.two_cta else ""
    a, b = (".MULTICAST" if many else "" for _, many in (a, b))
    copies = [f"UTMALDG.{rank_a}D{a}{ending}"] * of_a + [f"UTMALDG.{rank_b}D{b}{ending}"] * of_b
    assert opcodes(sass[name], "UTMALDG") == copies
    store = "UTMAREDG.3D.ADD" if accumulates(variant) else "UTMASTG.3D"
    assert opcodes(sass[name], "UTMASTG|UTMAREDG") == [store] * stores(variant)
    # Nothing else writes to global memory but the scheduler's claim of a tile.
    assert re.findall(r"\b(?:st|red|atom)\.global\S*", ptx(name)) == ["atom.global.add.u32"]


@multiplying
def test_boxes(name, facts):
    """Each operand's copies together bring one CTA's part of a stage, in rows of one swizzle atom; a slab of D or C is stored by one."""
    variant, boxes = KERNELS[name].variant, facts[name]["maps"]
    tile = variant.tile
    for field, count, size in zip(
        ("MAP_A", "MAP_B"), loads(variant), (tile.m, tile.n // (2 if tile.two_cta else 1)), strict=True
    ):
        columns, rows, *ones = boxes[field]
        assert columns == SWIZZLE_COLUMNS
        assert set(ones) <= {1}
        assert count * columns * rows == size * tile.k
    wanted = {"MAP_D": variant.d_dtype}
    if len(outputs(variant)) > 1:
        wanted["MAP_C"] = variant.c_dtype
    slab_rows = stored_rows(tile) if variant.arch == 90 or tile.swapped else 128
    stored = {field: [slab_columns(dtype), slab_rows, 1] for field, dtype in wanted.items()}
    assert {field: box for field, box in boxes.items() if field not in ("MAP_A", "MAP_B")} == stored
    assert (len(boxes["MAP_A"]), len(boxes["MAP_B"])) == ranks(variant)


@multiplying
def test_conversion_scale_and_bias(name):
    """Every sum is converted once per output, in pairs, and multiplied and added to only in kernels that are for that: wgrad's have alpha.

    Of a split tile, a CTA has a share of the sums, and adds as many from every other CTA.
    """
    variant = KERNELS[name].variant
    text = ptx(name)
    # Of the code for one thread: SM90 holds a tile's sums, SM100 a slab's, which of a swapped tile is all of it.
    groups = math_warpgroups(variant.tile) if variant.arch == 90 else 1
    in_code = [
        variant.tile.m * variant.tile.n // variant.tile.split // (128 * groups)
        if variant.arch == 90 or variant.tile.swapped
        else slab_columns(d)
        for d in outputs(variant)
    ]
    wanted = {
        "bfloat16": ["cvt.rn.bf16x2.f32"],
        "float16": ["cvt.rn.f16x2.f32"],
        "16bit": ["cvt.rn.bf16x2.f32", "cvt.rn.f16x2.f32"],
        "float32": [],
    }
    conversions = [c for d, n in zip(outputs(variant), in_code, strict=True) for c in wanted[d] * (n // 2)]
    assert sorted(re.findall(r"cvt\.r\S*", text)) == sorted(conversions)
    # alpha and prob, on SM90 multiplied by each other for each of a thread's rows; alpha, and bias by an addition that multiplies it; D made of C by
    # another factor.
    first, last = in_code[0], in_code[-1]
    computed = first if variant.arch == 90 or len(in_code) == 1 else first + last
    factors = first if variant.arch == 100 else stored_rows(variant.tile) // 4 if variant.tile.swapped else 2
    multiply, add = {"plain": (0, 0), "alpha": (first, 0), "scaled": (first + factors, 0), "bias": (first, first)}.get(
        "alpha" if is_wgrad(variant) else variant.epilogue, (computed + last, computed)
    )
    assert len(re.findall(r"\bmul\S*f32", text)) == multiply
    assert len(re.findall(r"\bfma\S*f32", text)) == add
    assert re.findall(r"\b(?:add|sub)\S*\.f32", text) == ["add.f32"] * (variant.tile.split - 1) * first


@multiplying
def test_parameters(name, facts):
    """What a call has and its kernel does not use is no parameter; the rest is one, each once."""
    variant, fields = KERNELS[name].variant, [field for field, _, _ in facts[name]["fields"]]
    if is_wgrad(variant):
        maps, pointers = ["MAP_A", "MAP_B", "MAP_D"], ["PTR_OFFSETS", "PTR_EXPERTS", "PTR_COUNTER", "PTR_ALPHA"]
        assert [field for field in fields if not field.startswith("DIM_")] == maps + pointers
        # Of X's and Y's maps, and of D's; then those of the problem.
        of_maps = ["DIM_N", "DIM_LOAD_ROWS", "DIM_K", "DIM_LOAD_ROWS", "DIM_N", "DIM_K", "DIM_L"]
        problem = ["DIM_M", "DIM_N", "DIM_K", "DIM_L", "DIM_GROUPS"]
        assert [field for field in fields if field.startswith("DIM_")] == of_maps + problem
        return
    switched = {
        "PTR_ALPHA": variant.epilogue != "plain",
        "PTR_PROB": variant.epilogue != "plain",
        "PTR_BIAS": variant.has_bias,
        "TYPE_BIAS": variant.has_bias,
        "MAP_C": variant.c_dtype is not None,
        "TYPE_C": variant.c_dtype == "16bit",
        "TYPE_D": variant.d_dtype == "16bit",
        "PTR_MAPS": variant.weights == "pointers",
        "PTR_COUNTER": True,
        "PTR_EXPERTS": True,
        "DIM_GROUPS": True,
        "DIM_LOAD_ROWS": ranks(variant)[0] == 4,
    }
    assert {field: fields.count(field) for field in switched} == switched


REMOTE_STORE = "st.async.shared::cluster.mbarrier::complete_tx::bytes"


@multiplying
def test_sums_of_split_tiles(name):
    """A thread sends to each other CTA what that one stores, four sums at a time; the code for its own share is there too, as it has to be for any rank."""
    tile = KERNELS[name].variant.tile
    accumulators = tile.m * tile.n // (128 * math_warpgroups(tile)) if tile.split > 1 else 0
    assert ptx(name).count(f"{REMOTE_STORE}.v4.b32") == accumulators // 4


@multiplying
def test_claims_of_tiles(name):
    """Dynamic schedule: one thread asks the counter; the answer goes to every CTA of the cluster with its own signal, whose reading is told back."""
    text, tile = ptx(name), KERNELS[name].variant.tile
    steps = ["atom.global.add", f"{REMOTE_STORE}.b32", "mbarrier.arrive.expect_tx"]
    steps += ["mbarrier.try_wait", "mbarrier.arrive.shared::cluster"]
    if tile.cluster_size == 1:
        assert (text.count(steps[0]), text.count(steps[1])) == (1, 0)
        return
    events = re.findall("|".join(map(re.escape, steps)), text[text.index(steps[0]) :])
    # Before it writes, the first CTA waits until its last answer was read.
    assert events[: len(steps) + 1] == [steps[0], steps[3], *steps[1:]]
    assert text.count(steps[0]) == text.count(steps[1]) == 1


@multiplying
def test_registers_move_to_the_math_warps_on_sm90(name, usage):
    """One warpgroup gives up what the others take, and that was there to take; on SM100 accumulators are not in registers."""
    moves = re.findall(r"setmaxnreg\.(\w+)\.sync\.aligned\.u32\s+(\d+)", ptx(name))
    if KERNELS[name].arch != 90:
        assert moves == []
        return
    (dec, less), (inc, more) = moves
    assert (dec, inc) == ("dec", "inc")
    math = math_warpgroups(KERNELS[name].variant.tile)
    assert int(less) + math * int(more) <= (1 + math) * usage[name]["REG"]


@multiplying
def test_tensor_memory(name, sass):
    """Allocated once, by as many CTAs as share instructions, and freed; read to the end before it is handed back."""
    variant = KERNELS[name].variant
    text = ptx(name)
    if variant.arch != 100:
        assert "tcgen05" not in text
        return
    group = 2 if variant.tile.two_cta else 1
    allocation = rf"tcgen05\.(alloc|relinquish_alloc_permit|dealloc)\.cta_group::{group}\."
    assert re.findall(allocation, text) == ["alloc", "relinquish_alloc_permit", "dealloc"]
    (register,) = re.findall(r"tcgen05\.alloc\S*\s+\[%\w+\], (%r\d+);", text)
    columns = ACCUMULATORS * (variant.tile.m if variant.tile.swapped else variant.tile.n)
    assert re.findall(rf"mov\.b32\s+{register}, (\d+);", text) == [str(columns)]
    assert set(re.findall(r"cta_group::\d", text)) == {f"cta_group::{group}"}

    # The math warp waits for the accumulator; the epilogue waits for it, loads every slab, and hands it back.
    after, before = "tcgen05.fence::after_thread_sync", "tcgen05.fence::before_thread_sync"
    steps = rf"^\s*(?:@\S+\s+)?({after}|{before}|tcgen05\.(?:mma|ld|wait::ld)\b|mbarrier\.(?:try_wait|arrive))"
    events = [key for key, _ in itertools.groupby(re.findall(steps, text, re.MULTILINE))]
    math = events.index("tcgen05.mma")
    assert after in events[:math]
    assert events[events.index(after) - 1] == "mbarrier.try_wait"
    loads = events.index("tcgen05.ld")
    wanted = [
        "mbarrier.try_wait",
        after,
        *["tcgen05.ld", "tcgen05.wait::ld"] * len(outputs(variant)),
        before,
        "mbarrier.arrive",
    ]
    assert events[loads - 2 :][: len(wanted)] == wanted
    assert events.count("tcgen05.ld") == len(outputs(variant))
    # Of a swapped tile, 16 lanes and all columns at a time.
    loads = [f"LDTM.x{slab_columns(dtype)}" for dtype in outputs(variant)]
    if variant.tile.swapped:
        loads = [f"LDTM.16dp256bit.x{variant.tile.m // 8}"] * 2 * len(outputs(variant))
    assert opcodes(sass[name], "LDTM") == loads
    # Of the math warp after it acquires an accumulator, of an epilogue warp after its wait and before its release.
    assert re.findall(r"tcgen05\.fence::(\w+)_thread_sync", text) == ["after", "after", "before"]


STORE = r"cp\.(?:reduce\.)?async\.bulk\.tensor\.\dd\.global"
# On every path from the first to one of the last there has to be the second.
ORDERS = {
    "barriers are visible to all before they are used": (
        r"mbarrier\.init",
        r"fence\.mbarrier_init\.release\.cluster",
        r"mbarrier\.(?!init)|bar\.sync|barrier|tcgen05|cp\.(?:reduce\.)?async|st\.async",
    ),
    "slabs are visible to the copy engine before it stores them": (
        r"st\.shared|stmatrix",
        r"fence\.proxy\.async\.shared",
        STORE,
    ),
    "slabs are written by all warps before they are stored": (
        r"fence\.proxy\.async",
        r"bar\.sync|barrier\.sync",
        STORE,
    ),
    # The values are in registers only after the wait, and the math warp overwrites an accumulator that it is told is free.
    "accumulators are read before anybody is told": (
        r"tcgen05\.ld\.",
        r"tcgen05\.wait::ld\.",
        r"mbarrier\.arrive|bar\.|barrier|st\.async|tcgen05\.(?:commit|dealloc)|ret|exit",
    ),
}


def broken_orders(text):
    """{order: the instructions that are reached too early}."""
    flow, broken = Flow(text), {}
    for order, (first, between, last) in ORDERS.items():
        reached = set().union(*(flow.reached(start, between) for start in flow.find(first)))
        early = {flow.instructions[at] for at in reached if re.match(last, flow.instructions[at])}
        broken |= {order: early} if early else {}
    return broken


@multiplying
def test_orders_on_every_path(name):
    text, blackwell = ptx(name), KERNELS[name].arch == 100
    firsts = [bool(re.search(rf"^\s+{first}", text, re.MULTILINE)) for first, _, _ in ORDERS.values()]
    assert firsts == [True, True, True, blackwell]
    assert broken_orders(text) == {}


plain_kernels = pytest.mark.parametrize(
    "variant",
    [
        variant
        for arch, tiles in config.TILES.items()
        for variant in (
            *(config.Variant(arch, tile, "k", "dense", "bfloat16", "plain") for tile in tiles),
            *(config.WgradVariant(arch, tile, "float32", accumulate=True) for tile in config.WGRAD_TILES[arch]),
        )
    ],
    ids=lambda variant: variant.name,
)


@plain_kernels
@pytest.mark.parametrize("order", ORDERS)
def test_broken_orders_are_found(order, variant):
    """The instruction between left out, jumped around, and moved past the next that must not come before it."""
    text = ptx(variant.name)
    first, between, last = (
        re.compile(rf"(?:^\t(?:@\S+ )?(?:{pattern}).*\n)+", re.MULTILINE) for pattern in ORDERS[order]
    )
    start = first.search(text)
    if not start:
        assert variant.arch != 100
        return
    there = between.search(text, start.end())
    around = f"\t@%p1 bra $AROUND;\n{there[0]}$AROUND:\n"
    after = last.search(text, there.end()).end()
    head, tail = text[: there.start()], text[there.end() :]
    for changed in (head + tail, head + around + tail, head + text[there.end() : after] + there[0] + text[after:]):
        assert order in broken_orders(changed)


@multiplying
def test_maps_in_memory_are_acquired(name):
    """Only where they come from memory, and before B is loaded through them."""
    variant = KERNELS[name].variant
    pointers = not is_wgrad(variant) and variant.weights == "pointers"
    load = f"cp.async.bulk.tensor.{4 if is_wgrad(variant) else 3}d.shared"
    acquire = "fence.proxy.tensormap::generic.acquire.gpu"
    found = re.findall(rf"{re.escape(acquire)}|{re.escape(load)}", ptx(name))
    assert found.count(acquire) == pointers
    assert found[0] == (acquire if pointers else load)
    assert "tensormap.replace" not in ptx(name)


@prologues
def test_prologues_release_the_maps_they_write(name):
    found = re.findall(r"(st\.global|tensormap\.replace|fence\.proxy[^ ;]*)", ptx(name))
    writes = [key for key, _ in itertools.groupby(found)]
    assert writes == ["st.global", "tensormap.replace", "fence.proxy.tensormap::generic.release.gpu"]


# --- the tables -------------------------------------------------------------------------------------------------------


def test_build_id_depends_on_every_kernel(manifest):
    kernels = manifest["kernels"]
    ids = {manifest["build_id"]}
    assert ids == {table.build_id(kernels)}
    for i, kernel in enumerate(kernels):
        for change in ({"sha256": "0" * 64}, {"param_bytes": kernel["param_bytes"] + 4}):
            ids.add(table.build_id(kernels[:i] + [kernel | change] + kernels[i + 1 :]))
    assert len(ids) == 1 + 2 * len(kernels)


def test_table_says_what_the_manifest_says(manifest):
    text = re.sub(r"^//.*", "", (AOT / "kernel_table.inc").read_text(), flags=re.MULTILINE)
    # C++ to JSON: braces are lists, names are strings.
    text = re.sub(r"\bADDRESS\((\d+)\)", r"ADDRESS_\1", text).translate(str.maketrans("{}", "[]"))
    text = re.sub(r'(?<!")\b([A-Za-z_]\w*)\b(?!")', r'"\1"', text)
    uses = [(macro, json.loads(f"[{values}]")) for macro, values in re.findall(r'"(\w+)"\((.*)\)', text)]
    assert uses[0] == ("JGG_BUILD_ID", [manifest["build_id"]])
    assert {macro for macro, _ in uses[1:]} == {"JGG_KERNEL"}

    elements = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "16bit": "ANY16", None: "NONE"}
    for (_, row), kernel in zip(uses[1:], manifest["kernels"], strict=True):
        wanted = [kernel["name"], kernel["arch"], kernel["kind"].upper(), kernel["symbol"]]
        wanted += [kernel[key] for key in ("threads", "smem_bytes", "param_bytes", "params", "fields")]
        if variant := KERNELS[kernel["name"]].variant:
            ranks_of = dict(zip(("MAP_A", "MAP_B"), ranks(variant), strict=True))
            d, c = elements[kernel["d_dtype"]], elements[kernel.get("c_dtype")]
            maps = [
                [field, {"MAP_D": d, "MAP_C": c}.get(field, "BF16"), ranks_of.get(field, 3), box, 128]
                for field, box in kernel["maps"].items()
            ]
            major = {"k": "K_MAJOR", "n": "N_MAJOR"}[kernel.get("b_major", "k")]
            wanted += [kernel["cluster"], kernel["tile"], major, d, c, maps]
            wanted += [str(kernel["accumulate"]).lower()] if kernel["kind"] == "wgrad" else []
        assert row == wanted


def test_manifest_says_what_the_variant_says(facts):
    for name, fact in facts.items():
        variant = KERNELS[name].variant
        assert (fact["kind"], fact["arch"]) == (KERNELS[name].kind, KERNELS[name].arch)
        if variant:
            tile = variant.tile
            assert (fact["tile"], fact["cluster"]) == ([tile.m, tile.n], [tile.cluster_m, tile.split])
            says = ("d_dtype", "accumulate") if is_wgrad(variant) else ("d_dtype", "c_dtype", "b_major", "epilogue")
            assert {key: fact[key] for key in says} == {key: getattr(variant, key) for key in says}


def test_every_cubin_is_embedded():
    embedded = re.findall(r'^(\w+):\n    \.incbin "(\w+)\.cubin"', (AOT / "cubins.S").read_text(), re.MULTILINE)
    assert embedded == [(f"jgg_cubin_{name}", name) for name in KERNELS]


def test_installed_manifest_is_this_one():
    assert (ROOT / "jax_grouped_gemm" / "_data" / "manifest.json").read_bytes() == (AOT / "manifest.json").read_bytes()


# --- what is compiled again -------------------------------------------------------------------------------------------


@pytest.fixture
def copy(tmp_path):
    return shutil.copytree(AOT, tmp_path / "aot")


def times(folder):
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


def contents(folder):
    """Hashes: pytest would take minutes to say where megabytes differ."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_nothing_to_do_touches_nothing(copy):
    before = times(copy)
    build_module.build(copy, 1)
    assert times(copy) == before


def test_compiles_what_is_stale_and_reproduces_it(copy):
    """Compiled for other sources, cut short, or without its mark: just these are compiled, to the same bytes."""
    other, cut, unmarked = (
        "sm90_wgrad_128x128x64_cluster2x1_bfloat16",
        next(n for n in KERNELS if "sm90_forward" in n),
        "sm90_maps_by_value",
    )
    record = json.loads((copy / f"{other}.json").read_text())
    (copy / f"{other}.json").write_text(json.dumps(record | {"key": "of other sources"}))
    (copy / f"{cut}.cubin").write_bytes((copy / f"{cut}.cubin").read_bytes()[:-1])
    (copy / f"{unmarked}.json").unlink()
    before = times(copy)
    build_module.build(copy, 2)
    after = times(copy)
    stale = {f"{name}.{kind}" for name in (other, cut, unmarked) for kind in ("ptx", "cubin", "json")}
    assert {name for name in after if after[name] != before.get(name)} == stale
    assert contents(copy) == contents(AOT)


def test_kernels_no_longer_wanted_are_removed(copy):
    for kind in ("cubin", "ptx", "json"):
        (copy / f"sm90_forward_of_old.{kind}").write_text("")
    build_module.build(copy, 1)
    assert contents(copy) == contents(AOT)


@pytest.mark.parametrize(
    ("source", "depends"),
    [
        ("gemm_sm90", lambda kernel: kernel.variant and kernel.arch == 90),
        ("gemm_sm100", lambda kernel: kernel.variant and kernel.arch == 100),
        ("kernel", lambda kernel: kernel.variant),
        ("forward", lambda kernel: kernel.kind == "forward"),
        ("wgrad", lambda kernel: kernel.kind == "wgrad"),
        ("scheduler", lambda kernel: kernel.variant),
        ("epilogue", lambda kernel: kernel.variant),
        ("exchange", lambda kernel: kernel.variant and kernel.arch == 90),
        ("operands", lambda kernel: True),
        ("tensor_maps", lambda kernel: True),
    ],
)
def test_a_kernel_depends_on_its_sources(source, depends, tmp_path, monkeypatch):
    before = {name: kernel.key() for name, kernel in KERNELS.items()}
    shutil.copytree(kernels_module.PACKAGE / "kernels", tmp_path / "kernels")
    monkeypatch.setattr(kernels_module, "PACKAGE", tmp_path)
    assert {name: kernel.key() for name, kernel in KERNELS.items()} == before
    with (tmp_path / "kernels" / f"{source}.py").open("a") as file:
        file.write("# changed\n")
    changed = {name for name, kernel in KERNELS.items() if kernel.key() != before[name]}
    assert changed == {name for name, kernel in KERNELS.items() if depends(kernel)}


def test_no_source_is_forgotten():
    """Every module of `kernels` is in the test above."""
    modules = {path.stem for path in (kernels_module.PACKAGE / "kernels").glob("*.py")}
    assert modules == {
        "__init__",
        "kernel",
        "forward",
        "wgrad",
        "gemm_sm90",
        "gemm_sm100",
        "scheduler",
        "epilogue",
        "exchange",
        "operands",
        "tensor_maps",
    }


@pytest.fixture
def compiler(monkeypatch):
    """Instead of compiling, takes kernels from the build, in this process; fails for those in `failing`."""

    class Compiler:
        failing: frozenset[str] = frozenset()

        def __init__(self):
            self.compiled = []

        def __call__(self, kernel, key, out):
            if kernel.name in self.failing:
                raise ValueError(f"no {kernel.name} today")
            self.compiled.append(kernel.name)
            for kind in ("ptx", "cubin", "json"):
                shutil.copy(AOT / f"{kernel.name}.{kind}", out)
            return 0.0

    compiler = Compiler()
    monkeypatch.setattr(build_module, "compile_to", compiler)
    monkeypatch.setattr(build_module, "workers", lambda *_: concurrent.futures.ThreadPoolExecutor(1))
    return compiler


def test_first_build(compiler, tmp_path, monkeypatch):
    written = []
    write = table.write_if_changed
    monkeypatch.setattr(table, "write_if_changed", lambda path, text: (written.append(path.name), write(path, text)))
    build_module.build(tmp_path / "new", 1)
    assert contents(tmp_path / "new") == contents(AOT)
    assert compiler.compiled == list(KERNELS)
    assert written[-1] == "manifest.json"


def test_failed_first_build_leaves_no_tables(compiler, tmp_path):
    compiler.failing = {"sm100_maps_by_value"}
    with pytest.raises(ValueError, match="no sm100_maps_by_value today"):
        build_module.build(tmp_path, 1)
    assert not {"manifest.json", "kernel_table.inc", "cubins.S"} & set(times(tmp_path))


def test_failed_build_keeps_the_tables_and_what_did_compile(compiler, copy):
    """The tables still say what the last complete build was; the next build has only the rest to do."""
    tables = {name: time for name, time in times(copy).items() if not name.startswith("sm")}
    (copy / "sm90_maps_by_value.json").unlink()
    (copy / "sm90_maps_from_memory.json").unlink()
    compiler.failing = {"sm90_maps_by_value"}
    with pytest.raises(ValueError, match="no sm90_maps_by_value today"):
        build_module.build(copy, 1)
    assert times(copy).items() >= tables.items()

    compiler.failing, compiler.compiled = frozenset(), []
    build_module.build(copy, 1)
    assert compiler.compiled == ["sm90_maps_by_value"]
    assert contents(copy) == contents(AOT)
