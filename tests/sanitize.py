"""Every CUDA kernel on small awkward problems, for ``compute-sanitizer``, whose checks make the GPU tests take hours:

compute-sanitizer --tool memcheck --report-api-errors no python tests/sanitize.py      # likewise racecheck, initcheck
"""

from __future__ import annotations

import torch
from support import channels_last, preferring
from torch import Tensor

from flashdwc import depthwise_conv2d
from flashdwc.kernels.cuda import depthwise_images, depthwise_planar

# Input size, kernel, stride, padding (also left, right, top, bottom), dilation, multiplier, layout.
CASES = {
    "transposed": [
        ((2, 40, 29, 61), (7, 7), 1, 3, 1, 1, channels_last),
        ((2, 64, 21, 41), (3, 3), 1, 1, 1, 1, channels_last),
        ((1, 32, 18, 34), (7, 7), 1, 6, 2, 1, channels_last),
        ((3, 16, 14, 14), (5, 5), 1, 2, 1, 1, channels_last),
        ((1, 16, 30, 40), (13, 13), 1, 6, 1, 1, channels_last),
        ((1, 16, 20, 40), (31, 31), 1, 15, 1, 1, channels_last),
    ],
    "octets": [
        ((2, 64, 21, 41), (7, 7), 1, 3, 1, 1, channels_last),
        ((5, 96, 14, 14), (5, 5), 1, 2, 1, 1, channels_last),
        ((9, 64, 7, 7), (7, 7), 1, 3, 1, 1, channels_last),
        ((2, 64, 20, 33), (13, 13), 1, 6, 1, 1, channels_last),
        ((2, 64, 21, 41), (3, 3), 2, 1, 1, 1, channels_last),
    ],
    "warps": [
        ((2, 6, 21, 64), (7, 7), 1, 3, 1, 1, Tensor.contiguous),
        ((2, 6, 20, 28), (13, 13), 1, 6, 1, 1, Tensor.contiguous),
        ((2, 4, 34, 64), (31, 31), 1, 15, 1, 1, Tensor.contiguous),
        ((2, 6, 28, 56), (7, 7), 2, 3, 1, 1, Tensor.contiguous),
    ],
    "maps": [
        ((2, 16, 14, 14), (3, 3), 1, 1, 1, 1, Tensor.contiguous),
        ((5, 24, 7, 7), (7, 7), 1, 3, 1, 1, Tensor.contiguous),
        ((2, 12, 28, 28), (5, 5), 2, 2, 1, 1, Tensor.contiguous),
        ((2, 6, 56, 56), (3, 3), 1, 1, 1, 1, Tensor.contiguous),
        ((3, 8, 7, 7), (3, 3), 1, 3, 3, 1, Tensor.contiguous),
    ],
    "images": [
        ((19, 16, 7, 7), (7, 7), 1, 3, 1, 1, channels_last),
        ((97, 16, 7, 7), (7, 7), 1, 3, 1, 1, channels_last),
        ((17, 16, 14, 13), (27, 27), 1, 13, 1, 1, channels_last),
        ((19, 16, 7, 7), (7, 7), 1, 3, 1, 1, Tensor.contiguous),
        ((17, 8, 13, 14), (13, 13), 1, 6, 1, 1, Tensor.contiguous),
    ],
    "few": [
        ((2, 37, 9, 11), (3, 3), 1, 1, 1, 1, channels_last),
        ((2, 7, 9, 11), (5, 5), 2, 2, 1, 2, Tensor.contiguous),
    ],
    "none of these": [
        ((2, 37, 20, 21), (3, 3), 1, 1, 1, 1, channels_last),  # few taps
        ((2, 24, 15, 15), (5, 5), 2, 2, 1, 1, channels_last),
        ((3, 100, 7, 7), (7, 7), 1, 3, 1, 1, channels_last),  # tiles
        ((2, 12, 14, 14), (7, 7), 1, 3, 1, 2, channels_last),
        ((1, 16, 28, 28), (31, 31), 1, 15, 1, 1, channels_last),
        ((2, 16, 12, 16), (7, 7), 1, 3, 1, 1, Tensor.contiguous),
        ((1, 8, 28, 26), (13, 13), 2, 6, 1, 1, Tensor.contiguous),
        ((2, 33, 15, 15), (5, 5), 1, 2, 1, 1, Tensor.contiguous),  # planes
        ((1, 24, 1, 1000), (1, 4), 1, (3, 0, 0, 0), 1, 1, Tensor.contiguous),
    ],
}


def main() -> None:
    torch.manual_seed(0)
    depthwise_planar.ENOUGH_WRITES, depthwise_images.MULTIPROCESSORS = 0, 2  # for exchanged outputs and sets of warps
    for family, cases in CASES.items():
        with preferring(family):
            for case in cases:
                run(*case)
    torch.cuda.synchronize()
    print(f"{sum(map(len, CASES.values()))} problems")


def run(size, kernel, stride, padding, dilation, multiplier, layout) -> None:
    x = layout(torch.randn(size, device="cuda", dtype=torch.half)).requires_grad_()
    w, b = (torch.randn(size[1] * multiplier, *shape, device="cuda", dtype=torch.half) for shape in ((1, *kernel), ()))
    w.requires_grad_()
    y = depthwise_conv2d(x, w, b, stride, padding, dilation, impl="cuda")
    torch.autograd.grad(y, (x, w), torch.ones_like(y))
    with torch.no_grad():  # what is not finite goes another way
        x[0, 1, 0, 0], w[3, 0, 0, 0] = torch.inf, torch.nan
        depthwise_conv2d(x, w, b, stride, padding, dilation, impl="cuda")


if __name__ == "__main__":
    main()
