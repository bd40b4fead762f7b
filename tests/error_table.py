"""Every condition under which the document's names refuse a call, each made to happen.

`python tests/error_table.py` writes the table of docs/errors.md; tests/test_compat.py compares.
"""

import contextlib
import os
import pathlib
import re
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import torch

import jax_grouped_gemm as package
from jax_grouped_gemm import direct, ffi_call, library
from jax_grouped_gemm.compat import plan, streams, torch_tensors

PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "errors.md"
BEGIN, END = "<!-- table: begin (python tests/error_table.py) -->", "<!-- table: end -->"
M, N, K, L = 512, 16, 32, 2
BF16 = torch.bfloat16


def tensors():
    """A legal call of the neutral wrapper."""
    return {
        "a_tensor": torch.zeros(M, K, 1, dtype=BF16),
        "padded_offsets": torch.tensor([256, 512], dtype=torch.int32),
        "alpha_tensor": torch.ones(L),
        "b_tensor": torch.zeros(L, N, K, dtype=BF16).permute(1, 2, 0),
        "prob_tensor": torch.ones(M, 1, 1),
    }


def call(name="grouped_gemm_wrapper", **changes):
    return getattr(package, name)(**tensors() | changes)


def discrete(*addresses, **changes):
    """The same with weights by address."""
    weights = torch.zeros(L, N, K, dtype=BF16)
    addresses = addresses or [w.data_ptr() for w in weights]
    arguments = {"b_tensor": None, "b_ptrs": torch.tensor(addresses), "n": N, "b_dtype": BF16}
    return call(**arguments | changes)


def jax_arguments():
    arguments = {name: jnp.asarray(x.float().numpy()) for name, x in tensors().items() if name != "b_tensor"}
    arguments["a_tensor"] = arguments["a_tensor"].astype(jnp.bfloat16)
    arguments["padded_offsets"] = arguments["padded_offsets"].astype(jnp.int32)
    weights = [jnp.zeros((N, K), jnp.bfloat16) for _ in range(L)]
    addresses = np.array([w.unsafe_buffer_pointer() for w in weights], np.int64)
    return arguments | {"b_ptrs": jnp.asarray(addresses.view(np.uint8)), "n": N, "b_dtype": "bfloat16"}


def jax_call(**changes):
    return package.grouped_gemm_wrapper(**jax_arguments() | changes)


def wgrad(name="grouped_gemm_wgrad_wrapper", **changes):
    """A legal call for weight gradients: (K, M) by (M, N), of which M are tokens."""
    arguments = {
        "a_tensor": zeros(M, K).t(),
        "b_tensor": zeros(M, N),
        "sfa_tensor": None,
        "sfb_tensor": None,
        "offsets_tensor": int32(256, 512),
    }
    return getattr(package, name)(**arguments | changes)


def wgrad_sm100(**changes):
    return wgrad("grouped_gemm_wgrad_wrapper_sm100", **changes)


def wgrad_of_jax(**changes):
    arguments = {
        "a_tensor": jnp.zeros((K, M), jnp.bfloat16),
        "b_tensor": jnp.zeros((M, N), jnp.bfloat16),
        "offsets_tensor": jnp.array([256, 512], jnp.int32),
    }
    return wgrad(**arguments | changes)


def samples():
    t = tensors()
    return {
        "sample_a": t["a_tensor"],
        "sample_c": None,
        "sample_d": torch.zeros(M, N, 1, dtype=BF16),
        "sample_padded_offsets": t["padded_offsets"],
        "sample_alpha": t["alpha_tensor"],
        "sample_b": t["b_tensor"],
        "sample_prob": t["prob_tensor"],
    }


def operation(compiled=True, **changes):
    made = package.GroupedGemm(**samples() | changes)
    if compiled:
        made.compile()
    return made


def support(**changes):
    return operation(compiled=False, **changes).check_support()


def execute(made, **changes):
    return made.execute(**tensors() | {"c_tensor": None, "d_tensor": torch.zeros(M, N, 1, dtype=BF16)} | changes)


@contextlib.contextmanager
def gpu(capability):
    """As if CPU tensors lay on such a GPU."""
    with mock.patch.object(torch_tensors, "capability", return_value=capability), forgotten():
        yield


@contextlib.contextmanager
def forgotten():
    """Without plans of before, or for after."""
    plan._remembered.cache_clear()
    yield
    plan._remembered.cache_clear()


def on_a_gpu(capability, run):
    def inside():
        with gpu(capability):
            run()

    return inside


def with_patch(target, name, value, run):
    def inside():
        with mock.patch.object(target, name, value), forgotten():
            run()

    return inside


def overlapping(**where):
    """Outputs in the memory of something else; all of them in one storage, so that the text has no random addresses."""
    storage = zeros(3 * M * N)

    def part(first):
        return storage[first : first + M * N].view(M, N, 1)

    return call(**{name: part(first) for name, first in where.items()}, generate_c=True)


def traced_output():
    arguments = jax_arguments()
    output = jax.ShapeDtypeStruct((M, N, 1), jnp.bfloat16)
    jax.eval_shape(lambda d: package.grouped_gemm_wrapper(**arguments, d_tensor=d), output)


def entry_under_tracing():
    def run(a):
        arguments = [jnp.zeros(L, jnp.int32), jnp.ones(L), jnp.zeros(8 * L, jnp.uint8), N, jnp.ones((M, 1, 1))]
        return package.grouped_gemm_jax_sm100(a, *arguments)

    jax.eval_shape(run, jax.ShapeDtypeStruct((M, K, 1), jnp.bfloat16))


def margin():
    with mock.patch.dict(os.environ, {"CUDNNFE_CLUSTER_OVERLAP_MARGIN": "some"}):
        call()


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def zeros(*shape, dtype=BF16):
    return torch.zeros(shape, dtype=dtype)


# Heading -> condition -> what makes it happen.
ROWS = {
    "which arguments": {
        "no prob": lambda: call(prob_tensor=None),
        "dense and discrete weights": lambda: call(b_ptrs=torch.zeros(L, dtype=torch.int64)),
        "no weights": lambda: call(b_tensor=None),
        "discrete without n": lambda: discrete(n=None),
        "discrete without b_dtype": lambda: discrete(b_dtype=None),
        "dense with n": lambda: call(n=N),
        "dense with b_dtype": lambda: call(b_dtype=BF16),
        "neither torch nor JAX": lambda: call(a_tensor=np.zeros((M, K, 1))),
        "two frameworks": lambda: call(alpha_tensor=jnp.ones(L)),
        "dense weights from JAX": lambda: jax_call(
            b_tensor=jnp.zeros((N, K, L), jnp.bfloat16), b_ptrs=None, n=None, b_dtype=None
        ),
        "bias from JAX": lambda: jax_call(bias_tensor=jnp.zeros((N, L))),
    },
    "shapes": {
        "a": lambda: call(a_tensor=zeros(M, K)),
        "offsets": lambda: call(padded_offsets=int32(256, 512, 512)),
        "alpha": lambda: call(alpha_tensor=torch.ones(L, 1)),
        "prob": lambda: call(prob_tensor=torch.ones(M)),
        "b": lambda: call(b_tensor=zeros(L, N, 24).permute(1, 2, 0)),
        "b_ptrs": lambda: discrete(b_ptrs=torch.zeros(L, 1, dtype=torch.int64)),
        "b_ptrs from JAX": lambda: jax_call(b_ptrs=jnp.zeros(8 * L - 1, jnp.uint8)),
        "bias": lambda: call(bias_tensor=zeros(L, N)),
        "M not aligned": lambda: call(a_tensor=zeros(300, K, 1), prob_tensor=torch.ones(300, 1, 1)),
        "K": lambda: call(a_tensor=zeros(M, 36, 1), b_tensor=zeros(L, N, 36).permute(1, 2, 0)),
        "N": lambda: call(b_tensor=zeros(L, 12, K).permute(1, 2, 0)),
        "no experts": lambda: call(b_tensor=zeros(0, N, K).permute(1, 2, 0)),
        "n": lambda: discrete(n=-8),
    },
    "strides": {
        "a": lambda: call(a_tensor=zeros(K, M).t()[:, :, None]),
        "offsets": lambda: call(padded_offsets=int32(256, 0, 512, 0)[::2]),
        "b not K-major": lambda: call(b_tensor=zeros(L, K, N).permute(2, 1, 0)),
        "b stored (N, K, L)": lambda: call(b_tensor=zeros(N, K, L)),
        "b not N-major": lambda: call(b_major="n"),
        "b_ptrs": lambda: discrete(b_ptrs=torch.zeros(2 * L, dtype=torch.int64)[::2]),
        "bias": lambda: call(bias_tensor=zeros(N, L)),
        "prob": lambda: call(prob_tensor=torch.ones(M, 2)[:, 0, None, None]),
    },
    "dtypes": {
        "a": lambda: call(a_tensor=zeros(M, K, 1, dtype=torch.float16)),
        "b": lambda: call(b_tensor=zeros(L, N, K, dtype=torch.float32).permute(1, 2, 0)),
        "offsets": lambda: call(padded_offsets=int32(256, 512).long()),
        "alpha": lambda: call(alpha_tensor=zeros(L)),
        "prob": lambda: call(prob_tensor=zeros(M, 1, 1)),
        "b_ptrs": lambda: discrete(b_ptrs=int32(1, 2)),
        "bias": lambda: call(bias_tensor=zeros(L, N, dtype=torch.float64).t()),
        "b_dtype": lambda: discrete(b_dtype=torch.float16),
        "acc_dtype": lambda: call(acc_dtype=torch.float16),
        "d_dtype": lambda: call(d_dtype=torch.int8),
        "c_dtype": lambda: call(generate_c=True, c_dtype="number"),
    },
    "devices": {
        "two devices": lambda: call(prob_tensor=torch.ones(M, 1, 1, device="meta")),
        "neither CUDA nor CPU": lambda: call(**{name: x.to("meta") for name, x in tensors().items()}),
    },
    "alignment": {"an address": lambda: call(a_tensor=zeros(M * K + 1)[1:].view(M, K, 1))},
    "values": {
        "offsets decrease": lambda: call(padded_offsets=int32(512, 256)),
        "offsets past M": lambda: call(padded_offsets=int32(256, 768)),
        "offsets negative": lambda: call(padded_offsets=int32(-256, 256)),
        "offsets not aligned": lambda: call(padded_offsets=int32(256, 300)),
        "a null pointer": lambda: discrete(64, 0),
        "a pointer not aligned": lambda: discrete(64, 72),
    },
    "outputs": {
        "d shape": lambda: call(d_tensor=zeros(M, N)),
        "d strides": lambda: call(d_tensor=zeros(N, M).t()[:, :, None]),
        "d dtype": lambda: call(d_tensor=zeros(M, N, 1, dtype=torch.float32)),
        "c dtype": lambda: call(c_tensor=zeros(M, N, 1, dtype=torch.float32), generate_c=True),
        "c and d in one place": lambda: overlapping(d_tensor=0, c_tensor=M * N - 8),
        "cd_major": lambda: call(cd_major="m"),
        "written by address under tracing": traced_output,
    },
    "options": {
        "tile and cluster": lambda: call(mma_tiler_mn=(64, 64)),
        "not a pair": lambda: call(mma_tiler_mn=256),
        "cluster": lambda: call(cluster_shape_mn=(4, 4)),
        "b_major": lambda: call(b_major="m"),
        "b_major of an _sm100 name": lambda: call("grouped_gemm_wrapper_sm100", b_major="n"),
        "m_aligned": lambda: call(m_aligned=0),
        "m_aligned of an _sm100 name": lambda: call("grouped_gemm_wrapper_sm100", m_aligned=128),
        "generate_c": lambda: call(generate_c="yes"),
        "1 is not True": lambda: call(generate_c=1),
        "use_dynamic_sched": lambda: call(use_dynamic_sched=2),
        "use_dynamic_sched None": lambda: call(use_dynamic_sched=None),
        "overlap_margin": lambda: call(overlap_margin=-1),
        "the environment's margin": margin,
        "current_stream": lambda: streams.handle("default"),
    },
    "the class": {
        "no d": lambda: support(sample_d=None),
        "no c": lambda: support(generate_c=True),
        "sample_b and num_experts": lambda: support(num_experts=L),
        "no sample_b, no num_experts": lambda: support(sample_b=None),
        "num_experts": lambda: support(sample_b=None, num_experts=0, b_shape=(N, K), b_dtype=BF16),
        "b_shape": lambda: support(sample_b=None, num_experts=L, b_shape=(N,), b_dtype=BF16),
        "b_shape and a": lambda: support(sample_b=None, num_experts=L, b_shape=(N, 64), b_dtype=BF16),
        "execute before compile": lambda: execute(operation(compiled=False)),
        "execute without d": lambda: execute(operation(), d_tensor=None),
        "other sizes than the samples'": lambda: execute(
            operation(), b_tensor=zeros(L, 24, K).permute(1, 2, 0), d_tensor=zeros(M, 24, 1)
        ),
        "bias, of which there was no sample": lambda: execute(operation(), bias_tensor=zeros(L, N).t()),
        "the other kind of weights": lambda: execute(operation(), b_tensor=None, b_ptrs=torch.zeros(L).long()),
    },
    "weight gradients": {
        "no offsets": lambda: wgrad(offsets_tensor=None),
        "a shape": lambda: wgrad(a_tensor=zeros(K, M, 1)),
        "a strides": lambda: wgrad(a_tensor=zeros(M, 2 * K)[:, :K].t()),
        "a dtype": lambda: wgrad(a_tensor=zeros(M, K, dtype=torch.float32).t()),
        "b tokens": lambda: wgrad(b_tensor=zeros(M // 2, N)),
        "b strides": lambda: wgrad(b_tensor=zeros(M, 2 * N)[:, ::2]),
        "M not a multiple of 8": lambda: wgrad(a_tensor=zeros(M, 12).t()),
        "N not a multiple of 8": lambda: wgrad(b_tensor=zeros(M, 12)),
        "offsets dtype": lambda: wgrad(offsets_tensor=torch.tensor([256, 512])),
        "no experts": lambda: wgrad(offsets_tensor=int32()),
        "offsets decrease": lambda: wgrad(offsets_tensor=int32(512, 256)),
        "offsets past T": lambda: wgrad(offsets_tensor=int32(256, 768)),
        "offsets not aligned, an _sm100 name": on_a_gpu("10.0", lambda: wgrad_sm100(offsets_tensor=int32(256, 300))),
        "tokens not aligned, an _sm100 name": on_a_gpu(
            "10.0", lambda: wgrad_sm100(a_tensor=zeros(K, 300), b_tensor=zeros(300, N))
        ),
        "wgrad shape": lambda: wgrad(wgrad_tensor=zeros(L, N, K)),
        "wgrad strides": lambda: wgrad(wgrad_tensor=zeros(L, N, K).transpose(1, 2)),
        "wgrad_dtype": lambda: wgrad(wgrad_dtype=torch.float16),
        "adding to bfloat16": lambda: wgrad(wgrad_tensor=zeros(L, K, N), accumulate_on_output=True),
        "accumulate_on_output": lambda: wgrad(accumulate_on_output=1),
        "scales": lambda: wgrad(sfa_tensor=zeros(8)),
        "sf_vec_size": lambda: wgrad(sf_vec_size=32),
        "outputs by address": lambda: wgrad(output_mode="discrete"),
        "acc_dtype": lambda: wgrad(acc_dtype="float16"),
        "input_order": lambda: wgrad(input_order="tensor_ragged"),
        "tile": lambda: wgrad(mma_tiler_mn=(64, 64)),
        "an output of JAX's": lambda: wgrad_of_jax(wgrad_tensor=jnp.zeros((L, K, N), jnp.bfloat16)),
        "adding to an output of JAX's": lambda: wgrad_of_jax(accumulate_on_output=True),
        "an older GPU": on_a_gpu("9.0", lambda: wgrad_sm100()),
    },
    "the machine": {
        "an _sm100 name on an older GPU": on_a_gpu("9.0", lambda: call("grouped_gemm_wrapper_sm100")),
        "an _sm100 name without a GPU": lambda: call("grouped_gemm_wrapper_sm100"),
        "an _sm100 class": lambda: package.GroupedGemmSm100(**samples()).check_support(),
        "traced, with an older GPU": with_patch(ffi_call, "cuda_capabilities", lambda: ("9.0",), entry_under_tracing),
        "a GPU without kernels": on_a_gpu("8.0", call),
        "no library": with_patch(
            library, "registered", lambda: "libjax_grouped_gemm.so is not there", lambda: direct.Forward(None)
        ),
    },
}  # fmt: skip


def error_of(trigger):
    """(exception type, its text), addresses left out."""
    try:
        trigger()
    except (ValueError, RuntimeError) as error:
        return type(error).__name__, re.sub(r"0x[0-9a-f]{7,}", "0x7f...", str(error))
    raise AssertionError("nothing was raised")


def table():
    lines = []
    for heading, rows in ROWS.items():
        lines += [f"### {heading[0].upper()}{heading[1:]}", "", "| condition | raises | text |", "|---|---|---|"]
        for condition, trigger in rows.items():
            exception, text = error_of(trigger)
            lines.append(f"| {condition} | `{exception}` | {text.replace('|', chr(92) + '|')} |")
        lines.append("")
    return "\n".join(lines)


def written():
    """The table that docs/errors.md has."""
    return PAGE.read_text().split(BEGIN + "\n")[1].split(END)[0]


if __name__ == "__main__":
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table()}{END}{rest.split(END)[1]}")
    sys.exit()
