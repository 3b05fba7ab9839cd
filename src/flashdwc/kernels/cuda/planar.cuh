// The input columns behind 8 neighbouring outputs of a plane, as floats: for the kernels of few taps in NCHW.
//
// Output column c of a strip and tap kw meet in element  8 + c * SW + kw * DW - PAD_W  of a window that starts 8 columns before the strip.
#pragma once
#include "tile.cuh"

constexpr int WINDOW = 8 * (SW + 2);  // the strip's columns, 8 before and 8 behind them
constexpr int RIGHT = (KW - 1) * DW - PAD_W - (SW - 1);  // columns that the filter reaches beyond the strip's
constexpr int FIRST = NARROW ? 8 : 0, LAST = NARROW ? WINDOW - 8 : WINDOW;  // a NARROW plane has none beyond its one strip's
static_assert(NARROW || (0 <= PAD_W && PAD_W <= 8 && RIGHT <= 8));

// First column and row of a strip of a plane.
__device__ __forceinline__ int strip_column(int strip, int strips_across) { return NARROW ? 0 : strip % strips_across * 8; }
__device__ __forceinline__ int strip_row(int strip, int strips_across) { return (NARROW ? strip : strip / strips_across) * ROWS; }

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
        for (int c = 0; c < 8; ++c)
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

// 8 columns, of which those from first to last are needed; zero outside the plane.
template <int VEC, int first = 0, int last = 8>
__device__ __forceinline__ void read_columns(float* to, const u16* line, int column, bool row_inside, int columns) {
  Octet v = read8<VEC>(line + column, [&](int e) {
    return e + VEC > first && e < last && row_inside && unsigned(column + e) < unsigned(columns);
  });
#pragma unroll
  for (int e = 0; e < 8; ++e) to[e] = to_float(v.element[e]);
}

template <int VEC>
__device__ __forceinline__ void read_window(float (&window)[WINDOW], const u16* line, int column, bool row_inside, int columns) {
  if constexpr (!NARROW && PAD_W > 0) read_columns<VEC, 8 - PAD_W, 8>(window, line, column - 8, row_inside, columns);
#pragma unroll
  for (int i = 0; i < SW; ++i) read_columns<VEC>(window + 8 + 8 * i, line, column + 8 * i, row_inside, columns);
  if constexpr (!NARROW && RIGHT > 0) read_columns<VEC, 0, RIGHT>(window + WINDOW - 8, line, column + 8 * SW, row_inside, columns);
}
