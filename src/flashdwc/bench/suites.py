"""The registry of benchmark cases: which layers each suite measures, and where their shapes come from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .case import Case

GRADIENTS = ("forward", "input_grad", "weight_grad")


@dataclass(frozen=True)
class Suite:
    name: str
    title: str
    cases: tuple[Case, ...]
    directions: tuple[str, ...] = GRADIENTS

    def with_batches(self, batches: Iterable[int]) -> tuple[Case, ...]:
        """Every layer of the suite at the given batch sizes in place of its own."""
        layers = dict.fromkeys(case.with_batch(1) for case in self.cases)
        return tuple(layer.with_batch(n) for layer in layers for n in batches)


def _square(name: str, n: int, c: int, size: int, kernel: int, stride: int = 1, dilation: int = 1) -> Case:
    return Case(name, n, c, size, size, (kernel, kernel), stride, dilation)


def _paper() -> tuple[Case, ...]:
    maps = ((128, 128), (64, 256), (32, 1024))  # size, channels
    kernels = (3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 31, 51)
    return tuple(_square(f"{size}² x {c}, K={k}", 128, c, size, k) for size, c in maps for k in kernels)


def _thcunn() -> tuple[Case, ...]:
    layers = (  # channels, size, kernel, stride
        (32, 112, 1, 1), (64, 112, 3, 2), (128, 56, 3, 1), (128, 56, 3, 2), (256, 28, 3, 1), (256, 28, 3, 2),
        (512, 14, 3, 1), (512, 14, 3, 2), (1024, 7, 3, 2),
    )  # fmt: skip
    return tuple(_square("MobileNet", n, c, size, k, s) for c, size, k, s in layers for n in (1, 64, 128))


def _mobile() -> tuple[Case, ...]:
    networks = {  # channels, size, kernel, stride
        "MobileNetV2": (
            (32, 112, 3, 1), (96, 112, 3, 2), (144, 56, 3, 1), (144, 56, 3, 2), (192, 28, 3, 1), (192, 28, 3, 2),
            (384, 14, 3, 1), (576, 14, 3, 1), (576, 14, 3, 2), (960, 7, 3, 1),
        ),
        "EfficientNet-B0": (
            (144, 56, 5, 2), (240, 28, 5, 1), (240, 28, 3, 2), (480, 14, 5, 1), (672, 14, 5, 1), (672, 14, 5, 2),
            (1152, 7, 5, 1),
        ),
        "MobileNetV3-L": ((72, 56, 5, 2), (120, 28, 5, 1), (672, 14, 5, 2), (960, 7, 5, 1)),
    }  # fmt: skip
    return tuple(
        _square(name, n, c, size, k, s)
        for name, layers in networks.items()
        for c, size, k, s in layers
        for n in (1, 8, 128)
    )


_STAGE_SIZES = (56, 28, 14, 7)  # of a network on a 224 x 224 image


def _models() -> tuple[Case, ...]:
    layers: list[Case] = []

    def stages(name: str, channels: tuple[int, ...], kernels: Iterable[tuple[int, int]], dilation: int = 1) -> None:
        for stage, (c, size, kernel) in enumerate(zip(channels, _STAGE_SIZES, kernels, strict=True), 1):
            layers.append(Case(f"{name} stage {stage}", 1, c, size, size, kernel, dilation=dilation))

    def same(kernel: int) -> list[tuple[int, int]]:
        return [(kernel, kernel)] * 4

    base = (128, 256, 512, 1024)
    stages("ConvNeXt-T", (96, 192, 384, 768), same(7))
    stages("ConvNeXt-B", base, same(7))
    stages("RepLKNet-31B", base, [(k, k) for k in (31, 29, 27, 13)])
    stages("RepLKNet-31B small branch", base, same(5))
    long_sides = (51, 49, 47, 13)
    slak = (124, 249, 499, 998)
    stages("SLaK-T tall", slak, [(k, 5) for k in long_sides])
    stages("SLaK-T wide", slak, [(5, k) for k in long_sides])
    stages("SLaK-T small branch", slak, same(5))
    for kernel, dilation in ((13, 1), (5, 1), (7, 2), (3, 3), (3, 4), (3, 5)):
        stages(f"UniRepLKNet-S {kernel}x{kernel} d{dilation}", (96, 192, 384, 768), same(kernel), dilation)
    for kernel_shape in ((3, 3), (1, 11), (11, 1)):
        stages("InceptionNeXt-T slice", (12, 24, 48, 96), [kernel_shape] * 4)
    moga = (64, 128, 320, 512)  # the first branch sees all channels, the dilated ones 3/8 and 4/8 of them
    stages("MogaNet-S 5x5 d1", moga, same(5))
    stages("MogaNet-S 5x5 d2", tuple(c * 3 // 8 for c in moga), same(5), 2)
    stages("MogaNet-S 7x7 d3", tuple(c * 4 // 8 for c in moga), same(7), 3)
    layers.append(_square("ConvMixer-1536/20", 1, 1536, 32, 9))
    layers.append(_square("ConvMixer-768/32", 1, 768, 32, 7))
    at_batches = tuple(layer.with_batch(n) for layer in layers for n in (1, 8, 64, 128, 256))
    return (*at_batches, _square("RepLKNet microbenchmark", 64, 384, 32, 31))


def _conv1d() -> tuple[Case, ...]:
    def causal(n: int, c: int, length: int, kernel: int) -> Case:
        return Case("causal", n, c, 1, length, (1, kernel), padding=(kernel - 1, 0, 0, 0))

    return (
        causal(4, 4128, 4096, 4),
        causal(1, 12288, 16384, 4),
        Case("centred", 16, 2048, 1, 4096, (1, 5)),
        Case("Conformer", 16, 512, 1, 2000, (1, 31)),
    )


def _stress() -> tuple[Case, ...]:
    return (
        _square("12 channels", 8, 12, 56, 7),
        _square("249 channels", 8, 249, 28, 7),
        _square("499 channels", 8, 499, 14, 13),
        _square("kernel larger than the map", 8, 768, 7, 13),
        Case("width 200", 8, 96, 56, 200, (7, 7)),
        Case("odd sizes", 5, 33, 37, 41, (5, 5)),
        Case("odd sizes, stride 2", 5, 33, 37, 41, (5, 5), stride=2),
        Case("sliced view", 8, 96, 54, 55, (7, 7), sliced=True),
        Case("more than 2^31 elements", 130, 256, 256, 256, (7, 7)),
    )


SUITES = {
    suite.name: suite
    for suite in (
        Suite("paper", "Layers of the Flash-DWC paper", _paper()),
        Suite("thcunn", "MobileNet layers, forward and backward", _thcunn(), ("train",)),
        Suite("models", "Layers of large-kernel networks on 224 x 224 images", _models()),
        Suite("mobile", "Layers of mobile networks", _mobile()),
        Suite("conv1d", "One-dimensional layers of sequence models", _conv1d()),
        Suite("stress", "Awkward shapes", _stress()),
    )
}
