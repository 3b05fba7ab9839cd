"""What the CUDA kernels compute, on the CPU: each thread a fiber, under AddressSanitizer. Needs a C++ compiler, not a GPU."""

from __future__ import annotations

import subprocess
from itertools import product
from pathlib import Path

import emulation
import pytest
import torch
from emulation import emulated_gpu
from support import channels_last, check_non_finite_values, check_values, geometry
from torch import Tensor

from flashdwc.kernels.cuda import depthwise_direct, depthwise_images
from flashdwc.kernels.cuda.depthwise_problem import Axis
from flashdwc.ops.depthwise_operators import forward, input_grad, weight_grad

pytestmark = pytest.mark.skipif(emulation.COMPILER is None, reason="no C++ compiler")

# Kernels that forward, input gradient and weight gradient shall use; input size, kernel, stride, padding, dilation, multiplier, layout.
CASES = {
    "few taps": ("direct", (2, 37, 9, 11), (3, 3), 1, 1, 1, 1, channels_last),
    "few taps, strips in turns": ("direct", (3, 8, 9, 10), (3, 3), 1, 1, 1, 1, channels_last),
    "few taps, stride 2": ("direct", (2, 24, 9, 10), (3, 3), 2, 1, 1, 1, channels_last),
    "planes": ("planar", (2, 5, 7, 16), (3, 3), 1, 1, 1, 1, Tensor.contiguous),
    "planes of odd width": ("planar", (3, 5, 6, 7), (3, 3), 1, 1, 1, 1, Tensor.contiguous),
    "planes that exchange outputs": ("planar", (3, 5, 7, 7), (3, 3), 1, 1, 1, 1, Tensor.contiguous),
    "planes, dilated": ("planar", (2, 4, 10, 14), (3, 3), 1, 3, 3, 1, Tensor.contiguous),
    "planes, stride 2": ("planar", (2, 3, 15, 14), (5, 5), 2, 2, 1, 1, Tensor.contiguous),
    "planes, uneven padding": ("planar", (2, 3, 9, 20), (3, 3), 1, (1, 2, 0, 1), 1, 1, Tensor.contiguous),
    "narrow planes": ("planar", (3, 4, 7, 7), (7, 7), 1, 9, 3, 1, Tensor.contiguous),
    "narrow planes, stride 2": ("planar", (2, 20, 13, 14), (5, 5), 2, 2, 1, 1, Tensor.contiguous),
    "maps": ("maps", (3, 5, 14, 14), (3, 3), 1, 1, 1, 1, Tensor.contiguous),
    "maps of odd width": ("maps", (5, 16, 9, 9), (5, 5), 1, 2, 1, 1, Tensor.contiguous),
    "narrow maps": ("maps", (2, 40, 7, 7), (7, 7), 1, 3, 1, 1, Tensor.contiguous),
    "maps, stride 2, gradients of 28 columns": ("maps", (2, 6, 56, 55), (5, 5), 2, 2, 1, 1, Tensor.contiguous),
    "narrow maps, stride 2": ("maps", (2, 8, 13, 14), (5, 5), 2, 2, 1, 1, Tensor.contiguous),
    "maps, stride 2": ("maps", (2, 6, 27, 28), (3, 3), 2, (1, 1, 0, 1), 1, 1, Tensor.contiguous),
    "maps, dilated": ("maps", (2, 4, 10, 15), (3, 3), 1, 3, 3, 1, Tensor.contiguous),
    "maps, uneven padding": ("maps", (2, 4, 9, 12), (5, 3), 1, (1, 4, 0, 2), 1, 1, Tensor.contiguous),
    "maps without padding": ("maps", (2, 4, 9, 16), (3, 3), 1, 0, 1, 1, Tensor.contiguous),
    "a line": ("planar", (1, 3, 1, 77), (1, 4), 1, (3, 0, 0, 0), 1, 1, Tensor.contiguous),
    "tiles of a small map": ("conv", (3, 12, 7, 7), (7, 7), 1, 3, 1, 1, channels_last),
    "tiles of contiguous rows": ("conv", (1, 8, 9, 13), (7, 7), 1, 3, 1, 1, Tensor.contiguous),
    "tiles, stride 2": ("conv", (1, 8, 15, 14), (13, 13), 2, 6, 1, 1, channels_last),
    "tiles, multiplier": ("conv", (1, 4, 10, 10), (7, 7), 1, 3, 1, 2, channels_last),
    "taps that meet padding only": ("conv", (2, 8, 10, 10), (9, 9), 1, 12, 3, 1, channels_last),
    "taps that meet padding only, stride 2": (
        "conv",
        (1, 8, 5, 6),
        (9, 31),
        2,
        (20, 10, 4, 4),
        1,
        2,
        Tensor.contiguous,
    ),
    "filter rows in parts": ("conv", (1, 8, 12, 12), (31, 31), 1, 15, 1, 1, channels_last),
    "a long filter over a line": ("conv", (1, 8, 1, 300), (1, 31), 1, (15, 15, 0, 0), 1, 1, Tensor.contiguous),
    "few outputs": ("few", (2, 10, 9, 11), (3, 3), 1, 1, 1, 1, channels_last),
    "few outputs, stride 2": ("few", (2, 5, 9, 11), (5, 4), 2, (2, 1, 0, 3), 1, 1, Tensor.contiguous),
    "few outputs, multiplier, dilated": ("few", (2, 3, 9, 11), (3, 3), 1, 2, 2, 2, channels_last),
    "images at once": ("images", (19, 16, 7, 7), (7, 7), 1, 3, 1, 1, channels_last),
    "images at once, contiguous": ("images", (19, 16, 7, 7), (7, 7), 1, 3, 1, 1, Tensor.contiguous),
    "images at once, contiguous of 14 columns": ("images", (33, 8, 13, 14), (13, 13), 1, 6, 1, 1, Tensor.contiguous),
    "images at once, contiguous, uneven": ("images", (18, 8, 9, 16), (3, 5), 1, (1, 7, 2, 0), 2, 1, Tensor.contiguous),
    "images at once, sets of warps": ("images", (97, 16, 3, 7), (3, 7), 1, (3, 3, 1, 1), 1, 1, channels_last),
    "images at once, a filter larger than they": ("images", (3, 8, 14, 13), (27, 27), 1, 13, 1, 1, channels_last),
    "images at once, uneven padding, dilated": ("images", (17, 8, 9, 16), (3, 5), 1, (1, 7, 2, 0), 2, 1, channels_last),
    "transposed": ("transposed", (2, 40, 13, 61), (7, 7), 1, 3, 1, 1, channels_last),
    "transposed, narrow maps": ("transposed", (3, 16, 14, 14), (5, 5), 1, 2, 1, 1, channels_last),
    "transposed, uneven padding": ("transposed", (1, 32, 20, 40), (7, 5), 1, (1, 4, 0, 6), 1, 1, channels_last),
    "transposed, dilated": ("transposed", (1, 24, 19, 33), (3, 3), 1, 2, 2, 1, channels_last),
    "transposed, many filter rows": ("transposed", (1, 8, 20, 36), (31, 31), 1, 15, 1, 1, channels_last),
    "transposed, between images": ("transposed", (3, 8, 24, 30), (17, 9), 1, (4, 4, 8, 8), 1, 1, channels_last),
    "transposed, a tall filter": ("transposed", (2, 16, 36, 20), (17, 3), 1, (1, 0, 6, 9), 1, 1, channels_last),
    "tiles, a tall filter, multiplier": ("conv", (1, 6, 11, 9), (19, 5), 1, (1, 3, 8, 10), 1, 2, channels_last),
    "tiles, a tall filter, stride 2": ("conv", (1, 8, 20, 9), (14, 3), 2, (1, 1, 9, 4), 1, 1, channels_last),
    "images at once, a tall filter": ("images", (17, 8, 9, 7), (13, 3), 1, (0, 2, 7, 5), 1, 1, channels_last),
    "octets": ("octets", (2, 96, 9, 61), (7, 7), 1, 3, 1, 1, channels_last),
    "octets of narrow maps": ("octets", (5, 64, 7, 7), (5, 5), 1, 2, 1, 1, channels_last),
    "octets, uneven padding": ("octets", (2, 64, 14, 15), (3, 6), 1, (1, 4, 0, 2), 1, 1, channels_last),
    "octets, a tall filter": ("octets", (2, 64, 20, 15), (13, 2), 1, (1, 0, 6, 6), 1, 1, channels_last),
    "octets, dilated": ("octets", (2, 64, 10, 29), (3, 3), 1, 3, 3, 1, channels_last),
    "octets, stride 2": ("octets", (3, 128, 15, 30), (5, 5), 2, 2, 1, 1, channels_last),
    "warps": ("warps", (2, 5, 20, 64), (7, 7), 1, 3, 1, 1, Tensor.contiguous),
    "warps of narrow maps": ("warps", (5, 3, 14, 16), (5, 5), 1, 2, 1, 1, Tensor.contiguous),
    "warps of 14 columns": ("warps", (3, 5, 14, 14), (7, 7), 1, 3, 1, 1, Tensor.contiguous),
    "warps, uneven padding": ("warps", (1, 4, 19, 28), (5, 4), 1, (1, 2, 0, 4), 1, 1, Tensor.contiguous),
    "warps, dilated": ("warps", (2, 3, 20, 40), (5, 5), 1, 6, 3, 1, Tensor.contiguous),
    "warps, stride 2": ("warps", (2, 3, 24, 56), (7, 7), 2, 3, 1, 1, Tensor.contiguous),
    "warps, stride 2 to 14 columns": ("warps", (2, 3, 28, 28), (3, 3), 2, 1, 1, 1, Tensor.contiguous),
    "warps, many filter rows": ("warps", (1, 3, 34, 64), (31, 31), 1, 15, 1, 1, Tensor.contiguous),
}


def launch(operator, *args) -> tuple[Tensor, list[str]]:
    """The result of the operator's CUDA backend, and the kernels that ran."""
    operands = args[: operator.tensors]
    cuda = next(backend for backend in operator.backends if backend.name == "cuda")
    with emulated_gpu(*(t for t in operands if t is not None)) as launcher:
        result = cuda.plan(*args, "auto", "auto")(*operands)
    return result, [name for name, _ in launcher.launched]


@pytest.mark.parametrize("case", CASES)
def test_kernels_compute_the_definition(case, prefer, request, monkeypatch):
    if "exchange" in case:
        request.getfixturevalue("many_writes")
    if "in turns" in case:
        monkeypatch.setattr(depthwise_direct, "BLOCKS_PER_SM", 0)
    if "sets" in case:
        monkeypatch.setattr(depthwise_images, "MULTIPROCESSORS", 2)
    family, (images, channels, *size), kernel, stride, padding, dilation, multiplier, layout = CASES[case]
    prefer(family)
    dtype = torch.bfloat16 if "planes" in case or "odd" in case or "parts" in case or "three" in case else torch.float16
    x = layout(torch.randn(images, channels, *size).to(dtype))
    w, b = torch.randn(channels * multiplier, 1, *kernel).to(dtype), torch.randn(channels * multiplier).to(dtype)
    geometry_ = geometry(x, w, (stride, stride), padding, (dilation, dilation))

    y, kernels = launch(forward, x, w, b, *geometry_)
    assert kernels == [f"depthwise_{family}"]
    g = layout(torch.randn(y.shape).to(dtype))
    dx, kernels = launch(input_grad, g, w, tuple(x.shape), *geometry_)
    if stride == 1 or family in ("direct", "maps", "conv", "few", "images"):
        assert kernels == [f"depthwise_{family}"]
    dw, kernels = launch(weight_grad, g, x, tuple(w.shape), w.stride(), *geometry_)
    if family in ("direct", "maps", "planar") or (
        family in ("images", "octets", "transposed", "warps") and stride == 1
    ):
        assert kernels[0] == f"depthwise_{family}_weight_grad"
    check_values(x, w, b, g, y, (dx, dw), *geometry_)

    x[0, 1, 0, 0], x[-1, 2, -1, -1], w[2, 0, 0, -1] = torch.inf, torch.nan, -torch.inf
    y, _ = launch(forward, x, w, b, *geometry_)
    check_non_finite_values(x, w, b, y, *geometry_)


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("dilation", [1, 2, 3])
def test_taps_that_meet_padding_only_are_left_out(stride, dilation):
    for size, k, before, after in product((1, 2, 5, 8), (1, 2, 3, 7), range(0, 12, 3), range(0, 12, 5)):
        out = (size + before + after - dilation * (k - 1) - 1) // stride + 1
        if out < 1:
            continue
        forward = Axis(size, out, k, stride, dilation, before)
        for axis in (forward, forward.transposed()):
            meet = [t for t in range(k) if any(meets(axis, o, t) for o in range(axis.out))]
            used = axis.reached
            assert used.p >= 0 or axis.p < 0
            assert set(meet) <= set(range(used.skipped, used.skipped + used.k)) <= set(range(k))
            assert used.p == axis.p - used.skipped * dilation and used.whole == k
            if meet and axis.p - meet[0] * dilation >= 0 and stride == 1:
                assert used.k == meet[-1] - meet[0] + 1


def meets(axis: Axis, output: int, tap: int) -> bool:
    position = output * axis.s + tap * axis.d - axis.p
    return position % axis.u == 0 and 0 <= position // axis.u < axis.size


# --- the emulator itself ---------------------------------------------------------------------------------------------

NEIGHBOURS = """
#include "cuda.h"
struct Params { const int* in; int* out; };
void neighbours(const Params p) {
  __shared__ int values[64];
  values[threadIdx.x] = p.in[threadIdx.x];
  BARRIER;
  p.out[threadIdx.x + SHIFT] = values[63 - threadIdx.x];
}
#define KERNEL neighbours
#include "main.inc"
"""


def run_neighbours(folder: Path, barrier: str, shift: int) -> subprocess.CompletedProcess:
    """Reverses 64 numbers by way of shared memory; stdout is not used, the file holds the result."""
    source, program, data = folder / "neighbours.cpp", folder / "neighbours", folder / "data"
    source.write_text(f"#define BARRIER {barrier}\n#define SHIFT {shift}\n{NEIGHBOURS}")
    command = [emulation.COMPILER, *emulation.FLAGS.split(), f"-I{emulation.HERE}", source, "-o", program]
    subprocess.run(command, check=True, capture_output=True)
    numbers = [2, 256, *[0] * 32, 256, *[0] * 32, 2, 0, 0, 2, 0, 0, 0, 1, 1, 0, 1, 64, 0]
    content = torch.tensor(numbers, dtype=torch.int64)
    content[2:34] = torch.arange(64, dtype=torch.int32).view(torch.int64)
    data.write_bytes(content.numpy().tobytes())
    return subprocess.run([program, data], capture_output=True, text=True)


def reversed_numbers(folder: Path) -> bool:
    out = torch.frombuffer(bytearray((folder / "data").read_bytes()), dtype=torch.int32)[64:]
    return torch.equal(out, torch.arange(64, dtype=torch.int32).flip(0))


def test_a_missing_barrier_shows(tmp_path):
    assert run_neighbours(tmp_path, "__syncthreads()", 0).returncode == 0
    assert reversed_numbers(tmp_path)
    assert run_neighbours(tmp_path, "", 0).returncode == 0
    assert not reversed_numbers(tmp_path)


def test_an_access_outside_shows(tmp_path):
    result = run_neighbours(tmp_path, "__syncthreads()", 1)
    assert result.returncode != 0
    assert "heap-buffer-overflow" in result.stderr
