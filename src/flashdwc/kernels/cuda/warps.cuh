// Rows of planes of contiguous tensors in shared memory as they lie in memory, for depthwise_warps.cu and depthwise_warps_weight_grad.cu.
#pragma once
#include "tile.cuh"
#include "walk.cuh"

// Starts copies of rows x columns elements of a plane, vector at a time, zeros outside of it. pitch, in elements: of the rows in shared memory.
template <int rows, int columns, int pitch, int vector>
__device__ __forceinline__ void copy_rows(u32 to, const u16* plane, i64 row_step, int row0, int column0, int plane_rows, int plane_columns) {
  constexpr int chunks = columns / vector, at_once = 32 / chunks < rows ? 32 / chunks : rows;  // rows
  static_assert(chunks <= 32);
  const int lane = threadIdx.x % 32, row = lane / chunks, column = lane % chunks * vector;
  if (row >= at_once) return;
  const u16* from = pinned(plane + (row0 + row) * row_step + column0 + column);
  const i64 step = at_once * row_step;
  const bool inside = unsigned(column0 + column) < unsigned(plane_columns);
  to += 2 * (row * pitch + column);
#pragma unroll
  for (int i = 0; i < (rows + at_once - 1) / at_once; ++i, from += step)
    if (rows % at_once == 0 || i < rows / at_once || row + i * at_once < rows) {
      const bool row_inside = inside && unsigned(row0 + row + i * at_once) < unsigned(plane_rows);
      if constexpr (vector == 8) copy_async_once(to + 2 * i * at_once * pitch, from, row_inside);
      else copy_async<2 * vector>(to + 2 * i * at_once * pitch, from, row_inside);
    }
}
