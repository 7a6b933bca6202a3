"""rms_norm_qkv_rope_cache with weights of int8 and int4 on the integer matrix unit: the same as the two ops."""

import pytest
import torch
from helpers import BF16
from test_rms_norm_qkv_rope_cache import assert_the_same, caches, drawn, ints, launched

from rooftile import runtime
from rooftile.ops.gemm.weight_only import quantize_int4, quantize_int8

__all__ = ["launched"]  # a fixture


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, BF16], ids=str)
@pytest.mark.parametrize("format", ["int8", "int4"])
@pytest.mark.parametrize(
    ("head_dim", "heads", "paged"),
    [(128, (32, 8), False), (128, (64, 8), False), (64, (6, 2), True), (34, (5, 1), True)],
)
def test_weights_of_fewer_bits_by_digits(format, head_dim, heads, paged, dtype, launched, device):
    if runtime.target(device).arch != "sm_90":
        pytest.skip("kernel 'gemv_imma' is chosen for sm_90, where it was measured")
    for k in (1024, 3584):
        given, angles = drawn(device, dtype, heads, head_dim, k=k)
        weight = given["weight"]
        given["weight"], scale = quantize_int8(weight) if format == "int8" else quantize_int4(weight, 128)
        written = caches(device, dtype, heads[1], head_dim, paged=paged)
        table = {"page_table": ints([[3, 0, 4]], device)} if paged else {}
        assert_the_same(given, angles, written, ints([17], device), heads=heads, weight_scale=scale, **table)
        assert sum(int(cache.isfinite().sum()) for cache in written) == 2 * heads[1] * head_dim
    assert launched.count("gemv_imma_kernel qkv") == 2
