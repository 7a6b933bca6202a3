"""The hash of a kernel's machine code, and the comparison of two files of `rooftile inspect --json`."""

import functools
import importlib
import json
import sys
import tempfile
from pathlib import Path

import broken_kernels
import pytest
from typer.testing import CliRunner

from rooftile import cli
from rooftile.inspect import compile_on, plan, report
from rooftile.inspect.compare import compare
from rooftile.inspect.machine_code import of_amdgcn, of_sass

SOURCE = """
from broken_kernels import _case, torch, tl, triton


@triton.jit(noinline=True)
def {helper}(x, factor):
    return x * factor + {constant}


@triton.jit
def {kernel}({parameters}, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    for step in range({n}):{comment}
        acc += tl.load({x} + step * BLOCK + i).to(tl.float32)
    total = {helper}(tl.sum(acc / {n}), 3.0)
    tl.store({y} + i, (acc - total).to({y}.dtype.element_ty), mask=i < {n})


def function(x):
    y = torch.empty_like(x)
    given = dict({x}=x, {y}=y, {n}=x.shape[0])
    {kernel}[(1,)](**given, BLOCK=1024)
    return y


CASES = (_case("{case}", function, _case("", None).sets["llm"][1:]),)
"""
PLAIN = {
    "helper": "scaled",
    "kernel": "centre_kernel",
    "x": "x_ptr",
    "y": "y_ptr",
    "n": "n",
    "parameters": "x_ptr, y_ptr, n",
    "constant": "1.5",
    "comment": "",
}
CHANGES = {
    "plain": {},
    "renamed": {"kernel": "a_longer_name_of_a_kernel", "helper": "_f"},
    "parameters": {"x": "source", "y": "out_ptr", "n": "length", "parameters": "source, out_ptr, length"},
    "comments": {"comment": "\n        # why the next line is\n        # as it is\n"},
    "reordered": {"parameters": "n, y_ptr, x_ptr"},
    "constant": {"constant": "1.25"},
}


ARCHS = [pytest.param("sm_86", marks=pytest.mark.nightly), "sm_90", "gfx942"]


@functools.cache
def compiled(arch):
    """The kernel of SOURCE with each of the changes, in a file of its own: by the change's name."""
    tasks, cases = [], {}
    with tempfile.TemporaryDirectory() as folder:
        sys.path.insert(0, folder)
        try:
            for change, fields in CHANGES.items():
                source = f"machine_code_{change}"
                Path(folder, f"{source}.py").write_text(SOURCE.format(**{**PLAIN, **fields, "case": change}))
                importlib.invalidate_caches()
                (case,) = importlib.import_module(source).CASES
                cases[change] = case
                tasks += plan([case], source=source)
            rows = compile_on(arch, tasks, cases, hashed=True)
        finally:
            sys.path.remove(folder)
    assert [r.message for r in rows] == [""] * len(CHANGES)
    return {row.op: row.kernel for row in rows}


@pytest.mark.nightly
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("change", ["renamed", "parameters", "comments"])
def test_a_renamed_or_moved_kernel_keeps_its_hash(arch, change):
    kernels = compiled(arch)
    assert kernels[change].machine_code == kernels["plain"].machine_code != ""
    assert kernels[change].instructions == kernels["plain"].instructions > 50


@pytest.mark.nightly
def test_the_order_of_parameters_is_not_hashed_on_nvidia():
    kernels = compiled("sm_90")
    assert kernels["reordered"].machine_code == kernels["plain"].machine_code


@pytest.mark.nightly
@pytest.mark.parametrize("arch", ARCHS)
def test_a_changed_constant_moves_the_hash(arch):
    kernels = compiled(arch)
    assert kernels["constant"].machine_code != kernels["plain"].machine_code


SASS = """
//--------------------- .nv.constant2.{name}     --------------------------
	.section	.nv.constant2.{name},"a",@progbits
        /*0000*/ 	.byte	{byte}, 0x01

//--------------------- .text.{name}    --------------------------
        .type           {name},@function
{name}:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   ULDC.64 UR4, c[0x0][{first}] ;
{label}:
        /*0020*/                   IADD3 R0, R1, c[0x0][{second}], RZ ;
        /*0030*/                   MOV R20, 32@lo(({name} + {label}@srel)) ;
        /*0040*/              @!P0 BRA `({label}) ;
        /*0050*/                   NOP;
"""
PLAIN_SASS = {"name": "k", "byte": "0x80", "first": "0x210", "second": "0x218", "label": ".L_x_0"}


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({"name": "another"}, True),
        ({"label": ".L_x_7"}, True),
        ({"first": "0x218", "second": "0x220"}, True),
        ({"second": "0x210"}, False),  # the same parameter twice
        ({"second": "0xc"}, False),  # a size of the grid
        ({"byte": "0x81"}, False),
    ],
)
def test_what_is_hashed_of_sass(changes, same):
    plain, changed = (of_sass(SASS.format(**{**PLAIN_SASS, **c})) for c in ({}, changes))
    assert (plain == changed) is same
    assert plain.instructions == 5


def test_what_is_hashed_of_amds_assembly():
    code = "\t.type\tk,@function\nk:\n.LBB0_1:\n\t.loc\t1 5 3\n\ts_branch .LBB0_1 ; file.py:3\n\ts_nop 0\n"
    assert of_amdgcn(code).instructions == 1
    assert of_amdgcn(code) == of_amdgcn(code.replace("1 5 3", "1 6 3").replace("LBB0_1", "LBB0_2").replace("k", "m"))
    assert of_amdgcn(code) != of_amdgcn(code.replace("s_branch", "s_cbranch_scc0"))


# The comparison


def row(op="linear", points=("a",), code="c0", name="k", **fields):
    kernel = {"num_warps": 4, "num_ctas": 1, "shared": 0, "registers": 32, "spills": 0, "instructions": 9}
    call = {"arch": "sm_90", "op": op, "direction": "forward", "dtype": "bf16", "points": points}
    return {**call, **kernel, "name": name, "machine_code": code, **fields}


def test_names_of_kernels_and_how_calls_share_them_are_ignored():
    old = [row(points=("a", "b")), row(points=("a",), code="c1")]
    new = [row(points=("a",), name="m"), row(points=("b",), name="n"), row(points=("a",), code="c1", name="o")]
    found = compare(old, new)
    assert (found.moves, found.unmoved, found.only_old, found.only_new) == ((), 2, {}, {})


@pytest.mark.parametrize("change", [{"code": "c2"}, {"shared": 64}, {"num_warps": 8}])
def test_a_moved_call_shows_both_kernels(change):
    old = [row(points=("a", "b")), row(points=("b",), code="c1")]
    new = [row(points=("a", "b"), registers=40, **change), row(points=("b",), code="c1")]
    (move,) = compare(old, new).moves
    assert (move.points, [k["registers"] for k in (*move.old, *move.new)]) == (("a", "b"), [32, 40])
    assert "registers 32" in str(move)
    assert "registers 40" in str(move)


def test_a_new_name_of_an_op_or_a_point_moves_nothing():
    old = [row("linear_8bit"), row("linear_4bit", points=("b",), code="c1"), row("softmax")]
    new = [row("linear_quantized", points=("a bits=8",)), row("linear_quantized", points=("b",), code="c1")]
    found = compare(old, new, dict.fromkeys(("linear_8bit", "linear_4bit"), "linear_quantized"))
    assert (found.moves, found.unmoved, found.only_old, found.only_new) == ((), 2, {}, {})
    found = compare(old, [row("linear_quantized", points=("c",), code="c3")], {"linear_8bit": "linear_quantized"})
    call = ("sm_90", "linear_quantized", "forward", "bf16")
    assert (found.only_old, found.only_new) == ({call: ["a"]}, {call: ["c"]})


def test_a_file_without_hashes_is_refused():
    with pytest.raises(ValueError, match="the earlier file has no hashes"):
        compare([row(code="")], [row()])


@pytest.mark.nightly
def test_the_command_compares_with_an_earlier_file(tmp_path, monkeypatch):
    case = next(c for c in broken_kernels.CASES if c.name == "good")
    rows = compile_on("sm_86", plan([case], source=broken_kernels.__name__), {"good": case}, hashed=True)
    monkeypatch.setattr(cli.ops, "cases_of", lambda ops: [case])
    monkeypatch.setattr(report, "inspect_all", lambda *_: rows)
    earlier = tmp_path / "earlier.json"

    def inspect():
        result = CliRunner().invoke(cli.app, ["inspect", "good", "--against", str(earlier)])
        assert result.exit_code == 0, result.output
        return result.output

    report.write_json(rows, earlier)
    assert "2 calls have the machine code they had, 0 have another" in inspect()
    written = json.loads(earlier.read_text())
    written["rows"][0]["machine_code"] = "another"
    written["meta"]["tuning"] = "h200"
    earlier.write_text(json.dumps(written))
    output = inspect()
    assert "0 calls have the machine code they had, 2 have another" in output
    assert "the earlier file has tuning h200, the later one none" in output
