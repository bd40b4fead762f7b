"""The file of what was tuned: the fastest kernel found for a call's static facts, by measurement.

`tuning` writes it. It is looked up where a program is lowered; the environment variable FILE names one from the start.
"""

import dataclasses
import functools
import json
import os
import pathlib

from jax_grouped_gemm import calls, config, contract, log

FILE = "JAX_GROUPED_GEMM_TUNED"
FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Entry:
    """seconds: of a call, in the mean of the loads that it was timed with; of_rule: the same, with what the rule chooses."""

    tile: config.Tile
    dynamic: bool
    seconds: float
    of_rule: float


def key(arch, call):
    """What a choice depends on, as the file spells it. Whether an operand is there matters as far as the kernel differs."""
    facts = {"arch": arch, "groups": call.groups, "m": call.m, "n": call.n, "k": call.k}
    if isinstance(call, calls.WgradCall):
        return {"product": "wgrad", **facts, "l": call.l, "d_dtype": call.d_dtype, "accumulate": call.accumulate}
    epilogue, d_dtype = config.epilogue_of(
        scaled=call.has_alpha or call.has_prob, bias=call.has_bias, d_dtype=call.d_dtype, c_dtype=call.c_dtype
    )
    return {"product": "forward", **facts, "b_major": call.b_major, "epilogue": epilogue, "d_dtype": d_dtype}


def entry(arch, call):
    """Of what is in use, or None. An entry whose tile this build does not have counts as none, and is logged."""
    return _in_use().get(_frozen(key(arch, call)))


def use(path):
    """Programs that are lowered from now on get what this file says; None: what the rule says. Those compiled before stay as they are.

    A tile or a schedule that a call names goes before it. By default the file that the environment variable
    JAX_GROUPED_GEMM_TUNED names is used, if it is set.

    Args:
      path: of a file that `tune` wrote, or None.

    Raises:
      ValueError: the file is none that `tune` wrote.
      OSError: it cannot be read.
    """
    global _chosen
    _chosen = {} if path is None else read(path)


_chosen: dict | None = None  # until `use` says otherwise, that of the environment


def _in_use():
    return _of_environment() if _chosen is None else _chosen


@functools.cache
def _of_environment():
    path = os.environ.get(FILE)
    return read(path) if path else {}


def read(path):
    """{what it depends on: Entry}"""
    text = pathlib.Path(path).read_text()
    try:
        content = json.loads(text)
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']!r}")
        return dict(filter(None, map(_parse, content["entries"])))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise contract.not_tuned(path, f"{type(error).__name__}: {error}") from None


def _parse(record):
    record = dict(record)
    wish = tuple(record.pop("mma_tiler_mn")), tuple(record.pop("cluster_shape_mn"))
    dynamic, seconds, of_rule = record.pop("use_dynamic_sched"), record.pop("seconds"), record.pop("seconds_of_rule")
    compiled = {"forward": config.TILES, "wgrad": config.WGRAD_TILES}[record["product"]]
    tiles = config.wished(compiled[record["arch"]], *wish)
    if not tiles:
        log.once(f"{record['product']} is tuned to {wish}, a tile that this build does not have: tune again")
        return None
    return _frozen(record), Entry(tiles[0], bool(dynamic), float(seconds), float(of_rule))


def write(path, entries):
    """entries: as `read` returns. An entry is a line, in an order of its own, so that a change of one shows as one."""
    lines = [json.dumps(dict(facts) | _record(entry)) for facts, entry in sorted(entries.items())]
    body = ",\n".join(f"  {line}" for line in lines)
    pathlib.Path(path).write_text(f'{{\n "format": {FORMAT},\n "entries": [\n{body}\n ]\n}}\n')


def _record(entry):
    return {
        "mma_tiler_mn": entry.tile.mma_tiler_mn,
        "cluster_shape_mn": entry.tile.cluster_shape_mn,
        "use_dynamic_sched": entry.dynamic,
        "seconds": float(f"{entry.seconds:.4g}"),
        "seconds_of_rule": float(f"{entry.of_rule:.4g}"),
    }


def _frozen(facts):
    return tuple(sorted(facts.items()))
