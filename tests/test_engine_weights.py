"""Checkpoints of every family, read tensor by tensor; what is wrong with one; random weights."""

import json
import shutil

import pytest
import torch
from test_engine_config import GRANITE_3_1_8B, LLAMA_3_8B, MISTRAL_7B, QWEN2_5_7B, QWEN3_8B
from test_engine_projections import dense_of

from rooftile.engine import projections
from rooftile.engine import weights as weights_
from rooftile.engine.checkpoint import INDEX, SINGLE, Checkpoint, CheckpointError
from rooftile.engine.config import ModelConfig
from rooftile.engine.projections import KINDS, Fp8, Int8

transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

_TINY = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 50, "max_position_embeddings": 64, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.2,
}  # fmt: skip
FAMILIES = {
    "llama": {"num_key_value_heads": 4},
    "llama code": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "granite": {
        "embedding_multiplier": 12.0, "logits_scaling": 16.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1,
        "tie_word_embeddings": True,
    },
    "qwen2": {},
    "qwen3": {"head_dim": 32, "attention_bias": True},
    "mistral": {"sliding_window": 8},
    "smollm3": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "olmo2": {"num_key_value_heads": 4},
    "phi3": {},
    "gemma2": {"head_dim": 16, "tie_word_embeddings": True},
    "gemma3_text": {"head_dim": 16},
}  # fmt: skip


def model_of(family, **more):
    """A model with random biases and norm weights, where models start from zeros and ones."""
    config = transformers.CONFIG_MAPPING[family.split()[0]](**_TINY | FAMILIES[family] | more)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter))
    return model


def load(folder, device, dtype=torch.float32, **options):
    return weights_.load(ModelConfig.from_hf(folder), folder, dtype=dtype, device=device, **options)


def assert_holds(weights, state, config, dense=True):
    """Every tensor of the checkpoint, at its rows of the product that it is part of."""
    equal = torch.equal if dense else close
    cpu = {name: tensor.cpu() for name, tensor in state.items()}

    def fused(at, names, kind="weight"):
        if config.packed:
            names = {"q": ["self_attn.qkv_proj"], "g": ["mlp.gate_up_proj"]}.get(names[0].split(".")[1][0], names)
        return torch.cat([cpu[f"{at}{name}.{kind}"] for name in names])

    for i, layer in enumerate(weights.layers):
        at = f"model.layers.{i}."
        made = {
            "qkv": (layer.qkv, [f"self_attn.{x}_proj" for x in "qkv"], config.qkv_bias),
            "o": (layer.o, ["self_attn.o_proj"], config.o_bias),
            "gate_up": (layer.gate_up, ["mlp.gate_proj", "mlp.up_proj"], config.mlp_bias),
            "down": (layer.down, ["mlp.down_proj"], config.mlp_bias),
        }
        for name, (product, parts, bias) in made.items():
            assert equal(dense_of(product).cpu(), fused(at, parts)), f"{i} {name}"
            assert (product.n, product.k) == fused(at, parts).shape
            assert (product.bias is not None) == bias, f"{i} {name}"
            if bias:
                assert torch.equal(product.bias.cpu(), fused(at, parts, "bias")), f"{i} {name}"
        after, before_mlp = "post_attention_layernorm", "pre_feedforward_layernorm"
        norms = {
            "input_layernorm": layer.input_norm,
            after: layer.attention_norm if config.output_norms else layer.post_norm,
            before_mlp: layer.post_norm if config.output_norms else None,
            "post_feedforward_layernorm": layer.mlp_norm,
            "self_attn.q_norm": layer.q_norm,
            "self_attn.k_norm": layer.k_norm,
        }
        for name, norm in norms.items():
            assert (norm is not None) == (f"{at}{name}.weight" in cpu), f"{i} {name}"
            if norm is not None:
                assert torch.equal(norm.cpu(), cpu[f"{at}{name}.weight"] + config.norm_offset), f"{i} {name}"
    assert torch.equal(weights.embedding.cpu(), cpu["model.embed_tokens.weight"])
    assert torch.equal(weights.norm.cpu(), (cpu["model.norm.weight"] + config.norm_offset) * config.logits_scale)
    assert equal(dense_of(weights.lm_head).cpu(), cpu["lm_head.weight"])


def close(actual, expected):
    """Half a step of 4 bits, of the largest in a row."""
    return bool(((actual - expected).abs() <= 0.08 * expected.abs().amax(1, keepdim=True)).all())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_of_every_family(family, tmp_path, device):
    model = model_of(family)
    config = ModelConfig.from_hf(model.config)
    for folder, size in ((tmp_path / "one", "1GB"), (tmp_path / "many", "40KB")):
        model.save_pretrained(folder, max_shard_size=size)
        assert (folder / INDEX).is_file() == (folder.name == "many")
        weights = load(folder, device, progress=True)
        assert_holds(weights, model.state_dict(), config)
        assert (weights.lm_head.weight is weights.embedding) == config.tied
        # All but the embedding, which a step reads some rows of.
        count = sum(p.numel() for p in model.parameters())
        assert weights.nbytes == 4 * (count - (0 if config.tied else config.vocab * config.hidden))


@pytest.mark.parametrize("renamed", [{}, {"language_model.model.": "model.language_model."}])
def test_the_text_part_of_a_multimodal_checkpoint(renamed, tmp_path, device):
    """Its tensors go by a prefix, in published checkpoints by one of two; the vision part is not read."""
    text = {**_TINY, "head_dim": 16, "sliding_window": 8}
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
        "patch_size": 8,
    }  # fmt: skip
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    model = transformers.Gemma3ForConditionalGeneration(config)
    model.save_pretrained(tmp_path)
    path = tmp_path / SINGLE
    state = safetensors_torch.load_file(path)
    for old, new in renamed.items():
        state = {n.replace(old, new): t for n, t in state.items()}
    assert any("vision" in name for name in state)
    safetensors_torch.save_file(state, path)
    config = ModelConfig.from_hf(tmp_path)
    names = {n.replace(next(iter(renamed.values()), "language_model.model."), "model."): n for n in state}
    state = {new: state[old] for new, old in names.items()}
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    assert_holds(load(tmp_path, device), state, config)


@pytest.mark.parametrize("quantize", ["fp8", "int8", "int4"])
def test_quantized_as_it_is_read(quantize, tmp_path, device, monkeypatch):
    monkeypatch.setattr(weights_, "_AT_A_TIME", 1000)  # several parts of a tensor
    monkeypatch.setattr(projections, "_AT_A_TIME", 500)
    model = model_of("llama code")
    model.save_pretrained(tmp_path)
    weights = load(tmp_path, device, quantize=quantize)
    assert_holds(weights, model.state_dict(), ModelConfig.from_hf(tmp_path), dense=False)
    # In parts as in one.
    whole = KINDS[quantize].of(model.model.layers[1].mlp.down_proj.weight.detach().to(device))
    assert torch.equal(dense_of(weights.layers[1].down), dense_of(whole))
    assert type(weights.lm_head) is {"fp8": Fp8, "int8": Int8, "int4": Int8}[quantize]
    assert type(weights.layers[0].qkv) is KINDS[quantize]


@pytest.mark.parametrize(
    ("stored", "dtype"), [("bfloat16", "float16"), ("float32", "bfloat16"), ("float16", "float32")]
)
def test_dtypes_are_converted(stored, dtype, tmp_path, device):
    stored, dtype = getattr(torch, stored), getattr(torch, dtype)
    model = model_of("qwen2").to(stored)
    model.save_pretrained(tmp_path)
    weights = load(tmp_path, device, dtype)
    layer, expected = weights.layers[0], model.model.layers[0].self_attn
    assert torch.equal(layer.qkv.weight[:64].cpu(), expected.q_proj.weight.to(dtype))
    assert torch.equal(layer.qkv.bias[64:96].cpu(), expected.k_proj.bias.to(dtype))
    assert {t.dtype for t in (weights.embedding, weights.norm, *layer.norms, layer.down.weight)} == {dtype}


def test_a_scale_of_the_logits_that_is_no_power_of_two_costs_no_bits(tmp_path, device):
    model = model_of("granite", logits_scaling=6.0).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    weights = load(tmp_path, device, torch.bfloat16)
    assert weights.norm.dtype == torch.float32
    assert torch.equal(weights.norm.cpu(), model.model.norm.weight.float() * (1 / 6.0))


def edit(folder, change):
    """The checkpoint of one file with other tensors."""
    state = safetensors_torch.load_file(folder / SINGLE)
    change(state)
    safetensors_torch.save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / SINGLE)


class TestTied:
    @pytest.fixture
    def folder(self, tmp_path):
        self.model = model_of("llama", tie_word_embeddings=True)
        self.model.save_pretrained(tmp_path)
        return tmp_path

    def test_a_copy_of_the_embedding_and_tables_of_frequencies_are_let_pass(self, folder, device):
        def change(state):
            state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
            state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

        edit(folder, change)
        weights = load(folder, device)
        assert weights.lm_head.weight is weights.embedding

    def test_another_lm_head_is_used_as_transformers_does(self, folder, device):
        head = torch.randn(50, 64)
        edit(folder, lambda state: state.update({"lm_head.weight": head}))
        with pytest.warns(
            UserWarning, match=r"tie_word_embeddings is true, but .*model.safetensors has an lm_head.wei"
        ):
            weights = load(folder, device)
        assert torch.equal(weights.lm_head.weight.cpu(), head)
        assert torch.equal(weights.embedding.cpu(), self.model.model.embed_tokens.weight)

    def test_an_lm_head_of_another_shape_is_named(self, folder, device):
        edit(folder, lambda state: state.update({"lm_head.weight": torch.zeros(49, 64)}))
        with pytest.raises(CheckpointError, match=r"lm_head.weight has shape \(49, 64\), expected \(50, 64\)"):
            load(folder, device)

    def test_it_goes_by_either_name(self, folder, device):
        edit(folder, lambda state: state.update({"lm_head.weight": state.pop("model.embed_tokens.weight")}))
        weights = load(folder, device)
        assert torch.equal(weights.embedding.cpu(), self.model.model.embed_tokens.weight)
        assert weights.lm_head.weight is weights.embedding


Q, K = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    model = model_of("llama")
    model.save_pretrained(folder / "one")
    model.save_pretrained(folder / "many", max_shard_size="60KB")
    return folder


class TestErrors:
    """The message names the file and the tensor, what came and what was expected; and nothing went to the device."""

    @pytest.fixture
    def one(self, saved, tmp_path):
        return shutil.copytree(saved / "one", tmp_path / "one")

    @pytest.fixture
    def many(self, saved, tmp_path):
        return shutil.copytree(saved / "many", tmp_path / "many")

    @pytest.fixture(autouse=True)
    def nothing_loaded(self, monkeypatch):
        def read(self, wanted):
            raise AssertionError("weights were read")

        monkeypatch.setattr(Checkpoint, "read", read)

    def refused(self, folder, message, **options):
        with pytest.raises(CheckpointError, match=message):
            load(folder, "cpu", **options)

    def test_missing(self, one):
        edit(one, lambda state: state.pop(Q))
        self.refused(one, rf"one/model.safetensors: {Q} absent, expected by .*config.json for llama of 2 layers$")

    def test_missing_under_these_names(self, one):
        edit(one, lambda state: state.update({name.replace("model.", "", 1): state.pop(name) for name in list(state)}))
        self.refused(one, r"model.embed_tokens.weight, .* and \d+ more absent, .*; it has embed_tokens.weight, .* and")

    def test_unexpected(self, one):
        edit(one, lambda state: state.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}))
        self.refused(
            one, r"model.safetensors: model.layers.0.self_attn.q_proj.bias has no place in the model that .*json"
        )

    def test_misshapen(self, one):
        edit(one, lambda state: state.update({K: torch.zeros(32, 64)}))
        self.refused(one, rf"model.safetensors: {K} has shape \(32, 64\), expected \(64, 64\) by .*config.json")

    def test_of_another_dtype(self, one):
        edit(one, lambda state: state.update({K: torch.zeros(64, 64, dtype=torch.int8)}))
        self.refused(one, rf"model.safetensors: {K} has dtype I8, expected F32, F16, BF16")

    def test_truncated(self, one):
        content = (one / SINGLE).read_bytes()
        for left, message in (
            (
                len(content) - 10,
                r"model.safetensors: .*weight ends at byte \d+ of the data, but the file has \d+: it is tr",
            ),
            (100, r"the header has \d+ bytes and the file 100: it is truncated, or no safetensors file"),
            (3, r"and the file 3: it is truncated"),
            (0, r"and the file 0: it is truncated"),
        ):
            (one / SINGLE).write_bytes(content[:left])
            self.refused(one, message)

    def test_corrupt(self, one):
        content = (one / SINGLE).read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        begin, end = header[K]["data_offsets"]
        for entry, message in (
            ({"dtype": "F32", "shape": [64, 64]}, rf"{K}: the header has .*, expected dtype, shape and data_offsets"),
            ({**header[K], "shape": [64, -64]}, rf"{K}: the header has .*expected dtype, shape and data_offsets"),
            (
                {**header[K], "shape": [64, 63]},
                rf"{K} has {end - begin} bytes, expected {end - begin - 256} for F32 of sh",
            ),
            ({**header[K], "dtype": "X9"}, rf"{K} has dtype X9, expected one of F32"),
            (
                {**header[K], "data_offsets": [begin + 4, end + 4]},
                r"begins at byte \d+ of the data, expected \d+: the f",
            ),
        ):
            head = json.dumps(header | {K: entry}).encode()
            (one / SINGLE).write_bytes(len(head).to_bytes(8, "little") + head + content[8 + length :])
            self.refused(one, f"model.safetensors.*{message}")
        (one / SINGLE).write_bytes(content + b"more")
        self.refused(one, r"the data has \d+ bytes, expected \d+: the file is corrupt")
        (one / SINGLE).write_bytes(content[:8] + b"\xff" * length + content[8 + length :])
        self.refused(one, r"model.safetensors: the header is no JSON, so this is no safetensors file")

    def test_a_web_page_in_place_of_weights(self, one):
        (one / SINGLE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4\n")
        self.refused(one, r"model.safetensors: the header has \d+ bytes and the file \d+: it is truncated, or no safe")

    def test_an_absent_shard(self, many):
        index = json.loads((many / INDEX).read_text())
        shard = index["weight_map"][K]
        (many / shard).unlink()
        self.refused(many, rf"index.json: \S+ is in {shard}, but .*many/{shard} does not exist")

    def test_an_index_that_is_wrong(self, many):
        index = json.loads((many / INDEX).read_text())
        shard = index["weight_map"][K]
        for content, message in (
            ('{"weight_map": ', r"index.json: no index: expected JSON with a weight_map"),
            ('{"metadata": {}}', r"index.json: no index: expected JSON with a weight_map"),
            ('{"weight_map": {}}', r"index.json: weight_map is {}, expected the file of each tensor"),
            (
                json.dumps({"weight_map": index["weight_map"] | {K: f"../many/{shard}"}}),
                rf"{K} is in '../many/{shard}', expected the name of a file in the same folder",
            ),
            (
                json.dumps({"weight_map": index["weight_map"] | {"model.more": shard}}),
                rf"{shard}: model.more is absent, expected it there, by {INDEX}",
            ),
        ):
            (many / INDEX).write_text(content)
            self.refused(many, message)

    def test_no_weights(self, one):
        with pytest.raises(FileNotFoundError, match=r"absent: no such folder, expected one with model.safetensors or"):
            Checkpoint(one / "absent")
        (one / SINGLE).rename(one / "consolidated.safetensors")
        self.refused(one, r"one: has consolidated.safetensors and no index, expected model.safetensors, or")
        (one / "consolidated.safetensors").unlink()
        self.refused(one, r"one: has no weights, expected model.safetensors, or model.safetensors.index.json and the")
        (one / "pytorch_model.bin").write_bytes(b"")
        self.refused(one, r"one: has pytorch_model.bin, which PyTorch pickled, and neither .*; load .* save_pretrained")

    def test_what_is_asked_for(self, one):
        with pytest.raises(TypeError, match=r"dtype is torch.int8, expected float32, float16 or bfloat16"):
            load(one, "cpu", torch.int8)
        with pytest.raises(ValueError, match=r"Engine: quantize is 'int3', expected None, 'fp8', 'int8', 'int4'"):
            load(one, "cpu", quantize="int3")
        odd = ModelConfig.from_hf(LLAMA_3_8B | {"intermediate_size": 100})
        with pytest.raises(
            ValueError, match=r"config: intermediate_size is 100, expected a multiple of 32 for quantize="
        ):
            weights_.random(odd, quantize="int4", device="meta")


def test_numbers_that_float16_does_not_have(tmp_path, device):
    model_of("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    edit(tmp_path, lambda state: state[K].fill_(1e5))
    with pytest.raises(CheckpointError, match=rf"{K} has 9.984e\+04 in BF16, expected at most 65504 for float16; load"):
        load(tmp_path, device, torch.float16)
    assert load(tmp_path, device, torch.bfloat16).layers[1].qkv.weight.amax() > 9e4


class TestRandom:
    @pytest.mark.gpu
    @pytest.mark.parametrize("quantize", ["fp8", "int8", "int4"])
    def test_a_quantized_model_is_never_there_in_16_bits(self, quantize, device):
        more = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 8, "vocab_size": 64000}
        config = ModelConfig.from_hf(model_of("llama").config.to_dict() | more | {"head_dim": 512})
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        weights = weights_.random(config, quantize=quantize, device=device)
        left = torch.cuda.memory_allocated(device) - before
        # Some float32 tensors of the elements that are quantized at a time; the model in 16 bits has 1.3 GB.
        assert torch.cuda.max_memory_allocated(device) - before < left + 6 * 4 * projections._AT_A_TIME
        assert weights.nbytes + weights.embedding.nbytes == pytest.approx(left, rel=0.01)

    def test_from_the_seed(self, device):
        config = ModelConfig.from_hf(model_of("qwen3").config)
        one, same, other = (weights_.random(config, dtype=torch.float32, device=device, seed=s) for s in (3, 3, 4))
        for name in ("qkv", "o", "gate_up", "down"):
            a, b, c = (getattr(w.layers[1], name).weight for w in (one, same, other))
            assert torch.equal(a, b)
            assert not torch.equal(a, c)
            assert float(a.std()) == pytest.approx(config.initializer_range, rel=0.1)
        assert not torch.equal(one.layers[0].o.weight, one.layers[1].o.weight)
        assert not one.layers[0].qkv.bias.any()
        assert all(bool((n == 1).all()) for n in (one.norm, *one.layers[0].norms))
        assert not torch.equal(one.embedding, one.lm_head.weight)

    @pytest.mark.parametrize("quantize", ["fp8", "int8", "int4"])
    def test_quantized_ones_are_the_same(self, quantize, device):
        config = ModelConfig.from_hf(model_of("llama code").config)
        plain = weights_.random(config, dtype=torch.float32, device=device)
        quantized = weights_.random(config, dtype=torch.float32, quantize=quantize, device=device)
        for name in ("qkv", "down"):
            again = KINDS[quantize].of(getattr(plain.layers[1], name).weight)
            assert torch.equal(dense_of(getattr(quantized.layers[1], name)), dense_of(again))
        assert torch.equal(quantized.embedding, plain.embedding)
        assert close(dense_of(quantized.lm_head), plain.embedding)

    @pytest.mark.parametrize(
        ("config", "parameters"),
        [
            (LLAMA_3_8B, 8_030_261_248),
            (GRANITE_3_1_8B, 8_170_848_256),
            (QWEN2_5_7B, 7_615_616_512),
            (QWEN3_8B, 8_190_735_360),
            (MISTRAL_7B, 7_241_732_096),
        ],
    )
    def test_sizes_of_published_models(self, config, parameters):
        config = ModelConfig.from_hf(config)
        read = parameters - (0 if config.tied else config.vocab * config.hidden)
        assert weights_.random(config, device="meta").nbytes == 2 * read
        assert weights_.random(config, quantize="fp8", device="meta").nbytes == pytest.approx(read, rel=2e-3)
        int4 = weights_.random(config, quantize="int4", device="meta").nbytes
        head = config.vocab * config.hidden
        assert int4 == pytest.approx((read - head) * (0.5 + 2 / 128) + head, rel=2e-3)
