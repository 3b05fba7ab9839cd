"""The first half of the demo: two networks on photographs, before and after ``flashdwc.convert``."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import flashdwc

from ..bench.case import LAYOUTS
from ..bench.friendly import UserError, os_error, require
from ..bench.layers import in_layout, record_layers
from ..bench.timers import Timing, compare
from ..convert import convert


@dataclass(frozen=True)
class LayerGain:
    name: str
    shape: tuple[int, ...]  # of its input, [N, C, H, W]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    backend: str
    reason: str
    stock_ms: float
    ours_ms: float

    @property
    def speedup(self) -> float:
        return self.stock_ms / self.ours_ms


@dataclass(frozen=True)
class Pair:
    stock: Timing
    ours: Timing

    @property
    def speedup(self) -> float:
        return self.stock.median / self.ours.median


@dataclass(frozen=True)
class NetworkGain:
    name: str
    parameters: int
    input_shape: tuple[int, ...]
    pairs: dict[tuple[str, str], Pair]  # by mode ("inference" or "training step") and memory layout
    layers: list[LayerGain]
    difference: float  # largest absolute difference of the outputs
    relative_difference: float  # the same over the largest output
    features: tuple[Tensor, Tensor] | None  # [N, C, H, W] of a stage before and after, on the CPU

    def speedup_over_best(self, mode: str) -> float:
        """The faster layout of one against the faster layout of the other."""
        pairs = [pair for (name, _), pair in self.pairs.items() if name == mode]
        return min(pair.stock.median for pair in pairs) / min(pair.ours.median for pair in pairs)


def load_photos(path: str | None) -> list[tuple[str, Any]]:
    """Names and PIL images: the file at ``path``, or the two photographs that scikit-learn ships."""
    image_module = require("PIL.Image")
    if path is None:
        samples = require("sklearn.datasets").load_sample_images()
        names = (Path(name).name for name in samples.filenames)
        return [(name, image_module.fromarray(pixels)) for name, pixels in zip(names, samples.images, strict=True)]
    try:
        with image_module.open(path) as image:
            return [(Path(path).name, image.convert("RGB"))]
    except image_module.UnidentifiedImageError as error:
        raise UserError(f"cannot read the image {path}: not a picture that Pillow knows") from error
    except OSError as error:
        if error.errno is None:  # Pillow's own, for a damaged file
            raise UserError(f"cannot read the image {path}: {error}") from error
        raise os_error("read the image", error) from error
    except (ValueError, SyntaxError, image_module.DecompressionBombError) as error:
        raise UserError(f"cannot read the image {path}: {error}") from error


def to_batch(
    photos: Sequence[tuple[str, Any]],
    longer_side: int,
) -> Tensor:  # [N, 3, H, W], normalised
    """Scales every photo to the first one's aspect ratio, with sides that are multiples of 32."""
    width, height = photos[0][1].size
    scale = longer_side / max(width, height)
    size = tuple(max(32, round(side * scale / 32) * 32) for side in (width, height))
    numpy = require("numpy")
    pixels = numpy.stack([numpy.asarray(image.resize(size), dtype="float32") for _, image in photos])
    batch = torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous() / 255
    return (batch - batch.mean((0, 2, 3), keepdim=True)) / (batch.std((0, 2, 3), keepdim=True) + 1e-5)


def replknet(quick: bool) -> nn.Module:
    """A narrow RepLKNet-31 built of PyTorch's own layers."""
    channels = (24, 48, 96, 192) if quick else (32, 64, 128, 256)
    torch.manual_seed(0)
    model = flashdwc.models.RepLKNet((31, 29, 27, 13), (1, 1, 2, 1), channels, num_classes=10, depthwise=nn.Conv2d)
    return model.eval()


def convnext() -> nn.Module:
    """timm's smallest ConvNeXt. Its layer scale is 1: at the usual 1e-6 the layers would hardly show in the output."""
    timm = require("timm")
    torch.manual_seed(0)
    return timm.create_model("convnext_atto", ls_init_value=1.0, num_classes=10).eval()


def measure_network(name: str, stock: nn.Module, batch: Tensor, *, seconds: float) -> NetworkGain:
    """Converts a copy of ``stock`` and compares outputs and times, of the whole and of each depthwise layer."""
    _calibrate(stock, batch)
    converted = copy.deepcopy(stock)
    report = convert(converted, batch)
    reports = {layer.name: layer for layer in report.layers}
    with torch.inference_mode():
        expected, result = stock(batch), converted(batch)
        difference = (result - expected).abs().max().item()
        features = _features(stock, batch), _features(converted, batch)
        layers = []
        ours = dict(converted.named_modules())
        for record in record_layers(stock, batch):
            pair = {"stock": _call(record.layer, record.input), "flashdwc": _call(ours[record.name], record.input)}
            timings = compare(pair, batch.device, seconds=seconds / 20, max_rounds=20)
            layers.append(
                LayerGain(
                    record.name,
                    tuple(record.input.shape),
                    record.layer.kernel_size,
                    record.layer.stride,
                    reports[record.name].backend,
                    reports[record.name].reason,
                    timings["stock"].median,
                    timings["flashdwc"].median,
                )
            )
    pairs = {
        (mode, layout): _compare_networks(stock, converted, batch, mode, layout, seconds / 4)
        for mode in ("inference", "training step")
        for layout in ("contiguous", "channels_last")
    }
    return NetworkGain(
        name,
        sum(p.numel() for p in stock.parameters()),
        tuple(batch.shape),
        pairs,
        layers,
        difference,
        difference / max(expected.abs().max().item(), 1e-30),
        None if features[0] is None or features[1] is None else (features[0], features[1]),
    )


def _compare_networks(
    stock: nn.Module, converted: nn.Module, batch: Tensor, mode: str, layout: str, seconds: float
) -> Pair:
    x = batch.contiguous(memory_format=LAYOUTS[layout])
    runs: dict[str, Any] = {}
    for side, model in (("stock", stock), ("ours", converted)):
        copied = in_layout(copy.deepcopy(model), layout)
        runs[side] = _inference(copied, x) if mode == "inference" else _training_step(copied, x)
        runs[side]()  # warm-up: compiles what there is to compile
    timings = compare(runs, batch.device, seconds=seconds, max_rounds=30)
    return Pair(timings["stock"], timings["ours"])


def _inference(model: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    return torch.inference_mode()(lambda: model(x))


def _training_step(model: nn.Module, x: Tensor) -> Callable[[], None]:
    """Forward and backward; the optimiser would take the same time on both sides."""
    model.train()

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(x).square().mean().backward()

    return step


def _call(module: nn.Module, x: Tensor) -> Any:
    module(x)
    return lambda: module(x)


@torch.no_grad()
def _calibrate(model: nn.Module, batch: Tensor) -> None:
    """Gives BatchNorm the statistics of the photographs, so that a network with random weights has lively features."""
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    if not norms:
        return
    for norm in norms:
        norm.momentum = 1.0
    model.train()
    model(batch)
    model.eval()


def _features(model: nn.Module, batch: Tensor) -> Tensor | None:
    if not isinstance(model, flashdwc.models.RepLKNet):
        return None
    return model.forward_features(batch)[0].float().cpu()


def false_colours(
    before: Tensor,  # [C, H, W]
    after: Tensor,  # [C, H, W]
) -> tuple[bytes, bytes, bytes]:
    """PNGs of two feature maps (three principal components of the first as red, green, blue) and of their difference.

    The difference is shown as a share of the largest value, white for 1e-6 and more, on black.
    """
    c, h, w = before.shape
    flat = before.reshape(c, -1)
    centre = flat.mean(1, keepdim=True)
    basis = torch.linalg.svd(flat - centre, full_matrices=False)[0][:, :3]
    projected = [(basis.T @ (features.reshape(c, -1) - centre)).reshape(3, h, w) for features in (before, after)]
    low = projected[0].flatten(1).quantile(0.01, dim=1)[:, None, None]
    high = projected[0].flatten(1).quantile(0.99, dim=1)[:, None, None]
    pictures = [((p - low) / (high - low).clamp_min(1e-12)).clamp(0, 1) for p in projected]
    error = (after - before).abs().amax(0, keepdim=True) / before.abs().max().clamp_min(1e-30)
    pictures.append((error / 1e-6).clamp(0, 1).expand(3, h, w))
    first, second, third = (_png(picture) for picture in pictures)
    return first, second, third


def _png(
    picture: Tensor,  # [3, H, W] in 0..1
) -> bytes:
    return encode(require("PIL.Image").fromarray((picture * 255).byte().permute(1, 2, 0).contiguous().numpy()), 480)


def encode(image: Any, width: int) -> bytes:
    """A PNG of at least the given width; small pictures keep their pixels visible."""
    resampling = require("PIL.Image").Resampling
    factor = width / image.width
    size = (width, round(image.height * factor))
    buffer = io.BytesIO()
    image.resize(size, resampling.NEAREST if factor > 1 else resampling.LANCZOS).save(
        buffer, format="PNG", optimize=True
    )
    return buffer.getvalue()
