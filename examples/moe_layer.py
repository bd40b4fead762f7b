"""A mixture-of-experts layer on `jax_grouped_gemm`, end to end, on a real text.

    python examples/moe_layer.py            # small on a CPU, a Qwen-like layer on a GPU
    python examples/moe_layer.py --help     # every size is a flag

The layer is four functions, `route`, `dispatch`, `experts` and `combine`, under one `jax.jit`. They are meant to be
copied. The rest of the file feeds them, times them, and compares them with a float64 oracle and `jax.lax.ragged_dot`.
"""

import argparse
import functools
import pydoc_data.topics
import statistics
import sys
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_grouped_gemm import grouped_gemm, info

# --- The layer: copy from here ---------------------------------------------------------------------------------------


class Params(NamedTuple):
    """E experts, model width W, hidden width F."""

    router: jax.Array  # (W, E) float32
    up: jax.Array  # (E, W, 2F) bfloat16, gate and value side by side
    down: jax.Array  # (E, F, W) bfloat16


def route(params, x, top_k):
    """Chooses top_k experts for each row of x (T, W). Returns their weights and indices, both (T, top_k)."""
    # Full float32: the default would round to TF32 on a GPU and flip close decisions.
    logits = jnp.dot(x.astype(jnp.float32), params.router, precision="highest")
    weights, chosen = jax.lax.top_k(jax.nn.softmax(logits), top_k)
    return weights / weights.sum(axis=-1, keepdims=True), chosen


def dispatch(x, chosen, num_experts):
    """Sorts the T * top_k (token, expert) pairs by expert.

    Returns the rows (T * top_k, W), the order that sorted them, and the number of rows of each expert. No padding and
    no capacity limit: an expert gets as many rows as were routed to it, be it none.
    """
    order = jnp.argsort(chosen.reshape(-1), stable=True)
    group_sizes = jnp.bincount(chosen.reshape(-1), length=num_experts).astype(jnp.int32)
    return x[order // chosen.shape[-1]], order, group_sizes


def experts(params, rows, group_sizes, prob):
    """SwiGLU experts over rows sorted by expert; the second product scales each row by its routing weight."""
    up = grouped_gemm(rows, params.up, group_sizes=group_sizes, b_major="n")
    gate, value = jnp.split(up.astype(jnp.float32), 2, axis=-1)
    hidden = (jax.nn.silu(gate) * value).astype(rows.dtype)
    return grouped_gemm(hidden, params.down, group_sizes=group_sizes, b_major="n", prob=prob)


def combine(rows, order, top_k):
    """Brings the rows back into token order and adds each token's top_k contributions, in float32."""
    return rows[jnp.argsort(order)].reshape(-1, top_k, rows.shape[-1]).sum(axis=1, dtype=jnp.float32)


def moe_layer(params, x, top_k, experts=experts):
    """The layer. Returns its output (T, W) in float32, and the chosen experts for inspection."""
    weights, chosen = route(params, x, top_k)
    rows, order, group_sizes = dispatch(x, chosen, params.router.shape[-1])
    out = experts(params, rows, group_sizes, weights.reshape(-1)[order])
    return combine(out, order, top_k), chosen


# --- To here. The same experts on JAX's own op, for comparison -------------------------------------------------------


def experts_ragged_dot(params, rows, group_sizes, prob):
    """`experts` with `jax.lax.ragged_dot`, which has no row scale: that is one more pass over the output."""
    up = jax.lax.ragged_dot(rows, params.up, group_sizes)
    gate, value = jnp.split(up.astype(jnp.float32), 2, axis=-1)
    hidden = (jax.nn.silu(gate) * value).astype(rows.dtype)
    out = jax.lax.ragged_dot(hidden, params.down, group_sizes)
    return (prob[:, None] * out.astype(jnp.float32)).astype(rows.dtype)


# --- Data, oracle, timing --------------------------------------------------------------------------------------------


def text_tokens(count):
    """The first `count` bytes of Python's own help texts, repeated if they run out: (count,) uint8."""
    text = "\n".join(pydoc_data.topics.topics.values()).encode()
    return np.resize(np.frombuffer(text, np.uint8), count)


def embed(tokens, width, key):
    """Each token's input: random vectors of its byte and the two before it, so that equal bytes differ by context."""
    tables = jax.random.normal(key, (3, 256, width)) / np.sqrt(3)
    return sum(table[np.roll(tokens, shift)] for shift, table in enumerate(tables)).astype(jnp.bfloat16)


def init_params(num_experts, width, hidden, key):
    """Random weights of the usual scale."""
    keys = jax.random.split(key, 3)

    def normal(key, *shape, dtype):
        # Generated in the final type: a float32 detour would double the memory.
        return jax.random.normal(key, shape, dtype) / np.asarray(np.sqrt(shape[-2]), dtype)

    return Params(
        router=normal(keys[0], width, num_experts, dtype=jnp.float32),
        up=normal(keys[1], num_experts, width, 2 * hidden, dtype=jnp.bfloat16),
        down=normal(keys[2], num_experts, hidden, width, dtype=jnp.bfloat16),
    )


def oracle(params, x, chosen):
    """The layer in float64 for the rows of x, given only which experts were chosen.

    Returns the output and the largest margin by which an expert left out beats a chosen one (at most rounding).
    """
    x = np.asarray(x, np.float64)
    logits = x @ np.asarray(params.router, np.float64)
    picked = np.take_along_axis(logits, chosen, axis=-1)
    others = logits.copy()
    np.put_along_axis(others, chosen, -np.inf, axis=-1)
    weights = np.exp(picked - picked.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    out = np.zeros_like(x)
    for expert in np.unique(chosen):
        token, slot = np.nonzero(chosen == expert)
        up = x[token] @ np.asarray(params.up[expert], np.float64)
        gate, value = np.split(up, 2, axis=-1)
        rows = (gate / (1 + np.exp(-gate)) * value) @ np.asarray(params.down[expert], np.float64)
        out[token] += weights[token, slot, None] * rows
    return out, (others.max(axis=-1) - picked.min(axis=-1)).max()


def seconds_per_call(function, *args, calls, repeats=5):
    """Median over `repeats` of `calls` calls queued together, after a warm-up call."""
    jax.block_until_ready(function(*args))
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls):
            result = function(*args)
        jax.block_until_ready(result)
        samples.append((time.perf_counter() - start) / calls)
    return statistics.median(samples)


# bfloat16 rounds the gate/value rows, the hidden rows and each contribution, by 2^-9 at most; routing weights only mix.
# The four roundings add up to about 0.4 % of a token's length, and an indexing error to more than 100 %.
TOLERANCE = 1e-2


def measure(params, x, experts_function, args):
    """Compiles and runs the layer on one implementation. Returns its output, choices, and figures for the table."""
    layer = jax.jit(functools.partial(moe_layer, top_k=args.top_k, experts=experts_function))
    compiled = layer.lower(params, x).compile()
    out, chosen = jax.block_until_ready(compiled(params, x))

    @jax.jit
    def routed(params, x):
        weights, chosen = route(params, x, args.top_k)
        rows, order, group_sizes = dispatch(x, chosen, args.experts)
        return rows, group_sizes, weights.reshape(-1)[order]

    rows, group_sizes, prob = routed(params, x)
    memory = compiled.memory_analysis()
    figures = {
        "layer": seconds_per_call(compiled, params, x, calls=args.calls),
        "experts": seconds_per_call(jax.jit(experts_function), params, rows, group_sizes, prob, calls=args.calls),
        "temporary": None if memory is None else memory.temp_size_in_bytes,
    }
    return out, chosen, np.asarray(group_sizes), figures


def relative_error(out, expected):
    """Largest error of a token's output vector relative to that vector's length."""
    error = np.linalg.norm(np.asarray(out, np.float64) - expected, axis=-1)
    return (error / np.linalg.norm(expected, axis=-1)).max()


def parse_args(argv, platform):
    gpu = platform == "gpu"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])

    def positive(text):
        if int(text) < 1:
            raise argparse.ArgumentTypeError(f"{text} is not positive")
        return int(text)

    def size(flag, on_gpu, on_cpu, text):
        parser.add_argument(
            flag, type=positive, default=on_gpu if gpu else on_cpu, help=f"{text} (default: %(default)s)"
        )

    size("--tokens", 8192, 1024, "bytes of text")
    size("--width", 2048, 256, "model width, a multiple of 8")
    size("--hidden", 1536, 256, "hidden width of an expert, a multiple of 8")
    size("--experts", 64, 8, "number of experts")
    size("--top-k", 8, 2, "experts per token")
    size("--calls", 10, 1, "calls queued per timing sample")
    size("--check", 256, 1024, "tokens compared with the float64 oracle")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-compare", action="store_true", help="skip jax.lax.ragged_dot")
    args = parser.parse_args(argv)
    for flag in ("width", "hidden"):
        if getattr(args, flag) % 8:
            parser.error(f"--{flag} must be a multiple of 8; got {getattr(args, flag)}")
    if args.top_k > args.experts:
        parser.error(f"--top-k must be at most --experts = {args.experts}; got {args.top_k}")
    return args


def main(argv=None):
    device = jax.devices()[0]
    choice = info.collect()["implementation"]
    args = parse_args(argv, device.platform)
    keys = jax.random.split(jax.random.key(args.seed), 2)
    x = embed(text_tokens(args.tokens), args.width, keys[0])
    params = init_params(args.experts, args.width, args.hidden, keys[1])
    rows = args.tokens * args.top_k
    flops = 2 * rows * args.width * 3 * args.hidden  # up is (W, 2F), down is (F, W)

    print(f"device           {device.device_kind} ({device.platform}), jax {jax.__version__}")
    print(f"implementation   {choice['name']}: {choice['why']}")
    print(f"layer            {args.tokens} tokens, {args.experts} experts, top {args.top_k}: {rows} rows")
    print(f"                 width {args.width}, hidden {args.hidden}, {flops / 1e9:.4g} GFLOP in the grouped products")

    out, chosen, group_sizes, ours = measure(params, x, experts, args)
    print(f"rows per expert  {group_sizes.min()} to {group_sizes.max()}, mean {group_sizes.mean():.4g}")

    # Spread over the whole text, so that every expert's rows are likely to be among them.
    subset = np.linspace(0, args.tokens - 1, min(args.check, args.tokens)).astype(int)
    expected, margin = oracle(params, np.asarray(x)[subset], np.asarray(chosen)[subset])
    error = relative_error(np.asarray(out)[subset], expected)
    table = [("grouped_gemm", ours, error)]
    note = ""
    if not args.no_compare:
        try:
            other, _, _, figures = measure(params, x, experts_ragged_dot, args)
            table.append(("jax.lax.ragged_dot", figures, relative_error(np.asarray(other)[subset], expected)))
        except jax.errors.JaxRuntimeError as failure:  # most likely out of memory
            note = f"jax.lax.ragged_dot failed: {str(failure).splitlines()[0]}"

    print(f"\n{'':20}{'layer':>12}{'experts':>12}{'TFLOP/s':>10}{'temporary':>12}{'error':>10}")
    for name, figures, value in table:
        temporary = "-" if figures["temporary"] is None else f"{figures['temporary'] / 2**20:.1f} MiB"
        print(
            f"{name:20}{figures['layer'] * 1e3:>9.3f} ms{figures['experts'] * 1e3:>9.3f} ms"
            f"{flops / figures['experts'] / 1e12:>10.4g}{temporary:>12}{value:>10.2e}"
        )
    print(
        "\nlayer: the whole jitted layer. experts: both grouped products and the activation between them; TFLOP/s of these."
    )
    print("temporary: peak temporary memory of the layer. error: worst token against float64, relative.")
    if note:
        print(note)

    # Not `error > TOLERANCE`: NaN must fail too.
    if not error <= TOLERANCE or not margin <= 1e-4:
        print(
            f"FAILED: error {error:.2e} (limit {TOLERANCE}), routing margin {margin:.1e} (limit 1e-4)", file=sys.stderr
        )
        return 1
    print(f"OK: {len(subset)} tokens agree with float64 within {TOLERANCE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
