// Depthwise convolution of stride 1, forward or input gradient, 16 bit, any layout, of maps of at most 16 x 16: on tensor cores, 16 images at
// once.
//
// For an input row y and an output row r, Y[r][m][j] += sum_k X[y][m][k] T[y - r][k][j]: m numbers images, k and j are the columns of whole
// rows, and T[d][k][j] = filter[d + PAD_H][k - j + PAD_W], 0 where that is no tap. Nothing is multiplied but the map, so a filter larger than
// it costs no more than one of its size.
//
// A block takes 8 channels, a warp each, and one group of images (images.cuh) after the other; copies are a group ahead. A warp keeps its
// channel's T in registers. Outputs go where the copies were, as planes, are arranged as in memory and stored.
//
// 0 * inf in T makes NaN of an output that never meets the inf: a group's outputs that are not finite are computed again, tap by tap.
#include "by_taps.cuh"
#include "images.cuh"

static_assert(SETS == 1);
using Inputs = Maps<ROWS, COLUMNS>;
using Outputs = Maps<OUT_ROWS, OUT_COLUMNS>;
constexpr int EIGHTHS = Inputs::eighths, OUT_EIGHTHS = Outputs::eighths;
constexpr int PLANES_BYTES = NHWC || GROUP * Outputs::run <= Inputs::plane_bytes ? Inputs::plane_bytes : GROUP * Outputs::run;  // outputs need scratch
constexpr int SLOT_BYTES = Inputs::line_bytes > Outputs::plane_bytes ? Inputs::line_bytes : Outputs::plane_bytes;

struct Params {
  Tensor4 x, y;
  const u16 *weight, *bias;
  int images, channels, rows, columns, out_rows, out_columns, channel_blocks, groups, share;
};

struct Filter {  // a lane's part of T
  u32 b[KH][OUT_EIGHTHS][EIGHTHS];
};

__device__ __forceinline__ void load_filter(Filter& f, const Params& p, int channel) {
  const int lane = threadIdx.x % 32;
  const FilterReader element(first_tap(p, channel, 0), lane % 4 * 2 - lane / 4 + PAD_W);
#pragma unroll
  for (int kh = 0; kh < KH; ++kh)
#pragma unroll
    for (int j = 0; j < OUT_EIGHTHS; ++j)
#pragma unroll
      for (int u = 0; u < EIGHTHS; ++u) f.b[kh][j][u] = element(kh, 8 * (u - j)) | element(kh, 8 * (u - j) + 1) << 16;
}

// A channel's plane.
__device__ __forceinline__ void multiply(const Filter& f, u32 plane, char* out_plane, float start, u32& watched) {
  const int lane = threadIdx.x % 32;
  auto load = [&](u32(&a)[4], int y) {
    const u32 at = plane + (Inputs::block(y, 0, 0) + lane % (GROUP * EIGHTHS)) * 16;
    if (EIGHTHS == 2) load_matrix4(a, at);
    else load_matrix2(a, at);
  };
#pragma unroll
  for (int r0 = 0; r0 < OUT_ROWS; r0 += 2) {
    fence(start);  // no more rows at once: registers
    float acc[2][OUT_EIGHTHS][4];
#pragma unroll
    for (int i = 0; i < 2 * OUT_EIGHTHS * 4; ++i) (&acc[0][0][0])[i] = start;
    u32 a[2][4];
    load(a[0], 0);
#pragma unroll
    for (int y = 0; y < ROWS; ++y) {
      if (y + 1 < ROWS) load(a[(y + 1) % 2], y + 1);
#pragma unroll
      for (int r = r0; r < r0 + 2 && r < OUT_ROWS; ++r)
#pragma unroll
        for (int j = 0; j < OUT_EIGHTHS; ++j) {
          const int d = y - r + PAD_H;
          if (d < 0 || d % DH || d / DH >= KH) continue;
          if constexpr (EIGHTHS == 2) mma16(acc[r - r0][j], a[y % 2], f.b[d / DH][j][0], f.b[d / DH][j][1]);
          else mma8(acc[r - r0][j], a[y % 2], f.b[d / DH][j][0]);
        }
    }
#pragma unroll
    for (int r = r0; r < r0 + 2 && r < OUT_ROWS; ++r)
#pragma unroll
      for (int j = 0; j < OUT_EIGHTHS; ++j)
#pragma unroll
        for (int h = 0; h < 2; ++h) {  // images g and g + 8
          const u32 packed = pack(acc[r - r0][j][2 * h], acc[r - r0][j][2 * h + 1]);
          watch(watched, packed);
          *reinterpret_cast<u32*>(out_plane + Outputs::block(r, j, 8 * h) * 16 + lane * 4) = packed;
        }
  }
}

__device__ __noinline__ void group_by_taps(const Params& p, int image0, int channel) {
#pragma unroll 1
  for (int i = threadIdx.x; i < GROUP * OUT_ROWS * OUT_COLUMNS * CHANNELS; i += THREADS) {
    const int c = channel + i % CHANNELS, column = i / CHANNELS % OUT_COLUMNS, row = i / (CHANNELS * OUT_COLUMNS) % OUT_ROWS;
    const int image = image0 + i / (CHANNELS * OUT_COLUMNS * OUT_ROWS);
    if (image < p.images) output_by_taps(p, image, c, row, column);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) depthwise_images(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) u16 shared[];
  char *planes = reinterpret_cast<char*>(shared), *lines = planes + PLANES_BYTES;
  const int channel = blockIdx.x % p.channel_blocks * CHANNELS, warp = threadIdx.x / 32;
  const int first = blockIdx.x / p.channel_blocks * p.share, last = min(first + p.share, p.groups);

  Inputs::fetch(lines, p.x, first * GROUP, p.images, channel);
  copy_async_commit();
  Filter filter;
  load_filter(filter, p, channel + warp);
  const AddBias epilogue{p.bias};
  const float start = epilogue.start(channel + warp);
  for (int group = first, slot = 0; group < last; ++group, slot ^= 1) {
    char *here = lines + slot * SLOT_BYTES, *other = lines + (1 - slot) * SLOT_BYTES;
    copy_async_wait<0>();
    __syncthreads();
    if (group + 1 < last) Inputs::fetch(other, p.x, (group + 1) * GROUP, p.images, channel);
    copy_async_commit();
    Inputs::arrange(here, planes);
    __syncthreads();
    u32 watched = 0;
    multiply(filter, shared_address(planes) + warp * Inputs::plane, here + warp * Outputs::plane, start, watched);
    if (__syncthreads_or(watched_non_finite(watched))) group_by_taps(p, group * GROUP, channel);
    else Outputs::store(here, planes, p.y, group * GROUP, p.images, channel);
  }
}
