"""`attend` of a layer that was not given the keys and values of the step: it would see zeros, or what stood there."""

import pytest
import torch

import rooftile


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
        RuntimeError, match=r"KVCache.attend: layer 1 has not the keys and values of this step; call append first"
    ):
        cache.attend(1, x)
    cache.append(1, 2 * x, 2 * x)
    torch.testing.assert_close(cache.attend(1, x), 2 * x)
    cache.reserve(1)
    with pytest.raises(RuntimeError, match=r"KVCache.attend: layer 0 .*; call advance, then append first"):
        cache.attend(0, x)


def test_no_step_no_complaint(cache, device):
    x = torch.randn(1, 1, 1, 8, device=device)
    cache.attend(0, x)  # nothing was reserved
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
