// One output pixel tap by tap from global memory: for tiles that hold an inf or NaN, as taps outside the input must not take part and a
// non-finite element must reach its own window only.
#pragma once
#include "tile.cuh"

template <class Params> __device__ __forceinline__ float by_taps(const Params& p, int image, int channel, int row, int column) {
  float sum = 0.f;
  for (int part = 0; part < SUM; ++part) {
    const u16* plane = p.x.data + image * p.x.image + (channel * SUM + part) / SPREAD * p.x.channel;
    const u16* filter = p.weight + i64(channel * SUM + part) * KH * KW;
    for (int kh = 0; kh < KH; ++kh)
      for (int kw = 0; kw < KW; ++kw) {
        int y = row * SH + kh * DH - PAD_H, x = column * SW + kw * DW - PAD_W, k = kh * KW + kw;
        if (y < 0 || x < 0 || y % UH || x % UW || y / UH >= p.rows || x / UW >= p.columns) continue;
        sum += to_float(plane[y / UH * p.x.row + x / UW * p.x.column]) * to_float(filter[ROTATE ? KH * KW - 1 - k : k]);
      }
  }
  return sum;
}
