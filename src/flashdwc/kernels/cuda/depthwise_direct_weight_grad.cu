// Depthwise convolution of few taps, weight gradient, 16 bit NHWC, on CUDA cores.
//
// A thread owns VEC channels and the sums of HEIGHT filter rows, in fp32; it walks over strips of ROWS x COLUMNS output pixels, reads each output
// gradient and each input pixel of the strip's window once (AHEAD: the whole window before it computes) and adds their products. At the end
// the STRIPS threads of a channel are added, first inside a warp, then over the warps in shared memory, always in the same order, and the
// block writes one of `splits` partial results (or the result, where there is one split).
//
//   block:  HEIGHT filter rows, LANES channel groups (neighbours in memory; a power of two) x STRIPS strips (neighbours along the row)
#include "epilogue.cuh"
#include "pixel.cuh"

constexpr int STRIPS = THREADS / LANES;
constexpr int SPAN_H = (HEIGHT - 1) * DH + (ROWS - 1) * SH + 1;
constexpr int SPAN_W = (KW - 1) * DW + (COLUMNS - 1) * SW + 1;
constexpr int TAPS = HEIGHT * KW, WARPS = THREADS / 32;
static_assert(LANES <= 32 && 32 % LANES == 0 && KH % HEIGHT == 0);

struct Params {
  Tensor4 x, dy;
  float* partials;  // [split][channel][KH * KW]
  u16* out;
  int strips, channels, rows, columns, out_rows, out_columns, strips_across, strips_down, channel_blocks, splits;
};

extern "C" __global__ void __launch_bounds__(THREADS) depthwise_direct_weight_grad(const __grid_constant__ Params p) {
  __shared__ float sums[WARPS][TAPS][LANES * VEC];
  const int lane = threadIdx.x % LANES, place = threadIdx.x / LANES;
  const int channel0 = blockIdx.x % p.channel_blocks * LANES * VEC, channel = channel0 + lane * VEC;
  const unsigned b = blockIdx.x / p.channel_blocks;
  const int first = b % (KH / HEIGHT) * HEIGHT, split = b / (KH / HEIGHT);

  float acc[TAPS][VEC];
#pragma unroll
  for (int k = 0; k < TAPS; ++k)
#pragma unroll
    for (int e = 0; e < VEC; ++e) acc[k][e] = 0.f;

  const unsigned strips = channel < p.channels ? p.strips : 0;
  for (unsigned strip = split * STRIPS + place; strip < strips; strip += p.splits * STRIPS) {
    const unsigned line = strip / p.strips_across;
    const int column0 = strip % p.strips_across * COLUMNS, row0 = line % p.strips_down * ROWS, image = line / p.strips_down;
    const int y0 = row0 * SH - PAD_H + first * DH, x0 = column0 * SW - PAD_W;
    const u16* source = p.x.data + i64(image) * p.x.image + y0 * p.x.row + x0 * p.x.column + channel;
    const u16* gradient = p.dy.data + image * p.dy.image + row0 * p.dy.row + column0 * p.dy.column + channel;

    Pixel<VEC> ahead[SPAN_H][SPAN_W];
    auto inside = [&](int y, int x) { return unsigned(y0 + y) < unsigned(p.rows) && unsigned(x0 + x) < unsigned(p.columns); };
#pragma unroll
    for (int i = 0; AHEAD && i < SPAN_H * SPAN_W; ++i) {
      const int y = i / SPAN_W, x = i % SPAN_W;
      ahead[y][x] = load_pixel<VEC>(source + y * p.x.row + x * p.x.column, inside(y, x));
    }
    float g[ROWS][COLUMNS][VEC];
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c)
        read_pixel<VEC>(g[r][c], gradient + r * p.dy.row + c * p.dy.column, row0 + r < p.out_rows && column0 + c < p.out_columns);
#pragma unroll
    for (int y = 0; y < SPAN_H; ++y) {
      float in[SPAN_W][VEC];
#pragma unroll
      for (int x = 0; x < SPAN_W; ++x) {
        if constexpr (AHEAD) as_floats<VEC>(in[x], kept(ahead[y][x]));
        else read_pixel<VEC>(in[x], source + y * p.x.row + x * p.x.column, inside(y, x));
      }
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const int kh = y - r * SH;
        if (kh < 0 || kh % DH || kh / DH >= HEIGHT) continue;
#pragma unroll
        for (int x = 0; x < SPAN_W; ++x)
#pragma unroll
          for (int c = 0; c < COLUMNS; ++c) {
            const int kw = x - c * SW;
            if (kw < 0 || kw % DW || kw / DW >= KW) continue;
#pragma unroll
            for (int e = 0; e < VEC; ++e) acc[kh / DH * KW + kw / DW][e] += g[r][c][e] * in[x][e];
          }
      }
    }
  }

#pragma unroll
  for (int k = 0; k < TAPS; ++k)
#pragma unroll
    for (int e = 0; e < VEC; ++e) {
#pragma unroll
      for (int step = LANES; step < 32; step *= 2) acc[k][e] += __shfl_xor_sync(0xffffffffu, acc[k][e], step);
      if (threadIdx.x % 32 < LANES) sums[threadIdx.x / 32][k][lane * VEC + e] = acc[k][e];
    }
  __syncthreads();
  for (int i = threadIdx.x; i < TAPS * LANES * VEC; i += THREADS) {
    int k = i % TAPS, c = i / TAPS;
    if (channel0 + c >= p.channels) continue;
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sum += sums[w][k][c];
    write_tap(p, split, channel0 + c, first * KW + k, sum);
  }
}
