"""PagedKVCache by steps drawn at random, beside a model of it."""

import contextlib

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rooftile import PagedKVCache, runtime

E4M3 = torch.float8_e4m3fn


class PagedMachine(RuleBasedStateMachine):
    """PagedKVCache beside a plain dict: for each sequence the tokens that it was given, by layer."""

    @initialize(dtype=st.sampled_from([torch.float32, E4M3]), layout=st.sampled_from(["bthd", "bhtd"]))
    def start(self, dtype, layout):
        self.device = runtime.default_device()
        self.cache = PagedKVCache(
            7, 16, 2, 4, max_sequences=3, max_seq_len=70, value_dim=8, layers=2, dtype=dtype, device=self.device,
            layout=layout,
        )  # fmt: skip
        self.model = {}
        self.freed = []
        self.seed = 0

    def fails(self, action):
        """The action raises ValueError and changes nothing."""
        cache = self.cache
        tensors = (cache.k, cache.v, cache.page_table, cache.lengths, cache.counts)
        before = [t.clone() for t in tensors]
        with pytest.raises(ValueError, match="PagedKVCache"):
            action()
        assert all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(tensors, before, strict=True))

    @rule()
    def allocate(self):
        if len(self.model) == 3:
            return self.fails(self.cache.allocate)
        self.model[self.cache.allocate()] = [torch.zeros(0, 2, 4, device=self.device)] * 2

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def fork(self, data):
        source = data.draw(st.sampled_from(list(self.model)))
        if len(self.model) == 3:
            return self.fails(lambda: self.cache.fork(source))
        self.model[self.cache.fork(source)] = list(self.model[source])

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def free(self, data):
        gone = data.draw(st.sampled_from(list(self.model)))
        self.cache.free(gone)
        del self.model[gone]
        self.freed.append(gone)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def move(self, data):
        moved = data.draw(st.lists(st.sampled_from(list(self.model)), unique=True))
        slots = {s: data.draw(st.integers(-1, 3)) for s in moved}
        free = set(range(3)) - {s.slot for s in self.model}
        if len(set(slots.values())) < len(slots) or not free.issuperset(slots.values()):
            return self.fails(lambda: self.cache.move(slots))
        self.cache.move(slots)
        assert slots == {s: s.slot for s in slots}

    @precondition(lambda self: self.freed)
    @rule(data=st.data())
    def use_a_freed_one(self, data):
        gone = data.draw(st.sampled_from(self.freed))
        cache = self.cache
        uses = [cache.free, cache.fork, lambda s: cache.extend({s: 1}), lambda s: cache.move({s: 0})]
        use = data.draw(st.sampled_from(uses))
        self.fails(lambda: use(gone))

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def extend(self, data):
        cache = self.cache
        new = {s: data.draw(st.integers(0, 33)) for s in self.model if data.draw(st.booleans())}
        if not self.fits(new):
            return self.fails(lambda: cache.extend(new))
        most = max(new.values(), default=0)  # of the step, whoever leaves it
        meanwhile = data.draw(st.sampled_from(["", "fork", "free"]))
        chosen = data.draw(st.sampled_from(list(self.model)))
        with cache.deferred() if data.draw(st.booleans()) else contextlib.nullcontext():
            cache.reserve(new)
            forked = cache.fork(chosen) if meanwhile == "fork" and len(self.model) < 3 else None
            if meanwhile == "free":
                cache.free(chosen)
                del self.model[chosen]
                self.freed.append(chosen)
                new.pop(chosen, None)
            cache.advance()
        self.append(new, most)
        if forked is not None:
            self.model[forked] = list(self.model[chosen])

    def append(self, new, most):
        cache = self.cache
        if not most:
            return
        for layer in range(2):
            self.seed += 1
            x = torch.randn(3, most, 2, 8, generator=torch.Generator().manual_seed(self.seed)).to(self.device)
            k, v = (y.transpose(1, 2) if cache.layout == "bhtd" else y for y in (x[..., :4], x))
            cache.append(layer, k, v)
            for s, n in new.items():
                self.model[s][layer] = torch.cat((self.model[s][layer], x[s.slot, :n, :, :4]))

    def fits(self, new):
        """Whether there are pages enough, counted in another way: as those that all sequences hold afterwards."""
        if any(s.length + n > 70 for s, n in new.items()):
            return False
        writing = [s for s in self.model if s.length % 16 and new.get(s)]  # into the last page that they have
        kept = {page for s in self.model for page in (s.pages[:-1] if s in writing else s.pages)}
        grown = sum(-(-(s.length + n) // 16) - len(s.pages) for s, n in new.items())
        return len(kept) + len(writing) + grown <= 7

    @invariant()
    def every_sequence_has_its_tokens(self):
        if not hasattr(self, "cache"):
            return
        cache = self.cache
        assert cache.sequences == sorted(self.model, key=lambda s: s.slot)
        used = {page for s in self.model for page in s.pages}
        assert len(used) + cache.free_pages == 7
        of_slots = {s.slot: s.pages for s in self.model}
        for slot, (row, length) in enumerate(zip(cache.page_table.tolist(), cache.lengths.tolist(), strict=True)):
            pages = of_slots.get(slot, [])
            assert row == pages + [-1] * (len(row) - len(pages))
            assert length == 0 or slot in of_slots
        for s, tokens in self.model.items():
            assert cache.lengths[s.slot] == s.length == len(tokens[0])
            for layer in range(2):
                given = cache.inputs(layer)
                pages = given["k_cache"][s.pages].float()
                if given["k_scale"] is not None:
                    pages = pages * given["k_scale"][s.pages][..., None]
                pages = pages.transpose(1, 2) if cache.layout == "bhtd" else pages
                found = pages.reshape(-1, 2, 4)[: s.length]
                assert torch.allclose(found, tokens[layer], rtol=0.07, atol=0.02 if given["k_scale"] is not None else 0)


TestPagedAgainstAModel = PagedMachine.TestCase
TestPagedAgainstAModel.settings = settings(max_examples=15, stateful_step_count=12)
