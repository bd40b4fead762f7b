"""Every compiled kernel, executed: its results, its protocols, and that every statement of it was reached."""

import device
import pytest
import sweep

from jax_grouped_gemm import config

VARIANTS = [variant for arch in config.TILES for variant in [*config.variants(arch), *config.wgrad_variants(arch)]]


# The one exemption from reaching every statement: where a wait loop goes back to its wait. Whether a wait has to wait is
# a matter of timing; the wait itself, above this statement, must be reached.
TURN_OF_A_WAIT = "bra.uni     LAB_WAIT;"


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_variant(variant):
    device.register_with_prologues(variant)
    sweep.run_all(variant)
    lines, executed = device.coverage(variant.name)
    text = [line.strip() for line in device.ptx(variant.name).splitlines()]
    missed = [f"{n}: {text[n - 1]}" for n in lines[executed == 0] if text[n - 1] != TURN_OF_A_WAIT]
    assert not missed, "statements that no problem reached:\n" + "\n".join(missed)
