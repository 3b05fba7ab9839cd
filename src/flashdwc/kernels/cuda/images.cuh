// Groups of 16 images of at most 16 x 16 pixels, channels_last, in shared memory: 8 channels of their pixels as they lie in memory, copied
// asynchronously, then transposed (transposed.cuh tells how) into planes [channel][row][8 columns][image][column]. For depthwise_images.cu and
// its weight gradient.
#pragma once
#include "tile.cuh"

constexpr int WARPS = 8, CHANNELS = 8, GROUP = 16;  // images
constexpr int SET = 32 * WARPS, SETS = THREADS / SET;  // each set of threads has groups of its own
static_assert(THREADS % SET == 0);

__device__ constexpr int apart(int bytes) { return bytes + (64 + 128 - bytes % 128) % 128; }  // two channels then lie in different banks

template <int rows_, int columns_> struct Maps {
  static constexpr int rows = rows_, columns = columns_, eighths = (columns + 7) / 8;
  static constexpr int blocks = rows * eighths * GROUP;  // of 8 columns, of a channel and all images
  static constexpr int line = 8 * 16 + 32, line_bytes = blocks * line;  // of a block of pixels: 4 such then lie in different banks
  static constexpr int plane = apart(16 * blocks), plane_bytes = CHANNELS * plane;
  __device__ static __forceinline__ int block(int row, int eighth, int image) { return (row * eighths + eighth) * GROUP + image; }

  // Starts copies of a group, zeros behind its columns and images.
  __device__ static __forceinline__ void fetch(u32 lines, const Tensor4& x, int image0, int images, int channel) {
#pragma unroll 4
    for (int i = anew(threadIdx.x) % SET; i < 8 * blocks; i += SET) {
      const int column = i % (8 * eighths), row = i / (8 * eighths) % rows, image = i / (8 * eighths * rows);
      const u16* from = x.data + (image0 + image) * x.image + row * x.row + column * x.column + channel;
      copy_async_once(lines + block(row, column / 8, image) * line + column % 8 * 16, from, column < columns && image0 + image < images);
    }
  }

  // Four blocks of pixels become 8 columns of a channel for each lane.
  __device__ static __forceinline__ void transpose(u32 lines, char* planes) {
    const int thread = anew(threadIdx.x) % SET, lane = thread % 32;
#pragma unroll 4
    for (int i = thread / 32; i < blocks / 4; i += WARPS) {
      Octet v;
      load_matrix4_transposed(v.word, lines + (4 * i + lane % 8 / 2) * line + (lane / 8 * 2 + lane % 2) * 16);
      *reinterpret_cast<uint4*>(planes + lane / 4 * plane + (4 * i + lane % 4) * 16) = v.quad;
    }
  }
};
