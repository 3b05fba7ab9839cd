"""The second half of the demo: one network trained twice from the same seed, on PyTorch's layers and on flashdwc's."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..bench.friendly import require
from ..convert import convert

SIDE, KERNEL, BATCH = 16, 13, 64


@dataclass
class Trained:
    """What one of the two trainings left."""

    losses: list[float] = field(default_factory=list)  # of every step
    step_ms: list[float] = field(default_factory=list)
    accuracy: float = 0.0  # on digits that were held back

    @property
    def median_step_ms(self) -> float:
        return statistics.median(self.step_ms)


@dataclass(frozen=True)
class Digits:
    stock: Trained
    ours: Trained
    epochs: int
    train_images: int
    test_images: int
    samples: Tensor  # [8, SIDE, SIDE], some test images
    labels: list[int]
    predictions: list[int]  # flashdwc's

    @property
    def speedup(self) -> float:
        return self.stock.median_step_ms / self.ours.median_step_ms

    @property
    def largest_loss_difference(self) -> float:
        return max(abs(a - b) for a, b in zip(self.stock.losses, self.ours.losses, strict=True))


class LargeKernelBlock(nn.Module):
    """``x + mlp(bn(depthwise(x)))``."""

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, kernel, padding=kernel // 2, groups=channels, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.mlp = nn.Sequential(nn.Conv2d(channels, 2 * channels, 1), nn.GELU(), nn.Conv2d(2 * channels, channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(self.depthwise(x)))


def network(width: int) -> nn.Module:
    """PyTorch layers only: ``[N, 1, SIDE, SIDE]`` to logits ``[N, 10]``."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.GELU(),
        LargeKernelBlock(width, KERNEL),
        LargeKernelBlock(width, KERNEL),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(16 * width, 10),
    )


def load() -> tuple[Tensor, Tensor]:
    """scikit-learn's 1797 handwritten digits, scaled up: images [1797, 1, SIDE, SIDE] in -1..1 and labels."""
    digits = require("sklearn.datasets").load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
    return F.interpolate(images, size=(SIDE, SIDE), mode="bilinear"), torch.tensor(digits.target)


def total_steps(epochs: int) -> int:
    return epochs * (_train_count(1797) // BATCH)


def train_both(epochs: int, width: int, device: torch.device, on_step: Callable[[], None] = lambda: None) -> Digits:
    """Trains the two networks in lockstep: the same batches, the order of the two alternating for fair times."""
    generator = torch.Generator().manual_seed(0)
    images, labels = load()
    order = torch.randperm(len(images), generator=generator)
    images, labels = images[order].to(device), labels[order].to(device)
    count = _train_count(len(images))
    torch.manual_seed(0)
    stock = network(width).to(device)
    ours = copy.deepcopy(stock)
    convert(ours)
    results = {"stock": Trained(), "ours": Trained()}
    trainers = {
        "stock": _Trainer(stock, results["stock"], total_steps(epochs)),
        "ours": _Trainer(ours, results["ours"], total_steps(epochs)),
    }
    step = 0
    for _ in range(epochs):
        batches = torch.randperm(count, generator=generator)[: count // BATCH * BATCH].view(-1, BATCH)
        for indices in batches.to(device):
            for name in sorted(trainers, reverse=step % 2 == 1):
                trainers[name].step(images[indices], labels[indices])
            step += 1
            on_step()
    for trainer in trainers.values():
        trainer.test(images[count:], labels[count:])
    with torch.inference_mode():
        predictions = ours(images[count : count + 8]).argmax(1).tolist()
    return Digits(
        results["stock"],
        results["ours"],
        epochs,
        count,
        len(images) - count,
        images[count : count + 8, 0].cpu(),
        labels[count : count + 8].tolist(),
        predictions,
    )


class _Trainer:
    def __init__(self, model: nn.Module, result: Trained, steps: int) -> None:
        self.model, self.result = model, result
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.02)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=4e-3, total_steps=steps)

    def step(self, images: Tensor, labels: Tensor) -> None:
        _wait(images.device)
        start = time.perf_counter()
        loss = F.cross_entropy(self.model(images), labels)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        _wait(images.device)
        self.result.step_ms.append((time.perf_counter() - start) * 1e3)
        self.schedule.step()
        self.result.losses.append(loss.item())

    @torch.inference_mode()
    def test(self, images: Tensor, labels: Tensor) -> None:
        self.model.eval()
        self.result.accuracy = (self.model(images).argmax(1) == labels).float().mean().item()


def _train_count(images: int) -> int:
    return images * 4 // 5


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
