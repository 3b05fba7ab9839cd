// One pixel's width neighbouring channels as floats.
#pragma once
#include "tile.cuh"

// Zero where not inside.
template <int width> __device__ __forceinline__ void read_pixel(float (&v)[width], const u16* p, bool inside) {
  using T = typename Access<width>::type;
  union {
    T access;
    u16 element[width];
  } raw;
  raw.access = inside ? __ldg(reinterpret_cast<const T*>(p)) : T{};
#pragma unroll
  for (int e = 0; e < width; ++e) v[e] = to_float(raw.element[e]);
}

// Watches what it writes for inf and NaN.
template <int width> __device__ __forceinline__ void write_pixel(u16* p, const float (&v)[width], u32& watched) {
  u32 words[width > 2 ? 2 : 1];
#pragma unroll
  for (int e = 0; e < width; e += 2) {
    words[e / 2] = pack(v[e], width > 1 ? v[e + 1] : 0.f);
    watch(watched, words[e / 2]);
  }
  if constexpr (width == 1) *p = u16(words[0]);
  if constexpr (width == 2) *reinterpret_cast<u32*>(p) = words[0];
  if constexpr (width == 4) *reinterpret_cast<uint2*>(p) = make_uint2(words[0], words[1]);
}
