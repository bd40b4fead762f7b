"""What is tuned is used; what a call names goes before it. Times are made up here: test_tuning_gpu takes real ones."""

import dataclasses
import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_grouped_gemm import (
    calls,
    config,
    contract,
    ffi_call,
    grouped_gemm,
    grouped_gemm_wgrad,
    library,
    selection,
    tune,
    tuned,
    tuning,
    use_tuned,
)

L, M, N, K = 8, 16384, 1536, 2048
A, B, ENDS = (jax.ShapeDtypeStruct(*spec) for spec in (((M, K), jnp.bfloat16), ((L, N, K), jnp.bfloat16), ((L,), jnp.int32)))  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_tuned():
    use_tuned(None)
    yield
    use_tuned(None)


@pytest.fixture
def hopper(monkeypatch):
    """As in a process with one H200, as far as lowering goes."""
    monkeypatch.setattr(ffi_call, "cuda_capabilities", lambda: ("9.0",))
    monkeypatch.setattr(library, "manifest", lambda: {"build_id": "the build"})
    monkeypatch.setattr(library, "registered", lambda: None)
    monkeypatch.setattr(jax, "device_count", lambda: 1)  # nothing can be compiled for it here
    lower = jax.stages.Traced.lower
    monkeypatch.setattr(jax.stages.Traced, "lower", functools.partialmethod(lower, lowering_platforms=("cuda",)))


@pytest.fixture
def times(monkeypatch, hopper):
    """Seconds by (tile, dynamic), to be filled: what is not there takes longest. And the calls that were timed."""

    class Times(dict):
        timed: list

    times = Times()
    times.timed = []

    def time_all(options, call, loads):
        times.timed.append((call, loads))
        return {option: times.get(option, 9.0) for option in options} | {None: 3.0}

    monkeypatch.setattr(tuning, "_time_all", time_all)
    return times


def call_of(**changes):
    facts = {"b_major": "k", "weights": "dense", "d_dtype": "bfloat16", "has_alpha": False, "has_prob": False}
    return calls.Call(M, N, K, L, **facts | {"implementation": None} | changes)


def kernel_of(**options):
    """(name of the Hopper kernel, dynamic) in the program."""
    run = functools.partial(grouped_gemm, **options)
    text = jax.jit(lambda a, b, ends: run(a, b, offsets=ends)).trace(A, B, ENDS).lower().as_text()
    return re.findall(r'sm90 = "(\w+)"', text)[0], re.findall(r"dynamic = (\w+)", text)[0] == "true"


WINNER = config.TILES[90][2]


def tuned_to(tmp_path, times, winner=(WINNER, False), **options):
    times[winner] = 1.0
    path = tmp_path / "tuned.json"
    return path, tune(lambda a, b, ends: grouped_gemm(a, b, offsets=ends, **options), A, B, ENDS, path=path)


def test_what_is_fastest_is_used(tmp_path, times):
    before = kernel_of()
    assert f"_{WINNER}_" not in before[0]
    _, (found,) = tuned_to(tmp_path, times)
    assert (found.mma_tiler_mn, found.cluster_shape_mn, found.use_dynamic_sched) == (
        WINNER.mma_tiler_mn,
        WINNER.cluster_shape_mn,
        False,
    )
    assert (found.seconds, found.seconds_of_rule) == (1.0, 3.0)
    assert f"_{WINNER}_" in kernel_of()[0]
    assert kernel_of()[1] is False
    use_tuned(None)
    assert kernel_of() == before


def test_a_schedule_is_tuned_too(tmp_path, times):
    tuned_to(tmp_path, times, (WINNER, True))
    assert kernel_of()[1] is True
    use_tuned(None)
    assert config.select_schedule(L, L, M / L, N) is True  # so that the other one, above, was no coincidence


@pytest.mark.parametrize(
    "other",
    [{"d_dtype": "float32"}, {"generate_c": True}, {"b_major": "n"}],
    ids=lambda other: next(iter(other)),
)
def test_other_calls_keep_the_rule(tmp_path, times, other):
    tuned_to(tmp_path, times)
    weights = jax.ShapeDtypeStruct((L, K, N), jnp.bfloat16) if "b_major" in other else B
    run = functools.partial(grouped_gemm, **other)
    text = jax.jit(lambda a, b, ends: run(a, b, offsets=ends)).trace(A, weights, ENDS).lower().as_text()
    assert f"_{WINNER}_" not in text


def test_arguments_go_before_it(tmp_path, times):
    tuned_to(tmp_path, times)
    assert "_128x192x64_" in kernel_of(mma_tiler_mn=(256, 192))[0]
    assert f"_{WINNER}_" in kernel_of(use_dynamic_sched=True)[0]
    assert kernel_of(use_dynamic_sched=True)[1] is True


def test_every_call_of_a_program_is_timed_once(tmp_path, times):
    """Forward, both gradients; a layer that is there twice, and one in a scan, count once."""

    def step(a, b, ends):
        def loss(b, a):
            h = grouped_gemm(a, b, offsets=ends)
            h = (
                jax.lax.scan(lambda a, _: (grouped_gemm(a, b, offsets=ends)[:, :1] + a, None), a, length=2)[0]
                + h[:, :1]
            )
            return jnp.sum(grouped_gemm(h, b, offsets=ends).astype(jnp.float32))

        return jax.grad(loss)(b, a)

    found = tune(step, A, B, ENDS, path=tmp_path / "tuned.json")
    kinds = sorted((each.facts["product"], each.facts.get("b_major")) for each in found)
    assert kinds == [("forward", "k"), ("forward", "n"), ("wgrad", None)]
    assert len(times.timed) == 3


def test_the_file_keeps_what_it_has_and_is_a_line_per_call(tmp_path, times):
    path, _ = tuned_to(tmp_path, times)
    first = path.read_text().splitlines()
    tuned_to(tmp_path, times, (WINNER, True), d_dtype="float32")
    second = path.read_text().splitlines()
    assert {line.rstrip(",") for line in first} < {line.rstrip(",") for line in second}
    assert len(second) == len(first) + 1
    assert len(json.loads(path.read_text())["entries"]) == 2
    tuned.merge(path, tuned.read(path))
    assert path.read_text().splitlines() == second
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_environment(tmp_path, times, monkeypatch):
    path, _ = tuned_to(tmp_path, times)
    use_tuned(None)
    monkeypatch.setattr(tuned, "_chosen", None)
    monkeypatch.setenv(tuned.FILE, str(path))
    tuned._of_environment.cache_clear()
    assert f"_{WINNER}_" in kernel_of()[0]
    monkeypatch.delenv(tuned.FILE)
    tuned._of_environment.cache_clear()
    assert f"_{WINNER}_" not in kernel_of()[0]
    tuned._of_environment.cache_clear()


def test_a_tile_that_is_no_longer_compiled(tmp_path, times, caplog):
    path, _ = tuned_to(tmp_path, times)
    path.write_text(path.read_text().replace("[256, 128]", "[256, 136]"))
    use_tuned(path)
    assert f"_{WINNER}_" not in kernel_of()[0]
    assert "a tile that this build does not have: tune again" in caplog.text


LINE = '"mma_tiler_mn": [256, 128], "cluster_shape_mn": [2, 1], "seconds": 1, "seconds_of_rule": 1, "product": "forward", "arch": 90'


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b'{"format": 2, "entries": []}',
        b'{"format": 1, "entries": [{}]}',
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        f'{{"format": 1, "entries": [{{{LINE}, "use_dynamic_sched": "no"}}]}}'.encode(),
    ],
    ids=["empty", "list", "format", "no entry", "cut", "binary", "deep", "type"],
)
def test_a_file_of_something_else(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_bytes(text)
    with pytest.raises(ValueError, match=r"other\.json must be a file that jax_grouped_gemm\.tune wrote; found"):
        use_tuned(path)


def test_entries_of_an_architecture_that_is_not_known_are_left_out(tmp_path):
    path = tmp_path / "newer.json"
    line = LINE.replace('"arch": 90', '"arch": 120') + ', "use_dynamic_sched": true'
    path.write_text(f'{{"format": 1, "entries": [{{{line}}}, {{{LINE}, "use_dynamic_sched": true}}]}}')
    assert [dict(facts)["arch"] for facts in tuned.read(path)] == [90]


def test_programs_that_exist_are_lowered_anew(tmp_path, times):
    """One jitted function all along: JAX remembers what it lowered."""
    program = jax.jit(lambda a, b, ends: grouped_gemm(a, b, offsets=ends))

    def kernel():
        return f"_{WINNER}_" in program.trace(A, B, ENDS).lower().as_text()

    assert not kernel()
    times[WINNER, False] = 1.0
    tune(program, A, B, ENDS, path=tmp_path / "tuned.json")
    assert kernel()
    use_tuned(None)
    assert not kernel()
    use_tuned(tmp_path / "tuned.json")
    assert kernel()


def test_what_was_tuned_before_stays_in_use(tmp_path, times):
    tuned_to(tmp_path, times, d_dtype="float32")
    times[WINNER, False] = 1.0
    tune(lambda a, b, ends: grouped_gemm(a, b, offsets=ends), A, B, ENDS, path=tmp_path / "second.json")
    assert f"_{WINNER}_" in kernel_of()[0]
    assert f"_{WINNER}_" in kernel_of(d_dtype="float32")[0]


def test_a_named_tile_has_the_schedule_of_the_rule(tmp_path, times):
    tuned_to(tmp_path, times, (WINNER, False))
    assert kernel_of()[1] is False
    assert kernel_of(mma_tiler_mn=(256, 256))[1] is True


def test_both_schedules_are_timed_where_one_call_names_its_own(tmp_path, times):
    times[WINNER, False] = 1.0

    def two(a, b, ends):
        return grouped_gemm(a, b, offsets=ends), grouped_gemm(a, b, offsets=ends, use_dynamic_sched=True)

    (found,) = tune(two, A, B, ENDS, path=tmp_path / "tuned.json")
    assert found.use_dynamic_sched is False
    assert times.timed[0][0].dynamic is None


def test_what_a_choice_depends_on():
    """Calls that differ in what makes other kernels, or other work, are tuned apart."""
    calls_ = [
        call_of(),
        call_of(overlap_margin=64),
        call_of(has_alpha=True),
        call_of(has_bias=True),
        call_of(d_dtype="float16"),
        dataclasses.replace(call_of(), l=1, mapped_groups=L),
        dataclasses.replace(call_of(), m=M + 1),
        calls.WgradCall(M, N, K, L, "bfloat16", False, None),
        calls.WgradCall(M, N, K, L, "float32", False, None),
        calls.WgradCall(M, N, K, L, "float32", False, None, accumulate=True),
    ]
    assert len({tuned.key(90, call) for call in calls_}) == len(calls_)
    assert tuned.key(90, call_of(weights="pointers")) == tuned.key(90, call_of(has_prob=False))


def test_blackwell_is_static_unless_asked(monkeypatch):
    """Nobody has timed it there."""
    assert selection.scheduled((90,), call_of()).dynamic is True
    assert selection.scheduled((100,), call_of()).dynamic is False
    assert selection.scheduled((100,), call_of(dynamic=True)).dynamic is True
    assert selection.scheduled((), call_of()).dynamic is True


def test_recordings_end_alone():
    with selection.recorded() as outer:
        with selection.recorded() as inner:
            selection.scheduled((90,), call_of())
        selection.scheduled((90,), call_of(dynamic=True))
    selection.scheduled((90,), call_of())
    assert (len(outer), len(inner)) == (2, 1)


def test_a_path_that_cannot_be_written_is_told_first(tmp_path, times):
    with pytest.raises(OSError, match="none"):
        tune(lambda a: a, A, path=tmp_path / "none" / "tuned.json")
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match="must be a file that jax_grouped_gemm"):
        tune(lambda a: a, A, path=tmp_path / "other.json")
    assert not times.timed


def test_the_rule_is_what_it_is_compared_with(tmp_path, times, monkeypatch):
    """Not what was tuned before."""
    seen = []
    time_all = tuning._time_all
    monkeypatch.setattr(tuning, "_time_all", lambda *args: (seen.append(tuned.in_use()), time_all(*args))[1])
    tuned_to(tmp_path, times)
    tuned_to(tmp_path, times)
    assert seen == [{}, {}]


def test_the_environment_names_a_file_that_is_not_there(monkeypatch, hopper):
    monkeypatch.setattr(tuned, "_chosen", None)
    monkeypatch.setenv(tuned.FILE, "/nowhere/tuned.json")
    tuned._of_environment.cache_clear()
    with pytest.raises(
        ValueError, match=r"JAX_GROUPED_GEMM_TUNED must name a file .* found '/nowhere/tuned.json' .*unset it"
    ):
        kernel_of()


def test_a_load_that_fits_no_call(tmp_path, times):
    with pytest.raises(ValueError, match=r"as many sizes as some call has groups \(8\); got one of 7"):
        tune(lambda a, b, ends: grouped_gemm(a, b, offsets=ends), A, B, ENDS, path=tmp_path / "x", loads=[np.ones(7)])


def test_no_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(ffi_call, "cuda_capabilities", lambda: ())
    with pytest.raises(RuntimeError, match="tune times the kernels, and needs an NVIDIA GPU"):
        tune(lambda: None, path=tmp_path / "x")


def test_nothing_to_tune(tmp_path, times):
    for function in (
        lambda a, b, ends: a,
        lambda a, b, ends: grouped_gemm(a, b, offsets=ends, mma_tiler_mn=WINNER.mma_tiler_mn),
        lambda a, b, ends: grouped_gemm(a, b, offsets=ends, implementation="reference"),
    ):
        with pytest.raises(ValueError, match="function must call grouped_gemm"):
            tune(function, A, B, ENDS, path=tmp_path / "x")
    assert tuned.read(tmp_path / "x") == {}


@pytest.mark.parametrize("load", [np.zeros(3), [[1.0]], [1, -1], [np.nan], [], ["a"], 5], ids=str)
def test_malformed_loads(tmp_path, times, load):
    with pytest.raises(ValueError, match="loads must be a list of 1-D arrays .* at index 1"):
        tune(lambda a: a, A, path=tmp_path / "x", loads=[np.ones(3), load])


def test_loads():
    """An equal share and an unequal one; or the caller's, for calls with as many groups."""
    equal, unequal = tuning._group_sizes(call_of(), None)
    assert np.diff(equal, prepend=0).tolist() == [M // L] * L
    sizes = np.diff(unequal, prepend=0)
    assert sizes.sum() == M
    assert sizes.max() > 2 * sizes.min()
    (mine,) = tuning._group_sizes(call_of(), [np.array([1.0, 0, 0, 0, 0, 0, 0, 3]), np.ones(5)])
    assert np.diff(mine, prepend=0).tolist() == [M // 4, 0, 0, 0, 0, 0, 0, 3 * M // 4]
    assert len(tuning._group_sizes(dataclasses.replace(call_of(), l=1), None)) == 1


def test_candidates():
    """Everything compiled, both ways; only the caller's way where there is one."""
    every = tuning.candidates(90, call_of())
    assert len(every) == 2 * len(config.TILES[90])
    for (tile, dynamic), call in every.items():
        assert selection.tile_of(90, call) == tile
        assert selection.scheduled((90,), call).dynamic is dynamic
    wgrad = calls.WgradCall(M, N, K, L, "bfloat16", False, None)
    assert {tile for tile, _ in tuning.candidates(90, wgrad)} == set(config.WGRAD_TILES[90])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"has_alpha": True, "has_prob": True, "has_bias": True, "c_dtype": "float32", "d_dtype": "float16"},
        {"weights": "pointers", "b_major": "n"},
        {"mapped_groups": 3, "has_alpha": True},
    ],
    ids=lambda changes: "-".join(changes) or "plain",
)
def test_operands_are_those_of_the_call(changes):
    """Each kind of call runs, here by the reference."""
    call = dataclasses.replace(call_of(**changes), m=24, n=16, k=8, l=3, implementation="reference")
    (ends, *_) = tuning._group_sizes(call, None)
    arm = tuning._arm(call, tuning._operands(call), ends)
    outputs = arm.call(0)
    arm.wait(outputs)
    assert [(x.shape, x.dtype) for x in outputs] == [((24, 16), dtype) for dtype in call.output_dtypes]
    assert len({bytes(np.asarray(arm.call(i)[0]).view(np.uint8)) for i in range(2)}) == 2  # another set of operands


@pytest.mark.parametrize("accumulate", [False, True])
def test_operands_of_weight_gradients(accumulate):
    call = calls.WgradCall(24, 16, 8, 3, "float32", True, "reference", accumulate=accumulate)
    (ends, *_) = tuning._group_sizes(call, None)
    arm = tuning._arm(call, tuning._operands(call), ends)
    first = np.asarray(arm.call(0))
    assert (first.shape, first.dtype) == ((3, 16, 8), np.float32)
    sets = len(tuning._operands(call))
    np.testing.assert_allclose(
        arm.call(sets), 2 * first if accumulate else first, rtol=1e-6
    )  # of the same operands again
    program = arm.call.__closure__[[*arm.call.__code__.co_freevars].index("add")].cell_contents
    assert (program.memory_analysis().alias_size_in_bytes > 0) is accumulate  # in place


def test_each_expert_has_one_group():
    """As on a device that has one of eight experts, and as a vmap has it."""
    for l, groups in ((1, 8), (16, 18)):
        call = calls.WgradCall(64, 16, 8, l, "float32", False, None, mapped_groups=groups)
        experts = np.asarray(tuning._operands(call)[0].experts)
        assert sorted(experts[experts >= 0]) == list(range(l))
        assert (experts[experts < 0] == -1).sum() == groups - l


def test_the_fastest_wins():
    a, b = config.TILES[90][:2]
    entry = tuning._fastest({None: 3.0, (a, False): 2.0, (b, True): 1.5, (a, True): 1.7})
    assert entry == tuned.Entry(b, True, 1.5, 3.0)


def test_wgrad_is_tuned_by_itself(tmp_path, times):
    x, y = (jax.ShapeDtypeStruct((M, columns), jnp.bfloat16) for columns in (N, K))
    tile = config.WGRAD_TILES[90][2]
    times[tile, True] = 1.0
    (found,) = tune(lambda x, y, ends: grouped_gemm_wgrad(x, y, offsets=ends), x, y, ENDS, path=tmp_path / "t")
    assert found.facts["product"] == "wgrad"
    text = jax.jit(lambda x, y, ends: grouped_gemm_wgrad(x, y, offsets=ends)).trace(x, y, ENDS).lower().as_text()
    assert f'"sm90_wgrad_{tile}_bfloat16"' in text


def test_errors_name_the_remedy():
    for error in (contract.nothing_to_tune_on(), contract.nothing_to_tune(), contract.bad_load(0, 5)):
        assert len(str(error).split("; ")) >= 3
