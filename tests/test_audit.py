"""`rooftile audit`: what it says of a trace."""

import io
import json

import pytest
import torch
from rich.console import Console

from rooftile.bench import info
from rooftile.engine import NGram
from rooftile.inspect.audit import Audit, Settings, timeline, write
from rooftile.inspect.audit import kernels as audit_kernels
from rooftile.inspect.audit import report as audit_report
from rooftile.inspect.audit import trace as audit_trace
from rooftile.inspect.audit.kernels import Launched, origin_of, registry
from rooftile.inspect.audit.trace import MARK, phases

# A trace as the profiler writes it: microseconds, host and device on one clock.


def event(category, name, ts, dur, **args):
    return {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": 7, "ts": ts, "dur": dur, "args": args}


def call(name, ts, correlation):
    return event("cuda_runtime", name, ts, 1.0, correlation=correlation)


def kernel(name, ts, dur, correlation, threads=128, shared=0, registers=32, node=0):
    more = {"graph node id": node} if node else {}
    return event(
        "kernel", name, ts, dur, correlation=correlation, block=[threads, 1, 1], grid=[8, 1, 1],
        **{"shared memory": shared, "registers per thread": registers}, **more,
    )  # fmt: skip


def trace():
    """A prefill of two kernels, launched each, and two replays of a graph of three, which run on after they were
    launched; before all of it a kernel that is in neither."""
    events = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
        call("cudaLaunchKernel", 1.0, 1),
        kernel("_embedding_kernel", 2.0, 1.0, 1),
        event("user_annotation", MARK + "prefill", 100.0, 50.0),
        call("cuLaunchKernelEx", 101.0, 11),
        call("cudaMemcpyAsync", 103.0, 12),
        call("cuLaunchKernelEx", 104.0, 13),
        kernel("attend", 110.0, 20.0, 11),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 131.0, 2.0, correlation=12, bytes=64),
        kernel("_tiled_kernel", 160.0, 30.0, 13),
        event("user_annotation", MARK + "decode", 200.0, 20.0),
    ]
    for replay, begin in ((21, 210.0), (22, 240.0)):
        events += [
            call("cudaGraphLaunch", 201.0 + replay - 21, replay),
            kernel("_skinny_kernel", begin, 10.0, replay, node=1),
            kernel("decode_kernel", begin + 8.0, 4.0, replay, node=2),  # starts before the one before it has ended
            kernel("_greedy_kernel", begin + 14.0, 6.0, replay, node=3),
        ]
    return events


STEPS = {"prefill": 1, "decode": 2}


def of_both(events, **options):
    return phases(events, STEPS, **options)


def test_kernels_belong_to_the_phase_that_launched_them():
    prefill, decode = of_both(trace())
    assert {r.name: r.count for r in prefill.rows} == {
        "attend": 1, "_tiled_kernel": 1, "Memcpy HtoD (Pinned -> Device)": 1,
    }  # fmt: skip
    assert {r.name: (r.count, r.in_graphs) for r in decode.rows} == dict.fromkeys(
        ("_skinny_kernel", "decode_kernel", "_greedy_kernel"), (2, 2)
    )


@pytest.mark.parametrize("name", ["cudaGraphLaunch", "cuGraphLaunch"])
def test_a_kernel_is_in_a_graph_if_its_launch_was_a_graphs(name):
    """Of a profiler that does not write nodes."""
    events = [*trace(), call("cudaLaunchKernel", 204.0, 23), kernel("_advance_kernel", 259.0, 1.0, 23)]
    events.append(call("cudaMemcpyAsync", 205.0, 24))
    events.append(event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 260.0, 1.0, correlation=24))
    for e in events:
        e.get("args", {}).pop("graph node id", None)
        e["name"] = name if e["name"] == "cudaGraphLaunch" else e["name"]
    prefill, decode = of_both(events)
    assert {r.name: r.in_graphs for r in decode.rows} == {
        "_skinny_kernel": 2, "decode_kernel": 2, "_greedy_kernel": 2, "_advance_kernel": 0,
        "Memcpy HtoD (Pageable -> Device)": 0,
    }  # fmt: skip
    assert not any(row.in_graphs for row in prefill.rows)


def test_time_is_counted_once_and_adds_up_with_the_idle_time():
    prefill, decode = of_both(trace())
    assert (prefill.wall_us, prefill.idle_us) == (80.0, 28.0)
    assert {r.name: r.us for r in decode.rows} == {"_skinny_kernel": 20.0, "decode_kernel": 4.0, "_greedy_kernel": 12.0}
    for phase in (prefill, decode):
        assert sum(r.us for r in phase.rows) + phase.idle_us == phase.wall_us
        assert sum(us for _, us in phase.by_block().values()) == phase.wall_us


def test_a_kernel_that_nobody_launched_and_that_runs_late_is_seen():
    """The trace does not name its launch, and the host has left the phase when it begins."""
    events = [*trace(), kernel("nvjet_tst_64x8", 260.0, 3.0, 999)]
    assert Audit("engine", of_both(events)).faults == ["decode: nvjet_tst_64x8 is foreign, 1 runs"]


def test_operations_of_a_block_are_told_apart():
    prefill, decode = (phase.by_block() for phase in of_both(trace()))
    assert prefill["attention"] == (1, 20.0)
    assert prefill["copies"] == (1, 2.0)
    assert {name: n for name, (n, _) in decode.items()} == {"GEMMs": 2, "attention": 2, "sampling": 2, "idle": 0}


def test_a_foreign_kernel_is_found_and_named():
    events = [*trace(), kernel("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", 231.0, 3.0, 21, node=4)]
    found = Audit("engine", of_both(events))
    assert found.faults == ["decode: nvjet_tst_64x8_64x16_4x1_v_bz_TNT is foreign, 1 runs"]
    assert not Audit("engine", of_both(trace())).faults
    (row,) = found.phases[1].foreign()
    assert (row.block, row.us) == ("GEMMs", 3.0)


def test_inductors_triton_is_accepted_of_a_patched_model_alone():
    events = [*trace(), kernel("triton_poi_fused_add_mul_3", 231.0, 3.0, 21, node=4)]
    assert "triton_poi_fused_add_mul_3 is Inductor" in Audit("engine", of_both(events)).faults[0]
    assert not Audit("patched", of_both(events)).faults


def test_a_replay_whose_kernels_were_not_seen_proves_nothing():
    events = [e for e in trace() if e["cat" if "cat" in e else "ph"] != "kernel" or e["args"]["correlation"] != 22]
    assert Audit("engine", of_both(events)).faults == ["decode: of 1 replays of a graph the profiler saw no kernel"]
    blind = [e for e in trace() if e.get("cat") != "kernel"]
    assert "prefill: the profiler saw no kernel" in Audit("engine", of_both(blind)).faults


def test_waits_of_the_host_are_counted():
    events = [*trace(), call("cudaStreamSynchronize", 205.0, 90), call("cudaDeviceSynchronize", 300.0, 91)]
    assert [phase.waits for phase in of_both(events)] == [0, 1]


def test_strictly_a_name_is_not_enough():
    """A kernel of that name that this process did not launch by Rooftile's launchers is another's."""
    source = registry()["_skinny_kernel"][0]
    launched = [Launched(source, 128, 0, 32)]
    _, decode = of_both(trace(), launched=launched, strict=True)
    assert {r.name: r.kind for r in decode.rows} == {
        "_skinny_kernel": "Rooftile", "decode_kernel": "foreign", "_greedy_kernel": "foreign",
    }  # fmt: skip
    assert origin_of("_skinny_kernel", launched, strict=True, threads=256).kind == "foreign", "a namesake"


def test_namesakes_are_told_apart_by_what_they_take_of_the_chip():
    norm, gated = (
        next(s for s in registry()["_loop_kernel"] if s.file == file)
        for file in ("ops/rms_norm/forward.py", "ops/gated.py")
    )
    launched = [Launched(norm, 256, 64, 40), Launched(gated, 256, 0, 40)]
    found = [origin_of("_loop_kernel", launched, threads=256, shared=s, registers=40) for s in (64, 0)]
    assert [(o.op, o.block) for o in found] == [("rms_norm", "norms"), ("gated", "activation")]
    both = origin_of("_loop_kernel", launched, threads=128, shared=7, registers=1)
    assert (both.kind, both.op, both.block) == ("Rooftile", "gated or rms_norm", "other")


@pytest.mark.parametrize(
    ("name", "kind", "block"),
    [
        ("decode_kernel", "Rooftile", "attention"),
        ("rope_kernel", "Rooftile", "RoPE + cache write"),
        ("triton_red_fused__to_copy_add_embedding_mean_mul_pow_rsqrt_0", "Inductor", "norms"),
        ("triton_poi_fused_mul_silu_8", "Inductor", "activation"),
        ("triton_poi_fused_add_cat_index_put_mul_neg_2", "Inductor", "RoPE + cache write"),
        ("gemv_persistent_kernel", "Rooftile", "GEMMs"),
        ("triton_tem_fused_mm_3", "Inductor", "GEMMs"),
        ("triton_red_fused_argmax_4", "Inductor", "sampling"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7", "foreign", "attention"),
        ("void pytorch_flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128, 64>>", "foreign", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::Params)", "foreign", "attention"),
        ("void gemv2T_kernel_val<int, int, __nv_bfloat16>", "foreign", "GEMMs"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64", "foreign", "GEMMs"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int>", "foreign", "GEMMs"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "NCCL", "communication"),
        ("memcpy32_post", "copy", "copies"),
        ("ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)", "NCCL", "communication"),
        ("ncclSymkDevKernel_AllReduce_AGxLL_R_sum_bf16", "NCCL", "communication"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>>", "foreign", "other"),
    ],
)
def test_a_kernels_name_says_whose_it_is(name, kind, block):
    origin = origin_of(name)
    assert (origin.kind, origin.block) == (kind, block)


def test_every_jit_function_is_registered(tmp_path):
    (tmp_path / "ops").mkdir()
    (tmp_path / "ops" / "one.py").write_text(
        "@triton.jit\ndef a(): ...\n@gluon.jit\ndef b(): ...\n@triton.jit(do_not_specialize=['n'])\ndef c(n): ...\n"
        "@functools.cache\ndef d(): ...\n"
    )
    found = list(audit_kernels.functions(tmp_path))
    assert [(s.name, s.family, s.line) for s in found] == [("a", "one", 2), ("b", "one", 4), ("c", "one", 6)]
    from rooftile.ops.gemm.tiled import _tiled_kernel

    assert audit_kernels.source_of(_tiled_kernel) in registry()["_tiled_kernel"]
    assert audit_kernels.source_of(json.dumps) is None


def test_the_profilers_own_file_has_the_marks(tmp_path):
    """The categories and fields that are relied on, as this PyTorch writes them."""
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with profiler, torch.profiler.record_function(MARK + "decode"):
        torch.ones(3).add(1)
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = audit_trace.load(tmp_path / "trace.json")
    assert [name for _, _, name in audit_trace._spans(events)] == ["decode"]


def test_what_is_no_trace_is_refused(tmp_path):
    path = tmp_path / "trace.json"
    for text in ("not json", '{"rows": []}'):
        path.write_text(text)
        with pytest.raises(ValueError, match="not a trace"):
            audit_trace.load(path)


def test_ours_is_shown_beside_theirs():
    theirs = [*trace(), kernel("nvjet_tst_64x8", 231.0, 3.0, 21, node=4)]
    console = Console(file=io.StringIO(), width=200, color_system=None)
    audit_report.show([Audit("engine", of_both(trace())), Audit("cuda", of_both(theirs))], console, True)
    shown = console.file.getvalue()
    assert "the engine passes: 8 runs of Rooftile's Triton kernels, 1 copies and memsets" in shown
    (line,) = (
        line.split()
        for line in shown.splitlines()
        if line.split()[:1] == ["idle"] and len(line.split()) == 5 and line.split()[1] == "7.000"
    )
    assert line == ["idle", "7.000", "28.0%", "5.500", "22.0%"]  # of 25 us a step
    assert "nvjet_tst_64x8" in json.dumps(Audit("cuda", of_both(theirs)).as_json())


def test_nccls_kernels_pass_and_are_counted():
    found = Audit("serve", of_both([*trace(), kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 231.0, 3.0, 21)]))
    assert not found.faults
    console = Console(file=io.StringIO(), width=200, color_system=None)
    audit_report.show([found], console, True)
    assert "passes: 8 runs of Rooftile's Triton kernels, 1 of NCCL, 1 copies and memsets" in console.file.getvalue()


def test_the_last_step_is_drawn_by_its_blocks(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    decode = of_both(trace())[1]
    assert [(begin, end) for begin, end, _ in decode.last_step] == [(0.0, 10.0), (8.0, 12.0), (14.0, 20.0)]
    timeline.draw(tmp_path / "step.svg", {"the engine": decode})
    picture = (tmp_path / "step.svg").read_text()
    assert all(f">{block}<" in picture for _, _, block in decode.last_step)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "m"),
        ({"impl": "engine", "quantize": "fp8"}, "m-fp8"),
        ({"impl": "patched"}, "m-patched"),
        ({"impl": "serve", "speculate": NGram(), "tensor_parallel": 2}, "m-serve-ngram-tp2"),
    ],
)
def test_results_have_a_file_for_each_model_and_what_ran_it(options, name, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    monkeypatch.setattr(info, "machine", lambda: {"gpu": "NVIDIA H100"})
    write(Settings("m", results=tmp_path, **options), "m", [Audit("engine", of_both(trace()))])
    assert sorted(p.name for p in (tmp_path / "h100" / "audit").iterdir()) == [f"{name}.json", f"{name}.svg"]
    found = json.loads((tmp_path / "h100" / "audit" / f"{name}.json").read_text())
    assert found["meta"]["quantize"] == options.get("quantize")
    assert found["audits"][0]["passed"]


def test_steps_that_differ_are_not_drawn(tmp_path):
    decode = of_both([*trace(), kernel("_greedy_kernel", 265.0, 6.0, 22, node=4)])[1]
    assert not decode.last_step
    with pytest.raises(ValueError, match="the engine: not every step"):
        timeline.draw(tmp_path / "step.svg", {"the engine": decode})
