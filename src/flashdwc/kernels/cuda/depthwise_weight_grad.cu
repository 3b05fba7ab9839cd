// Depthwise convolution, weight gradient, 16 bit, on tensor cores.
//
// For input row y and output row h, which meet in filter row kh where  y = h * S + kh * D - P:
// G[i][j] = sum_b X[8 b S + i] dY[8 b + j]  over blocks b of 8 output columns; then  dW[kh][kw] = sum_j G[j S + kw D][j].
// Both operands come from planar tiles through transposing ldmatrix; the 16 blocks b of one mma are BLOCKS columns x GROUPS row groups
// x IMAGES. G stays in registers, in fp32, over all tiles of a block; the diagonal sums are taken once at the end and written as one
// of `splits` partial results, which reduce_partials.cu adds in a fixed order, or, where there is one split, as the result.
// LINEAR: tensors of one row; the rows of a tile are parts of it, one behind the other.
// LEAD columns are loaded before the window: the tile then starts where global memory is aligned (NCHW).
//
//   block (channels, HEIGHT filter rows, split); a warp owns PER_WARP channels
#include "epilogue.cuh"
#include "tile.cuh"

constexpr int WINDOW = LEAD + (KW - 1) * DW + 7 * SW + 1;
constexpr int M16 = (WINDOW + 15) / 16;
constexpr int GROUP_STEP = ROWS * SH;
constexpr int SPAN = (HEIGHT - 1) * DH + (ROWS - 1) * SH + 1;
constexpr int TILE_ROWS = (GROUPS - 1) * GROUP_STEP + SPAN;
constexpr int TILE_COLUMNS = (BLOCKS - 1) * 8 * SW + 16 * M16;
constexpr int OUT_ROWS = GROUPS * ROWS, OUT_COLUMNS = BLOCKS * 8;
constexpr int WARPS = THREADS / 32, PER_WARP = CHANNELS / WARPS;

using Input = Tile<IN_NHWC, IN_VEC, SHIFT, CHANNELS, IMAGES, TILE_ROWS, TILE_COLUMNS, ROW_PITCH, IMAGE_PITCH, PLANE_PITCH, OCTET_PITCH,
                   LINEAR ? OUT_COLUMNS * SW : 0>;
using Output = Tile<OUT_NHWC, OUT_VEC, 0, CHANNELS, IMAGES, OUT_ROWS, OUT_COLUMNS, OUT_COLUMNS, OUT_IMAGE_PITCH, OUT_PLANE_PITCH,
                    OUT_OCTET_PITCH, LINEAR ? OUT_COLUMNS : 0>;

static_assert(BLOCKS * GROUPS * IMAGES == 16 && CHANNELS % WARPS == 0);

struct Params {
  Tensor4 x, dy;
  float* partials;  // [split][channel][KH * KW]
  u16* out;
  int images, channels, rows, columns, out_rows, out_columns, tiles_across, tiles_down, channel_blocks, height_blocks, tiles, splits;
};

__device__ __forceinline__ void accumulate(float (&g)[HEIGHT][M16][4], u32 input, u32 output) {
  u32 b[ROWS][2];
#pragma unroll
  for (int y = 0; y < SPAN; ++y) {
    bool used = false;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const int k = y - r * SH;
      if (k < 0 || k % DH || k / DH >= HEIGHT) continue;
      used = true;
      if (k == 0) load_matrix2_transposed(b[r], output + 2 * r * OUT_COLUMNS);
    }
    if (!used) continue;
#pragma unroll
    for (int m = 0; m < M16; ++m) {
      u32 a[4];
      load_matrix4_transposed(a, input + 2 * (y * ROW_PITCH + 16 * m));
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const int k = y - r * SH;
        if (k < 0 || k % DH || k / DH >= HEIGHT) continue;
        mma16(g[k / DH][m], a, b[r][0], b[r][1]);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) depthwise_weight_grad(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) u16 shared[];
  u16 *inputs = shared, *outputs = shared + Input::size;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  unsigned b = blockIdx.x;
  const int channel = b % p.channel_blocks * CHANNELS, first = b / p.channel_blocks % p.height_blocks * HEIGHT;
  const int split = b / p.channel_blocks / p.height_blocks;

  float g[PER_WARP][HEIGHT][M16][4];
#pragma unroll
  for (int i = 0; i < PER_WARP * HEIGHT * M16 * 4; ++i) (&g[0][0][0][0])[i] = 0.f;

  auto block = [](int m, int row_pitch, int row_step, int image_pitch, int column_step) {
    return m / (BLOCKS * GROUPS) * image_pitch + m / BLOCKS % GROUPS * row_step * row_pitch + m % BLOCKS * column_step;
  };
  const int m = lane % 8 + lane / 16 * 8;  // input: matrices (i, b) = (low, low), (high, low), (low, high), (high, high)
  const u32 input_lane = 2 * (block(m, ROW_PITCH, GROUP_STEP, IMAGE_PITCH, 8 * SW) + 8 * (lane / 8 % 2));
  const u32 output_lane = 2 * block(lane % 16, OUT_COLUMNS, ROWS, OUT_IMAGE_PITCH, 8);

#pragma unroll 1
  for (int tile = split; tile < p.tiles; tile += p.splits) {
    Origin out, in;
    out.channel = channel;
    out.column = tile % p.tiles_across * OUT_COLUMNS;
    out.row = tile / p.tiles_across % p.tiles_down * OUT_ROWS;
    out.image = tile / p.tiles_across / p.tiles_down * IMAGES;
    if constexpr (LINEAR) {
      out.column = out.row * OUT_COLUMNS;
      out.row = 0;
    }
    out.images = p.images, out.rows = p.out_rows, out.columns = p.out_columns, out.channels = p.channels;
    in = out;
    in.row = out.row * SH - PAD_H + first * DH, in.column = out.column * SW - PAD_W - LEAD;
    in.rows = p.rows, in.columns = p.columns;
    __syncthreads();  // the previous tile is in use
    load_tile<Input, (SPREAD > 1), THREADS>(inputs, p.x, in, [](int c) { return c / SPREAD; }, Identity{});
    load_tile<Output, false, THREADS>(outputs, p.dy, out, [](int c) { return c; }, Identity{});
    __syncthreads();
#pragma unroll
    for (int i = 0; i < PER_WARP; ++i) {
      int c = warp + i * WARPS;
      accumulate(g[i], shared_address(inputs + Input::plane(c)) + input_lane, shared_address(outputs + Output::plane(c)) + output_lane);
    }
  }

  __syncthreads();
  float* scratch = reinterpret_cast<float*>(shared) + warp * (16 * M16 * 8);
#pragma unroll
  for (int i = 0; i < PER_WARP; ++i)
#pragma unroll
    for (int kh = 0; kh < HEIGHT; ++kh) write_diagonals<LEAD, SW>(p, scratch, g[i][kh], split, channel + warp + i * WARPS, first + kh);
}
