"""What a layer does with a cache: `attend` where it was not given the keys and values of the step, where it would see
zeros or what stood there; and from hidden states into the cache at once."""

import pytest
import torch

import rooftile
from rooftile.ops.gemm.norm_linear import rms_norm_linear


@pytest.fixture(params=["KVCache", "PagedKVCache"])
def cache(request, device):
    options = {"layers": 2, "dtype": torch.float32, "device": device}
    if request.param == "KVCache":
        return rooftile.KVCache(1, 16, 1, 8, **options)
    cache = rooftile.PagedKVCache(2, 16, 1, 8, max_sequences=1, **options)
    cache.allocate()
    return cache


def test_a_forgotten_append(cache, device):
    x = torch.randn(1, 1, 1, 8, device=device)
    cache.extend(1)
    cache.append(0, x, x)
    torch.testing.assert_close(cache.attend(0, x), x)  # of one key
    with pytest.raises(
        RuntimeError, match=r"KVCache.attend: layer 1 lacks the keys and values of this step; call append first"
    ):
        cache.attend(1, x)
    cache.append(1, 2 * x, 2 * x)
    torch.testing.assert_close(cache.attend(1, x), 2 * x)
    cache.reserve(1)
    with pytest.raises(RuntimeError, match=r"KVCache.attend: layer 0 .*; call advance, then append first"):
        cache.attend(0, x)


def test_a_step_without_tokens_is_a_step_and_none_is_not(cache, device):
    x = torch.randn(1, 1, 1, 8, device=device)
    with pytest.raises(RuntimeError, match=r"KVCache.attend: nothing is reserved; call extend first"):
        cache.attend(0, x)
    cache.extend(1)
    for layer in range(2):
        cache.append(layer, x, x)
    cache.extend(0)
    torch.testing.assert_close(cache.attend(1, x), x)  # nobody takes part


def test_what_a_graph_appends_is_not_known_to_the_host(cache, device, monkeypatch):
    x = torch.randn(1, 1, 1, 8, device=device)
    cache.extend(1)
    monkeypatch.setattr(cache, "_captured", True)
    cache.attend(0, x)


@pytest.mark.each_once
@pytest.mark.parametrize("layout", ["bthd", "bhtd"])
@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
def test_from_hidden_states_into_a_cache_is_what_rope_and_append_does(paged, layout, device):
    """With one token, which is one kernel, and with three; of one sequence and of two."""
    for slots in (1, 2):
        options = {"dtype": torch.float32, "layout": layout, "device": device}
        made = []
        for _ in range(2):
            if paged:
                cache = rooftile.PagedKVCache(4, 16, 2, 16, max_sequences=slots, **options)
                for _ in range(slots):
                    cache.allocate()
            else:
                cache = rooftile.KVCache(slots, 16, 2, 16, **options)
            made.append(cache)
        angle = torch.randn(16, 16, device=device)
        cos, sin = angle.cos(), angle.sin()
        norm_weight, weight, bias = (torch.randn(*shape, device=device) for shape in ((32,), (128, 32), (128,)))
        for tokens in (3, 1, 1):
            x = torch.randn(slots, tokens, 32, device=device)
            for cache in made:
                cache.extend(tokens)
            at_once = made[0].norm_qkv_rope_and_append(0, x, norm_weight, weight, cos, sin, bias=bias, eps=0.1)
            qkv = rms_norm_linear(x, norm_weight, weight, bias, eps=0.1).unflatten(-1, (8, 16))
            q, k, v = (t if layout == "bthd" else t.transpose(1, 2) for t in qkv.split((4, 2, 2), dim=2))
            torch.testing.assert_close(at_once, made[1].rope_and_append(0, q, k, v, cos, sin))
            q = at_once if layout == "bthd" else at_once.transpose(1, 2)
            torch.testing.assert_close(made[0].attend(0, q), made[1].attend(0, q))


def test_hidden_states_of_another_step_are_refused(cache, device):
    norm_weight, weight, angle = torch.ones(8, device=device), torch.randn(32, 8, device=device), torch.ones(16, 8)
    angle = angle.to(device)

    def into(layer, *shape):
        return cache.norm_qkv_rope_and_append(
            layer, torch.ones(shape, device=device), norm_weight, weight, angle, angle
        )

    cache.extend(2)
    name = "KVCache.norm_qkv_rope_and_append"
    with pytest.raises(ValueError, match=f"{name}: x has 3 new tokens, expected the 2 that were reserved"):
        into(0, 1, 3, 8)
    with pytest.raises(ValueError, match=f"{name}: x has 2 sequences, expected 1"):
        into(0, 2, 2, 8)
    assert into(0, 1, 2, 8).shape == (1, 2, 2, 8)
    with pytest.raises(RuntimeError, match=f"{name}: layer 0 has the tokens of this step"):
        into(0, 1, 2, 8)
    with pytest.raises(IndexError, match=f"{name}: layer is 2, expected 0 to 1"):
        into(2, 1, 2, 8)
