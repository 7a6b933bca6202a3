"""Benchmarks: whether rows are as old as their kernels."""

import json
import subprocess
from pathlib import Path

import pytest
from toys import measured

from rooftile.bench import docs, info, rows, sources
from rooftile.bench.docs import tables
from rooftile.bench.rows import OURS

pytestmark = pytest.mark.nightly

OP = """import torch
from rooftile.primitives import rows

_MODULES = {"hopper": "on_hopper"}


def helper(x):
    return x * 2


def kernel(x):
    return helper(rows.sum(x)) if x else _MODULES


def another(x):
    return rows.product(x)
"""
ROWS = "def sum(x):\n    return x + x\n\n\ndef product(x):\n    return x * x\n"
FILES = {
    "ops/op.py": OP,
    "ops/on_hopper.py": "def kernel(x):\n    return x\n",
    "ops/other.py": "def other():\n    return 1\n",
    "primitives/rows.py": ROWS,
}


def hashed(start="rooftile.ops.op.kernel", **changed):
    return sources.hash_of((start,), {**FILES, **{f"{k.replace('__', '/')}.py": v for k, v in changed.items()}})


def test_a_kernels_hash_is_of_what_it_reaches():
    assert hashed(ops__op=OP.replace("* 2", "* 3")) != hashed()
    assert hashed(primitives__rows=ROWS.replace("x + x", "x - x")) != hashed()
    assert hashed(ops__on_hopper="def kernel(x):\n    return -x\n") != hashed(), "a module that a string names"
    assert hashed(ops__other="def other():\n    return 2\n") == hashed()
    assert hashed(ops__op=OP.replace("product", "sum")) == hashed(), "another kernel of the module"
    assert hashed(primitives__rows=ROWS.replace("x * x", "x / x")) == hashed()
    assert sources.hash_of(("rooftile.ops.none",), FILES) is None
    assert sources.hash_of(("rooftile.ops.op.none",), FILES) is None


@pytest.mark.parametrize(
    "other",
    [
        OP.replace("(x):", "(x: tl.constexpr):"),
        OP.replace("return x * 2", 'return f"{x} * 2"'),
        OP.replace("import rows", "import others as rows"),
        OP.replace("def another", "if torch:\n    def helper(x):\n        return x * 3\n\n\ndef another"),
    ],
)
def test_what_changes_a_kernel_changes_the_hash(other):
    assert hashed(ops__op=other, primitives__others=ROWS.replace("x + x", "x - x")) != hashed()


def test_which_definition_a_name_means_is_hashed():
    """Two constants that swap their values, in modules of their own."""
    one, two = "SIZE = 1\n", "SIZE = 2\n"
    op = "from rooftile.ops import a, b\n\n\ndef kernel(x):\n    return x * a.SIZE + b.SIZE\n"
    assert hashed(ops__op=op, ops__a=one, ops__b=two) != hashed(ops__op=op, ops__a=two, ops__b=one)


def test_imports_that_can_not_be_followed_are_refused():
    for line in ("from . import rows", "from rooftile.primitives.rows import *"):
        with pytest.raises(ValueError, match="line 1: an import is relative or of"):
            hashed(ops__op=f"{line}\n\n\ndef kernel(x):\n    return x\n")


def test_a_module_is_reached_whole():
    assert hashed("rooftile.ops.op", ops__op=OP.replace("product", "sum")) != hashed("rooftile.ops.op")
    exports = {"ops__all": 'from rooftile.ops.op import another\n\n__all__ = ["another"]\n'}
    changed = hashed("rooftile.ops.all", **exports, primitives__rows=ROWS.replace("x * x", "x / x"))
    assert changed != hashed("rooftile.ops.all", **exports)


def test_what_moves_to_another_module_keeps_the_hash():
    start, end = OP.index("def helper"), OP.index("def kernel")
    moved = OP[:start] + OP[end:]
    moved = moved.replace("import torch\n", "import torch\nfrom rooftile.primitives.parts import helper\n")
    assert hashed(ops__op=moved, primitives__parts=OP[start:end]) == hashed()


def test_what_moves_out_of_a_module_that_a_string_names_keeps_the_hash():
    part, rest = "def part(x):\n    return x\n\n\n", "def kernel(x):\n    return part(x)\n\n\nprint(kernel)\n"
    moved = {"ops__on_hopper": f"from rooftile.ops.part import part\n\n\n{rest}", "ops__part": part}
    assert hashed(**moved) == hashed(ops__on_hopper=part + rest)
    assert hashed(**{**moved, "ops__part": part.replace("return x", "return -x")}) != hashed(**moved)


@pytest.mark.parametrize(
    "same",
    [
        OP.replace("return helper", "# twice\n    return helper"),
        OP.replace("    return helper", '    """Twice the sum."""\n    return helper'),
        OP.replace("import torch\n", ""),
        OP.replace("(x):", "(x: int) -> int:"),
        OP.replace("helper", "_helper"),
    ],
)
def test_what_no_kernel_runs_leaves_the_hash_alone(same):
    assert hashed(ops__op=same) == hashed()


@pytest.mark.parametrize(
    ("key", "reached", "not_reached"),
    [
        ("attention", "ops/attention/hopper_forward.py", "ops/attention/paged.py"),
        ("attention", "ops/attention/hopper_backward_dq.py", "ops/softmax/forward.py"),
        ("linear", "ops/gemm/hopper.py", "ops/gemm/lora_linear.py"),
        ("decode_attention", "ops/decode_attention/hopper_latent.py", "ops/attention/hopper_forward.py"),
        ("adamw", "ops/adamw/listed.py", "ops/gated.py"),
        (sources.ENGINE, "ops/gemm/gemv.py", "ops/adamw/listed.py"),
        (sources.PATCHED, "ops/gated.py", "ops/adamw/listed.py"),
        (sources.TRAINED, "ops/attention/hopper_forward.py", "ops/softmax/forward.py"),
        (sources.TRAINED, "ops/fused_head/head.py", "ops/sample/draw.py"),
        (sources.TRAINED, "ops/adamw/listed.py", "ops/fused_head/linear_jsd.py"),
        (sources.TRAINED, "ops/attention/hopper_backward.py", "ops/decode_attention/hopper_latent.py"),
        (sources.TRAINED, "ops/gemm/tiled.py", "ops/gemm/hopper_dequantize.py"),
    ],
)
def test_kernels_are_reached_though_their_modules_are_imported_by_name(key, reached, not_reached):
    present = sources.present()
    now = sources.hash_of_key(key, present)
    assert sources.hash_of_key(key, {**present, reached: ""}) != now
    assert sources.hash_of_key(key, {**present, not_reached: ""}) == now


@pytest.mark.parametrize("key", [sources.ENGINE, sources.SERVED, sources.PATCHED, "attention_paged"])
def test_inference_does_not_age_with_the_kernels_of_gradients(key):
    """A module of a backward that is added has to be left out too."""
    present = sources.present()
    backward = [path for path in present if path.startswith("ops/") and "backward" in path.rpartition("/")[2]]
    assert {"ops/attention/hopper_backward_dkdv.py", "ops/rms_norm/backward.py"} <= set(backward)
    changed = {**present, **dict.fromkeys((*backward, "ops/attention/row_sums.py"), "CHANGED = True\n")}
    assert sources.hash_of_key(key, changed) == sources.hash_of_key(key, present)


def test_rows_of_a_forward_do_not_age_with_its_backward(monkeypatch):
    key, backward = f"attention{sources.FORWARD}", "ops/attention/hopper_backward_dkdv.py"
    present = sources.present()
    then = {**present, backward: present[backward].replace("steps > 0", "steps > 1")}
    monkeypatch.setattr(sources, "at", lambda commit: then)
    meta = {"commit": "a commit before the backward's last change"}
    assert sources.age("attention", meta, direction="forward").state == "current"
    assert sources.age("attention", meta, direction="backward").state == "older"
    changed = {**present, "ops/attention/hopper_forward.py": "CHANGED = True\n"}
    assert sources.hash_of_key(key, changed) != sources.hash_of_key(key, present)


@pytest.mark.parametrize(
    ("path", "old", "new", "ages"),
    [
        ("huggingface/replacing.py", "dx = sum(each[1:], each[0])", "dx = torch.stack(each).sum(0)", True),
        ("huggingface/loss_head.py", "hidden = hidden / divisor", "hidden = hidden * (1 / divisor)", True),
        ("huggingface/families.py", "return (Rule(f", "return (Rule(f' {function}', ''), Rule(f", True),
        ("optim/adamw.py", "device.refresh(", "device.refreshed(", True),
        ("huggingface/families.py", '"GPT2MLP": Activated()', '"GPT2MLP": Gated()', False),
        ("huggingface/planning.py", "if linear or is_head:", "if linear:", False),
        ("huggingface/trainer.py", "self._patch(model, args)", "patch(model)", False),
        ("huggingface/patching.py", "copy.deepcopy(", "replacing.deepcopy(", False),
    ],
)
def test_training_steps_age_with_the_code_that_runs_in_them_alone(path, old, new, ages):
    present = sources.present()
    assert old in present[path]
    changed = {**present, path: present[path].replace(old, new)}
    assert (sources.hash_of_key(sources.TRAINED, changed) != sources.hash_of_key(sources.TRAINED, present)) is ages


def test_every_measured_op_has_a_hash():
    found = sources.hashes()
    assert {"rms_norm", "attention", "linear", sources.ENGINE, sources.PATCHED} <= found.keys()
    for op in ("rms_norm_quantized", "adamw_", "adamw", "rope_and_cache", "gemv", "layer.qkv", "train_step"):
        assert sources.key_of(op) in found, op
    assert sources.key_of("decode", "e2e") == sources.ENGINE
    assert sources.key_of("prefill", "prefill") == sources.PATCHED
    assert sources.key_of("train_step") == sources.TRAINED
    assert info.machine()["definitions"] == found


def test_a_row_is_older_once_its_kernel_has_changed():
    meta = {"commit": "unknown", "definitions": {**sources.hashes(), "rope": "0" * 12}}
    assert sources.age("rms_norm", meta).state == "current"
    assert sources.age("rope", meta) == sources.Age("older", "its kernel has changed since")
    assert sources.age("no_such_op", meta).state == "older"
    assert sources.age("rope", {"commit": "unknown"}) == sources.Age("unknown", "its commit was not recorded")


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository of one commit with a package whose rms_norm is `OP`; its commit."""

    def git(*arguments):
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    package = tmp_path / "src" / "rooftile"
    for path, text in {
        "ops/rms_norm.py": OP.replace("kernel", "rms_norm"),
        "primitives/rows.py": ROWS,
        "bench/sources.py": "",
    }.items():
        (package / path).parent.mkdir(parents=True, exist_ok=True)
        (package / path).write_text(text)
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "One")
    monkeypatch.setattr(sources, "__file__", str(package / "bench" / "sources.py"))
    caches = (sources.at, sources.present, sources._present_hash, sources.hashes, sources._age_by_git)
    for cache in caches:
        cache.cache_clear()
    yield package, git
    for cache in caches:
        cache.cache_clear()


def test_rows_without_a_hash_are_compared_through_git(checkout):
    package, git = checkout
    meta = {"commit": git("rev-parse", "HEAD")}
    assert sources.age("rms_norm", meta).state == "current"
    assert sources.age("rms_norm", {"commit": meta["commit"] + sources.DIRTY}).state == "unknown"
    (package / "ops" / "rms_norm.py").write_text(OP.replace("kernel", "rms_norm").replace("* 2", "* 3"))
    for cache in (sources.present, sources._present_hash, sources.hashes, sources._age_by_git):
        cache.cache_clear()
    age = sources.age("rms_norm", meta)
    assert (age.state, age.reason) == ("older", f"its kernel has changed since commit {meta['commit'][:10]}")


def test_a_hash_by_other_rules_is_compared_through_git(checkout):
    _, git = checkout
    meta = {"commit": git("rev-parse", "HEAD"), "definitions": {"rms_norm": "0" * 12}}
    assert sources.age("rms_norm", meta).state == "current"
    assert sources.age("rms_norm", {**meta, "commit": meta["commit"] + sources.DIRTY}).state == "older"


def test_code_that_calls_kernels_in_another_order_keeps_the_hash():
    calls = "from rooftile.ops.op import another, kernel\n\n\ndef f(x):\n    return {}\n"
    start = "rooftile.engine.loop.f"
    given = {"engine__loop": calls.format("another(kernel(x))")}
    assert hashed(start, engine__loop=calls.format("kernel(another(x)) + x")) == hashed(start, **given)
    assert hashed(start, engine__loop=calls.format("kernel(x)")) != hashed(start, **given)


def test_what_git_can_not_tell_is_said(checkout, monkeypatch, tmp_path):
    assert sources.age("rms_norm", {"commit": "0123abcd"}).reason == "commit 0123abcd is not in this clone"
    (tmp_path / ".git" / "shallow").write_text(checkout[1]("rev-parse", "HEAD") + "\n")
    sources._age_by_git.cache_clear()
    assert sources.age("rms_norm", {"commit": "0123abcd"}).reason.endswith("run git fetch --unshallow")
    monkeypatch.setattr(sources, "__file__", "/nowhere/src/rooftile/bench/sources.py")
    sources._age_by_git.cache_clear()
    age = sources.age("rms_norm", {"commit": "0123abcd"})
    assert (age.state, age.reason) == ("unknown", "this is no git checkout, and the file records no hash of its kernel")


def test_tables_name_what_is_older_and_are_not_stale_for_that(tmp_path):
    meta = {**info.machine(), **dict.fromkeys(("roof_copy_gbs", "roof_read_gbs", "roof_tflops"), 1.0), "gpu": "H100"}
    meta["commit"] = sources.UNKNOWN
    meta["definitions"] = {**meta["definitions"], "rope": "0" * 12}
    for op in ("rope", "rms_norm"):
        row = measured(OURS, 1.0)
        row.op = op
        rows.write_json(tmp_path / "h100" / "rowwise" / f"{op}.json", meta, [row])
    (line, _) = tables.machines(file for files in tables.by_gpu(tmp_path, "rowwise").values() for file in files)
    assert line.endswith("Older than their kernels: `rope`.")
    assert not docs.differ(line, line.replace(" Older than their kernels: `rope`.", ""))
    assert docs.differ(line, line.replace("`rope`:", ""))
    assert tables.aged({"`a`": True, "`b`": True}) == " Older than their kernels: all."
    assert tables.aged({"`a`": False}) == ""


def test_results_are_not_written_without_a_commit(monkeypatch, tmp_path):
    monkeypatch.setattr(info, "commit", lambda: sources.UNKNOWN)
    with pytest.raises(ValueError, match="set ROOFTILE_COMMIT"):
        info.check_results(tmp_path, measures=True)
    info.check_results(None, measures=True)
    monkeypatch.setattr(info, "commit", lambda: "abc1234")
    info.check_results(tmp_path, measures=True)


def test_a_commit_is_shown_with_what_it_lacks():
    assert tables.commit_of({"commit": "47b3ca4e78b62b1b79"}) == "commit `47b3ca4e78`"
    assert tables.commit_of({"commit": "47b3ca4e78b62b1b79-dirty"}) == "commit `47b3ca4e78` with changes"
    assert tables.commit_of({"commit": "unknown"}) == "commit not recorded"
    assert json.dumps(sources.hashes())


def test_committed_results_name_their_commit():
    """Measured before a commit had to be known, and to be measured again."""
    without = {"h200/rowwise/silu_mul.json", "h200/rowwise/silu_mul_packed.json"}
    results = Path(__file__).parent.parent / "results"
    for path in sorted(results.glob("*/*/*.json")):
        commit = json.loads(path.read_text(encoding="utf-8"))["meta"].get("commit")
        if str(path.relative_to(results)) not in without:
            assert commit not in (None, sources.UNKNOWN), path
