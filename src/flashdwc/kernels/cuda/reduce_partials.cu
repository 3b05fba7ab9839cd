// out[i] = sum over splits of partials[split][i], in a fixed order. A block takes 32 columns; its 8 warps take every 8th split.
#include "mma.cuh"

struct Params {
  const float* partials;
  u16* out;
  i64 count;
  int splits;
};

extern "C" __global__ void __launch_bounds__(256) reduce_partials(const __grid_constant__ Params p) {
  __shared__ float sums[8][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const i64 i = i64(blockIdx.x) * 32 + lane;
  float sum = 0.f;
  if (i < p.count)
    for (int s = warp; s < p.splits; s += 8) sum += p.partials[s * p.count + i];
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp == 0 && i < p.count) {
#pragma unroll
    for (int w = 1; w < 8; ++w) sum += sums[w][lane];
    p.out[i] = from_float(sum);
  }
}
