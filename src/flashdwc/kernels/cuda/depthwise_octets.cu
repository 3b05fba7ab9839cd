// Depthwise convolution, forward or input gradient of stride 1, 16 bit, channels_last, small filters: on tensor cores, from pixels as they
// lie in memory.
//
// A warp has an octet: 8 channels, 16 bytes of a pixel, which are 4 words of 2 channels. For a word and a filter row, four neighbouring
// outputs are
//   Y[m][(o, c)] += sum_{k, c'} X[m + k][c'] T[(k, c')][(o, c)],   T = filter[c][k - o] where c' = c, else 0:
// one 16-byte load of the pixel m + k gives a lane its element of four operands, one for each word. The windows of an mma's upper rows
// are four outputs after those of its lower rows, so most loads serve twice. Of T's elements one in two is no zero beside the window's.
//
// A block takes 64 channels, whole lines of memory, and a part of all steps. A strip is COLUMNS columns of the column of all images
// (octets.cuh); a step down it gives STEP_ROWS rows. The input is a ring of slots of so many rows, filled by asynchronous copies STAGES
// steps ahead. A warp keeps its T in registers. Between two barriers it starts copies, stores outputs of
// the step before, and multiplies.
//
// 0 * inf in T makes NaN of an output that never meets the inf: outputs that are not finite are computed again, tap by tap.
#include "by_taps.cuh"
#include "octets.cuh"

constexpr int FOURS = ((KW - 1) * DW + 3 * SW + 4) / 4;  // of pixels, that the window of four outputs spans
constexpr int GROUPS = 64 / COLUMNS;                     // of ROWS rows, one below the other: a tile of a warp
constexpr int STEP_ROWS = GROUPS * ROWS;
constexpr int SPAN = (KH - 1) * DH + 1, HALO = SPAN > SH ? SPAN - SH : 0;  // input rows of an output; those that its row's next one shares
constexpr int SLOT_ROWS = STEP_ROWS * SH, LEADING = (HALO + SLOT_ROWS - 1) / SLOT_ROWS, SLOTS = LEADING + 1 + STAGES, RING_ROWS = SLOTS * SLOT_ROWS;
static_assert(WARPS == OCTETS && 8 % GROUPS == 0);

// 8 lanes read an octet of 2 x 4 pixels: the two fours are those of blocks of 8 outputs, or of groups of ROWS output rows. Their banks then
// differ.
template <int stride_h, int stride_w> __device__ constexpr int swizzle(int row, int column) {
  return column % 4 + (column / 4 + (GROUPS > 1 ? row / (ROWS * stride_h) : column / (8 * stride_w))) % 2 * 4;
}

using Inputs = Pixels<SLOTS, SLOT_ROWS, (COLUMNS - 8) * SW + 4 * (FOURS + SW), swizzle<SH, SW>>;
using Outputs = Pixels<2, STEP_ROWS, COLUMNS, swizzle<1, 1>>;

constexpr int WINDOW_ROWS = (ROWS - 1) * SH + SPAN;

struct Params {
  Tensor4 x, y;
  const u16 *weight, *bias;
  int images, channels, rows, columns, out_rows, out_columns, period, steps_down, strips_across, channel_blocks, steps, share;
};

__device__ __forceinline__ void advance(Walk& s, const Params& p) { advance<STEP_ROWS, COLUMNS, LEADING, SLOTS>(s, p); }

// Starts copies of the newest rows of a step.
__device__ __forceinline__ void fetch_rows(u32 ring, const Walk& s, int channel, const Params& p) {
  Inputs::fetch(ring + s.slot * Inputs::slot_bytes, p.x,
                {s.row * SH - PAD_H + LEADING * SLOT_ROWS, s.column * SW - PAD_W, channel, p.images, p.period * SH, p.rows, p.columns, p.channels});
}

struct Filter {  // a lane's part of T
  u32 b[KH][4][FOURS];
};

// A tile of the warp's octet. window(y, flip): the lane's first pixel in the input row y of its outputs' first row, its place flipped or not.
// staged: where the lane's outputs of that row go, 4 of a block of 8, then the other 4. zero is 0, which the compiler does not know: it would
// copy operands anew for each mma.
template <class Window>
__device__ __forceinline__ void multiply(const Filter& f, const Window& window, const float* starts, char* const (&staged)[2], const Params& p, u32& watched) {
  const u32 zero = u32(p.images) >> 31;
  float acc[ROWS][4][4], start[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) start[i] = starts[i];
  Octet x[2][FOURS + SW];
  auto load = [&](int y) {  // ahead of what is written to shared memory, which the compiler takes for the same
#pragma unroll
    for (int q = 0; q < FOURS + SW; ++q) x[y % 2][q] = load_octet(window(y, swizzle<SH, SW>(y, 4 * q) / 4) + q * 4 * PIXEL_BYTES);
  };
  load(0);
#pragma unroll
  for (int y = 0; y < WINDOW_ROWS; ++y) {
    if (y + 1 < WINDOW_ROWS) load(y + 1);
#pragma unroll
    for (int w = 0; w < 4; ++w)
#pragma unroll
      for (int j = 0; j < FOURS; j += 2) {
        u32 a[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int q = j + i / 2 + i % 2 * SW;  // the second half of the operand is four pixels on, its upper rows four outputs
          a[i] = q < FOURS + SW ? x[y % 2][q].word[w] | zero : 0;
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
          const int kh = (y - r * SH) / DH;
          if (y < r * SH || (y - r * SH) % DH || kh >= KH) continue;
          const u32(&b)[FOURS] = f.b[kh][w];
          if (kh == 0 && j == 0) acc[r][w][0] = acc[r][w][2] = start[2 * w], acc[r][w][1] = acc[r][w][3] = start[2 * w + 1];
          if (j + 1 < FOURS) mma16(acc[r][w], a, b[j], b[j + 1]);
          else mma8(acc[r][w], a, b[j]);
        }
      }
    const int r = (y - SPAN + 1) / SH;
    if (y < SPAN - 1 || (y - SPAN + 1) % SH) continue;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      Octet v;
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        v.word[w] = pack(acc[r][w][2 * h], acc[r][w][2 * h + 1]);
        watch(watched, v.word[w]);
      }
      *reinterpret_cast<uint4*>(staged[h] + h * 4 * PIXEL_BYTES + r * Outputs::row_bytes) = v.quad;
    }
  }
}

__device__ __noinline__ void rows_by_taps(const Params& p, int row0, int column0, int channel) {
#pragma unroll 1
  for (int i = threadIdx.x; i < STEP_ROWS * COLUMNS * CHANNELS; i += THREADS) {
    const int c = channel + i % CHANNELS, column = column0 + i / CHANNELS % COLUMNS, down = row0 + i / CHANNELS / COLUMNS;
    const int image = down / p.period, row = down % p.period;
    if (c < p.channels && image < p.images && row < p.out_rows && column < p.out_columns) output_by_taps(p, image, c, row, column);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) depthwise_octets(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) u16 shared[];
  char *inputs = reinterpret_cast<char*>(shared), *outputs = inputs + Inputs::bytes;
  const u32 ring = shared_address(shared);
  const int channel = blockIdx.x % p.channel_blocks * CHANNELS;
  const int lane = threadIdx.x % 32, octet = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int lane_row = g % GROUPS * ROWS, lane_column = 8 * (g / GROUPS);  // of a block of 8 outputs in a tile
  const int place = Inputs::place(octet, lane_row * SH, lane_column * SW + t), out_place = Outputs::place(octet, lane_row, lane_column + t);
  const int first = blockIdx.x / p.channel_blocks * p.share;
  Walk now = start_walk<STEP_ROWS, COLUMNS, LEADING>(first, min(p.share, p.steps - first), p), ahead = now;
#pragma unroll
  for (int i = 0; i < STAGES; ++i) {
    if (ahead.left > 0) fetch_rows(ring, ahead, channel, p);
    copy_async_commit();
    advance(ahead, p);
  }
  __shared__ float starts[CHANNELS];
  if (threadIdx.x < CHANNELS) starts[threadIdx.x] = AddBias{p.bias}.start(min(channel + int(threadIdx.x), p.channels - 1));
  Filter filter;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const FilterReader element(first_tap(p, min(channel + 8 * octet + 2 * w + g % 2, p.channels - 1), 0), t - g / 2 * SW);
#pragma unroll
    for (int kh = 0; kh < KH; ++kh)
#pragma unroll
      for (int j = 0; j < FOURS; ++j) filter.b[kh][w][j] = element(kh, 4 * j) << g % 2 * 16;
  }
  copy_async_wait<STAGES - 1>();
  __syncthreads();

  int row = 0, column = 0;           // of the outputs that wait in shared memory
  bool staged = false, bad = false;  // are there such, and some that are not finite
  int half = 0;
  while (now.left > 0 || staged) {
    if (ahead.left > 0) fetch_rows(ring, ahead, channel, p);
    copy_async_commit();
    if (staged) {
      if (bad) rows_by_taps(p, row, column, channel);
      else Outputs::store(outputs + (half ^ 1) * Outputs::slot_bytes, p.y, {row, column, channel, p.images, p.period, p.out_rows, p.out_columns, p.channels});
    }
    u32 watched = 0;
    staged = now.left > 0 && now.number >= 0;
    if (staged) {
      int from_row = oldest_row<LEADING, SLOTS, SLOT_ROWS>(now) + lane_row * SH;
      if (from_row >= RING_ROWS) from_row -= RING_ROWS;
      const int left = RING_ROWS - from_row;  // rows to the end of the ring
      const char* from = inputs + from_row * Inputs::row_bytes + (lane_column * SW + t) * PIXEL_BYTES;
      const char* here[2] = {from + place, from + (place ^ 64)};
      auto window = [&](int y, int flip) { return here[flip] + (y < left ? y * Inputs::row_bytes : y * Inputs::row_bytes - Inputs::bytes); };
      char* to = outputs + half * Outputs::slot_bytes + lane_row * Outputs::row_bytes + (lane_column + t) * PIXEL_BYTES;
      multiply(filter, window, starts + 8 * octet, {to + out_place, to + (out_place ^ 64)}, p, watched);
    }
    row = now.row, column = now.column;
    copy_async_wait<STAGES - 1>();
    bad = __syncthreads_or(watched_non_finite(watched));
    advance(now, p);
    advance(ahead, p);
    half ^= 1;
  }
}
