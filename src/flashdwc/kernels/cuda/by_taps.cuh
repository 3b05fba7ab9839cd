// Which channel and which filter element meet, and one output pixel computed from that definition.
#pragma once
#include "epilogue.cuh"
#include "tile.cuh"

// Channel of the input behind part `part` of a channel of the result.
__device__ __forceinline__ int source_channel(int channel, int part) { return (channel * SUM + part) / SPREAD; }

// A tap of a filter in the order in which outputs meet it. Of WHOLE_KH x WHOLE_KW taps, KH x KW are used: the others, SKIPPED_KH rows and
// SKIPPED_KW columns of them in front, meet nothing but padding. In memory rows follow each other or, SWAPPED, columns.
constexpr int NEXT_TAP = (ROTATE ? -1 : 1) * (SWAPPED ? WHOLE_KH : 1), NEXT_TAP_ROW = (ROTATE ? -1 : 1) * (SWAPPED ? 1 : WHOLE_KW);
template <class Params> __device__ __forceinline__ const u16* first_tap(const Params& p, int channel, int part) {
  constexpr int taps = WHOLE_KH * WHOLE_KW, first = SKIPPED_KH * NEXT_TAP_ROW + SKIPPED_KW * NEXT_TAP;
  return p.weight + i64(channel * SUM + part) * taps + (ROTATE ? taps - 1 + first : first);
}

template <class Params> __device__ __forceinline__ u16 filter_element(const Params& p, int channel, int part, int k) {
  return first_tap(p, channel, part)[k / KW * NEXT_TAP_ROW + k % KW * NEXT_TAP];
}

// The taps kh of a filter at `offset` from the window's first element, which is `start` and a constant; 0 between taps and beyond them.
struct FilterReader {
  const u16* taps;
  int start;
  __device__ __forceinline__ FilterReader(const u16* first, int start_) : taps(pinned(DW == 1 ? first + start_ * NEXT_TAP : first)), start(start_) {}
  __device__ __forceinline__ u32 operator()(int kh, int constant) const {
    const int offset = start + constant;
    if (offset < 0 || offset % DW || offset / DW >= KW) return 0;
    return taps[kh * NEXT_TAP_ROW + (DW == 1 ? constant : offset / DW) * NEXT_TAP];
  }
};

// An output pixel tap by tap from global memory: for tiles that hold an inf or NaN, as taps outside the input must not take part and a
// non-finite element must reach its own window only.
template <class Params> __device__ __forceinline__ float by_taps(const Params& p, int image, int channel, int row, int column) {
  float sum = 0.f;
  for (int part = 0; part < SUM; ++part) {
    const u16* plane = p.x.data + image * p.x.image + source_channel(channel, part) * p.x.channel;
    for (int kh = 0; kh < KH; ++kh)
      for (int kw = 0; kw < KW; ++kw) {
        int y = row * SH + kh * DH - PAD_H, x = column * SW + kw * DW - PAD_W, k = kh * KW + kw;
        if (y < 0 || x < 0 || y % UH || x % UW || y / UH >= p.rows || x / UW >= p.columns) continue;
        sum += to_float(plane[y / UH * p.x.row + x / UW * p.x.column]) * to_float(filter_element(p, channel, part, k));
      }
  }
  return sum;
}

// What replaces an output that is not finite.
template <class Params> __device__ __forceinline__ u16 recomputed(const Params& p, int image, int channel, int row, int column) {
  const AddBias epilogue{p.bias};
  return from_float(epilogue.finish(epilogue.start(channel) + by_taps(p, image, channel, row, column), channel));
}
template <class Params> __device__ __forceinline__ void output_by_taps(const Params& p, int image, int channel, int row, int column) {
  p.y.data[image * p.y.image + channel * p.y.channel + row * p.y.row + column * p.y.column] = recomputed(p, image, channel, row, column);
}
