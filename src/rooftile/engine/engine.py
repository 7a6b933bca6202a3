"""The engine: a model that generates text. Every computation on the GPU is one of Rooftile's Triton kernels."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from rooftile.engine import hub
from rooftile.engine import ranks as ranks_
from rooftile.engine import weights as weights_
from rooftile.engine.cache import check_positive
from rooftile.engine.config import ModelConfig
from rooftile.engine.generation import NEW_TOKENS, Completion, StreamChunk, Watch, encoded, integer, stops_of
from rooftile.engine.loop import Loop
from rooftile.engine.ranks import Ranks
from rooftile.engine.runner import Runner, Sampling
from rooftile.engine.sampling import TokenMask
from rooftile.engine.scheduling import Request, Scheduler
from rooftile.engine.speculation import Draft, Speculate, Speculation, proposals_of
from rooftile.engine.split import WHOLE
from rooftile.engine.weights import Weights
from rooftile.errors import checks_keywords, counted

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Prompts = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]
Stop = str | int | Sequence[str | int]
Masks = TokenMask | Sequence[TokenMask | None] | None
Quantization = Literal["fp8", "int8", "int4"]

# The most tokens of a step of `generate`. GEMMs of some thousand rows run at full speed; more only take more memory.
STEP_TOKENS = 8192
_DEFAULT_LENGTH = 4096


_BUSY = "another call generates, or an AsyncEngine has this engine; exhaust the call's iterator, or close either"


class Engine:
    """A model with its cache, which generates text.

        engine = rooftile.Engine.from_pretrained("path/to/a/checkpoint")
        print(engine.generate("Once upon a time", max_new_tokens=100)[0].text)

    Attributes:
        config: the part of the model's configuration that the engine computes.
        weights: on the device.
        tokenizer: of the checkpoint, or None.
        runner: the steps on the device.
        max_batch: sequences at a time; others wait until one has ended.
        max_seq_len: the most tokens of a sequence, prompt and new.
        speculate: where proposals of speculative decoding come from, or None.
        rank: of this process, where several have a part of the model each; else 0.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights | None = None,
        tokenizer: Tokenizer | None = None,
        runner: Runner | None = None,
        speculate: Speculate | None = None,
    ) -> None:
        if weights is None or runner is None:
            raise TypeError(
                "Engine: weights and runner are absent; Engine.from_pretrained(folder) loads a checkpoint, and "
                "Engine.from_config(config) makes a model with random weights"
            )
        self.config, self.weights, self.tokenizer, self.runner = config, weights, tokenizer, runner
        self.max_batch, self.max_seq_len = runner.max_batch, runner.max_seq_len
        self.rank = 0 if runner.ranks is None else runner.ranks.rank
        self._broadcasts: Callable[[Sampling], Sampling] | None = None  # set while this rank leads others
        if proposals_of(speculate) != (runner.verifier.n_tokens - 1 if runner.verifier else 0):
            raise ValueError(f"Engine: the runner is not made for speculate={speculate!r}")
        self.speculate = speculate
        self._generating = False

    @classmethod
    @checks_keywords
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        dtype: torch.dtype = torch.bfloat16,
        quantize: Quantization | None = None,
        max_batch: int = 8,
        max_seq_len: int | None = None,
        page_size: int = 64,
        pages: int | None = None,
        kv_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        cuda_graphs: bool = True,
        speculate: Speculate | None = None,
        tensor_parallel: int = 1,
        deterministic: bool = False,
        cascade: bool = False,
        progress: bool = True,
        revision: str | None = None,
    ) -> Engine:
        """Load a folder that `save_pretrained` wrote: config.json, safetensors and, for text prompts, tokenizer.json.

        Args:
            path: the folder, or the id of a model on the Hugging Face Hub, `organization/name`, whose files are
                downloaded unless its cache has them; or `"demo"`, the small model in the package.
            dtype: of unquantized weights and of activations: bfloat16, float16 or float32.
            quantize: store the weights of projections in 8 or 4 bits. Checkpoints of quantized weights (GPTQ, AWQ,
                compressed-tensors, FP8) are read as they are, without it.
            max_batch, max_seq_len: sequences at a time, and the most tokens of each, prompt and new. The cache is
                allocated for them. By default at most 4096 tokens.
            page_size, pages: of the cache. With fewer pages than `max_batch` sequences of `max_seq_len` tokens need,
                sequences may have to wait, or to be computed again.
            kv_dtype: of the cache: dtype (the default), float8_e4m3fn or int8.
            device: by default the GPU.
            cuda_graphs: replay a CUDA graph for each decoding step, and for prompts of shapes that recur.
            speculate: `rooftile.NGram` or `rooftile.Draft`, which propose tokens that a step may accept: the same text
                in fewer steps. None, the default: every step yields one token.
            tensor_parallel: so many processes, which `torchrun` has started, have a part of the model each, on a GPU
                each. All of them make the same calls, and get the same results.
            deterministic: give a prompt the same tokens and log-probabilities, bit for bit, whatever runs beside it,
                and in whatever parts it is computed. It is slower; the guide to serving says how far it holds.
            cascade: in decoding steps, read the pages that all sequences begin with once for several of them, where
                they are many. Not yet timed.
            progress: show a progress bar.
            revision: of an id, a branch, tag or commit.

        Raises:
            FileNotFoundError: the folder or a file is missing; or the Hub has no such id, or can't be reached.
            ValueError: path is a file, the engine does not compute this model, or a tensor or file is not valid; the
                message names it. Nothing has been loaded then. Or there are not `tensor_parallel` processes, or it does
                not divide a size of the model, or it is not 1 beside `deterministic` or a `Draft`. Or both
                `deterministic` and `cascade` are asked for.
            TypeError: a dtype is not one of those, or path is a loaded model, for which there is `rooftile.patch`.
            RuntimeError: another process of several has failed.
        """
        ranks, device = ranks_.join(tensor_parallel, device)
        with contextlib.nullcontext() if ranks is None else ranks.agreed():
            return cls._loaded(
                path, revision, ranks, device, quantize, speculate, progress and (ranks is None or ranks.rank == 0),
                dtype=dtype, max_batch=max_batch, max_seq_len=max_seq_len, page_size=page_size, pages=pages,
                kv_dtype=kv_dtype, cuda_graphs=cuda_graphs, deterministic=deterministic, cascade=cascade,
            )  # fmt: skip

    @classmethod
    def _loaded(
        cls, path: str | Path, revision: str | None, ranks: Ranks | None, device: torch.device,
        quantize: Quantization | None, speculate: Speculate | None, progress: bool, *, dtype: torch.dtype,
        **given: Any,
    ) -> Engine:  # fmt: skip
        """`from_pretrained` of one rank."""
        folder = hub.folder_of(path, revision)
        config = ModelConfig.from_hf(folder)
        options = _options(config, ranks, dtype, quantize, proposals=proposals_of(speculate), **given)
        tokenizer = _tokenizer(folder)
        draft = _draft(config, ranks, speculate, dtype, device, progress)
        split = WHOLE if ranks is None else ranks.split
        loaded = weights_.load(
            config, folder, dtype=dtype, quantize=quantize, device=device, progress=progress, split=split
        )
        runner = Runner(split.config(config), loaded, draft=draft, **options)
        return cls(config, loaded, tokenizer, runner, speculate)

    @classmethod
    @checks_keywords
    def from_config(
        cls,
        config: Any,
        *,
        dtype: torch.dtype = torch.bfloat16,
        quantize: Quantization | None = None,
        max_batch: int = 8,
        max_seq_len: int | None = None,
        page_size: int = 64,
        pages: int | None = None,
        kv_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        cuda_graphs: bool = True,
        speculate: Speculate | None = None,
        tensor_parallel: int = 1,
        deterministic: bool = False,
        cascade: bool = False,
        seed: int = 0,
    ) -> Engine:
        """A model with random weights, drawn from the seed, for benchmarks and tests.

        Args:
            config: a `ModelConfig`, or what `ModelConfig.from_hf` takes: a Hugging Face configuration, the contents of
                a config.json as a dict, the file, or its folder.
            seed: of the weights.

        The other arguments, and what is raised, are as in `from_pretrained`.
        """
        ranks, device = ranks_.join(tensor_parallel, device)
        with contextlib.nullcontext() if ranks is None else ranks.agreed():
            config = config if isinstance(config, ModelConfig) else ModelConfig.from_hf(config)
            options = _options(
                config, ranks, dtype, quantize, max_seq_len=max_seq_len, max_batch=max_batch, page_size=page_size,
                pages=pages, kv_dtype=kv_dtype, cuda_graphs=cuda_graphs, proposals=proposals_of(speculate),
                deterministic=deterministic, cascade=cascade,
            )  # fmt: skip
            draft = _draft(config, ranks, speculate, dtype, device, False)
            split = WHOLE if ranks is None else ranks.split
            drawn = weights_.random(config, dtype=dtype, quantize=quantize, device=device, seed=seed, split=split)
            return cls(config, drawn, None, Runner(split.config(config), drawn, draft=draft, **options), speculate)

    @overload
    def generate(
        self, prompts: Prompts, *, max_new_tokens: int | None = ..., temperature: float = ..., top_k: int = ...,
        top_p: float = ..., min_p: float = ..., repetition_penalty: float = ..., presence_penalty: float = ...,
        frequency_penalty: float = ..., logit_bias: Mapping[int, float] | None = ..., mask: Masks = ...,
        stop: Stop = ..., seed: int | Sequence[int] = ..., logprobs: bool = ..., top_logprobs: int = ...,
        stream: Literal[False] = ..., ignore_eos: bool = ...,
    ) -> list[Completion]: ...  # fmt: skip

    @overload
    def generate(
        self, prompts: Prompts, *, max_new_tokens: int | None = ..., temperature: float = ..., top_k: int = ...,
        top_p: float = ..., min_p: float = ..., repetition_penalty: float = ..., presence_penalty: float = ...,
        frequency_penalty: float = ..., logit_bias: Mapping[int, float] | None = ..., mask: Masks = ...,
        stop: Stop = ..., seed: int | Sequence[int] = ..., logprobs: bool = ..., top_logprobs: int = ...,
        stream: Literal[True], ignore_eos: bool = ...,
    ) -> Iterator[StreamChunk]: ...  # fmt: skip

    @checks_keywords
    def generate(
        self,
        prompts: Prompts,
        *,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Mapping[int, float] | None = None,
        mask: Masks = None,
        stop: Stop = (),
        seed: int | Sequence[int] = 0,
        logprobs: bool = False,
        top_logprobs: int = 0,
        stream: bool = False,
        ignore_eos: bool = False,
    ) -> list[Completion] | Iterator[StreamChunk]:
        """Continue prompts.

        Up to `max_batch` run at a time. When one ends, the next takes its place while the others go on: a step has a
        token of each sequence that decodes and, beside them, prompts or parts of prompts, 8192 tokens in all at most.
        Full pages that prompts begin with in common are computed once. If pages run out, the last of the prompts that
        run gives its pages back, and is computed again later. The call keeps no pages for the next one.

        Args:
            prompts: one text or several, or the token ids of one prompt or of several.
            max_new_tokens: the most for each prompt; by default 128, or as many as there is room for after it.
            temperature: 0 takes the most likely token.
            top_k, top_p, min_p, repetition_penalty: as in `rooftile.sample`.
            presence_penalty, frequency_penalty: are subtracted from the logits of generated tokens: the first once, the
                second as often as the token was generated. -2 to 2, as in OpenAI's API.
            logit_bias: numbers by token id, added to the logits.
            mask: an object for each prompt (of a single one, the object itself) that restricts its tokens, such as a
                grammar: `mask()` returns those that may come next, int32 `(ceil(V / 32),)` on the CPU, bit t % 32 of
                word t // 32 for token t; `advance(token)` is told of each token. Steps then wait for the tokens of the
                previous step. None restricts nothing.
            stop: strings and token ids. The text ends before the stop; the tokens include the one that completed it.
            seed: one for all prompts, or one each. A token depends on its logits, the seed and its position alone, so
                equal prompts with one seed get equal tokens as long as their logits are equal. Batches of another size,
                and prompts in parts, use other kernels, which round logits differently; `deterministic` engines don't.
            logprobs: also return the log-probability of each token, before mask, bias, penalties and temperature.
            top_logprobs: also return so many of the most likely tokens with their log-probabilities, 20 at most.
            stream: return an iterator of `StreamChunk`, one for each token, instead of a list.
            ignore_eos: continue after the model's end tokens.

        Returns:
            a `Completion` for each prompt, in their order.

        Raises:
            ValueError: a prompt is empty, has a token outside of the vocabulary, or with its new tokens exceeds
                `max_seq_len` or the cache; an option is out of range; prompts or stops are text and there is no
                tokenizer.
            TypeError: an argument has another type.
            RuntimeError: another call is generating: its iterator was neither exhausted nor closed.

        All checks come before anything runs.
        """
        ids = encoded(prompts, self.tokenizer, self.config.vocab)
        one = integer(seed)
        if one is not None:
            seeds: list[Any] = [one] * len(ids)
        elif isinstance(seed, Sequence):
            seeds = [s if (n := integer(s)) is None else n for s in seed]
        else:
            raise TypeError(f"generate: seed is {seed!r}, expected an integer, or one for each prompt")
        if len(seeds) != len(ids):
            raise ValueError(
                f"generate: seed has {len(seeds)} numbers, expected one, or {len(ids)}, one for each prompt"
            )
        masks = list(mask) if isinstance(mask, Sequence) else [mask] * (len(ids) if mask is None else 1)
        if len(masks) != len(ids):
            raise ValueError(f"generate: mask has {len(masks)} objects, expected {len(ids)}, one for each prompt")
        requests = [
            self._request(
                i, prompt, max_new_tokens, stop, logprobs, ignore_eos,
                Sampling(
                    temperature, top_k, top_p, min_p, repetition_penalty, s, presence_penalty, frequency_penalty,
                    logit_bias, restricts, top_logprobs,
                ),
            )
            for i, (prompt, s, restricts) in enumerate(zip(ids, seeds, masks, strict=True))
        ]  # fmt: skip
        if self._generating:
            raise RuntimeError(f"generate: {_BUSY}")
        loop = Loop(self.runner, self._scheduler(), self._speculation())
        for request in requests:
            loop.add(request)
        chunks = self._chunks(loop)
        if stream:
            return chunks
        deque(chunks, maxlen=0)
        return [r.watch.completion() for r in requests if r.watch is not None]

    def _speculation(self) -> Speculation | None:
        return None if self.speculate is None else Speculation(self.speculate, self.config.vocab)

    def _scheduler(self) -> Scheduler:
        # However many sequences there may be, a step has room for prompts.
        return Scheduler(self.runner, max(STEP_TOKENS, 2 * self.max_batch), prefix_cache=True)

    def _request(
        self, index: int, prompt: list[int], max_new_tokens: object, stop: Stop, logprobs: bool, ignore_eos: bool,
        sampling: Sampling, op: str = "generate",
    ) -> Request:  # fmt: skip
        """A checked request."""
        cache = self.runner.cache
        # The last new token is not written to the cache.
        room = min(self.max_seq_len, cache.k.shape[1] * cache.page_size + 1) - len(prompt)
        limit = max(1, min(NEW_TOKENS, room)) if max_new_tokens is None else integer(max_new_tokens)
        if limit is None:
            raise TypeError(f"{op}: max_new_tokens is {max_new_tokens!r}, expected an integer")
        if limit < 1:
            raise ValueError(f"{op}: max_new_tokens is {limit}, expected a positive integer")
        sampling.check(self.config.vocab)
        if self._broadcasts is not None:
            sampling = self._broadcasts(sampling)
        request = Request(index, prompt, limit, sampling)
        if request.longest + 1 > self.max_seq_len:
            raise ValueError(
                f"{op}: prompt {index} has {counted(len(prompt), 'token')}, and max_new_tokens is {limit}: more than "
                f"max_seq_len, {self.max_seq_len}"
            )
        needed = -(-request.longest // cache.page_size)
        if needed > cache.k.shape[1]:
            raise ValueError(
                f"{op}: prompt {index} and its new tokens need {counted(needed, 'page')}, and the cache has "
                f"{cache.k.shape[1]}"
            )
        ends = () if ignore_eos else self.config.eos
        stops = stops_of(stop, self.tokenizer, self.config.vocab)
        request.watch = Watch(request, ends, stops, self.tokenizer, logprobs)
        return request

    def _chunks(self, loop: Loop) -> Iterator[StreamChunk]:
        if self._generating:
            raise RuntimeError(f"generate: {_BUSY}")
        self._generating = True
        try:
            while loop.busy:
                for _, chunk in loop.step():
                    if isinstance(chunk, Exception):
                        raise chunk
                    yield chunk
        finally:
            loop.clear()
            self._generating = False

    def logits(self, prompts: Prompts, *, part: int | None = None) -> list[Tensor]:
        """Logits of each token of prompts, `(T, V)` float32, for checks. All prompts take slots and pages at once.

        Args:
            prompts: as `generate`.
            part: compute so many tokens of each prompt at a time, which read those before them from the cache: 1 by
                steps of decoding, more by `attention_paged`. None, the default, computes whole prompts.

        Raises:
            ValueError: as `generate`, or part is no positive integer.
        """
        if part is not None:
            check_positive("logits", part=part)
        ids = encoded(prompts, self.tokenizer, self.config.vocab)
        if len(ids) > self.max_batch:
            raise ValueError(f"logits: there are {len(ids)} prompts, expected at most max_batch, {self.max_batch}")
        for i, prompt in enumerate(ids):
            if len(prompt) > self.max_seq_len:
                raise ValueError(
                    f"logits: prompt {i} has {counted(len(prompt), 'token')}, expected at most max_seq_len, "
                    f"{self.max_seq_len}"
                )
        return [x.float() for x in self.runner.logits(ids, part)]

    def __repr__(self) -> str:
        c, weights, cache = self.config, self.weights, self.runner.cache
        return (
            f"<Engine: {c.family}, {c.layers} layers of {c.hidden}, {weights.layers[0].qkv.kind} weights, "
            f"{weights.embedding.dtype} on {weights.embedding.device}; max_batch={self.max_batch}, "
            f"max_seq_len={self.max_seq_len}, a cache of {cache.k.shape[1]} pages of {cache.page_size} tokens in "
            f"{cache.k.dtype}>"
        )


def _options(
    config: ModelConfig, ranks: Ranks | None, dtype: torch.dtype, quantize: str | None, *, max_seq_len: int | None,
    **given: Any,
) -> dict[str, Any]:  # fmt: skip
    """The runner's options, checked."""
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise TypeError(f"Engine: dtype is {dtype!r}, expected torch.float32, torch.float16 or torch.bfloat16")
    kv_dtype = given["kv_dtype"]
    if kv_dtype not in (None, dtype, torch.float8_e4m3fn, torch.int8):
        raise TypeError(f"Engine: kv_dtype is {kv_dtype!r}, expected {dtype}, torch.float8_e4m3fn or torch.int8")
    length = min(config.max_positions, _DEFAULT_LENGTH) if max_seq_len is None else max_seq_len
    check_positive("Engine", max_batch=given["max_batch"], max_seq_len=length)
    if length > config.max_positions:
        raise ValueError(f"Engine: max_seq_len is {length}, expected at most the model's {config.max_positions}")
    if given["deterministic"] and ranks is not None:  # NCCL adds in an order that depends on the number of tokens
        raise ValueError(
            f"Engine: deterministic is True and tensor_parallel {ranks.size}, expected at most one of them"
        )
    if given["deterministic"] and given["cascade"]:  # whether there is a group depends on the company
        raise ValueError("Engine: deterministic and cascade are True, expected at most one of them")
    options = {**given, "max_seq_len": length, "ranks": ranks}
    split = WHOLE if ranks is None else ranks.split
    split.check(config)
    # On the meta device: an impossible cache is reported before weights are loaded.
    meta = weights_.random(config, dtype=dtype, quantize=quantize, device="meta", split=split)
    Runner(split.config(config), meta, **options)
    return options


def _draft(
    config: ModelConfig,
    ranks: Ranks | None,
    speculate: Speculate | None,
    dtype: torch.dtype,
    device: torch.device,
    progress: bool,
) -> tuple[ModelConfig, Weights] | None:
    """The draft model, if there is one.

    Raises:
        ValueError: its vocabulary, or its device, is another. The rest as `Engine.from_pretrained`.
    """
    if not isinstance(speculate, Draft):
        return None
    if ranks is not None:
        raise ValueError(f"Engine: speculate is a Draft, and tensor_parallel {ranks.size}, expected NGram or None")
    if isinstance(speculate.model, Engine):
        if (its := speculate.model.runner.ranks) is not None:
            raise ValueError(f"Engine: the draft model has tensor_parallel {its.size}, expected 1: a whole model")
        small, weights = speculate.model.config, speculate.model.weights
    else:
        folder = hub.folder_of(speculate.model)
        small, weights = ModelConfig.from_hf(folder), None
    if small.vocab != config.vocab:
        raise ValueError(
            f"Engine: the draft model has a vocabulary of {small.vocab} tokens, expected the model's {config.vocab}"
        )
    if weights is None:
        quantize = speculate.quantize
        weights = weights_.load(small, folder, dtype=dtype, quantize=quantize, device=device, progress=progress)
    if weights.embedding.device != torch.empty(0, device=device).device:
        raise ValueError(f"Engine: the draft model is on {weights.embedding.device}, expected {device}")
    return small, weights


def _tokenizer(folder: Path) -> Tokenizer | None:
    file = folder / "tokenizer.json"
    if not file.exists():
        return None
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises plain Exceptions
        raise ValueError(f"{file}: no tokenizer can be read from it: {error}") from error
