"""What the assembler made of the forward, for both targets (each in a process of its own)."""

import pytest

from lp_fa4.sm100.config import ForwardSpec, forward_tuning
from tests.processes import lines

SHARED_LIMIT = 227 * 1024


@pytest.mark.parametrize("arch, names", [("sm_100a", ("full_drawn",)), ("sm_103a", ("module", "folded"))])
def test_no_spill_and_block_scaled_products(arch, names):
    """No stack, no local memory, registers as launched, tensor and shared memory within limits with 16 KB to spare; both products are
    block-scaled FP8 (the variant with scales outside: plain FP8), none is BF16; exponentials are split as the target's table says; items
    are drawn by launch control where asked for."""
    found = lines("tests.sm100.compiled", arch, *names)
    assert len(found) == len(names)
    for report in found:
        sass = report["sass"]
        assert report["stack"] == 0 and report["local"] == 0 and not {"STL", "LDL"} & sass.keys(), report
        assert report["reg"] == 128  # 512 threads; redistributed by setmaxnreg
        assert report["columns"] <= 512 and report["smem"] <= SHARED_LIMIT - 16 * 1024, report
        scaled = report["name"] != "folded"
        # 2 prologue + 2 in the loop of 4 k-blocks: S = Q K^T; 2 of 4, and of 3 for the last tile: O += P V, A from tensor memory
        assert report["products"] == {f"smem scaled={scaled}": 16, f"tmem scaled={scaled}": 14}, report
        assert "HMMA" not in sass and ("UTCCP" in sass) == scaled
        # two loops (with and without a mask) of 4 x 32 exponentials, and a few more for rescaling and the LSE
        on_mufu = 2 * 4 * (32 - forward_tuning(arch, ForwardSpec(128)).exp2_on_fma)
        assert on_mufu <= sass["MUFU.EX2"] <= on_mufu + 12, report
        assert ("UGETNEXTWORKID" in sass) == report["name"].endswith("_drawn")


def test_every_exponential_of_the_faster_target_is_on_mufu():
    assert forward_tuning("sm_103a", ForwardSpec(128)).exp2_on_fma == 0 < forward_tuning("sm_100a", ForwardSpec(128)).exp2_on_fma
