// Planar tiles: global memory (NHWC or NCHW, any strides and alignment) <-> shared memory as [channel][image][row][column].
//
// A thread moves a unit of 8 columns. NHWC: 8 pixels x 8 channels, transposed in registers. NCHW: 8 columns of one channel, shifted
// by the padding. width elements is the widest access that the alignment of pointers, strides and width allows.
#pragma once
#include "mma.cuh"

struct Tensor4 {  // strides in elements
  u16* data;
  i64 image, channel, row, column;
};

template <int width> struct Access;
template <> struct Access<8> { using type = uint4; };
template <> struct Access<4> { using type = uint2; };
template <> struct Access<2> { using type = u32; };
template <> struct Access<1> { using type = u16; };

// 8 elements of 16 bits in 4 words
struct Octet {
  union {
    u32 word[4];
    uint4 quad;
    u16 element[8];
  };
};

// Rows become columns: out[c] holds element c of in[0..7].
__device__ __forceinline__ void transpose(const Octet (&in)[8], Octet (&out)[8]) {
#pragma unroll
  for (int c = 0; c < 4; ++c) {
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      u32 a = in[2 * p].word[c], b = in[2 * p + 1].word[c];
      out[2 * c].word[p] = __byte_perm(a, b, 0x5410);
      out[2 * c + 1].word[p] = __byte_perm(a, b, 0x7632);
    }
  }
}

// Reads 8 elements, width at a time, those for which inside(e) holds of the first of each width; the others are zero.
template <int width, class Inside> __device__ __forceinline__ Octet read8(const u16* p, Inside inside) {
  using T = typename Access<width>::type;
  Octet v;
  v.quad = make_uint4(0, 0, 0, 0);
  if constexpr (width == 1) {
#pragma unroll
    for (int e = 0; e < 8; e += 2) {
      u32 low = inside(e) ? __ldg(p + e) : 0, high = inside(e + 1) ? __ldg(p + e + 1) : 0;
      v.word[e / 2] = low | high << 16;
    }
  } else {
#pragma unroll
    for (int e = 0; e < 8; e += width)
      if (inside(e)) {
        T piece = __ldg(reinterpret_cast<const T*>(p + e));
        if constexpr (width == 8) v.quad = piece;
        if constexpr (width == 4) { v.word[e / 2] = piece.x; v.word[e / 2 + 1] = piece.y; }
        if constexpr (width == 2) v.word[e / 2] = piece;
      }
  }
  return v;
}

template <int width, class Inside> __device__ __forceinline__ void write8(u16* p, const Octet& v, Inside inside) {
#pragma unroll
  for (int e = 0; e < 8; e += width)
    if (inside(e)) {
      if constexpr (width == 8) *reinterpret_cast<uint4*>(p) = v.quad;
      if constexpr (width == 4) *reinterpret_cast<uint2*>(p + e) = make_uint2(v.word[e / 2], v.word[e / 2 + 1]);
      if constexpr (width == 2) *reinterpret_cast<u32*>(p + e) = v.word[e / 2];
      if constexpr (width == 1) p[e] = u16(v.word[e / 2] >> (e & 1) * 16);
    }
}

// Shape of a tile in shared memory and how it lies in global memory. SHIFT: its first column modulo vec (NCHW). STEP: 0, or the columns
// from one row of the tile to the next where all are parts of the tensor's one row (they overlap by the filter).
template <bool NHWC_, int VEC_, int SHIFT_, int CHANNELS_, int IMAGES_, int ROWS_, int COLUMNS_, int ROW_PITCH_, int IMAGE_PITCH_,
          int PLANE_PITCH_, int OCTET_PITCH_, int STEP_>
struct Tile {
  static constexpr bool nhwc = NHWC_;
  static constexpr int vec = VEC_, shift = SHIFT_, channels = CHANNELS_, images = IMAGES_, rows = ROWS_, columns = COLUMNS_;
  static constexpr int row_pitch = ROW_PITCH_, image_pitch = IMAGE_PITCH_, plane_pitch = PLANE_PITCH_, octet_pitch = OCTET_PITCH_;
  static constexpr int step = STEP_;
  static constexpr int size = channels / 8 * octet_pitch;  // elements
  static constexpr int units = columns / 8;
  static_assert(columns % 8 == 0 && row_pitch % 8 == 0 && image_pitch % 8 == 0 && plane_pitch % 8 == 0 && octet_pitch % 8 == 0);
  __device__ static __forceinline__ int plane(int c) { return (c >> 3) * octet_pitch + (c & 7) * plane_pitch; }
};

struct Origin {  // of a tile in a tensor: first image, row, column, channel; the tensor's sizes
  int image, row, column, channel;
  int images, rows, columns, channels;
};

// Loads a tile; what lies outside the tensor is zero. source(c): channel of the tensor behind channel c of the operator (MAPPED).
// Returns non_finite() bits of all that was loaded.
template <class T, bool MAPPED, int threads, class Source, class Prologue>
__device__ __forceinline__ u32 load_tile(u16* tile, const Tensor4& x, const Origin& at, Source source, Prologue prologue) {
  u32 bad = 0;
  if constexpr (T::nhwc) {
    constexpr int octets = T::channels / 8, total = T::images * T::rows * T::units * octets;
    for (int u = threadIdx.x; u < total; u += threads) {
      int o = u % octets, r = u / octets, i = r % T::units;
      r /= T::units;
      int row = r % T::rows, n = r / T::rows;
      int y = at.row + (T::step ? 0 : row), x0 = at.column + 8 * i + row * T::step, c = at.channel + 8 * o;
      bool inside = unsigned(y) < unsigned(at.rows) && at.image + n < at.images;
      const u16* line = x.data + (at.image + n) * x.image + y * x.row + x0 * x.column;
      Octet pixels[8], planes[8];
#pragma unroll
      for (int p = 0; p < 8; ++p) {
        bool ok = inside && unsigned(x0 + p) < unsigned(at.columns);
        if constexpr (MAPPED) {
#pragma unroll
          for (int e = 0; e < 8; e += 2) {
            const u16* pixel = line + p * x.column;
            u32 low = ok && c + e < at.channels ? __ldg(pixel + source(c + e)) : 0;
            u32 high = ok && c + e + 1 < at.channels ? __ldg(pixel + source(c + e + 1)) : 0;
            pixels[p].word[e / 2] = low | high << 16;
          }
        } else {
          pixels[p] = read8<T::vec>(line + p * x.column + c, [&](int e) { return ok && c + e < at.channels; });
        }
        if (ok)
#pragma unroll
          for (int e = 0; e < 4; ++e) pixels[p].word[e] = prologue(pixels[p].word[e], c + 2 * e);
#pragma unroll
        for (int e = 0; e < 4; ++e) bad |= non_finite(pixels[p].word[e]);
      }
      transpose(pixels, planes);
      u16* to = tile + o * T::octet_pitch + n * T::image_pitch + row * T::row_pitch + 8 * i;
#pragma unroll
      for (int p = 0; p < 8; ++p) *reinterpret_cast<uint4*>(to + p * T::plane_pitch) = planes[p].quad;
    }
  } else {
    constexpr int total = T::channels * T::images * T::rows * T::units;
    constexpr int shift = T::shift, vec = T::vec;
    for (int u = threadIdx.x; u < total; u += threads) {
      int i = u % T::units, r = u / T::units, row = r % T::rows;
      r /= T::rows;
      int n = r % T::images, c = r / T::images;
      int y = at.row + (T::step ? 0 : row), x0 = at.column + 8 * i + row * T::step, channel = at.channel + c;
      bool ok = unsigned(y) < unsigned(at.rows) && at.image + n < at.images && channel < at.channels;
      const u16* line = x.data + (at.image + n) * x.image + source(channel) * x.channel + y * x.row;
      auto inside = [&](int first) { return [=](int e) { return ok && unsigned(first + e) < unsigned(at.columns); }; };
      Octet v = read8<vec>(line + x0 - shift, inside(x0 - shift));
      if constexpr (shift > 0) {
        // the last shift of the 8 columns are in the next vec elements
        Octet next = read8<vec>(line + x0 - shift + 8, [&](int e) { return e < vec && inside(x0 - shift + 8)(e); });
        u32 words[8] = {v.word[0], v.word[1], v.word[2], v.word[3], next.word[0], next.word[1], next.word[2], next.word[3]};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if constexpr (shift % 2) v.word[e] = __funnelshift_r(words[e + shift / 2], words[e + shift / 2 + 1], 16);
          else v.word[e] = words[e + shift / 2];
        }
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        v.word[e] = prologue(v.word[e], channel);
        if constexpr (!Prologue::KEEPS_ZERO) {
          u32 low = inside(x0)(2 * e) ? 0xffffu : 0u, high = inside(x0)(2 * e + 1) ? 0xffff0000u : 0u;
          v.word[e] &= low | high;
        }
        bad |= non_finite(v.word[e]);
      }
      *reinterpret_cast<uint4*>(tile + T::plane(c) + n * T::image_pitch + row * T::row_pitch + 8 * i) = v.quad;
    }
  }
  return bad;
}

// Stores a tile, leaving out what lies outside the tensor.
template <class T, int threads> __device__ __forceinline__ void store_tile(const u16* tile, const Tensor4& y, const Origin& at) {
  if constexpr (T::nhwc) {
    constexpr int octets = T::channels / 8, total = T::images * T::rows * T::units * octets;
    for (int u = threadIdx.x; u < total; u += threads) {
      int o = u % octets, r = u / octets, i = r % T::units;
      r /= T::units;
      int row = r % T::rows, n = r / T::rows;
      int y0 = at.row + (T::step ? 0 : row), x0 = at.column + 8 * i + row * T::step, c = at.channel + 8 * o;
      if (y0 >= at.rows || x0 >= at.columns || at.image + n >= at.images) continue;
      const u16* from = tile + o * T::octet_pitch + n * T::image_pitch + row * T::row_pitch + 8 * i;
      Octet planes[8], pixels[8];
#pragma unroll
      for (int p = 0; p < 8; ++p) planes[p].quad = *reinterpret_cast<const uint4*>(from + p * T::plane_pitch);
      transpose(planes, pixels);
      u16* line = y.data + (at.image + n) * y.image + y0 * y.row + x0 * y.column + c;
#pragma unroll
      for (int p = 0; p < 8; ++p)
        if (x0 + p < at.columns) write8<T::vec>(line + p * y.column, pixels[p], [&](int e) { return c + e < at.channels; });
    }
  } else {
    // rows whose alignment allows narrow accesses only: neighbouring threads then write neighbouring elements
    constexpr int width = T::vec >= 4 ? 8 : T::vec, units = T::columns / width;
    constexpr int total = T::channels * T::images * T::rows * units;
    for (int u = threadIdx.x; u < total; u += threads) {
      int i = u % units, r = u / units, row = r % T::rows;
      r /= T::rows;
      int n = r % T::images, c = r / T::images;
      int y0 = at.row + (T::step ? 0 : row), x0 = at.column + width * i + row * T::step, channel = at.channel + c;
      if (y0 >= at.rows || x0 >= at.columns || at.image + n >= at.images || channel >= at.channels) continue;
      const u16* from = tile + T::plane(c) + n * T::image_pitch + row * T::row_pitch + width * i;
      u16* line = y.data + (at.image + n) * y.image + channel * y.channel + y0 * y.row + x0;
      if constexpr (width == 8) {
        Octet v;
        v.quad = *reinterpret_cast<const uint4*>(from);
        write8<T::vec>(line, v, [&](int e) { return x0 + e < at.columns; });
      } else {
        using Piece = typename Access<width>::type;
        *reinterpret_cast<Piece*>(line) = *reinterpret_cast<const Piece*>(from);
      }
    }
  }
}
