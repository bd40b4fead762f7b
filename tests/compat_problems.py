"""Problems in the document's layouts, made of `oracle.Case`s. torch is imported by whoever asks for its tensors."""

import contextlib
import pathlib
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import oracle


def aligned_case(rng, l=4, m=1280, n=48, k=32, **options):
    """Offsets in multiples of 256, an empty group, and a tail."""
    offsets = np.minimum(np.array([256, 256, 768, 1024, *[1024] * l])[:l], m)
    return oracle.make_case(rng, l, m, n, k, offsets=offsets, **options)


def to_torch(x, device="cpu"):
    import torch

    x = np.ascontiguousarray(x)
    if x.dtype == oracle.BF16:
        return torch.from_numpy(x.view(np.int16)).clone().view(torch.bfloat16).to(device)
    return torch.from_numpy(x).clone().to(device)


def to_numpy(x):
    """Of a result, whichever framework it is from."""
    if isinstance(x, jax.Array):
        return np.asarray(x)
    import torch

    x = x.detach().cpu()
    return x.view(torch.int16).numpy().view(oracle.BF16) if x.dtype == torch.bfloat16 else x.numpy()


def torch_arguments(case, device="cpu", discrete=False):
    """(keyword arguments of the wrapper, what must stay alive)."""
    import torch

    arguments = {
        "a_tensor": to_torch(case.a, device)[:, :, None],
        "padded_offsets": to_torch(case.offsets, device),
        "alpha_tensor": to_torch(case.alpha, device),
        "prob_tensor": to_torch(case.prob, device)[:, None, None],
        "b_major": case.b_major,
        "d_dtype": getattr(torch, case.d_dtype),
    }
    if case.bias is not None:
        arguments["bias_tensor"] = to_torch(case.bias, device).t()
    if case.generate_c:
        arguments |= {"generate_c": True, "c_dtype": getattr(torch, case.dtype_of("C"))}
    b = to_torch(case.b, device)
    if not discrete:
        return arguments | {"b_tensor": b.permute((1, 2, 0) if case.b_major == "k" else (2, 1, 0))}, b
    experts = [b[g].clone() for g in range(b.shape[0])]
    addresses = torch.tensor([w.data_ptr() for w in experts], dtype=torch.int64, device=device)
    return arguments | {"b_ptrs": addresses, "n": columns(case), "b_dtype": torch.bfloat16}, experts


def torch_wgrad_arguments(case, device="cpu", a_major="m", b_major="n"):
    """Keyword arguments of the wrapper for weight gradients. *_major: the contiguous dimension, k is that of the tokens."""
    x, y = (to_torch(operand, device) for operand in (case.x, case.y))
    return {
        "a_tensor": x.t() if a_major == "m" else x.t().contiguous(),
        "b_tensor": y if b_major == "n" else y.t().contiguous().t(),
        "sfa_tensor": None,
        "sfb_tensor": None,
        "offsets_tensor": to_torch(case.offsets, device),
    }


def jax_arguments(case):
    """The same for JAX, where the weights come by address."""
    experts = jax.block_until_ready([jnp.asarray(w) for w in case.b])
    addresses = np.array([w.unsafe_buffer_pointer() for w in experts], np.int64)
    arguments = {
        "a_tensor": jnp.asarray(case.a)[:, :, None],
        "padded_offsets": jnp.asarray(case.offsets),
        "alpha_tensor": jnp.asarray(case.alpha),
        "prob_tensor": jnp.asarray(case.prob)[:, None, None],
        "b_major": case.b_major,
        "b_ptrs": jnp.asarray(addresses.view(np.uint8)),
        "n": columns(case),
        "b_dtype": "bfloat16",
        "d_dtype": case.d_dtype,
    }
    if case.generate_c:
        arguments |= {"generate_c": True, "c_dtype": case.dtype_of("C")}
    return arguments, experts


def columns(case):
    return case.b.shape[1 if case.b_major == "k" else 2]


def check(result, case):
    """A wrapper's result, or a pair of D and C, is right."""
    d, c = (to_numpy(x)[:, :, 0] if x is not None else None for x in result)
    assert (c is not None) == case.generate_c
    oracle.check((d, c) if case.generate_c else d, case)


def run_python(code):
    """In a process of its own, which imports what the code says and no more."""
    where = pathlib.Path(__file__).parent
    done = subprocess.run([sys.executable, "-c", code], cwd=where, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def fake_forward(launches):
    """A stand-in for `direct.Forward` that appends to a list what it would launch."""

    class Forward:
        def __init__(self, call, bias_dtype=None):
            self.call, self.bias_dtype = call, bias_dtype

        def __call__(self, device, stream, **addresses):
            launches.append(types.SimpleNamespace(forward=self, device=device, stream=stream, **addresses))

        def load(self, device, stream=0):
            launches.append("load")

    return Forward


class FakeCuda:
    """What `torch_tensors` uses of torch.cuda, on CPU tensors."""

    def __init__(self, launches):
        self.launches = launches
        self.recorded: list = []
        self.capturing = False
        self.current = types.SimpleNamespace(cuda_stream=40)
        self.entered = []

    def current_device(self):
        return None  # a CPU tensor's index

    def is_current_stream_capturing(self):
        return self.capturing

    def ExternalStream(self, handle, device):
        return types.SimpleNamespace(cuda_stream=handle)

    def stream(self, stream):
        self.entered.append(stream.cuda_stream)
        return contextlib.nullcontext()
