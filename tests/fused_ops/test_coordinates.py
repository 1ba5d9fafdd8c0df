"""``balanced_coordinates`` by its definition, on the CPU: no score changes, and the choice is what the formula says."""

import pytest
import torch

from fused_ops import balanced_coordinates
from fused_ops.hadamard import hadamard_matrix


def problem(rows=40, heads=2, width=32, columns=48):
    generator = torch.Generator().manual_seed(0)
    q, w = torch.randn(rows, heads, width, generator=generator), torch.randn(heads * width, columns, generator=generator)
    return q, w, torch.rand(columns, generator=generator) + 0.5


def noise(q, k, head):
    """``sum_i var(q_i) var(k_i)`` of a head's queries and keys."""
    return (q[:, head].square().mean(dim=0) * k[:, head].square().mean(dim=0)).sum()


@pytest.mark.parametrize("rotate", [False, True])
def test_queries_undo_keys(rotate):
    keys, queries = balanced_coordinates(*problem(), rotate=rotate)
    one = torch.eye(32)
    assert (keys.transpose(1, 2) @ queries - one).abs().max() < 2e-5
    turned = (hadamard_matrix(32) if rotate else one) @ keys
    torch.testing.assert_close(turned, turned.transpose(1, 2), rtol=0, atol=1e-6)  # A is symmetric
    assert torch.linalg.eigvalsh(turned).min() > 0.3


def test_less_noise_where_spectra_differ():
    q, w, gain = problem(width=64, rows=200)
    q[..., :32] *= 4
    w.unflatten(0, (2, 2, 32))[:, 1] *= 4
    k = (torch.randn(500, 48) * gain @ w.t()).unflatten(1, (2, 64))
    keys, queries = balanced_coordinates(q, w, gain)
    mine = (torch.einsum("qhd,hed->qhe", q, queries), torch.einsum("khd,hed->khe", k, keys))
    turn = hadamard_matrix(64)
    for head in range(2):
        assert noise(*mine, head) < 0.8 * noise(q @ turn, k @ turn, head)


@pytest.mark.parametrize("value", [1e30, torch.inf, torch.nan])
def test_plain_where_a_covariance_is_no_number(value):
    """Of that head; and the other is what it was."""
    q, w, gain = problem()
    want = balanced_coordinates(q, w, gain)
    q[3, 0, 1] = value
    for found, before in zip(balanced_coordinates(q, w, gain), want, strict=True):
        torch.testing.assert_close(found[0], hadamard_matrix(32), rtol=0, atol=1e-7)
        assert torch.equal(found[1], before[1])


def test_nothing_to_balance():
    q, w, gain = problem()
    for matrices in balanced_coordinates(torch.zeros_like(q), torch.zeros_like(w), gain):
        torch.testing.assert_close(matrices, hadamard_matrix(32).expand(2, 32, 32), rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(q=torch.zeros(4, 64)), r"q has shape \[4, 64\]"),
        (dict(q=torch.zeros(0, 2, 32)), r"q has shape \[0, 2, 32\]"),
        (dict(w=torch.zeros(60, 48)), r"w is \[60, 48\]"),
        (dict(gain=torch.zeros(47)), r"gain \[47\]"),
        (dict(q=torch.zeros(4, 2, 24), w=torch.zeros(48, 48)), "rotate is True but q has 24 channels"),
        (dict(backend="sm90"), "backend='sm90' cannot serve balanced_coordinates"),
    ],
)
def test_refusals(change, message):
    q, w, gain = problem()
    with pytest.raises(ValueError, match=message):
        balanced_coordinates(**{**dict(q=q, w=w, gain=gain), **change})
