"""The model against the hardware: Hopper kernels on numbers of any kind, where every rounding shows.

h200_results.json holds hashes of results. The model must compute them on the CPU, and an H200 must: two tests, one file.

    PYTHONPATH=.:tests python tests/functional/validation.py     writes the file anew, from the model; then run the GPU test
"""

import concurrent.futures
import hashlib
import json
import pathlib

import device
import numpy as np
import sweep

from jax_grouped_gemm import config

RESULTS = pathlib.Path(__file__).parent / "h200_results.json"
PROBLEMS = (0, 2)  # of the sweep


def cases(variant):
    """(index, problem, case)"""
    for i, problem in enumerate(sweep.problems(variant)):
        if i in PROBLEMS:
            yield i, problem, sweep.make_case(variant, problem, i, exact=False)


def digest(got):
    outputs = got if isinstance(got, tuple) else (got,)
    return [hashlib.sha256(np.ascontiguousarray(output).tobytes()).hexdigest()[:16] for output in outputs]


def on_the_model(variant):
    device.register_with_prologues(variant)
    return {
        problem.name: digest(
            device.run(variant, case, dynamic=problem.dynamic, clusters=problem.clusters, b_ptrs=sweep.b_ptrs(i))
        )
        for i, problem, case in cases(variant)
    }


def recorded():
    return json.loads(RESULTS.read_text())


if __name__ == "__main__":
    variants = config.variants(90) + config.wgrad_variants(90)
    with concurrent.futures.ProcessPoolExecutor() as pool:
        found = {variant.name: got for variant, got in zip(variants, pool.map(on_the_model, variants), strict=True)}
    RESULTS.write_text(json.dumps(found, indent=0) + "\n")
