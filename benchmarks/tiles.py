"""How much is lost by the rule that picks a tile: random problems, the rule's choice and every compiled tile interleaved.

    python -m benchmarks.tiles --product wgrad --problems 40     # on an H200, two minutes
    python -m benchmarks.tiles --smoke                           # one tiny problem, any machine

Every arm is checked as in `benchmarks.run`. The loss of a problem is the rule's time over the fastest, less 1.
"""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import argparse
import dataclasses
import datetime
import functools
import sys
from pathlib import Path

import jax
import numpy as np

from benchmarks import arms, check, figures, report, shapes
from benchmarks.run import as_jax, poison_outputs, progress
from jax_grouped_gemm import config, ffi_call, use_tuned
from jax_grouped_gemm.timing import calibrate, interleave, summarize

# So much work that the host keeps up, so little that many problems are timed.
FLOPS = 1e10, 3e12


def random_row(rng, product):
    """L from 1 to 255, 32 to 8192 rows a group, N and K from 512 to 16384, multiples of 8 and of little else, unaligned groups."""
    while True:
        l = int(2 ** rng.uniform(0, 8))
        n, k = (8 * int(2 ** rng.uniform(9, 14) / 8) for _ in range(2))
        m = int(l * 2 ** rng.uniform(5, 13))
        row = shapes.Row(f"{l}x{m}x{n}x{k}", l, m, n, k, str(rng.choice(("balanced", "skew"))), product=product)
        if FLOPS[0] < row.flops < FLOPS[1] and l * n * k < 2**32:
            return row


def measure(row, tiles, seed, reps):
    """Seconds of a call by the name of its tile, with the rule's as "rule"."""
    inputs = arms.Inputs(row, seed)
    expected = check.grouped_reference(row.product, *inputs.pairs[0], inputs.ends)
    options: dict[str, dict] = {"rule": {}} | {
        str(tile): {"mma_tiler_mn": tile.mma_tiler_mn, "cluster_shape_mn": tile.cluster_shape_mn} for tile in tiles
    }
    builders = {name: functools.partial(arms.ours, inputs, **given) for name, given in options.items()}
    builders["torch_grouped_mm"] = functools.partial(arms.build, "torch_grouped_mm", inputs)
    ready = {}
    for name, build in builders.items():
        try:
            arm, _ = build()
        except arms.UnavailableError:
            continue
        poison_outputs(row)
        out = arm.call(0)
        arm.wait(out)
        error = check.worst_error(as_jax(out), expected, check.contraction(row, inputs.sizes))
        if not error <= 1:
            raise SystemExit(f"{row.name}: {name} is wrong: error {error:.3g} times the limit")
        del out
        ready[name] = arm
    del expected
    for arm in ready.values():
        calibrate(arm, reps)
    interleave(ready)
    return {name: summarize(arm.samples).median for name, arm in ready.items()}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--product", choices=("forward", "dgrad", "wgrad"), default="wgrad")
    parser.add_argument("--problems", type=int, default=40)
    parser.add_argument("--reps", type=int, default=9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args(argv)
    if jax.default_backend() != "gpu" and not args.smoke:
        print("No GPU here: pass --smoke for one tiny problem.", file=sys.stderr)
        return 2
    use_tuned(None)
    rng = np.random.default_rng(args.seed)
    (arch,) = ffi_call.architectures() or (90,)
    now = datetime.datetime.now(datetime.UTC)
    result = {"date": now.isoformat(timespec="seconds"), "machine": figures.machine(), "problems": []}
    smoke = dataclasses.replace(shapes.SMOKE[0], product=args.product)
    rows = [smoke] if args.smoke else [random_row(rng, args.product) for _ in range(args.problems)]
    losses = []
    for i, row in enumerate(rows):
        progress(f"{i + 1} of {len(rows)}: {row.name} {row.shares}")
        tiles = config.WGRAD_TILES[arch] if args.product == "wgrad" else config.TILES[arch]
        seconds = measure(row, tiles, args.seed, args.reps)
        ours = {name: time for name, time in seconds.items() if name != "torch_grouped_mm"}
        losses.append(seconds["rule"] / min(ours.values()) - 1)
        result["problems"].append(dataclasses.asdict(row) | {"seconds": seconds, "loss": losses[-1]})
        rates = "  ".join(f"{name} {row.flops / time / 1e12:.4g}" for name, time in seconds.items())
        print(f"{row.name:24} {row.shares:9} TFLOP/s: {rates}  loss {losses[-1]:.1%}", flush=True)
    print(f"loss of the rule: {np.mean(losses):.1%} on average, {max(losses):.1%} at most")
    stem = f"{now:%Y%m%d-%H%M%S}-tiles-{args.product}{'-smoke' if args.smoke else ''}"
    print(f"wrote {report.write_json(result, args.out, stem)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
