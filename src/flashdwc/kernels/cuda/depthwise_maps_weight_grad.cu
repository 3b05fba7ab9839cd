// Depthwise convolution of few taps, weight gradient, 16 bit NCHW, small maps: on CUDA cores, from shared memory.
//
// A block takes MAPS channels and every `splits`-th image; it copies an image's maps of input and gradients to shared memory while it
// multiplies those of the image before. LANES threads share a channel; each has the sums of the whole filter in registers, in fp32, and
// takes strips of ROWS x 8 gradients. At the end the sums of a channel's threads are added, always in the same order, and the block writes one of
// `splits` partial results (or the result, where there is one split).
#include "epilogue.cuh"
#include "maps.cuh"

constexpr int TAPS = KH * KW, SUM_PITCH = TAPS | 1;
static_assert(MAPS * LANES <= THREADS && THREADS % 32 == 0);

struct Params {
  Tensor4 x, dy;
  float* partials;  // [split][channel][KH * KW]
  u16* out;
  int images, channels, rows, columns, out_rows, out_columns, channel_blocks, splits;
};

extern "C" __global__ void __launch_bounds__(THREADS) depthwise_maps_weight_grad(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) u16 shared[];
  const int channel0 = blockIdx.x % p.channel_blocks * MAPS, maps = min(MAPS, p.channels - channel0);
  const int mine = map_of_thread(), lane = lane_of_thread(), split = blockIdx.x / p.channel_blocks;
  const int strips = mine < maps && lane < LANES ? STRIPS : 0;
  u16 *map0 = shared + GAP * PITCH + LEFT, *gradients = shared + STAGE, *run = gradients + OUT_STAGE, *out_run = run + RUN;
  auto fetch = [&](int image) {
    copy_run<RUN_VEC>(run, p.x.data + image * p.x.image + channel0 * p.x.channel, maps * MAP_ROWS * MAP_COLUMNS);
    copy_run<OUT_RUN_VEC>(out_run, p.dy.data + image * p.dy.image + channel0 * p.dy.channel, maps * OUT_ROWS * OUT_COLUMNS);
    copy_async_commit();
  };
  fetch(split);
  clear_shared(shared, STAGE + OUT_STAGE);
  const u16 *map = map0 + mine * MAP_PITCH - PAD_H * PITCH, *gradient = gradients + mine * OUT_MAP_PITCH;

  float acc[KH][KW];
#pragma unroll
  for (int k = 0; k < TAPS; ++k) acc[k / KW][k % KW] = 0.f;
  for (int image = split; image < p.images; image += p.splits) {
    copy_async_wait<0>();
    __syncthreads();
    spread<IN_VEC, MAP_ROWS, MAP_COLUMNS, PITCH, MAP_PITCH>(map0, run, maps);
    spread<OUT_VEC, OUT_ROWS, OUT_COLUMNS, OUT_PITCH, OUT_MAP_PITCH>(gradients, out_run, maps);
    __syncthreads();
    if (image + p.splits < p.images) fetch(image + p.splits);
#pragma unroll 1
    for (int i = 0; i < (STRIPS + LANES - 1) / LANES; ++i) {
      const int strip = i * LANES + lane;
      if (strip >= strips) break;
      const int column = strip_column(strip, STRIPS_ACROSS), row0 = strip_row(strip, STRIPS_ACROSS);
      const u16* source = map + row0 * SH * PITCH + column * SW;
      float g[ROWS][8];
#pragma unroll
      for (int r = 0; r < ROWS; ++r) read_shared<8>(g[r], gradient + (row0 + r) * OUT_PITCH + column);
      correlate_strip<KH>(acc, g, [&](float (&in)[WINDOW], int y) { read_map_window(in, source + y * PITCH); });
    }
  }

  __syncthreads();
  float* sums = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int k = 0; k < TAPS; ++k) sums[threadIdx.x * SUM_PITCH + k] = acc[k / KW][k % KW];
  __syncthreads();
  for (int i = threadIdx.x; i < maps * TAPS; i += THREADS) {
    float sum = 0.f;
    for (int t = 0; t < LANES; ++t) sum += sums[thread_of(i / TAPS, t) * SUM_PITCH + i % TAPS];
    write_tap(p, split, channel0 + i / TAPS, i % TAPS, sum);
  }
}
