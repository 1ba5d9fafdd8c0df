"""Launch capture: the trampoline library, PTX by loaded library, TMA descriptors as CuTe encodes them."""

import ctypes
import struct

import pytest

from tests.emulator.elf import SLOTS, write_trampolines
from tests.emulator.tensormap import box, decode

pytestmark = pytest.mark.emulator
PROBES = "tests.emulator.probes:"


def test_trampolines_call_what_the_slots_hold(tmp_path):
    path = tmp_path / "lib.so"
    write_trampolines(path, ["increment", "double_it"])
    library = ctypes.CDLL(str(path))
    slots = (ctypes.c_void_p * 2).in_dll(library, SLOTS)
    prototype = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)
    callbacks = [prototype(lambda x: x + 1), prototype(lambda x: 2 * x)]
    for i, f in enumerate(callbacks):
        slots[i] = ctypes.cast(f, ctypes.c_void_p).value
    assert (library.increment(3), library.double_it(5)) == (4, 10)
    with pytest.raises(AttributeError, match="undefined symbol"):
        _ = library.no_such_name


def test_two_variants_of_one_kernel_name_do_not_mix(sm100):
    got = sm100.call(PROBES + "two_variants")
    assert got == {"a": 1.0, "b": 2.0, "launches": 3}


def test_a_library_whose_ptx_is_not_known_is_named(sm100):
    got = sm100.call(PROBES + "unknown_library")
    assert got["kind"] == "LaunchError" and "no PTX is known for the loaded library" in got["text"]


# dtype, element code, shape, stride in elements, box, swizzle bits → mode
DESCRIPTORS = [
    ("f16", 6, [256, 512], [1, 256], [64, 8], 0),
    ("f16", 6, [320, 768], [1, 512], [32, 16], 0),
    ("bf16", 10, [320, 768], [1, 512], [32, 16], 0),
    ("f32", 7, [320, 768], [1, 512], [32, 16], 0),
    ("u8", 0, [320, 768], [1, 512], [32, 16], 0),
    ("s32", 2, [320, 768], [1, 512], [32, 16], 0),
    ("fp8", 0, [320, 768], [1, 512], [32, 16], 0),
    ("f16", 6, [320, 768], [1, 512], [16, 16], 1),
    ("f16", 6, [320, 768], [1, 512], [32, 16], 2),
    ("f16", 6, [320, 768], [1, 512], [64, 16], 3),
    ("f16", 6, [1280], [1], [64], 0),
    ("f16", 6, [128, 16, 4], [1, 256, 256 * 64], [64, 8, 2], 0),
    ("f16", 6, [128, 16, 4, 3, 2], [1, 256, 256 * 64, 256 * 64 * 4, 256 * 64 * 16], [64, 8, 2, 1, 1], 0),
]
BYTES = {"f16": 2, "bf16": 2, "f32": 4, "u8": 1, "s32": 4, "fp8": 1}


@pytest.mark.parametrize(("dtype", "code", "shape", "stride", "box", "bits"), DESCRIPTORS)
def test_descriptor_fields_are_where_we_read_them(sm100, dtype, code, shape, stride, box, bits):
    """A DSL version that moves a bit of its descriptors fails here, not in a kernel's numbers."""
    got = sm100.call(PROBES + "encode", dtype=dtype, shape=shape, stride=stride, box=box, swizzle_bits=bits)
    assert got.pop("unknown") == 0x40002 | (0 if len(shape) in (1, 3) else 1 << 21)
    assert got == {
        "offset": 0,
        "element": code,
        "swizzle": bits,
        "dims": shape,
        "strides": [s * BYTES[dtype] for s in stride],
        "box": box,
    }


def test_a_tensor_whose_start_was_moved_below_zero():
    """Ragged tensors start so far before their data that a low address borrows; a coordinate as large brings it back."""
    start, extent, stride = 0x1B2EDC80, 1 << 30, 1 << 8
    words = [0] * 16
    words[0:2] = divmod((start - extent * stride) % (1 << 57), 1 << 32)[::-1]
    words[2] = 0x40002 | 1 << 21 | 1 << 4 | 10 << 7
    words[3], words[8], words[9] = stride >> 4, 127, 2 * extent - 1
    words[13], words[14] = 63 << 24, 1
    t = decode(struct.pack("<16I", *words))
    b = box(t, [64, extent + 3])
    assert b.addresses.min() == start + 3 * stride + 128 and (b.valid == 16).all()


def test_remembered_places_are_the_places(sm100):
    """The DSL's own answer and the remembered one, at several places of a line and of a loop."""
    remembered, worked_out = sm100.call(PROBES + "places").values()
    assert remembered == worked_out and len(remembered) == 8 and len({(x[1], x[2]) for x in remembered}) == 4
