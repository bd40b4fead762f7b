"""Edits of synchronization, a sample for every run of CI; `make mutants` makes every edit of every kind."""

import device
import mutate
import pytest

from jax_grouped_gemm import config

# One of each architecture and operation, other than those that the sweep and the checker were tuned on.
KERNELS = (
    "sm90_forward_128x128x64_cluster2x1_bn_dense_float16_scaled",
    "sm100_forward_128x256x64_cluster2x1_pair_bn_pointers_bfloat16_bias",
    "sm90_wgrad_192x192x64_cluster1x1_float32_accumulate",
    "sm100_wgrad_128x256x64_cluster2x1_pair_bfloat16",
)
SYNCHRONIZATION = (
    "drop", "skip_wait", "flip_parity", "arrive_count", "init_count", "expected_bytes", "wait_fewer", "other_ctas"
)  # fmt: skip
SAMPLE = 48


@pytest.mark.parametrize("name", KERNELS)
def test_edits_of_synchronization_are_noticed(name, monkeypatch):
    monkeypatch.setattr(device, "MAX_STATEMENTS", 3_000_000)
    every = (variant for arch in config.TILES for variant in config.variants(arch) + config.wgrad_variants(arch))
    (variant,) = (variant for variant in every if variant.name == name)
    text = device.ptx(name)
    nothing = mutate.Mutant("nothing", 1, text.split("\n")[0], text.split("\n")[0])
    assert mutate.verdict(variant, nothing) is None
    every = [mutant for mutant in mutate.mutants(text) if mutant.operator in SYNCHRONIZATION]
    missed = [
        mutant
        for mutant in mutate.sampled(every, SAMPLE)
        if mutate.verdict(variant, mutant) is None and mutate.explanation(mutant, text.split("\n")) is None
    ]
    assert len(missed) <= 0.05 * SAMPLE, missed
