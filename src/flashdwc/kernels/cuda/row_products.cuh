// Rows of planes times a channel's filter, which a warp keeps in registers, on tensor cores.
//
// For a filter row, Y[m][j] += sum_k X[8 m + k] T[k][j] over blocks m of 8 output columns, where T[k][j] = filter[k - LEAD - j], here for
// stride 1. The windows of neighbouring blocks overlap in a row as it lies in memory. A tile is 16 blocks, of one row or of row groups one
// below the other; a lane has ROWS of its rows.
#pragma once
#include "by_taps.cuh"

constexpr int K8 = (LEAD + (KW - 1) * DW + 7 * SW + 1 + 7) / 8;  // eighths of a window
constexpr int SPAN = (KH - 1) * DH + 1, HALO = SPAN > SH ? SPAN - SH : 0;  // input rows of an output; those that its row's next one shares
constexpr int WINDOW_ROWS = (ROWS - 1) * SH + SPAN;
static_assert(K8 >= 2);

struct Filter {  // a lane's part of T
  u32 b[KH][K8];
};

template <class Params> __device__ __forceinline__ void load_filter(Filter& f, const Params& p, int channel) {
  const int lane = threadIdx.x % 32;
  const FilterReader element(first_tap(p, channel, 0), lane % 4 * 2 - lane / 4 * SW - LEAD);
#pragma unroll
  for (int kh = 0; kh < KH; ++kh)
#pragma unroll
    for (int u = 0; u < K8; ++u) f.b[kh][u] = element(kh, 8 * u) | element(kh, 8 * u + 1) << 16;
}

// window(y): address of the lane's ldmatrix row in input row y of its outputs' first row.
template <class Window, class Store> __device__ __forceinline__ void multiply(const Filter& f, const Window& window, float start, const Store& store) {
  float acc[ROWS][4];
  u32 a[2][(K8 + 1) / 2][4];
  auto load = [&](int y) {
    const u32 at = window(y);
#pragma unroll
    for (int u = 0; u < K8; u += 2) {
      if (u + 1 < K8) load_matrix4(a[y % 2][u / 2], at + 16 * u);
      else load_matrix2(a[y % 2][u / 2], at + 16 * u);
    }
  };
  load(0);
#pragma unroll
  for (int y = 0; y < WINDOW_ROWS; ++y) {
    if (y + 1 < WINDOW_ROWS) load(y + 1);
#pragma unroll
    for (int u = 0; u < K8; u += 2)
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const int kh = (y - r * SH) / DH;
        if (y < r * SH || (y - r * SH) % DH || kh >= KH) continue;
        if (kh == 0 && u == 0) mma16(acc[r], a[y % 2][0], f.b[0][0], f.b[0][1], start);
        else if (u + 1 < K8) mma16(acc[r], a[y % 2][u / 2], f.b[kh][u], f.b[kh][u + 1]);
        else mma8(acc[r], a[y % 2][u / 2], f.b[kh][u]);
      }
    if (y >= SPAN - 1 && (y - SPAN + 1) % SH == 0) store((y - SPAN + 1) / SH, acc[(y - SPAN + 1) / SH]);
  }
}
