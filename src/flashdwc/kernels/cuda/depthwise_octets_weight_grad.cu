// Depthwise convolution of stride 1, weight gradient, 16 bit, channels_last, small filters: on tensor cores, from pixels as they lie in
// memory, as depthwise_octets.cu.
//
// A warp has an octet of channels, 4 words of 2. For a word, an input row and an output row that meet in filter row kh,
//   G[i][(j, c)] = sum_{b, c'} X[4 b + i][c'] dY[4 b + j][c]  where c' = c, over blocks b of 4 output columns; then
//   dW[c][kh][kw] = sum_j G[kw D + j][(j, c)].
// One 16-byte load of a pixel gives a lane its element of four operands, one for each word. G stays in registers, in fp32, to the end; the
// sums are then written as one of `splits` partial results, or as the result.
//
// A block takes 64 channels, whole lines of memory, HEIGHT filter rows and a part of all steps, and walks through them as depthwise_octets.cu does.
//
// dY[..][c] = 0 in place of the other channel's makes NaN of an inf in that one's X: sums that are not finite are computed again, tap by tap.
#include "epilogue.cuh"
#include "octets.cuh"

constexpr int WINDOW = (KW - 1) * DW + 4;
constexpr int TILE_COLUMNS = 32 / GROUPS;  // of a tile: GROUPS groups of ROWS rows
constexpr int STEP_ROWS = GROUPS * ROWS, TILES = COLUMNS / TILE_COLUMNS;
constexpr int HALO = (HEIGHT - 1) * DH, LEADING = (HALO + STEP_ROWS - 1) / STEP_ROWS, SLOTS = LEADING + 1 + STAGES, RING_ROWS = SLOTS * STEP_ROWS;
static_assert(WARPS == OCTETS && COLUMNS % TILE_COLUMNS == 0 && 4 % GROUPS == 0 && WINDOW <= 16);

// 8 lanes read an octet of pixels 0, 1, 4, 5, 8, 9, 12, 13, or of 0, 1, 4, 5 and as many ROWS rows down. Their banks then differ.
__device__ constexpr int swizzle(int row, int column) { return column % 2 + (column / 4 % 4 ^ (GROUPS == 4 ? row / ROWS % 2 * 2 : 0)) * 2; }

using Inputs = Pixels<SLOTS, STEP_ROWS, COLUMNS + (WINDOW > 8 ? 12 : 4), swizzle>;
using Outputs = Pixels<1 + STAGES, STEP_ROWS, COLUMNS, swizzle>;

struct Params {
  Tensor4 x, dy;
  float* partials;  // [split][channel][KH * KW]
  u16* out;
  int images, channels, rows, columns, out_rows, out_columns, period, steps_down, strips_across, channel_blocks, steps, share, height_groups, splits;
};

__device__ __forceinline__ void advance(Walk& s, const Params& p) { advance<STEP_ROWS, COLUMNS, LEADING, SLOTS>(s, p); }

// Starts copies of the newest rows of a step, and of its output rows.
__device__ __forceinline__ void fetch(u32 inputs, u32 outputs, const Walk& s, int out_slot, int channel, int first_kh, const Params& p) {
  Inputs::fetch(inputs + s.slot * Inputs::slot_bytes, p.x,
                {s.row - PAD_H + first_kh * DH + LEADING * STEP_ROWS, s.column - PAD_W, channel, p.images, p.period, p.rows, p.columns, p.channels});
  if (s.number >= 0)
    Outputs::fetch(outputs + out_slot * Outputs::slot_bytes, p.dy, {s.row, s.column, channel, p.images, p.period, p.out_rows, p.out_columns, p.channels});
}

// An mma's depth is 8 blocks: in its second half 4 on, in the row or GROUPS / 2 groups down.
constexpr int HALF_COLUMNS = GROUPS == 1 ? 16 : 0, HALF_ROWS = GROUPS / 2 * ROWS;

// window(y, flip, half): the lane's pixel in input row y, its place flipped or not; output: its pixel in the first output row.
// zero is 0, which the compiler does not know: it would copy operands anew for each mma.
template <class Window>
__device__ __forceinline__ void accumulate(float (&g)[HEIGHT][4][4], const Window& window, const char* output, u32 mask, u32 zero) {
  u32 b[ROWS][4][2];
#pragma unroll
  for (int y = 0; y < ROWS + HALO; ++y) {
    Octet x[2][2];  // [half][lower and upper eight of the window]
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (y < ROWS) {
        const Octet v = load_octet(output + (y + half * HALF_ROWS) * Outputs::row_bytes + half * HALF_COLUMNS * PIXEL_BYTES);
#pragma unroll
        for (int w = 0; w < 4; ++w) b[y][w][half] = v.word[w] & mask;
      }
#pragma unroll
      for (int upper = 0; upper < 1 + (WINDOW > 8); ++upper)
        x[half][upper] = load_octet(window(y, swizzle(y, 8 * upper) / 4, half) + (half * HALF_COLUMNS + 8 * upper) * PIXEL_BYTES);
    }
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      u32 a[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = i % 2 == 0 || WINDOW > 8 ? x[i / 2][i % 2].word[w] | zero : 0;
#pragma unroll
      for (int r = 0; r < ROWS; ++r)
        if (y >= r && (y - r) % DH == 0 && (y - r) / DH < HEIGHT) mma16(g[(y - r) / DH][w], a, b[r][w][0], b[r][w][1]);
    }
  }
}

// A tap's sum over the block's steps from global memory.
__device__ __noinline__ float tap_by_pixels(const Params& p, int split, int c, int tap) {
  const int kh = tap / KW * DH - PAD_H, kw = tap % KW * DW - PAD_W;
  float sum = 0.f;
  for (int step = split * p.share; step < min(split * p.share + p.share, p.steps); ++step)
    for (int i = 0; i < STEP_ROWS * COLUMNS; ++i) {
      const int down = step % p.steps_down * STEP_ROWS + i / COLUMNS, column = step / p.steps_down * COLUMNS + i % COLUMNS;
      const int image = down / p.period, row = down % p.period;
      if (image >= p.images || row >= p.out_rows || column >= p.out_columns) continue;
      if (unsigned(row + kh) >= unsigned(p.rows) || unsigned(column + kw) >= unsigned(p.columns)) continue;
      sum += to_float(p.x.data[image * p.x.image + c * p.x.channel + (row + kh) * p.x.row + (column + kw) * p.x.column]) *
             to_float(p.dy.data[image * p.dy.image + c * p.dy.channel + row * p.dy.row + column * p.dy.column]);
    }
  return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) depthwise_octets_weight_grad(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) u16 shared[];
  const char *inputs = reinterpret_cast<const char*>(shared), *outputs = inputs + Inputs::bytes;
  const int channel = blockIdx.x % p.channel_blocks * CHANNELS, first_kh = blockIdx.x / p.channel_blocks % p.height_groups * HEIGHT;
  const int split = blockIdx.x / p.channel_blocks / p.height_groups;
  const int lane = threadIdx.x % 32, octet = threadIdx.x / 32, row = lane / 4, column = lane % 4;

  float g[HEIGHT][4][4];
#pragma unroll
  for (int i = 0; i < HEIGHT * 16; ++i) (&g[0][0][0])[i] = 0.f;

  Walk now = start_walk<STEP_ROWS, COLUMNS, LEADING>(split * p.share, min(p.share, p.steps - split * p.share), p), ahead = now;
  int out_slot = 0, out_ahead = 0;
#pragma unroll
  for (int i = 0; i < STAGES; ++i) {
    if (ahead.left > 0) fetch(shared_address(inputs), shared_address(outputs), ahead, out_ahead, channel, first_kh, p);
    copy_async_commit();
    advance(ahead, p), out_ahead = Outputs::next(out_ahead);
  }
  copy_async_wait<STAGES - 1>();
  __syncthreads();
  constexpr int in_row = TILE_COLUMNS / 4;  // blocks
  const int block_row = column / in_row * ROWS, block_column = column % in_row * 4;
  const int pixel = block_column + row, place = Inputs::place(octet, block_row, pixel);
  const int out_pixel = block_column + row / 2, out_place = Outputs::place(octet, block_row, out_pixel) + block_row * Outputs::row_bytes;
  while (now.left > 0) {
    if (ahead.left > 0) fetch(shared_address(inputs), shared_address(outputs), ahead, out_ahead, channel, first_kh, p);
    copy_async_commit();
    if (now.number >= 0) {
      const int first = oldest_row<LEADING, SLOTS, STEP_ROWS>(now) + block_row;
      int left[2];  // rows to the end of the ring
      const char* from[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int from_row = first + half * HALF_ROWS < RING_ROWS ? first + half * HALF_ROWS : first + half * HALF_ROWS - RING_ROWS;
        left[half] = RING_ROWS - from_row, from[half] = inputs + from_row * Inputs::row_bytes + pixel * PIXEL_BYTES;
      }
#pragma unroll 1
      for (int tile = 0; tile < TILES; ++tile) {
        const int at = tile * TILE_COLUMNS * PIXEL_BYTES, flipped = place ^ 64;
        auto window = [&](int y, int flip, int half) {
          return from[half] + at + (flip ? flipped : place) + (y < left[half] ? y * Inputs::row_bytes : y * Inputs::row_bytes - Inputs::bytes);
        };
        accumulate(g, window, outputs + out_slot * Outputs::slot_bytes + out_pixel * PIXEL_BYTES + out_place + at, row % 2 ? 0xffff0000u : 0xffffu, u32(p.images) >> 31);
      }
    }
    copy_async_wait<STAGES - 1>();
    __syncthreads();
    advance(now, p), advance(ahead, p);
    out_slot = Outputs::next(out_slot), out_ahead = Outputs::next(out_ahead);
  }

  float* sums = reinterpret_cast<float*>(shared) + octet * (16 * 4 * 8);  // [i][j][channel]
#pragma unroll
  for (int kh = 0; kh < HEIGHT; ++kh) {
    __syncwarp();
#pragma unroll
    for (int w = 0; w < 4; ++w)
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[((row + e / 2 * 8) * 4 + column) * 8 + 2 * w + e % 2] = g[kh][w][e];
    __syncwarp();
    if (first_kh + kh >= KH) break;
#pragma unroll 1
    for (int i = lane; i < KW * 8; i += 32) {
      const int kw = i / 8, c = channel + 8 * octet + i % 8;
      if (c >= p.channels) continue;
      float sum = 0.f;
#pragma unroll
      for (int j = 0; j < 4; ++j) sum += sums[((kw * DW + j) * 4 + j) * 8 + i % 8];
      if (sum - sum != 0.f) sum = tap_by_pixels(p, split, c, (first_kh + kh) * KW + kw);
      write_tap(p, split, c, (first_kh + kh) * KW + kw, sum);
    }
  }
}
