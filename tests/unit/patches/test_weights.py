"""What of a worker's model is read for its fingerprint, also where a kernel keeps the weights for itself."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from vllm_weir.patches.model.parameters import BLOCK, weights_now

WIDTH = 2 * BLOCK + 7


class Packed(torch.nn.Module):
    """A linear module whose kernel has the matrix."""

    def __init__(self, matrix: torch.Tensor, gone: torch.nn.Parameter | None) -> None:
        super().__init__()
        self.register_parameter("weight", gone)
        self.bias = torch.nn.Parameter(torch.zeros(3))
        self.input_size, self.params_dtype = WIDTH, matrix.dtype
        self.quant_method = SimpleNamespace(apply=lambda layer, x, bias: x @ matrix.t())


def now(module: torch.nn.Module) -> object:
    return weights_now(SimpleNamespace(get_model=lambda: torch.nn.Sequential(module)))


@pytest.mark.parametrize("gone", [torch.nn.Parameter(torch.empty(0)), None], ids=["empty", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_column_of_a_packed_matrix_counts(gone, dtype):
    matrix = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = {now(Packed(matrix, gone))}
    assert now(Packed(matrix.clone(), gone)) in found
    for column in range(WIDTH):
        changed = matrix.clone()
        changed[:, column] = 0
        found.add(now(Packed(changed, gone)))
    swapped = matrix.clone()
    swapped[:, [3, 4]] = swapped[:, [4, 3]]
    found.add(now(Packed(swapped, gone)))
    assert len(found) == 2 + WIDTH


def test_what_is_no_weight_does_not_count():
    linear = torch.nn.Linear(4, 4)
    before = now(linear)
    linear.register_buffer("counter", torch.zeros(1), persistent=False)
    assert now(linear) == before
    linear.register_buffer("scale", torch.ones(1))
    assert now(linear) != before
    assert isinstance(now(torch.nn.LayerNorm(4, elementwise_affine=False)), str)


def test_weights_that_cannot_be_read_are_refused():
    experts = torch.nn.Module()
    experts.w13_weight, experts.quant_method = torch.nn.Parameter(torch.empty(0)), object()
    assert "0.w13_weight is in a form that cannot be read" in now(experts)["error"]
