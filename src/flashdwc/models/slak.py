"""SLaK: "More ConvNets in the 2020s: Scaling up Kernels Beyond 51x51 using Sparsity", https://arxiv.org/abs/2207.03620.

A ConvNeXt whose 7x7 depthwise layer is a sum of two strips and a square: Kx5, 5xK and 5x5, each with its BatchNorm. The widths
are ConvNeXt's times 1.3, which the paper pays for by training with sparse weights; the weights here are dense, and a mask on
them is the trainer's matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashdwc.nn import DepthwiseConv2d

from .blocks import DropPath, centred, check_kernels, conv_norm, drop_rates, merge


class LargeKernel(nn.Module):
    """Sum of depthwise convolutions of one input, each with its BatchNorm: ``[N, C, H, W]`` to the same shape.

    ``decomposed``: ``kernel_size`` x ``small_kernel``, ``small_kernel`` x ``kernel_size`` and, if it is smaller,
    ``small_kernel`` squared. Otherwise ``kernel_size`` squared and ``small_kernel`` squared. Raises ``ValueError`` for even
    kernels and a small one above the large.
    """

    def __init__(
        self,
        channels: int,
        kernel_size: int,
        small_kernel: int,
        *,
        decomposed: bool = True,
        depthwise: type[nn.Conv2d] = DepthwiseConv2d,
    ) -> None:
        super().__init__()
        check_kernels(kernel_size, small_kernel)
        strips = [(kernel_size, small_kernel), (small_kernel, kernel_size)]
        kernels = strips if decomposed else [(kernel_size, kernel_size)]
        self.large = nn.ModuleList(conv_norm(centred(depthwise, channels, kernel)) for kernel in kernels)
        has_square = small_kernel < kernel_size
        self.small = conv_norm(centred(depthwise, channels, small_kernel)) if has_square else None

    def forward(
        self,
        x: Tensor,  # [N, C, H, W]
    ) -> Tensor:  # [N, C, H, W]
        branches = [*self.large] if self.small is None else [*self.large, self.small]
        y = branches[0](x)
        for branch in branches[1:]:
            y = y + branch(x)
        return y

    def merge_kernel(self) -> None:
        """Folds the BatchNorms, and the square into the first large kernel; what is merged stays as it is."""
        for index, branch in enumerate(self.large):
            if isinstance(branch, nn.Sequential):
                square = [] if index or self.small is None else [self.small]
                self.large[index] = merge([branch, *square])
        self.small = None


class LayerNorm2d(nn.LayerNorm):
    """LayerNorm over the channels of ``[N, C, H, W]``."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Block(nn.Module):
    """``x + drop_path(gamma * linear(gelu(linear(layer_norm(large_kernel(x))))))``."""

    def __init__(
        self,
        channels: int,
        drop_path: float,
        layer_scale: float,
        large_kernel: LargeKernel,
    ) -> None:
        super().__init__()
        self.large_kernel = large_kernel
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.pwconv1 = nn.Linear(channels, 4 * channels)
        self.pwconv2 = nn.Linear(4 * channels, channels)
        self.gamma = nn.Parameter(torch.full((channels,), layer_scale)) if layer_scale > 0 else None
        self.drop_path = DropPath(drop_path)

    def forward(
        self,
        x: Tensor,  # [N, C, H, W]
    ) -> Tensor:  # [N, C, H, W]
        y = self.norm(self.large_kernel(x).permute(0, 2, 3, 1))
        y = self.pwconv2(F.gelu(self.pwconv1(y)))
        if self.gamma is not None:
            y = y * self.gamma
        return x + self.drop_path(y.permute(0, 3, 1, 2))


class SLaK(nn.Module):
    """SLaK of any width and depth: ``[N, in_chans, H, W]`` to logits ``[N, num_classes]``.

    ``kernel_size`` holds one number for each stage and, last, the small one. ``dims`` are multiplied by ``width_factor``.
    ``decomposed=False`` gives the dense variant: full KxK kernels in place of the strips. ``num_classes=None`` gives the
    pooled features ``[N, dims[-1]]``, and ``out_indices`` a list of the feature maps of these stages instead. ``depthwise``
    is the class of the depthwise layers; pass ``nn.Conv2d`` for a network of PyTorch's own.

    Raises ``ValueError`` if the stages do not match, or for kernels that are even or do not nest.
    """

    def __init__(
        self,
        in_chans: int = 3,
        num_classes: int | None = 1000,
        depths: Sequence[int] = (3, 3, 9, 3),
        dims: Sequence[int] = (96, 192, 384, 768),
        drop_path_rate: float = 0.0,
        layer_scale_init_value: float = 1e-6,
        head_init_scale: float = 1.0,
        kernel_size: Sequence[int] = (51, 49, 47, 13, 5),
        width_factor: float = 1.3,
        *,
        decomposed: bool = True,
        out_indices: Sequence[int] | None = None,
        depthwise: type[nn.Conv2d] = DepthwiseConv2d,
    ) -> None:
        super().__init__()
        if not len(kernel_size) - 1 == len(depths) == len(dims) > 0:
            raise ValueError(
                "kernel_size, depths, dims: expected one number for each stage, and one more in kernel_size, got "
                f"{len(kernel_size)}, {len(depths)} and {len(dims)}"
            )
        if out_indices is not None and not all(0 <= i < len(depths) for i in out_indices):
            raise ValueError(f"out_indices: expected numbers from 0 to {len(depths) - 1}, got {list(out_indices)}")
        self.out_indices = None if out_indices is None else tuple(out_indices)
        widths = [int(dim * width_factor) for dim in dims]
        *large_kernels, small_kernel = kernel_size

        stem = nn.Sequential(nn.Conv2d(in_chans, widths[0], 4, 4), LayerNorm2d(widths[0], eps=1e-6))
        self.downsample_layers = nn.ModuleList([stem])
        for narrow, wide in pairwise(widths):
            down = nn.Sequential(LayerNorm2d(narrow, eps=1e-6), nn.Conv2d(narrow, wide, 2, 2))
            self.downsample_layers.append(down)
        self.stages = nn.ModuleList()
        for kernel, width, rates in zip(large_kernels, widths, drop_rates(drop_path_rate, depths)):
            blocks = []
            for rate in rates:
                large = LargeKernel(
                    width,
                    kernel,
                    small_kernel,
                    decomposed=decomposed,
                    depthwise=depthwise,
                )
                blocks.append(Block(width, rate, layer_scale_init_value, large))
            self.stages.append(nn.Sequential(*blocks))
        if self.out_indices is None:
            self.norm = nn.LayerNorm(widths[-1], eps=1e-6)
            self.head = nn.Linear(widths[-1], num_classes) if num_classes else nn.Identity()
        self.apply(_initialise)
        if self.out_indices is None and isinstance(self.head, nn.Linear):
            self.head.weight.data.mul_(head_init_scale)
            self.head.bias.data.mul_(head_init_scale)

    def forward_features(self, x: Tensor) -> list[Tensor]:
        """The output of every stage: ``[N, width, H / 2**(i+2), W / 2**(i+2)]``."""
        features = []
        for downsample, stage in zip(self.downsample_layers, self.stages):
            x = stage(downsample(x))
            features.append(x)
        return features

    def forward(
        self,
        x: Tensor,  # [N, in_chans, H, W]
    ) -> Tensor | list[Tensor]:
        features = self.forward_features(x)
        if self.out_indices is not None:
            return [features[i] for i in self.out_indices]
        return self.head(self.norm(features[-1].mean((2, 3))))

    def structural_reparam(self) -> None:
        """Merges squares and BatchNorms into the large kernels, in place; evaluation gives the same output."""
        for module in list(self.modules()):
            if isinstance(module, LargeKernel):
                module.merge_kernel()


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Conv2d, nn.Linear)):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def slak_tiny(num_classes: int | None = 1000, **options: Any) -> SLaK:
    """SLaK-T, 51 million parameters (30 million of them kept in the paper); ``options`` are those of :class:`SLaK`."""
    return SLaK(
        num_classes=num_classes,
        depths=(3, 3, 9, 3),
        dims=(96, 192, 384, 768),
        **options,
    )


def slak_small(num_classes: int | None = 1000, **options: Any) -> SLaK:
    """SLaK-S, 91 million parameters (55 million of them kept in the paper); ``options`` are those of :class:`SLaK`."""
    return SLaK(
        num_classes=num_classes,
        depths=(3, 3, 27, 3),
        dims=(96, 192, 384, 768),
        **options,
    )


def slak_base(num_classes: int | None = 1000, **options: Any) -> SLaK:
    """SLaK-B, 158 million parameters (95 million of them kept in the paper); ``options`` are those of :class:`SLaK`."""
    return SLaK(
        num_classes=num_classes,
        depths=(3, 3, 27, 3),
        dims=(128, 256, 512, 1024),
        **options,
    )


# the names in the authors' code
SLaK_tiny, SLaK_small, SLaK_base = slak_tiny, slak_small, slak_base
