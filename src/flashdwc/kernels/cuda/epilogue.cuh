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
  const i64 at = i64(channel) * (KH * KW) + (SWAPPED ? tap % KW * KH + tap / KW : tap);
  if (p.splits == 1) p.out[at] = from_float(sum);
  else p.partials[i64(split) * p.channels * (KH * KW) + at] = sum;
}

// Puts a warp's sums, tiles of 16 rows x 8 columns, where all its lanes read them.
template <int tiles> __device__ __forceinline__ void share_sums(float* scratch, const float (&g)[tiles][4]) {
  const int lane = threadIdx.x % 32, row = lane / 4, column = 2 * (lane % 4);
  __syncwarp();
#pragma unroll
  for (int t = 0; t < tiles; ++t)
#pragma unroll
    for (int e = 0; e < 4; ++e) scratch[(16 * t + row + e / 2 * 8) * 8 + column + e % 2] = g[t][e];
  __syncwarp();
}

// The taps of filter row kh from a warp's G: dW[kh][kw] = sum_j G[lead + j stride + kw D][j]. G is shared by way of scratch, its size.
template <int lead, int stride, int sixteenths, class Params>
__device__ __forceinline__ void write_diagonals(const Params& p, float* scratch, const float (&g)[sixteenths][4], int split, int channel, int kh) {
  share_sums(scratch, g);
  if (kh >= KH || channel >= p.channels) return;
  for (int kw = threadIdx.x % 32; kw < KW; kw += 32) {
    float sum = 0.f;
#pragma unroll
    for (int j = 0; j < 8; ++j) sum += scratch[(lead + j * stride + kw * DW) * 8 + j];
    write_tap(p, split, channel, kh * KW + kw, sum);
  }
}
