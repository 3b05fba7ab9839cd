// Products of planar tiles with small Toeplitz matrices on tensor cores, for depthwise_conv.cu.
//
// Along each axis output o, input i and tap k meet where  o * S + k * D - P = i * U:  S is the stride of a forward convolution, U that
// of the one whose input gradient this is (taps then run backwards: ROTATE); one of them is 1. PHASE = P mod U, FIRST = P div U.
//
// For a channel and a filter row, 8 U neighbouring outputs are  Y[m][j] += sum_k X[m][k] T[k][j]:  m numbers blocks of outputs, X[m] is
// the window of input columns behind block m, read by ldmatrix straight from the planar tile where windows of neighbours overlap, and
// T[k][j] = filter[(k U + PHASE - j S) / D], zero where that is no tap. The 16 blocks of one mma are BLOCKS columns x GROUPS row groups
// x IMAGES; a row group is ROWS output rows, whose accumulators take the same input fragment with different filter rows.
//
// LEAD columns are loaded before the window and meet zeros: the tile then starts where global memory is aligned (NCHW).
//
// 0 * inf in a Toeplitz zero makes NaN of an output that never meets the inf: outputs that are not finite are computed again, tap by tap.
#pragma once
#include "by_taps.cuh"
#include "epilogue.cuh"
#include "tile.cuh"

constexpr int WINDOW = LEAD + ((KW - 1) * DW + (8 * UW - 1) * SW - PHASE_W) / UW + 1;
constexpr int K8 = (WINDOW + 7) / 8, K16 = K8 / 2;
constexpr bool TAIL = K8 % 2;
constexpr int OUT_COLUMNS = BLOCKS * 8 * UW;
constexpr int WARPS = THREADS / 32;
static_assert(BLOCKS * GROUPS * IMAGES == 16 && ROWS % UH == 0);

// A filter row is stored with zeros around and between its taps; a lane's pair starts at any element, so where pairs are neighbours
// (U = 1) and may start at an odd one, a second copy, shifted by one, keeps the 32-bit loads aligned.
constexpr int FRONT = (8 * UW - 1) * SW + LEAD * UW;
constexpr int FILTER_ROW = (FRONT + (8 * K8 - 1) * UW + PHASE_W + 2) / 2 * 2;
constexpr bool PAIRS = UW == 1, COPIES = PAIRS && SW % 2;
constexpr int FILTER_PITCH = COPIES ? 2 * FILTER_ROW + 2 : FILTER_ROW;

// HEIGHT filter rows, from the first on, of all channels.
template <int HEIGHT, class Params>
__device__ __forceinline__ void load_filters(u16* filters, const Params& p, int channel0, int part, int first) {
  for (int i = threadIdx.x; i < CHANNELS * HEIGHT * FILTER_ROW; i += THREADS) {
    int j = i % FILTER_ROW, r = i / FILTER_ROW, kh = first + r % HEIGHT, channel = channel0 + r / HEIGHT;
    int at = j - FRONT;
    u16 v = 0;
    if (at >= 0 && at % DW == 0 && at / DW < KW && kh < KH && channel < p.channels)
      v = filter_element(p, channel, part, kh * KW + at / DW);
    u16* row = filters + r * FILTER_PITCH;
    row[j] = v;
    if constexpr (COPIES) row[FILTER_ROW + 1 + j] = v;
  }
}

struct Lane {
  int group, input;  // row group, and element of its first row, of this lane's ldmatrix row
  int filter;        // element of the filter row where this lane's pair for window column 0 starts
  int out[2];        // elements of the plane where its two accumulator pairs go
};

__device__ __forceinline__ Lane make_lane(int set) {
  const int lane = threadIdx.x % 32, m = lane & 15, g = lane >> 2, t = lane & 3;
  auto group = [=](int m) { return set * GROUPS + m / BLOCKS % GROUPS; };
  Lane l;
  l.group = group(m);
  l.input = m / (BLOCKS * GROUPS) * IMAGE_PITCH + m % BLOCKS * 8 * SW + 8 * (lane >> 4);
  l.filter = FRONT + (2 * t - LEAD) * UW + PHASE_W - g * SW;
  if (COPIES && l.filter % 2) l.filter += FILTER_ROW + 1;
  for (int h = 0; h < 2; ++h) {
    int b = g + 8 * h;
    l.out[h] = b / (BLOCKS * GROUPS) * OUT_IMAGE_PITCH + group(b) * ROWS * OUT_COLUMNS + b % BLOCKS * 8 * UW + 2 * t;
  }
  return l;
}

__device__ __forceinline__ u32 filter_pair(const u16* row, int at) {
  if constexpr (PAIRS) return *reinterpret_cast<const u32*>(row + at);
  else return row[at] | u32(row[at + UW]) << 16;
}

struct Accumulators {
  float v[UW][ROWS][4];
  __device__ __forceinline__ void start(float value) {
#pragma unroll
    for (int i = 0; i < UW * ROWS * 4; ++i) v[i / (4 * ROWS)][i / 4 % ROWS][i % 4] = value;
  }
};

// Accumulates HEIGHT filter rows over a k16 (or, HALF, k8) step of the window. input(y): address of the lane's ldmatrix row for input row y.
template <int HEIGHT, bool HALF, class Input>
__device__ __forceinline__ void accumulate_step(Accumulators& acc, const Input& input, int column, const u16* filter) {
  constexpr int STEPS = ((HEIGHT - 1) * DH + (ROWS - 1) * SH - PHASE_H) / UH + 1;
  u32 b[UW][HEIGHT][2];
#pragma unroll
  for (int y = 0; y < STEPS; ++y) {
    u32 a[4];
    bool loaded = false;
#pragma unroll
    for (int kh = 0; kh < HEIGHT; ++kh) {
      const int rs = y * UH + PHASE_H - kh * DH, r = rs / SH;  // output row that meets input row y in filter row kh
      if (rs < 0 || rs % SH != 0 || r >= ROWS) continue;
      if (!loaded) {
        if constexpr (HALF) load_matrix2(a, input(y) + 2 * column);
        else load_matrix4(a, input(y) + 2 * column);
        loaded = true;
      }
      const bool first = rs < (UH > SH ? UH : SH);  // no earlier input row meets this filter row: fetch it now
#pragma unroll
      for (int v = 0; v < UW; ++v) {
        if (first) {
          const u16* row = filter + column * UW + kh * FILTER_PITCH;
          b[v][kh][0] = filter_pair(row, -8 * v * SW);
          if constexpr (!HALF) b[v][kh][1] = filter_pair(row, 8 * UW - 8 * v * SW);
        }
        if constexpr (HALF) mma8(acc.v[v][r], a, b[v][kh][0]);
        else mma16(acc.v[v][r], a, b[v][kh][0], b[v][kh][1]);
      }
    }
  }
}

template <int HEIGHT, class Input>
__device__ __forceinline__ void accumulate(Accumulators& acc, const Input& input, const u16* filter) {
#pragma unroll 1
  for (int s = 0; s < K16; ++s) accumulate_step<HEIGHT, false>(acc, input, 16 * s, filter);
  if constexpr (TAIL) accumulate_step<HEIGHT, true>(acc, input, 16 * K16, filter);
}

// Rounds the accumulators into a plane of outputs and watches them for inf and NaN.
template <class Epilogue>
__device__ __forceinline__ void stage(u16* plane, const Accumulators& acc, const Lane& lane, int channel, Epilogue epilogue, u32& watched) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r)
#pragma unroll
    for (int v = 0; v < UW; ++v)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float* pair = acc.v[v][r] + 2 * h;
        u32 packed = pack(epilogue.finish(pair[0], channel), epilogue.finish(pair[1], channel));
        watch(watched, packed);
        *reinterpret_cast<u32*>(plane + lane.out[h] + r * OUT_COLUMNS + 8 * v) = packed;
      }
}

// The outputs of a tile (T) tap by tap. Its place comes in registers: a reference to it would keep it on every thread's stack.
template <class T, class Params>
__device__ __noinline__ void tile_by_taps(const Params& p, int image, int row, int column, int channel) {
  const Origin out = {image, row, column, channel, p.images, p.out_rows, p.out_columns, p.channels};
#pragma unroll 1
  for (int i = threadIdx.x; i < T::template units<1> * (T::nhwc ? 8 : 1); i += THREADS) {
    Unit<T, 1> u(i / (T::nhwc ? 8 : 1), out);
    int c = u.c + (T::nhwc ? i % 8 : 0);
    if (c >= p.channels || !u.inside(out, 0)) continue;
    output_by_taps(p, u.n, c, u.y, u.x);
  }
}
