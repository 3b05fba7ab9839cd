// Whole planes of a dense NCHW tensor in shared memory: for maps so small that a block holds several.
//
// Maps of neighbouring channels are one run of memory, which is copied as it is and then spread out: a row of PITCH elements begins with
// LEFT zeros (0 or 8), ends with zeros, and the map's columns lie between; rows of zeros lie before, between and behind the maps. So
// whatever a filter reaches beyond a map is zero, and no access asks where it is.
#pragma once
#include "planar.cuh"

// Which lane of which map a thread is: maps are neighbours, or lanes of a map. A lane of LANES or more is none.
__device__ __forceinline__ int map_of_thread() { return TURNED ? threadIdx.x % MAPS : threadIdx.x / LANES; }
__device__ __forceinline__ int lane_of_thread() { return TURNED ? threadIdx.x / MAPS : threadIdx.x % LANES; }
__device__ __forceinline__ int thread_of(int map, int lane) { return TURNED ? lane * MAPS + map : map * LANES + lane; }

// Starts copies of a run of memory; vec elements are the widest access that its alignment allows.
template <int vec> __device__ __forceinline__ void copy_run(u16* to, const u16* from, int elements) {
  for (int i = threadIdx.x * vec; i < elements; i += THREADS * vec) copy_async<2 * vec>(shared_address(to + i), from + i);
}

// Spreads maps out, an octet of columns at a time: from a run to rows of `pitch` elements, map_pitch from map to map. Between
// rows and columns there is place for up_h - 1 and up_w - 1 of zeros.
template <int vec, int rows, int columns, int pitch, int map_pitch, int up_h = 1, int up_w = 1>
__device__ __forceinline__ void spread(u16* to, const u16* from, int maps) {
  constexpr int octets = (columns + 7) / 8, AT_ONCE = THREADS / octets, maps_ahead = AT_ONCE / rows, rows_ahead = AT_ONCE % rows;
  const int line = threadIdx.x / octets, column = threadIdx.x % octets * 8;
  if (line >= AT_ONCE) return;
  for (int map = line / rows, row = line % rows; map < maps;) {
    const u16* source = from + (map * rows + row) * columns + column;
    Octet v;
    v.quad = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int e = 0; e < 8; e += vec)
      if (column + e < columns) insert<vec>(v, e, *reinterpret_cast<const typename Access<vec>::type*>(source + e));
    uint4* place = reinterpret_cast<uint4*>(to + map * map_pitch + row * up_h * pitch + column * up_w);
    static_assert(up_w <= 2);
    if constexpr (up_w == 1) {
      *place = v.quad;
    } else {
      place[0] = make_uint4(v.word[0] & 0xffffu, v.word[0] >> 16, v.word[1] & 0xffffu, v.word[1] >> 16);
      place[1] = make_uint4(v.word[2] & 0xffffu, v.word[2] >> 16, v.word[3] & 0xffffu, v.word[3] >> 16);
    }
    map += maps_ahead, row += rows_ahead;
    if (row >= rows) row -= rows, ++map;
  }
}

__device__ __forceinline__ void clear_shared(u16* shared, int elements) {
  for (int i = threadIdx.x * 8; i < elements; i += THREADS * 8) *reinterpret_cast<uint4*>(shared + i) = make_uint4(0, 0, 0, 0);
}

// n elements as floats.
template <int n> __device__ __forceinline__ void read_shared(float* to, const u16* at) {
  using Piece = typename Access<n>::type;
  union {
    Piece piece;
    u16 element[n];
  } v;
  v.piece = *reinterpret_cast<const Piece*>(at);
#pragma unroll
  for (int e = 0; e < n; ++e) to[e] = to_float(v.element[e]);
}

// The columns behind a strip: at is the first of them, aligned to 8 elements.
__device__ __forceinline__ void read_map_window(float (&window)[WINDOW], const u16* at) {
  constexpr int before = access_of(PAD_W), behind = access_of(RIGHT);
  if constexpr (!NARROW && PAD_W > 0) read_shared<before>(window + 8 - before, at - before);
#pragma unroll
  for (int i = 0; i < SW; ++i) read_shared<8>(window + 8 + 8 * i, at + 8 * i);
  if constexpr (!NARROW && RIGHT > 0) read_shared<behind>(window + WINDOW - 8, at + 8 * SW);
}
