"""The rotation: orthogonal, symmetric, its own inverse, and score-preserving."""

import pytest
import torch

from fused_ops.hadamard import hadamard_matrix, rotate_rows


@pytest.mark.parametrize("n", [1, 2, 32, 64, 128, 256])
def test_orthogonal_and_symmetric(n):
    r = hadamard_matrix(n, dtype=torch.float64)
    assert torch.equal(r, r.t())
    torch.testing.assert_close(r @ r, torch.eye(n, dtype=torch.float64))
    assert torch.unique(r.abs()).numel() == 1  # every entry ±n^-1/2: an outlier spreads over all channels alike


def test_scores_are_kept_and_rotation_undoes_itself():
    wq, wk, x, y = torch.randn(192, 80), torch.randn(192, 80), torch.randn(5, 80), torch.randn(7, 80)
    torch.testing.assert_close(rotate_rows(rotate_rows(wq, 3), 3), wq, rtol=0, atol=1e-5)
    for h in range(3):
        rows = slice(64 * h, 64 * h + 64)
        plain = (x @ wq[rows].t()) @ (y @ wk[rows].t()).t()
        turned = (x @ rotate_rows(wq, 3)[rows].t()) @ (y @ rotate_rows(wk, 3)[rows].t()).t()
        torch.testing.assert_close(turned, plain, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("n", [0, 3, 96])
def test_refuses_other_sizes(n):
    with pytest.raises(ValueError, match=f"n is {n}; a Hadamard rotation needs a power of two"):
        hadamard_matrix(n)
