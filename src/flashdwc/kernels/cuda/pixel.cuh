// One pixel's width neighbouring channels as floats.
#pragma once
#include "tile.cuh"

template <int width> using Pixel = typename Access<width>::type;

// Zero where not inside.
template <int width> __device__ __forceinline__ Pixel<width> load_pixel(const u16* p, bool inside) {
  return inside ? __ldg(reinterpret_cast<const Pixel<width>*>(p)) : Pixel<width>{};
}
// Keeps the compiler from taking a pixel apart where it is read: it would wait for it there.
__device__ __forceinline__ u16 kept(u16 v) { return v; }
__device__ __forceinline__ u32 kept(u32 v) { return anew(v); }
__device__ __forceinline__ uint2 kept(uint2 v) { return make_uint2(anew(v.x), anew(v.y)); }

template <int width> __device__ __forceinline__ void as_floats(float (&v)[width], Pixel<width> pixel) {
  union {
    Pixel<width> whole;
    u16 element[width];
  } raw;
  raw.whole = pixel;
#pragma unroll
  for (int e = 0; e < width; ++e) v[e] = to_float(raw.element[e]);
}
template <int width> __device__ __forceinline__ void read_pixel(float (&v)[width], const u16* p, bool inside) {
  as_floats(v, load_pixel<width>(p, inside));
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
