"""Benchmark of the products of a layer: ours, cuBLAS dense, torch's grouped product and JAX's ragged_dot, interleaved in one process.

    python -m benchmarks.run                          # the listed rows and the sweeps, several minutes on an H200
    python -m benchmarks.run --rows forward,skew      # the listed forward products and one sweep
    python -m benchmarks.run --rows dsv3_up,qwen3_up --arms ours,torch_grouped_mm --reps 7
    python -m benchmarks.run --smoke                  # tiny shapes, any machine

Every arm is checked against a float32 reference before anything is timed; the run fails if one is wrong.
"""

import os

# JAX and torch share the GPU: neither may claim all of its memory. Before JAX is imported.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import argparse
import contextlib
import dataclasses
import datetime
import gc
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp

from benchmarks import arms, check, figures, report, shapes
from jax_grouped_gemm import use_tuned
from jax_grouped_gemm.timing import Arm, calibrate, interleave, summarize


def progress(text):
    """To stderr, with the time, so that stdout stays a clean table."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def as_jax(out):
    return out if isinstance(out, jax.Array) else jnp.from_dlpack(out)


def poison_outputs(row):
    check.poison(row)
    with contextlib.suppress(arms.UnavailableError):
        check.torch_poison(arms.torch_on_gpu(), row)


def prepare(row, names, seed):
    """Builds and checks the arms of one row. Returns (group sizes, ready arms, their records for the result)."""
    inputs = arms.Inputs(row, seed)
    expected = check.grouped_reference(row.product, *inputs.pairs[0], inputs.ends)
    length = check.contraction(row, inputs.sizes)
    ready: dict[str, Arm] = {}
    records: dict[str, dict] = {}
    for name in names:
        record = records[name] = {}
        try:
            arm, compiled = arms.build(name, inputs)
            poison_outputs(row)
            out = arm.call(0)
            arm.wait(out)
        except arms.UnavailableError as reason:
            record["skipped"] = str(reason)
            continue
        except Exception as failure:
            # Another arm's crash (out of memory, an unsupported shape) is a result; ours is a failure.
            if name.startswith("ours"):
                raise
            record["skipped"] = f"failed: {(str(failure).splitlines() or [type(failure).__name__])[0][:200]}"
            continue
        if name == "cublas_dense":
            a, b = inputs.pairs[0]
            b = b if row.product == "wgrad" else b[:1]
            dense = check.grouped_reference(row.product, a, b, jnp.asarray([row.m], jnp.int32))
            out = as_jax(out)
            record["error"] = check.worst_error(
                out, dense.reshape(out.shape), row.m if row.product == "wgrad" else length
            )
            del dense
        else:
            record["error"] = check.worst_error(as_jax(out), expected, length)
        del out
        if compiled is not None and (memory := compiled.memory_analysis()) is not None:
            record["temporary_bytes"] = memory.temp_size_in_bytes
        if record["error"] <= 1:  # NaN is not
            ready[name] = arm
        else:
            record["skipped"] = f"WRONG: error {record['error']:.3g} times the limit"
    return inputs.sizes, ready, records


def run_row(row, names, reps, seed):
    """One line of the table: check, calibrate, time interleaved."""
    progress(f"{row.name}: operands, checks")
    sizes, ready, records = prepare(row, names, seed)
    for arm in ready.values():
        calibrate(arm, reps)
    progress(f"{row.name}: timing " + ", ".join(f"{name} ({arm.rounds} x {arm.calls})" for name, arm in ready.items()))
    interleave(ready)
    for name, arm in ready.items():
        records[name] |= {"samples": arm.samples, "calls_per_sample": arm.calls}
    for name, record in records.items():
        if "samples" in record:
            stats = summarize(record["samples"])
            print(
                f"{row.name:26} {name:17} {stats.median * 1e6:11.1f} us {row.flops / stats.median / 1e12:8.2f} TFLOP/s"
                f" {row.bytes(sizes) / stats.median / 1e9:8.1f} GB/s"
                f"  ({stats.low * 1e6:.1f} to {stats.high * 1e6:.1f} us)",
                flush=True,
            )
        else:
            print(f"{row.name:26} {name:17} {record['skipped']}", flush=True)
    return dataclasses.asdict(row) | {
        "flops": row.flops,
        "bytes": row.bytes(sizes),
        "decode": row.decode,
        "group_sizes": sizes.tolist(),
        "arms": records,
    }


def parse_args(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rows", help="comma-separated: rows, 'forward', 'backward', 'sweeps' or sweeps by name (default: all)"
    )
    parser.add_argument(
        "--arms", help="comma-separated (default: by row; ragged_dot is left out of sweeps in any case)"
    )
    parser.add_argument("--reps", type=int, default=15, help="bursts per arm (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder for the results")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes: checks that the benchmark itself works")
    parser.add_argument("--no-figures", action="store_true", help="skip host time, first call and wheel size")
    args = parser.parse_args(argv)
    known = arms.NAMES + arms.SCHEDULERS
    args.arms = args.arms.split(",") if args.arms else None
    if unknown := [name for name in args.arms or () if name not in known]:
        parser.error(f"unknown arm {', '.join(unknown)}; there are {', '.join(known)}")
    try:
        args.rows = shapes.select(args.rows, args.smoke)
    except ValueError as unknown_row:
        parser.error(str(unknown_row))
    return args


def main(argv=None):
    args = parse_args(argv)
    if jax.default_backend() != "gpu" and not args.smoke:
        print(
            "No GPU here: the rows would take hours. To try the benchmark itself: make bench BENCH_ARGS=--smoke",
            file=sys.stderr,
        )
        return 2
    use_tuned(None)  # what is timed is the rule's choice
    start = time.monotonic()
    now = datetime.datetime.now(datetime.UTC)
    given = {"arms": args.arms, "reps": args.reps, "seed": args.seed, "smoke": args.smoke}
    result = {"date": now.isoformat(timespec="seconds"), "machine": figures.machine(), "arguments": given}
    progress("bandwidth of a copy")
    result["copy_bytes_per_second"] = figures.copy_bytes_per_second(1 << 20 if args.smoke else 1 << 30)
    result["rows"] = []
    for row in args.rows:
        result["rows"].append(run_row(row, arms.names(row, args.arms), args.reps, args.seed))
        gc.collect()  # the operands of a row are gigabytes
    if not args.no_figures:
        progress("host time, first call, wheel")
        result["figures"] = {
            "host_microseconds": figures.host_microseconds(),
            "first_call_seconds": figures.first_call_seconds(),
            "wheel_bytes": figures.wheel_bytes(),
        }
    result["seconds"] = round(time.monotonic() - start, 1)
    stem = f"{now:%Y%m%d-%H%M%S}-{result['machine']['device'].replace(' ', '-')}" + ("-smoke" if args.smoke else "")
    paths = report.write(result, args.out, stem)
    print("\n" + report.markdown(result))
    for path in paths:
        print(f"wrote {path}")
    wrong = [
        f"{row['name']}/{name}"
        for row in result["rows"]
        for name, record in row["arms"].items()
        if record.get("skipped", "").startswith("WRONG")
    ]
    if wrong:
        print(f"WRONG results: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
