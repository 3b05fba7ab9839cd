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

// Puts an access of width elements into an octet, of which they are those from e on; a single element into zeros.
template <int width> __device__ __forceinline__ void insert(Octet& v, int e, typename Access<width>::type piece) {
  if constexpr (width == 8) v.quad = piece;
  if constexpr (width == 4) { v.word[e / 2] = piece.x; v.word[e / 2 + 1] = piece.y; }
  if constexpr (width == 2) v.word[e / 2] = piece;
  if constexpr (width == 1) v.word[e / 2] |= u32(piece) << e % 2 * 16;
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
      if (inside(e)) insert<width>(v, e, __ldg(reinterpret_cast<const T*>(p + e)));
  }
  return v;
}

// Writes 8 elements, width at a time, those for which inside(e) holds of the first of each width. PREDICATED: accesses of 16 bytes are
// predicated, not jumped over, so that 8 in a row are under way at once; that takes more registers.
template <int width, bool PREDICATED = false, class Inside>
__device__ __forceinline__ void write8(u16* p, const Octet& v, Inside inside) {
  if constexpr (width == 8 && PREDICATED) {
    asm volatile("{.reg .pred inside; setp.ne.b32 inside, %5, 0; @inside st.global.v4.b32 [%0], {%1,%2,%3,%4};}"
                 :: "l"(p), "r"(v.word[0]), "r"(v.word[1]), "r"(v.word[2]), "r"(v.word[3]), "r"(int(inside(0))) : "memory");
  } else {
#pragma unroll
    for (int e = 0; e < 8; e += width)
      if (inside(e)) {
        if constexpr (width == 8) *reinterpret_cast<uint4*>(p) = v.quad;
        if constexpr (width == 4) *reinterpret_cast<uint2*>(p + e) = make_uint2(v.word[e / 2], v.word[e / 2 + 1]);
        if constexpr (width == 2) *reinterpret_cast<u32*>(p + e) = v.word[e / 2];
        if constexpr (width == 1) p[e] = u16(v.word[e / 2] >> (e & 1) * 16);
      }
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
  template <int width> static constexpr int units = channels * images * rows * columns / (nhwc ? 8 * width : width);
  static_assert(columns % 8 == 0 && row_pitch % 8 == 0 && image_pitch % 8 == 0 && plane_pitch % 8 == 0 && octet_pitch % 8 == 0);
  __device__ static __forceinline__ int plane(int c) { return (c >> 3) * octet_pitch + (c & 7) * plane_pitch; }
};

struct Origin {  // of a tile in a tensor: first image, row, column, channel; the tensor's sizes
  int image, row, column, channel;
  int images, rows, columns, channels;
};

// Where unit u of a tile lies, in the tile and in the tensor: units of neighbouring threads are neighbours in global memory.
template <class T, int width = 8> struct Unit {
  int channel, image, row, column;  // in the tile
  int c, n, y, x;                   // in the tensor
  __device__ __forceinline__ Unit(int u, const Origin& at) {
    constexpr int across = T::columns / width, octets = T::channels / 8;
    if constexpr (T::nhwc) {
      channel = u % octets * 8, u /= octets;
      column = u % across * width, u /= across;
      row = u % T::rows, image = u / T::rows;
    } else {
      column = u % across * width, u /= across;
      row = u % T::rows, u /= T::rows;
      image = u % T::images, channel = u / T::images;
    }
    c = at.channel + channel, n = at.image + image;
    y = at.row + (T::step ? 0 : row), x = at.column + column + row * T::step;
  }
  __device__ __forceinline__ int offset(int tile_row) const {
    return T::plane(channel) + image * T::image_pitch + tile_row * T::row_pitch + column;
  }
  __device__ __forceinline__ bool inside(const Origin& at, int pixel) const {
    return unsigned(y) < unsigned(at.rows) && n < at.images && unsigned(x + pixel) < unsigned(at.columns);
  }
};

// A unit between global and shared memory. NHWC: 8 pixels of 8 channels; NCHW: 8 columns and, where they are shifted, the next ones.
template <class T> struct Raw {
  Octet piece[T::nhwc ? 8 : T::shift ? 2 : 1];
};

// Reads a unit; what lies outside the tensor is zero. source(c): channel of the tensor behind channel c of the operator (MAPPED).
template <class T, bool MAPPED, class Source>
__device__ __forceinline__ Raw<T> fetch(const Unit<T>& u, const Tensor4& x, const Origin& at, Source source) {
  Raw<T> raw;
  if constexpr (T::nhwc) {
    const u16* pixel = x.data + u.n * x.image + u.y * x.row + u.x * x.column;
#pragma unroll
    for (int p = 0; p < 8; ++p, pixel += x.column) {
      const bool ok = u.inside(at, p);
      if constexpr (MAPPED) {
#pragma unroll
        for (int e = 0; e < 8; e += 2) {
          u32 low = ok && u.c + e < at.channels ? __ldg(pixel + source(u.c + e)) : 0;
          u32 high = ok && u.c + e + 1 < at.channels ? __ldg(pixel + source(u.c + e + 1)) : 0;
          raw.piece[p].word[e / 2] = low | high << 16;
        }
      } else {
        raw.piece[p] = read8<T::vec>(pixel + u.c, [&](int e) { return ok && u.c + e < at.channels; });
      }
    }
  } else {
    const bool ok = unsigned(u.y) < unsigned(at.rows) && u.n < at.images && u.c < at.channels;
    const u16* line = x.data + u.n * x.image + source(u.c) * x.channel + u.y * x.row;
    auto inside = [&](int first) { return [=](int e) { return ok && unsigned(first + e) < unsigned(at.columns); }; };
    const int first = u.x - T::shift;
    raw.piece[0] = read8<T::vec>(line + first, inside(first));
    if constexpr (T::shift > 0)  // the last shift of the 8 columns are in the next vec elements
      raw.piece[1] = read8<T::vec>(line + first + 8, [&](int e) { return e < T::vec && inside(first + 8)(e); });
  }
  return raw;
}

// Writes a unit into the tile, at row tile_row.
template <class T, class Prologue>
__device__ __forceinline__ void place(u16* tile, const Unit<T>& u, Raw<T>& raw, int tile_row, const Origin& at, Prologue prologue) {
  u16* to = tile + u.offset(tile_row);
  if constexpr (T::nhwc) {
    Octet planes[8];
#pragma unroll
    for (int p = 0; p < 8; ++p)
      if (Prologue::KEEPS_ZERO || u.inside(at, p))
#pragma unroll
        for (int e = 0; e < 4; ++e) raw.piece[p].word[e] = prologue(raw.piece[p].word[e], u.c + 2 * e);
    transpose(raw.piece, planes);
#pragma unroll
    for (int p = 0; p < 8; ++p) *reinterpret_cast<uint4*>(to + p * T::plane_pitch) = planes[p].quad;
  } else {
    Octet v = raw.piece[0];
    if constexpr (T::shift > 0) {
      const Octet& next = raw.piece[1];
      u32 words[8] = {v.word[0], v.word[1], v.word[2], v.word[3], next.word[0], next.word[1], next.word[2], next.word[3]};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if constexpr (T::shift % 2) v.word[e] = __funnelshift_r(words[e + T::shift / 2], words[e + T::shift / 2 + 1], 16);
        else v.word[e] = words[e + T::shift / 2];
      }
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      v.word[e] = prologue(v.word[e], u.c);
      if constexpr (!Prologue::KEEPS_ZERO)
        v.word[e] &= (u.inside(at, 2 * e) ? 0xffffu : 0u) | (u.inside(at, 2 * e + 1) ? 0xffff0000u : 0u);
    }
    *reinterpret_cast<uint4*>(to) = v.quad;
  }
}

template <class T, bool MAPPED, int threads, class Source, class Prologue>
__device__ __forceinline__ void load_tile(u16* tile, const Tensor4& x, const Origin& at, Source source, Prologue prologue) {
  for (int i = threadIdx.x; i < T::template units<8>; i += threads) {
    Unit<T> u(i, at);
    Raw<T> raw = fetch<T, MAPPED>(u, x, at, source);
    place(tile, u, raw, u.row, at, prologue);
  }
}

// Stores a tile, leaving out what lies outside the tensor.
template <class T, int threads>
__device__ __forceinline__ void store_tile(const u16* tile, const Tensor4& y, const Origin& at) {
  // NCHW rows whose alignment allows narrow accesses only: neighbouring threads then write neighbouring elements
  constexpr int width = T::nhwc || T::vec >= 4 ? 8 : T::vec;
  for (int i = threadIdx.x; i < T::template units<width>; i += threads) {
    Unit<T, width> u(i, at);
    if (!u.inside(at, 0)) continue;
    const u16* from = tile + u.offset(u.row);
    u16* to = y.data + u.n * y.image + u.y * y.row + u.x * y.column;
    if constexpr (T::nhwc) {
      Octet planes[8], pixels[8];
#pragma unroll
      for (int p = 0; p < 8; ++p) planes[p].quad = *reinterpret_cast<const uint4*>(from + p * T::plane_pitch);
      transpose(planes, pixels);
      to += u.c;
#pragma unroll
      for (int p = 0; p < 8; ++p, to += y.column) write8<T::vec>(to, pixels[p], [&](int e) { return u.inside(at, p) && u.c + e < at.channels; });
    } else if (u.c < at.channels) {
      to += u.c * y.channel;
      if constexpr (width == 8) {
        Octet v;
        v.quad = *reinterpret_cast<const uint4*>(from);
        write8<T::vec>(to, v, [&](int e) { return u.x + e < at.columns; });
      } else {
        using Piece = typename Access<width>::type;
        *reinterpret_cast<Piece*>(to) = *reinterpret_cast<const Piece*>(from);
      }
    }
  }
}
