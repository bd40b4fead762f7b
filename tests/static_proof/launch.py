"""One launch of a Blackwell kernel as sentryward takes it: the kernel's PTX, and all that the library would pass to it.

Only kernels with dense weights, whose tensor maps are all parameters, and only the static schedule: the tile counter is null. Group g is expert g's: so are the groups' experts.
"""

import dataclasses
import itertools
import re

from jax_grouped_gemm import config

MATRIX_K = 16  # of one matrix instruction
EPILOGUE_THREADS = 128
ELEMENT = {"bfloat16": ("bf16", 2), "float16": ("f16", 2), "float32": ("f32", 4)}  # sentryward's name, bytes
TYPE_CODE = {"bfloat16": 1, "float16": 2, "float32": 3}  # what TYPE_BIAS, TYPE_C and TYPE_D hold


@dataclasses.dataclass(frozen=True)
class Problem:
    """sizes: rows of each group; rows past the last group are the tail. clusters: of the grid. dtype: of bias, and of C and D where the call says it.

    absent: optional operands left out, of "alpha", "prob" and "bias".
    """

    m: int
    n: int
    k: int
    sizes: tuple[int, ...]
    clusters: int = 1
    dtype: str = "bfloat16"
    absent: frozenset[str] = frozenset()

    def __str__(self):
        absent = f", no {' and '.join(sorted(self.absent))}" if self.absent else ""
        sizes = "+".join(map(str, self.sizes))
        return f"M {self.m} N {self.n} K {self.k}, groups {sizes}, {self.clusters} clusters{absent}"

    @property
    def offsets(self):
        return tuple(itertools.accumulate(self.sizes))

    def tiles(self, tile):
        """(cluster tiles with a contraction, those of the tail)."""
        columns = -(-self.n // tile.n)
        rows = tile.m * tile.cluster_m
        tail = self.m - self.offsets[-1]
        return sum(-(-size // rows) for size in self.sizes) * columns, -(-tail // rows) * columns


def readable(ptx):
    """The PTX without three spellings that sentryward does not read, or reads as more than the machine does.

    tcgen05.mma: the hint says whether A is kept in a buffer, speed only; the mask says which lanes of D are not written, and is all zeros, none.
    Stores of the copy engine: written as if every lane of the warp issued one and the same, where the machine issues one for the warp (UTMASTG). Here an
    elected lane does; else every store would be a race with 31 others, to be believed harmless.
    """
    matrix = re.compile(r"(tcgen05\.mma\S*?)\.collector::a::discard( [^;{]*), \{([^}]*)\}(, %p\d+;)")

    def without_mask(match):
        for register in set(match[3].split(", ")):
            uses = re.findall(rf"^\s*(.*{register}\b.*)$", ptx, re.MULTILINE)
            others = [line for line in uses if match[0] not in line]
            if [" ".join(line.split()) for line in others] != [f"mov.b32 {register}, 0;"]:
                raise ValueError(f"not plainly zero: {register} in {match[0]}: {others}")
        return match[1] + match[2] + match[4]

    text, count = matrix.subn(without_mask, ptx)
    if count != ptx.count("tcgen05.mma") or not count:
        raise ValueError(f"{count} of {ptx.count('tcgen05.mma')} matrix instructions have a mask and a hint")
    text = re.sub(
        r"^\t(cp\.async\.bulk\.tensor\.\dd\.global)",
        r"\telect.sync \t_|%issuer, -1;\n\t@%issuer \1",
        text,
        flags=re.MULTILINE,
    )
    return re.sub(r"^\t\.reg \.pred .*$", r"\g<0>\n\t.reg .pred \t%issuer;", text, count=1, flags=re.MULTILINE)


def describe(facts, problem):
    """The input of sentryward, format `spverify.kernel-input/v1`, from the manifest's facts of a kernel.

    Global memory is objects with names, each apart from all others, of no stated size. D, and C, begin where their tensor maps do: as many rows before
    the first as a box has, which no store reaches.
    """
    cluster_size = facts["cluster"][0] * facts["cluster"][1]
    launch = {
        "grid_dim": [problem.clusters * cluster_size, 1, 1],
        "block_dim": [facts["threads"], 1, 1],
        "cluster_dim": [cluster_size, 1, 1],
        "dynamic_shared_bytes": facts["smem_bytes"],
    }
    values = {
        "DIM_M": problem.m,
        "DIM_N": problem.n,
        "DIM_K": problem.k,
        "DIM_L": len(problem.sizes),
        "DIM_GROUPS": len(problem.sizes),
        "DIM_D_ROWS": problem.m + facts["maps"]["MAP_D"][1],
        **dict.fromkeys(("TYPE_BIAS", "TYPE_C", "TYPE_D"), TYPE_CODE[problem.dtype]),
    }
    maps = tensor_maps(facts, problem)
    absent = {"counter", "experts"} | problem.absent
    description = {key: [] for key in ("declarations", "arguments", "shape_arrays", "tma_descriptors")}
    for field, at, _ in facts["fields"]:
        (index,) = (i for i, (begin, size) in enumerate(facts["params"]) if begin <= at < begin + size)
        place = {"parameter": index, "offset": at - facts["params"][index][0]}
        pointer = {**place, "type": "pointer"}
        name = field.split("_", 1)[1].lower()
        if field in maps:
            description["tma_descriptors"].append(place | maps[field])
        elif field == "PTR_OFFSETS":
            description["shape_arrays"].append(place | {"element_type": "s32", "shapes": [problem.offsets]})
        elif not field.startswith("PTR_"):
            description["arguments"].append({**place, "type": "u32", "value": values[field]})
        elif name in absent:
            description["arguments"].append(pointer | {"value": None})
        else:
            description["declarations"].append(pointer | {"space": "global", "object": name})
    return {
        "schema": "spverify.kernel-input/v1",
        "launch": launch,
        "assumptions": {"duplicate_tma_store_benign": False},
        **description,
    }


def tensor_maps(facts, problem):
    """What `ffi/tensor_map.cc` encodes for each field, but for the address."""
    m, n, k, experts = problem.m, problem.n, problem.k, len(problem.sizes)
    rows = facts["maps"]["MAP_D"][1]
    (d_name, d_bytes), (c_name, c_bytes) = (
        ELEMENT[problem.dtype if dtype in ("16bit", None) else dtype] for dtype in (facts["d_dtype"], facts["c_dtype"])
    )
    of_b = ([k, n, experts], [2 * k, 2 * n * k]) if facts["b_major"] == "k" else ([n, k, experts], [2 * n, 2 * n * k])
    wanted = {
        "MAP_A": ("bf16", [k, m], [2 * k]),
        "MAP_B": ("bf16", *of_b),
        "MAP_D": (d_name, [n, rows, m + rows], [n * d_bytes] * 2),
        "MAP_C": (c_name, [n, rows, m + rows], [n * c_bytes] * 2),
    }
    return {
        field: {
            "object": field.removeprefix("MAP_").lower(),
            "element_type": element,
            "rank": len(shape),
            "global_shape": shape,
            "global_strides_bytes": strides,
            "box_shape": box,
            "element_strides": [1] * len(shape),
            "swizzle": "128B",
            "interleave": "none",
            "oob_fill": "zero",
        }
        for field, box in facts["maps"].items()
        for element, shape, strides in (wanted[field],)
    }


def work(facts, problem):
    """How often instructions are executed in all, by the start of their names: what a proof must have looked at."""
    tile = next(
        tile
        for tile in config.TILES[100]
        if ([tile.m, tile.n], list(tile.cluster_shape_mn)) == (facts["tile"], facts["cluster"])
    )
    ctas = facts["cluster"][0] * facts["cluster"][1]
    contracted, tail = problem.tiles(tile)
    k_tiles = -(-problem.k // tile.k)
    loads_of_b = 1 if facts["b_major"] == "k" else facts["tile"][1] // ctas // facts["maps"]["MAP_B"][0]
    slabs = sum(facts["tile"][1] // facts["maps"][field][0] for field in ("MAP_C", "MAP_D") if field in facts["maps"])
    return {
        "tcgen05.mma": contracted * k_tiles * tile.k // MATRIX_K,
        "tcgen05.commit": contracted * (k_tiles + 1),
        "cp.async.bulk.tensor.2d.shared": contracted * k_tiles * ctas,
        "cp.async.bulk.tensor.3d.shared": contracted * k_tiles * ctas * loads_of_b,
        "cp.async.bulk.tensor.3d.global": (contracted + tail) * slabs * ctas,
        "tcgen05.ld": contracted * slabs * ctas * EPILOGUE_THREADS,
        "atom": 0,
    }
