// The input columns behind 8 neighbouring outputs of a plane, as floats: for the kernels of few taps in NCHW.
//
// Output column c of a strip and tap kw meet in element  8 + c * SW + kw * DW - PAD_W  of a window that starts 8 columns before the strip.
#pragma once
#include "tile.cuh"

constexpr int WINDOW = 8 * (SW + 2);  // the strip's columns, 8 before and 8 behind them
constexpr int RIGHT = (KW - 1) * DW - PAD_W - (SW - 1);  // columns that the filter reaches beyond the strip's
constexpr int FIRST = NARROW ? 8 : 0, LAST = NARROW ? WINDOW - 8 : WINDOW;  // a NARROW plane has none beyond its one strip's
static_assert(NARROW || (0 <= PAD_W && PAD_W <= 8 && RIGHT <= 8));

__device__ constexpr int window_column(int c, int kw) { return 8 + c * SW + kw * DW - PAD_W; }
__device__ constexpr bool in_window(int column) { return FIRST <= column && column < LAST; }

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
