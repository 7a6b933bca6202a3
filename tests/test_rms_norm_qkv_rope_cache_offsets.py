"""rms_norm_qkv_rope_cache with rows past 2^31 elements, and that kernels with offsets of 32 bits would not pass."""

import pytest
import torch
from helpers import BF16, assert_same
from test_offsets import STRIDE, far_rows, kernels, no_plans_kept, use_kernels_without_int64
from test_rms_norm_qkv_rope_cache import drawn, ints, launched, together

from rooftile import GemmConfig, library, runtime
from rooftile.ops.gemm import gemv, gemv_epilogue, gemv_persistent
from rooftile.primitives import paging

__all__ = ["far_rows", "launched", "no_plans_kept"]  # fixtures

D, HEADS, ROWS, PAGES = 2, 4, 4, 4  # ROWS of a cache without pages, and of a page

# What is far apart: the tensor, the axis, elements between, whether the cache has pages.
FAR = {
    "weight rows": ("weight", 0, 2**29 + 64, False),  # six
    "weight k": ("weight", 1, STRIDE, False),  # four
    "weight long k": ("weight", 1, 2**24 + 64, False),  # 130, of which the last two are another step of kernel "gemv"
    "cos rows": ("cos", 0, STRIDE, False),
    "sin rows": ("sin", 0, STRIDE, False),
}
FAR |= {f"{name} {axis}": (name, i, STRIDE, False) for name in "kv" for i, axis in ((1, "rows"), (2, "heads"))}
FAR |= {
    f"{name} {axis} paged": (name, i, STRIDE, True)
    for name in "kv"
    for i, axis in enumerate(("pages", "rows", "heads"))
}
KERNELS = ("gemv_persistent", "gemv")


@pytest.fixture
def take(monkeypatch):
    """The function that has every one token taken by that kernel."""

    def use(kernel, k):
        block_k = 128 if kernel == "gemv" else max(32, library.power_of_two(k))
        c = GemmConfig(kernel, 1, 4, block_k, 1, 1, 4, 1 + (kernel == "gemv_persistent"))
        monkeypatch.setattr("rooftile.ops.gemm.qkv_rope_cache.choose_fused", lambda *_: c)

    return use


def run_far(case, kernel, lay, take, device):
    """q and the caches with one tensor as drawn, and far apart."""
    name, axis, stride, paged = FAR[case]
    k = {"weight k": 4, "weight long k": 130}.get(case, 48)
    heads = 1 if name == "weight" else HEADS
    take(kernel, k)
    given, angles = drawn(device, BF16, (1, heads), D, k=k)
    cos, sin = (t[: PAGES * ROWS].to(BF16) for t in angles)
    if name in ("cos", "sin"):
        cos, sin = cos[:ROWS], sin[:ROWS]
    cache = torch.full((PAGES if paged else 1, ROWS, heads, D), -7.0, device=device, dtype=BF16)
    options = {"page_table": ints([[1, 3]], device)} if paged else {}
    starts = ints([2 * ROWS - 1 if paged else ROWS - 1], device)  # in the last page, the last row
    results = []
    for far in (False, True):
        tensors = {"weight": given["weight"], "cos": cos, "sin": sin, "k": cache.clone(), "v": cache.clone()}
        if far:
            tensors[name] = lay(tensors[name], axis, stride)
        written = tensors["k"], tensors["v"]
        q = together(
            given | {"weight": tensors["weight"]}, (tensors["cos"], tensors["sin"]), written, starts, **options
        )
        for t in written:
            assert (t[-1, -1] != -7).all()
            assert (t != -7).sum() == heads * D  # and nothing else was written
        results.append((q, *(t.contiguous() for t in written)))
    return results


@pytest.mark.each_once
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("case", FAR)
def test_rows_far_apart(case, kernel, far_rows, take, launched, device):
    near, far = run_far(case, kernel, far_rows, take, device)
    assert all(torch.isfinite(t).all() for t in near)
    assert_same(far, near)
    assert [n for n in launched if n.startswith("gemv")] == [f"{kernel}_kernel qkv"] * 2


def narrow(file, monkeypatch, tmp_path):
    """`use_kernels_without_int64`, and where the two kernels import from that file, too."""
    sound = kernels(file)
    use_kernels_without_int64(file, monkeypatch, tmp_path)
    for user in (gemv_persistent, gemv):
        for name, value in list(vars(user).items()):
            for of_file, kernel in sound.items():
                if value is kernel:
                    monkeypatch.setattr(user, name, getattr(file, of_file))


NARROW = [
    *((gemv_persistent, "gemv_persistent", f"weight {axis}") for axis in ("rows", "k")),
    *((gemv, "gemv", f"weight {axis}") for axis in ("rows", "k", "long k")),
    *((gemv_epilogue, kernel, f"{n} heads{p}") for kernel in KERNELS for n in "kv" for p in ("", " paged")),
    *((paging, kernel, f"{n} pages paged") for kernel in KERNELS for n in "kv"),
]


@pytest.mark.parametrize(("file", "kernel", "case"), NARROW, ids=lambda v: getattr(v, "__name__", v))
def test_a_kernel_with_offsets_of_32_bits_is_caught(
    file, kernel, case, far_rows, take, device, monkeypatch, tmp_path, no_plans_kept
):
    if runtime.MODE is not runtime.Mode.INTERPRETER:
        pytest.skip("on a GPU a wild access ends the process: the interpreter alone can show it")
    from rooftile.interpreter.memory import OutOfBoundsError

    narrow(file, monkeypatch, tmp_path)
    near, again = run_far(case, kernel, lambda t, *_: t.clone(), take, device)
    assert_same(again, near)  # sound where offsets are small
    with pytest.raises(OutOfBoundsError, match="out of bounds"):
        run_far(case, kernel, far_rows, take, device)
