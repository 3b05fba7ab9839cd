"""One depthwise layer to look at: its shape, the notation users type for it, and what it must cost at least."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch

from .friendly import UserError

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
LAYOUTS = {"channels_last": torch.channels_last, "contiguous": torch.contiguous_format}
DIRECTIONS = ("forward", "input_grad", "weight_grad", "train")  # train: forward and both gradients through autograd


@dataclass(frozen=True)
class Case:
    name: str  # where the layer comes from
    n: int
    c: int
    h: int
    w: int
    kernel: tuple[int, int]
    stride: int = 1
    dilation: int = 1
    multiplier: int = 1
    padding: tuple[int, int, int, int] | None = None  # (left, right, top, bottom); None: centred
    sliced: bool = False  # the input is a view into a larger tensor

    @property
    def pads(self) -> tuple[int, int, int, int]:  # (left, right, top, bottom)
        if self.padding is not None:
            return self.padding
        vertical, horizontal = (self.dilation * (k - 1) // 2 for k in self.kernel)
        return horizontal, horizontal, vertical, vertical

    @property
    def input_shape(self) -> tuple[int, int, int, int]:
        return self.n, self.c, self.h, self.w

    @property
    def weight_shape(self) -> tuple[int, int, int, int]:
        return self.c * self.multiplier, 1, *self.kernel

    @property
    def output_shape(self) -> tuple[int, int, int, int]:
        left, right, top, bottom = self.pads
        height = (self.h + top + bottom - self.dilation * (self.kernel[0] - 1) - 1) // self.stride + 1
        width = (self.w + left + right - self.dilation * (self.kernel[1] - 1) - 1) // self.stride + 1
        return self.n, self.c * self.multiplier, height, width

    @property
    def spec(self) -> str:
        """The shape in the notation of ``parse``, without dtype and layout."""
        kh, kw = self.kernel
        flat = self.h == 1 and kh == 1
        parts = [f"{self.n}x{self.c}x{self.w}" if flat else f"{self.n}x{self.c}x{self.h}x{self.w}"]
        parts.append(f"k{kw}" if flat or kh == kw else f"k{kh}x{kw}")
        for letter, value in (("s", self.stride), ("d", self.dilation), ("m", self.multiplier)):
            if value != 1:
                parts.append(f"{letter}{value}")
        return ":".join(parts)

    def with_batch(self, n: int) -> Case:
        return replace(self, n=n)

    def flops(self, direction: str) -> int:
        """Multiplications and additions, those with the zeros of the padding included."""
        once = 2 * _product(self.output_shape) * _product(self.kernel)
        return 3 * once if direction == "train" else once

    def bytes(self, direction: str, dtype: torch.dtype) -> int:
        """What has to cross the memory bus at least: every operand read once, every result written once."""
        x, w, y = (_product(shape) for shape in (self.input_shape, self.weight_shape, self.output_shape))
        return (x + w + y) * dtype.itemsize * (3 if direction == "train" else 1)

    def memory(self, dtype: torch.dtype) -> int:
        """Bytes that a measurement in both layouts holds at once: inputs, gradients, results and a work copy."""
        x, y = _product(self.input_shape), _product(self.output_shape)
        return int(dtype.itemsize * 1.1 * (5 * x + 5 * y))


def parse(text: str) -> tuple[Case, str, str]:
    """Reads a shape as ``flashdwc explain --help`` describes it: the case and the names of its dtype and its layout.

    ``UserError`` names the part that is wrong.
    """
    sizes, *options = text.lower().split(":")
    if not is_shape(text):
        raise UserError(f"shape {text!r}: expected NxCxHxW or NxCxL first, got {sizes!r}", code=2)
    numbers = [int(size) for size in sizes.split("x")]
    n, c, h, w = numbers if len(numbers) == 4 else (*numbers[:2], 1, numbers[2])
    kernel, dtype, layout, padding = None, "fp32", "channels_last", None
    single = {"s": 1, "d": 1, "m": 1}
    given: set[str] = set()
    for option in options:
        kind = "dtype" if option in DTYPES else "layout" if option in ("nhwc", "nchw") else option[:1]
        if kind in given:
            raise UserError(f"shape {text!r}: {option!r} says again what an option before it says", code=2)
        given.add(kind)
        if option in DTYPES:
            dtype = option
        elif option in ("nhwc", "nchw"):
            layout = "channels_last" if option == "nhwc" else "contiguous"
        elif match := re.fullmatch(r"k(\d+)(?:x(\d+))?", option):
            kernel = int(match[1]), int(match[2] or match[1])
        elif match := re.fullmatch(r"([sdmp])(\d+)", option):
            if match[1] == "p":
                padding = int(match[2])
            else:
                single[match[1]] = int(match[2])
        else:
            raise UserError(f"shape {text!r}: expected k, s, d, m, p, a dtype or a layout, got {option!r}", code=2)
    kernel = kernel or (7, 7)
    if len(numbers) == 3:
        kernel = 1, kernel[1]
    if min(n, c, h, w, *kernel, *single.values()) < 1:
        raise UserError(f"shape {text!r}: every number but the padding must be at least 1", code=2)
    pads = None if padding is None else (padding, padding, *((0, 0) if len(numbers) == 3 else (padding, padding)))
    case = Case("", n, c, h, w, kernel, single["s"], single["d"], single["m"], padding=pads)
    if min(case.output_shape) < 1:
        raise UserError(f"shape {text!r}: the kernel is larger than the padded input", code=2)
    return case, dtype, layout


def is_shape(text: str) -> bool:
    """Tells a shape from a model's name."""
    return re.fullmatch(r"\d+(x\d+){2,3}", text.lower().split(":")[0]) is not None


def _product(numbers: tuple[int, ...]) -> int:
    result = 1
    for number in numbers:
        result *= number
    return result
