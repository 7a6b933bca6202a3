"""KVCache and PagedKVCache: steps, sharing, what is left alone, errors."""

import pytest
import torch
from helpers import BF16

from rooftile import runtime
from rooftile.engine import KVCache, PagedKVCache

E4M3 = torch.float8_e4m3fn


def drawn(*shape, device, dtype=torch.float32):
    return torch.randn(shape, device=device).to(dtype)


class TestKVCache:
    @pytest.mark.parametrize("layout", ["bthd", "bhtd"])
    def test_steps_of_any_lengths(self, layout, device):
        cache = KVCache(2, 12, 2, 8, value_dim=4, layers=3, dtype=torch.float32, device=device, layout=layout)
        at = [cache.k.data_ptr(), cache.lengths.data_ptr(), cache.starts.data_ptr()]
        expected = [[[], []] for _ in range(3)]
        for new in (5, [1, 0], [3, 2], 1):
            counts = [new] * 2 if isinstance(new, int) else new
            cache.extend(new)
            for layer in (2, 0, 1):
                x = drawn(2, max(counts), 2, 8, device=device)
                k, v = (y.transpose(1, 2) if layout == "bhtd" else y for y in (x, x[..., :4]))
                cache.append(layer, k, v)
                for b in range(2):
                    expected[layer][b].append(x[b, : counts[b]])
        assert cache.tokens == cache.lengths.tolist() == [10, 8]
        assert at == [cache.k.data_ptr(), cache.lengths.data_ptr(), cache.starts.data_ptr()]
        for layer in range(3):
            given = cache.inputs(layer)
            for b in range(2):
                k, v = (given[n].transpose(1, 2) if layout == "bhtd" else given[n] for n in ("k_cache", "v_cache"))
                rows = torch.cat(expected[layer][b])
                assert torch.equal(k[b, : len(rows)], rows)
                assert torch.equal(v[b, : len(rows)], rows[..., :4])
                assert not k[b, len(rows) :].any()

    def test_a_step_that_does_not_fit_changes_nothing(self, device):
        cache = KVCache(2, 6, 1, 8, device=device)
        cache.extend([5, 2])
        cache.append(0, *[drawn(2, 5, 1, 8, device=device, dtype=BF16)] * 2)
        before = cache.k.clone()
        with pytest.raises(ValueError, match=r"full: sequence 0 has 5 tokens, and 2 more do not fit into 6"):
            cache.extend(2)
        with pytest.raises(ValueError, match=r"new has 3 numbers, expected 2"):
            cache.extend([1, 1, 1])
        with pytest.raises(ValueError, match=r"-1 new tokens for sequence 1, expected 0 or more"):
            cache.reserve([1, -1])
        assert cache.tokens == cache.lengths.tolist() == [5, 2]
        assert torch.equal(cache.k, before)
        cache.reset(0)
        assert cache.tokens == cache.lengths.tolist() == [0, 2]
        cache.extend([6, 4])
        cache.reset()
        assert cache.tokens == cache.lengths.tolist() == [0, 0]

    def test_out_of_step(self, device):
        cache = KVCache(2, 6, 1, 8, layers=2, device=device)
        k = drawn(2, 1, 1, 8, device=device, dtype=BF16)
        with pytest.raises(RuntimeError, match=r"KVCache\.append: nothing is reserved; call extend first"):
            cache.append(0, k, k)
        with pytest.raises(RuntimeError, match=r"KVCache\.attend: nothing is reserved; call extend first"):
            cache.attend(0, k)
        with pytest.raises(RuntimeError, match="no new tokens were reserved; call reserve first"):
            cache.advance()
        cache.reserve(1)
        with pytest.raises(RuntimeError, match="the lengths were not advanced for the tokens reserved; call advance"):
            cache.append(0, k, k)
        with pytest.raises(
            RuntimeError, match="the lengths were not advanced for the tokens reserved before; call adv"
        ):
            cache.reserve(1)
        assert cache.tokens == [1, 1]
        cache.advance()
        for layer in (2, -1, "0"):
            with pytest.raises(IndexError, match=f"KVCache.append: layer is {layer!r}, expected 0 to 1"):
                cache.append(layer, k, k)
        with pytest.raises(ValueError, match="k has 3 sequences, expected 2"):
            cache.append(0, *[drawn(3, 1, 1, 8, device=device, dtype=BF16)] * 2)
        with pytest.raises(ValueError, match="k has 2 new tokens, expected the 1 that were reserved"):
            cache.append(0, *[drawn(2, 2, 1, 8, device=device, dtype=BF16)] * 2)
        with pytest.raises(ValueError, match=r"append_kv: v_cache has shape"):
            cache.append(0, k, k[..., :4])
        assert not cache.k.any()
        cache.append(0, k, k)
        with pytest.raises(RuntimeError, match="layer 0 has the tokens of this step"):
            cache.append(0, k, k)
        cache.append(1, k, k)

    def test_a_reset_sequence_leaves_the_step(self, device):
        cache = KVCache(2, 6, 1, 8, device=device)
        cache.reserve([3, 2])
        cache.reset(0)
        cache.advance()
        cache.append(0, *[drawn(2, 3, 1, 8, device=device, dtype=BF16)] * 2)
        assert cache.tokens == cache.lengths.tolist() == [0, 2]
        assert not cache.k[0, 0].any()
        cache.reserve(1)
        cache.reset()
        cache.extend(4)
        assert cache.tokens == cache.lengths.tolist() == [4, 4]

    def test_numbers_of_new_tokens_are_integers(self, device):
        cache = KVCache(2, 6, 1, 8, device=device)
        with pytest.raises(TypeError, match=r"KVCache.reserve: 1.5 new tokens for sequence 1, expected an integer"):
            cache.reserve([1, 1.5])
        assert cache.tokens == [0, 0]
        cache.extend(torch.tensor([1, 2]))
        assert cache.tokens == cache.lengths.tolist() == [1, 2]

    def test_attending_of_more_tokens_than_a_sequence_got(self, device):
        cache = KVCache(3, 8, 1, 8, dtype=torch.float32, device=device)
        x = drawn(3, 4, 1, 8, device=device)
        cache.extend([4, 2, 0])
        cache.append(0, x, x)
        with pytest.raises(
            ValueError, match=r"attend: q has 4 tokens of each sequence, expected at most 2: a sequence"
        ):
            cache.attend(0, x)
        last = torch.stack((x[0, 3:], x[1, 1:2], x[2, :1]))
        expected = [
            torch.nn.functional.scaled_dot_product_attention(
                *(y.transpose(0, 1) for y in (last[b], x[b, :n], x[b, :n]))
            )
            for b, n in ((0, 4), (1, 2))
        ]
        torch.testing.assert_close(cache.attend(0, last)[:2], torch.stack(expected), rtol=1e-4, atol=1e-5)
        with pytest.raises(IndexError, match=r"KVCache.attend: layer is 1, expected 0 to 0"):
            cache.attend(1, last)

    @pytest.mark.parametrize("dtype", [E4M3, torch.int8])
    def test_scales(self, dtype, device):
        x = drawn(1, 4, 2, 8, device=device)
        by_token = KVCache(1, 4, 2, 8, layers=2, dtype=dtype, device=device)
        by_layer = KVCache(1, 4, 2, 8, layers=2, dtype=dtype, device=device, scales=(torch.full((2, 2), 0.05),) * 2)
        for cache in (by_token, by_layer):
            cache.extend(4)
            cache.append(1, x, x)
            given = cache.inputs(1)
            scale = given["k_scale"]
            found = given["k_cache"].float() * (scale[..., None] if scale.dim() == 3 else scale[:, None])
            assert float((found - x).abs().max()) < 0.2
        with pytest.raises(ValueError, match=r"scales are given for torch\.bfloat16"):
            KVCache(1, 4, 2, 8, scales="token", device=device)
        with pytest.raises(ValueError, match=r"the scale of k is torch.float32 of shape \(3,\), expected float32 of"):
            KVCache(1, 4, 2, 8, dtype=dtype, scales=(torch.ones(3),) * 2, device=device)

    def test_wrong_sizes(self, device):
        for sizes in ((0, 4, 2, 8), (1, -1, 2, 8), (1, 4, 2.0, 8)):
            with pytest.raises(ValueError, match=r"KVCache: \w+ is .*, expected a positive integer"):
                KVCache(*sizes, device=device)
        with pytest.raises(TypeError, match=r"KVCache: dtype is torch\.float64, expected float32"):
            KVCache(1, 4, 2, 8, dtype=torch.float64, device=device)
        with pytest.raises(ValueError, match="KVCache: layout is 'BTHD', expected one of bhtd, bthd"):
            KVCache(1, 4, 2, 8, layout="BTHD", device=device)


class TestSteps:
    """What the host is told of steps whose last tokens were not accepted."""

    def test_a_shorter_sequence_gives_back_pages(self, device):
        cache = PagedKVCache(3, 16, 1, 8, max_sequences=2, dtype=torch.float32, device=device, max_seq_len=40)
        a, b = cache.allocate(), cache.allocate()
        cache.extend({a: 15, b: 16})
        assert cache.has_room([a, b], 0)
        assert cache.has_room([a, b], 1)
        assert not cache.has_room([a, b], 2)
        assert not cache.has_room([a], 26)
        cache.extend({a: 4})
        cache.shorten(a, 3)
        assert (a.length, len(a.pages), cache.free_pages) == (16, 1, 1)
        for n in (-1, 17):
            with pytest.raises(ValueError, match=f"n is {n} for .*, expected 0 to its tokens"):
                cache.shorten(a, n)
        cache.free(a)
        with pytest.raises(ValueError, match="was freed"):
            cache.shorten(a, 0)


class TestPagedKVCache:
    def make(self, device, **options):
        given = {"max_sequences": 3, "dtype": torch.float32, "device": device} | options
        return PagedKVCache(6, 16, 1, 8, **given)

    def test_freed_sequences(self, device):
        cache = self.make(device)
        a = cache.allocate()
        cache.extend({a: 20})
        assert cache.free_pages == 4
        cache.free(a)
        assert cache.free_pages == 6
        for use in (cache.free, cache.fork, lambda s: cache.extend({s: 1})):
            with pytest.raises(ValueError, match="the sequence was freed"):
                use(a)
        b = cache.allocate()  # has the slot that a had
        with pytest.raises(ValueError, match="the sequence was freed"):
            cache.free(a)
        assert cache.sequences == [b]
        with pytest.raises(ValueError, match=r"PagedKVCache.free: the sequence is another cache's"):
            self.make(device).free(b)
        with pytest.raises(TypeError, match="a sequence is a int, expected what allocate or fork returned"):
            cache.free(0)
        with pytest.raises(TypeError, match="a sequence is a NoneType, expected what allocate or fork returned"):
            cache.reserve({None: 1})

    def test_a_full_cache_changes_nothing(self, device):
        cache = self.make(device, max_seq_len=64)
        a, b = cache.allocate(), cache.allocate()
        cache.extend({a: 40, b: 20})
        state = cache.page_table.clone(), cache.lengths.clone(), cache.counts.clone(), cache.free_pages
        wrong = [
            ({a: 25}, r"has no room for 25 tokens more, expected at most 64 in all"),
            ({a: 20, b: 13}, r"the cache is full: the new tokens need 2 pages, and 1 are free"),
            ({a: 1, b: -1}, r"-1 new tokens for"),
            ({a: 1, b: 2.0}, r"2.0 new tokens for .*, expected an integer"),
            ([1, 1], r"\[1, 1\] new tokens for .*, expected an integer"),
        ]
        for new, message in wrong:
            with pytest.raises(TypeError if "integer" in message else ValueError, match=message):
                cache.extend(new)
        assert (a.length, b.length) == (40, 20)
        now = cache.page_table, cache.lengths, cache.counts, cache.free_pages
        assert all(torch.equal(x, y) for x, y in zip(now[:3], state[:3], strict=True))
        assert now[3] == state[3]
        cache.allocate()
        for take in (cache.allocate, lambda: cache.fork(a)):
            with pytest.raises(ValueError, match="the cache is full: it has its 3 sequences already"):
                take()

    def test_a_fork_takes_a_page_only_when_it_writes(self, device):
        cache = self.make(device)
        a = cache.allocate()
        cache.extend({a: 20})
        b = cache.fork(a)
        assert cache.free_pages == 4
        assert a.pages == b.pages
        cache.extend({a: 1, b: 1})
        assert cache.free_pages == 3  # the other keeps the page
        assert a.pages[0] == b.pages[0]
        assert a.pages[1] != b.pages[1]
        cache.free(a)
        assert cache.free_pages == 4
        cache.free(b)
        assert cache.free_pages == 6

    def test_forks_without_a_page_to_write_to_change_nothing(self, device):
        cache = self.make(device)
        a = cache.allocate()
        cache.extend({a: 90})
        b, c = cache.fork(a), cache.fork(a)
        for new in ({a: 1}, {a: 1, b: 1, c: 1}):
            with pytest.raises(ValueError, match=r"the cache is full: the new tokens need . pages, and 0 are free"):
                cache.extend(new)
        assert a.pages == b.pages == c.pages
        assert (a.length, b.length, c.length, cache.free_pages) == (90, 90, 90, 0)
        cache.free(b)
        cache.free(c)
        cache.extend({a: 1})  # it is the only one that has the page
        cache.free(a)
        assert cache.free_pages == 6

    def test_sequences_that_move_after_a_step_take_their_rows_along(self, device):
        cache = PagedKVCache(8, 16, 2, 8, max_sequences=5, max_seq_len=48, device=device)
        a, b, c, d = (cache.allocate() for _ in range(4))
        cache.extend({a: 1, b: 2, c: 20, d: 33})
        cache.free(a)
        sent, send = [], cache._send
        cache._send = lambda tensor, numbers: sent.append(tensor) or send(tensor, numbers)
        cache.move({c: 4, d: 0})
        assert [x.data_ptr() for x in sent] == [
            cache.lengths.data_ptr(),
            cache.counts.data_ptr(),
        ]  # lengths once for both sequences, then counts
        assert cache.sequences == [d, b, c]
        assert cache.lengths.tolist() == [33, 2, 0, 0, 20]
        assert cache.counts.tolist() == [0, 2, 0, 0, 0]  # those that moved have left the step
        assert cache.page_table.tolist() == [d.pages, [*b.pages, -1, -1], [-1] * 3, [-1] * 3, [*c.pages, -1]]

    def test_wrong_page_sizes(self, device):
        for size in (8, 24, 1024):
            with pytest.raises(ValueError, match=f"PagedKVCache: page_size is {size}, expected one of 16, 32, 64"):
                PagedKVCache(4, size, 1, 8, max_sequences=1, device=device)


def generate(cache, steps, device, *, sequence=None):
    """What each step of one sequence attends to, layer by layer."""
    angle = torch.ones(64, 8, device=device).cumsum(0)
    numbers = torch.Generator().manual_seed(0)
    outputs = []
    for n in steps:
        cache.extend(n if sequence is None else {sequence: n})
        for layer in range(cache.layers):
            x = torch.randn(1, n, 8, 8, generator=numbers).to(device, cache.k.dtype)
            q, k, v = x[:, :, :4], x[:, :, 4:6], x[:, :, 6:]
            if cache.layout == "bhtd":
                q, k, v = (y.transpose(1, 2) for y in (q, k, v))
            q = cache.rope_and_append(layer, q, k, v, angle.cos(), angle.sin())
            outputs.append(cache.attend(layer, q.transpose(1, 2) if cache.layout == "bhtd" else q))
    return torch.cat(outputs, dim=1)


@pytest.mark.parametrize("layout", ["bthd", "bhtd"])
def test_both_caches_attend_to_the_same(layout, device):
    options = {"layers": 2, "dtype": torch.float32, "layout": layout, "device": device}
    steps = (9, 1, 16, 3, 1)
    contiguous = generate(KVCache(1, 48, 2, 8, **options), steps, device)
    paged = PagedKVCache(5, 16, 2, 8, max_sequences=1, **options)
    paged.extend({(other := paged.allocate()): 1})
    paged.free(other)
    torch.testing.assert_close(generate(paged, steps, device, sequence=paged.allocate()), contiguous)


def test_a_step_attends_as_reference_attention_does(device):
    cache = KVCache(2, 32, 2, 8, dtype=torch.float32, device=device)
    q, k, v = (drawn(2, 12, heads, 8, device=device) for heads in (4, 2, 2))
    cache.extend(8)
    cache.append(0, k[:, :8], v[:, :8])
    cache.extend(4)
    cache.append(0, k[:, 8:], v[:, 8:])
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(cache.attend(0, q[:, 8:]), expected.transpose(1, 2)[:, 8:], rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_steps_in_a_cuda_graph(device):
    """One graph for all lengths: pages are taken on the host, between replays."""
    steps = 40
    x = torch.randn(steps, 1, 1, 8, 64, device=device, dtype=BF16)
    expected, found = [], []
    for graphed in (False, True):
        cache = PagedKVCache(8, 16, 2, 64, max_sequences=1, device=device)
        cache.allocate()
        now = x[0].clone()

        def body(cache=cache, now=now):
            cache.advance()
            cache.append(0, now[:, :, 4:6], now[:, :, 6:])
            return cache.attend(0, now[:, :, :4])

        cache.reserve(1)
        body()  # compiles
        graph, out = torch.cuda.CUDAGraph(), None
        for i in range(1, steps):
            now.copy_(x[i])
            cache.reserve(1)
            if not graphed:
                expected.append(body())
                continue
            if out is None:
                with torch.cuda.graph(graph):
                    out = body()
            graph.replay()
            found.append(out.clone())
        assert cache.lengths.tolist() == [steps]
    torch.testing.assert_close(torch.cat(found), torch.cat(expected))


def test_heads_that_nothing_attends_over_are_refused():
    with pytest.raises(ValueError, match="KVCache: head_dim and value_dim are 300 and 300, expected at most 256"):
        KVCache(2, 8, 2, 300)


def test_a_cache_on_the_cpu_needs_the_interpreter(monkeypatch):

    monkeypatch.setattr(runtime, "MODE", runtime.Mode.GPU)
    with pytest.raises(ValueError, match="KVCache: device is cpu, expected a GPU"):
        KVCache(2, 8, 2, 16, device="cpu")
