"""The model families that `rooftile.patch` knows, and how their modeling files are written.

A row of the table names the classes of a family's modeling file and says what they compute. A class that a version of
transformers does not have never occurs; one whose code has changed is left alone, and the handle gives the reason.

Behind the table stand the rules: the lines that are replaced, as the modeling files have them, and what takes their
place. `rewrite.py` describes the notation and applies them.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from torch import nn

from rooftile.huggingface.rewrite import Rule, Together

if TYPE_CHECKING:
    from rooftile.ops.rms_norm import Rounding
    from rooftile.ops.rope import Style


@dataclasses.dataclass(frozen=True)
class Norm:
    """An RMSNorm class: its order of rounding, the offset of its weight, and the attribute that holds epsilon."""

    rounding: Rounding = "llama"
    offset: float = 0.0
    eps: str = "variance_epsilon"


@dataclasses.dataclass(frozen=True)
class LayerNorm:
    """`torch.nn.LayerNorm`, which models of any family may contain."""


@dataclasses.dataclass(frozen=True)
class Gated:
    """A class that computes `act(gate) * up`: the attribute with `act`, and the method that computes it.

    `layers` are those of gate and up, or one for both; empty where they are not its own layers. `last` is the layer
    that the result goes into.
    """

    activation: str = "act_fn"
    method: str = "forward"
    layers: tuple[str, ...] = ("gate_proj", "up_proj")
    last: str = "down_proj"


@dataclasses.dataclass(frozen=True)
class Activated:
    """A class that computes `act(linear(x))`: the attribute with `act`."""

    activation: str = "act"


@dataclasses.dataclass(frozen=True)
class Attention:
    """An attention class: the functions that rotate q and k, each with its style.

    `qk_norm`: each head of q and k is normalized first, by `self.q_norm` and `self.k_norm`. `layers` are those that
    project the same input, if there are several.
    """

    rope: Mapping[str, Style] = dataclasses.field(default_factory=lambda: {"apply_rotary_pos_emb": "half"})
    qk_norm: bool = False
    layers: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer class, whose forward is searched for a residual add followed by an RMSNorm.

    `without` is the reason where the family's layers have none.
    """

    without: str = ""


@dataclasses.dataclass(frozen=True)
class LossHead:
    """A model class that computes the loss of its logits.

    `layer` is the path of the linear layer that makes the logits. What it is in, the model calls, and returns the
    layer's result as it is. `without` is the reason where the class's loss is not computed with the logits.
    """

    layer: str = "lm_head"
    without: str = ""


Part = Norm | LayerNorm | Gated | Activated | Attention | Layer | LossHead


@dataclasses.dataclass(frozen=True)
class Family:
    """One modeling file of transformers: `transformers.models.<module>.modeling_<module>`."""

    title: str
    module: str
    parts: Mapping[str, Part]

    @property
    def path(self) -> str:
        return f"{MODELS}{self.module}.modeling_{self.module}"

    def __iter__(self) -> Iterator[tuple[tuple[str, str], Part]]:
        return (((self.path, name), part) for name, part in self.parts.items())


def _decoder(title: str, module: str, prefix: str, *, norm: Norm | None = None, **more: Part) -> Family:
    """A family with the six classes of a Llama-like file; `more` adds classes or overrides some."""
    parts: dict[str, Part] = {
        f"{prefix}RMSNorm": norm or Norm(),
        f"{prefix}MLP": Gated(),
        f"{prefix}Attention": Attention(),
        f"{prefix}DecoderLayer": Layer(),
        f"{prefix}Experts": Gated(method="_apply_gate", layers=()),
        f"{prefix}ForCausalLM": LossHead(),
    }
    return Family(title, module, parts | more)


MODELS = "transformers.models."
NEWEST_TESTED = "5.24.0"  # of transformers; tools/constraints.txt has the same
GEMMA_NORM = Norm(rounding="gemma", offset=1.0, eps="eps")
QK_NORM = Attention(qk_norm=True)
QUERY_KEY_VALUE = ("query", "key", "value")
ADD_LAST = Layer("its add comes last: the norm after it belongs to the next layer")
NORM_FIRST = Layer("it adds after the norm: no norm follows the add")
TWO_LOSSES = LossHead(without="it has two losses of its own")

FAMILIES = (
    _decoder("Llama", "llama", "Llama"),
    _decoder("Qwen2", "qwen2", "Qwen2"),
    _decoder("Qwen2-MoE", "qwen2_moe", "Qwen2Moe"),
    _decoder("Qwen3", "qwen3", "Qwen3", Qwen3Attention=QK_NORM),
    _decoder("Qwen3-MoE", "qwen3_moe", "Qwen3Moe", Qwen3MoeAttention=QK_NORM),
    _decoder("Mistral", "mistral", "Mistral"),
    _decoder("Mixtral", "mixtral", "Mixtral"),
    _decoder("Granite", "granite", "Granite"),
    _decoder("SmolLM3", "smollm3", "SmolLM3"),
    _decoder("OLMo2", "olmo2", "Olmo2", norm=Norm(rounding="none"), Olmo2DecoderLayer=NORM_FIRST),
    _decoder(
        "Phi-3",
        "phi3",
        "Phi3",
        Phi3MLP=Gated(activation="activation_fn", layers=("gate_up_proj",)),
        Phi3Attention=Attention(layers=()),
    ),
    _decoder("Gemma", "gemma", "Gemma", norm=GEMMA_NORM),
    _decoder("Gemma 2", "gemma2", "Gemma2", norm=GEMMA_NORM),
    _decoder(
        "Gemma 3",
        "gemma3",
        "Gemma3",
        norm=GEMMA_NORM,
        Gemma3Attention=QK_NORM,
        Gemma3ForConditionalGeneration=LossHead(),
    ),
    _decoder(
        "DeepSeek-V3",
        "deepseek_v3",
        "DeepseekV3",
        DeepseekV3Attention=Attention(
            {"apply_rotary_pos_emb_interleave": "deepseek", "apply_rotary_pos_emb": "half"}, layers=()
        ),
    ),
    Family(
        "T5",
        "t5",
        {
            "T5LayerNorm": Norm(),
            "T5DenseGatedActDense": Gated(activation="act", layers=("wi_0", "wi_1")),
            "T5Attention": Attention({}, layers=("k", "v")),  # q may be of another input than k and v
            "T5DenseActDense": Activated(),
            "T5LayerFF": ADD_LAST,
            "T5LayerSelfAttention": ADD_LAST,
            "T5LayerCrossAttention": ADD_LAST,
            "T5ForConditionalGeneration": LossHead(),
        },
    ),
    Family(
        "GPT-2",
        "gpt2",
        {"GPT2MLP": Activated(), "GPT2LMHeadModel": LossHead(), "GPT2DoubleHeadsModel": TWO_LOSSES},
    ),
    Family(
        "GPT-NeoX",
        "gpt_neox",
        {
            "GPTNeoXMLP": Activated(),
            "GPTNeoXAttention": Attention(layers=()),
            "GPTNeoXForCausalLM": LossHead(),
        },
    ),
    Family(
        "StarCoder2",
        "starcoder2",
        {
            "Starcoder2MLP": Activated(),
            "Starcoder2Attention": Attention(),
            "Starcoder2ForCausalLM": LossHead(),
        },
    ),
    Family(
        "OPT",
        "opt",
        {
            "OPTDecoderLayer": Activated("activation_fn"),
            "OPTAttention": Attention({}),
            "OPTForCausalLM": LossHead(),
        },
    ),
    Family(
        "BERT",
        "bert",
        {
            "BertIntermediate": Activated("intermediate_act_fn"),
            "BertPredictionHeadTransform": Activated("transform_act_fn"),
            "BertSelfAttention": Attention({}, layers=QUERY_KEY_VALUE),
            "BertCrossAttention": Attention({}, layers=QUERY_KEY_VALUE[1:]),
            "BertForMaskedLM": LossHead("cls.predictions.decoder"),
            "BertLMHeadModel": LossHead("cls.predictions.decoder"),
            "BertForPreTraining": TWO_LOSSES,
        },
    ),
    Family(
        "RoBERTa",
        "roberta",
        {
            "RobertaIntermediate": Activated("intermediate_act_fn"),
            "RobertaSelfAttention": Attention({}, layers=QUERY_KEY_VALUE),
            "RobertaCrossAttention": Attention({}, layers=QUERY_KEY_VALUE[1:]),
            "RobertaForMaskedLM": LossHead("lm_head.decoder"),
            "RobertaForCausalLM": LossHead("lm_head.decoder"),
        },
    ),
)

TITLES = tuple(sorted(family.title for family in FAMILIES))
PARTS: dict[tuple[str, str], Part] = {key: part for family in FAMILIES for key, part in family}
FILES = frozenset(family.path for family in FAMILIES)


def not_understood() -> str:
    """What a reason says where transformers' code is not as the rules expect it."""
    import transformers

    return f"not understood in transformers {transformers.__version__} (tested up to {NEWEST_TESTED})"


def part_of(module: object) -> Part | None:
    """The table's entry for that module's class, or None.

    Wrappers such as FSDP derive a class from the model's, hence the search through the bases. A subclass that overrides
    `forward` is another class.
    """
    for cls in type(module).__mro__:
        part = LayerNorm() if cls is nn.LayerNorm else PARTS.get((cls.__module__, cls.__name__))
        if part is not None:
            return part if type(module).forward is cls.forward else None  # type: ignore[attr-defined]
    return None


def parts_of(model: nn.Module) -> Iterator[tuple[str, nn.Module, Part | None]]:
    """Every module of the model with its name and its part.

    LayerNorm is PyTorch's class: it counts as a part if the innermost transformers module around it is of a known
    family.
    """
    known: dict[str, bool] = {}
    for name, module in model.named_modules():
        files = (cls.__module__ for cls in type(module).__mro__)
        file = next((file for file in files if file.startswith(MODELS)), None)
        # Other modules (a list, an adapter's wrapper) belong to the module around them.
        known[name] = file in FILES if file else known.get(name.rpartition(".")[0], False)
        part = part_of(module)
        yield name, module, None if isinstance(part, LayerNorm) and not known[name] else part


# The rules.

ADD_NORM = (
    Rule(
        """
H = R + X
R = H
H = NORM(H)
""",
        "H, R = add_norm(NORM, X, R)",
    ),
)


def gated(activation: str) -> tuple[Rule, ...]:
    act = f"self.{activation}"
    return (
        Rule(
            f"""
GATE, UP = X.chunk(2, dim=-1)
Y = UP * {act}(GATE)
""",
            f"Y = act_mul_packed({act}, X)",
        ),
        Rule(
            f"""
GATE, UP = X.chunk(2, dim=-1)
return {act}(GATE) * UP
""",
            f"return act_mul_packed({act}, X)",
        ),
        Rule(
            f"""
A = {act}(GATE)
B = UP
Y = A * B
""",
            f"Y = act_mul({act}, GATE, UP)",
        ),
        Rule(f"{act}(GATE) * UP", f"act_mul({act}, GATE, UP)"),
    )


def activated(activation: str) -> tuple[Rule, ...]:
    return (
        Rule(
            f"""
H = LINEAR(X)
H = self.{activation}(H)
""",
            f"H = linear_act(LINEAR, X, self.{activation})",
        ),
    )


def rope(function: str) -> tuple[Rule, ...]:
    return (Rule(f"{function}(Q, K, COS, SIN)", f"rope_of_{function}(Q, K, COS, SIN)"),)


def qk_norm_rope(function: str) -> tuple[Rule, ...]:
    """The norms move to the rotation. Qwen3 transposes after the norms, Gemma 3 before."""
    return (
        Rule(
            f"""
Q = self.q_norm(X).transpose(1, 2)
K = self.k_norm(Y).transpose(1, 2)
...
Q, K = {function}(Q, K, COS, SIN)
""",
            f"""
Q = X
K = Y
...
Q, K = transposed_norm_rope_of_{function}(self.q_norm, self.k_norm, Q, K, COS, SIN)
""",
        ),
        Rule(
            f"""
Q = self.q_norm(X)
K = self.k_norm(Y)
...
Q, K = {function}(Q, K, COS, SIN)
""",
            f"""
Q = X
K = Y
...
Q, K = norm_rope_of_{function}(self.q_norm, self.k_norm, Q, K, COS, SIN)
""",
        ),
    )


def joint_linears(layers: tuple[str, ...], *, rotated: bool) -> tuple[Together, ...]:
    """`rotated`: q and k are replaced by their rotations, and v alone is kept."""
    return (Together(layers, "joint_linear_of_rotated" if rotated else "joint_linear"),)


def gated_gemms(activation: str, layers: tuple[str, ...], last: str) -> tuple[Rule, ...]:
    """Of two layers, gate and up, or of one that is both (Phi-3)."""
    act = f"self.{activation}"
    if len(layers) == 1:
        return (
            Rule(
                f"""
H = self.{layers[0]}(X)
GATE, UP = H.chunk(2, dim=-1)
Y = UP * {act}(GATE)
return self.{last}(Y)
""",
                f"return gated_mlp_packed({act}, self.{layers[0]}, self.{last}, X)",
            ),
        )
    gate, up = (f"self.{layer}" for layer in layers)
    return (
        Rule(f"self.{last}({act}({gate}(X)) * {up}(X))", f"gated_mlp({act}, {gate}, {up}, self.{last}, X)"),
        Rule(
            f"""
A = {act}({gate}(X))
B = {up}(X)
Y = A * B
""",
            f"Y = gated_gemm({act}, {gate}, {up}, X)",
        ),
        Rule(f"{act}({gate}(X)) * {up}(X)", f"gated_gemm({act}, {gate}, {up}, X)"),
    )


def loss_head() -> tuple[Rule, ...]:
    """Logits and loss as the families write them; where the fused loss is None, the model's own lines run."""
    shifted = [
        f"LOSS = self.loss_function({arguments}, **KWARGS)"
        for arguments in (
            "logits=LOGITS, labels=LABELS, vocab_size=SIZE",
            "LOGITS, LABELS, vocab_size=SIZE",
            "LOGITS, LABELS, SIZE",
        )
    ]
    rules = [
        _loss_head(make, change, loss, f"causal_loss(self, HEAD, HIDDEN, LABELS, KWARGS{argument})")
        for make in ("HEAD(HIDDEN)", "HEAD(HIDDEN).contiguous()")
        for change, argument in (
            ("", ""),
            ("LOGITS = LOGITS / DIVISOR", ", divisor=DIVISOR"),
            (
                """
if CAP is not None:
    LOGITS = LOGITS / CAP
    LOGITS = torch.tanh(LOGITS)
    LOGITS = LOGITS * CAP
""",
                ", softcap=CAP",
            ),
        )
        for loss in shifted
    ]
    move = "LABELS = LABELS.to(LOGITS.device)"
    unshifted = (  # T5, BERT, RoBERTa
        f"""
LOSS_FCT = CrossEntropyLoss(ignore_index=-100)
{move}
LOSS = LOSS_FCT(LOGITS.view(-1, LOGITS.size(-1)), LABELS.view(-1))
""",
        """
LOSS_FCT = CrossEntropyLoss()
LOSS = LOSS_FCT(LOGITS.view(-1, SIZE), LABELS.view(-1))
""",
        f"""
{move}
LOSS_FCT = CrossEntropyLoss()
LOSS = LOSS_FCT(LOGITS.view(-1, SIZE), LABELS.view(-1))
""",
    )
    rules += [_loss_head("HEAD(HIDDEN)", "", loss, "token_loss(HEAD, HIDDEN, LABELS)") for loss in unshifted]
    return tuple(rules)


def _loss_head(make: str, change: str, loss: str, fused: str) -> Rule:
    """`make` and `change` compute the logits, `loss` their loss, and `fused` the loss without them."""
    own = f"""
LOGITS = {make}
{change.strip()}
LOSS = None
if LABELS is not None:
{textwrap.indent(loss.strip(), "    ")}
"""
    return Rule(
        own,
        f"""
LOGITS = None
LOSS = {fused}
if LOSS is None:
{textwrap.indent(own.strip(), "    ")}
""",
    )


def passed_on(layer: str) -> tuple[Rule, ...]:
    """A module whose forward ends with that layer's, which gets what is asked of the head."""
    call = f"self.{layer}"
    return (
        Rule(
            f"""
Y = {call}(X)
return Y
""",
            f"""
Y = ask({call}, X, asked)
return Y
""",
        ),
    )
