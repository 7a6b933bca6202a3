"""`rooftile.Quantize` as a user meets it: what it gives back, and what it says of what it is not."""

import pytest
import torch

import rooftile
from rooftile import Quantize
from rooftile.cases.check import relative_error

INT8 = torch.int8


@pytest.mark.parametrize("per", ["row", "group"])
def test_dequantize_is_what_a_result_stands_for(per, device):
    x, q = torch.randn(3, 300, device=device), Quantize(INT8, per)
    y, scale = rooftile.rms_norm(x, quantize=q)
    assert relative_error(q.dequantize(y, scale), rooftile.rms_norm(x)) < 1e-2  # half a step of 127


def test_what_is_no_quantize_is_named(device):
    x = torch.randn(3, 32, device=device)
    for call in (rooftile.rms_norm, rooftile.silu_mul_packed):
        with pytest.raises(TypeError, match=f"{call.__name__}: quantize is torch.int8, expected a rooftile.Quantize"):
            call(x, quantize=INT8)
    with pytest.raises(TypeError, match="Quantize: scale is a float, expected a float32 tensor"):
        Quantize(INT8, "tensor", 0.05)
    with pytest.raises(TypeError, match=r"Quantize: dtype is 'int8', expected a torch.dtype, one of .*torch.int8"):
        Quantize("int8")
