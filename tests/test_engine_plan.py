"""The plan of a decoding step against what the engine launches, and the table that is made of it."""

import pytest
import torch
from helpers import interpreted

from rooftile import runtime
from rooftile.bench.docs import engine as docs_engine
from rooftile.bench.workloads import MODELS, read
from rooftile.engine import Engine, weights
from rooftile.engine.config import ModelConfig
from rooftile.engine.plan import plan
from rooftile.engine.runner import Sampling
from rooftile.inspect.audit.calls import Recorder

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}


def config(family="llama", **more):
    return ModelConfig.from_hf({"model_type": family, **SIZES, **more})


@interpreted
@pytest.mark.parametrize(
    ("family", "more", "quantize", "batch", "dtype"),
    [
        ("llama", {}, None, 1, torch.float32),
        ("llama", {"attention_bias": True, "mlp_bias": True}, None, 2, torch.float32),
        ("qwen3", {"head_dim": 8, "num_hidden_layers": 1}, None, 1, torch.float32),
        ("mistral", {"sliding_window": 4, "num_hidden_layers": 1}, "fp8", 1, torch.float32),
        pytest.param(
            "qwen3", {"head_dim": 8, "num_hidden_layers": 1}, "fp8", 2, torch.float32, marks=pytest.mark.nightly
        ),
        pytest.param("llama", {"attention_bias": True}, "int8", 1, torch.float32, marks=pytest.mark.nightly),
        ("qwen2", {"num_hidden_layers": 1}, "int8", 2, torch.float32),
        ("qwen2", {"num_hidden_layers": 1}, "int4", 1, torch.float32),
        pytest.param("qwen2", {"num_hidden_layers": 1}, "int4", 2, torch.float32, marks=pytest.mark.nightly),
        ("smollm3", {"no_rope_layers": [1, 0]}, None, 1, torch.float32),
        ("olmo2", {}, None, 1, torch.float32),
        ("gemma2", {"head_dim": 8, "sliding_window": 4}, None, 1, torch.float32),
        ("gemma3_text", {"head_dim": 8, "sliding_window": 4}, None, 2, torch.float32),
        ("gemma3_text", {"head_dim": 8, "num_hidden_layers": 1}, "fp8", 2, torch.float32),
        pytest.param(
            "gemma3_text", {"head_dim": 8, "num_hidden_layers": 1}, "int8", 1, torch.float32, marks=pytest.mark.nightly
        ),
        pytest.param(
            "phi3", {"pad_token_id": 0, "num_hidden_layers": 1}, None, 1, torch.float32, marks=pytest.mark.nightly
        ),
        ("phi3", {"pad_token_id": 0, "partial_rotary_factor": 0.5, "num_hidden_layers": 1}, "int8", 1, torch.float32),
        pytest.param("olmo2", {"num_hidden_layers": 1}, "fp8", 1, torch.float32, marks=pytest.mark.nightly),
        ("olmo2", {"num_hidden_layers": 1}, "fp8", 2, torch.float32),
        pytest.param("olmo2", {"num_hidden_layers": 1}, "int4", 2, torch.float32, marks=pytest.mark.nightly),
        pytest.param("qwen2", {"num_hidden_layers": 1}, "int4", 129, torch.bfloat16, marks=pytest.mark.nightly),
    ],
)
def test_a_step_launches_what_the_plan_says(family, more, quantize, batch, dtype):
    c = config(family, **more)
    engine = Engine.from_config(c, dtype=dtype, quantize=quantize, max_batch=batch, max_seq_len=32, page_size=16)
    engine.runner.prefill([[3]] * batch, [Sampling()] * batch)
    recorder = Recorder()
    with recorder.phase("decode"):
        engine.runner.decode()
    p = plan(
        c, batch, 2, dtype=dtype, quantize=quantize, page_size=16, capacity=32, target=runtime.INTERPRETER
    )  # fmt: skip
    launched = [launch.op for launch in recorder.launches["decode"]]
    assert {op: launched.count(op) for op in launched} == p.launches_by_op()


@pytest.mark.parametrize("quantize", ["fp8", "int8", "int4"])
def test_one_sequence_is_as_few_kernels_with_weights_of_fewer_bits(quantize):
    assert plan(config(), quantize=quantize).launches == plan(config()).launches
    assert plan(config(), 2, quantize=quantize).launches > plan(config(), 2).launches


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_of_many_sequences_every_weight_is_dequantized_first(quantize):
    """By a kernel more for each product, which writes 16 bits of each number, and the product reads them."""
    c = config(tie_word_embeddings=False)
    sm_80 = runtime.TARGETS["sm_80"]
    few, many = (plan(c, batch, quantize=quantize, target=sm_80) for batch in (128, 129))
    dense = weights.random(c, dtype=torch.bfloat16, device="meta")
    products = [p for layer in dense.layers for p in (layer.qkv, layer.o, layer.gate_up, layer.down)] + [dense.lm_head]
    sixteen_bits = 2 * sum(p.n * p.k for p in products)
    activations = few.written // 128
    assert sixteen_bits <= many.written - few.written <= sixteen_bits + activations
    assert many.read - few.read >= sixteen_bits
    assert many.launches - few.launches == 4 * c.layers + 1  # and of the vocabulary
    assert few.launches == plan(c, 129, dtype=torch.float32, quantize=quantize, target=sm_80).launches


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_an_h100_dequantizes_weights_within_the_products(quantize):
    """Where they have tiles for its SMs, and so without another kernel or 16 bits of each number in memory."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    c = config(**sizes, vocab_size=32000, tie_word_embeddings=False)
    few, many = (plan(c, batch, quantize=quantize) for batch in (128, 129))
    assert many.launches == few.launches
    assert many.written < few.written * 129 / 128 + 4096


@pytest.mark.parametrize("quantize", [None, "fp8", "int8", "int4"])
def test_a_step_reads_every_weight_once(quantize):
    """And beside them, at one token of context, nothing that is not a row or two."""
    c = config(tie_word_embeddings=False)

    drawn = weights.random(c, quantize=quantize, device="meta")
    p = plan(c, 1, 1, quantize=quantize)
    assert drawn.nbytes < p.read < drawn.nbytes + 24 * c.layers * 2 * (c.hidden + c.intermediate)


def test_norms_in_float32_are_counted_as_such():
    c = config("gemma2", head_dim=8, tie_word_embeddings=False)
    drawn, p = weights.random(c, device="meta"), plan(c, 1, 1)
    assert {n.dtype for layer in drawn.layers for n in layer.norms} == {torch.float32}
    assert drawn.nbytes < p.read < drawn.nbytes + 24 * c.layers * 2 * (c.hidden + c.intermediate)


def test_attention_reads_what_a_window_leaves():
    c = config("mistral", sliding_window=16)
    near, far = (next(s for s in plan(c, 3, n).steps if s.op == "decode_attention") for n in (16, 48))
    assert far.read == near.read
    whole = next(s for s in plan(config(), 3, 48).steps if s.op == "decode_attention")
    keys = 2 * 3 * 2 * 8 * 2  # k and v, sequences, heads, head_dim, bytes: of one token
    assert whole.read - near.read == 32 * keys


def test_layers_of_other_windows_are_steps_of_their_own():
    c = config("qwen2", use_sliding_window=True, sliding_window=16, max_window_layers=1)
    assert [s.times for s in plan(c, 1, 48).steps if s.op == "decode_attention"] == [1, 1]


def test_the_table_adds_up_to_the_weights_of_the_model(tmp_path):
    made = docs_engine.decode_step(tmp_path)
    assert "No read roof has been measured yet" in made
    c = ModelConfig.from_hf(read("llama-3-8b", MODELS)[1])
    step = next(line for line in made.splitlines() if line.startswith("| **the step**"))
    per_layer = 4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336
    weights = 2 * (c.layers * per_layer + 128256 * 4096)
    assert f"{plan(c).nbytes / 1e9:.4g} GB" in step
    assert weights < plan(c).read < 1.01 * weights


@pytest.mark.parametrize(("batch", "context", "named"), [(0, 4, "batch"), (1, 0, "context")])
def test_a_size_that_is_not_positive_is_refused(batch, context, named):
    with pytest.raises(ValueError, match=f"plan: {named} is 0"):
        plan(config(), batch, context)
