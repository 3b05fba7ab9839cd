// Depthwise convolution of stride 1, forward or input gradient, 16 bit, channels_last: on tensor cores, from pixels that are transposed in
// shared memory.
//
// The product is that of row_products.cuh. A block takes CHANNELS channels and a part of all steps (transposed.cuh). Between two barriers it
//   - starts copies of the pixels of a step to come,
//   - transposes those of the next step into a ring of rows of planes,
//   - transposes the outputs of the step before back, and stores them, and
//   - multiplies the pixels of this step, each warp those of its channels, whose filters it keeps in registers.
//
// 0 * inf in T makes NaN of an output that never meets the inf: a step's outputs that are not finite are computed again, tap by tap.
#include "row_products.cuh"
constexpr bool KEEPS = CHANNELS * 32 / THREADS * KH * K8 < 128;
#include "transposed.cuh"
#include "walk.cuh"

constexpr int LEADING = (HALO + STEP_ROWS - 1) / STEP_ROWS, SLOTS = LEADING + 2, RING_ROWS = SLOTS * STEP_ROWS;
constexpr int WARP_CHANNELS = CHANNELS / WARPS, SLOT_BYTES = STEP_ROWS * 2 * PITCH;
static_assert(COLUMNS - 8 + 8 * K8 <= PITCH && BLANK + LOADED <= PITCH && CHANNELS % WARPS == 0);

using Inputs = Lines<LOADED>;
using Ring = Planes<RING_ROWS * 2 * PITCH>;
using InputWindow = Window<(WINDOW_ROWS + ROWS - 1) / ROWS, ROWS, RING_ROWS, PITCH>;

struct Params {
  Tensor4 x, y;
  const u16 *weight, *bias;
  int images, channels, rows, columns, out_rows, out_columns, period, busy_rows, steps_down, strips_across, channel_blocks, steps, share;
};

// What a thread stores of a step: the octets of pixels of some rows.
struct Storer {
  static constexpr int parts = OCTETS * 4, rows_at_once = WARPS / parts;
  static_assert(WARPS % parts == 0 && ROWS % rows_at_once == 0);
  u16* to;  // of the tensor's first image, row and column
  int from, down, column;
  bool inside;
  __device__ __forceinline__ Storer(const Tensor4& y, int channel, int channels, u32 thread) {
    const int warp = thread / 32, r = warp / parts;
    const Part here = part_of<false>(warp % parts, thread), there = part_of<true>(warp % parts, thread);
    from = StepPlanes::place(here.octet, here.element) + r * 256 + here.block * 16;
    down = there.block / BLOCKS * ROWS + r, column = there.block % BLOCKS * 8 + there.element;
    to = y.data + column * y.column + channel + 8 * there.octet, inside = channel + 8 * there.octet < channels;
    if (KEEPS) from = pinned(from), down = pinned(down), column = pinned(column), to = const_cast<u16*>(pinned(to));
  }
  __device__ __forceinline__ void operator()(u32 outputs, const Column& images, const Rows& rows, int first_column, int columns) const {
    const bool column_inside = inside && first_column + column < columns;
#pragma unroll
    for (int j = 0; j < ROWS / rows_at_once; ++j) {
      Octet v;
      load_matrix4_transposed(v.word, outputs + from + j * rows_at_once * 256);
      i64 offset;
      const bool ok = images.inside(rows, down + j * rows_at_once, offset) && column_inside;
      write8<8, true>(to + (offset + first_column * images.tensor.column), v, [=](int) { return ok; });
    }
  }
};

__device__ __noinline__ void step_by_taps(const Params& p, int image, int first_row, int first_column, int channel) {
#pragma unroll 1
  for (int i = threadIdx.x; i < STEP_ROWS * COLUMNS * CHANNELS; i += THREADS) {
    const int c = channel + i % CHANNELS, column = first_column + i / CHANNELS % COLUMNS, y = first_row + i / CHANNELS / COLUMNS;
    const int n = image + (y >= p.period), row = y >= p.period ? y - p.period : y;
    if (c < p.channels && n < p.images && row < p.out_rows && column < p.out_columns) output_by_taps(p, n, c, row, column);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) depthwise_transposed(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) u16 shared[];
  char *ring = reinterpret_cast<char*>(shared), *outputs = ring + Ring::bytes;
  const u32 ring_at = shared_address(shared), outputs_at = ring_at + Ring::bytes, lines = outputs_at + 2 * StepPlanes::bytes;
  const int channel = blockIdx.x % p.channel_blocks * CHANNELS, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first = blockIdx.x / p.channel_blocks * p.share;
  const Column in_images{p.x, p.period, PAD_H > 0 ? -PAD_H : 0, p.rows, p.images}, out_images{p.y, p.period, 0, p.out_rows, p.images};

  const Inputs::Copier copy(p.x, channel, p.channels, threadIdx.x);
  Way ahead(first, LEADING, p);
  Rows loaded = in_images.from(ahead.row - PAD_H);
  auto fetch = [&](int line_ahead) {  // its slot, of STAGES + 1
    if (ahead.left > 0) {
      copy(lines + line_ahead * Inputs::bytes, in_images, loaded, ahead.first_column - PAD_W + BLANK, p.columns);
      in_images.advance(loaded);
      if (ahead.advance(LEADING, p)) loaded = in_images.from(-PAD_H);
    }
    copy_async_commit();
  };
#pragma unroll
  for (int i = 0; i <= STAGES; ++i) fetch(i);

  if (BLANK > 0 || LOADED < COLUMNS - 8 + 8 * K8) clear<Ring::bytes>(ring);
  Filter filter[WARP_CHANNELS];
  float start[WARP_CHANNELS];
  const AddBias epilogue{p.bias};
#pragma unroll
  for (int i = 0; i < WARP_CHANNELS; ++i) {
    const int c = min(channel + warp * WARP_CHANNELS + i, p.channels - 1);
    load_filter(filter[i], p, c);
    start[i] = epilogue.start(c);
  }
  // the lane's ldmatrix row: block m of the tile, low or high eighth
  const int m = lane % 16, lane_row = m / BLOCKS * ROWS, lane_bytes = m % BLOCKS * 16 + lane / 16 * 16;

  const auto place = [](int row, const Part& to) { return Ring::place(to.octet, to.element) + (row * PITCH + BLANK) * 2 + to.block * 16; };
  const Transposer<Inputs> transpose(place, threadIdx.x);
  const Storer store(p.y, channel, p.channels, threadIdx.x);
  copy_async_wait<STAGES>();
  __syncthreads();
  int line = 1, oldest = 0;  // slots: of the lines to be transposed next; of the ring, where the window starts
  transpose(lines, ring + LEADING * SLOT_BYTES);
  copy_async_wait<STAGES - 1>();
  __syncthreads();

  Way now(first, LEADING, p);
  Rows rows = out_images.from(now.row), stored = rows;
  int stored_column = 0, half = 0;   // of the outputs that wait in shared memory
  bool staged = false, bad = false;  // are there such, and some that are not finite
  while (now.left > 0 || staged) {
    const bool busy = now.left > 0 && now.number >= 0 && rows.y < p.busy_rows;
    u32 watched = 0;
#pragma unroll 1
    for (int phase = 0; phase < 2; ++phase) {  // of two warps that share a tensor core, one moves data while the other multiplies
      if (phase == warp / 4 % 2) {
        fetch(line == 0 ? STAGES : line - 1);
        if (now.left > (now.number >= 0)) transpose(lines + line * Inputs::bytes, ring + (oldest == 0 ? SLOTS - 1 : oldest - 1) * SLOT_BYTES);
        if (bad) step_by_taps(p, stored.image, stored.y, stored_column, channel);
        else if (staged) store(outputs_at + (half ^ 1) * StepPlanes::bytes, out_images, stored, stored_column, p.out_columns);
      } else if (busy) {
        const int first_row = oldest * STEP_ROWS + lane_row;
#pragma unroll
        for (int i = 0; i < WARP_CHANNELS; ++i) {
          const int c = warp * WARP_CHANNELS + i;
          char* to = outputs + half * StepPlanes::bytes + StepPlanes::place(c / 8, c % 8) + lane * 4;
          multiply(filter[i], InputWindow(ring_at + Ring::place(c / 8, c % 8) + lane_bytes, first_row), start[i], [&](int r, const float(&acc)[4]) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              const u32 packed = pack(acc[2 * h], acc[2 * h + 1]);
              watch(watched, packed);
              *reinterpret_cast<u32*>(to + r * 256 + h * 128) = packed;
            }
          });
        }
      }
    }
    staged = busy, stored = rows, stored_column = now.first_column;
    copy_async_wait<STAGES - 1>();
    bad = __syncthreads_or(watched_non_finite(watched));
    if (now.number >= 0) out_images.advance(rows);
    if (now.advance(LEADING, p)) rows = {0, 0};
    line = line == STAGES ? 0 : line + 1, oldest = oldest + 1 == SLOTS ? 0 : oldest + 1, half ^= 1;
  }
}
