"""The public names of `rooftile`: listed once, in its stub, and imported at their first use."""

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rooftile

STUB = ast.parse(Path(rooftile.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
IMPORTS = [(node.module, alias) for node in STUB.body if isinstance(node, ast.ImportFrom) for alias in node.names]


def test_the_stub_lists_each_name_once_and_exports_it():
    names = [alias.name for _, alias in IMPORTS]
    assert len(names) == len(set(names))
    assert all(alias.asname == alias.name for _, alias in IMPORTS), "`import x as x` is what exports x from a stub"
    assert sorted([*names, "__version__"]) == sorted(rooftile.__all__)
    assert {*rooftile.__all__} <= {*dir(rooftile)}


def test_every_name_is_the_object_of_its_home():
    for home, alias in IMPORTS:
        module = __import__(home, fromlist=[alias.name])
        assert getattr(rooftile, alias.name) is getattr(module, alias.name)


def test_the_table_of_ops_names_a_function_for_each():
    from rooftile.bench.docs import op_and_call
    from rooftile.cases import all_cases

    for name in all_cases():
        *_, function, argument = re.fullmatch(r"`(\w+)`(?:: `(\w+)` with `(\w+)=`)?", op_and_call(name)).groups()
        assert (function or name) in rooftile.__all__
        assert argument is None or argument in inspect.signature(getattr(rooftile, function)).parameters
    assert op_and_call("rms_norm_quantized") == "`rms_norm_quantized`: `rms_norm` with `quantize=`"
    assert op_and_call("rms_norm_linear_quantized").endswith(": `rms_norm_linear` with `weight_scale=`")


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'rms_nrom'"):
        rooftile.rms_nrom  # noqa: B018


def test_the_import_loads_neither_torch_nor_triton():
    code = "import sys, rooftile; print(sorted({'torch', 'triton', 'numpy'} & {*sys.modules}))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
