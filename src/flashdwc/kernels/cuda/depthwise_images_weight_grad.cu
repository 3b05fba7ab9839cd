// Depthwise convolution of stride 1, weight gradient, 16 bit, channels_last, of maps of at most 16 x 16: on tensor cores, 16 images at once.
//
// For an input row y and an output row r that meet in filter row kh, G[k][j] += sum_m X[y][m][k] dY[r][m][j]: m numbers images, k and j are the
// columns of whole rows; then dW[kh][kw] is the sum over j of G[j + kw D - PAD_W][j].
//
// A block takes 8 channels, a warp each, HEIGHT filter rows, and one group of images (images.cuh) after the other. A warp keeps G of its
// filter rows in registers, in fp32, to the end.
#include "epilogue.cuh"
#include "images.cuh"

using Inputs = Maps<ROWS, COLUMNS>;
using Outputs = Maps<OUT_ROWS, OUT_COLUMNS>;
constexpr int EIGHTHS = Inputs::eighths, OUT_EIGHTHS = Outputs::eighths;

struct Params {
  Tensor4 x, dy;
  float* partials;  // [split][channel][KH * KW]
  u16* out;
  int images, channels, rows, columns, out_rows, out_columns, channel_blocks, groups, share, height_groups, splits;
};

using Sums = float[HEIGHT][OUT_EIGHTHS][4];

// above: rows of x above those of dy that meet the first of the block's filter rows there.
__device__ __forceinline__ void accumulate(Sums& g, u32 input, u32 output, int above) {
  const int lane = threadIdx.x % 32;
  // input: matrices (columns, images) are (low, low), (high, low), (low, high), (high, high); only low columns where there are no more
  const int image = lane % 8 + (EIGHTHS == 2 ? lane / 16 : lane / 8 % 2) * 8, eighth = EIGHTHS == 2 ? lane / 8 % 2 : 0;
  input += Inputs::block(0, eighth, image) * 16, output += lane % GROUP * 16;
#pragma unroll 1
  for (int r = 0; r < OUT_ROWS; ++r) {
    u32 b[OUT_EIGHTHS][2];
#pragma unroll
    for (int j = 0; j < OUT_EIGHTHS; ++j) load_matrix2_transposed(b[j], output + Outputs::block(r, j, 0) * 16);
#pragma unroll
    for (int kh = 0; kh < HEIGHT; ++kh) {
      const int y = r + above + kh * DH;
      if (unsigned(y) >= unsigned(ROWS)) continue;  // the same for all lanes
      u32 a[4] = {0, 0, 0, 0};
      if constexpr (EIGHTHS == 2) {
        load_matrix4_transposed(a, input + Inputs::block(y, 0, 0) * 16);
      } else {
        u32 low[2];
        load_matrix2_transposed(low, input + Inputs::block(y, 0, 0) * 16);
        a[0] = low[0], a[2] = low[1];
      }
#pragma unroll
      for (int j = 0; j < OUT_EIGHTHS; ++j) mma16(g[kh][j], a, b[j][0], b[j][1]);
    }
  }
}

// The taps of filter row kh, by way of scratch: [8 columns j][16 columns k][column].
__device__ __forceinline__ void write_taps(const Params& p, float* scratch, const float (&g)[OUT_EIGHTHS][4], int split, int channel, int kh) {
  share_sums(scratch, g);
  if (kh >= KH) return;
  for (int kw = threadIdx.x % 32; kw < KW; kw += 32) {
    float sum = 0.f;
    for (int j = 0; j < OUT_COLUMNS; ++j) {  // behind them dY is 0, but X may be inf
      const int k = j + kw * DW - PAD_W;
      if (k >= 0 && k < COLUMNS) sum += scratch[(j / 8 * 16 + k) * 8 + j % 8];
    }
    write_tap(p, split, channel, kh * KW + kw, sum);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) depthwise_images_weight_grad(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) u16 shared[];
  char *inputs = reinterpret_cast<char*>(shared), *outputs = inputs + Inputs::plane_bytes;
  const u32 inputs_at = shared_address(shared), outputs_at = inputs_at + Inputs::plane_bytes, lines = outputs_at + Outputs::plane_bytes;
  const int warp = threadIdx.x / 32, channel = blockIdx.x % p.channel_blocks * CHANNELS, part = blockIdx.x / p.channel_blocks;
  const int first_kh = part % p.height_groups * HEIGHT, split = part / p.height_groups;
  const int first = split * p.share, last = min(first + p.share, p.groups);

  Sums g;
#pragma unroll
  for (int i = 0; i < HEIGHT * OUT_EIGHTHS * 4; ++i) (&g[0][0][0])[i] = 0.f;
  Inputs::fetch(lines, p.x, first * GROUP, p.images, channel);
  for (int group = first; group < last; ++group) {
    auto arrived = [] {
      copy_async_commit();
      copy_async_wait<0>();
      __syncthreads();
    };
    arrived();
    Inputs::transpose(lines, inputs);
    __syncthreads();
    Outputs::fetch(lines, p.dy, group * GROUP, p.images, channel);
    arrived();
    Outputs::transpose(lines, outputs);
    __syncthreads();
    if (group + 1 < last) Inputs::fetch(lines, p.x, (group + 1) * GROUP, p.images, channel);  // while sums are taken
    copy_async_commit();
    accumulate(g, inputs_at + warp * Inputs::plane, outputs_at + warp * Outputs::plane, first_kh * DH - PAD_H);
  }
  float* scratch = reinterpret_cast<float*>(shared) + warp * (OUT_EIGHTHS * 16 * 8);
  static_assert(WARPS * OUT_EIGHTHS * 16 * 8 * 4 <= Inputs::plane_bytes + Outputs::plane_bytes);
  __syncthreads();
#pragma unroll
  for (int kh = 0; kh < HEIGHT; ++kh) write_taps(p, scratch, g[kh], split, channel + warp, first_kh + kh);
}
