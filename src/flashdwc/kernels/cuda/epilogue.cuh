// What happens to an element between global memory and the arithmetic (prologue), and between the arithmetic and global memory
// (epilogue). A kernel takes both as template parameters, so that a fusion is one more struct here.
#pragma once
#include "mma.cuh"

struct Identity {  // applied to the two 16-bit elements of a word; what lies outside the input is zero before and after
  static constexpr bool KEEPS_ZERO = true;
  __device__ __forceinline__ u32 operator()(u32 pair, int channel) const { return pair; }
};

struct AddBias {
  const u16* bias;  // [C] or null
  __device__ __forceinline__ float start(int channel) const { return bias ? to_float(bias[channel]) : 0.f; }  // what a sum starts from
  __device__ __forceinline__ float finish(float sum, int channel) const { return sum; }
};

// A tap's sum of a weight gradient: the result where there is one split, else one of `splits` partial results.
template <class Params> __device__ __forceinline__ void write_tap(const Params& p, int split, int channel, int tap, float sum) {
  const i64 at = i64(channel) * (KH * KW) + tap;
  if (p.splits == 1) p.out[at] = from_float(sum);
  else p.partials[i64(split) * p.channels * (KH * KW) + at] = sum;
}
