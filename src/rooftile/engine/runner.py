"""Steps of many sequences on the device: parts of prompts, one token of each at a time, or several, by CUDA graphs.

Only the capture of a graph waits for the device. What a step reads (lengths, pages, previous tokens, sampling options)
has fixed addresses and is written in stream order, so a step can be launched while the host still reads the tokens of
the previous step.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rooftile.engine.cascade import Cascade
from rooftile.engine.config import ModelConfig
from rooftile.engine.model import Decoder
from rooftile.engine.modes import on, plain_mode
from rooftile.engine.paged_cache import PagedSequence
from rooftile.engine.prefix import PrefixCache
from rooftile.engine.prompt_graphs import PromptGraphs
from rooftile.engine.prompts import MixedBatch, rounded, slots_of
from rooftile.engine.ranks import Ranks
from rooftile.engine.sampling import Numbers, SlotOptions
from rooftile.engine.sampling import Sampling as Sampling
from rooftile.engine.verification import Verifier
from rooftile.engine.weights import Weights
from rooftile.graphs import SerialGraphs
from rooftile.ops.sample import accept_drafts_, mark_seen_, sample_
from rooftile.primitives.pdl import constant_weights

# `warm_up` captures mixed steps that are not full up to so many tokens. Longer ones gain less from a graph: from about
# 1500 tokens on, launching their kernels one by one takes no longer than computing them (`prompts.GRAPH_TOKENS`).
_PARTLY_FULL_TOKENS = 1024
# It captures them beside up to so many slots. Where more sequences run, steps with prompts are mostly full.
_PARTLY_FULL_SLOTS = 128
_BY_COUNTS = ("presence_penalty", "frequency_penalty")


class StreamOrder:
    """Orders calls that come on several streams.

    Args:
        current: returns the current stream.
    """

    def __init__(self, current: Callable[[], Any]) -> None:
        self._current, self._last = current, current()

    def enter(self) -> None:
        """Make the current stream wait for the stream of the previous call, if that was another."""
        stream = self._current()
        if stream != self._last:
            stream.wait_stream(self._last)
            self._last = stream


class Runner:
    """The device side of generation.

    Calls may come on several streams: each waits for the previous one. The caller's modes (gradients, autocast,
    inference mode) have no effect inside.

    Args:
        config, weights: the model.
        max_batch: sequences at a time, each in a slot.
        max_seq_len: tokens of each, prompt and new.
        page_size, pages: of the cache; by default enough pages for `max_batch` sequences of `max_seq_len` tokens.
        kv_dtype: of the cache, float8_e4m3fn or int8 too; the model's by default.
        cuda_graphs: on a GPU, replay a graph for each decoding step, and for prompts of shapes that recur.
        proposals: of a step of speculative decoding; 0 for none.
        draft: a model that makes them.
        ranks: of a model that is split; config and weights are this rank's. All ranks make the same calls.
        deterministic: compute each token in one way, whatever else is in the step.
        cascade: read the pages that all sequences of a decoding step begin with once for several of them.

    Attributes:
        verifier: the memory of such steps, if there are any.
        tokens, logprobs: `(max_batch,)`, int32 and float32, on the device: the newest token of each slot.
        options: of slots whose sampling needs more than a few numbers.
        shape: of the newest step: steps of the same shape have the same launches. None if others may.
    """

    shape: tuple[object, ...] | None = None

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        *,
        max_batch: int,
        max_seq_len: int,
        page_size: int = 64,
        pages: int | None = None,
        kv_dtype: torch.dtype | None = None,
        cuda_graphs: bool = True,
        proposals: int = 0,
        draft: tuple[ModelConfig, Weights] | None = None,
        ranks: Ranks | None = None,
        deterministic: bool = False,
        cascade: bool = False,
    ) -> None:
        device = weights.embedding.device
        needed = max_batch * -(-max_seq_len // page_size)
        self.cache = PrefixCache(
            needed if pages is None else pages, page_size, config.kv_heads, config.head_dim,
            max_sequences=max_batch, max_seq_len=max_seq_len, layers=config.layers,
            dtype=weights.embedding.dtype if kv_dtype is None else kv_dtype, device=device,
        )  # fmt: skip
        self.max_batch, self.max_seq_len, self.ranks = max_batch, max_seq_len, ranks
        self.deterministic = deterministic
        self._device = device
        self._order = None
        if device.type == "cuda":
            self._order = StreamOrder(lambda: torch.cuda.current_stream(device))
        with plain_mode(device):
            self._cascade = Cascade(self.cache) if cascade else None
            self.verifier = Verifier(self.cache, max_batch, config.vocab, proposals, draft) if proposals else None
            self._make(config, weights, cuda_graphs)

    def _make(self, config: ModelConfig, weights: Weights, cuda_graphs: bool) -> None:
        device, max_batch, verifier = self._device, self.max_batch, self.verifier
        self.decoder = Decoder(config, weights, self.cache, self.ranks, deterministic=self.deterministic)
        self.tokens = torch.zeros(max_batch, dtype=torch.int32, device=device) if verifier is None else verifier.tokens
        if verifier is not None:
            self.decoder.follower = verifier.follower
        self.logprobs = torch.zeros(max_batch, dtype=torch.float32, device=device)
        words = -(-config.vocab // 32)
        self._seen = torch.zeros((max_batch, words), dtype=torch.int32, device=device)
        # Copied to clear a row: a fill is a kernel.
        self._none_seen = torch.zeros(words, dtype=torch.int32, device=device)
        self._of_slots = Numbers(max_batch, device)
        self._of_rows = None if verifier is None else Numbers(max_batch * verifier.n_tokens, device)
        self.options = SlotOptions(max_batch, config.vocab, device, 1 if verifier is None else verifier.n_tokens)
        self._sampling = [Sampling()] * max_batch
        self._drawing: set[int] = set()  # slots whose sampling is not greedy
        self._send_sampling(dict(enumerate(self._sampling)))
        # By slots, by how they are sampled (greedily, or not; None: outside of the graph), whether there are proposals,
        # and whether there is a group. With the graph's logits.
        self._graphs: dict[tuple[int, bool | None, bool, bool], tuple[torch.cuda.CUDAGraph, Tensor]] | None = None
        self._of_prompts: PromptGraphs | None = None
        if cuda_graphs and device.type == "cuda":
            # One after another on one stream: a step's logits are sampled before the next replay.
            self._graphs, self._turns = {}, SerialGraphs(device)
            self._of_prompts = PromptGraphs(self.decoder, self._turns)

    def warm_up(self, step_tokens: int) -> None:
        """Compile the kernels of steps of at most that many tokens, and capture the graphs of the most frequent ones.

        Those are steps of decoding; steps of up to 1024 tokens with up to 3 parts of prompts beside up to 128 slots;
        and full steps with up to 15 parts beside any number of slots. A graph takes some 50 ms, a kernel seconds. The
        cache forgets the pages of earlier prompts. Without CUDA graphs nothing is done.

        Raises:
            RuntimeError: there are sequences. Their newest tokens would be lost.
        """
        if self._graphs is None:
            return
        if self.cache.sequences:
            raise RuntimeError("warm_up: there are sequences, expected none yet")
        most = self.max_batch
        with self._entered("warm up"):
            self.cache.forget()
            totals = sorted({rounded(n) for n in range(1, step_tokens + 1)})
            slots = sorted({slots_of(n, most) for n in range(1, most + 1)})

            def few(b: int, total: int) -> int:
                """Parts of prompts, up to 3, that together have the tokens beside b rows."""
                return max(1, min(3, -(-(total - b) // self.cache.capacity)))

            for n in totals:
                self._example(0, n, few(0, n))
            some = [b for b in (0, *slots) if b <= _PARTLY_FULL_SLOTS]
            shapes = [(b, n, few(b, n)) for b in some for n in totals if b < n <= _PARTLY_FULL_TOKENS]
            shapes += [(b, step_tokens, parts) for b in slots for parts in (few(b, step_tokens), 4)]
            for shape in dict.fromkeys(shapes):
                self._example(*shape)  # eagerly, unless it has been seen,
                self._example(*shape)  # and for the capture
            for b in sorted({self.bucket(n) for n in range(1, most + 1)}):
                kinds = [(False, False)]  # whether there are proposals, and a group
                if self.verifier is not None:
                    kinds.append((True, False))
                if self._cascade is not None and self._cascade.may_group(b):
                    kinds.append((False, True))
                for greedy, (verifies, grouped) in itertools.product(self._ways, kinds):
                    self._graph(b, greedy, verifies, grouped)

    def _example(self, b: int, total: int, parts: int) -> None:
        """A step of so many tokens and parts of prompts, of which b slots have a row; less where that does not fit."""
        slots = min(self.max_batch, max(b, parts + (b > 0)))
        texts = min(parts, slots - (b > 0))
        room = (self.cache.free_pages - texts - 1) * self.cache.page_size  # a sequence's last page is full in part
        left = min(total - b, room, texts * self.cache.capacity)
        if left < max(texts, 1):
            return
        sequences = [self.cache.allocate() for _ in range(slots)]
        try:
            new: dict[PagedSequence, Sequence[int] | None] = dict.fromkeys(sequences[: b > 0])
            for i, sequence in enumerate(sequences[-texts:]):
                new[sequence] = [0] * ((i + 1) * left // texts - i * left // texts)
            logits = self._mixed(new, {max(b, 1) - 1})
            for greedy in self._ways:
                self._sample_first(logits.shape[0], logits, greedy)
        finally:
            self._free_all(sequences)

    @contextlib.contextmanager
    def _entered(self, name: str | None = None) -> Iterator[None]:
        """On the device, after previous calls, and outside of the caller's modes. The weights are loaded by then.

        `name` is that of an NVTX range, which Nsight Systems shows above the kernels.
        """
        shown = name is not None and self._device.type == "cuda"
        named = torch.cuda.nvtx.range(name) if shown else contextlib.nullcontext()
        with on(self._device), plain_mode(self._device), constant_weights(), named:
            if self._order is not None:
                self._order.enter()
            yield

    def prefill(self, prompts: Sequence[Sequence[int]], sampling: Sequence[Sampling]) -> list[PagedSequence]:
        """New sequences for those prompts, each with its first new token: `extend` in one step, for measurements.

        Raises:
            ValueError: a prompt is empty, there are too few slots or pages, or a prompt is longer than `max_seq_len`.

        Nothing has changed then. Whatever is raised, no slot or page stays taken.
        """
        if len(sampling) != len(prompts):
            raise ValueError(f"sampling is given for {len(sampling)} prompts, expected one for each of {len(prompts)}")
        sequences = self._allocated(prompts)
        try:
            begun = {s: (p, how, ()) for s, p, how in zip(sequences, prompts, sampling, strict=True)}
            self.extend(dict(zip(sequences, prompts, strict=True)), begun)
        except BaseException:
            self._free_all(sequences)
            raise
        return sequences

    def decode(self, sequences: Sequence[PagedSequence] | None = None) -> None:
        """The next token of those sequences, or of all. The newest tokens of other slots are lost.

        Raises:
            ValueError: a sequence is at `max_seq_len`, or there are no pages left. Nothing has changed then.
        """
        live = self.cache.sequences if sequences is None else sequences
        if live:
            self._decode(live, None)

    def verify(self, proposals: Mapping[PagedSequence, Sequence[int]]) -> None:
        """The next tokens of sequences, with proposals for each, none or more: see `Verifier`.

        On the host, each sequence is T tokens longer afterwards, until `shorten` takes those back that were not
        accepted. With a draft model, only the numbers of the proposals matter.

        Raises:
            ValueError: as `decode`, for T tokens of each.
        """
        self._decode(list(proposals), {s.slot: tokens for s, tokens in proposals.items()})

    def _decode(self, live: Sequence[PagedSequence], proposals: Mapping[int, Sequence[int]] | None) -> None:
        """A step of those sequences, with the proposals for their slots, or without."""
        slots, verifies = [s.slot for s in live], proposals is not None
        b, greedy = self.bucket(max(slots) + 1), self._greedily(slots)
        inside = None if self.options.live(b) else greedy
        with self._entered(f"{'verify' if verifies else 'decode'} {len(live)}"):
            self.options.begin()
            grouped = self._cascade is not None and not verifies and self._cascade.groups(live)
            self.shape = b, inside, verifies, grouped
            recorded = None if self._graphs is None else self._graph(b, inside, verifies, grouped)
            n = 1
            if proposals is not None and self.verifier is not None:
                self.verifier.send(proposals)
                n = self.verifier.n_tokens
            self.cache.reserve(dict.fromkeys(live, n))
            if recorded is None:
                logits = self._step(b, inside, verifies, grouped)
            else:
                graph, logits = recorded
                graph.replay()
            if inside is None:
                (self._accept if verifies else self._sample_first)(b, logits, greedy)

    def extend(
        self,
        new: Mapping[PagedSequence, Sequence[int] | None],
        begun: Mapping[PagedSequence, tuple[Sequence[int], Sampling, Sequence[int]]],
    ) -> None:
        """A step that mixes parts of prompts with single tokens.

        A sequence whose newest token is computed gets another one. The newest tokens of slots without a sequence in
        this step are lost.

        Args:
            new: the next tokens of each sequence; None for its newest token, which is on the device.
            begun: sequences whose last tokens before the first new one are computed in this step: all of their tokens,
                their sampling, and those of the tokens that were drawn before a preemption.

        Raises:
            ValueError: a sequence would be longer than `max_seq_len`, or there are no pages left. Nothing has changed
                then.
        """
        with self._entered(f"extend {len(new)}"):
            slots = [s.slot for s, tokens in new.items() if tokens is None or s in begun]
            logits = self._mixed(new, {s.slot for s in begun})
            if begun:
                self._set([s.slot for s in begun], *zip(*begun.values(), strict=True))
            self.options.begin()
            if slots:
                self._sample(slice(0, logits.shape[0]), logits, self._greedily(slots))

    def _mixed(
        self, new: Mapping[PagedSequence, Sequence[int] | None], last: Container[int], every: bool = False
    ) -> Tensor:  # fmt: skip
        """The logits of new tokens, behind newest tokens and parts in slots that are `last`, or of every token."""
        # Parts of prompts carry their places in the cache: without newest tokens the device starts with the step, and
        # the new state follows. No page is copied, because those that sequences share are full.
        with contextlib.nullcontext() if None in new.values() else self.cache.deferred():
            self.cache.extend({s: 1 if tokens is None else len(tokens) for s, tokens in new.items()})
            laid_out = MixedBatch(
                new, last, self.cache.page_size, self.cache.page_table.shape[1], self.max_batch, every=every,
                pinned=self._device.type == "cuda",
            )  # fmt: skip
            return self._prefilled(laid_out)

    def _prefilled(self, laid_out: MixedBatch) -> Tensor:
        """The logits, by a graph where there is one."""
        self.shape = laid_out.shape
        if self._of_prompts is not None:
            return self._of_prompts(laid_out, self.tokens)
        numbers = laid_out.numbers.to(self._device, non_blocking=True)
        return self.decoder.prefill(laid_out, laid_out.filled(numbers, self.tokens))

    @property
    def _ways(self) -> tuple[bool, ...]:
        """Whether slots may be sampled by the kernel that draws nothing, and whether by another one.

        The former rounds log-probabilities differently, so a deterministic engine never uses it.
        """
        return (False,) if self.deterministic else (True, False)

    def _greedily(self, slots: Iterable[int]) -> bool:
        """Whether those slots are sampled by the kernel that draws nothing."""
        return True in self._ways and self._drawing.isdisjoint(slots)

    def shorten(self, sequence: PagedSequence, n: int) -> None:
        """Tell the host that the last n tokens of a sequence were not accepted."""
        self.cache.shorten(sequence, n)

    def share(self, pages: Sequence[int]) -> PagedSequence:
        """A new sequence of the tokens of those pages, none or more, which the cache has found."""
        with self._entered():
            return self.cache.share(pages)

    def free(self, sequence: PagedSequence) -> None:
        """Release a sequence's slot and pages."""
        with self._entered():
            self.options.free(sequence.slot)
            self.cache.free(sequence)

    def compact(self, ended: Sequence[PagedSequence] = (), begun: int = 0) -> None:
        """Move sequences from the last slots to free ones before them, if the next step then has fewer rows.

        That step has none of the `ended` ones, and begins `begun` more. The tokens of the last step must have been read
        if it had proposals.
        """
        taken = self.cache.sequences
        live = [s for s in taken if s not in ended] if ended else taken
        b = self.bucket(max(1, len(live) + begun))
        if not live or live[-1].slot < b:
            return
        free = sorted({*range(b)}.difference([s.slot for s in taken]))
        above = [s for s in live if s.slot >= b]
        if len(free) < len(above):  # ended ones are in the way
            return
        slots = dict(zip(above, free, strict=False))
        changed: dict[int, Sampling] = {}
        with self._entered(f"compact {len(slots)}"):
            for sequence, new in slots.items():
                old = sequence.slot
                how = self._sampling[old]
                self.tokens[new : new + 1].copy_(self.tokens[old : old + 1])
                if not how.greedy:
                    self._seen[new].copy_(self._seen[old])
                if how != self._sampling[new]:
                    changed[new] = how
                self.options.move(old, new)
            if changed:
                self._send_sampling(changed)
            self.cache.move(slots)
            if self._cascade is not None:
                self._cascade.forget()

    def logits(self, prompts: Sequence[Sequence[int]], part: int | None = None) -> list[Tensor]:
        """Logits of every token, `(T, V)` a prompt, in the model's dtype. Takes slots and pages while it runs.

        With `part`, so many tokens of each prompt at a time: a single one by a step of decoding, more by `extend`'s.
        """
        with self._entered():
            if part is not None:
                return self._logits_in_parts(prompts, part)
            sequences = self._allocated(prompts)
            try:
                new: dict[PagedSequence, Sequence[int] | None] = dict(zip(sequences, prompts, strict=True))
                logits = self._mixed(new, (), every=True)[: sum(map(len, prompts))]
            finally:
                self._free_all(sequences)
            return list(logits.split([len(p) for p in prompts]))

    def _logits_in_parts(self, prompts: Sequence[Sequence[int]], part: int) -> list[Tensor]:
        found: list[list[Tensor]] = [[] for _ in prompts]
        newest, sequences = self.tokens.clone(), self._allocated(prompts)
        try:
            for at in range(0, max(map(len, prompts)), part):
                new = {i: p[at : at + part] for i, p in enumerate(prompts) if len(p) > at}
                if part == 1:
                    rows = self._decoded({sequences[i]: token for i, (token,) in new.items()})
                else:
                    mixed = self._mixed({sequences[i]: tokens for i, tokens in new.items()}, (), every=True)
                    counts = [len(tokens) for tokens in new.values()]
                    rows = mixed[: sum(counts)].split(counts)
                for i, of_prompt in zip(new, rows, strict=True):
                    found[i].append(of_prompt)
        finally:
            self._free_all(sequences)
            self.tokens.copy_(newest)
        return [torch.cat(rows) for rows in found]

    def _decoded(self, new: Mapping[PagedSequence, int]) -> tuple[Tensor, ...]:
        """Logits of a step of decoding with those tokens, a row of each sequence. It samples nothing."""
        slots = [s.slot for s in new]
        b = self.bucket(max(slots) + 1)
        recorded = None if self._graphs is None else self._graph(b, None, False)
        ids = [0] * b
        for sequence, token in new.items():
            ids[sequence.slot] = token
        self.tokens[:b].copy_(torch.tensor(ids, dtype=torch.int32, device="cpu"))
        self.cache.reserve(dict.fromkeys(new, 1))
        if recorded is None:
            logits = self._step(b, None, False)
        else:
            graph, logits = recorded
            graph.replay()
        return logits[slots].split(1)

    def _allocated(self, prompts: Sequence[Sequence[int]]) -> list[PagedSequence]:
        """New sequences for prompts, without tokens."""
        if not len(prompts):
            raise ValueError("there are no prompts, expected one or more")
        if any(not len(p) for p in prompts):
            raise ValueError("a prompt is empty, expected one token or more")
        sequences: list[PagedSequence] = []
        try:
            for _ in prompts:
                sequences.append(self.cache.allocate())
        except BaseException:
            self._free_all(sequences)
            raise
        return sequences

    def _free_all(self, sequences: Sequence[PagedSequence]) -> None:
        for sequence in sequences:
            self.free(sequence)

    def bucket(self, n: int) -> int:
        """Rows of a step for the first n slots: few sizes, so few graphs."""
        return min(self.max_batch, 1 << (n - 1).bit_length() if n <= 16 else -(-n // 16) * 16)

    def _step(self, b: int, greedy: bool | None, verifies: bool, grouped: bool = False) -> Tensor:
        """The logits of a step, which samples unless `greedy` is None."""
        if not verifies:
            self.cache.advance()
            logits = self.decoder.decode(self.tokens[:b], cascade=self._cascade if grouped else None)
            if greedy is not None:
                self._sample_first(b, logits, greedy)
            return logits
        v = self.verifier
        assert v is not None, "proposals are for an engine that speculates"
        v.draft(b)
        self.cache.advance()
        v.lay_out(b, None if greedy else self._seen)
        ids, positions = (x[: b * v.n_tokens].view(b, v.n_tokens) for x in (v.ids, v.positions))
        logits = self.decoder.decode(ids, positions)
        if greedy is not None:
            self._accept(b, logits, greedy)
        return logits

    def _graph(
        self, b: int, greedy: bool | None, verifies: bool, grouped: bool = False
    ) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        assert self._graphs is not None
        key = b, greedy, verifies, grouped
        if key not in self._graphs:

            def step() -> Tensor:
                return self._step(b, greedy, verifies, grouped)

            def warm() -> None:
                """A step without sequences, and a reserved one for the capture."""
                if self.verifier is not None:
                    self.verifier.send({})
                self.cache.reserve({})
                step()
                self.cache.reserve({})

            # The warm-up overwrites the tokens of live sequences.
            kept = [(x, x.clone()) for x in (self.tokens, self.logprobs, self._seen)]
            try:
                self._graphs[key] = self._turns.record(step, warm)
            finally:
                for x, old in kept:
                    x.copy_(old)
        return self._graphs[key]

    def _set(
        self,
        slots: Sequence[int],
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[Sampling],
        generated: Sequence[Sequence[int]],
    ) -> None:
        """Set the sampling options of slots."""
        changed: dict[int, Sampling] = {}
        pairs: list[tuple[int, int]] = []
        for slot, prompt, how, drawn in zip(slots, prompts, sampling, generated, strict=True):
            if how != self._sampling[slot]:
                changed[slot] = how
            self.options.set(slot, how, drawn)
            if not how.greedy:
                self._seen[slot].copy_(self._none_seen)
            if how.repetition_penalty != 1:
                pairs += ((t, slot) for t in sorted(set(prompt)))
        if changed:
            self._send_sampling(changed)
        if pairs:
            ids = torch.tensor(pairs, dtype=torch.int32, device="cpu").T
            ids = torch.empty(ids.shape, dtype=torch.int32, device="cpu", pin_memory=self.tokens.is_cuda).copy_(ids)
            mark_seen_(self._seen, *ids.to(self.tokens.device, non_blocking=True))

    def _send_sampling(self, changed: Mapping[int, Sampling]) -> None:
        """Send the options of some slots, and of their rows in a step with proposals."""
        self._of_slots.send(changed)
        if self._of_rows is not None and self.verifier is not None:
            n = self.verifier.n_tokens
            self._of_rows.send({slot * n + i: how for slot, how in changed.items() for i in range(n)})
        for slot, how in changed.items():
            self._sampling[slot] = how
            (self._drawing.discard if how.greedy else self._drawing.add)(slot)

    def _sample_first(self, b: int, logits: Tensor, greedy: bool) -> None:
        self._sample(slice(0, b), logits, greedy)

    def _accept(self, b: int, logits: Tensor, greedy: bool) -> None:
        """Draw a token behind each of the T tokens of the first b slots, and accept the proposals that agree."""
        v = self.verifier
        assert v is not None, "the engine speculates"
        assert self._of_rows is not None, "as above"
        n = b * v.n_tokens
        numbers = {name: tensor[:n] for name, tensor in self._of_rows.of.items()}
        by_count = {name: numbers.pop(name) for name in _BY_COUNTS}
        more = {} if greedy else {"seen": v.seen[:n], "positions": v.nexts[:n], **numbers}
        tables = self.options.of(slice(0, b), {}, proposed=True)
        if "mask" in tables:
            more["mask"] = tables["mask"]
        counts, bias = tables.get("counts"), tables.get("logit_bias")
        if counts is not None or bias is not None:
            row_counts, row_bias = v.lay_out(b, None, counts, bias)
            if row_counts is not None:
                more |= {"counts": row_counts, **by_count}
            if row_bias is not None:
                more["logit_bias"] = row_bias
        drawn, ids = (x[:n].view(b, v.n_tokens) for x in (v.drawn, v.ids))
        sample_(v.drawn[:n], v.logprobs[:n], logits, **more)
        accept_drafts_(
            v.accepted[:b], self.tokens[:b], self.cache.lengths[:b], drawn, ids, v.limits[:b],
            seen=None if greedy else self._seen[:b], counts=counts,
        )  # fmt: skip
        self.options.find_top(slice(0, b), logits)

    def _sample(self, rows: slice, logits: Tensor, greedy: bool) -> None:
        numbers = self._of_slots.of
        given = {name: tensor[rows] for name, tensor in numbers.items() if name not in _BY_COUNTS}
        # The position of the sampled token is the number of tokens in the cache.
        more = {} if greedy else {"seen": self._seen[rows], "positions": self.cache.lengths[rows], **given}
        more |= self.options.of(rows, {name: numbers[name] for name in _BY_COUNTS})
        sample_(self.tokens[rows], self.logprobs[rows], logits, **more)
        self.options.find_top(rows, logits)
