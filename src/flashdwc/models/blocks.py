"""What the large-kernel networks share: convolution + BatchNorm, its exact merging, stochastic depth."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DropPath(nn.Module):
    """Drops the whole residual branch of a sample with probability ``rate`` while training, and scales the others up.

    Source: "Deep Networks with Stochastic Depth", https://arxiv.org/abs/1603.09382
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        if not 0 <= rate < 1:
            raise ValueError(f"rate: expected a probability in [0, 1), got {rate}")
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if self.rate == 0 or not self.training:
            return x
        keep = x.new_empty(x.shape[0], *[1] * (x.dim() - 1)).bernoulli_(1 - self.rate)
        return x * keep.div_(1 - self.rate)

    def extra_repr(self) -> str:
        return f"rate={self.rate:.3f}"


def drop_rates(highest: float, layers: Sequence[int]) -> list[list[float]]:
    """Rates that grow linearly with depth from 0 to ``highest``, for each layer of each stage."""
    depth = sum(layers)
    rates = iter([highest * i / max(depth - 1, 1) for i in range(depth)])
    return [[next(rates) for _ in range(length)] for length in layers]


def conv_norm(conv: nn.Module, *, activation: bool = False) -> nn.Sequential:
    """``conv``, BatchNorm over its output channels, and ReLU if ``activation``."""
    stack = nn.Sequential()
    stack.add_module("conv", conv)
    stack.add_module("bn", nn.BatchNorm2d(conv.out_channels))  # type: ignore[arg-type]
    if activation:
        stack.add_module("nonlinear", nn.ReLU())
    return stack


def centred(
    cls: type[nn.Conv2d],
    channels: int,
    kernel: int | tuple[int, int],
    stride: int = 1,
    bias: bool = False,
) -> nn.Conv2d:
    """A depthwise layer of class ``cls`` that is padded so that its window is centred."""
    height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
    padding = (height // 2, width // 2)
    return cls(channels, channels, (height, width), stride, padding, groups=channels, bias=bias)


def check_kernels(large: int, small: int | None) -> None:
    """Raises ``ValueError`` unless a ``small`` window can lie in the middle of a ``large`` one."""
    if large < 1 or large % 2 == 0:
        raise ValueError(f"kernel size: expected a positive odd number, got {large}")
    if small is not None and (small < 1 or small % 2 == 0 or small > large):
        raise ValueError(f"small kernel: expected a positive odd number up to the kernel size {large}, got {small}")


@torch.no_grad()
def merge(branches: Sequence[nn.Sequential]) -> nn.Conv2d:
    """One convolution with bias that equals the sum of ``conv_norm`` branches in evaluation mode.

    The layer of the first branch, whose kernel must be the largest, takes the sum in place of its own parameters. The sums
    are formed in float64, so nothing is lost but the last rounding.
    """
    conv: nn.Conv2d = branches[0].conv  # type: ignore[assignment]
    height, width = conv.kernel_size
    kernel = bias = torch.zeros((), dtype=torch.float64, device=conv.weight.device)
    for branch in branches:
        branch_kernel, branch_bias = _fused(branch.conv, branch.bn)  # type: ignore[arg-type]
        above, left = (
            (height - branch_kernel.shape[2]) // 2,
            (width - branch_kernel.shape[3]) // 2,
        )
        kernel = kernel + F.pad(branch_kernel, (left, left, above, above))
        bias = bias + branch_bias
    trained = conv.weight.requires_grad
    conv.bias = nn.Parameter(bias.to(conv.weight.dtype), requires_grad=trained)
    conv.weight = nn.Parameter(kernel.to(conv.weight), requires_grad=trained)
    return conv


def _fused(conv: nn.Conv2d, bn: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """Kernel and bias, in float64, of a convolution without bias and the BatchNorm after it."""
    assert bn.running_mean is not None and bn.running_var is not None
    scale = bn.weight.double() / (bn.running_var.double() + bn.eps).sqrt()
    return conv.weight.double() * scale.reshape(-1, 1, 1, 1), bn.bias.double() - bn.running_mean.double() * scale
