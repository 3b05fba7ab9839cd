// Depthwise convolution of stride 1, weight gradient, 16 bit, channels_last: on tensor cores, from pixels that are transposed in shared
// memory, as depthwise_transposed.cu.
//
// The product is that of row_sums.cuh. A block takes CHANNELS channels, HEIGHT filter rows and a part of all steps; a warp keeps the sums of
// its channels to the end. They are then written as one of `splits` partial results, or as the result.
#include "row_sums.cuh"
constexpr int SUMS = CHANNELS * 32 / THREADS * HEIGHT * M16 * 4;  // of a thread
constexpr bool KEEPS = SUMS < 120, DEAR = SUMS >= 190;  // registers are
#include "transposed.cuh"
#include "walk.cuh"

constexpr int LEADING = (HALO + STEP_ROWS - 1) / STEP_ROWS, SLOTS = LEADING + 2, RING_ROWS = SLOTS * STEP_ROWS;
constexpr int RUN = 8 * BLOCKS_TOGETHER, OUT_LOADED = (COLUMNS + RUN - 1) / RUN * RUN;  // pixels of a row of dy
constexpr int WARP_CHANNELS = CHANNELS / WARPS, SLOT_BYTES = STEP_ROWS * 2 * PITCH;
static_assert(COLUMNS - 8 + 16 * M16 <= PITCH && BLANK + LOADED <= PITCH && CHANNELS % WARPS == 0);

using Inputs = Lines<LOADED>;
using Outputs = Lines<OUT_LOADED>;
using Ring = Planes<RING_ROWS * 2 * PITCH>;
using InputWindow = Window<(ROWS + HALO + ROWS - 1) / ROWS, ROWS, RING_ROWS, PITCH>;

struct Params {
  Tensor4 x, dy;
  float* partials;  // [split][channel][KH * KW]
  u16* out;
  int images, channels, rows, columns, out_rows, out_columns, period, busy_rows, steps_down, strips_across, channel_blocks, steps, share, height_groups, splits;
};

struct Task {  // of a block
  int channel, first_kh, split, above;  // rows of x above those of dy
  __device__ __forceinline__ Task(u32 block, const Params& p) : channel(block % p.channel_blocks * CHANNELS) {
    const int part = block / p.channel_blocks;
    first_kh = part % p.height_groups * HEIGHT, split = part / p.height_groups, above = first_kh * DH - PAD_H;
  }
};

struct Ahead {  // what is copied next
  Way way;
  Rows inputs, outputs;
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) depthwise_transposed_weight_grad(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) u16 shared[];
  char *ring = reinterpret_cast<char*>(shared), *outputs = ring + Ring::bytes;
  const u32 ring_at = shared_address(shared), outputs_at = ring_at + Ring::bytes;
  const u32 lines = outputs_at + 2 * StepPlanes::bytes, output_lines = lines + (STAGES + 1) * Inputs::bytes;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Task task(blockIdx.x, p);
  const Column in_images{p.x, p.period, min(task.above, 0), p.rows, p.images}, out_images{p.dy, p.period, 0, p.out_rows, p.images};

  const Inputs::Copier kept_copy(p.x, task.channel, p.channels, threadIdx.x);
  const Outputs::Copier kept_copy_output(p.dy, task.channel, p.channels, threadIdx.x);
  __shared__ Ahead kept[STAGES + 1];  // by the slot that it goes to, where registers are dear
  Way now(task.split * p.share, LEADING, p);
  auto fetch = [&](Ahead& ahead, int slot) {
    if (ahead.way.left > 0) {
      // anew: else the compiler keeps, or spills, what follows from them and a step needs once
      const u32 thread = DEAR ? anew(threadIdx.x) : threadIdx.x;
      const Task again = DEAR ? Task(anew(blockIdx.x), p) : task;
      const Inputs::Copier copy = DEAR ? Inputs::Copier(p.x, again.channel, p.channels, thread) : kept_copy;
      const Outputs::Copier copy_output = DEAR ? Outputs::Copier(p.dy, again.channel, p.channels, thread) : kept_copy_output;
      copy(lines + slot * Inputs::bytes, in_images, ahead.inputs, ahead.way.first_column - PAD_W + BLANK, p.columns);
      in_images.advance(ahead.inputs);
      if (ahead.way.number >= 0) {
        const int first = ahead.way.first_column;
        copy_output(output_lines + slot * Outputs::bytes, out_images, ahead.outputs, first, min(p.out_columns, first + COLUMNS));
        out_images.advance(ahead.outputs);
      }
      if (ahead.way.advance(LEADING, p)) ahead.inputs = in_images.from(again.above), ahead.outputs = {0, 0};
    }
    copy_async_commit();
  };
  Ahead ahead{now, in_images.from(now.row + task.above), out_images.from(now.row)};
#pragma unroll
  for (int i = 0; i <= STAGES; ++i) fetch(ahead, i);
  if (DEAR && threadIdx.x == 0) kept[0] = ahead;

  if (BLANK > 0 || LOADED < COLUMNS - 8 + 16 * M16) clear<Ring::bytes>(ring);
  float g[WARP_CHANNELS][HEIGHT][M16][4];
#pragma unroll
  for (int i = 0; i < WARP_CHANNELS * HEIGHT * M16 * 4; ++i) (&g[0][0][0][0])[i] = 0.f;

  const int m = input_block(), lane_row = m / BLOCKS * ROWS, lane_bytes = m % BLOCKS * 16 + lane / 8 % 2 * 16;
  const auto input_place = [](int row, const Part& to) { return Ring::place(to.octet, to.element) + (row * PITCH + BLANK) * 2 + to.block * 16; };
  const auto output_place = [](int row, const Part& to) {
    const int block = row / ROWS * BLOCKS + to.block;  // of the tile
    return to.block < BLOCKS ? StepPlanes::place(to.octet, to.element) + row % ROWS * 256 + block * 16 : -1;
  };
  const Transposer<Inputs> transpose(input_place, threadIdx.x);
  const Transposer<Outputs> transpose_output(output_place, threadIdx.x);
  copy_async_wait<STAGES>();
  __syncthreads();
  int line = 1, oldest = 0, half = 0;  // slots: of the lines to be transposed next; of the ring, where the window starts; of dy
  transpose(lines, ring + LEADING * SLOT_BYTES);
  transpose_output(output_lines, outputs);
  copy_async_wait<STAGES - 1>();
  __syncthreads();

  int y = unsigned(now.row) % unsigned(p.period);  // of the step's first row in its image
  while (now.left > 0) {
    const bool busy = now.number >= 0 && y < p.busy_rows;
#pragma unroll 1
    for (int phase = 0; phase < 2; ++phase) {  // of two warps that share a tensor core, one moves data while the other multiplies
      if (phase == warp / 4 % 2) {
        const int slot = line == 0 ? STAGES : line - 1;
        if constexpr (DEAR) {
          Ahead here = kept[slot];
          fetch(here, slot);
          if (threadIdx.x == 0) kept[slot == STAGES ? 0 : slot + 1] = here;
        } else {
          fetch(ahead, slot);
        }
        if (now.left > (now.number >= 0)) {
          const u32 thread = DEAR ? anew(threadIdx.x) : threadIdx.x;
          (DEAR ? Transposer<Inputs>(input_place, thread) : transpose)(lines + line * Inputs::bytes, ring + (oldest == 0 ? SLOTS - 1 : oldest - 1) * SLOT_BYTES);
          (DEAR ? Transposer<Outputs>(output_place, thread) : transpose_output)(output_lines + line * Outputs::bytes, outputs + (half ^ 1) * StepPlanes::bytes);
        }
      } else if (busy) {
        const int first_row = oldest * STEP_ROWS + lane_row;
#pragma unroll
        for (int i = 0; i < WARP_CHANNELS; ++i) {
          const int c = warp * WARP_CHANNELS + i;
          accumulate<256>(g[i], InputWindow(ring_at + Ring::place(c / 8, c % 8) + lane_bytes, first_row),
                          outputs_at + half * StepPlanes::bytes + StepPlanes::place(c / 8, c % 8) + lane % 16 * 16);
        }
      }
    }
    copy_async_wait<STAGES - 1>();
    __syncthreads();
    if (now.number >= 0 && (y += STEP_ROWS) >= p.period) y -= p.period;
    if (now.advance(LEADING, p)) y = 0;
    line = line == STAGES ? 0 : line + 1, oldest = oldest + 1 == SLOTS ? 0 : oldest + 1, half ^= 1;
  }

  float* scratch = reinterpret_cast<float*>(shared) + warp * (16 * M16 * 8);
  static_assert(WARPS * 16 * M16 * 8 * 4 <= Ring::bytes + 2 * StepPlanes::bytes + (STAGES + 1) * (Inputs::bytes + Outputs::bytes));
  copy_async_wait<0>();
  __syncthreads();
  const Task done(anew(blockIdx.x), p);
#pragma unroll
  for (int i = 0; i < WARP_CHANNELS; ++i)
#pragma unroll
    for (int kh = 0; kh < HEIGHT; ++kh)
      write_diagonals<LEAD, 1>(p, scratch, g[i][kh], done.split, done.channel + warp * WARP_CHANNELS + i, done.first_kh + kh);
}
