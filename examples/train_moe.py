"""Trains a small byte-level mixture-of-experts language model on Python's own documentation strings.

    python examples/train_moe.py             # a few minutes on a CPU; a model of 1.7 billion parameters on a GPU
    python examples/train_moe.py --compare   # and the same run on the plain-JAX reference, and ragged_dot's speed
    python examples/train_moe.py --help      # every size is a flag

Needs optax, and matplotlib for the plot: the extra "examples". It fails unless the model ends up better than a bigram
model of the same text, and with --compare unless both curves agree. docs/training.md has figures of such runs.

The file reads from top to bottom: text, baselines, model, training, report. Model and training are meant to be copied.
"""

import argparse
import ast
import dataclasses
import functools
import hashlib
import json
import sys
import sysconfig
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

try:
    import optax
except ModuleNotFoundError as error:
    if error.name != "optax":
        raise
    raise SystemExit("train_moe.py needs optax; got none; install it, e.g. pip install optax") from None

from jax_grouped_gemm import accelerate, grouped_gemm, info
from jax_grouped_gemm.nn import routing


@dataclasses.dataclass(frozen=True)
class Config:
    """Every field is a flag."""

    layers: int = 2
    width: int = 96
    heads: int = 3
    experts: int = 8
    top_k: int = 2
    hidden: int = 128  # of each expert
    sequence: int = 128
    batch: int = 16  # sequences per step
    steps: int = 400
    warmup: int = 40  # steps until the learning rate is at its peak, at most half of all
    learning_rate: float = 3e-3  # at the peak; a cosine takes it to a tenth
    weight_decay: float = 0.1
    balance: float = 0.01  # weight of the load-balancing loss
    report: int = 50  # steps between progress lines
    validation: int = 1 << 16  # bytes of validation text to look at
    seed: int = 0


PRESETS = {
    "small": Config(),
    "large": Config(
        layers=8, width=1024, heads=16, experts=64, hidden=1024, sequence=512, batch=128, steps=200, warmup=40,
        learning_rate=6e-4, report=20, validation=1 << 18,
    ),
}  # fmt: skip

# --- Text and baselines ----------------------------------------------------------------------------------------------

NOT_DOCUMENTATION = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def documentation(folder):
    """The documentation strings of all Python sources below a folder, none twice, in an order that is always the same."""
    found = set()
    for path in folder.rglob("*.py"):
        if NOT_DOCUMENTATION.isdisjoint(path.relative_to(folder).parts):
            tree = ast.parse(path.read_bytes())
            found |= {ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, DOCUMENTED)}
    # Sorted by a hash, which is a shuffle: what comes last is no different from what comes first.
    return sorted(found - {None}, key=lambda text: hashlib.sha256(text.encode()).digest())


def split(documents, config):
    """(training text, validation text), uint8. The latter is of the last tenth of the documents, cut to full batches."""
    cut = len(documents) * 9 // 10
    parts = ("\n\n".join(part).encode() for part in (documents[:cut], documents[cut:]))
    training, validation = (np.frombuffer(part, np.uint8) for part in parts)
    full = config.batch * config.sequence
    count = min(config.validation, len(validation) - 1) // full * full
    if count <= 0:
        raise SystemExit(f"the text is too short: {len(validation)} bytes for validation, and a batch is {full}")
    return training, validation[: count + 1]


def baselines(training, validation):
    """Bits per byte on the validation text of models that only count, with one added to every count."""
    pairs = np.ones((256, 256))
    np.add.at(pairs, (training[:-1], training[1:]), 1)
    counts = {
        "unigram": np.broadcast_to(1 + np.bincount(training, minlength=256), (256, 256)),  # whatever comes before
        "bigram": pairs,
    }
    bits = {name: -np.log2(count / count.sum(axis=1, keepdims=True)) for name, count in counts.items()}
    # The first byte is context only, for the trained model too.
    return {name: table[validation[:-1], validation[1:]].mean() for name, table in bits.items()}


# --- Model: copy from here -------------------------------------------------------------------------------------------


class Layer(NamedTuple):
    """Weights, float32. W is the model's width, E the number of experts, F their hidden width."""

    qkv: jax.Array  # (W, 3 W)
    attended: jax.Array  # (W, W)
    router: jax.Array  # (W, E)
    up: jax.Array  # (E, W, 2 F), gate and value side by side
    down: jax.Array  # (E, F, W)


class Params(NamedTuple):
    embed: jax.Array  # (256, W)
    layers: Layer  # each with the layers as its first dimension
    logits: jax.Array  # (W, 256)


def init_params(config, key):
    keys = iter(jax.random.split(key, 7))
    n, w, e, f = config.layers, config.width, config.experts, config.hidden

    def normal(*shape, scale):
        return scale * jax.random.normal(next(keys), shape)

    into, back = w**-0.5, (2 * n * w) ** -0.5  # what each layer adds twice stays small beside what is there
    layers = Layer(
        qkv=normal(n, w, 3 * w, scale=into),
        attended=normal(n, w, w, scale=back),
        router=normal(n, w, e, scale=into),
        up=normal(n, e, w, 2 * f, scale=into),
        down=normal(n, e, f, w, scale=(2 * n * f) ** -0.5),
    )
    return Params(normal(256, w, scale=1), layers, normal(w, 256, scale=into))


def bf16(x):
    return x.astype(jnp.bfloat16)


def rms_norm(x):
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)


def rotary(x):
    """Turns each pair of a head's numbers by an angle that grows with the position; x (B, T, heads, H)."""
    half = x.shape[-1] // 2
    frequencies = 10_000 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = (jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * frequencies[None])[None, :, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return bf16(jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1))


# Made again for the backward pass: the (T, T) probabilities of every head and layer would be most of the memory.
@jax.checkpoint
def attend(q, k, v):
    return jax.nn.dot_product_attention(rotary(q), rotary(k), v, is_causal=True)


def attention(layer, x, heads):
    qkv = (bf16(x) @ bf16(layer.qkv)).reshape(*x.shape[:2], 3, heads, -1)
    out = attend(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2])
    return out.reshape(x.shape) @ bf16(layer.attended)


def product(implementation, rows, weights, group_sizes, prob=None):
    """Each group of rows by its own expert's weights (E, in, out), and each row of the result by its `prob`."""
    if implementation == "ragged_dot":
        out = jax.lax.ragged_dot(rows, weights, group_sizes)
        return out if prob is None else bf16(prob[:, None] * out.astype(jnp.float32))
    chosen = None if implementation == "kernels" else implementation
    return grouped_gemm(rows, weights, group_sizes=group_sizes, b_major="n", prob=prob, implementation=chosen)


@jax.checkpoint  # its float32 steps are cheap to make again
def swiglu(up):
    gate, value = jnp.split(up.astype(jnp.float32), 2, axis=-1)
    return bf16(jax.nn.silu(gate) * value)


def moe(layer, x, config, implementation):
    """The expert layer for tokens x (tokens, W). Returns its output and the load-balancing loss."""
    # Full float32: rounded logits would flip close decisions.
    logits = jnp.dot(x, layer.router, precision="highest")
    route = routing.top_k_route(logits, config.top_k)
    rows, sizes = routing.dispatch(bf16(x), route), route.group_sizes
    hidden = swiglu(product(implementation, rows, bf16(layer.up), sizes))
    out = product(implementation, hidden, bf16(layer.down), sizes, routing.sorted_probs(route))
    return routing.combine(out, route), routing.load_balancing_loss(logits, route)


def forward(params, tokens, config, implementation):
    """Logits (B, T, 256) of the byte after each of tokens (B, T), and the load-balancing loss."""

    def layer(x, weights):
        x = x + attention(weights, rms_norm(x), config.heads).astype(jnp.float32)
        out, balance = moe(weights, rms_norm(x).reshape(-1, config.width), config, implementation)
        return x + out.reshape(x.shape), balance

    # A product, not a lookup: the gradient of a lookup adds thousands of rows into each of 256.
    x = jax.nn.one_hot(tokens, 256, dtype=jnp.bfloat16) @ bf16(params.embed)
    x, balance = jax.lax.scan(layer, x.astype(jnp.float32), params.layers)
    logits = jnp.dot(bf16(rms_norm(x)), bf16(params.logits), preferred_element_type=jnp.float32)
    return logits, balance.mean()


def loss(params, windows, config, implementation):
    """(what is minimized, mean cross-entropy in bits per byte) of windows (B, T + 1) of the text."""
    logits, balance = forward(params, windows[:, :-1], config, implementation)
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:].astype(jnp.int32)).mean()
    return nats + config.balance * balance, nats / np.log(2)


# --- Training --------------------------------------------------------------------------------------------------------


class State(NamedTuple):
    step: jax.Array
    params: Params
    optimizer: optax.OptState


def learning_rate_of(config):
    """A function of the step."""
    peak, warmup = config.learning_rate, min(config.warmup, config.steps // 2)
    return optax.warmup_cosine_decay_schedule(0.0, peak, warmup, config.steps, end_value=peak / 10)


def optimizer_of(config):
    adam = optax.adamw(learning_rate_of(config), b2=0.95, weight_decay=config.weight_decay)
    return optax.chain(optax.clip_by_global_norm(1.0), adam)


@functools.partial(jax.jit, static_argnames="config")
def initial_state(config):
    params = init_params(config, jax.random.key(config.seed))
    return State(jnp.zeros((), jnp.int32), params, optimizer_of(config).init(params))


@functools.partial(jax.jit, static_argnames=("config", "implementation"), donate_argnames="state")
def train_step(state, text, config, implementation):
    """One step on random windows of the text, which depend on the seed and the step alone. Returns bits per byte, too."""
    key = jax.random.fold_in(jax.random.key(config.seed + 1), state.step)
    starts = jax.random.randint(key, (config.batch,), 0, len(text) - config.sequence)
    windows = jax.vmap(lambda start: jax.lax.dynamic_slice(text, (start,), (config.sequence + 1,)))(starts)
    (_, bits), gradient = jax.value_and_grad(loss, has_aux=True)(state.params, windows, config, implementation)
    updates, optimizer = optimizer_of(config).update(gradient, state.optimizer, state.params)
    return State(state.step + 1, optax.apply_updates(state.params, updates), optimizer), bits


# --- To here. Runs and their report ----------------------------------------------------------------------------------


def train(training, validation, config, implementation, steps, report):
    """Runs the first `steps` of the configuration's steps. Returns curves and speed as plain data."""
    text = jnp.asarray(training)
    windows = np.lib.stride_tricks.sliding_window_view(validation, config.sequence + 1)[:: config.sequence]
    batches = jnp.asarray(windows.reshape(-1, config.batch, config.sequence + 1))
    state = initial_state(config)
    # Compiled before anything is timed.
    step = train_step.lower(state, text, config, implementation).compile()

    @jax.jit
    def validate(params):
        return jax.lax.map(lambda windows: loss(params, windows, config, implementation)[1], batches).mean()

    curve: list[float] = []
    validated: list[tuple[int, float]] = []
    seconds: list[float] = []
    while len(curve) < steps:
        start = time.perf_counter()
        losses = []
        for _ in range(min(report, steps - len(curve))):
            state, bits = step(state, text)
            losses.append(bits)
        curve += map(float, losses)  # waits for them
        seconds.append((time.perf_counter() - start) / len(losses))
        validated.append((len(curve), float(validate(state.params))))
        bits_now = f"training {np.mean(curve[-report:]):.3f}, validation {validated[-1][1]:.3f} bits per byte"
        print(f"{implementation:12}step {len(curve):5}: {bits_now}, {seconds[-1] * 1e3:.1f} ms per step", flush=True)
    memory = step.memory_analysis()
    typical = float(np.median(seconds[1:] or seconds))  # the first ones load what was compiled
    return {
        "implementation": implementation,
        "bits_per_byte": curve,
        "validation": validated,
        "temporary_bytes": memory.temp_size_in_bytes if memory else 0,
        "seconds_per_step": typical,
        "bytes_per_second": config.batch * config.sequence / typical,
    }


# Rounding in another order makes runs drift apart, but not what they learn: by 0.017 on a CPU. A gradient that is missing,
# even that of one expert's weights, made 0.07 to 0.37 (docs/training.md); single rows are for the unit tests.
TOLERANCE = 0.05  # bits per byte
SMOOTHED = 20  # steps


def largest_difference(run, other):
    """Of two runs' smoothed curves, in bits per byte."""
    difference = np.subtract(run["bits_per_byte"], other["bits_per_byte"])
    window = min(SMOOTHED, len(difference))
    return float(np.abs(np.convolve(difference, np.ones(window) / window, mode="valid")).max())


def plot(path, runs, lines, title):
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="bits per byte", title=title)
    for index, run in enumerate(runs):
        name, curve, validation = run["implementation"], run["bits_per_byte"], run["validation"]
        axes.plot(range(1, len(curve) + 1), curve, color=f"C{index}", alpha=0.6, linewidth=1, label=f"{name}, training")
        axes.plot(*zip(*validation, strict=True), "o--", color=f"C{index}", label=f"{name}, validation")
    for style, (name, bits) in zip((":", "-."), lines.items(), strict=True):
        axes.axhline(bits, color="gray", linestyle=style, label=f"{name}: {bits:.2f}")
    axes.legend()
    figure.savefig(path, dpi=120)


def parse_args(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    automatic = "large" if jax.default_backend() == "gpu" else "small"
    parser.add_argument("--size", choices=PRESETS, default=automatic, help="preset (here: %(default)s)")
    parser.add_argument("--implementation", choices=("kernels", "reference", "ragged_dot"), default="kernels")
    parser.add_argument("--compare", action="store_true", help="with the reference's curve, and ragged_dot's speed")
    stdlib = Path(sysconfig.get_path("stdlib"))
    parser.add_argument("--text", type=Path, default=stdlib, help="Python sources to learn from (the standard library)")
    parser.add_argument("--output", type=Path, default=Path("build/train_moe"), help="folder of curves.json and .png")
    for field in dataclasses.fields(Config):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=field.type, help="instead of the preset's")
    args = parser.parse_args(argv)
    if args.compare and args.implementation == "reference":
        parser.error("--compare compares with the reference: choose another --implementation")
    flags = {field.name: getattr(args, field.name) for field in dataclasses.fields(Config)}
    given = {name: value for name, value in flags.items() if value is not None}
    for name in ("steps", "report"):
        if given.get(name, 1) < 1:
            parser.error(f"--{name} must be at least 1; got {given[name]}")
    return args, dataclasses.replace(PRESETS[args.size], **given)


def main(argv=None):
    args, config = parse_args(argv)
    accelerate(False)  # whatever the environment says: ragged_dot is to be JAX's own here
    documents = documentation(args.text)
    training, validation = split(documents, config)
    lines = baselines(training, validation)
    device, choice = jax.devices()[0], info.collect()["implementation"]
    count = sum(x.size for x in jax.tree.leaves(jax.eval_shape(lambda: initial_state(config).params)))
    print(f"device      {device.device_kind}, jax {jax.__version__}; kernels here: {choice['name']}, {choice['why']}")
    print(f"text        {len(documents)} strings, {len(training):,} bytes; validation {len(validation):,}")
    print(f"model       {count:,} parameters; {config}")
    print(f"baselines   {', '.join(f'{name} {bits:.3f}' for name, bits in lines.items())} bits per byte")

    run = functools.partial(train, training, validation, config)
    runs = [run(args.implementation, config.steps, config.report)]
    failures = []
    if args.compare:
        runs.append(run("reference", config.steps, config.report))
        difference = largest_difference(*runs)
        same = args.implementation == "kernels" and choice["name"] == "reference"
        note = "; both are the reference here" if same else ""
        print(f"\nlargest difference of the smoothed curves: {difference:.4f} bits per byte (limit {TOLERANCE}{note})")
        if not difference <= TOLERANCE:  # NaN must fail too
            failures.append(f"{args.implementation} and the reference differ by {difference:.4f} > {TOLERANCE}")
        if args.implementation != "ragged_dot":
            try:
                runs.append(run("ragged_dot", min(6, config.steps), 2))
            except jax.errors.JaxRuntimeError as error:  # most likely out of memory
                print(f"jax.lax.ragged_dot failed: {str(error).splitlines()[0]}")
    print()
    for done in runs:
        speed = f"{done['seconds_per_step'] * 1e3:.1f} ms per step, {done['bytes_per_second']:,.0f} bytes per second"
        memory = f"{done['temporary_bytes'] / 2**30:.2f} GiB of temporary memory"
        print(f"{done['implementation']:12}{speed}, {memory}, {len(done['bits_per_byte'])} steps")

    args.output.mkdir(parents=True, exist_ok=True)
    facts = {"device": device.device_kind, "kernels": choice, "parameters": count, "baselines": lines, "runs": runs}
    versions = {"jax": jax.__version__, "python": sys.version.split()[0]}
    text = json.dumps({"config": dataclasses.asdict(config), "versions": versions, **facts}, indent=1)
    (args.output / "curves.json").write_text(text + "\n")
    whole = [done for done in runs if len(done["bits_per_byte"]) == config.steps]
    plot(args.output / "curves.png", whole, lines, f"{count / 1e6:,.1f} million parameters, {device.device_kind}")

    final = runs[0]["validation"][-1][1]
    if not final < lines["bigram"]:
        usual = PRESETS[args.size].steps
        few = f"; {config.steps} steps may be too few, the preset has {usual}" if config.steps < usual else ""
        failures.append(f"validation ends at {final:.3f} bits per byte, a bigram model at {lines['bigram']:.3f}{few}")
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    if not failures:
        print(f"OK: validation {final:.3f} bits per byte, a bigram model {lines['bigram']:.3f}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
