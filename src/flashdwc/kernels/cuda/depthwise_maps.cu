// Depthwise convolution of few taps, forward or input gradient, 16 bit NCHW, small maps: on CUDA cores, from shared memory.
//
// A block takes MAPS channels and every `splits`-th image. It copies an image's maps to shared memory while it computes those of the image
// before. LANES threads share a map; each has its filter in registers, in fp32, and takes strips of ROWS x 8 outputs. Neighbouring threads
// have neighbouring strips of a map or (TURNED) of neighbouring maps, which then lie in different banks. Where rows allow
// narrow accesses only, outputs are gathered in shared memory and written as the one run that they are. The input gradient of stride 2 is
// that of stride 1 with zeros between the gradients.
//
// 0 * inf on padding makes NaN of an output that never meets the inf: a strip with outputs that are not finite is computed again, tap
// by tap.
#include "by_taps.cuh"
#include "epilogue.cuh"
#include "maps.cuh"

constexpr bool GATHERED = OUT_VEC < 4;
static_assert(MAPS * LANES <= THREADS && THREADS % 32 == 0);

struct Params {
  Tensor4 x, y;
  const u16 *weight, *bias;
  int images, channels, rows, columns, out_rows, out_columns, channel_blocks, splits;
};

extern "C" __global__ void __launch_bounds__(THREADS) depthwise_maps(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) u16 shared[];
  const int channel0 = blockIdx.x % p.channel_blocks * MAPS, maps = min(MAPS, p.channels - channel0);
  const int mine = map_of_thread(), lane = lane_of_thread(), channel = min(channel0 + mine, p.channels - 1);
  const int strips = mine < maps && lane < LANES ? STRIPS : 0;
  constexpr int map_outputs = OUT_ROWS * OUT_COLUMNS;
  u16 *map0 = shared + GAP * PITCH + LEFT, *run = shared + STAGE, *gathered = run + RUN;
  auto fetch = [&](int image) {
    copy_run<RUN_VEC>(run, p.x.data + image * p.x.image + channel0 * p.x.channel, maps * MAP_ROWS * MAP_COLUMNS);
    copy_async_commit();
  };
  auto store_gathered = [&](int image) {
    if constexpr (!GATHERED) return;
    using Piece = typename Access<OUT_RUN_VEC>::type;
    const Piece* from = reinterpret_cast<const Piece*>(gathered);
    Piece* to = reinterpret_cast<Piece*>(p.y.data + image * p.y.image + channel0 * p.y.channel);
    for (int i = threadIdx.x; i < maps * map_outputs / OUT_RUN_VEC; i += THREADS) to[i] = from[i];
  };

  int image = blockIdx.x / p.channel_blocks;
  fetch(image);
  clear_shared(shared, STAGE);
  const AddBias epilogue{p.bias};
  const float start = epilogue.start(channel);
  float w[KH * KW];
#pragma unroll
  for (int k = 0; k < KH * KW; ++k) w[k] = to_float(filter_element(p, channel, 0, k));
  const u16* map = map0 + mine * MAP_PITCH - PAD_H * PITCH;

  for (bool first = true; image < p.images; image += p.splits, first = false) {
    copy_async_wait<0>();
    __syncthreads();
    if (!first) store_gathered(image - p.splits);
    spread<IN_VEC, MAP_ROWS, MAP_COLUMNS, PITCH, MAP_PITCH, UH, UW>(map0, run, maps);
    __syncthreads();
    if (image + p.splits < p.images) fetch(image + p.splits);
    u16* out = GATHERED ? gathered + mine * map_outputs : p.y.data + image * p.y.image + channel * p.y.channel;
#pragma unroll 1
    for (int i = 0; i < (STRIPS + LANES - 1) / LANES; ++i) {
      const int strip = i * LANES + lane;
      if (strip >= strips) break;
      const int column = strip_column(strip, STRIPS_ACROSS), row0 = strip_row(strip, STRIPS_ACROSS);
      const u16* source = map + row0 * SH * PITCH + column * SW;
      float acc[ROWS][8];
#pragma unroll
      for (int i = 0; i < ROWS * 8; ++i) acc[i / 8][i % 8] = start;
      convolve_strip(acc, w, [&](float (&in)[WINDOW], int y) { read_map_window(in, source + y * PITCH); });
      u16* to = out + row0 * OUT_COLUMNS + column;
      u32 watched = 0;
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const Octet v = round_row(acc[r], epilogue, channel, watched);
        if (row0 + r < OUT_ROWS) write8<OUT_VEC>(to + r * OUT_COLUMNS, v, [&](int e) { return column + e < OUT_COLUMNS; });
      }
      if (!watched_non_finite(watched)) continue;
#pragma unroll 1
      for (int i = 0; i < ROWS * 8; ++i) {
        const int r = i / 8, c = i % 8;
        if (row0 + r < OUT_ROWS && column + c < OUT_COLUMNS) to[r * OUT_COLUMNS + c] = recomputed(p, image, channel, row0 + r, column + c);
      }
    }
  }
  __syncthreads();
  store_gathered(image - p.splits);
}
