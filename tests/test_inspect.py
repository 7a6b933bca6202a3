"""Compiling without a GPU: every op for every target, and that what is wrong with a kernel is found."""

import dataclasses
import functools
import itertools
import json
import subprocess
import sys
from pathlib import Path

import broken_kernels
import pytest
import torch
from typer.testing import CliRunner

from rooftile import cli
from rooftile.cases import Point, all_cases, find_cases
from rooftile.inspect import Task, compile_case, compile_on, faults, plan, report
from rooftile.inspect.compiling import Compilers, environment
from rooftile.inspect.plan import allowed_spills
from rooftile.runtime import TARGETS

BROKEN = {case.name: case for case in broken_kernels.CASES}
BROKEN_ON = {
    "sm_86": (
        "type error", "good", "spilling", "spilling as allowed", "abort", "no kernel", "grid", "shared",
        "good after all", "excluded",
    ),
    "sm_90": ("shared", "descriptors", "gluon"),
    "gfx942": ("good", "spilling on AMD", "threads"),
}  # fmt: skip


compilers = functools.cache(Compilers)  # ends with this process


@functools.cache
def broken(arch):
    """By name, the rows of those broken kernels that are compiled for the target: once, for all tests."""
    cases = [BROKEN[name] for name in BROKEN_ON[arch]]
    rows = compile_on(arch, plan(cases, source=broken_kernels.__name__), BROKEN, compilers=compilers())
    return {case.name: [row for row in rows if row.op == case.name] for case in cases}


def failures(rows):
    return [f"{r.arch} {r.op} {r.direction} {r.dtype} {r.points}: {r.message}" for r in rows if r.verdict == "FAIL"]


# Every op


@pytest.mark.nightly
@pytest.mark.parametrize("arch", TARGETS)
def test_every_op_compiles(arch):
    """Each op at a real size for one of the targets. `.ci/run` compiles each for all targets, and with its options."""
    own = find_cases()[list(TARGETS).index(arch) :: len(TARGETS)]
    tasks = plan(own, sets=["llm"], dtypes=[torch.bfloat16], first=True)
    rows = compile_on(arch, tasks)
    assert not failures(rows)
    compiled = {(r.op, r.direction) for r in rows if r.kernel}
    assert compiled >= {(t.op, t.direction) for t in tasks if arch not in all_cases()[t.op].excluded}


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(8))
def test_every_tiny_size_compiles(part):
    """For the target on which the kernels were measured. `.ci/run` leaves out those that differ in sizes alone."""
    rows = compile_on("sm_90", plan(find_cases()[part::8], sets=["tiny"], dtypes=[torch.bfloat16]))
    assert not failures(rows)
    assert any(r.verdict == "PASS" for r in rows)


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(8))
def test_every_size_compiles(part):
    """The models' sizes for the target with the least shared memory. `.ci/run` has those on which tiles depend."""
    rows = compile_on("sm_86", plan(find_cases()[part::8], sets=["llm"], dtypes=[torch.bfloat16]))
    assert not failures(rows)


@pytest.mark.nightly
@pytest.mark.parametrize("op", ["rms_norm", "layer_norm", "softmax"])
def test_every_length_of_rows_compiles(op):
    rows = compile_on("sm_90", plan(find_cases([op]), sets=["llm", "sweep", "softmax"], dtypes=[torch.bfloat16]))
    assert not failures(rows)


def test_a_plan_has_every_option_at_a_real_size():
    for case in find_cases():
        size = case.sets["llm"][0]
        planned = [t.point for t in plan([case]) if t.point.dims == size.dims]
        for tiny in case.sets["tiny"]:
            assert {**size.options, **tiny.options} in [p.options for p in planned]


def test_a_plan_of_first_points_has_every_option_and_every_set_of_tensors():
    def tensors(case, point):
        inputs = case.inputs(point, torch.bfloat16, torch.device("meta"), torch.Generator())
        return [(name, t.dtype, t.dim()) for name, t in inputs.items()]

    for case in find_cases():
        size = case.sets["llm"][0]
        planned = [t.point for t in plan([case], sets=["tiny", "llm"], dtypes=[torch.bfloat16], first=True)]
        at_size = [p.options for p in planned if p.dims == size.dims]
        given = [tensors(case, p) for p in planned]
        for point, drawn in zip(planned, given, strict=True):  # v_cache=None in the place of a v_cache
            assert not {name for name, *_ in drawn} & set(point.options), (case.name, point.label)
        for tiny in case.sets["tiny"]:
            assert {**size.options, **tiny.options} in at_size
            assert tensors(case, tiny) in given
        small = [tensors(case, p) for p in case.sets["tiny"] if p in planned]
        assert len(small) == len(set(map(str, small)))


def test_tasks_are_dealt_to_processes_by_op():
    cases = find_cases(["silu_mul", "softmax", "linear"])
    tasks = plan(cases, sets=["llm"])
    queue = report._Queue(tasks, all_cases())
    first, second = iter(queue), iter(queue)
    dealt = [[], []]
    for task in first:
        dealt[0].append(task)
        if other := next(second, None):
            dealt[1].append(other)
    dealt[1] += second
    assert sorted(map(repr, tasks)) == sorted(repr(t) for some in dealt for t in some)
    ops = [{t.op for t in some} for some in dealt]
    assert dealt[0][0].op == "linear"
    assert not ops[0] & ops[1]
    assert all(ops)


# Lengths

LENGTHS = (1, 2, 15, 16, 17, 1024, 4097)
ATTENTION = ("attention", "attention_varlen", "attention_paged", "decode_attention")


def _lengths(case):
    """The case's real and decode shapes at other lengths: rows, or tokens and batches."""
    for base in (case.sets["llm"][0], *case.sets.get("decode", ())[:1]):
        if "rows" in base.dims:
            grid = [{"rows": n} for n in LENGTHS]
        else:
            grid = [{"seq_len": n, "batch": b} for n, b in itertools.product(LENGTHS, (1, 2))]
        for lengths in grid:
            if base.dims.get("positions"):
                lengths["position_batch"] = lengths["batch"]
            yield Point(" ".join(f"{k}={v}" for k, v in lengths.items()), {**base.dims, **lengths}, base.options)


@functools.cache
def specializing(portable):
    """A process that says what tasks would be compiled to: once, for all tests. It ends with this one."""
    return subprocess.Popen(
        [sys.executable, Path(__file__).with_name("specializations.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**environment("sm_90", ""), "ROOFTILE_PORTABLE": portable},
        text=True,
        bufsize=1,
    )


def kernels_of(tasks, portable=""):
    """What each task would be compiled to: the direction, what the launcher chose, and what Triton specializes on."""
    process = specializing(portable)
    for task in tasks:
        print(json.dumps(task.as_json()), file=process.stdin)
        yield json.loads(process.stdout.readline())


def recompilations(tasks):
    """Kernels that differ from another in nothing but the lengths they were called with."""
    by_config = {}
    for task, kernels in zip(tasks, kernels_of(tasks), strict=True):
        for direction, chosen, given in kernels:
            config = (task.op, direction, json.dumps(chosen, sort_keys=True))
            by_config.setdefault(config, {}).setdefault(json.dumps(given, sort_keys=True), str(task.point))
    return {config: list(points.values()) for config, points in by_config.items() if len(points) > 1}


def test_a_length_that_changes_recompiles_no_kernel():
    """Of Rooftile's. One that is specialized on a length is found."""
    tasks = [Task(c.name, p, "bf16", d) for c in find_cases() for p in _lengths(c) for d in c.directions]
    broken = plan([BROKEN["specialized"], BROKEN["good"]], source=broken_kernels.__name__)
    found = {op: points for (op, *_), points in recompilations(tasks + broken).items()}
    assert found == {"specialized": ["16 rows", "100 rows"]}


@pytest.mark.parametrize("portable", ["", pytest.param("1", marks=pytest.mark.nightly)])
def test_a_new_scale_window_or_softcap_recompiles_no_attention(portable):
    """Neither of the forward nor of the backward, portable or in Gluon. That there is one of them may."""
    changes = (
        {"scale": (0.3, 0.7, 2)},
        {"scale": (0.3, 0.7, 2), "window": (17, 600, 64)},
        {"scale": (0.3, 0.7, 2), "softcap": (2.0, 30.0, 50)},
        {"window": ((5, 9), (16, 1), (100, 7))},
    )
    tasks, forms = [], []
    for case in find_cases():
        if case.name not in ATTENTION:
            continue
        point = next(p for p in (*case.sets["llm"], *case.sets["tiny"]) if not set(p.options) & {"window", "softcap"})
        for change, direction in itertools.product(changes, case.directions):
            if case.name == "decode_attention" and "scale" not in change:
                continue  # its windows have one side
            forms.append((case.name, direction, list(change)))
            for i in range(3):
                options = {**point.options, **{name: values[i] for name, values in change.items()}}
                tasks.append(Task(case.name, Point(f"{point} {i}", point.dims, options), "bf16", direction))
    answers = kernels_of(tasks, portable)
    for form in forms:
        first, *others = (next(answers) for _ in range(3))
        assert first, form
        for other in others:
            assert other == first, form


# What is wrong with a kernel


def test_spills_fail_but_for_those_that_the_case_allows():
    (good,), (spilling,), (allowed,) = (broken("sm_86")[n] for n in ("good", "spilling", "spilling as allowed"))
    assert (good.verdict, good.kernel.spills, good.kernel.stack) == ("PASS", 0, 0)
    assert (spilling.verdict, allowed.verdict) == ("FAIL", "PASS")
    assert spilling.kernel.spills > 0
    assert spilling.kernel.stack > 0
    assert f"spills {spilling.kernel.spills} bytes" in spilling.message
    assert allowed.kernel == spilling.kernel
    assert not faults(spilling.kernel, TARGETS["sm_86"], spilling.kernel.spills)
    assert faults(spilling.kernel, TARGETS["sm_86"], spilling.kernel.spills - 1)


@pytest.mark.parametrize(("load", "most"), [("2", 40), ("4", 40), ("8", 8), ("16", 8), ("TMA", 8)])
def test_kernels_of_odd_rows_may_spill_more(load, most):
    (good,) = broken("sm_86")["good"]
    case = dataclasses.replace(BROKEN["good"], spills=8, odd_spills=40)
    assert allowed_spills(case, dataclasses.replace(good.kernel, load=load)) == most
    assert allowed_spills(BROKEN["spilling as allowed"], good.kernel) == BROKEN["spilling as allowed"].spills


def test_amd_resources_are_read_from_the_assembly():
    (spilling,), (good,) = broken("gfx942")["spilling on AMD"], broken("gfx942")["good"]
    assert (spilling.verdict, good.verdict) == ("FAIL", "PASS")
    assert spilling.kernel.spills > 0
    assert spilling.kernel.registers == 64  # as many as eight waves leave each
    assert (good.kernel.spills, good.kernel.stack, good.kernel.threads) == (0, 0, 256)
    assert 0 < good.kernel.registers < 64


def test_shared_memory_is_held_to_the_chip_it_is_compiled_for():
    (large,), (small,) = broken("sm_90")["shared"], broken("sm_86")["shared"]
    assert TARGETS["sm_86"].shared_memory < small.kernel.shared
    assert small.verdict == "FAIL"
    assert "shared memory" in small.message
    assert large.kernel.shared <= TARGETS["sm_90"].shared_memory
    assert large.verdict == "PASS"


def test_threads_are_held_to_what_a_block_has():
    (row,) = broken("gfx942")["threads"]
    assert row.kernel.threads == 2048
    assert row.verdict == "FAIL"
    assert "2048 threads" in row.message


def test_the_widest_access_to_memory_is_read_from_the_code():
    for arch in ("sm_86", "gfx942"):
        (row,) = broken(arch)["good"]  # 16 bytes a thread: 1024 elements of bfloat16 over 128 threads, or 8 over 256
        assert (row.kernel.load, row.kernel.store) == (("16", "16") if arch == "sm_86" else ("8", "8"))
    (row,) = broken("sm_90")["descriptors"]
    assert (row.kernel.load, row.kernel.store) == ("TMA", "TMA")


def test_gluon_kernels_are_caught():
    (row,) = broken("sm_90")["gluon"]
    assert (row.verdict, row.kernel.name, row.kernel.load, row.kernel.threads) == ("PASS", "_gluon_kernel", "16", 128)


def test_a_failed_or_crashed_compilation_is_a_row_and_the_rest_goes_on():
    rows = broken("sm_86")
    for name, why in (("type error", "acc"), ("abort", "SIGABRT"), ("no kernel", "no kernel"), ("grid", "70000")):
        (row,) = [r for r in rows[name] if r.verdict == "FAIL"]
        assert row.points == tuple(p.label for p in BROKEN[name].sets["llm"])
        assert row.kernel is None
        assert why in row.message
    assert [r.verdict for r in rows["good"] + rows["good after all"]] == ["PASS", "PASS"]
    assert [(r.verdict, r.message) for r in rows["excluded"]] == [("excluded", "this chip has no such thing")]


def test_what_is_empty_need_not_launch_anything():
    case = all_cases()["silu_mul"]
    empty = [p for p in case.sets["edge"] if not p["rows"] * p["cols"]]
    tasks = plan([dataclasses.replace(case, sets={"edge": empty})], dtypes=[torch.bfloat16])
    rows = compile_on("sm_86", tasks, compilers=compilers())
    assert empty
    assert rows == []


@pytest.mark.nightly
def test_a_worker_that_cannot_begin_fails_every_task():
    (row,) = compile_on("sm_91", plan([BROKEN["good"]]), {"good": BROKEN["good"]})
    assert (row.verdict, row.points) == ("FAIL", ("16 rows", "100 rows"))
    assert "sm_91" in row.log


@pytest.mark.nightly
def test_without_what_compiling_takes_every_task_fails(tmp_path, monkeypatch):
    (tmp_path / "triton.py").write_text("raise ImportError('no compiler here')\n")
    monkeypatch.syspath_prepend(tmp_path)
    (row,) = compile_on("sm_86", plan([BROKEN["good"]]), {"good": BROKEN["good"]})
    assert (row.verdict, row.points) == ("FAIL", ("16 rows", "100 rows"))
    assert "no compiler here" in row.log


@pytest.mark.nightly
def test_one_call_can_be_compiled_alone_and_never_out_of_a_cache():
    case = BROKEN["good"]
    (row,) = compile_case(case, case.sets["llm"][0], arch="sm_86", source=broken_kernels.__name__)
    (before,) = broken("sm_86")["good"]
    assert row.kernel.hash == before.kernel.hash
    assert min(row.kernel.compile_ms, before.kernel.compile_ms) > 10, "no compiler is that quick"


# The command


def run(*arguments):
    return CliRunner().invoke(cli.app, ["inspect", *arguments])


@pytest.mark.nightly
def test_the_command_shows_and_writes_every_kernel(tmp_path, monkeypatch):
    case = all_cases()["silu_mul"]
    bf16 = {torch.bfloat16: case.tolerances[torch.bfloat16]}
    small = dataclasses.replace(case, sets={"llm": case.sets["llm"]}, tolerances=bf16)
    monkeypatch.setattr(cli.ops, "cases_of", lambda ops: [small])
    result = run("silu_mul", "--first", "--arch", "gfx942", "--json", str(tmp_path / "new" / "rows.json"))
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "new" / "rows.json").read_text())
    assert written["meta"]["note"] == "compiled, never run"
    found = [(r["arch"], r["op"], r["direction"], r["dtype"], r["verdict"]) for r in written["rows"]]
    expected = itertools.product(("gfx942",), ("silu_mul",), ("forward", "backward"), ("bf16",), ("PASS",))
    assert found == list(expected)
    for row in written["rows"]:
        assert f"{row['arch']}: compiled, never run" in result.output
        assert row["threads"] == row["num_warps"] * 64
        assert 0 < row["registers"] <= 512
        assert row["compile_ms"] > 10
        assert row["name"] in result.output


@pytest.mark.parametrize(
    ("name", "code", "closing"),
    [("good", 0, "1/1"), ("spilling", 1, "0/1"), ("type error", 1, "0/1"), ("excluded", 0, "0/0 passed, 1 excluded")],
)
def test_the_exit_code_says_whether_all_passed(monkeypatch, name, code, closing):
    monkeypatch.setattr(cli.ops, "cases_of", lambda ops: [BROKEN[name]])
    monkeypatch.setattr(report, "inspect_all", lambda cases, archs, console, *_: broken("sm_86")[name])
    result = run(name)
    assert result.exit_code == code, result.output
    assert closing in result.output
    assert all(row.message.splitlines()[-1].strip() in result.output for row in broken("sm_86")[name] if row.message)


@pytest.mark.parametrize(("seconds", "code"), [("0.001", 1), ("1000", 0)])
def test_a_kernel_that_takes_too_long_to_compile_fails(monkeypatch, seconds, code):
    monkeypatch.setattr(cli.ops, "cases_of", lambda ops: [BROKEN["good"]])
    monkeypatch.setattr(report, "inspect_all", lambda cases, archs, console, *_: broken("sm_86")["good"])
    result = run("good", "--max-compile-seconds", seconds)
    assert result.exit_code == code, result.output
    assert ("s to compile, 0.001 allowed" in result.output) == bool(code)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--arch", "sm_75"), "sm_120"),
        (("no_such_op",), "rms_norm"),
        (("rms_norm", "--all"), "--all"),
        (("softmax", "--first", "--set", "gemm", "--dtype", "bf16"), "none of softmax has gemm"),
    ],
)
def test_wrong_arguments_are_refused_and_the_right_ones_named(arguments, named):
    result = run(*arguments)
    assert result.exit_code == 2
    assert named in result.output
