// Depthwise convolution of few taps, forward or input gradient of stride 1, 16 bit NCHW, on CUDA cores: pure memory traffic.
//
// A thread has one plane's filter in registers, in fp32, and walks over strips of ROWS x 8 outputs. Of each input row behind a strip it
// reads the strip's columns and, where the filter reaches beyond them, the 8 before and behind, whose lines its neighbours read.
//
// 0 * inf on padding makes NaN of an output that never meets the inf: a strip with outputs that are not finite is computed again, tap
// by tap.
//
//   block:  LANES threads for each of THREADS / LANES planes
#include "by_taps.cuh"
#include "epilogue.cuh"
#include "planar.cuh"

static_assert(THREADS % LANES == 0);

struct Params {
  Tensor4 x, y;
  const u16 *weight, *bias;
  int planes, channels, rows, columns, out_rows, out_columns, strips_across, strips, parts;
};

// The rows under a strip, while the thread waits for its filter; those beside them are under other strips.
__device__ __forceinline__ void prefetch_inputs(const Params& p, const u16* source, int strip, int strips) {
  const int column = strip_column(strip, p.strips_across) * SW, row = strip_row(strip, p.strips_across) * SH;
  if (strip >= strips || column >= p.columns) return;
#pragma unroll
  for (int r = 0; r < ROWS * SH; ++r)
    if (row + r < p.rows) prefetch(source + (row + r) * p.x.row + column);
}

// Writes every thread's 8 outputs. EXCHANGE: the warp's outputs pass through shared memory, so that neighbouring threads write neighbouring
// elements; for large problems where alignment allows narrow accesses only. valid: how many of the thread's outputs there are.
__device__ __forceinline__ void write_outputs(u16* to, const Octet& v, int valid) {
  if constexpr (!EXCHANGE) {
    write8<OUT_VEC>(to, v, [&](int e) { return e < valid; });
  } else {
    using Piece = typename Access<OUT_VEC>::type;
    __shared__ uint4 exchange[THREADS];
    const int lane = threadIdx.x % 32;
    uint4* warp = exchange + threadIdx.x - lane;
    __syncwarp();
    warp[lane] = v.quad;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 8 / OUT_VEC; ++i) {
      const int piece = i * 32 + lane, owner = piece * OUT_VEC / 8, e = piece * OUT_VEC % 8;
      u16* target = reinterpret_cast<u16*>(__shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(to), owner)) + e;
      if (e < __shfl_sync(0xffffffffu, valid, owner)) *reinterpret_cast<Piece*>(target) = reinterpret_cast<const Piece*>(warp)[piece];
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) depthwise_planar(const __grid_constant__ Params p) {
  const int wanted = blockIdx.x / p.parts * (THREADS / LANES) + threadIdx.x / LANES, plane = min(wanted, p.planes - 1);
  const int strips = wanted < p.planes ? p.strips : 0;
  const int image = plane / p.channels, channel = plane % p.channels;
  const u16* source = p.x.data + image * p.x.image + channel * p.x.channel;
  u16* target = p.y.data + image * p.y.image + channel * p.y.channel;
  const int begin = blockIdx.x % p.parts * LANES, step = p.parts * LANES;
  prefetch_inputs(p, source, begin + threadIdx.x % LANES, strips);
  const AddBias epilogue{p.bias};
  const float start = epilogue.start(channel);
  float w[KH * KW];
#pragma unroll
  for (int k = 0; k < KH * KW; ++k) w[k] = to_float(filter_element(p, channel, 0, k));

  for (int first = begin; first < p.strips; first += step) {  // all threads of a warp, as they exchange outputs
    const int strip = first + threadIdx.x % LANES, column = strip_column(strip, p.strips_across), row0 = strip_row(strip, p.strips_across);
    const int valid_rows = p.out_rows - row0;
    const int valid_columns = strip < strips ? min(out_columns_of(p) - column, 8) : 0;
    float acc[ROWS][8];
#pragma unroll
    for (int i = 0; i < ROWS * 8; ++i) acc[i / 8][i % 8] = start;
    convolve_strip(acc, w, [&](float (&in)[WINDOW], int y) {
      const int row = row0 * SH - PAD_H + y;
      read_window<IN_VEC>(in, source + row * p.x.row, column * SW, unsigned(row) < unsigned(p.rows) && strip < strips, p);
    });
    u32 watched = 0;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const Octet v = round_row(acc[r], epilogue, channel, watched);
      write_outputs(target + (row0 + r) * p.y.row + column, v, r < valid_rows ? valid_columns : 0);
    }
    const bool bad = watched_non_finite(watched);
    __syncwarp();  // what is overwritten may be another thread's
#pragma unroll 1
    for (int i = 0; bad && i < ROWS * 8; ++i) {
      const int r = i / 8, c = i % 8;
      if (r < valid_rows && c < valid_columns) output_by_taps(p, image, channel, row0 + r, column + c);
    }
  }
}
