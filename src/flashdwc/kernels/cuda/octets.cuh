// Pixels of channels_last tensors in shared memory as they lie in memory, for depthwise_octets.cu and depthwise_octets_weight_grad.cu: as
// [slot][row][column][channel], where a pixel's octets of channels (16 bytes) are swapped so that a warp reads one octet of many pixels
// without bank conflicts.
//
// All images are one column of rows, `period` rows each: an image's own, and rows of zeros that are the padding below it and above the next.
#pragma once
#include "tile.cuh"
#include "walk.cuh"

constexpr int OCTETS = 8, CHANNELS = 8 * OCTETS, PIXEL_BYTES = 2 * CHANNELS, WARPS = THREADS / 32;  // a pixel: a line of memory

__device__ __forceinline__ Octet load_octet(const char* from) {
  Octet v;
  v.quad = *reinterpret_cast<const uint4*>(from);
  return v;
}

struct Place {  // a row of the column of images; rows, columns, channels: of the tensor
  int row, column, channel, images, period, rows, columns, channels;
};

// Slots of rows of pixels. An octet lies in its place xor swizzle(row in the slot, column), which is the xor of one of each.
template <int slots_, int rows_, int pixels_, int (*swizzle_)(int, int)> struct Pixels {
  static constexpr int slots = slots_, rows = rows_, pixels = pixels_;
  static constexpr int row_bytes = pixels * PIXEL_BYTES, slot_bytes = rows * row_bytes, bytes = slots * slot_bytes;
  __device__ static __forceinline__ int next(int slot) { return slot + 1 == slots ? 0 : slot + 1; }
  __device__ static __forceinline__ int place(int octet, int row, int column) { return (octet ^ swizzle_(row, column)) * 16; }

  // Visits what a thread moves of a slot: an octet of pixels that are `stride` columns apart, of some rows.
  // visit(offset in the slot, address in the tensor, is it inside)
  static constexpr int warps_in_row = WARPS > rows ? WARPS / rows : 1, stride = 4 * warps_in_row, count = (pixels + stride - 1) / stride;
  static_assert(WARPS > rows ? WARPS % rows == 0 : rows % WARPS == 0);
  template <class Visit> __device__ static __forceinline__ void each(const Tensor4& x, const Place& at, Visit visit) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int octet = lane % 8, column = lane / 8 + warp % warps_in_row * 4, c = at.channel + 8 * octet;
#pragma unroll
    for (int row = warp / warps_in_row; row < rows; row += WARPS / warps_in_row) {
      const int down = at.row + row, image = unsigned(down) / unsigned(at.period), y = down - image * at.period, x0 = at.column + column;
      const u16* p = x.data + image * x.image + y * x.row + x0 * x.column + c;
      const i64 step = stride * x.column;
      const bool inside = down >= 0 && image < at.images && y < at.rows && c < at.channels;
      const int first = row * row_bytes + column * PIXEL_BYTES + place(octet, row, column);
#pragma unroll
      for (int i = 0; i < count; ++i, p += step)  // stride * i and column have no bit in common that swizzle_ looks at
        if (pixels % stride == 0 || i + 1 < count || column + stride * i < pixels)
          visit((first ^ swizzle_(0, stride * i) * 16) + stride * i * PIXEL_BYTES, p, inside && unsigned(x0 + stride * i) < unsigned(at.columns));
    }
  }

  // Starts copies into a slot, zeros outside of the tensor.
  __device__ static __forceinline__ void fetch(u32 slot, const Tensor4& x, const Place& at) {
    each(x, at, [=](int offset, const u16* from, bool inside) { copy_async_once(slot + offset, from, inside); });
  }
  __device__ static __forceinline__ void store(const char* slot, const Tensor4& y, const Place& at) {
    each(y, at, [=](int offset, const u16* to, bool inside) {
      if (inside) *reinterpret_cast<uint4*>(const_cast<u16*>(to)) = *reinterpret_cast<const uint4*>(slot + offset);
    });
  }
};
