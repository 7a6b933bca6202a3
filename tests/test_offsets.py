"""Offsets past 2^31 elements: four rows, 2^30 + 64 apart, over memory that is mapped and mostly never touched.

A larger stride Triton would type as 64-bit by itself, and hide the fault. A copy of each kernel without its 64-bit
casts is run on the same tensors, to show that they would catch it.
"""

import importlib.util
import inspect
import mmap
import sys

import pytest
import torch
from helpers import BF16, assert_same

import rooftile
from rooftile import launching, library, runtime
from rooftile.ops.cross_entropy import backward, distributed
from rooftile.ops.cross_entropy import forward as cross_entropy
from rooftile.ops.fused_head import linear_jsd
from rooftile.primitives import tiles

ROWS, STRIDE = 4, 2**30 + 64
COLS = 48
BYTES = 2 * (ROWS * STRIDE + COLS)


@pytest.fixture
def far_rows(device):
    """A function that lays (4, cols) numbers in rows that far apart; or along another axis, or by another stride."""
    kept = []

    def lay(x, axis=0, stride=STRIDE):
        if device.type == "cpu":
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
            try:
                memory = mmap.mmap(-1, BYTES, flags=flags)
            except OSError as error:
                pytest.skip(f"{BYTES >> 30} GiB can't be mapped here: {error}")
            kept.append(memory)
            buffer = torch.frombuffer(memory, dtype=BF16)
        else:
            free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
            if free < 3 * BYTES:
                pytest.skip(f"needs {3 * BYTES >> 30} GiB of GPU memory")
            buffer = torch.empty(BYTES // 2, dtype=BF16, device=device)
        rows = x.movedim(axis, 0)
        view = buffer.as_strided(rows.shape, (stride, *torch.empty(rows.shape[1:], device="meta").stride()))
        view = view.movedim(0, axis)
        view.copy_(x)
        return view

    return lay


def heads(x):
    """(tokens, 2 heads of 24) as (batch, heads, tokens, head_dim)."""
    return x.unflatten(1, (2, 24)).transpose(0, 1)[None]


def normal(device):
    return torch.randn(ROWS, COLS, device=device).to(BF16)


def angles(device):
    angle = torch.randn(ROWS, 12, device=device).repeat(1, 2)
    return angle.cos().to(BF16), angle.sin().to(BF16)


def run_rms_norm(lay, device):
    x, dy, weight = normal(device), normal(device), normal(device)[0]
    results = []
    for place in (torch.clone, lay):
        far = place(x).requires_grad_()
        w = weight.clone().requires_grad_()
        y = rooftile.rms_norm(far, w)
        results.append((y.detach(), *torch.autograd.grad(y, (far, w), place(dy))))
    return results


def run_add_rms_norm(lay, device):
    x, residual, dy, du = (normal(device) for _ in range(4))
    results = []
    for place in (torch.clone, lay):
        far = x.clone().requires_grad_()
        y, u = rooftile.add_rms_norm(far, place(residual))
        results.append((y.detach(), u.detach(), *torch.autograd.grad((y, u), far, (dy, place(du)))))
    return results


def run_layer_norm(lay, device):
    x, dy, (weight, bias) = normal(device), normal(device), normal(device)[:2]
    results = []
    for place in (torch.clone, lay):
        leaves = [place(x).requires_grad_(), weight.clone().requires_grad_(), bias.clone().requires_grad_()]
        y = rooftile.layer_norm(*leaves)
        results.append((y.detach(), *torch.autograd.grad(y, leaves, place(dy))))
    return results


def run_rope(lay, device):
    q, k, dq, dk = (normal(device) for _ in range(4))
    cos, sin = angles(device)
    results = []
    for place in (torch.clone, lay):
        q_leaf, k_leaf = heads(place(q)).detach().requires_grad_(), heads(k).detach().requires_grad_()
        outputs = rooftile.rope(q_leaf, k_leaf, cos, sin)
        grads = torch.autograd.grad(outputs, (q_leaf, k_leaf), (heads(dq), heads(place(dk))))
        results.append((*(y.detach() for y in outputs), *grads))
    return results


def run_rope_in_place(lay, device):
    q, k = normal(device), normal(device)
    cos, sin = angles(device)
    results = []
    for place in (torch.clone, lay):
        far = heads(place(k))
        results.append(tuple(t.clone() for t in rooftile.rope_(heads(q.clone()), far, cos, sin)))
    return results


def run_silu_mul(lay, device):
    gate, up, dy = (normal(device) for _ in range(3))
    results = []
    for place in (torch.clone, lay):
        far, near = place(gate).requires_grad_(), up.clone().requires_grad_()
        y = rooftile.silu_mul(far, near)
        results.append((y.detach(), *torch.autograd.grad(y, (far, near), place(dy))))
    return results


def run_silu_mul_packed(lay, device):
    gate_up, dy = normal(device), normal(device)[:, : COLS // 2].contiguous()
    results = []
    for place in (torch.clone, lay):
        far = place(gate_up).requires_grad_()
        y = rooftile.silu_mul_packed(far)
        results.append((y.detach(), *torch.autograd.grad(y, far, dy)))
    return results


def run_kl_div(lay, device):
    log_p, target, dloss = normal(device).float().log_softmax(-1), normal(device).float().softmax(-1), normal(device)
    results = []
    for place in (torch.clone, lay):
        leaves = [place(t.to(BF16)).requires_grad_() for t in (log_p, target)]
        loss = rooftile.kl_div(*leaves, reduction="none")
        total = rooftile.kl_div(*(leaf.detach() for leaf in leaves), reduction="sum")
        results.append((total, loss.detach(), *torch.autograd.grad(loss, leaves, place(dloss))))
    return results


def run_jsd(lay, device):
    log_q, log_p, dloss = normal(device).float().log_softmax(-1), normal(device).float().log_softmax(-1), normal(device)
    results = []
    for place in (torch.clone, lay):
        q, p = (place(t.to(BF16)).requires_grad_() for t in (log_q, log_p))
        now, later = rooftile.jsd(q, p.detach()), rooftile.jsd(q, p, reduction="none")
        grads = (*torch.autograd.grad(now, q), *torch.autograd.grad(later, (q, p), place(dloss)))
        results.append((now.detach(), later.detach(), *grads))
    return results


def run_cross_entropy(lay, device):
    logits, target = normal(device), torch.tensor([3, 47, -100, 0], device=device)
    results = []
    for place in (torch.clone, lay):
        far = place(logits).requires_grad_()
        mean, losses = rooftile.cross_entropy(far, target), rooftile.cross_entropy(far, target, reduction="none")
        grads = [torch.autograd.grad(loss.sum(), far)[0] for loss in (mean, losses)]
        results.append((mean.detach(), losses.detach(), *grads))
    return results


def run_cross_entropy_in_place(lay, device):
    """As the fused head has it: the gradient takes the place of the logits."""
    logits, target = normal(device), torch.tensor([3, 47, -100, 0], device=device)
    options = cross_entropy.Options(-100, 0.0, 0.0, 0.0, "sum", "now", False)
    results = []
    for place in (torch.clone, lay):
        far, losses = place(logits), torch.empty(ROWS, device=device)
        start = cross_entropy.bind_rows(far, target, None, None, options, in_place=True)
        start(far, target, None, None, None, losses, None, None, None, None, None)
        results.append((losses, far.clone()))
    return results


def run_cross_entropy_of_columns(lay, device):
    """As ranks have it that share the classes: sums of a row, then the gradient over the logits."""
    logits, target = normal(device), torch.tensor([3, 47, -100, 60], device=device)  # the last is another rank's
    columns = distributed.Columns(0, 2 * COLS, None, torch.rand(2 * COLS, device=device))
    options = cross_entropy.Options(-100, 0.1, 0.0, 0.0, "none", "later", True)
    part, share, one = columns.of_weight(COLS), torch.ones(ROWS, device=device), torch.ones((), device=device)
    results = []
    for place in (torch.clone, lay):
        far = place(logits)
        found = distributed.of_columns(far, target, share, columns, options)
        factors = found.factors.nan_to_num()  # no rank has the last one's class
        backward.over_logits(one, far, found.target, part, factors, 0.0, True, 1.0)
        results.append((found.losses.nan_to_num(), found.stats[1], found.stats[2], far.clone()))
    return results


def run_linear_jsd(lay, device):
    student, teacher = normal(device), normal(device)
    target = torch.tensor([3, 47, -100, 0], device=device)
    results = []
    for place in (torch.clone, lay):
        far, far_teacher, losses = place(student), place(teacher), torch.empty(ROWS, device=device)
        args = far, far_teacher, target, None, None, losses, 0.5, 1.0, -100, True
        linear_jsd.bind_rows(*args)(*args)
        results.append((losses, far.clone()))
    return results


# Each with the family whose kernels it runs.
RUNS = {
    run_rms_norm: "rms_norm",
    run_add_rms_norm: "rms_norm",
    run_layer_norm: "layer_norm",
    run_rope: "rope",
    run_rope_in_place: "rope",
    run_silu_mul: "gated",
    run_silu_mul_packed: "gated",
    run_kl_div: "divergence",
    run_jsd: "divergence",
    run_cross_entropy: "cross_entropy",
    run_cross_entropy_in_place: "cross_entropy",
    run_cross_entropy_of_columns: "cross_entropy",
    run_linear_jsd: "fused_head.linear_jsd",
}
every_run = pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__.removeprefix("run_"))


@every_run
def test_rows_past_two_to_the_31_are_right(run, far_rows, device):
    near, far = run(far_rows, device)
    assert_same(far, near)


def test_the_fused_head_reads_hidden_states_that_far_apart(far_rows, device):
    hidden, weight, target = normal(device), normal(device), torch.tensor([3, 1, -100, 0], device=device)
    results = []
    for place in (torch.clone, far_rows):
        leaves = place(hidden).requires_grad_(), weight.clone().requires_grad_()
        loss = rooftile.linear_cross_entropy(*leaves, target, chunk_bytes=2 * 16 * 2)
        results.append((loss.detach(), *torch.autograd.grad(loss, leaves)))
    assert_same(*results)


def kernels(module):
    """The kernels of a file of ops/, and the helpers that it defines, by name."""
    return {
        n: v for n, v in vars(module).items() if getattr(getattr(v, "fn", None), "__module__", "") == module.__name__
    }


def files_with_kernels(family):
    """The files of a family, be it one or a folder, that launch kernels."""
    name = f"rooftile.ops.{family}"
    files = [module for n, module in sys.modules.items() if n == name or n.startswith(f"{name}.")]
    return [module for module in files if any(n.endswith("_kernel") for n in kernels(module))]


def without_int64(module, monkeypatch, tmp_path):
    """A copy of the module with every cast to 64 bits struck out."""
    source = inspect.getsource(module)
    assert ".to(tl.int64)" in source
    name = f"narrow_{module.__name__.replace('.', '_')}"
    path = tmp_path / f"{name}.py"
    path.write_text(source.replace(".to(tl.int64)", ""))
    spec = importlib.util.spec_from_file_location(name, path)
    narrow = importlib.util.module_from_spec(spec)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, name, narrow)
        patch.setattr(library, "define", lambda *args, **kwargs: None)  # ops are registered once
        spec.loader.exec_module(narrow)
    return narrow


def use_kernels_without_int64(module, monkeypatch, tmp_path):
    """Puts copies of the module's kernels in their place, with every cast to 64 bits struck out, `tile_of`'s too."""
    narrow = without_int64(module, monkeypatch, tmp_path)
    if hasattr(narrow, "tile_of"):
        narrow.tile_of = without_int64(tiles, monkeypatch, tmp_path).tile_of
    assert kernels(narrow).keys() == kernels(module).keys()
    for kernel_name, kernel in kernels(narrow).items():
        monkeypatch.setattr(module, kernel_name, kernel)


@pytest.fixture
def no_plans_kept():
    """Plans hold the kernels that they launch: none are kept from before, and none of this test's afterwards."""

    def clear():
        launching.forget()
        for name, module in list(sys.modules.items()):
            if name.startswith(("rooftile.ops.", "rooftile.primitives.")):
                for value in list(vars(module).values()):
                    if hasattr(value, "cache_clear"):
                        value.cache_clear()

    clear()
    yield
    clear()


@every_run
def test_a_kernel_with_offsets_of_32_bits_is_caught(run, far_rows, device, monkeypatch, tmp_path, no_plans_kept):
    if runtime.MODE is not runtime.Mode.INTERPRETER:
        pytest.skip("on a GPU a wild access ends the process: the interpreter alone can show it")
    from rooftile.interpreter.memory import OutOfBoundsError

    files = files_with_kernels(RUNS[run])
    assert files
    for file in files:
        use_kernels_without_int64(file, monkeypatch, tmp_path)
    near = run(torch.clone, device)[0]
    assert all(torch.isfinite(t).all() for t in near)  # sound where offsets are small
    with pytest.raises(OutOfBoundsError, match="out of bounds"):
        run(far_rows, device)
