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

template <int width> __device__ __forceinline__ void write_pixel(u16* p, const float (&v)[width]) {
  if constexpr (width == 1) *p = from_float(v[0]);
  if constexpr (width == 2) *reinterpret_cast<u32*>(p) = pack(v[0], v[1]);
  if constexpr (width == 4) *reinterpret_cast<uint2*>(p) = make_uint2(pack(v[0], v[1]), pack(v[2], v[3]));
}
