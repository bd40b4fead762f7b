"""Meshes, problems and their shardings, for tests of several devices."""

import contextlib
import math
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_grouped_gemm import grouped_gemm

L, M, N, K = 16, 96, 64, 32
OFFSETS = [3, 3, 15, 17, 30, 31, 31, 45, 50, 57, 60, 66, 67, 78, 85, 90]
KINDS = {
    "plain": {"alpha": False, "prob": False},
    "scaled": {"generate_c": True, "c_dtype": "float32"},
    "bias": {"bias": "float32", "generate_c": True},
}
# A text, as conftest imports this before it has chosen the number of devices.
needs_eight = pytest.mark.skipif('len(__import__("jax").devices("cpu")) < 8', reason="fewer than 8 CPU devices")


def make_mesh(**options):
    return jax.sharding.Mesh(np.array(jax.devices("cpu")[:8]).reshape(4, 2), ("x", "y"), **options)


def explicit_mesh():
    return make_mesh(axis_types=(jax.sharding.AxisType.Explicit,) * 2)


def put(mesh, x, spec):
    return jax.device_put(x, NamedSharding(mesh, spec))


def make(kind="plain", seed=0, **options):
    return oracle.make_case(np.random.default_rng(seed), L, M, N, K, **({"offsets": OFFSETS} | KINDS[kind] | options))


def split(case):
    """(arrays by name, options)."""
    arguments = case.arguments()
    arrays = {name: x for name, x in arguments.items() if isinstance(x, jax.Array)}
    return arrays, {name: x for name, x in arguments.items() if name not in arrays}


def specs(rows, weights):
    """Of all operands, for those of a and b."""
    columns = [*weights, None, None][1]
    return {"a": rows, "b": weights, "offsets": P(), "alpha": P(), "prob": P(*rows[:1]), "bias": P(None, columns)}


def collectives(text):
    """[(operation, shape)] of a compiled program."""
    found = []
    for line in text.splitlines():
        match = re.search(
            r" = (.*?) (all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute)(-start)?\(", line
        )
        if match:
            for shape in re.findall(r"\w+\[([\d,]*)\]", match[1]):
                found.append((match[2], tuple(map(int, filter(None, shape.split(","))))))
    return found


def assert_weights_stay(found):
    """Nothing of the size of the weights of a quarter of the experts, which is more than all rows have, is moved; sums may be."""
    for operation, shape in found:
        assert operation in ("all-reduce", "reduce-scatter") or math.prod(shape) <= M * max(N, K), (operation, shape)


@contextlib.contextmanager
def use_partitioner(name):
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", name == "shardy")
    try:
        yield
    finally:
        jax.config.update("jax_use_shardy_partitioner", before)


# Specs of a and of b (L, N, K), what the forward pass moves, and whether it may take other ways on some versions.
LAYOUTS = {
    "rows": (P("x"), P(), set()),
    "columns": (P(), P(None, "x"), set()),
    "contraction": (P(), P(None, None, "x"), {"all-reduce"}),
    "contraction of a alone": (P(None, "x"), P(), {"all-reduce"}),
    "experts": (P(), P("x"), {"all-reduce"}),
    "rows and columns": (P("x"), P(None, "y"), set()),
    "rows and contraction": (P("y", "x"), P(None, None, "x"), {"all-reduce"}),
    "rows and experts": (P("y"), P("x"), {"all-reduce"}),
    "columns and contraction": (P(None, "x"), P(None, "y", "x"), {"all-reduce"}),
    "columns and experts": (P(), P("x", "y"), {"all-reduce"}),
    "contraction and experts": (P(None, "y"), P("x", None, "y"), {"all-reduce"}),
    "rows and experts over one axis": (P("x"), P("x"), {"all-gather", "reduce-scatter"}),
    "rows over two, experts over the first": (P(("x", "y")), P("x"), {"all-gather", "reduce-scatter", "collective-permute"}),
    "rows over two, experts over the second": (P(("x", "y")), P("y"), {"all-gather", "reduce-scatter"}),
    "rows and experts, and columns": (P("x"), P("x", "y"), {"all-gather", "reduce-scatter"}),
    "rows and columns over one axis": (P("x"), P(None, "x"), None),
    "rows and contraction over one axis": (P("x"), P(None, None, "x"), None),
}  # fmt: skip


def of_result(rows, weights):
    """The spec of D that its user asks for."""
    columns = [*weights, None, None][1]
    return P(rows[0] if rows else None, None if rows and columns == rows[0] else columns)


def both(case, call=None):
    """(arrays, cotangents of the outputs) -> (what `call` makes of the arrays, the cotangents of all floating ones by name)."""
    _, options = split(case)
    call = call or (lambda arrays: grouped_gemm(**arrays, **options))

    def run(arrays, outputs):
        moving = {name: arrays[name] for name in oracle.present(case)}
        found, pull = jax.vjp(lambda moving: call({"offsets": arrays["offsets"]} | moving), moving)
        return found, pull(outputs if case.generate_c else outputs[0])[0]

    return run


def pulled(case):
    """The latter alone."""
    return lambda arrays, outputs: both(case)(arrays, outputs)[1]


def random_outputs(case, seed=7):
    return oracle.random_cotangents(np.random.default_rng(seed), case)


def refused(text):
    """By a rule that XLA calls."""
    return pytest.raises(Exception, match=re.escape(text))


def local_ends(offsets, m):
    """Of the rows of this device along x."""
    return jnp.clip(offsets - jax.lax.axis_index("x") * m, 0, m)


def set_mesh(mesh):
    return jax.set_mesh(mesh) if hasattr(jax, "set_mesh") else jax.sharding.use_mesh(mesh)
