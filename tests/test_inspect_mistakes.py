"""Mistakes of compilers are found in the code: registers that nothing wrote, guarded sums, barriers under others."""

import dataclasses
import io

import pytest
import torch
from rich.console import Console

from rooftile.cases import all_cases
from rooftile.inspect.mistakes import find, guarded, overlaid, unwritten
from rooftile.inspect.plan import faults
from rooftile.inspect.report import inspect_all

GOOD = """
        ULDC.64 UR8, c[0x0][0x250] ;
        UIMAD.WIDE UR10, UR8, UR9, URZ ;
        REDUX.MAX.S32 UR16, R20 ;
        IMAD.U32 R23, RZ, RZ, UR16 ;
        @P1 BRA `(.L_x_0) ;
        UMOV UR12, 0x1 ;
        BRA `(.L_x_1) ;
.L_x_0:
        UMOV UR12, 0x2 ;
.L_x_1:
        UIADD3.64 UR14, UR8, UR10, URZ ;
        UMOV UR13, 0x0 ;
        HGMMA.64x64x16.F32.BF16 R24, gdesc[UR12], RZ, !UPT ;
        EXIT ;
"""


def test_what_every_path_has_written_may_be_read():
    assert unwritten(GOOD) == []


def test_a_register_that_nothing_wrote_is_found():
    """As ptxas 12.8 has it for the second product of a block, whose operand lies where the first one's did."""
    wrong = GOOD.replace("UIADD3.64 UR14, UR8, UR10, URZ", "UIADD3 UR14, UP0, UR14, 0x20, URZ")
    assert unwritten(wrong) == [
        "UIADD3 UR14, UP0, UR14, 0x20, URZ",
        "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR12], RZ, !UPT",  # its other half, UR15
    ]


def test_a_register_that_one_path_has_not_written_is_found():
    """As it has it for the second of two loops over one operand, where the first is not run."""
    assert unwritten(GOOD.replace("UMOV UR12, 0x2", "UMOV UR17, 0x2")) == [
        "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR12], RZ, !UPT"
    ]


@pytest.mark.parametrize(
    "copy",
    [
        "UMOV UR13, UR21 ;",
        "MOV R5, UR21 ;\n R2UR UR13, R5 ;",
        "IMAD.U32 R5, RZ, RZ, UR21 ;\n IMAD.MOV.U32 R6, RZ, RZ, R5 ;\n R2UR UR13, R6 ;",
    ],
)
def test_a_copy_of_what_nothing_wrote_is_found_where_it_is_used(copy):
    """ptxas also moves a pair of registers and computes one of them later."""
    zero = "UMOV UR13, 0x0 ;"
    assert unwritten(GOOD.replace(zero, copy)) == ["HGMMA.64x64x16.F32.BF16 R24, gdesc[UR12], RZ, !UPT"]
    assert unwritten(GOOD.replace(zero, f"{copy}\n{zero}")) == []
    assert unwritten(GOOD.replace(zero, f"{zero}\nMOV R5, UR21 ;\nIADD3 R6, R4, R5, RZ ;")) == ["IADD3 R6, R4, R5, RZ"]


def test_an_operand_in_registers_has_no_descriptor():
    code = GOOD.replace("gdesc[UR12], RZ", "R4, gdesc[UR12], RZ").replace("UMOV UR12, 0x2", "NOP")
    assert unwritten(code) == []


# As ptxas 12.9 has it for sm_100, whose uniform registers go beyond 63: each operand has a pair of its own.
BLACKWELL = """
        LDCU.128 UR8, c[0x0][0x3d0] ;
        USHF.R.S32.HI UR12, URZ, 0x1f, UR11 ;
        UMOV UR40, 0x1 ;
        UMOV UR41, 0x2 ;
        UMOV UR60, 0x3 ;
        UMOV UR61, 0x4 ;
        UMOV UR64, 0x0 ;
        UMOV UR65, 0x5 ;
        UTCHMMA gdesc[UR60], gdesc[UR40], tmem[UR12], tmem[UR64], idesc[UR65], UPT ;
        EXIT ;
"""


def test_an_mma_of_sm_100_reads_the_registers_that_it_names():
    assert unwritten(BLACKWELL) == []
    for register in ("UR40", "UR41", "UR60", "UR61", "UR64", "UR65"):
        wrong = BLACKWELL.replace(f"UMOV {register}", "UMOV UR70")
        assert unwritten(wrong) == ["UTCHMMA gdesc[UR60], gdesc[UR40], tmem[UR12], tmem[UR64], idesc[UR65], UPT"]


def test_a_load_of_128_bits_writes_four_registers():
    assert unwritten(BLACKWELL.replace("LDCU.128", "LDCU.64")) == ["USHF.R.S32.HI UR12, URZ, 0x1f, UR11"]


def test_code_without_such_products_is_not_looked_at():
    assert unwritten("IMAD R0, R6, UR4, RZ ;\nEXIT ;") == []


@pytest.mark.parametrize("found", [[], ["instructions that read registers which nothing wrote: 2"]])
def test_it_is_a_fault(found):
    from rooftile.inspect.plan import Kernel
    from rooftile.runtime import TARGETS

    kernel = Kernel("", "k", {}, {}, 4, 1, 1, 128, 32, 0, 0, 0, "16", "16", 1.0, found)
    assert faults(kernel, TARGETS["sm_90"]) == [f"the compiler's mistake: {mistake}" for mistake in found]


def test_a_guarded_sum_is_found():
    code = "ISETP.GE P1, PT, R4, R5, PT ;\nREDUX.SUM.S32 UR4, R6 ;\n@{}P1 REDUX.MAX.S32 UR5, R6 ;\nEXIT ;"
    assert guarded(code.format("")) == guarded(code.format("!")) == ["REDUX.MAX.S32 UR5, R6"]
    assert guarded(code.replace("@{}P1 ", "")) == []


BARRIERS = """
	mov.b32 	%r5, global_smem;
	add.s32 	%r6, %r5, 1024;
	@%p1 mbarrier.init.shared::cta.b64 [%r6], 1;
	add.s32 	%r7, %r5, 1032;
	@%p1 mbarrier.init.shared::cta.b64 [%r7], 2;
	st.shared.v2.b32 	[global_smem+{}], {{%r1, %r2}};
"""


def test_a_barrier_under_something_else_is_found():
    assert overlaid(BARRIERS.format(1028)) == [1024, 1032]
    assert overlaid(BARRIERS.format(1036)) == [1032]
    assert overlaid(BARRIERS.format(1016)) == overlaid(BARRIERS.format(1040)) == []
    assert find(BARRIERS.format(1036), "") == ["barriers that lie where something else is written: 1"]
    assert find(BARRIERS.format(1040), "") == []


def test_places_are_followed_through_registers():
    chained = BARRIERS.replace("%r7, %r5, 1032", "%r7, %r6, 8")
    assert overlaid(chained.format(1036)) == [1032]
    for address in ("[%r7]", "[%r6+8]", "[%r5 + 1032]"):
        assert overlaid(BARRIERS.format(0) + f"st.shared::cta.b32 {address}, %r1;") == [1032]
    assert overlaid(BARRIERS.format(0).replace("%r5, 1032", "%r9, 1032")) == [None]


@pytest.mark.nightly  # `.ci/run` compiles them in bfloat16, and looks for mistakes in all that it compiles
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding_of_32_sequences_has_none(dtype):
    """In float32 a sum of a warp was guarded there, of work that programs share out in a loop."""
    case = all_cases()["decode_attention"]
    points = [p for p in case.sets["decode"] if p.label == "B32 T512 H32/8 D128"]
    case = dataclasses.replace(case, sets={"decode": tuple(points)})
    rows = inspect_all([case], ["sm_90"], Console(file=io.StringIO()), ["decode"], [dtype])
    assert "decode_kernel" in [row.kernel.name for row in rows]
    assert [(row.verdict, row.kernel.mistakes) for row in rows] == [("PASS", [])] * len(rows)
