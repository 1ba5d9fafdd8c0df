"""MXTensor as an object: moved, saved, traced, transposed, and refused when misused."""

import copy
import io
import pickle

import pytest
import torch

from lp_fa4.mx import MXTensor, cat, check_offsets, quantize_mx
from tests.conftest import offsets_of


def jagged():
    offsets = offsets_of([33, 0, 70])
    return quantize_mx(torch.randn(103, 64), (32, 32), offsets)


def same(a: MXTensor, b: MXTensor) -> bool:
    offsets = (a.offsets is None) == (b.offsets is None) and (a.offsets is None or torch.equal(a.offsets, b.offsets))
    return offsets and torch.equal(a.codes, b.codes) and torch.equal(a.scale_bytes, b.scale_bytes) and a.block == b.block


def test_copies():
    q = jagged()
    buffer = io.BytesIO()
    torch.save(q, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(q), q.to("cpu"), q.clone(), torch.load(buffer, weights_only=True), pickle.loads(pickle.dumps(q))):
        assert same(q, other)
        assert other.payload.dtype == q.payload.dtype and other.scale.dtype == q.scale.dtype
    with pytest.raises(TypeError, match="dequantize"):
        q.to(torch.bfloat16)


def test_cat_of_sequences_equals_quantizing_them_together():
    lengths = ([33, 0, 70], [1], [], [128, 5])
    parts = [torch.randn(sum(n), 64) for n in lengths]
    joined = cat([quantize_mx(x, offsets=offsets_of(n)) for x, n in zip(parts, lengths, strict=True)])
    assert same(joined, quantize_mx(torch.cat(parts), offsets=offsets_of([n for part in lengths for n in part])))


def test_transpose_is_free_and_equals_quantizing_the_transpose():
    x = torch.randn(2, 70, 100) * 2.0 ** torch.randint(-9, 9, (2, 70, 100))
    q = quantize_mx(x)
    assert q.transpose().payload.data_ptr() == q.payload.data_ptr()
    t = quantize_mx(x.transpose(1, 2))
    assert torch.equal(q.transpose().codes, t.codes) and torch.equal(q.transpose().scale_bytes, t.scale_bytes)
    with pytest.raises(ValueError, match=r"only dense .* in \(32, 32\) blocks"):
        jagged().transpose()


def test_strided_views_give_the_bytes_of_a_copy():
    fused = torch.randn(103, 2 * 192)
    offsets = offsets_of([33, 0, 70])
    for view in (fused[:, 192:], fused[:, ::2], torch.randn(192, 103).t()):
        assert same(quantize_mx(view, offsets=offsets), quantize_mx(view.clone(), offsets=offsets))


def test_compile_with_changing_lengths():
    def f(x, offsets):
        q = quantize_mx(x, (32, 32), offsets)
        return q, q.dequantize()

    compiled = torch.compile(f, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in ([33, 70], [5, 0, 40, 1], [0, 0], [1]):
        x, offsets = torch.randn(sum(lengths), 64), offsets_of(lengths)
        got, want = compiled(x, offsets), f(x, offsets)
        assert same(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize(
    ("offsets", "error", "words"),
    [
        ([1, 5], ValueError, r"offsets\[0\] is 1; it must be 0"),
        ([0, 7, 5], ValueError, r"offsets\[2\] is 5, less than offsets\[1\] = 7"),
        ([0, 12], ValueError, r"offsets\[-1\] is 12; it must be at most the number of values, 10"),
        (
            torch.tensor([0.0, 1.0]),
            TypeError,
            r"offsets has dtype torch.float32; allowed are torch.int32 and torch.int64",
        ),
        (torch.zeros(2, 2, dtype=torch.int32), ValueError, r"offsets has shape \[2, 2\]"),
        (torch.zeros(2, dtype=torch.int32, device="meta"), ValueError, "offsets is on meta but the values are on cpu"),
    ],
)
def test_bad_offsets_are_named(offsets, error, words):
    offsets = torch.tensor(offsets) if isinstance(offsets, list) else offsets
    with pytest.raises(error, match=words):
        check_offsets(offsets, 10, device=torch.device("cpu"), validate=True)
    with pytest.raises(error, match=words):
        quantize_mx(torch.randn(10, 32), offsets=offsets, validate=True)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: quantize_mx(torch.ones(4, 4, dtype=torch.int32)), "x has dtype torch.int32"),
        (lambda: quantize_mx(torch.ones(4)), r"x has shape \[4\]"),
        (lambda: quantize_mx(torch.ones(4, 96), (32, 64)), r"block is \(32, 64\) but the last axis has 96"),
        (lambda: quantize_mx(torch.ones(4, 96), (16, 32)), r"block is \(16, 32\); allowed"),
        (lambda: quantize_mx(torch.ones(4, 96), (0, 32)), "exponent is None"),
        (lambda: quantize_mx(torch.ones(4, 96), exponent=200), "exponent is 200; allowed is -127 to 127"),
        (lambda: quantize_mx(torch.ones(4, 96), exponent=1.5), "exponent is 1.5, a float; it must be an int"),
        (lambda: quantize_mx(torch.ones(4, 96), exponent=torch.ones(2)), "exponent has dtype torch.float32"),
        (lambda: quantize_mx(torch.ones(4, 96), exponent=torch.tensor([1, 2])), r"exponent has shape \[2\]; it must be \[\] or \[3\]"),
        (lambda: quantize_mx(torch.ones(4, 96), token_dim=-1), "token_dim is -1"),
        (lambda: quantize_mx(torch.ones(4, 5, 32), offsets=offsets_of([5])), "must be axis 0"),
        (lambda: jagged().reshape_heads(5), "heads is 5"),
        (
            lambda: MXTensor.from_bytes(torch.zeros(4, 32, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.uint8), (32, 32)),
            "scale has shape",
        ),
    ],
)
def test_misuse_is_refused_in_words(call, words):
    with pytest.raises((TypeError, ValueError), match=words):
        call()


def test_text_form():
    """What it is, not what it holds."""
    assert repr(quantize_mx(torch.randn(70, 64))) == "MXTensor(shape=[70, 64], block=(32, 32), token_dim=0, device=cpu)"
    assert "sequences=2" in repr(quantize_mx(torch.randn(70, 64), offsets=offsets_of([30, 40])))
