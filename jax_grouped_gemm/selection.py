"""Which tile a call's kernel has, and how its tiles are handed out: what the caller says, else what was tuned, else the rule of `config`."""

import contextlib
import dataclasses

from jax_grouped_gemm import calls, config, tuned

_recordings: list[list] = []


def tile_of(arch, call):
    """The `config.Tile` for an architecture, None where the caller's wish leaves none of it."""
    entry = _tuned(arch, call)
    if entry is not None:
        return entry.tile
    wish = call.mma_tiler_mn, call.cluster_shape_mn
    if isinstance(call, calls.WgradCall):
        return config.select_wgrad_tile(arch, call.l, call.m / call.groups, call.n, call.k, *wish)
    return config.select_tile(arch, call.groups, call.m, call.n, call.k, call.b_major, *wish)


def scheduled(architectures, call):
    """The call, static or dynamic. architectures: of this process's GPUs; where there are none, every one counts."""
    for recording in _recordings:
        recording.append(call)
    if call.dynamic is not None:
        return call
    architectures = architectures or tuple(config.TILES)
    entry = next(filter(None, (_tuned(arch, call) for arch in architectures)), None)
    if entry is not None:
        return dataclasses.replace(call, dynamic=entry.dynamic)
    dynamic = config.MEASURED in architectures and config.select_schedule(*_results(call))
    return dataclasses.replace(call, dynamic=dynamic)


def _tuned(arch, call):
    """What was measured for just this call, with its own choice of tile."""
    return tuned.entry(arch, call) if (call.mma_tiler_mn, call.cluster_shape_mn) == (None, None) else None


def _results(call):
    """(groups, matrices of the result, rows of each in the mean, columns)"""
    if isinstance(call, calls.WgradCall):
        return call.groups, call.l, call.n, call.k
    return call.groups, call.groups, call.m / call.groups, call.n


@contextlib.contextmanager
def recorded():
    """A list of the calls that are lowered for the kernels meanwhile, by any thread: XLA lowers a device's part in one of its own."""
    recording: list = []
    _recordings.append(recording)
    try:
        yield recording
    finally:
        _recordings[:] = [other for other in _recordings if other is not recording]
