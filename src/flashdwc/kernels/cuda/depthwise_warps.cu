// Depthwise convolution, forward or input gradient of stride 1, 16 bit, contiguous: on tensor cores, each warp on its own.
//
// The product is that of row_products.cuh. Rows are copied as they are, asynchronously, LEAD columns before the window, where memory is
// aligned. Outputs go to memory from the registers of the mma.
//
// A warp has a part of all steps, in the order channel, image, strip, row. A strip is COLUMNS columns of an image; a step down it gives
// STEP_ROWS rows, GROUPS groups of ROWS. Its input is a ring of slots of so many rows in shared memory, which the warp fills for itself,
// STAGES steps ahead. It keeps T of its channel in registers. No warp waits for another.
//
// 0 * inf in T makes NaN of an output that never meets the inf: a step's outputs that are not finite are computed again, tap by tap.
#include "by_taps.cuh"
#include "row_products.cuh"
#include "warps.cuh"

constexpr int COLUMNS = 8 * BLOCKS, GROUPS = 16 / BLOCKS, STEP_ROWS = GROUPS * ROWS, WARPS = THREADS / 32;
constexpr int SLOT_ROWS = STEP_ROWS * SH, LEADING = (HALO + SLOT_ROWS - 1) / SLOT_ROWS, SLOTS = LEADING + 1 + STAGES, RING_ROWS = SLOTS * SLOT_ROWS;
constexpr int LOADED = (BLOCKS - 1) * 8 * SW + 8 * K8;  // columns of a row
constexpr int RING_BYTES = 2 * RING_ROWS * PITCH;

using InputWindow = Window<(WINDOW_ROWS + ROWS * SH - 1) / (ROWS * SH), ROWS * SH, RING_ROWS, PITCH>;

struct Params {
  Tensor4 x, y;
  const u16 *weight, *bias;
  int images, channels, rows, columns, out_rows, out_columns, steps_down, strips_across, steps, share;
};

__device__ __forceinline__ void advance(Walk& s, const Params& p) { advance<STEP_ROWS, COLUMNS, LEADING, SLOTS>(s, p); }

// Starts copies of the newest rows of a step.
__device__ __forceinline__ void fetch_rows(u32 ring, const Walk& s, const Params& p) {
  copy_rows<SLOT_ROWS, LOADED, PITCH, VEC>(ring + s.slot * (2 * SLOT_ROWS * PITCH), p.x.data + s.image * p.x.image + source_channel(s.channel, 0) * p.x.channel,
                                           p.x.row, s.row * SH - PAD_H + LEADING * SLOT_ROWS, s.column * SW - PAD_W - LEAD, p.rows, p.columns);
}

__device__ __noinline__ void step_by_taps(const Params& p, int image, int channel, int row0, int column0) {
#pragma unroll 1
  for (int i = threadIdx.x % 32; i < STEP_ROWS * COLUMNS; i += 32) {
    const int row = row0 + i / COLUMNS, column = column0 + i % COLUMNS;
    if (row < p.out_rows && column < p.out_columns) output_by_taps(p, image, channel, row, column);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) depthwise_warps(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) u16 shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const u32 ring = shared_address(shared) + warp * RING_BYTES;
  // the lane's ldmatrix row: block m of the tile, low or high eighth; in rows from the tile's first, and in bytes along a row
  const int m = lane % 16, lane_row = m / BLOCKS * ROWS * SH, lane_bytes = m % BLOCKS * 16 * SW + lane / 16 * 16;

  const int first = (blockIdx.x * WARPS + warp) * p.share;
  if (first >= p.steps) return;
  Walk now = start_walk<STEP_ROWS, COLUMNS, LEADING>(first, min(p.share, p.steps - first), p);
  Walk ahead = now;
#pragma unroll
  for (int i = 0; i < STAGES; ++i) {
    if (ahead.left > 0) fetch_rows(ring, ahead, p);
    copy_async_commit();
    advance(ahead, p);
  }
  Filter filter;
  float start = 0.f;
  const AddBias epilogue{p.bias};
  int channel = -1;
  while (now.left > 0) {
    if (STAGES == 1) ahead = now, advance(ahead, p);  // leaves the multiplication more registers
    if (ahead.left > 0) fetch_rows(ring, ahead, p);
    copy_async_commit();
    if (now.channel != channel) {
      channel = now.channel;
      load_filter(filter, p, channel);
      start = epilogue.start(channel);
    }
    copy_async_wait<STAGES>();
    __syncwarp();
    if (now.number >= 0) {
      const int row = oldest_row<LEADING, SLOTS, SLOT_ROWS>(now) + lane_row;
      u32 watched = 0;
      u16* to[2];
      int rows[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {  // blocks g and g + 8 of the tile
        const int block = g + 8 * h, first = now.row + block / BLOCKS * ROWS, column = now.column + block % BLOCKS * 8 + 2 * t;
        to[h] = p.y.data + now.image * p.y.image + channel * p.y.channel + first * p.y.row + column;
        rows[h] = column < p.out_columns ? p.out_rows - first : 0;
      }
      auto store = [&](int r, const float (&acc)[4]) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const u32 packed = pack(epilogue.finish(acc[2 * h], channel), epilogue.finish(acc[2 * h + 1], channel));
          watch(watched, packed);
          store_if(r < rows[h], to[h], packed);
          to[h] += p.y.row;
        }
      };
      multiply(filter, InputWindow(ring + lane_bytes, row), start, store);
      if (__any_sync(0xffffffffu, watched_non_finite(watched))) {
        __syncwarp();
        step_by_taps(p, now.image, channel, now.row, now.column);
      }
    }
    __syncwarp();
    advance(now, p);
    if (STAGES > 1) advance(ahead, p);
  }
}
