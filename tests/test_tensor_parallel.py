"""Tensor parallelism: two processes over gloo write what one does, each with its part of the weights."""

import contextlib
import functools
import gc
import json
import pickle
from types import SimpleNamespace

import pytest
import test_engine_published as published
import test_engine_weights as checkpoints
import torch
from helpers import interpreted, nightly_but, on_two_ranks
from published_formats import save as save_published
from test_engine_projections import dense_of

import rooftile
from rooftile.engine import weights as weights_
from rooftile.engine.config import ModelConfig
from rooftile.engine.leading import leading
from rooftile.engine.ranks import join
from rooftile.engine.split import Split

pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

_SIZES = {
    "model_type": "llama", "vocab_size": 74, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1,
    "eos_token_id": 2, "initializer_range": 0.3,
}  # fmt: skip
PROMPTS = [[3, 5, 8, 13, 21, 34, 55], [9, 9, 4], [70, 2, 64, 17]]
OPTIONS = {"max_batch": 3, "max_seq_len": 32, "page_size": 16, "dtype": torch.float32}
# Configuration, and options of the engine: one KV head for two ranks, a tied head; quantized groups of a rank's own.
MODELS = {
    "untied": ({}, {}),
    "tied": ({"num_key_value_heads": 1, "tie_word_embeddings": True}, {}),
    "int4": ({"head_dim": 64, "intermediate_size": 256}, {"quantize": "int4"}),
}
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.1, "seed": [1, 2, 3]}


class Even:
    """Allows even tokens, and raises after some."""

    def __init__(self, last=99):
        self.asked, self.last = 0, last

    def mask(self):
        self.asked += 1
        if self.asked > self.last:
            raise ValueError("no more")
        return torch.full((3,), 0x55555555, dtype=torch.int32)

    def advance(self, token):
        assert token % 2 == 0


def engine_of(name, n, path, **more):
    sizes, options = MODELS[name]
    options = OPTIONS | options | {"tensor_parallel": n}
    if name == "untied":
        return rooftile.Engine.from_pretrained(path / "model", **options, progress=False)
    return rooftile.Engine.from_config(_SIZES | sizes, **options)


def save(folder):
    """A checkpoint of the first model."""
    generator, c = torch.Generator().manual_seed(0), ModelConfig.from_hf(_SIZES)
    names = {}
    for i in range(c.layers):
        at, kv = f"model.layers.{i}.", c.kv_heads * c.head_dim
        names |= {f"{at}{name}_layernorm": (c.hidden,) for name in ("input", "post_attention")}
        names |= {
            f"{at}self_attn.{name}_proj": (n, c.hidden) for name, n in zip("qkv", (c.hidden, kv, kv), strict=True)
        }
        names |= {f"{at}mlp.{name}_proj": (c.intermediate, c.hidden) for name in ("gate", "up")}
        names |= {f"{at}self_attn.o_proj": (c.hidden, c.hidden), f"{at}mlp.down_proj": (c.hidden, c.intermediate)}
    names |= {"model.norm": (c.hidden,), "model.embed_tokens": (c.vocab, c.hidden), "lm_head": (c.vocab, c.hidden)}
    tensors = {f"{name}.weight": 0.3 * torch.randn(shape, generator=generator) for name, shape in names.items()}
    folder.mkdir()
    safetensors_torch.save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(_SIZES))


def written(engine, n=2, **how):
    return [(c.tokens, c.finish_reason) for c in engine.generate(PROMPTS, max_new_tokens=n, ignore_eos=True, **how)]


def results(name, n, path):
    """What an engine writes, and its logits."""
    engine = engine_of(name, n, path)
    found = {"greedy": written(engine)}
    if name == "untied":
        found |= {"sampled": written(engine, 2, **SAMPLED), "requests": requests(engine, warm_up=n > 1)}
        found["afterwards"] = [c.tokens for c in engine.generate([[7, 8]], max_new_tokens=1)]
    return found, engine.logits(PROMPTS)


def requests(engine, warm_up):
    """What streams of an `AsyncEngine` write: chunked prompts, shared pages, a mask, an error, an abort."""
    engine.runner._graphs, engine.runner._graph = {}, lambda *args: None  # as on a GPU, so that there is a warm-up
    example = functools.cache(engine.runner._example)
    engine.runner._example = lambda slots, *how: example(slots, *how) if slots in (0, 3) else None  # of many
    with rooftile.AsyncEngine(engine, step_tokens=10, warm_up=warm_up and engine.rank == 0) as running:
        if engine.rank:
            with pytest.raises(RuntimeError, match="this is rank 1, expected 0, which takes the requests"):
                running.add([3], max_new_tokens=1)
            return None
        long = [*range(3, 23)]
        found = [running.add(long, max_new_tokens=1, ignore_eos=True).result().tokens]
        how = {"max_new_tokens": 2, "ignore_eos": True, "temperature": 0.8, "seed": 5}
        streams = running.add_all([{"prompt": p, **how} for p in PROMPTS[:2]])
        streams.append(running.add([*long, 4], max_new_tokens=6, ignore_eos=True, mask=Even()))
        found += [s.result().tokens for s in streams]  # the last one moves to the first slot
        assert running.stats().prefix_hit_tokens == 16
        failing = running.add([3, 4], max_new_tokens=4, mask=Even(1), ignore_eos=True)
        with pytest.raises(rooftile.engine.RequestError, match="no more"):
            failing.result()
        stream = running.add([3, 4], max_new_tokens=20, ignore_eos=True)
        next(stream)
        stream.close()
        found.append(running.add([6], max_new_tokens=2, ignore_eos=True).result().tokens)
    return found


def fail_on_rank_1(ranks):
    with ranks.agreed():
        if ranks.rank:
            raise ValueError("not here")


def _rank(rank, path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=2)
    found = {name: results(name, 2, path) for name in MODELS}
    with pytest.raises(ValueError, match="tensor_parallel is 3, and the process group has 2 ranks, expected as many"):
        engine_of("tied", 3, path)
    ranks, _ = join(2, "cpu")
    with pytest.raises(ValueError if rank else RuntimeError, match="not here"):
        fail_on_rank_1(ranks)
    torch.save(found, f"{path}/results{rank}")
    gc.collect()
    torch.distributed.destroy_process_group()


@interpreted
def test_two_ranks_write_what_one_does(tmp_path):
    save(tmp_path / "model")
    alone = {name: results(name, 1, tmp_path) for name in MODELS}  # a fork has the kernels that this has read
    on_two_ranks(_rank, tmp_path)
    zero, one = (torch.load(tmp_path / f"results{rank}") for rank in range(2))
    for name in MODELS:
        expected, exact = alone[name]
        for found, logits in (zero[name], one[name]):
            assert found.pop("requests", None) in (None, expected.get("requests"))  # rank 0 has them
            for a, b in zip(logits, exact, strict=True):
                assert (a - b).norm() <= 2e-5 * b.norm()  # sums of float32 in another order
        expected.pop("requests", None)
        assert zero[name][0] == one[name][0] == expected, name


def assert_parts(folder, ranks, dtype=torch.float32, **options):
    """What the ranks load is the whole model's: their own heads, columns and tokens, with the KV heads they need."""
    c = ModelConfig.from_hf(folder)
    whole = weights_.load(c, folder, dtype=dtype, device="cpu", **options)
    for rank in range(ranks):
        part = weights_.load(c, folder, dtype=dtype, device="cpu", split=Split(rank, ranks), **options)

        def own(x, dim=0, rank=rank):
            return x.chunk(ranks, dim)[rank]

        heads = own(torch.arange(c.heads))
        kv_heads = (heads // (c.heads // c.kv_heads)).unique()

        def qkv(x, heads=heads, kv_heads=kv_heads):
            q, k, v = x.unflatten(0, (-1, c.head_dim)).split((c.heads, c.kv_heads, c.kv_heads))
            return torch.cat([q[heads], k[kv_heads], v[kv_heads]]).flatten(0, 1)

        def gate_up(x, own=own):
            return torch.cat([own(half) for half in x.chunk(2)])

        for found, of in zip(part.layers, whole.layers, strict=True):
            for name, cut in (("qkv", qkv), ("gate_up", gate_up)):
                mine, all_ = getattr(found, name), getattr(of, name)
                assert torch.equal(dense_of(mine), cut(dense_of(all_))), name
                assert all_.bias is None or torch.equal(mine.bias, cut(all_.bias))
            for name in ("o", "down"):
                mine, all_ = getattr(found, name), getattr(of, name)
                assert torch.equal(dense_of(mine), own(dense_of(all_), 1)), name
                # Once in the sum of all ranks.
                assert all_.bias is None or (mine.bias is None if rank else torch.equal(mine.bias, all_.bias))
            assert all(torch.equal(a, b) for a, b in zip(found.norms, of.norms, strict=True))
        assert torch.equal(dense_of(part.lm_head), own(dense_of(whole.lm_head)))
        assert torch.equal(part.embedding, own(whole.embedding))


FAMILIES = ("llama code", "qwen2", "phi3", "gemma2")


@pytest.mark.parametrize("family", nightly_but(FAMILIES, [f for f in checkpoints.FAMILIES if f != "olmo2"]))
def test_each_rank_loads_its_part(family, tmp_path):
    checkpoints.model_of(family, vocab_size=52).save_pretrained(tmp_path)
    assert_parts(tmp_path, 2)
    if family == "phi3":
        assert_parts(tmp_path, 4)  # two ranks for each KV head


@pytest.mark.parametrize("name", published.FORMATS)
def test_each_rank_loads_its_part_of_quantized_weights(name, tmp_path):
    form, config, *_ = published.FORMATS[name]
    model = published.model_of(vocab_size=68, num_key_value_heads=4)
    assert_parts(save_published(model, tmp_path, form, config), 2)


def test_a_rank_reads_its_part_alone(tmp_path, monkeypatch):
    read = []
    stock = weights_.Checkpoint.read

    def counted(*args):
        for entry, tensor in stock(*args):
            read.append((entry.name, tuple(tensor.shape)))
            yield entry, tensor

    monkeypatch.setattr(weights_.Checkpoint, "read", counted)
    save(tmp_path / "model")
    weights_.load(ModelConfig.from_hf(_SIZES), tmp_path / "model", device="cpu", split=Split(1, 2))
    shapes = dict(read)
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (16, 32)
    assert shapes["model.layers.0.self_attn.k_proj.weight"] == (8, 32)
    assert shapes["model.layers.0.mlp.down_proj.weight"] == (32, 32)
    assert shapes["lm_head.weight"] == shapes["model.embed_tokens.weight"] == (37, 32)


def test_random_weights_are_those_of_one_process():
    c = ModelConfig.from_hf(_SIZES | {"tie_word_embeddings": True})
    whole, part = (weights_.random(c, dtype=torch.float32, device="cpu", split=s) for s in (Split(), Split(1, 2)))
    assert torch.equal(part.embedding, whole.embedding[37:])
    assert part.lm_head.weight is part.embedding
    for name, cut in (("o", lambda w: w[:, 16:]), ("down", lambda w: w[:, 32:])):
        assert torch.equal(getattr(part.layers[0], name).weight, cut(getattr(whole.layers[0], name).weight))


@pytest.mark.parametrize(
    ("n", "more", "message"),
    [
        (3, {}, "tensor_parallel is 3, and config has num_attention_heads 4, expected a multiple of 3"),
        (4, {"intermediate_size": 62}, "has intermediate_size 62, expected a multiple of 4"),
        (4, {}, "has vocab_size 74, expected a multiple of 4"),
        (
            2,
            {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48},
            "num_key_value_heads 3, exp",
        ),
        (2, {"model_type": "olmo2"}, "is a model of olmo2, whose norms of q and k are over all heads, expected 1"),
    ],
)
def test_models_that_can_not_be_split_are_refused(n, more, message):
    with pytest.raises(ValueError, match=message):
        Split(0, n).check(ModelConfig.from_hf(_SIZES | {"pad_token_id": 0} | more))


def test_groups_that_a_split_would_cut_are_refused(tmp_path):
    c = ModelConfig.from_hf(_SIZES | {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16})
    with pytest.raises(ValueError, match=r"head_dim is 32, of which each of 2 ranks has 16, expected a multiple of 32"):
        weights_.random(c, quantize="int4", device="meta", split=Split(0, 2))
    form, config, *_ = published.FORMATS["gptq"]
    folder = save_published(published.model_of(vocab_size=68), tmp_path / "gptq", form, config)
    with pytest.raises(
        ValueError, match=r"o_proj has 256 .* each rank has 64, expected a multiple of 128, which share"
    ):
        weights_.load(ModelConfig.from_hf(folder), folder, device="cpu", split=Split(0, 4))
    form, config, *_ = published.FORMATS["fp8, blocks"]
    folder = save_published(published.model_of(vocab_size=68), tmp_path / "fp8", form, config)
    with pytest.raises(ValueError, match=r"k_proj has 64 rows, expected a multiple of 128"):
        weights_.load(ModelConfig.from_hf(folder), folder, device="cpu", split=Split(0, 2))


def test_processes_have_to_be_started(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="no process group: start the processes with torchrun --nproc-per-node 2"):
        rooftile.Engine.from_config(_SIZES, tensor_parallel=2)
    for wrong, error in ((0, ValueError), (True, TypeError), ("2", TypeError)):
        with pytest.raises(error, match="tensor_parallel is"):
            rooftile.Engine.from_config(_SIZES, tensor_parallel=wrong)


@pytest.mark.parametrize("error", [ValueError, RuntimeError, KeyboardInterrupt])
def test_rank_0_sends_nothing_after_an_error_that_others_may_not_have_seen(error):
    """They may wait in the middle of a call. A ValueError is raised before anything runs, on every rank."""
    sent = []

    def decode():
        raise error

    ranks = SimpleNamespace(send=lambda message: sent.append(pickle.loads(message)))
    runner = SimpleNamespace(ranks=ranks, cache=SimpleNamespace(sequences=[]), decode=decode, share=lambda: None)
    engine = SimpleNamespace(runner=runner, _broadcasts=None)
    with leading(engine):
        with pytest.raises(error):
            engine.runner.decode()
        refused = pytest.raises(RuntimeError, match="start all anew")
        with refused if error is RuntimeError else contextlib.nullcontext():
            engine.runner.share()
        with pytest.raises(ValueError) if error is ValueError else refused:  # noqa: PT011
            engine.runner.decode()
    (call, last), *rest = sent
    assert (len(call), last) == (1, False)
    if error is ValueError:
        (again, _), (messages, last) = rest
        assert (again[0], len(again)) == ("raised", 3)
        assert (messages, last) == (["raised"], True)
    else:
        assert not rest
    assert engine.runner is runner


REPEATS = [[3, 5, 8] * 4, [9, 4] * 5]


def speculated(n):
    engine = rooftile.Engine.from_config(_SIZES, **OPTIONS, speculate=rooftile.NGram(2), tensor_parallel=n)
    plain = [c.tokens for c in engine.generate(REPEATS, max_new_tokens=6, ignore_eos=True)]
    with rooftile.AsyncEngine(engine) as running:
        if engine.rank:
            return plain, None
        streams = [running.add(p, max_new_tokens=6, ignore_eos=True) for p in REPEATS]
        return plain, [s.result().tokens for s in streams]


def _speculating_rank(rank, path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=2)
    found = speculated(2)
    draft = rooftile.Draft(rooftile.Engine.from_config(_SIZES, **OPTIONS))
    with pytest.raises(ValueError, match="speculate is a Draft, and tensor_parallel 2, expected NGram or None"):
        rooftile.Engine.from_config(_SIZES, **OPTIONS, speculate=draft, tensor_parallel=2)
    torch.save(found, f"{path}/results{rank}")
    torch.distributed.destroy_process_group()


@interpreted
@pytest.mark.nightly
def test_two_ranks_speculate_alike(tmp_path):
    on_two_ranks(_speculating_rank, tmp_path)
    expected = speculated(1)
    assert torch.load(tmp_path / "results0") == expected
    assert torch.load(tmp_path / "results1") == (expected[0], None)
