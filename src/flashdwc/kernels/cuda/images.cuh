// Groups of 16 images of at most 16 x 16 pixels in shared memory: 8 channels of them as they lie in memory, copied asynchronously, then
// arranged as planes [channel][row][8 columns][image][column]. For depthwise_images.cu and its weight gradient.
//
// channels_last (NHWC): pixels of 8 channels, which are transposed (transposed.cuh tells how). Contiguous: the channels of an image are one run
// of memory; a thread takes a row from it.
#pragma once
#include "tile.cuh"

constexpr int WARPS = 8, CHANNELS = 8, GROUP = 16;  // images
constexpr int SET = 32 * WARPS, SETS = THREADS / SET;  // each set of threads has groups of its own
static_assert(THREADS % SET == 0);

__device__ constexpr int apart(int bytes) { return bytes + (64 + 128 - bytes % 128) % 128; }  // two channels then lie in different banks

template <int rows_, int columns_> struct Maps {
  static constexpr int rows = rows_, columns = columns_, eighths = (columns + 7) / 8;
  static constexpr int blocks = rows * eighths * GROUP;  // of 8 columns, of a channel and all images
  static constexpr int line = 8 * 16 + 32;  // bytes of a block of pixels: 4 such then lie in different banks
  static constexpr int pieces = rows * columns;  // of 16 bytes, in a run
  static constexpr int run = (pieces | 1) * 16;  // bytes from image to image: 8 of them then lie in different banks
  static constexpr int line_bytes = NHWC ? blocks * line : GROUP * run;
  static constexpr int plane = apart(16 * blocks), plane_bytes = CHANNELS * plane;
  static constexpr int vec = columns % 8 == 0 ? 8 : columns % 4 == 0 ? 4 : columns % 2 == 0 ? 2 : 1;  // elements of an access to a row in a run
  __device__ static __forceinline__ int block(int row, int eighth, int image) { return (row * eighths + eighth) * GROUP + image; }

  // Starts copies of a group, zeros behind its columns and images.
  __device__ static __forceinline__ void fetch(char* lines, const Tensor4& x, int image0, int images, int channel) {
    const u32 at = shared_address(lines);
#pragma unroll 4
    for (int i = anew(threadIdx.x) % SET; i < (NHWC ? 8 * blocks : GROUP * pieces); i += SET) {
      if constexpr (NHWC) {
        const int column = i % (8 * eighths), row = i / (8 * eighths) % rows, image = i / (8 * eighths * rows);
        const u16* from = x.data + (image0 + image) * x.image + row * x.row + column * x.column + channel;
        copy_async_once(at + block(row, column / 8, image) * line + column % 8 * 16, from, column < columns && image0 + image < images);
      } else {
        const int piece = i % pieces, image = i / pieces;
        copy_async_once(at + image * run + piece * 16, x.data + (image0 + image) * x.image + channel * x.channel + piece * 8, image0 + image < images);
      }
    }
  }

  __device__ static __forceinline__ void arrange(const char* lines, char* planes) {
    const int thread = anew(threadIdx.x) % SET, lane = thread % 32;
    if constexpr (NHWC) {  // four blocks of pixels become 8 columns of a channel for each lane
      const u32 at = shared_address(lines);
#pragma unroll 4
      for (int i = thread / 32; i < blocks / 4; i += WARPS) {
        Octet v;
        load_matrix4_transposed(v.word, at + (4 * i + lane % 8 / 2) * line + (lane / 8 * 2 + lane % 2) * 16);
        *reinterpret_cast<uint4*>(planes + lane / 4 * plane + (4 * i + lane % 4) * 16) = v.quad;
      }
    } else {
      for_rows(thread, [&](int image, int channel, int row, int eighth, int in_run) {
        const u16* from = reinterpret_cast<const u16*>(lines + image * run) + in_run;
        Octet v;
        v.quad = make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int e = 0; e < 8; e += vec)
          if (8 * eighth + e < columns) insert<vec>(v, e, *reinterpret_cast<const typename Access<vec>::type*>(from + e));
        *reinterpret_cast<uint4*>(planes + channel * plane + block(row, eighth, image) * 16) = v.quad;
      });
    }
  }

  // Planes leave. scratch: GROUP * run bytes, where memory is contiguous.
  __device__ static __forceinline__ void store(const char* planes, char* scratch, const Tensor4& y, int image0, int images, int channel) {
    const int thread = anew(threadIdx.x) % SET, lane = thread % 32;
    if constexpr (NHWC) {
      const u32 at = shared_address(planes);
#pragma unroll 4
      for (int i = thread / 32; i < blocks / 4; i += WARPS) {
        Octet v;
        load_matrix4_transposed(v.word, at + (lane / 8 * 2 + lane % 2) * plane + (4 * i + lane % 8 / 2) * 16);
        const int mine = 4 * i + lane % 4, image = image0 + mine % GROUP, column = mine / GROUP % eighths * 8 + lane / 4, row = mine / (GROUP * eighths);
        const bool inside = image < images && column < columns;
        write8<8, true>(y.data + image * y.image + row * y.row + column * y.column + channel, v, [=](int) { return inside; });
      }
    } else {
      for_rows(thread, [&](int image, int of, int row, int eighth, int in_run) {
        Octet v;
        v.quad = *reinterpret_cast<const uint4*>(planes + of * plane + block(row, eighth, image) * 16);
        write8<vec>(reinterpret_cast<u16*>(scratch + image * run) + in_run, v, [&](int e) { return 8 * eighth + e < columns; });
      });
      __syncthreads();
#pragma unroll 4
      for (int i = thread; i < GROUP * pieces; i += SET) {
        const int piece = i % pieces, image = i / pieces;
        Octet v;
        v.quad = *reinterpret_cast<const uint4*>(scratch + image * run + piece * 16);
        const bool inside = image0 + image < images;
        write8<8, true>(y.data + (image0 + image) * y.image + channel * y.channel + piece * 8, v, [=](int) { return inside; });
      }
    }
  }

 private:
  // take(image, channel, row, eighth, the eighth's first element in a run): neighbouring threads have neighbouring images.
  template <class Take> __device__ static __forceinline__ void for_rows(int thread, Take take) {
#pragma unroll 2
    for (int i = thread; i < GROUP * CHANNELS * rows; i += SET) {
      const int line = i / GROUP;
#pragma unroll
      for (int eighth = 0; eighth < eighths; ++eighth) take(i % GROUP, line / rows, line % rows, eighth, line * columns + 8 * eighth);
    }
  }
};
