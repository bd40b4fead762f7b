"""The file of what was tuned: the fastest kernel found for a call's static facts, by measurement.

`tuning` writes it. It is looked up where a program is lowered; the environment variable FILE names one from the start.
"""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import tempfile

import jax

from jax_grouped_gemm import calls, config, contract, log

FILE = "JAX_GROUPED_GEMM_TUNED"
FORMAT = 1

# What remembers programs or kernels that were chosen before.
forget = [jax.clear_caches]


@dataclasses.dataclass(frozen=True)
class Entry:
    """seconds: of a call, in the mean of the loads that it was timed with; of_rule: the same, with what the rule chooses."""

    tile: config.Tile
    dynamic: bool
    seconds: float
    of_rule: float


def key(arch, call):
    """What a choice depends on, as the file spells it: whether an operand is there matters as far as the kernel differs."""
    facts = {"arch": arch, "l": call.l, "groups": call.groups, "m": call.m, "n": call.n, "k": call.k}
    facts["overlap_margin"] = call.overlap_margin
    if isinstance(call, calls.WgradCall):
        return _frozen({"product": "wgrad", **facts, "d_dtype": call.d_dtype, "accumulate": call.accumulate})
    epilogue, d_dtype = config.epilogue_of(
        scaled=call.has_alpha or call.has_prob, bias=call.has_bias, d_dtype=call.d_dtype, c_dtype=call.c_dtype
    )
    return _frozen({"product": "forward", **facts, "b_major": call.b_major, "epilogue": epilogue, "d_dtype": d_dtype})


def _frozen(facts):
    return tuple(sorted(facts.items()))


def entry(arch, call):
    """Of what is in use, or None."""
    return in_use().get(key(arch, call))


# --- what is in use ---------------------------------------------------------------------------------------------------


def use(path):
    """Programs get what this file says instead of what the rule says, and nothing else that was tuned; None: the rule alone.

    Compiled programs are forgotten (`jax.clear_caches`), so that all are lowered anew at their next call. A tile or a schedule
    that a call names goes before the file. At first the one that the environment variable JAX_GROUPED_GEMM_TUNED names is
    used, if it is set.

    Args:
      path: of a file that `tune` wrote, or None.

    Raises:
      ValueError: the file is none that `tune` wrote.
      OSError: it cannot be read.
    """
    _choose({} if path is None else read(path))


def add(entries):
    """To what is in use."""
    _choose(in_use() | entries)


@contextlib.contextmanager
def nothing():
    """The rule alone, meanwhile."""
    before = in_use()
    _choose({})
    try:
        yield
    finally:
        _choose(before)


_chosen: dict | None = None  # until it is chosen, that of the environment


def _choose(entries):
    global _chosen
    _chosen = entries
    for each in forget:
        each()


def in_use():
    return _of_environment() if _chosen is None else _chosen


@functools.cache
def _of_environment():
    path = os.environ.get(FILE)
    if not path:
        return {}
    try:
        return read(path)
    except (OSError, ValueError) as error:
        raise contract.no_tuned_file(FILE, path, error) from None


# --- the file ---------------------------------------------------------------------------------------------------------


def read(path):
    """{what it depends on: Entry}. What is tuned to a tile that this build does not have is left out, and logged."""
    text = pathlib.Path(path).read_bytes()
    try:
        content = json.loads(text)
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']!r}")
        entries = {}
        for record in content["entries"]:
            facts, found = _parse(dict(record))
            if found is None:
                log.once(f"{path}: {dict(facts)} is tuned to a tile that this build does not have: tune again")
            else:
                entries[facts] = found
        return entries
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise contract.not_tuned(path, f"{type(error).__name__}: {error}") from None


def _parse(record):
    wish = tuple(record.pop("mma_tiler_mn")), tuple(record.pop("cluster_shape_mn"))
    dynamic, seconds, of_rule = record.pop("use_dynamic_sched"), record.pop("seconds"), record.pop("seconds_of_rule")
    if not isinstance(dynamic, bool):
        raise TypeError(f"use_dynamic_sched {dynamic!r}")
    tiles = config.wished(config.tiles(record["product"]).get(record["arch"], ()), *wish)
    return _frozen(record), Entry(tiles[0], dynamic, float(seconds), float(of_rule)) if tiles else None


def merge(path, entries):
    """Into the file, which keeps what it has for other calls. An entry is a line, in an order of its own, so that a change
    of one shows as one. Nobody sees half a file."""
    path = pathlib.Path(path)
    entries = (read(path) if path.exists() else {}) | entries
    lines = [json.dumps(dict(facts) | _record(entry)) for facts, entry in sorted(entries.items(), key=_order)]
    body = ",\n".join(f"  {line}" for line in lines)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        file.write(f'{{\n "format": {FORMAT},\n "entries": [\n{body}\n ]\n}}\n')
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


def _order(item):
    facts = dict(item[0])
    return facts["product"], item[0]


def _record(entry):
    return {
        "mma_tiler_mn": entry.tile.mma_tiler_mn,
        "cluster_shape_mn": entry.tile.cluster_shape_mn,
        "use_dynamic_sched": entry.dynamic,
        "seconds": float(f"{entry.seconds:.4g}"),
        "seconds_of_rule": float(f"{entry.of_rule:.4g}"),
    }
