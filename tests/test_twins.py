"""Twins in CUDA C++: their sources compile without spills, their launches cover their inputs, and a missing compiler or
GPU leaves a row that says so."""

import ctypes
import io
import re
import shutil
import struct
import subprocess

import pytest
import torch
from rich.console import Console
from toys import ROOFS, TableClock, cells_of, measured, table

from rooftile import runtime
from rooftile.bench import report, rows, twins
from rooftile.bench.info import machine
from rooftile.bench.twins import compare, nvrtc
from rooftile.bench.variants import check_names, peer_names, variants
from rooftile.cases import find_cases
from rooftile.cases.check import NAMES, check_point

OPS = list(twins.TWINS)
CPU = torch.device("cpu")
DTYPES = list(NAMES)
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc here")


def case_of(op):
    (case,) = find_cases([op])
    return case


def sweep(op):
    return case_of(op).sets["sweep"]


def instances(op, dtypes=DTYPES):
    """The instances of a kernel that the sweep measures."""
    twin = twins.TWINS[op]
    lengths = sorted({twin.length(p) for p in sweep(op)})
    places = [(d, n, c) for d in dtypes for n in lengths for c in twin.configs(n, d.itemsize)]
    return [twin.instance(op, *place) for place in places]


def resources(arch, dtypes, folder):
    """The symbol, registers and bytes of spills of each instance, as ptxas reports them."""
    kernels = [kernel for op in OPS for kernel in instances(op, dtypes)]
    lines = [f'#include "{op}.cu"' for op in OPS]
    lines += ["extern const void* const kernels[];", "const void* const kernels[] = {"]
    lines += [*(f"    (const void*){kernel}," for kernel in kernels), "};"]
    source = folder / "instances.cu"
    source.write_text("\n".join(lines), encoding="utf-8")
    command = ["nvcc", f"-arch={arch}", "-std=c++17", "-Werror=all-warnings", f"-I{twins.FOLDER}", "-Xptxas", "-v"]
    done = subprocess.run(
        [*command, "-cubin", "-o", str(folder / "instances.cubin"), str(source)],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(
        r"entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers",
        done.stderr,
        re.DOTALL,
    )
    assert len(found) == len(kernels)
    return [(symbol, int(registers), int(stores) + int(loads)) for symbol, stores, loads, registers in found]


@needs_nvcc
def test_every_bf16_kernel_of_the_sweeps_compiles_without_spills(tmp_path):
    found = resources("sm_90", [torch.bfloat16], tmp_path)
    assert [f for f in found if f[2]] == []
    assert max(registers for _, registers, _ in found) <= 128  # 512 threads on each SM, whatever the CTA


@needs_nvcc
@pytest.mark.nightly
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_every_kernel_of_the_sweeps_compiles_without_spills(arch, tmp_path):
    assert [f for f in resources(arch, DTYPES, tmp_path) if f[2]] == []


@pytest.mark.parametrize("op", OPS)
def test_nvrtc_compiles_the_first_kernel_and_names_it(op):
    try:
        nvrtc.library()
    except ImportError as error:
        pytest.skip(str(error))
    code, symbol = nvrtc.compiled(twins.FOLDER / f"{op}.cu", instances(op)[0], "sm_90")
    assert code[:4] == b"\x7fELF"
    assert symbol.encode() in code
    text, _ = nvrtc.compiled(twins.FOLDER / f"{op}.cu", instances(op)[0], "sm_90", kind="PTX")
    kinds = {"P": "u64", "q": "u64", "i": "u32", "f": "f32"}
    assert re.findall(rb"\.param \.(\w+)", text) == [kinds[code].encode() for code in twins.TWINS[op].layout]
    with pytest.raises(RuntimeError, match=rf"{op}\.cu, {op}<bf16>, sm_90: .*error"):
        nvrtc.compiled(twins.FOLDER / f"{op}.cu", f"{op}<bf16>", "sm_90")


@pytest.mark.parametrize("op", OPS)
def test_the_layout_is_that_of_the_kernels_parameters(op):
    source = (twins.FOLDER / f"{op}.cu").read_text(encoding="utf-8")
    (parameters,) = re.findall(rf"\b{op}\(([^)]*)\) {{", source)
    codes = {"T*": "P", "int": "i", "long long": "q", "float": "f"}
    types = [re.sub(r"const |__restrict__ ", "", p).strip().rpartition(" ")[0] for p in parameters.split(",")]
    assert "".join(codes[t] for t in types) == twins.TWINS[op].layout


@pytest.fixture
def launches(monkeypatch):
    """The launches of the twins, which are recorded instead: instance, threads, grid and arguments."""
    seen = []

    def kernel(op, dtype, length, config, device):
        twin = twins.TWINS[op]
        threads = config.threads * config.count if twin.by_row else config.threads

        def launch(grid, stream, *arguments):
            assert struct.calcsize(twin.layout) == len(struct.pack(twin.layout, *arguments))
            seen.append((twin.instance(op, dtype, length, config), threads, grid, arguments))

        return launch

    monkeypatch.setattr(twins, "_kernel", kernel)
    monkeypatch.setattr(twins, "_stream", lambda x: 0)
    monkeypatch.setattr(nvrtc, "library", lambda: None)
    monkeypatch.setattr(runtime, "MODE", runtime.Mode.GPU)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    return seen


@pytest.mark.each_once
@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
@pytest.mark.parametrize("op", OPS)
def test_a_launch_covers_its_inputs_and_no_more(op, dtype, launches):
    case, twin = case_of(op), twins.TWINS[op]
    point = sweep(op)[0]
    inputs = case.inputs(point, dtype, CPU, torch.Generator().manual_seed(0))
    for config in twin.configs(twin.length(point), dtype.itemsize):
        outputs = twins.build(op, point, config)(**inputs)
        _, threads, (x, y), arguments = launches.pop()
        assert threads <= 1024
        expected = case.eager(**inputs)
        for out, like in zip(*((o if isinstance(o, tuple) else (o,)) for o in (outputs, expected)), strict=True):
            assert (out.shape, out.dtype) == (like.shape, like.dtype)
        assert list(arguments[: len(inputs)]) == [t.data_ptr() for t in inputs.values()]
        width = 16 // dtype.itemsize
        if twin.by_row:
            done, needed, each = x * config.count, point["rows"], config.count
        elif op == "silu_mul":
            each = config.threads * config.count
            done, needed = x * each, point["rows"] * point["cols"] // width
        else:
            assert y == point["seq_len"]
            assert outputs[0].stride() == inputs["q"].stride()  # rows of (tokens, heads, D) in memory
            each = config.threads // (point["head_dim"] // 2 // width) * config.count
            done, needed = x * each, point["q_heads"] + point["k_heads"]
        assert needed <= done < needed + each


class Driver:
    """The driver's calls that a launch makes; the last one reads the block of arguments."""

    def __init__(self):
        self.launched = []

    def cuModuleLoadData(self, module, code):
        return 0 if code.startswith(b"\x7fELF") else 209

    def cuModuleGetFunction(self, function, module, symbol):
        return 0

    def cuGetErrorString(self, code, text):
        text._obj.value = b"no kernel image"
        return 0

    def cuLaunchKernel(self, function, *rest):
        grid, block, (shared, stream, parameters, extra) = rest[:3], rest[3:6], rest[6:]
        begin, buffer, size_of, size, end = extra
        assert (begin, size_of, end, shared, parameters) == (1, 2, None, 0, None)
        length = ctypes.c_size_t.from_address(size).value
        self.launched.append((grid, block, stream.value, ctypes.string_at(buffer, length)))
        return 0


def test_a_kernel_is_launched_with_its_arguments_in_one_block(monkeypatch):
    driver = Driver()
    monkeypatch.setattr(nvrtc.ctypes, "CDLL", lambda name: driver)
    kernel = nvrtc.Kernel(b"\x7fELF", "k", "PPif", 128)
    kernel((2**20, 3), 77, 2**47 - 1, 16, 2048, 0.5)
    kernel((1, 1), 0, 8, 16, 1, 1.0)
    first = (2**47 - 1).to_bytes(8, "little") + (16).to_bytes(8, "little") + struct.pack("<if", 2048, 0.5)
    assert driver.launched[0] == ((2**20, 3, 1), (128, 1, 1), 77, first)
    assert len(driver.launched) == 2
    with pytest.raises(RuntimeError, match="CUDA driver: no kernel image"):
        nvrtc.Kernel(b"other", "k", "P", 32)


def test_a_row_of_any_length_has_a_configuration():
    for itemsize in (2, 4):
        for n in range(8, 16385, 8):
            configs = twins.TWINS["softmax"].configs(n, itemsize)
            assert configs
            assert all(c.threads * c.count <= 1024 and (c.count == 1 or c.threads <= 32) for c in configs)


def test_the_configurations_of_the_published_lengths_leave_an_eighth_of_the_threads_idle_at_most():
    for op in ("rms_norm", "softmax"):
        for p in sweep(op):
            for c in twins.TWINS[op].configs(p["cols"], 2):
                vectors = p["cols"] // 8
                assert c.threads * -(-vectors // c.threads) * 7 <= vectors * 8
    assert len(twins.TWINS["rms_norm"].configs(4096, 2)) >= 3


@pytest.mark.parametrize("op", OPS)
def test_a_missing_compiler_leaves_the_row_absent(op, monkeypatch):
    monkeypatch.setattr(nvrtc, "_wheels", lambda: iter(()))

    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(nvrtc.ctypes, "CDLL", missing)
    nvrtc.library.cache_clear()
    *_, found = variants(case_of(op), sweep(op)[0], ["cuda"])
    nvrtc.library.cache_clear()
    assert (found.name, found.function, found.status) == ("cuda", None, "absent")
    assert "NVRTC" in found.message
    assert "pip install nvidia-cuda-nvrtc" in found.message


def test_a_twin_says_why_it_does_not_run(monkeypatch):
    monkeypatch.setattr(nvrtc, "library", lambda: None)
    if runtime.MODE is not runtime.Mode.GPU:
        assert variants(case_of("rope"), sweep("rope")[0], ["cuda"])[-1].message == "the twin needs an NVIDIA GPU"
    causal = next(p for p in case_of("softmax").sets["tiny"] if p.options.get("causal"))
    assert variants(case_of("softmax"), causal, ["cuda"])[-1].status == "unsupported"


def test_a_benchmark_has_the_twin_only_where_it_is_named():
    case = case_of("softmax")
    assert "cuda" not in [v.name for v in variants(case, sweep("softmax")[0])]
    assert "cuda" not in peer_names(case)
    check_names([case], ["cuda"])
    with pytest.raises(ValueError, match="unknown baseline cuda"):
        check_names([case_of("embedding")], ["cuda"])
    with pytest.raises(ValueError, match="no twin of linear; ops with a twin: rms_norm, rope, silu_mul, softmax"):
        compare.compare(["linear"], Console(file=io.StringIO()))


def test_the_fastest_configuration_is_chosen_for_later_calls(monkeypatch):
    case, point = case_of("softmax"), case_of("softmax").sets["tiny"][0]
    configs = [twins.Config(16, 8), twins.Config(32, 4), twins.Config(64, 1)]
    monkeypatch.setitem(
        twins.TWINS, "softmax", compare.dataclasses.replace(twins.TWINS["softmax"], configs=lambda n, size: configs)
    )
    functions = {c: lambda c=c, **inputs: torch.softmax(inputs["x"], -1) for c in configs}
    monkeypatch.setattr(twins, "build", lambda op, point, config=None: functions[config])
    monkeypatch.setattr(twins, "chosen", {})
    clock = TableClock({functions[c]: 1e-6 * us for c, us in zip(configs, (3.0, 2.0, 4.0), strict=True)})
    us = compare.choose(case, point, torch.bfloat16, clock, CPU)
    assert list(us.values()) == pytest.approx([3.0, 2.0, 4.0])
    assert twins.chosen == {("softmax", str(point), torch.bfloat16): configs[1]}


def group(op, shape, us, **times):
    found = [measured(rows.OURS, us, op=op, shape=shape, host_us=12.0, gbs=1000.0, roof_fraction=0.9)]
    found += [measured(name, t, op=op, shape=shape, host_us=5.0) for name, t in times.items()]
    rows.compare(found)
    return found


@pytest.mark.nightly  # the benchmark's
def test_the_tables_set_triton_against_the_twin_with_device_time_and_launch_apart(tmp_path):
    found = [*group("rms_norm", "2048x896", 5.0, eager=30.0, compile=6.0, cuda=5.1)]
    found += group("rms_norm", "2048x4096", 10.0, eager=60.0, compile=11.0, cuda=9.0)
    assert report.twins_line(rows.groups(found)) == (
        "2 rows, of the CUDA C++ twin's speed: geometric mean 0.958, least 0.900, 1 below 0.95 (2048x4096 bf16)"
    )
    roofs = {"roof_copy_gbs": ROOFS.copy_gbs, "roof_read_gbs": ROOFS.read_gbs, "roof_tflops": ROOFS.tflops}
    meta = {**machine(), **roofs, "gpu": "NVIDIA H100", "driver": "1"}
    rows.write_json(tmp_path / "h100" / "twins" / "rms_norm.json", meta, found)
    made = table("twins", tmp_path)
    assert cells_of(made, "2048x896") == [
        [
            "2048x896",
            "bf16",
            "1.020",
            "6.00",
            "1000",
            "0.900",
            "5.000",
            "5.100",
            "6.000",
            "30.00",
            "12.00",
            "5.000",
            "5.000",
            "5.000",
        ]
    ]
    assert cells_of(made, "2048x4096")[0][2] == "**0.900**"  # under the bar
    assert "least 0.900, 1 below 0.95" in made
    out = io.StringIO()
    report.show(Console(file=out, width=200), found, True)
    assert "host us" in out.getvalue()
    assert "of the CUDA C++ twin's speed" in out.getvalue()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
@pytest.mark.parametrize("op", OPS)
def test_every_configuration_agrees_with_the_reference(op, dtype):
    case, twin, device = case_of(op), twins.TWINS[op], runtime.default_device()
    for point in sweep(op)[:2]:
        for config in twin.configs(twin.length(point), dtype.itemsize):
            function = twins.build(op, point, config)
            found = check_point(case, point, dtype, "forward", function=function, mutates=(), device=device)
            assert [row.message for row in found if not row.passed] == []
