"""Quantized checkpoints as they are published, written by the formats' definitions, one number at a time.

Each format makes a module's tensors from random numbers, and returns them with the weight that they stand for, in
float32: `format(n, k) -> (tensors by name, weight)`. Nothing is shared with the code that reads them.
"""

import json

import numpy as np
import torch

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column that each nibble of a word holds


def _words(numbers, place):
    """Numbers of 4 bits, packed eight to a word along the last dimension; nibble i has column `place[i]` of eight."""
    rows, columns = numbers.shape
    words = np.zeros((rows, -(-columns // 8)), np.uint32)
    for word in range(words.shape[1]):
        for nibble in range(8):
            column = 8 * word + place[nibble]
            if column < columns:
                words[:, word] |= numbers[:, column].astype(np.uint32) << np.uint32(4 * nibble)
    return torch.from_numpy(words.view(np.int32))


def _draw(n, k, group, symmetric, low=0, high=16):
    """Numbers (N, K), zero points (N, G) and float16 scales (N, G) of 4 bits, and the group."""
    group = k if group == -1 else group
    rng = np.random.default_rng(n + k)
    q = rng.integers(0, 16, (n, k))
    z = np.full((n, k // group), 8) if symmetric else rng.integers(low, high, (n, k // group))
    scale = torch.from_numpy(rng.uniform(0.02, 0.08, (n, k // group)).astype(np.float16))
    return q, z, scale, group


def _weight(q, z, scale, groups):
    """(q - z) * scale; `groups` is the group of each column."""
    return torch.from_numpy((q - z[:, groups]).astype(np.float32)) * scale.float()[:, groups]


def gptq(n, k, *, group=128, sym=True, v2=False, order=None):
    q, z, scale, size = _draw(n, k, group, sym, 1, 17 if not v2 else 16)
    g_idx = np.arange(k) // size if order is None else order(k, size)
    tensors = {
        "qweight": _words(q.T.T, range(8)).T.contiguous(),  # along the input features
        "qzeros": _words((z if v2 else z - 1).T, range(8)),
        "scales": scale.T.contiguous(),
        "g_idx": torch.from_numpy(g_idx.astype(np.int32)),
    }
    return tensors, _weight(q, z, scale, g_idx)


def awq(n, k, *, group=128):
    q, z, scale, size = _draw(n, k, group, False)
    tensors = {
        "qweight": _words(q.T, AWQ_ORDER), "qzeros": _words(z.T, AWQ_ORDER), "scales": scale.T.contiguous(),
    }  # fmt: skip
    return tensors, _weight(q, z, scale, np.arange(k) // size)


def packed(n, k, *, group=128, symmetric=True, order=None):
    q, z, scale, size = _draw(n, k, group, symmetric)
    g_idx = np.arange(k) // size if order is None else order(k, size)
    tensors = {
        "weight_packed": _words(q, range(8)), "weight_scale": scale.bfloat16(), "weight_shape": torch.tensor([n, k]),
    }  # fmt: skip
    if not symmetric:
        tensors["weight_zero_point"] = _words(z.T, range(8)).T.contiguous()
    if order is not None:
        tensors["weight_g_idx"] = torch.from_numpy(g_idx.astype(np.int32))
    return tensors, _weight(q, z, scale.bfloat16(), g_idx)


def _scales(shape, spread):
    return torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape))) / spread + 0.5 / spread


def int8(n, k, *, per="channel"):
    q = torch.from_numpy(np.random.default_rng(n + k).integers(-128, 128, (n, k)).astype(np.int8))
    scale = _scales((n, 1) if per == "channel" else (1,), 400)
    return {"weight": q, "weight_scale": scale}, q.float() * scale


def fp8(n, k, *, per="channel", name="weight_scale", static=False):
    q = torch.randn(n, k, generator=torch.Generator().manual_seed(n + k)).mul(100).clamp(-448, 448)
    q = q.to(torch.float8_e4m3fn)
    shape = {"channel": (n, 1), "tensor": (), "block": (-(-n // 128), -(-k // 128))}[per]
    scale = _scales(shape, 500)
    by_element = scale
    if per == "block":
        by_element = scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    tensors = {"weight": q, name: scale}
    if static:
        tensors["input_scale"] = torch.tensor(0.01)
    return tensors, q.float() * by_element


def save(model, folder, form, quantization, skipped=("lm_head",)):
    """Write the model with its linear layers in that format, and give the model the weights that they stand for."""
    from safetensors.torch import save_file

    model.save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and not any(name.endswith(s) for s in skipped):
            tensors, weight = form(*layer.weight.shape)
            layer.weight.data = weight
            del state[f"{name}.weight"]
            state |= {f"{name}.{of}": tensor for of, tensor in tensors.items()}
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"quantization_config": quantization}))
    return folder
