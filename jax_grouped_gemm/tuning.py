"""`tune`: times every compiled kernel for the calls that a program makes, and writes down the fastest."""

import dataclasses
import functools
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from jax_grouped_gemm import calls, config, contract, ffi_call, selection, tuned, wgrad_call
from jax_grouped_gemm.timing import Arm, calibrate, interleave, summarize

ROUNDS = 5
BURST_SECONDS = 0.01
# Of a call's operands and result. Smaller calls take turns with several sets, or they would find them in L2, as a model does not.
ROTATION_BYTES = 1 << 27


@dataclasses.dataclass(frozen=True)
class Tuned:
    """What was found for one call.

    facts: what the choice depends on. mma_tiler_mn, cluster_shape_mn, use_dynamic_sched: as the arguments of `grouped_gemm`.
    seconds: of a call, in the mean of the loads. seconds_of_rule: with what the package's rule chooses.
    """

    facts: dict
    mma_tiler_mn: tuple[int, int]
    cluster_shape_mn: tuple[int, int]
    use_dynamic_sched: bool
    seconds: float
    seconds_of_rule: float


def tune(function, /, *args, path, loads=None, **kwargs):
    """Finds the fastest compiled kernel for every call of grouped GEMM in a program, on this process's GPU.

    The package chooses a tile and a schedule by a rule, which is a few percent off on average. This times what there is to
    choose from instead, with operands of its own: `function` is lowered, not run. What is found is in use from then on, beside
    what was before: compiled programs are forgotten (`jax.clear_caches`) and lowered anew at their next call. Other processes
    use it by `use_tuned(path)`, or the environment variable JAX_GROUPED_GEMM_TUNED. A tile or a schedule that a call names goes
    before it. Of a program of several processes, tune in one, and give all of them the file before they start.

    Args:
      function: as for `jax.jit`, with what is static bound to it (`functools.partial`); e.g. a whole training step, whose backward
        pass is tuned too.
      *args, **kwargs: its arguments, or `jax.ShapeDtypeStruct`s in their place. One that is called `path` or `loads` has to be bound.
      path: a JSON file, which keeps what it has for other calls, in a folder that exists; written after every call that is done.
        A line is a call: it is for committing beside the program.
      loads: the rows that experts get, since a program is lowered without: a list of 1-D arrays of relative sizes, each for
        the calls with as many groups. By default an equal share each, and shares as unequal as routers make them
        (Dirichlet(2)); the mean of both decides.

    Returns:
      A list of `Tuned`, one per distinct call, slowest first.

    Raises:
      RuntimeError: this process has no GPU that the kernels run on.
      ValueError: no call of `function` leaves a choice; `loads` is malformed, or fits no call; `path` is a file of something else.
      OSError: `path` cannot be written.
    """
    if not ffi_call.architectures():
        raise contract.nothing_to_tune_on()
    loads = _checked(loads)
    tuned.merge(path, {})  # now rather than after minutes
    (arch, *_) = ffi_call.architectures()
    found = _distinct(arch, recorded_calls(function, *args, **kwargs))
    if not found:
        raise contract.nothing_to_tune()
    for load in loads or ():
        if load.size not in (groups := sorted({call.groups for call in found.values()})):
            raise contract.unused_load(load.size, groups)
    results = []
    for i, (key, call) in enumerate(found.items()):
        start = time.monotonic()
        with tuned.nothing():
            entry = _fastest(_time_all(candidates(arch, call), call, loads))
        tuned.merge(path, {key: entry})
        tuned.add({key: entry})
        results.append(Tuned(dict(key), *_named(entry)))
        print(
            f"tune: {i + 1} of {len(found)}: {_text(dict(key))}: {entry.tile}, {'dynamic' if entry.dynamic else 'static'}, "
            f"{entry.seconds * 1e6:.1f} us; the rule's choice {entry.of_rule * 1e6:.1f} us ({time.monotonic() - start:.0f} s)",
            file=sys.stderr,
            flush=True,
        )
    return sorted(results, key=lambda result: -result.seconds)


def _checked(loads):
    if loads is None:
        return None
    arrays = []
    for i, load in enumerate(loads):
        try:
            array = np.asarray(load, np.float64)
        except (TypeError, ValueError):
            raise contract.bad_load(i, load) from None
        if array.ndim != 1 or not (np.isfinite(array).all() and (array >= 0).all() and (array > 0).any()):
            raise contract.bad_load(i, load)
        arrays.append(array / array.max())
    return arrays


def recorded_calls(function, *args, **kwargs):
    """Those that the kernels would do. Lowered under another name than `function`, which JAX may remember.

    Where XLA partitions a program over several devices, what one of them does is known once it is compiled.
    """
    with selection.recorded() as found:
        lowered = jax.jit(lambda *args, **kwargs: function(*args, **kwargs)).lower(*args, **kwargs)
        if jax.device_count() > 1:
            lowered.compile()
    return found


def _distinct(arch, found):
    """{key: call}, of calls that leave the tile to the package; both schedules are timed for each."""
    free = [call for call in found if (call.mma_tiler_mn, call.cluster_shape_mn) == (None, None)]
    return {tuned.key(arch, call): dataclasses.replace(call, dynamic=None) for call in free}


def candidates(arch, call):
    """{(tile, dynamic): call} of all that is compiled."""
    tiles = config.tiles("wgrad" if isinstance(call, calls.WgradCall) else "forward")[arch]
    return {
        (tile, dynamic): dataclasses.replace(
            call, mma_tiler_mn=tile.mma_tiler_mn, cluster_shape_mn=tile.cluster_shape_mn, dynamic=dynamic
        )
        for tile in tiles
        for dynamic in (False, True)
    }


def _time_all(options, call, loads):
    """{(tile, dynamic): seconds}, and under None those of what the rule chooses."""
    options = {None: call, **options}
    seconds = dict.fromkeys(options, 0.0)
    sizes = _group_sizes(call, loads)
    operands = _operands(call)
    for ends in sizes:
        arms = {option: _arm(asked, operands, ends) for option, asked in options.items()}
        for arm in arms.values():
            calibrate(arm, ROUNDS, BURST_SECONDS)
        interleave(arms)
        for option, arm in arms.items():
            seconds[option] += summarize(arm.samples).median / len(sizes)
    return seconds


def _fastest(seconds):
    of_rule = seconds.pop(None)
    (tile, dynamic), best = min(seconds.items(), key=lambda item: item[1])
    return tuned.Entry(tile, dynamic, best, of_rule)


def _group_sizes(call, loads):
    """Ends of the groups, (G,) int32, for each load."""
    rng = np.random.default_rng(0)
    shares = [np.ones(call.groups), rng.dirichlet(np.full(call.groups, 2.0))]
    if loads is not None:
        shares = [load for load in loads if load.size == call.groups] or shares
    return [
        jnp.asarray(np.rint(np.cumsum(share) / share.sum() * call.m).astype(np.int32))
        for share in shares[: 1 if call.groups == 1 else None]
    ]


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key, shape, dtype):
    return jax.random.normal(key, shape, dtype)


def _operands(call):
    """Sets of a call's operands, without the ends. Numbers at random: zeros would take less power, and so less time."""
    wgrad = isinstance(call, calls.WgradCall)
    size = call.m * (call.n + call.k) + call.l * call.n * call.k
    key = jax.random.key(0)

    def one(i):
        keys = jax.random.split(jax.random.fold_in(key, i), 3)
        alpha = jnp.ones(call.groups, jnp.float32) if call.has_alpha else None
        # Each expert has one group, as on a device that has some of the experts; the other groups have none.
        groups = np.arange(call.groups, dtype=np.int32)
        experts = jnp.asarray(np.where(groups < call.l, groups, -1)) if call.has_experts else None
        if wgrad:
            total = jnp.zeros(call.d_shape, jnp.float32) if call.accumulate else None
            x, y = _normal(keys[0], (call.m, call.n), jnp.bfloat16), _normal(keys[1], (call.m, call.k), jnp.bfloat16)
            return calls.WgradOperands(x, y, None, experts, alpha, total)
        prob = jnp.ones(call.m, jnp.float32) if call.has_prob else None
        bias = jnp.ones((call.groups, call.n), jnp.bfloat16) if call.has_bias else None
        a, b = _normal(keys[0], (call.m, call.k), jnp.bfloat16), _normal(keys[1], call.b_shape, jnp.bfloat16)
        return calls.Operands(a, None, experts, alpha, prob, bias, (b,))

    return [one(i) for i in range(min(16, max(1, -(-ROTATION_BYTES // (2 * size)))))]


def _arm(call, operands, ends):
    given = [each._replace(offsets=ends) for each in operands]
    if not isinstance(call, calls.WgradCall):
        call = dataclasses.replace(call, weights="dense")  # how they lie makes no difference to the choice
        run = jax.jit(lambda operands: ffi_call.grouped_gemm(call, operands)).lower(given[0]).compile()
        return Arm(lambda i: run(given[i % len(given)]), jax.block_until_ready)

    def wgrad(total, operands):
        return wgrad_call.grouped_wgrad(call, operands._replace(total=total))

    # A sum is added to in place: each result is the next call's.
    totals = [jnp.array(each.total) if call.accumulate else None for each in given]
    given = [each._replace(total=None) for each in given]
    add = jax.jit(wgrad, donate_argnums=0).lower(totals[0], given[0]).compile()

    def next_wgrad(i):
        i %= len(given)
        d = add(totals[i], given[i])
        totals[i] = d if call.accumulate else None
        return d

    return Arm(next_wgrad, jax.block_until_ready)


def _named(entry):
    return entry.tile.mma_tiler_mn, entry.tile.cluster_shape_mn, entry.dynamic, entry.seconds, entry.of_rule


def _text(facts):
    return f"{facts['product']} L={facts['groups']} M={facts['m']} N={facts['n']} K={facts['k']}"
