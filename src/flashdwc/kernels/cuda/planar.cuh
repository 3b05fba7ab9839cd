// The input columns behind 8 neighbouring outputs of a plane, as floats: for the kernels of few taps in NCHW.
//
// Output column c of a strip and tap kw meet in element  8 + c * SW + kw * DW - PAD_W  of a window that starts 8 columns before the strip.
#pragma once
#include "tile.cuh"

constexpr int WINDOW = 8 * (SW + 2);  // the strip's columns, 8 before and 8 behind them
constexpr int RIGHT = (KW - 1) * DW - PAD_W - (SW - 1);  // columns that the filter reaches beyond the strip's
// A plane of few columns is one strip wide: NARROW is then the number of its columns, else 0, and STRIP the outputs of a strip's row.
constexpr int FIRST = NARROW ? 8 : 0, LAST = NARROW ? 8 + NARROW : WINDOW;
static_assert(NARROW ? NARROW <= 8 * SW && STRIP <= 8 : 0 <= PAD_W && PAD_W <= 8 && RIGHT <= 8 && STRIP == 8);

// First column and row of a strip of a plane.
__device__ __forceinline__ int strip_column(int strip, int strips_across) { return NARROW ? 0 : strip % strips_across * 8; }
__device__ __forceinline__ int strip_row(int strip, int strips_across) { return (NARROW ? strip : strip / strips_across) * ROWS; }

template <class Params> __device__ __forceinline__ int out_columns_of(const Params& p) { return NARROW ? STRIP : p.out_columns; }

__device__ constexpr int access_of(int n) { return n <= 1 ? 1 : n <= 2 ? 2 : n <= 4 ? 4 : 8; }  // elements of the smallest for n
__device__ constexpr int window_column(int c, int kw) { return 8 + c * SW + kw * DW - PAD_W; }
__device__ constexpr bool in_window(int column) { return FIRST <= column && column < LAST; }

// Whatever meets in a strip of ROWS x 8 outputs and `height` filter rows: read(in, y) gives the window of row y behind the strip,
// meet(r, c, kh, kw, x) takes output (r, c), tap (kh, kw) and the input x between them.
template <int height, class Read, class Meet> __device__ __forceinline__ void walk_strip(Read read, Meet meet) {
#pragma unroll
  for (int y = 0; y < (height - 1) * DH + (ROWS - 1) * SH + 1; ++y) {
    float in[WINDOW];
    read(in, y);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const int kh = y - r * SH;
      if (kh < 0 || kh % DH || kh / DH >= height) continue;
#pragma unroll
      for (int kw = 0; kw < KW; ++kw)
#pragma unroll
        for (int c = 0; c < STRIP; ++c)
          if (in_window(window_column(c, kw))) meet(r, c, kh / DH, kw, in[window_column(c, kw)]);
    }
  }
}
template <class Read> __device__ __forceinline__ void convolve_strip(float (&acc)[ROWS][8], const float (&w)[KH * KW], Read read) {
  walk_strip<KH>(read, [&](int r, int c, int kh, int kw, float x) { acc[r][c] += w[kh * KW + kw] * x; });
}
template <int height, class Read>
__device__ __forceinline__ void correlate_strip(float (&acc)[height][KW], const float (&g)[ROWS][8], Read read) {
  walk_strip<height>(read, [&](int r, int c, int kh, int kw, float x) { acc[kh][kw] += g[r][c] * x; });
}

// Rounds a strip's row and watches it for inf and NaN.
template <class Epilogue> __device__ __forceinline__ Octet round_row(const float (&acc)[8], Epilogue epilogue, int channel, u32& watched) {
  Octet v;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    v.word[e] = pack(epilogue.finish(acc[2 * e], channel), epilogue.finish(acc[2 * e + 1], channel));
    watch(watched, v.word[e]);
  }
  return v;
}

// 8 columns, of which those from first to last are needed; zero outside the plane. at is the element of `column`.
template <int VEC, int first = 0, int last = 8>
__device__ __forceinline__ void read_columns(float* to, const u16* at, int column, bool row_inside, int columns) {
  Octet v = read8<VEC>(at, [&](int e) {
    return e + VEC > first && e < last && row_inside && unsigned(column + e) < unsigned(columns);
  });
#pragma unroll
  for (int e = 0; e < 8; ++e) to[e] = to_float(v.element[e]);
}

template <int VEC, class Params>
__device__ __forceinline__ void read_window(float (&window)[WINDOW], const u16* line, int column, bool row_inside, const Params& p) {
  line = pinned(line + column);
  constexpr int before = access_of(PAD_W) < VEC ? access_of(PAD_W) : VEC, behind = access_of(RIGHT) < VEC ? access_of(RIGHT) : VEC;
  const int columns = NARROW ? NARROW : p.columns;
  if constexpr (!NARROW && PAD_W > 0) read_columns<before, 8 - PAD_W, 8>(window, line - 8, column - 8, row_inside, columns);
#pragma unroll
  for (int i = 0; i < SW; ++i) read_columns<VEC>(window + 8 + 8 * i, line + 8 * i, column + 8 * i, row_inside, columns);
  if constexpr (!NARROW && RIGHT > 0) read_columns<behind, 0, RIGHT>(window + WINDOW - 8, line + 8 * SW, column + 8 * SW, row_inside, columns);
}
