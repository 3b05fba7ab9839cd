// Pixels of channels_last tensors that become planes in shared memory, for depthwise_transposed.cu and its weight gradient: copied as they
// lie in memory, asynchronously, then transposed 256 elements at a time by one ldmatrix of a warp and one 16-byte store of each lane, and back
// the same way.
//
// A transposing ldmatrix reads 4 matrices i of 8 rows (t, b); its lane (g, t) then holds column g of the rows (t, 0) and (t, 1) of each. The row
// (t, b) of matrix i is the octet of channels of pixel 2 i + b, so that the lane holds 8 pixels of one channel; or it is 8 pixels of channel
// 2 i + b, so that the lane holds the 8 channels of a pixel. t tells TOGETHER octets and 4 / TOGETHER blocks of 8 pixels apart.
//
// What a thread moves in a step differs between steps by an address only. The rest is computed once and, where registers allow (KEEPS),
// kept; the compiler would compute it anew.
//
// A row of planes holds the columns that windows reach; LOADED of them, behind BLANK, are loaded: where one strip is as wide as the map,
// the others are padding, which stays zero from the start.
#pragma once
#include "tile.cuh"

constexpr int OCTETS = CHANNELS / 8, WARPS = THREADS / 32, TOGETHER = OCTETS < 4 ? OCTETS : 4, BLOCKS_TOGETHER = 4 / TOGETHER;
constexpr int BLOCKS = COLUMNS / 8, GROUPS = 16 / BLOCKS, STEP_ROWS = GROUPS * ROWS;

struct Part {  // of a row that a ldmatrix takes: a lane's octet, block of 8 pixels, and which of 8 pixels or channels its ldmatrix row is
  int octet, block, element;
};

// part: number of the ldmatrix in its row. For the row that the thread's lane addresses, or (holds) for what it gets.
template <bool holds> __device__ __forceinline__ Part part_of(int part, u32 thread) {
  const int lane = thread % 32, t = holds ? lane % 4 : lane % 8 / 2;
  return {part % (OCTETS / TOGETHER) * TOGETHER + t % TOGETHER, part / (OCTETS / TOGETHER) * BLOCKS_TOGETHER + t / TOGETHER,
          holds ? lane / 4 : lane / 8 * 2 + lane % 2};
}

// All images are one column of rows, `period` rows each: an image's own, and rows of zeros that are the padding below it and above the next.
struct Rows {  // of a step
  int image, y;  // of its first row: y from column.low on
};
struct Column {
  const Tensor4& tensor;
  int period, low, rows, images;
  __device__ __forceinline__ Rows from(int first_row) const {
    const int n = unsigned(first_row - low) / unsigned(period);
    return {n, first_row - n * period};
  }
  __device__ __forceinline__ void advance(Rows& s) const {
    s.y += STEP_ROWS;
    if (s.y >= low + period) s.y -= period, ++s.image;
  }
  // Of the row `down` rows below the first, less than a period: is it one of an image, and its offset in the tensor
  __device__ __forceinline__ bool inside(const Rows& s, int down, i64& offset) const {
    const bool next = s.y + down >= low + period;
    const int n = s.image + next, y = s.y + down - (next ? period : 0);
    offset = n * tensor.image + y * tensor.row;
    return unsigned(y) < unsigned(rows) && n < images;
  }
};

// Rows of pixels. Blocks of 8 pixels lie apart, so that the 8 rows of a matrix are in different banks.
template <int pixels_> struct Lines {
  static constexpr int pixels = pixels_, apart = OCTETS == 1 ? 32 : OCTETS == 2 ? 64 : 0, parts = pixels * OCTETS / 32;
  static constexpr int block_bytes = 16 * CHANNELS + apart, row_bytes = pixels / 8 * block_bytes, bytes = STEP_ROWS * row_bytes;
  static_assert(pixels % (8 * BLOCKS_TOGETHER) == 0 && OCTETS <= 4);
  __device__ static __forceinline__ int place(int octet, int block, int pixel) { return block * block_bytes + pixel * (2 * CHANNELS) + octet * 16; }

  // What a thread copies of a step: an octet of pixels that are `stride` columns apart, of some rows.
  struct Copier {
    static constexpr int warps_in_row = WARPS > STEP_ROWS ? WARPS / STEP_ROWS : 1, stride = 32 / OCTETS * warps_in_row, count = (pixels + stride - 1) / stride;
    static constexpr int rows_at_once = WARPS / warps_in_row;
    static_assert((WARPS > STEP_ROWS ? WARPS % STEP_ROWS == 0 : STEP_ROWS % WARPS == 0) && stride % 8 == 0);
    const u16* from;  // of the tensor's first image, row and column
    i64 step;
    int row, pixel, to;
    bool inside;
    __device__ __forceinline__ Copier(const Tensor4& x, int channel, int channels, u32 thread) {
      const int lane = thread % 32, warp = thread / 32, octet = lane % OCTETS, c = channel + 8 * octet;
      row = warp / warps_in_row, pixel = lane / OCTETS + warp % warps_in_row * (32 / OCTETS);
      from = x.data + pixel * x.column + c, step = stride * x.column;
      to = row * row_bytes + place(octet, pixel / 8, pixel % 8), inside = c < channels;
      if (KEEPS) from = pinned(from), row = pinned(row), pixel = pinned(pixel), to = pinned(to), step = pinned(step);
    }
    // Starts the copies, zeros outside of the tensor.
    __device__ __forceinline__ void operator()(u32 slot, const Column& column, const Rows& rows, int first_column, int columns) const {
#pragma unroll
      for (int j = 0; j < STEP_ROWS / rows_at_once; ++j) {
        i64 offset;
        const bool row_inside = column.inside(rows, row + j * rows_at_once, offset) && inside;
        const u16* p = pinned(from + (offset + first_column * column.tensor.column));
#pragma unroll
        for (int i = 0; i < count; ++i, p += step)
          if (pixels % stride == 0 || i + 1 < count || pixel < pixels - stride * (count - 1))
            copy_async_once(slot + to + j * rows_at_once * row_bytes + i * (stride / 8) * block_bytes, p,
                            row_inside && unsigned(first_column + pixel + stride * i) < unsigned(columns));
      }
    }
  };
};

// A plane for each channel, such that 8 lanes that hold, or address, two channels of one octet and 4 parts meet different banks.
template <int plane_bytes_> struct Planes {
  static constexpr int plane = plane_bytes_ + (64 + 128 - plane_bytes_ % 128) % 128, octet = 8 * plane + (OCTETS == 2 ? 32 : 16), bytes = OCTETS * octet;
  static_assert(plane_bytes_ % 16 == 0);
  __device__ static __forceinline__ int place(int octet_, int channel) { return octet_ * octet + channel * plane; }
};

// What a thread transposes of a step's lines: place(row, part) is where 8 pixels of a channel go in planes, < 0 for nowhere.
template <class Lines> struct Transposer {
  static constexpr int count = (STEP_ROWS * Lines::parts + WARPS - 1) / WARPS;
  int from[count], to[count];
  template <class Place> __device__ __forceinline__ Transposer(const Place& place, u32 thread) {
#pragma unroll
    for (int i = 0; i < count; ++i) {
      const int n = thread / 32 + i * WARPS, row = n / Lines::parts;
      const Part part = part_of<false>(n % Lines::parts, thread);
      from[i] = row * Lines::row_bytes + Lines::place(part.octet, part.block, part.element);
      to[i] = row < STEP_ROWS ? place(row, part_of<true>(n % Lines::parts, thread)) : -1;
      if (KEEPS) from[i] = pinned(from[i]), to[i] = pinned(to[i]);
    }
  }
  __device__ __forceinline__ void operator()(u32 lines, char* planes) const {
    Octet v[count];
#pragma unroll
    for (int i = 0; i < count; ++i)
      if (STEP_ROWS * Lines::parts % WARPS == 0 || i + 1 < count || threadIdx.x / 32 + i * WARPS < STEP_ROWS * Lines::parts) load_matrix4_transposed(v[i].word, lines + from[i]);
#pragma unroll
    for (int i = 0; i < count; ++i)
      if (to[i] >= 0) *reinterpret_cast<uint4*>(planes + to[i]) = v[i].quad;
  }
};

template <int bytes> __device__ __forceinline__ void clear(char* shared) {
  static_assert(bytes % 16 == 0);
  for (int i = threadIdx.x; i < bytes / 16; i += THREADS) reinterpret_cast<uint4*>(shared)[i] = uint4{};
}

using StepPlanes = Planes<ROWS * 16 * 16>;  // of a step's outputs: [row of a group][block of the tile][column]

// The way of a block, or of what it loads ahead: a strip is COLUMNS columns of the column of all images; a step goes STEP_ROWS rows down it.
// A strip starts with steps that only load, until the rows above its first outputs are there.
struct Way {
  int left, number;  // steps with outputs from here on; number < 0: of a step that only loads
  int row, first_column;
  Way() = default;
  template <class Params> __device__ __forceinline__ Way(int first, int leading, const Params& p)
      : left(min(p.share, p.steps - first)), number(-leading), row(first % p.steps_down * STEP_ROWS), first_column(first / p.steps_down * COLUMNS) {}
  // Is the next step the first of another strip?
  template <class Params> __device__ __forceinline__ bool advance(int leading, const Params& p) {
    if (++number <= 0) return false;
    --left, row += STEP_ROWS;
    if (row < p.steps_down * STEP_ROWS) return false;
    row = 0, number = -leading, first_column += COLUMNS;
    return true;
  }
};
