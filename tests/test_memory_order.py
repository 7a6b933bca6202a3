"""How CTAs that wait for one another write and poll, in PTX: its memory model has to grant that a value arrives.

A weak store that another CTA polls is a data race, whatever a GPU makes of it. Compiled for sm_90, without a GPU.
"""

import re
import subprocess
import sys

import pytest

from rooftile.inspect.compiling import environment

SCRIPT = """
import sys
from rooftile import runtime
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from rooftile.ops.sample.draw import row_barrier as barrier
from rooftile.primitives import cta_exchange

publish, publish_pair, gather = cta_exchange.publish, cta_exchange.publish_pair, cta_exchange.gather

@triton.jit
def words(words_ptr, x):
    publish(words_ptr, x, x > 0)

@triton.jit
def pairs(words_ptr, x):
    publish_pair(words_ptr, x, x, x > 0)

@triton.jit
def polling(words_ptr, out_ptr):
    at = words_ptr + tl.arange(0, 32)
    mask = tl.arange(0, 32) < 20
    tl.store(out_ptr + tl.arange(0, 32), gather(tl.load(at, mask=mask, other=-1, volatile=True), at, mask))

@triton.jit
def meeting(counter_ptr, splits):
    barrier(counter_ptr, 0, splits)

signatures = {
    "words": {"words_ptr": "*i32", "x": "fp32"},
    "pairs": {"words_ptr": "*i64", "x": "fp32"},
    "polling": {"words_ptr": "*i64", "out_ptr": "*i64"},
    "meeting": {"counter_ptr": "*i32", "splits": "i32"},
}
for name, signature in signatures.items():
    source = ASTSource(fn=globals()[name], signature=signature, constexprs={})
    print("KERNEL", name)
    print(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"])
"""


@pytest.fixture(scope="module")
def ptx(tmp_path_factory):
    """By kernel, what reads or writes global memory: the instructions without their operands."""
    folder = tmp_path_factory.mktemp("order")
    (folder / "kernels.py").write_text(SCRIPT)
    run = subprocess.run(
        (sys.executable, str(folder / "kernels.py")),
        env=environment("sm_90", str(folder / "cache")),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    kernels = {}
    for part in run.stdout.split("KERNEL ")[1:]:
        name, _, text = part.partition("\n")
        kernels[name] = re.findall(r"\b((?:ld|st|atom|red)\.(?:[a-z0-9_]+\.)*global(?:\.[a-z0-9_:]+)*)", text)
    return kernels


@pytest.mark.parametrize(("kernel", "bits"), [("words", 32), ("pairs", 64)])
def test_a_word_that_others_poll_is_published_by_a_relaxed_store(ptx, kernel, bits):
    assert ptx[kernel] == [f"st.relaxed.gpu.global.b{bits}"]


def test_words_are_polled_by_volatile_loads(ptx):
    """`ld.volatile` has the semantics of `ld.relaxed` (PTX ISA, "Data Movement: ld")."""
    loads = [instruction for instruction in ptx["polling"] if instruction.startswith("ld")]
    assert loads
    assert all(load.startswith(("ld.volatile.global", "ld.relaxed")) for load in loads)


def test_a_barrier_releases_once_and_acquires_as_it_polls(ptx):
    arrive, poll = ptx["meeting"]
    assert arrive.startswith("atom.global.gpu.acq_rel.add")
    assert {"gpu", "acquire"} <= set(poll.split("."))
