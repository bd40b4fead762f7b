"""Energy of a call, power and clock: each arm alone for two seconds, read from NVML.

    python -m benchmarks.power                                            # on an H200, a minute
    python -m benchmarks.power --rows gptoss_up,gptoss_up_wgrad --seconds 5

Every arm is checked as in `benchmarks.run`, then runs for a second that is not measured. The driver's energy counter advances in
steps: the more `--seconds`, the less one matters. A card at its power limit lowers its clock, so the rate is also given as a
share of what the matrix units do at the clock that it ran at.
"""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import argparse
import ctypes
import dataclasses
import datetime
import gc
import statistics
import sys
import time
from pathlib import Path

import jax

from benchmarks import figures, report, shapes
from benchmarks.run import prepare, progress
from jax_grouped_gemm.timing import Arm, calibrate

ARMS = ("ours", "cublas_dense", "torch_grouped_mm")
WARM_SECONDS = 1.0
# bfloat16 operations, two per multiplication, of an SM in a cycle.
OPERATIONS_PER_CYCLE = {"9.0": 4096}


class NvmlError(Exception):
    """NVML is not there, or refuses; the text says which call."""


class Nvml:
    """The first GPU's readings. library: what ctypes makes of libnvidia-ml.so.1."""

    CLOCK_SM = 1

    def __init__(self, library=None):
        try:
            self.library = library or ctypes.CDLL("libnvidia-ml.so.1")
        except OSError as absent:
            raise NvmlError(f"NVML is not there: {absent}") from absent
        self._call("nvmlInit_v2")
        self.device = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByIndex_v2", 0, ctypes.byref(self.device))

    def _call(self, function, *args):
        if code := getattr(self.library, function)(*args):
            raise NvmlError(f"{function} returned {code}")

    def _read(self, function, kind, *args):
        value = kind()
        self._call(function, self.device, *args, ctypes.byref(value))
        return value.value

    def joules(self):
        """Since the driver was loaded."""
        return self._read("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong) / 1e3

    def watts(self):
        """Mean of the last second, on Ampere and later."""
        return self._read("nvmlDeviceGetPowerUsage", ctypes.c_uint) / 1e3

    def megahertz(self):
        return self._read("nvmlDeviceGetClockInfo", ctypes.c_uint, self.CLOCK_SM)


@dataclasses.dataclass
class Reading:
    """Of a stretch of time in which one thing ran."""

    seconds: float
    joules: float
    calls: int
    watts: float  # mean
    megahertz: float  # median


def observe(gpu, arm, seconds, clock=time.perf_counter):
    """Runs a calibrated arm alone, burst after burst."""
    watts, megahertz, calls = [], [], 0
    joules, start = gpu.joules(), clock()
    while clock() - start < seconds:
        for _ in range(arm.calls):
            result = arm.call(calls)
            calls += 1
        # While the queue still runs: the readings are of a busy GPU, and reading leaves no gap.
        watts.append(gpu.watts())
        megahertz.append(gpu.megahertz())
        arm.wait(result)
    taken = clock() - start
    return Reading(taken, gpu.joules() - joules, calls, statistics.fmean(watts), statistics.median(megahertz))


def of_call(reading):
    """Figures of any arm."""
    return {
        "millijoules": 1e3 * reading.joules / reading.calls,
        "watts": reading.watts,
        "megahertz": reading.megahertz,
        "calls_per_second": reading.calls / reading.seconds,
    }


def of_product(reading, flops, peak_per_cycle):
    """Figures of a product of so many operations. peak_per_cycle: operations of the whole GPU in a cycle, or None."""
    rate = flops * reading.calls / reading.seconds
    share = rate / (peak_per_cycle * reading.megahertz * 1e6) if peak_per_cycle else None
    return of_call(reading) | {"tflops": rate / 1e12, "share_of_peak": share}


def of_copy(reading, moved, idle_watts):
    """Figures of a copy that moves so many bytes."""
    above = reading.joules - idle_watts * reading.seconds
    return of_call(reading) | {
        "bytes_per_second": moved * reading.calls / reading.seconds,
        "picojoules_per_byte_above_idle": 1e12 * above / (moved * reading.calls),
    }


def peak_per_cycle(device):
    """Operations of the whole GPU in a cycle; None where the rate of its SMs is not written down here."""
    of_sm = OPERATIONS_PER_CYCLE.get(getattr(device, "compute_capability", ""))
    return of_sm and of_sm * device.core_count


def run_alone(gpu, arm, seconds):
    # Long bursts: the GPU is idle for an instant between two.
    calibrate(arm, rounds=1, burst_seconds=0.1)
    observe(gpu, arm, WARM_SECONDS)
    return observe(gpu, arm, seconds)


def line(row, name, record):
    """One line of the table."""
    cells = (
        f"{row:20} {name:17} {record['millijoules']:9.2f} mJ {record['watts']:6.1f} W {record['megahertz']:5.0f} MHz"
        f" {record['calls_per_second']:9.1f} calls/s"
    )
    if "tflops" in record:
        share = record["share_of_peak"]
        return (
            cells + f" {record['tflops']:7.1f} TFLOP/s" + (f" {share:6.1%} of the peak at that clock" if share else "")
        )
    return cells + (
        f" {record['bytes_per_second'] / 1e12:7.2f} TB/s"
        f" {record['picojoules_per_byte_above_idle']:6.1f} pJ per byte above idle"
    )


def measure(gpu, row, seconds, seed, peak):
    """One row's record, and its lines on stdout."""
    progress(f"{row.name}: operands, checks")
    sizes, ready, records = prepare(row, ARMS, seed)
    for name, arm in ready.items():
        records[name] |= of_product(run_alone(gpu, arm, seconds), row.flops, peak)
    for name, record in records.items():
        print(
            line(row.name, name, record) if name in ready else f"{row.name:20} {name:17} {record['skipped']}",
            flush=True,
        )
    return dataclasses.asdict(row) | {"flops": row.flops, "bytes": row.bytes(sizes), "arms": records}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="dsv3_up,gptoss_up,gptoss_up_wgrad", help="as for benchmarks.run")
    parser.add_argument("--seconds", type=float, default=2.0, help="measured for each arm (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args(argv)
    try:
        rows = shapes.select(args.rows)
    except ValueError as unknown:
        parser.error(str(unknown))
    if jax.default_backend() != "gpu":
        print("No GPU here: there is no energy to read.", file=sys.stderr)
        return 2
    now = datetime.datetime.now(datetime.UTC)
    result = {"date": now.isoformat(timespec="seconds"), "machine": figures.machine()}
    try:
        gpu = Nvml()
        progress("idle")
        nothing = Arm(lambda _: time.sleep(0.02), lambda _: None, calls=1)
        idle = observe(gpu, nothing, args.seconds)
        result["idle"] = {"watts": idle.watts, "megahertz": idle.megahertz}
        print(f"idle {idle.watts:.1f} W {idle.megahertz:.0f} MHz", flush=True)
        copy, moved = figures.copy_arm()
        result["copy"] = of_copy(run_alone(gpu, copy, args.seconds), moved, idle.watts)
        print(line("", "copy", result["copy"]), flush=True)
        del copy
        result["rows"] = []
        for row in rows:
            result["rows"].append(measure(gpu, row, args.seconds, args.seed, peak_per_cycle(jax.devices()[0])))
            gc.collect()  # the operands of a row are gigabytes
    except NvmlError as reason:
        print(reason, file=sys.stderr)
        return 2
    stem = f"{now:%Y%m%d-%H%M%S}-{result['machine']['device'].replace(' ', '-')}-power"
    print(f"wrote {report.write_json(result, args.out, stem)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
