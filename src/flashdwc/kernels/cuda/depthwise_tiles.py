"""Tiles of the depthwise kernels: which part of the problem a block takes, and how it lies in shared memory.

The numbers become macros of ``depthwise_conv.cu`` and ``depthwise_weight_grad.cu``, whose names for them they bear.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import ceil

from .depthwise_problem import MULTIPROCESSORS, Axis, Problem

MAX_WARPS = 16


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def power_of_two(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


def _conflicts(blocks: int, groups: int, images: int, step: int, group_pitch: int, image_pitch: int) -> int:
    """Worst number of the 8 rows of a matrix that fall into the same 16 bytes of the banks; pitches in 16-byte units."""
    worst = 0
    for half in (0, 8):
        slots = [0] * 8
        for m in range(half, half + 8):
            at = m % blocks * step + m // blocks % groups * group_pitch + m // (blocks * groups) * image_pitch
            slots[at % 8] += 1
        worst = max(worst, *slots)
    return worst


@lru_cache(maxsize=4096)
def pitches(
    blocks: int, groups: int, images: int, step: int, group_rows: int, columns: int, rows: int
) -> tuple[int, int]:
    """Pitch of rows and of images, in elements, that keeps ldmatrix free of bank conflicts where padding can."""

    def cost(pads: tuple[int, int]) -> float:
        row, image = columns // 8 + pads[0], rows * (columns // 8 + pads[0]) + pads[1]
        return _conflicts(blocks, groups, images, step, group_rows * row, image) + 2 * image * images / (
            rows * columns * images / 8
        )

    row_pad, image_pad = min(product(range(4 if groups > 1 else 1), range(8 if images > 1 else 1)), key=cost)
    row = columns + 8 * row_pad
    return row, rows * row + 8 * image_pad


@dataclass(frozen=True)
class Tile:
    """Blocks x groups x images = 16, the M of one mma."""

    channels: int
    blocks: int
    groups: int
    images: int
    rows: int  # output rows of a group
    sets: int  # of groups, one warp each
    chunk: int  # filter rows in shared memory, or in registers for the weight gradient
    warps: int
    per_sm: int  # blocks that shall fit a multiprocessor

    @property
    def out_rows(self) -> int:
        return self.sets * self.groups * self.rows


def lead_and_shift(problem: Problem, window: int, multiple: int) -> tuple[int, int]:
    """(columns to load before the window, columns by which the loader shifts), for rows that are aligned in memory.

    The product with zeros replaces the shift where it costs no further step of the window.
    """
    shift = 0 if problem.inner.nhwc else -problem.horizontal.first % problem.inner.vector
    free = round_up(window + shift, multiple) == round_up(window, multiple)
    return (shift, 0) if free else (0, shift)


def _conv_window(problem: Problem) -> int:
    h = problem.horizontal
    return round_up(h.span(h.k, 8 * h.u), 8)


def _weight_grad_window(problem: Problem) -> int:
    h = problem.horizontal
    return round_up(h.span(h.k, 8), 16)


def conv_macros(problem: Problem, tile: Tile) -> tuple[dict[str, int], int]:
    """Macros of ``depthwise_conv.cu`` and the shared memory in bytes."""
    v, h = problem.vertical, problem.horizontal
    window = _conv_window(problem)
    lead, shift = lead_and_shift(problem, h.span(h.k, 8 * h.u), 8)
    columns = (tile.blocks - 1) * 8 * h.s + window
    group_step = tile.rows // v.u * v.s
    rows = (tile.sets * tile.groups - 1) * group_step + v.span(v.k, tile.rows)
    row_pitch, image_pitch = pitches(tile.blocks, tile.groups, tile.images, h.s, group_step, columns, rows)
    out_image = tile.out_rows * tile.blocks * 8 * h.u
    out_image += 8 if tile.images > 1 else 0
    plane = max(tile.images * image_pitch, tile.images * out_image)
    octet = octet_pitch(tile.channels, plane)
    front = (8 * h.u - 1) * h.s + lead * h.u
    filter_row = round_up(front + (window - 1) * h.u + h.phase + 1, 2)
    filter_pitch = 2 * filter_row + 2 if h.u == 1 and h.s % 2 else filter_row
    shared = 2 * (tile.channels // 8 * octet + tile.channels * min(tile.chunk, v.k) * filter_pitch)
    return {
        **_common_macros(problem, tile), "LEAD": lead, "SHIFT": shift,
        "UH": v.u, "UW": h.u, "PHASE_H": v.phase, "PHASE_W": h.phase, "FIRST_H": v.first, "FIRST_W": h.first,
        "SETS": tile.sets, "CHUNK": tile.chunk, "SUM": problem.sum,
        "ROW_PITCH": row_pitch, "IMAGE_PITCH": image_pitch, "PLANE_PITCH": plane, "OCTET_PITCH": octet,
        "OUT_IMAGE_PITCH": out_image,
    }, shared  # fmt: skip


def weight_grad_macros(problem: Problem, tile: Tile) -> tuple[dict[str, int], int]:
    """Macros of ``depthwise_weight_grad.cu`` and the shared memory in bytes."""
    v, h = problem.vertical, problem.horizontal
    window = _weight_grad_window(problem)
    lead, shift = lead_and_shift(problem, h.span(h.k, 8), 16)
    columns = (tile.blocks - 1) * 8 * h.s + window
    group_step = tile.rows * v.s
    rows = (tile.groups - 1) * group_step + v.span(tile.chunk, tile.rows)
    row_pitch, image_pitch = pitches(tile.blocks, tile.groups, tile.images, h.s, group_step, columns, rows)
    out_columns = tile.blocks * 8
    _, out_image = pitches(tile.blocks, 1, tile.images * tile.groups, 1, 0, out_columns, tile.rows * tile.groups)
    plane, out_plane = tile.images * image_pitch, tile.images * out_image
    octet, out_octet = octet_pitch(tile.channels, plane), octet_pitch(tile.channels, out_plane)
    shared = max(2 * tile.channels // 8 * (octet + out_octet), tile.warps * window * 8 * 4)
    return {
        **_common_macros(problem, tile), "LEAD": lead, "SHIFT": shift,
        "HEIGHT": tile.chunk,
        "ROW_PITCH": row_pitch, "IMAGE_PITCH": image_pitch, "PLANE_PITCH": plane, "OCTET_PITCH": octet,
        "OUT_IMAGE_PITCH": out_image, "OUT_PLANE_PITCH": out_plane, "OUT_OCTET_PITCH": out_octet,
    }, shared  # fmt: skip


def octet_pitch(channels: int, plane: int) -> int:
    """Spreads the octets that neighbouring threads of the loader write over the banks."""
    return round_up(8 * plane, 64) + (64 // (channels // 8) if channels > 8 else 0)


def _common_macros(problem: Problem, tile: Tile) -> dict[str, int]:
    v, h = problem.vertical, problem.horizontal
    return {
        "IN_NHWC": problem.inner.nhwc, "IN_VEC": problem.inner.vector,
        "OUT_NHWC": problem.outer.nhwc, "OUT_VEC": problem.outer.vector,
        "LINEAR": problem.linear, "KH": v.k, "KW": h.k, "SH": v.s, "SW": h.s, "DH": v.d, "DW": h.d, "PAD_H": v.p, "PAD_W": h.p,
        "SPREAD": problem.spread, "CHANNELS": tile.channels, "BLOCKS": tile.blocks, "GROUPS": tile.groups,
        "IMAGES": tile.images, "ROWS": tile.rows, "THREADS": 32 * tile.warps, "BLOCKS_PER_SM": tile.per_sm,
    }  # fmt: skip


def _block_shapes(problem: Problem, rows: int, narrow: int) -> Iterator[tuple[int, int, int]]:
    """Blocks, groups, images: as wide as the map (``narrow`` times halved), then as tall, then over images."""
    across = min(8, power_of_two(-(-problem.horizontal.out // (8 * problem.horizontal.u)))) >> narrow
    if across:
        down = min(16 // across, power_of_two(-(-problem.vertical.out // rows)))
        yield across, down, 16 // (across * down)


@dataclass(frozen=True)
class CostModel:
    """Relative time of a launch; the coefficients were fitted to some twelve hundred tiles measured on an H200."""

    narrow: float  # 8 channels (16 bytes) of a pixel in a request, against 16
    wide: float  # 32 channels
    store: float  # writing an element, against reading one
    product: float  # one m16n8k16 product of a channel, in elements read
    matrix: float  # fetching its operands
    enough_warps: float  # that hide the lesser of traffic and arithmetic behind the greater
    exposed: float
    hidden: float
    block: float  # starting a block, in elements read
    rounding: float  # of the number of waves of blocks upwards
    sharing: float  # a block's time on a multiprocessor of its own, beyond its share among residents
    multiprocessors: int = MULTIPROCESSORS

    def __call__(
        self,
        tile: Tile,
        resident: int,
        nhwc: bool,
        blocks: int,
        loaded: int,
        stored: int,
        products: float,
        matrices: float,
    ) -> float:
        width = {8: self.narrow, 16: 1.0, 32: self.wide}[tile.channels] if nhwc else 1.0
        traffic = loaded * width + self.store * stored
        arithmetic = self.product * products + self.matrix * matrices
        overlap = self.exposed - self.hidden * min(1.0, resident * tile.warps / self.enough_warps)
        time = max(traffic, arithmetic) + overlap * min(traffic, arithmetic) + self.block
        resident = min(resident, ceil(blocks / self.multiprocessors))  # few blocks share no multiprocessor
        waves = max(1.0, blocks / (self.multiprocessors * resident))
        waves = self.rounding * ceil(waves) + (1 - self.rounding) * waves
        return tile.channels * (resident + self.sharing) * waves * time


CONV_COST = CostModel(1.63, 0.67, 0.31, 31.9, 72.3, 27.6, 2.73, 1.56, 437.0, 0.57, 0.26)
WEIGHT_GRAD_COST = CostModel(1.32, 1.0, 1.50, 90.4, 0.02, 20.4, 4.82, 1.25, 2926.0, 0.57, 0.1)


def leading_steps(halo: int, rows: int) -> int:
    """Steps of so many rows that only load, until ``halo`` rows above the first outputs are there."""
    return -(-max(0, halo) // rows)


def grid(problem: Problem, tile: Tile) -> tuple[int, int, int, int]:
    """All blocks, tiles across, tiles down, blocks of channels."""
    across = -(-problem.horizontal.out // (tile.blocks * 8 * problem.horizontal.u))
    down = -(-problem.vertical.out // tile.out_rows)
    channel_blocks = -(-problem.channels // tile.channels)
    return channel_blocks * across * down * -(-problem.images // tile.images), across, down, channel_blocks


def _resident(shared: int, shared_limit: int, warps: int, registers: int) -> int:
    """Blocks that fit a multiprocessor at once, up to three; 0 where not even one has the registers."""
    by_shared = (shared_limit + 1024) // (shared + 1024)  # the driver takes 1 KiB of each
    by_registers = 65536 // (32 * warps * round_up(registers, 8)) if registers <= 235 else 0  # estimates err by some 20
    return min(by_shared, by_registers, 3)


@lru_cache(maxsize=4096)
def conv_tile(problem: Problem, shared_limit: int) -> Tile | None:
    """The tile for a forward convolution or an input gradient; None where none fits the shared memory."""
    return next(iter(conv_tiles(problem, shared_limit)), None)


def conv_tiles(problem: Problem, shared_limit: int) -> list[Tile]:
    """The cheapest first."""
    return _by_cost(problem, shared_limit, _conv_candidates, conv_macros, _conv_registers, _conv_cost)


def _by_cost(
    problem: Problem, shared_limit: int, candidates: Callable, macros: Callable, registers: Callable, cost: Callable
) -> list[Tile]:
    """Tiles of full width, or of the greatest width that fits."""
    for narrow in range(4):
        fitting = []
        for tile in candidates(problem, narrow):
            shared = macros(problem, tile)[1]
            resident = _resident(shared, shared_limit, tile.warps, registers(problem, tile))
            if shared <= shared_limit and resident:
                fitting.append((cost(problem, tile, resident), replace(tile, per_sm=resident)))
        if fitting:
            return [tile for _, tile in sorted(fitting, key=lambda pair: pair[0])]
    return []


def _conv_candidates(problem: Problem, narrow: int) -> Iterator[Tile]:
    v, h = problem.vertical, problem.horizontal
    chunk = _chunk(v)
    for channels, rows, sets in product((32, 16, 8), range(v.u, 16 // h.u + 1, v.u), (1, 2)):
        for blocks, groups, images in _block_shapes(problem, rows, narrow):
            stays = v.k > chunk or problem.sum > 1 or sets > 1
            for warps in {channels * sets} if stays else {8, min(16, channels)}:
                if warps <= MAX_WARPS:
                    yield Tile(channels, blocks, groups, images, rows, sets, chunk, warps, 1)


def _chunk(v: Axis) -> int:
    """Filter rows to hold at once: all of a small filter, else some ten, as the code is unrolled over them: the compiler's
    time grows with their number, the fetching of operands with that of the chunks."""
    if v.k <= 16:
        return round_up(v.k, v.u)
    return round_up(-(-v.k // -(-v.k // 10)), v.u)


def _conv_registers(problem: Problem, tile: Tile) -> int:
    u, looped = problem.horizontal.u, problem.vertical.k > tile.chunk
    addressing = (70 if tile.chunk >= 8 else 66) if looped else 30 if tile.chunk <= 12 else 34
    addressing += (0 if problem.inner.nhwc else 24) + (24 if u > 2 else 0)
    addressing += 36 if problem.inner.vector < 8 and _conv_window(problem) > 32 else 0
    strided = problem.horizontal.s > 1 or problem.spread * problem.sum > 1
    least = 104 if u > 2 else 96 if strided else 80
    return max(least, u * (4 * tile.rows + 2 * min(tile.rows, tile.chunk)) + addressing)


def _conv_cost(problem: Problem, tile: Tile, resident: int) -> float:
    v, h = problem.vertical, problem.horizontal
    window = _conv_window(problem)
    rows = (tile.sets * tile.groups - 1) * (tile.rows // v.u * v.s) + v.span(v.k, tile.rows)
    return CONV_COST(
        tile,
        resident,
        problem.inner.nhwc,
        grid(problem, tile)[0] * problem.sum,
        loaded=tile.images * rows * ((tile.blocks - 1) * 8 * h.s + window),
        stored=tile.images * tile.out_rows * tile.blocks * 8 * h.u,
        products=window / 16 * h.u * tile.rows * v.k * tile.sets,
        matrices=window / 16 * v.span(v.k, tile.rows) * tile.sets * (1 + 0.5 * h.u),
    )


@lru_cache(maxsize=4096)
def weight_grad_tile(problem: Problem, shared_limit: int) -> Tile | None:
    """The tile for a weight gradient; None where none fits the shared memory or the registers."""
    return next(iter(weight_grad_tiles(problem, shared_limit)), None)


def weight_grad_tiles(problem: Problem, shared_limit: int) -> list[Tile]:
    """The cheapest first."""
    registers = _weight_grad_registers
    return _by_cost(problem, shared_limit, _weight_grad_candidates, weight_grad_macros, registers, _weight_grad_cost)


def _weight_grad_candidates(problem: Problem, narrow: int) -> Iterator[Tile]:
    for channels, rows, height in product((16, 8), range(1, 17), range(1, min(problem.vertical.k, 16) + 1)):
        for (blocks, groups, images), warps in product(_block_shapes(problem, rows, narrow), {8, min(16, channels)}):
            yield Tile(channels, blocks, groups, images, rows, 1, height, warps, 1)


def _weight_grad_registers(problem: Problem, tile: Tile) -> int:
    m16 = _weight_grad_window(problem) // 16
    sums = tile.channels // tile.warps * tile.chunk * 4 * m16
    addressing = 78 + 14 * max(0, m16 - 2)
    addressing += (8 if problem.inner.vector < 8 else 0) + (16 if problem.horizontal.s > 1 else 0)
    rows_at_hand = min(tile.rows, (tile.chunk - 1) * problem.vertical.d + 1)  # of the output gradient
    return sums * 5 // 4 + 2 * rows_at_hand + addressing


def _weight_grad_cost(problem: Problem, tile: Tile, resident: int) -> float:
    v, h = problem.vertical, problem.horizontal
    window = _weight_grad_window(problem)
    rows = (tile.groups - 1) * tile.rows * v.s + v.span(tile.chunk, tile.rows)
    return WEIGHT_GRAD_COST(
        tile,
        resident,
        problem.inner.nhwc,
        grid(problem, tile)[0] * -(-v.k // tile.chunk),
        loaded=tile.images * rows * ((tile.blocks - 1) * 8 * h.s + window),
        stored=tile.images * tile.out_rows * tile.blocks * 8,
        products=window // 16 * tile.rows * tile.chunk,
        matrices=window // 16 * v.span(tile.chunk, tile.rows) + tile.rows / 2,
    )
