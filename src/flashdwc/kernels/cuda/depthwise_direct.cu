// Depthwise convolution of few taps, forward or input gradient, 16 bit NHWC, on CUDA cores: pure memory traffic.
//
// Output o, input i and tap k meet where  o * S + k * D - P = i * U, as in depthwise_conv.cu. A thread owns VEC channels of a strip of
// ROWS x COLUMNS outputs; it reads each input pixel of the strip's window once, straight from global memory, and adds it to all outputs
// that it feeds. Filters stay in registers, in fp32, while the block walks over its strips. ONCE: a thread has one strip at most, and asks for
// it before its filter, so that it waits for both at once.
//
// 0 * inf on padding makes NaN of an output that never meets the inf: a strip with outputs that are not finite is computed again, tap
// by tap.
//
//   block:  LANES channel groups (neighbours in memory) x STRIPS strips (neighbours along the row)
#include "by_taps.cuh"
#include "divide.cuh"
#include "epilogue.cuh"
#include "pixel.cuh"

constexpr int STRIPS = THREADS / LANES;
constexpr int SPAN_H = ((KH - 1) * DH + (ROWS - 1) * SH - PHASE_H) / UH + 1;
constexpr int SPAN_W = ((KW - 1) * DW + (COLUMNS - 1) * SW - PHASE_W) / UW + 1;
static_assert(ROWS % UH == 0 && COLUMNS % UW == 0);

struct Params {
  Tensor4 x, y;
  const u16 *weight, *bias;
  int strips, channels, rows, columns, out_rows, out_columns, step;  // step: from one of a thread's strips to the next
  Divisor strips_across, strips_down, channel_blocks;
};

struct Place {  // of a strip's first output
  int image, row, column;
};

__device__ __forceinline__ Place place_of(unsigned strip, const Params& p) {
  const int column = divide(strip, p.strips_across), row = divide(strip, p.strips_down);
  return {int(strip), row * ROWS, column * COLUMNS};
}

extern "C" __global__ void __launch_bounds__(THREADS) depthwise_direct(const __grid_constant__ Params p) {
  unsigned block = blockIdx.x;
  const int channel = (divide(block, p.channel_blocks) * LANES + threadIdx.x % LANES) * VEC;
  if (threadIdx.x >= STRIPS * LANES || channel >= p.channels) return;
  const AddBias epilogue{p.bias};
  float w[KH * KW][VEC], bias[VEC];
  auto read_filter = [&] {
#pragma unroll
    for (int k = 0; k < KH * KW; ++k)
#pragma unroll
      for (int e = 0; e < VEC; ++e) w[k][e] = to_float(filter_element(p, channel + e, 0, k));
#pragma unroll
    for (int e = 0; e < VEC; ++e) bias[e] = epilogue.start(channel + e);
  };
  if (!ONCE) read_filter();

  unsigned strip = block * STRIPS + threadIdx.x / LANES;
  for (bool more = strip < p.strips; more; strip += p.step, more = !ONCE && strip < p.strips) {
    const auto [image, row0, column0] = place_of(strip, p);
    const int y0 = row0 / UH * SH - FIRST_H, x0 = column0 / UW * SW - FIRST_W;
    const u16* source = p.x.data + i64(image) * p.x.image + y0 * p.x.row + x0 * p.x.column + channel;
    Pixel<VEC> raw[SPAN_H][SPAN_W];
    auto load_row = [&](int y) {
      const bool inside = unsigned(y0 + y) < unsigned(p.rows);
#pragma unroll
      for (int x = 0; x < SPAN_W; ++x)
        raw[y][x] = load_pixel<VEC>(source + y * p.x.row + x * p.x.column, inside && unsigned(x0 + x) < unsigned(p.columns));
    };
    if constexpr (ONCE) {
#pragma unroll
      for (int y = 0; y < SPAN_H; ++y) load_row(y);
      read_filter();
    }
    float acc[ROWS][COLUMNS][VEC];
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c)
#pragma unroll
        for (int e = 0; e < VEC; ++e) acc[r][c][e] = bias[e];

#pragma unroll
    for (int y = 0; y < SPAN_H; ++y) {
      if (!ONCE) load_row(y);
      float in[SPAN_W][VEC];
#pragma unroll
      for (int x = 0; x < SPAN_W; ++x) as_floats<VEC>(in[x], ONCE ? kept(raw[y][x]) : raw[y][x]);
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const int kh = y * UH + PHASE_H - r * SH;
        if (kh < 0 || kh % DH || kh / DH >= KH) continue;
#pragma unroll
        for (int x = 0; x < SPAN_W; ++x)
#pragma unroll
          for (int c = 0; c < COLUMNS; ++c) {
            const int kw = x * UW + PHASE_W - c * SW;
            if (kw < 0 || kw % DW || kw / DW >= KW) continue;
#pragma unroll
            for (int e = 0; e < VEC; ++e) acc[r][c][e] += w[kh / DH * KW + kw / DW][e] * in[x][e];
          }
      }
    }

    u16* target = p.y.data + image * p.y.image + row0 * p.y.row + column0 * p.y.column + channel;
    u32 watched = 0;
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c)
        if (row0 + r < p.out_rows && column0 + c < p.out_columns) write_pixel<VEC>(target + r * p.y.row + c * p.y.column, acc[r][c], watched);
    if (!watched_non_finite(watched)) continue;
#pragma unroll 1
    for (int i = 0; i < ROWS * COLUMNS * VEC; ++i) {
      int c = channel + i % VEC, column = column0 + i / VEC % COLUMNS, row = row0 + i / (VEC * COLUMNS);
      if (row >= p.out_rows || column >= p.out_columns) continue;
      float sum = by_taps(p, image, c, row, column) + epilogue.start(c);
      p.y.data[image * p.y.image + c + row * p.y.row + column * p.y.column] = from_float(sum);  // as output_by_taps, in fewer registers
    }
  }
}
