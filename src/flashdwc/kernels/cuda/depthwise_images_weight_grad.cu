// Depthwise convolution of stride 1, weight gradient, 16 bit, any layout, of maps of at most 16 x 16: on tensor cores, 16 images at once.
//
// For an input row y and an output row r that meet in filter row kh, G[k][j] += sum_m X[y][m][k] dY[r][m][j]: m numbers images, k and j are the
// columns of whole rows; then dW[kh][kw] is the sum over j of G[j + kw D - PAD_W][j].
//
// A block takes 8 channels, HEIGHT filter rows, and groups of images (images.cuh), one set of warps every SETS-th group and a warp of it each
// channel. A warp keeps G of its filter rows in registers, in fp32, to the end, when those of all sets are added.
#include "epilogue.cuh"
#include "images.cuh"

using Inputs = Maps<ROWS, COLUMNS>;
using Outputs = Maps<OUT_ROWS, OUT_COLUMNS>;
constexpr int EIGHTHS = Inputs::eighths, OUT_EIGHTHS = Outputs::eighths;
constexpr int LINE_BYTES = Inputs::line_bytes > Outputs::line_bytes ? Inputs::line_bytes : Outputs::line_bytes;
constexpr int SET_BYTES = Inputs::plane_bytes + Outputs::plane_bytes + LINE_BYTES;
constexpr int SUMS = HEIGHT * OUT_EIGHTHS * 4;  // of a lane

struct Params {
  Tensor4 x, dy;
  float* partials;  // [split][channel][KH * KW]
  u16* out;
  int images, channels, rows, columns, out_rows, out_columns, channel_blocks, groups, share, height_groups, splits;
};

using Sums = float[HEIGHT][OUT_EIGHTHS][4];

// Those of the filter rows from first_kh on.
template <int first_kh> __device__ __forceinline__ void accumulate(Sums& g, u32 input, u32 output) {
  const int lane = threadIdx.x % 32;
  // input: matrices (columns, images) are (low, low), (high, low), (low, high), (high, high); only low columns where there are no more
  const int image = lane % 8 + (EIGHTHS == 2 ? lane / 16 : lane / 8 % 2) * 8, eighth = EIGHTHS == 2 ? lane / 8 % 2 : 0;
  input += Inputs::block(0, eighth, image) * 16, output += lane % GROUP * 16;
#pragma unroll
  for (int r = 0; r < OUT_ROWS; ++r) {
    u32 b[OUT_EIGHTHS][2];
#pragma unroll
    for (int j = 0; j < OUT_EIGHTHS; ++j) load_matrix2_transposed(b[j], output + Outputs::block(r, j, 0) * 16);
#pragma unroll
    for (int kh = 0; kh < HEIGHT; ++kh) {
      const int y = r + (first_kh + kh) * DH - PAD_H;
      if (first_kh + kh >= KH || y < 0 || y >= ROWS) continue;
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

// That for whichever filter rows a block has.
template <int candidate = 0> __device__ __forceinline__ void accumulate_from(int first_kh, Sums& g, u32 input, u32 output) {
  if constexpr (candidate + HEIGHT < KH) {
    if (first_kh != candidate) return accumulate_from<candidate + HEIGHT>(first_kh, g, input, output);
  }
  accumulate<candidate>(g, input, output);
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

// Those of all sets become the first set's, always in the same order; AT_ONCE of them pass through shared memory at a time.
__device__ __forceinline__ void add_sets(Sums& g, u16* shared, int set) {
  constexpr int AT_ONCE = SET_BYTES / (SET * 4);
  float* mine = &g[0][0][0];
  auto place = [&](int of_set, int i) -> float& { return (reinterpret_cast<float*>(shared) + of_set * (SET_BYTES / 4) + i * SET)[threadIdx.x % SET]; };
#pragma unroll
  for (int first = 0; first < SUMS; first += AT_ONCE) {
    __syncthreads();
#pragma unroll
    for (int i = first; set > 0 && i < SUMS && i < first + AT_ONCE; ++i) place(set, i - first) = mine[i];
    __syncthreads();
#pragma unroll
    for (int i = first; set == 0 && i < SUMS && i < first + AT_ONCE; ++i)
#pragma unroll
      for (int other = 1; other < SETS; ++other) mine[i] += place(other, i - first);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) depthwise_images_weight_grad(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) u16 shared[];
  const int set = threadIdx.x / SET, warp = threadIdx.x % SET / 32;
  char* inputs = reinterpret_cast<char*>(shared) + set * SET_BYTES;
  char *outputs = inputs + Inputs::plane_bytes, *lines = outputs + Outputs::plane_bytes;
  const int channel = blockIdx.x % p.channel_blocks * CHANNELS, part = blockIdx.x / p.channel_blocks;
  const int first_kh = part % p.height_groups * HEIGHT, split = part / p.height_groups;
  const int first = split * p.share + set, last = min((split + 1) * p.share, p.groups);

  Sums g;
#pragma unroll
  for (int i = 0; i < SUMS; ++i) (&g[0][0][0])[i] = 0.f;
  if (first < last) Inputs::fetch(lines, p.x, first * GROUP, p.images, channel);
  for (int group = first; group < last; group += SETS) {
    auto sync = [&] { sync_threads<SET>(set + 1); };
    auto arrived = [&] {
      copy_async_commit();
      copy_async_wait<0>();
      sync();
    };
    arrived();
    Inputs::arrange(lines, inputs);
    sync();
    Outputs::fetch(lines, p.dy, group * GROUP, p.images, channel);
    arrived();
    Outputs::arrange(lines, outputs);
    sync();
    if (group + SETS < last) Inputs::fetch(lines, p.x, (group + SETS) * GROUP, p.images, channel);  // while sums are taken
    copy_async_commit();
    accumulate_from(first_kh, g, shared_address(inputs) + warp * Inputs::plane, shared_address(outputs) + warp * Outputs::plane);
  }
  if constexpr (SETS > 1) add_sets(g, shared, set);
  __syncthreads();
  if (set > 0) return;
  float* scratch = reinterpret_cast<float*>(shared) + warp * (OUT_EIGHTHS * 16 * 8);
  static_assert(WARPS * OUT_EIGHTHS * 16 * 8 * 4 <= SET_BYTES);
#pragma unroll
  for (int kh = 0; kh < HEIGHT; ++kh) write_taps(p, scratch, g[kh], split, channel + warp, first_kh + kh);
}
