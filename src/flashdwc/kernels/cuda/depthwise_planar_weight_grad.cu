// Depthwise convolution of few taps, weight gradient, 16 bit NCHW, on CUDA cores.
//
// A thread owns the sums of HEIGHT filter rows of a channel, in fp32; it walks over strips of ROWS x 8 outputs of all images, reads the
// output gradients of a strip and the input behind it once and adds their products. At the end the LANES threads of a channel are added,
// first inside a warp, then over the warps in shared memory, always in the same order, and the block writes one of `splits` partial
// results (or the result, where there is one split).
//
//   block:  HEIGHT filter rows, LANES threads for each of THREADS / LANES channels
#include "epilogue.cuh"
#include "planar.cuh"

constexpr int TAPS = HEIGHT * KW, CHANNELS = THREADS / LANES;
constexpr int TEAM = LANES < 32 ? LANES : 32, TEAMS = LANES / TEAM;  // threads of a channel in a warp, such teams of a channel
static_assert(THREADS % LANES == 0 && THREADS % 32 == 0 && 32 % TEAM == 0 && KH % HEIGHT == 0);

struct Params {
  Tensor4 x, dy;
  float* partials;  // [split][channel][KH * KW]
  u16* out;
  int channels, rows, columns, out_rows, out_columns, strips_across, strips, all_strips, channel_blocks, splits;
};

extern "C" __global__ void __launch_bounds__(THREADS) depthwise_planar_weight_grad(const __grid_constant__ Params p) {
  __shared__ float sums[CHANNELS][TEAMS][TAPS];
  const unsigned b = blockIdx.x / p.channel_blocks;
  const int channel0 = blockIdx.x % p.channel_blocks * CHANNELS, mine = threadIdx.x / LANES, lane = threadIdx.x % LANES;
  const int first = b % (KH / HEIGHT) * HEIGHT, split = b / (KH / HEIGHT), channel = min(channel0 + mine, p.channels - 1);
  const u16 *source = p.x.data + channel * p.x.channel, *gradient = p.dy.data + channel * p.dy.channel;

  float acc[HEIGHT][KW];
#pragma unroll
  for (int k = 0; k < TAPS; ++k) acc[k / KW][k % KW] = 0.f;
  for (int i = split * LANES + lane; i < p.all_strips; i += p.splits * LANES) {
    const int image = i / p.strips, strip = i % p.strips, column = strip_column(strip, p.strips_across), row0 = strip_row(strip, p.strips_across);
    float g[ROWS][8];
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
      read_columns<OUT_VEC>(g[r], pinned(gradient + image * p.dy.image + (row0 + r) * p.dy.row + column), column, row0 + r < p.out_rows, out_columns_of(p));
    const int above = row0 * SH - PAD_H + first * DH;
    const u16* plane = source + image * p.x.image;
    correlate_strip<HEIGHT>(acc, g, [&](float (&in)[WINDOW], int y) {
      const int row = above + y;
      read_window<IN_VEC>(in, plane + row * p.x.row, column * SW, unsigned(row) < unsigned(p.rows), p);
    });
  }

#pragma unroll
  for (int k = 0; k < TAPS; ++k) {
    float sum = acc[k / KW][k % KW];
#pragma unroll
    for (int step = 1; step < TEAM; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (lane % TEAM == 0) sums[mine][lane / TEAM][k] = sum;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < CHANNELS * TAPS; i += THREADS) {
    const int k = i % TAPS, c = channel0 + i / TAPS;
    if (c >= p.channels) continue;
    float sum = 0.f;
#pragma unroll
    for (int t = 0; t < TEAMS; ++t) sum += sums[i / TAPS][t][k];
    write_tap(p, split, c, first * KW + k, sum);
  }
}
