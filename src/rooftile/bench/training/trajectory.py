"""A model trained on real text several ways from one seed, in a process of its own: losses, and how far each is off.

    python -m rooftile.bench.training.trajectory '{"name": "llama", "dtype": "bf16", ...}'

prints a line of JSON, what `compare` returns. The text is the source of Python's standard library, as bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import math
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rooftile import runtime
from rooftile.bench.rows import OURS
from rooftile.bench.workloads import TRAINED
from rooftile.byte_model import library_text
from rooftile.huggingface.families import FAMILIES
from rooftile.huggingface.small_models import BY_TITLE, inputs

EAGER, COMPILE = "eager", "compile"
WAYS = (EAGER, COMPILE, OURS)
TITLES = {family.module: family.title for family in FAMILIES}
VOCABULARY = 264  # the bytes and the end of a text; rows of logits of whole 16 bytes
_WIDTHS = frozenset(
    {
        "hidden_size", "intermediate_size", "head_dim", "n_embd", "n_inner", "d_model", "d_ff", "d_kv", "ffn_dim",
        "word_embed_proj_dim", "moe_intermediate_size", "shared_expert_intermediate_size", "q_lora_rank",
        "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "query_pre_attn_scalar", "sliding_window",
    }
)  # fmt: skip
_DEPTHS = frozenset({"num_hidden_layers", "n_layer", "num_layers", "layer_types"})
_OPTIMIZER = {"betas": (0.9, 0.95), "weight_decay": 0.1}
_WARM = 10  # steps over which the learning rate rises: Adam's first ones have the sign of a gradient and not its size
_TEXT = 1 << 20  # bytes that batches are drawn from
_HELD_OUT = 8192  # bytes that the log-probabilities are of
_EVALUATED = 2048  # tokens whose logits are held at a time
_TOP = 10


@dataclasses.dataclass(frozen=True)
class Job:
    """What one process trains: a model in one dtype.

    Attributes:
        name: of a family's module in transformers, or of a model of `workloads.TRAINED`.
        width, depth: factors of the tiny model's widths and layers.
        batch, tokens: sequences of a step, and tokens of each.
        ways: of `WAYS`; the first is eager.
    """

    name: str
    dtype: str = "fp32"
    width: int = 1
    depth: int = 1
    batch: int = 1
    tokens: int = 32
    steps: int = 3
    lr: float = 5e-4
    ways: tuple[str, ...] = WAYS
    seed: int = 0

    @property
    def torch_dtype(self) -> torch.dtype:
        return {"fp32": torch.float32, "bf16": torch.bfloat16}[self.dtype]

    @property
    def title(self) -> str:
        return TITLES.get(self.name, self.name)

    @property
    def real(self) -> bool:
        """Whether this is a published model's shape."""
        return self.name not in TITLES


def configuration(job: Job) -> Any:
    """The model's configuration, without dropout."""
    import transformers

    if job.real:
        values = dict(TRAINED[job.name])
        config: Any = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    else:
        described = BY_TITLE[job.title]
        factors = dict.fromkeys(_WIDTHS, job.width) | dict.fromkeys(_DEPTHS, job.depth)
        values = {
            key: value * factors.get(key, 1) if key in factors else value for key, value in described.sizes.items()
        }
        tokens = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        config = getattr(transformers, described.config)(**tokens, **values)
    for name, value in list(vars(config).items()):
        if isinstance(value, float) and "drop" in name:
            setattr(config, name, 0.0)
    if getattr(config, "attn_logit_softcapping", None):
        config._attn_implementation = "eager"  # transformers' SDPA leaves the soft cap out
    return config


def build(job: Job, device: torch.device) -> nn.Module:
    """The model, its weights drawn from the job's seed."""
    from rooftile.huggingface.random_model import random_model

    model: Any = random_model(configuration(job), dtype=job.torch_dtype, device=device, seed=job.seed)
    if not _grouped_gemms(job.torch_dtype, device):
        model.set_experts_implementation("eager")
    return model


def _grouped_gemms(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether PyTorch has them: some devices lack float32."""
    x = torch.ones(16, 16, dtype=dtype, device=device, requires_grad=True)
    w = torch.ones(1, 16, 16, dtype=dtype, device=device, requires_grad=True)
    try:
        ends = torch.tensor([16], dtype=torch.int32, device=device)
        y = torch.nn.functional.grouped_mm(x, w.transpose(-2, -1), offs=ends)
        y.backward(torch.ones_like(y))
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return True


def _text(files: Iterable[Path], most: int) -> Tensor:
    """The first tokens of those files."""
    parts: list[Tensor] = []
    for path in files:
        parts.append(library_text.tokens([path]))
        if sum(map(len, parts)) >= most:
            break
    return torch.cat(parts)[:most]


def batches(job: Job, device: torch.device) -> Tensor:
    """The tokens of all steps `(steps, batch, tokens)`: windows of the text that begin anywhere."""
    stream = _text(library_text.training_files(), _TEXT)
    numbers = torch.Generator().manual_seed(job.seed)
    starts = torch.randint(len(stream) - job.tokens, (job.steps, job.batch, 1), generator=numbers)
    return stream[starts + torch.arange(job.tokens)].to(device)


def held_out(job: Job, device: torch.device) -> Tensor:
    """Windows of text that no step sees `(n, tokens)`."""
    most = min(_HELD_OUT, 4 * job.batch * job.tokens)
    return library_text.windows(_text(library_text.held_out_files(), most), job.tokens).to(device)


@dataclasses.dataclass
class Trained:
    """A run: the loss of each step, log-probabilities at the end, and parameters."""

    losses: Tensor
    logprobs: Tensor
    best: Tensor
    weights: dict[str, Tensor]
    seconds: float


def _optimizer(way: str, model: nn.Module, job: Job) -> torch.optim.Optimizer:
    if way == OURS:
        from rooftile.optim import AdamW

        return AdamW(model.parameters(), lr=job.lr, **_OPTIMIZER)  # type: ignore[arg-type]
    # Not foreach, which rounds each operation of a bfloat16 update.
    return torch.optim.AdamW(model.parameters(), lr=job.lr, fused=True, **_OPTIMIZER)  # type: ignore[arg-type]


def train(job: Job, way: str, device: torch.device, likeliest: Tensor | None = None) -> tuple[Trained, Tensor]:
    """Train one way. Log-probabilities are of the tokens `likeliest`, or of the ten likeliest, which are returned."""
    model = build(job, device).train()
    optimizer = _optimizer(way, model, job)
    if way == OURS:
        from rooftile.huggingface import patch

        patch(model, attention=True, linear=True)
    forward = torch.compile(model, dynamic=False) if way == COMPILE else model
    losses = []
    since = time.perf_counter()
    for step, ids in enumerate(batches(job, device)):
        for group in optimizer.param_groups:
            group["lr"] = job.lr * min(1.0, (step + 1) / _WARM)
        loss = forward(**inputs(model, ids)[0]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach().float())
    found = torch.stack(losses).double().cpu()  # which waits for the last step
    seconds = time.perf_counter() - since
    logprobs, best, likeliest = _evaluate(job, model, device, likeliest)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    return Trained(found, logprobs, best, weights, seconds), likeliest


@torch.no_grad()
def _evaluate(
    job: Job, model: nn.Module, device: torch.device, likeliest: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of the likeliest tokens, the likeliest of all, and the likeliest ten by place."""
    model.eval()
    values, best, places = [], [], []
    at_once = max(1, _EVALUATED // job.tokens)
    for i, rows in enumerate(held_out(job, device).split(at_once)):
        every = model(**inputs(model, rows)[0]).logits.float().log_softmax(-1)
        place = every.topk(_TOP).indices if likeliest is None else likeliest[i * at_once : i * at_once + len(rows)]
        values.append(every.gather(-1, place))
        best.append(every.argmax(-1))
        places.append(place)
    return torch.cat(values), torch.cat(best), torch.cat(places)


def _distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """The norm of the difference of two models' parameters; of those that `b` lacks it counts none."""
    total = 0.0
    for name, p in a.items():
        difference = p.detach().float() - b[name].detach().float() if name in b else p.detach().float()
        total += float(difference.square().sum(dtype=torch.float64))
    return math.sqrt(total)


def compare(job: Job, device: torch.device) -> dict[str, Any]:
    """The losses of the first way's steps, and how far each other way's run is from the first's:

    loss          the largest |difference| / loss over all steps
    logprobs      |difference| / |logprobs|, of the ten likeliest tokens at each place of held-out text, at the end
    same_best     the share of places at which the likeliest token is the same
    weights       |difference| / |weights|, over all parameters at the end
    update        the same difference over what training changed
    difference    (loss - first way's) / first way's of each step
    """
    first, likeliest = train(job, job.ways[0], device)
    start = dict(build(job, device).named_parameters())
    changed = _distance(first.weights, start)
    norm = _distance(first.weights, {})
    del start
    found: dict[str, Any] = {
        **dataclasses.asdict(job),
        "parameters": sum(p.numel() for p in first.weights.values()),
        "losses": first.losses.tolist(),
        "seconds": {job.ways[0]: first.seconds},
        "runs": {},
    }
    for way in job.ways[1:]:
        gc.collect()
        if device.type != "cpu":
            torch.get_device_module(device.type).empty_cache()
        try:
            run, _ = train(job, way, device, likeliest)
        except Exception as error:
            message = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
            found["runs"][way] = {"status": "error", "message": message}
            continue
        difference = (run.losses - first.losses) / first.losses
        off = _distance(run.weights, first.weights)
        found["seconds"][way] = run.seconds
        found["runs"][way] = {
            "status": "ok",
            "loss": float(difference.abs().max()),
            "logprobs": float((run.logprobs - first.logprobs).norm() / first.logprobs.norm()),
            "same_best": float((run.best == first.best).double().mean()),
            "weights": off / norm,
            "update": off / changed,
            "difference": difference.tolist(),
        }
        del run
    return found


def main() -> None:
    given = json.loads(sys.argv[1])
    with contextlib.redirect_stdout(sys.stderr):  # libraries print too
        found = compare(Job(**{**given, "ways": tuple(given["ways"])}), runtime.default_device())
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
