"""Our library launches every kernel as the DSL's own host code would.

The kernels are written against tensors whose maps, parameters and launch the DSL generates host code for. That code is not used: our
library does the same in C++ (`ffi/`). Here both run, with a stand-in for CUDA below them, and what they pass to it is compared.
"""

import concurrent.futures
import importlib.util
import itertools
import json
import os
import pathlib
import subprocess
import sys

import pytest

from jax_grouped_gemm import config

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).resolve().parent.parent
HERE = ROOT / "tests" / "host_code"
BUILD = pathlib.Path(os.environ.get("BUILD", ROOT / "build")).resolve()

# Every tile, order of B and form of weights, each with two epilogues in turn, so that every epilogue and type meets both forms of weights.
EPILOGUES = [(epilogue, d_dtype) for epilogue, d_dtypes in config.EPILOGUES.items() for d_dtype in d_dtypes]
VARIANTS = [
    config.Variant(arch, tile, b_major, weights, d_dtype, epilogue)
    for arch, tiles in config.TILES.items()
    for i, (tile, b_major, weights) in enumerate(itertools.product(tiles, config.B_MAJORS, config.WEIGHTS))
    for epilogue, d_dtype in (EPILOGUES[(3 * i + j) % len(EPILOGUES)] for j in (0, 7))
]
WGRAD = [variant for arch in config.TILES for variant in config.wgrad_variants(arch)]
SIZES = {  # (m, n, k, l); of wgrad, results (l, n, k)
    "smallest": (1, 8, 8, 1),
    "odd": (1000, 648, 328, 5),
    "many experts": (4096, 256, 512, 300),  # more than a prologue launch takes
    "a and d above 2^31 elements": (2_000_000, 65536, 2048, 3),
    "b, or wgrad's d, above 2^31 elements": (70_000, 8192, 16384, 64),
    "longest": (2**31 - 1 - 1024, 8, 8, 1000),
    "strides above 2^36 bytes": (4096, 2**19, 2**19 - 8, 2),  # these have bits elsewhere in a tensor map
}
MAX_CLUSTERS = 66  # that fit the device: fewer than the tiles of a large problem, more than those of a small one
# Made-up addresses, each as little aligned as is allowed.
A, B, D = 0x1000_0000_0010, 0x2000_0000_0030, 0x3000_0000_0050
OFFSETS, ALPHA, PROB, POINTERS, SCRATCH = 0x4004, 0x5004, 0x6004, 0x7008, 0x8080
C, BIAS, EXPERTS = 0x9000_0000_0070, 0x6104, 0x4104
X, Y = 0xA000_0000_0010, 0xB000_0000_0030
STREAM = 0x9000
MAP_WORDS = 16  # of 4 bytes, that mean something: the DSL leaves the other half of a tensor map as it was


def names_of(variant):
    """Of a call's kernels: the other architecture's is named too, and not used."""
    first = config.wgrad_variants if isinstance(variant, config.WgradVariant) else config.variants
    return {f"sm{arch}": first(arch)[0].name for arch in config.TILES} | {f"sm{variant.arch}": variant.name}


def in_turn(i):
    """Options that each size and each kernel has in both ways: a dynamic schedule, groups with experts, alpha."""
    return i % 2, i // 2 % 2, i % 3


def common(variant, i, size, extents):
    """What all kinds of calls have. Groups with experts are more or fewer than these."""
    dynamic, mapped, _ = in_turn(i)
    l = extents[-1]
    return {
        **names_of(variant),
        **dict(zip("mnkl", extents, strict=True)),
        "groups": (2 * l + 3 if i % 4 == 2 else -(-l // 2)) if mapped else l,
        "experts": EXPERTS if mapped else 0,
        "dynamic": dynamic,
        "overlap_margin": 5 if size == "many experts" else 0,
        "d": D,
        "offsets": OFFSETS,
        "stream": STREAM,
    }


def forward_calls():
    for (v, variant), (s, (size, extents)) in itertools.product(enumerate(VARIANTS), enumerate(SIZES.items())):
        for weights in ("dense",) if variant.weights == "dense" else ("pointers", "tuple"):
            source = {"dense": None, "pointers": "memory", "tuple": "value"}[weights]
            scaled, dynamic = variant.epilogue != "plain", in_turn(v + s)[0]
            # What a kernel with C takes at run time: a bias or none, one or the other type of 16 bits.
            bias = variant.has_bias and not (variant.c_dtype and size == "longest")
            either = "float16" if size == "odd" else "bfloat16"
            yield {
                "id": f"{variant.name}, {weights}, {size}",
                "kind": "forward",
                "arch": variant.arch,
                "takes": {"c": variant.c_dtype is not None, "scales": scaled, "bias": variant.has_bias}
                | {"d_type": variant.d_dtype == "16bit", "c_type": variant.c_dtype == "16bit"},
                "kernel": variant.name,
                "prologue": source and config.prologue_name(variant.arch, source),
                "prologues": {"dense": 0, "pointers": 1, "tuple": -(-extents[-1] // 128)}[weights],
                "maps_bytes": 0 if weights == "dense" else 128 * extents[-1],
                "max_clusters": MAX_CLUSTERS,
                "weight_addresses": [B + 0x1000 * i for i in range(extents[-1])] if weights == "tuple" else None,
                "problem": {
                    **common(variant, v + s, size, extents),
                    "weights": weights,
                    "b_major": variant.b_major,
                    "d_dtype": either if variant.d_dtype == "16bit" else variant.d_dtype,
                    "c_dtype": either if variant.c_dtype == "16bit" else variant.c_dtype,
                    "bias_dtype": config.D_DTYPES[len(size) % 3] if bias else None,
                    "a": A,
                    "b": {"dense": B, "pointers": POINTERS, "tuple": 0}[weights],
                    "c": C if variant.c_dtype else 0,
                    "scratch": SCRATCH if weights != "dense" or dynamic else 0,
                    "alpha": ALPHA if scaled else 0,
                    "prob": PROB if scaled and size != "odd" else 0,  # either may be missing
                    "bias": BIAS if bias else 0,
                },
            }


def wgrad_calls():
    for (v, variant), (s, (size, extents)) in itertools.product(enumerate(WGRAD), enumerate(SIZES.items())):
        dynamic, _, without_alpha = in_turn(v + s)
        yield {
            "id": f"{variant.name}, {size}",
            "kind": "wgrad",
            "arch": variant.arch,
            "takes": {"d_type": False, "c_type": False},
            "kernel": variant.name,
            "prologue": None,
            "prologues": 0,
            "maps_bytes": 0,
            "max_clusters": MAX_CLUSTERS,
            "weight_addresses": None,
            "problem": {
                **common(variant, v + s, size, extents),
                "d_dtype": variant.d_dtype,
                "accumulate": variant.accumulate,
                "x": X,
                "y": Y,
                "alpha": 0 if without_alpha == 0 else ALPHA,
                "scratch": SCRATCH if dynamic else 0,
            },
        }


CALLS = {call["id"]: call for call in itertools.chain(forward_calls(), wgrad_calls())}


def run(*command, **options):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # imports what this process would
    done = subprocess.run(list(map(str, command)), env=env, stdout=subprocess.PIPE, text=True, **options)
    assert done.returncode == 0, done.stdout
    return done.stdout


def cuda_include():
    spec = importlib.util.find_spec("nvidia")
    folders = [pathlib.Path(folder) for folder in (spec.submodule_search_locations or [] if spec else [])]
    headers = sorted(path for folder in folders for path in folder.glob("*/include/cuda.h"))
    return headers[-1].parent if headers else "/usr/local/cuda/include"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Shared libraries: the stand-in, and the DSL's host code of every kernel."""
    folder = tmp_path_factory.mktemp("host_code")

    def compile_kernels(arch):
        names = [variant.name for variant in VARIANTS + WGRAD if variant.arch == arch]
        names += [config.prologue_name(arch, source) for source in ("memory", "value")]
        run(sys.executable, "-m", "tests.host_code.compile_kernels", arch, folder, *names)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(compile_kernels, config.TILES))
    flags = ["-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-isystem", cuda_include(), "-Wl,-soname,libcuda.so.1"]
    run("cc", *flags, "-o", folder / "libcuda.so.1", HERE / "stand_in.c")
    return folder


@pytest.fixture(scope="module")
def recorded(folder):
    launches = run(
        sys.executable, "-m", "tests.host_code.record", folder, BUILD, input=json.dumps(list(CALLS.values()))
    )
    return dict(zip(CALLS, json.loads(launches), strict=True))


def decode(tensor_map):
    """(what a tensor map's bytes say, the bits that are not accounted for)."""
    words = [int.from_bytes(tensor_map[i : i + 4], "little") for i in range(0, 4 * MAP_WORDS, 4)]
    rank = 1 + (words[2] >> 4 & 7)
    strides = [(words[3 + i] | (words[7] >> 4 * i & 15) << 32) << 4 for i in range(rank - 1)]
    said = {
        "address": words[0] | words[1] << 32,
        "element": words[2] >> 7 & 15,
        "swizzle": words[2] >> 13 & 3,
        "dims": [words[8 + i] + 1 for i in range(rank)],
        "strides": strides,
        "box": [tensor_map[55 + i] + 1 for i in range(rank)],
    }
    rest = bytearray(tensor_map[: 4 * MAP_WORDS])
    rest[0:8] = bytes(8)
    rest[8:12] = (words[2] & ~(7 << 4 | 15 << 7 | 3 << 13)).to_bytes(4, "little")
    rest[12 : 12 + 4 * (rank - 1)] = bytes(4 * (rank - 1))
    rest[28:32] = (words[7] >> 4 * (rank - 1) << 4 * (rank - 1)).to_bytes(4, "little")
    rest[32 : 32 + 4 * rank] = bytes(4 * rank)
    rest[55 : 55 + rank] = bytes(rank)
    return said, [int.from_bytes(rest[i : i + 4], "little") for i in range(0, 4 * MAP_WORDS, 4)]


def arguments_as_decoded(arguments):
    """What the arguments of cuTensorMapEncodeTiled mean, in a map's own terms."""
    elements = {6: 6, 7: 7, 9: 10}  # CU_TENSOR_MAP_DATA_TYPE_FLOAT16, FLOAT32, BFLOAT16
    # No gaps between elements, no interleaving, zeros where there is nothing to load.
    assert arguments["element_strides"] == [1] * len(arguments["dims"])
    assert arguments["interleave"] == arguments["fill"] == 0
    said = {key: arguments[key] for key in ("address", "swizzle", "dims", "strides", "box")}
    return said | {"element": elements[arguments["type"]]}


def either_of_16_bits(call):
    """Maps of outputs whose type the DSL does not know: it takes them for bfloat16, ours is told."""
    return [field for field, takes in (("MAP_C", "c_type"), ("MAP_D", "d_type")) if CALLS[call]["takes"][takes]]


@pytest.mark.parametrize("call", CALLS)
def test_same_launches(recorded, call):
    ours, theirs = recorded[call]["ours"], recorded[call]["theirs"]
    assert len(ours) == len(theirs) == CALLS[call]["prologues"] + 1
    for our, their in zip(ours, theirs, strict=True):
        for what in ("kernel", "symbol", "grid", "block", "cluster", "shared_bytes", "stream"):
            assert our[what] == their[what], what
        # The DSL spells out what is off: cooperative launch, dependent launch.
        assert our["attributes"] == {}
        assert not any(their["attributes"].values())


@pytest.mark.parametrize("call", CALLS)
def test_same_parameters(recorded, call):
    maps = recorded[call]["maps"]
    for our, their in zip(recorded[call]["ours"], recorded[call]["theirs"], strict=True):
        assert [field for field, _ in our["fields"]] == [field for field, _ in their["fields"]]
        for (field, our_value), (_, their_value) in zip(our["fields"], their["fields"], strict=True):
            if field.startswith("MAP_") and our["kernel"] == CALLS[call]["kernel"]:
                arguments = maps[int.from_bytes(bytes.fromhex(our_value)[:4], "little")]
                said, rest = decode(bytes.fromhex(their_value))
                if field in either_of_16_bits(call):
                    said["element"] = {"float16": 6, "bfloat16": 10}[
                        CALLS[call]["problem"][f"{field[-1].lower()}_dtype"]
                    ]
                assert arguments_as_decoded(arguments) == said, field
                # The rest is not documented: the same in every map, and bit 21 of word 2 where a tensor has 128 KiB or
                # more. It holds L2 promotion, which ours sets to 128 bytes and the DSL leaves at its default.
                rest[2] &= ~(1 << 21)
                assert rest == [0, 0, 0x40002, *[0] * (MAP_WORDS - 3)], field
                assert arguments["l2_promotion"] == 2
            else:
                assert our_value == their_value, field


def test_every_option_is_met():
    """By every kernel and at every size, each of the options that take turns; and groups that are fewer than experts, and more."""
    for key in ("kernel", "size"):
        met = {}
        for name, call in CALLS.items():
            problem = call["problem"]
            option = problem["dynamic"], problem["experts"] != 0
            what = (call["kind"], name.rpartition(", ")[2]) if key == "size" else call["kernel"]
            met.setdefault(what, set()).add(option)
        assert all(len(options) == 4 for options in met.values())
    mapped = [(call["kind"], call["problem"]) for call in CALLS.values() if call["problem"]["experts"]]
    compared = {(kind, (p["groups"] > p["l"]) - (p["groups"] < p["l"])) for kind, p in mapped}
    assert {(kind, sign) for kind in ("forward", "wgrad") for sign in (-1, 1)} <= compared


@pytest.mark.parametrize("call", [name for name, call in CALLS.items() if call["prologue"]])
def test_prologues_copy_the_map_of_the_forward_kernel(recorded, call):
    *prologues, forward = recorded[call]["ours"]
    (template,) = (value for field, value in forward["fields"] if field == "MAP_B")
    assert [value for launch in prologues for field, value in launch["fields"] if field == "MAP_B"] == (
        [template] * len(prologues)
    )


def test_host_code_is_that_of_the_built_kernels(folder):
    changed = [
        path.stem for path in folder.glob("*.cubin") if path.read_bytes() != (BUILD / "aot" / path.name).read_bytes()
    ]
    assert changed == []


@pytest.mark.parametrize("call", CALLS)
def test_counter_of_a_dynamic_schedule(recorded, call):
    """Set to zero ahead of everything, in scratch behind the maps; the DSL's host code knows nothing of it."""
    problem = CALLS[call]["problem"]
    address = problem["scratch"] + CALLS[call]["maps_bytes"]
    wanted = [{"memset": address, "value": 0, "count": 1, "stream": STREAM}] if problem["dynamic"] else []
    assert recorded[call]["memsets"] == wanted
