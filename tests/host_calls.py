"""The Python functions that one call of an op goes through until its kernel is started, on a made-up GPU.

`python tests/host_calls.py rms_norm linear ...` prints a JSON object: for each of `OPS`, the functions that the second
and later calls enter, in order. Run as a process of its own: it changes PyTorch's tensors.

The made-up GPU has a driver of functions that do nothing, and its tensors are in the CPU's memory.
"""

import ctypes
import itertools
import json
import os
import sys
import types

os.environ["TRITON_INTERPRET"] = "0"

import torch

from rooftile import launching, library, native, runtime

NOTHING, ON_DEVICE_0 = (
    ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)(lambda *_: 0),
    ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int))(lambda device: device.__setitem__(0, 0) or 0),
)


def compiled(launch, programs, first, args):
    """What Triton's launcher would have compiled for those arguments: by position tensors, strides and numbers."""
    names = launch.launcher.kernel.arg_names
    kinds = []
    for i, _ in enumerate(names):
        if i >= len(args) or args[i] is None:
            kinds.append("constexpr")
        elif i >= launch.n_tensors:
            kinds.append("fp32" if isinstance(args[i], float) else "i64")
        else:
            kinds.append("*fp32" if isinstance(args[i], torch.Tensor) else "tensordesc<fp32[8, 16]>")
    described = [arg for arg, kind in zip(args, kinds, strict=False) if kind.startswith("tensordesc")]
    meta = {"swizzle": 3, "elem_size": 2, "elem_type": 6, "fp4_padded": False}
    metadata = types.SimpleNamespace(
        global_scratch_size=0,
        profile_scratch_size=0,
        launch_cooperative_grid=False,
        launch_pdl=False,
        tensordesc_meta=[{**meta, "block_size": list(arg.block_shape)} for arg in described],
    )
    source = types.SimpleNamespace(signature=dict(zip(names, kinds, strict=True)))
    return types.SimpleNamespace(
        metadata=metadata, packed_metadata=(4, 1, 0), src=source, function=1, run=lambda *_: None
    )


def make_up_a_gpu(arch="sm_90"):
    """Before any op is imported."""
    module = native.build()
    functions = (
        "cuLaunchKernelEx",
        "cuTensorMapEncodeTiled",
        "cuGetErrorString",
        "cuDevicePrimaryCtxRetain",
        "cuCtxSetCurrent",
    )
    addresses = {name: ctypes.cast(NOTHING, ctypes.c_void_p).value for name in functions}
    module.use_driver({**addresses, "cuCtxGetDevice": ctypes.cast(ON_DEVICE_0, ctypes.c_void_p).value})
    native.configure(module, id)  # any function in C of one argument that returns an integer
    native.module = lambda: module
    target = runtime.TARGETS[arch]
    runtime.target = lambda device: target
    library._guarded = lambda *args: args[-1]  # the launch
    launching._current_device = lambda: 0
    launching._stream = lambda device: 0
    launching._zeros = lambda n, device: torch.zeros(n, dtype=torch.int32)
    launching.Launch._through_triton = compiled
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.Tensor.get_device = int  # 0, without a function in Python


def ops():
    import rooftile

    x, r = torch.randn(16, 64), torch.randn(16, 64)
    w, q, cos, ids = torch.randn(64), torch.randn(1, 2, 16, 64), torch.randn(16, 64), torch.arange(16)
    prompt = torch.randn(1, 2, 128, 64, dtype=torch.bfloat16)
    decoding = tuple(torch.randn(1, n, 2, 64) for n in (1, 256, 256))
    many, weight = torch.randn(64, 512, dtype=torch.bfloat16), torch.randn(512, 512, dtype=torch.bfloat16)
    lengths = torch.full((1,), 256, dtype=torch.int32)
    caches = tuple(torch.zeros(1, 16, 2, 64) for _ in range(2))
    start, positions = lengths[:1] - 250, itertools.count()
    return {
        "rms_norm": lambda: rooftile.rms_norm(x, w),
        "add_rms_norm": lambda: rooftile.add_rms_norm(x, r, w),
        "layer_norm": lambda: rooftile.layer_norm(x, w, w),
        "softmax": lambda: rooftile.softmax(x),
        "kl_div": lambda: rooftile.kl_div(x, r),
        "cross_entropy": lambda: rooftile.cross_entropy(x, ids),
        "silu_mul": lambda: rooftile.silu_mul(x, r),
        "gelu_mul": lambda: rooftile.gelu_mul(x, r),
        "silu_mul_packed": lambda: rooftile.silu_mul_packed(x),
        "linear": lambda: rooftile.linear(many, weight),
        "matmul": lambda: rooftile.matmul(many, weight),
        "gated_linear": lambda: rooftile.gated_linear(many, weight),
        "rope": lambda: rooftile.rope(q, q, cos, cos),
        "attention": lambda: rooftile.attention(prompt, prompt, prompt, causal=True),
        "qk_norm_rope": lambda: rooftile.qk_norm_rope(q, q, w, w, cos, cos),
        "embedding": lambda: rooftile.embedding(ids, x),
        "decode_attention": lambda: rooftile.decode_attention(*decoding, lengths, layout="bthd"),
        "append_kv": lambda: rooftile.append_kv(q[:, :, :4], q[:, :, :4], *caches, start),
        "rope_and_cache": lambda: rooftile.rope_and_cache(
            q[:, :, :4], q[:, :, :4], q[:, :, :4], cos, cos, *caches, start
        ),
        "sample": lambda: rooftile.sample(x, temperature=0.5, positions=next(positions)),
    }


def calls(call):
    """The Python functions that the call enters, but for itself."""
    entered = []

    def note(frame, event, _):
        if event == "call":
            entered.append(f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_code.co_name}")

    for _ in range(3):
        call()
    launches = [launch for launch in launching._LAUNCHES if launch._native is not None]
    assert any(launch._native().bound for launch in launches if launch._native() is not None), "no kernel was bound"
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    # The driver's functions are made up in Python, and not part of a call.
    return [name for name in entered[1:] if not name.endswith(":<lambda>") or "host_calls" not in name]


def main(names):
    make_up_a_gpu()
    known = ops()
    with torch.no_grad():
        print(json.dumps({name: calls(known[name]) for name in names or known}))


if __name__ == "__main__":
    main(sys.argv[1:])
