"""A whole mixture-of-experts layer, forward and backward: on the kernels, on JAX's ragged_dot, and on ragged_dot accelerated.

    python -m benchmarks.layer                     # on an H200, a minute
    python -m benchmarks.layer --smoke             # tiny, any machine

Where google-tunix is installed, its Gemma 4 layer too, unmodified, before and after `jax_grouped_gemm.accelerate()`.

All arms have the same operands; gradients of every operand are compared with those of JAX's own before anything is timed.
Interleaved, as in `benchmarks.run`.
"""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# JAX's ragged_dot needs it: XLA's trial runs while it compiles take several of its temporaries.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")

import argparse
import dataclasses
import datetime
import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jax_grouped_gemm
from benchmarks import figures, public_layer, report
from benchmarks.run import progress
from jax_grouped_gemm.nn import routing
from jax_grouped_gemm.timing import Arm, calibrate, interleave, summarize


@dataclasses.dataclass(frozen=True)
class Layer:
    """T tokens of `width`, each sent to k of `experts`, which are SwiGLU MLPs with `hidden` units."""

    name: str
    experts: int
    k: int
    tokens: int
    width: int
    hidden: int

    @property
    def flops(self):
        """Of the experts' three products and their six gradients."""
        return 3 * 3 * 2 * self.tokens * self.k * self.width * self.hidden


LAYERS = (
    Layer("8 experts (Mixtral 8x7B)", 8, 2, 8192, 4096, 14336),
    Layer(
        "128 experts (Qwen3 30B-A3B)", 128, 8, 4096, 2048, 768
    ),  # twice the tokens are more than ragged_dot fits in 141 GB
)
SMOKE = (Layer("smoke", 4, 2, 64, 32, 16),)
PUBLIC = Layer("Gemma 4 26B-A4B, of tunix", 128, 8, 1024, 2816, 704)  # with 4096 tokens ragged_dot does not fit
PUBLIC_SMOKE = Layer("Gemma 4's, small, of tunix", 4, 2, 64, 32, 16)


def parameters(layer, seed=0):
    """bfloat16 weights as JAX's ragged_dot takes them, and the tokens."""
    keys = jax.random.split(jax.random.key(seed), 5)
    e, w, f = layer.experts, layer.width, layer.hidden

    def normal(key, shape):
        return (jax.random.normal(key, shape, jnp.float32) / np.sqrt(shape[-2])).astype(jnp.bfloat16)

    weights = {
        "router": normal(keys[0], (w, e)),
        "gate_up": normal(keys[1], (e, w, 2 * f)),
        "down": normal(keys[2], (e, f, w)),
    }
    x = jax.random.normal(keys[3], (layer.tokens, w), jnp.bfloat16)
    cotangent = jax.random.normal(keys[4], (layer.tokens, w), jnp.bfloat16)
    return weights, x, cotangent


def apply(product, k, weights, x):
    """product(rows, weights, sizes, prob or None): of each expert's rows, scaled by prob."""
    logits = jnp.dot(x, weights["router"], preferred_element_type=jnp.float32)
    routed = routing.top_k_route(logits, k)
    hidden = product(routing.dispatch(x, routed), weights["gate_up"], routed.group_sizes, None)
    gate, up = jnp.split(hidden, 2, axis=1)
    rows = product(jax.nn.silu(gate) * up, weights["down"], routed.group_sizes, routing.sorted_probs(routed))
    return routing.combine(rows, routed)


def ours(rows, weights, sizes, prob):
    return jax_grouped_gemm.grouped_gemm(rows, weights, group_sizes=sizes, b_major="n", prob=prob)


def of_jax(rows, weights, sizes, prob):
    d = jax.lax.ragged_dot(rows, weights, sizes)
    return d if prob is None else (d * prob[:, None]).astype(d.dtype)


def gradients(function, weights, x, cotangent):
    """(the layer's result, the gradients of weights and tokens)."""
    out, back = jax.vjp(function, weights, x)
    return out, *back(cotangent)


def compile_arms(functions, operands):
    """{name: compiled}, JAX's own last. functions: {name: (of weights and tokens, whether it is accelerated)}."""
    compiled = {}
    for name, (function, accelerated) in functions.items():
        with jax_grouped_gemm.accelerate(accelerated):
            compiled[name] = jax.jit(functools.partial(gradients, function)).lower(*operands).compile()
    return compiled


def difference(got, want):
    """The largest relative difference of an array, by norms."""

    def of_array(a, b):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b))

    return max(map(of_array, jax.tree.leaves(got), jax.tree.leaves(want)))


def _run(program, operands, _):
    return program(*operands)


def measure(layer, reps):
    functions = {
        "ours": (functools.partial(apply, ours, layer.k), False),
        "accelerated": (functools.partial(apply, of_jax, layer.k), True),
        "ragged_dot": (functools.partial(apply, of_jax, layer.k), False),
    }
    return compare(layer, functions, parameters(layer), reps)


def measure_public(layer, reps):
    graph, state = public_layer.make(layer.experts, layer.k, layer.width, layer.hidden)
    x, cotangent = (
        jax.random.normal(jax.random.key(seed), (1, layer.tokens, layer.width), jnp.bfloat16) for seed in range(2)
    )
    function = functools.partial(public_layer.apply, graph)
    record = compare(
        layer, {"accelerated": (function, True), "ragged_dot": (function, False)}, (state, x, cotangent), reps
    )
    return record | {"google-tunix": public_layer.version()}


def compare(layer, functions, operands, reps):
    progress(f"{layer.name}: compile, check")
    compiled = compile_arms(functions, operands)
    want = compiled["ragged_dot"](*operands)
    record = dataclasses.asdict(layer) | {"flops": layer.flops, "arms": {}}
    for name, program in compiled.items():
        error = difference(program(*operands), want)
        if not error < 0.02:
            raise SystemExit(f"{layer.name}: {name} differs from ragged_dot by {error:.3g} of the norm")
        memory = program.memory_analysis()
        record["arms"][name] = {"difference": error, "temporary_bytes": getattr(memory, "temp_size_in_bytes", None)}
    del want
    ready = {
        name: Arm(functools.partial(_run, program, operands), jax.block_until_ready)
        for name, program in compiled.items()
    }
    for arm in ready.values():
        calibrate(arm, reps, slow_seconds=0.1)
    progress(f"{layer.name}: timing")
    interleave(ready)
    slowest = summarize(ready["ragged_dot"].samples).median
    for name, arm in ready.items():
        median = summarize(arm.samples).median
        record["arms"][name] |= {"samples": arm.samples, "speedup": slowest / median}
        temporary = record["arms"][name]["temporary_bytes"] or 0
        print(
            f"{layer.name:30} {name:12} {median * 1e3:9.3f} ms {layer.flops / median / 1e12:7.1f} TFLOP/s"
            f" {slowest / median:6.1f}x ragged_dot, temporary {temporary / 1e9:.2f} GB",
            flush=True,
        )
    return record


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reps", type=int, default=9)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--match", default="", help="only layers whose name has this text")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args(argv)
    if jax.default_backend() != "gpu" and not args.smoke:
        print("No GPU here: pass --smoke for tiny layers.", file=sys.stderr)
        return 2
    now = datetime.datetime.now(datetime.UTC)
    result = {"date": now.isoformat(timespec="seconds"), "machine": figures.machine()}
    jobs = [(layer, measure) for layer in (SMOKE if args.smoke else LAYERS)]
    if public_layer.found():
        jobs.append((PUBLIC_SMOKE if args.smoke else PUBLIC, measure_public))
    result["layers"] = [run(layer, args.reps) for layer, run in jobs if args.match in layer.name]
    stem = f"{now:%Y%m%d-%H%M%S}-layer{'-smoke' if args.smoke else ''}"
    print(f"wrote {report.write_json(result, args.out, stem)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
