"""The module under test, and problems for it in the document's layouts."""

import dataclasses
import types

import compat_problems
import jax
import numpy as np
import oracle


@dataclasses.dataclass(frozen=True)
class Subject:
    module: types.ModuleType
    sm100: bool
    device: str

    @property
    def wrapper(self):
        return getattr(self.module, "grouped_gemm_wrapper" + "_sm100" * self.sm100)

    @property
    def operation(self):
        return getattr(self.module, "GroupedGemm" + "Sm100" * self.sm100)

    @property
    def jax_entry(self):
        """The entry for jit, which has no neutral twin: there the wrapper does its work, under tracing like it."""
        if self.sm100 or (self.device == "cpu" and not _process_has_gpus()):
            return self.module.grouped_gemm_jax_sm100

        def entry(a_tensor, padded_offsets, alpha_tensor, b_ptrs, n, prob_tensor, **options):
            result = self.wrapper(
                a_tensor, padded_offsets, alpha_tensor, b_ptrs=b_ptrs, n=n, b_dtype="bfloat16", prob_tensor=prob_tensor,
                **options,
            )  # fmt: skip
            return tuple(result)

        return entry

    def problem(self, rng, framework="torch", discrete=False, **options):
        """(case, the wrapper's keyword arguments, what must stay alive)."""
        shape = {"m": 1280, "n": 256, "k": 128} | {name: options.pop(name) for name in "mnk" if name in options}
        case = compat_problems.aligned_case(rng, **shape, **options)
        if framework == "jax":
            arguments, alive = compat_problems.jax_arguments(case)
        else:
            arguments, alive = compat_problems.torch_arguments(case, self.device, discrete)
        return case, arguments, alive

    def synchronize(self):
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()

    def check(self, result, case):
        self.synchronize()
        jax.block_until_ready([x for x in result if isinstance(x, jax.Array)])
        compat_problems.check(result, case)


def _process_has_gpus():
    try:
        return bool(jax.devices("cuda"))
    except RuntimeError:
        return False


def want(case, output="D"):
    """The oracle's values, as float64."""
    return oracle.oracle(case, output)[0]


def got(x):
    return np.asarray(compat_problems.to_numpy(x)).astype(np.float64)[:, :, 0]
