// Depthwise convolution of stride 1, weight gradient, 16 bit, contiguous: on tensor cores, each warp on its own, as depthwise_warps.cu.
//
// The product is that of row_sums.cuh.
//
// A warp has a channel, HEIGHT filter rows and a part of the steps, and keeps G in registers, in fp32, to the end. The sums are then
// written as one of `splits` partial results, or as the result. Warps of a block read the same for different filter rows.
#include "row_sums.cuh"
#include "warps.cuh"

constexpr int COLUMNS = 8 * BLOCKS, GROUPS = 16 / BLOCKS, STEP_ROWS = GROUPS * ROWS, WARPS = THREADS / 32;
constexpr int LEADING = (HALO + STEP_ROWS - 1) / STEP_ROWS;
constexpr int SLOTS = LEADING + 1 + STAGES, OUT_SLOTS = 1 + STAGES, RING_ROWS = SLOTS * STEP_ROWS;
constexpr int LOADED = COLUMNS + 16 * M16 - 8;
constexpr int RING_BYTES = 2 * RING_ROWS * PITCH, OUT_SLOT_BYTES = 2 * STEP_ROWS * OUT_PITCH;
constexpr int WARP_BYTES = RING_BYTES + OUT_SLOTS * OUT_SLOT_BYTES;

constexpr bool DEAR = BLOCKS_PER_SM * THREADS >= 384 && HEIGHT * M16 * 4 >= 84;  // are registers

using InputWindow = Window<(ROWS + HALO + ROWS - 1) / ROWS, ROWS, RING_ROWS, PITCH>;

struct Params {
  Tensor4 x, dy;
  float* partials;  // [split][channel][KH * KW]
  u16* out;
  int images, channels, rows, columns, out_rows, out_columns, steps_down, strips_across, steps, share, height_groups, splits;
};

struct Task {  // of a warp
  int first_kh, split, channel;
  __device__ __forceinline__ Task(int worker, const Params& p)
      : first_kh(worker % p.height_groups * HEIGHT), split(worker / p.height_groups % p.splits), channel(worker / p.height_groups / p.splits) {}
};

__device__ __forceinline__ void advance(Walk& s, const Params& p) { advance<STEP_ROWS, COLUMNS, LEADING, SLOTS>(s, p); }

// Starts copies of the newest rows of a step, and of its output rows.
__device__ __forceinline__ void fetch(u32 ring, u32 outputs, const Walk& s, int out_slot, int channel, int first_kh, const Params& p) {
  copy_rows<STEP_ROWS, LOADED, PITCH, VEC>(ring + s.slot * (2 * STEP_ROWS * PITCH), p.x.data + s.image * p.x.image + channel * p.x.channel, p.x.row,
                                           s.row - PAD_H + first_kh * DH + LEADING * STEP_ROWS, s.column - PAD_W - LEAD, p.rows, p.columns);
  if (s.number >= 0)
    copy_rows<STEP_ROWS, COLUMNS, OUT_PITCH, OUT_VEC>(outputs + out_slot * OUT_SLOT_BYTES, p.dy.data + s.image * p.dy.image + channel * p.dy.channel,
                                                      p.dy.row, s.row, s.column, p.out_rows, p.out_columns);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) depthwise_warps_weight_grad(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) u16 shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Task task(blockIdx.x * WARPS + warp, p);
  if (task.channel >= p.channels) return;
  const u32 ring = shared_address(shared) + warp * WARP_BYTES, outputs = ring + RING_BYTES;

  float g[HEIGHT][M16][4];
#pragma unroll
  for (int i = 0; i < HEIGHT * M16 * 4; ++i) (&g[0][0][0])[i] = 0.f;

  Walk now = start_walk<STEP_ROWS, COLUMNS, LEADING>(task.split * p.share, min(p.share, p.steps - task.split * p.share), p);
  Walk ahead = now;
  int out_slot = 0, out_ahead = 0;
  auto next = [](int slot) { return slot + 1 == OUT_SLOTS ? 0 : slot + 1; };
#pragma unroll
  for (int i = 0; i < STAGES; ++i) {
    if (ahead.left > 0) fetch(ring, outputs, ahead, out_ahead, task.channel, task.first_kh, p);
    copy_async_commit();
    advance(ahead, p), out_ahead = next(out_ahead);
  }
  const int m = input_block(), lane_row = m / BLOCKS * ROWS, lane_bytes = m % BLOCKS * 16 + lane / 8 % 2 * 16;
  const u32 output_lane = 2 * (lane % 16 / BLOCKS * ROWS * OUT_PITCH + lane % BLOCKS * 8);
  while (now.left > 0) {
    if (ahead.left > 0) {
      const Task again = DEAR ? Task(anew(blockIdx.x) * WARPS + warp, p) : task;
      fetch(ring, outputs, ahead, out_ahead, again.channel, again.first_kh, p);
    }
    copy_async_commit();
    copy_async_wait<STAGES>();
    __syncwarp();
    if (now.number >= 0) {
      const int row = oldest_row<LEADING, SLOTS, STEP_ROWS>(now) + lane_row;
      accumulate<2 * OUT_PITCH>(g, InputWindow(ring + lane_bytes, row), outputs + out_slot * OUT_SLOT_BYTES + output_lane);
    }
    __syncwarp();
    advance(now, p), advance(ahead, p);
    out_slot = next(out_slot), out_ahead = next(out_ahead);
  }

  float* scratch = reinterpret_cast<float*>(shared) + warp * (WARP_BYTES / 4);
  static_assert(16 * M16 * 8 * 4 <= WARP_BYTES);
  const Task done = DEAR ? Task(anew(blockIdx.x) * WARPS + anew(threadIdx.x) / 32, p) : task;
#pragma unroll
  for (int kh = 0; kh < HEIGHT; ++kh) write_diagonals<LEAD, 1>(p, scratch, g[kh], done.split, done.channel, done.first_kh + kh);
}
