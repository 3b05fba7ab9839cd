// Sums of a channel's weight gradient from rows of planes, which a warp keeps in registers, in fp32, on tensor cores.
//
// For an input row and an output row that meet in filter row kh, G[i][j] = sum_b X[8 b - LEAD + i] dY[8 b + j] over blocks b of 8 output
// columns; then dW[kh][kw] = sum_j G[LEAD + kw D + j][j]. A tile is 16 blocks, of one row or of row groups one below the other; ROWS of its
// rows meet HEIGHT filter rows.
#pragma once
#include "epilogue.cuh"

constexpr int WINDOW = LEAD + (KW - 1) * DW + 8, M16 = (WINDOW + 15) / 16, HALO = (HEIGHT - 1) * DH;

// Of the tile, whose columns the lane's ldmatrix row is: matrices (i, b) are (low, low), (high, low), (low, high), (high, high).
__device__ __forceinline__ int input_block() { return threadIdx.x % 8 + threadIdx.x % 32 / 16 * 8; }

// window(y): address of the lane's ldmatrix row in input row y; output: in the first output row.
template <int out_row_bytes, class Window>
__device__ __forceinline__ void accumulate(float (&g)[HEIGHT][M16][4], const Window& window, u32 output) {
  u32 b[ROWS][2];
#pragma unroll
  for (int y = 0; y < ROWS + HALO; ++y) {
    if (y < ROWS) load_matrix2_transposed(b[y], output + y * out_row_bytes);
    const u32 at = window(y);
#pragma unroll
    for (int m = 0; m < M16; ++m) {
      u32 a[4];
      load_matrix4_transposed(a, at + 32 * m);
#pragma unroll
      for (int r = 0; r < ROWS; ++r)
        if (y >= r && (y - r) % DH == 0 && (y - r) / DH < HEIGHT) mma16(g[(y - r) / DH][m], a, b[r][0], b[r][1]);
    }
  }
}
