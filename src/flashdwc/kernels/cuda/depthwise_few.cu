// Depthwise convolution of few outputs, forward or input gradient, 16 bit, any layout: an output a thread.
//
// Neighbouring threads take neighbours in memory: pixels of a channel in NCHW, in NHWC CHANNELS channels and then pixels, as these share taps.
//
// What a small launch costs is the way to its first result: instructions and operands that come from memory one after the other. So the code
// is short, and all reads of a thread are under way at once. A tap outside of the input is not read, so nothing can turn an output into NaN.
#include "by_taps.cuh"
#include "divide.cuh"

struct Params {
  Tensor4 x, y;
  const u16 *weight, *bias;
  int threads, channels, rows, columns;
  Divisor channel_blocks, out_rows, out_columns;
};

extern "C" __global__ void __launch_bounds__(THREADS) depthwise_few(const __grid_constant__ Params p) {
  unsigned t = blockIdx.x * THREADS + threadIdx.x;
  if (t >= p.threads) return;
  const int lane = t % CHANNELS;
  t /= CHANNELS;
  const int column = divide(t, p.out_columns), row = divide(t, p.out_rows);
  const int channel = divide(t, p.channel_blocks) * CHANNELS + lane;
  if (channel >= p.channels) return;
  const int image = t, y0 = row * SH - PAD_H, x0 = column * SW - PAD_W;

  const AddBias epilogue{p.bias};
  float sum = epilogue.start(channel);
#pragma unroll
  for (int part = 0; part < SUM; ++part) {
    const u16* plane = p.x.data + image * p.x.image + source_channel(channel, part) * p.x.channel;
    const u16* taps = first_tap(p, channel, part);
    float in[KH][KW], tap[KH][KW];
#pragma unroll
    for (int kh = 0; kh < KH; ++kh)
#pragma unroll
      for (int kw = 0; kw < KW; ++kw) {
        const int y = y0 + kh * DH, x = x0 + kw * DW;
        const bool meets = y % UH == 0 && x % UW == 0 && unsigned(y / UH) < unsigned(p.rows) && unsigned(x / UW) < unsigned(p.columns) && y >= 0 && x >= 0;
        in[kh][kw] = meets ? to_float(__ldg(plane + y / UH * p.x.row + x / UW * p.x.column)) : 0.f;
        tap[kh][kw] = meets ? to_float(__ldg(taps + kh * NEXT_TAP_ROW + kw * NEXT_TAP)) : 0.f;
      }
#pragma unroll
    for (int kh = 0; kh < KH; ++kh)
#pragma unroll
      for (int kw = 0; kw < KW; ++kw) sum += in[kh][kw] * tap[kh][kw];
  }
  p.y.data[image * p.y.image + channel * p.y.channel + row * p.y.row + column * p.y.column] = from_float(epilogue.finish(sum, channel));
}
