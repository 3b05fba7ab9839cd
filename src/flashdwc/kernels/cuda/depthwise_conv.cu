// Depthwise convolution, forward or input gradient, 16 bit, as products with small Toeplitz matrices on tensor cores.
//
// Along each axis output o, input i and tap k meet where  o * S + k * D - P = i * U:  S is the stride of a forward convolution, U that
// of the one whose input gradient this is (taps then run backwards: ROTATE); one of them is 1. PHASE = P mod U, FIRST = P div U.
//
// For a channel and a filter row, 8 U neighbouring outputs are  Y[m][j] += sum_k X[m][k] T[k][j]:  m numbers blocks of outputs, X[m] is
// the window of input columns behind block m, read by ldmatrix straight from the planar tile where windows of neighbours overlap, and
// T[k][j] = filter[(k U + PHASE - j S) / D], zero where that is no tap. The 16 blocks of one mma are BLOCKS columns x GROUPS row groups
// x IMAGES; a row group is ROWS output rows, whose accumulators take the same input fragment with different filter rows.
//
//   tile (one block):  CHANNELS planes, each IMAGES x TILE_ROWS x TILE_COLUMNS; item = (channel, set of GROUPS row groups), one a warp
//
// LINEAR: a tensor of one row; the rows of a tile are parts of it, one behind the other.
// LEAD columns are loaded before the window and meet zeros: the tile then starts where global memory is aligned (NCHW).
//
// A tile that holds an inf or NaN (or whose filters do) is computed tap by tap instead, as 0 * inf in a Toeplitz zero would spread it.
#include "by_taps.cuh"
#include "epilogue.cuh"
#include "tile.cuh"

constexpr int WINDOW = LEAD + ((KW - 1) * DW + (8 * UW - 1) * SW - PHASE_W) / UW + 1;
constexpr int K8 = (WINDOW + 7) / 8, K16 = K8 / 2;
constexpr bool TAIL = K8 % 2;
constexpr int GROUP_STEP = ROWS / UH * SH;  // input rows between row groups
constexpr int SPAN = ((KH - 1) * DH + (ROWS - 1) * SH - PHASE_H) / UH + 1;
constexpr int TILE_ROWS = (SETS * GROUPS - 1) * GROUP_STEP + SPAN;
constexpr int TILE_COLUMNS = (BLOCKS - 1) * 8 * SW + 8 * K8;
constexpr int OUT_ROWS = SETS * GROUPS * ROWS, OUT_COLUMNS = BLOCKS * 8 * UW;
constexpr int WARPS = THREADS / 32, ITEMS = CHANNELS * SETS;
constexpr bool STAY = KH > CHUNK || SUM > 1 || SETS > 1;  // accumulators stay with their warp until the block is done

using Input = Tile<IN_NHWC, IN_VEC, SHIFT, CHANNELS, IMAGES, TILE_ROWS, TILE_COLUMNS, ROW_PITCH, IMAGE_PITCH, PLANE_PITCH, OCTET_PITCH,
                   LINEAR ? OUT_COLUMNS / UW * SW : 0>;
using Output = Tile<OUT_NHWC, OUT_VEC, 0, CHANNELS, IMAGES, OUT_ROWS, OUT_COLUMNS, OUT_COLUMNS, OUT_IMAGE_PITCH, PLANE_PITCH, OCTET_PITCH,
                    LINEAR ? OUT_COLUMNS : 0>;

// A filter row is stored with zeros around and between its taps; a lane's pair starts at any element, so where pairs are neighbours
// (U = 1) and may start at an odd one, a second copy, shifted by one, keeps the 32-bit loads aligned.
constexpr int FRONT = (8 * UW - 1) * SW + LEAD * UW;
constexpr int FILTER_ROW = (FRONT + (8 * K8 - 1) * UW + PHASE_W + 2) / 2 * 2;
constexpr bool PAIRS = UW == 1, COPIES = PAIRS && SW % 2;
constexpr int FILTER_PITCH = COPIES ? 2 * FILTER_ROW + 2 : FILTER_ROW;

static_assert(BLOCKS * GROUPS * IMAGES == 16 && ROWS % UH == 0 && (CHUNK * DH) % UH == 0);
static_assert(STAY ? ITEMS == WARPS : CHANNELS % WARPS == 0);
static_assert(OUT_ROWS * OUT_COLUMNS <= OUT_IMAGE_PITCH && IMAGES * OUT_IMAGE_PITCH <= PLANE_PITCH);

struct Params {
  Tensor4 x, y;
  const u16 *weight, *bias;
  int images, channels, rows, columns, out_rows, out_columns, tiles_across, tiles_down, channel_blocks;
};

// Filter rows first..first + CHUNK of all channels; returns non_finite() bits.
__device__ __forceinline__ u32 load_filters(u16* filters, const Params& p, int channel0, int part, int first) {
  constexpr int HEIGHT = CHUNK < KH ? CHUNK : KH;
  u32 bad = 0;
  for (int i = threadIdx.x; i < CHANNELS * HEIGHT * FILTER_ROW; i += THREADS) {
    int j = i % FILTER_ROW, r = i / FILTER_ROW, kh = first + r % HEIGHT, channel = channel0 + r / HEIGHT;
    int at = j - FRONT;
    u16 v = 0;
    if (at >= 0 && at % DW == 0 && at / DW < KW && kh < KH && channel < p.channels)
      v = filter_element(p, channel, part, kh * KW + at / DW);
    bad |= non_finite(v);
    u16* row = filters + r * FILTER_PITCH;
    row[j] = v;
    if constexpr (COPIES) row[FILTER_ROW + 1 + j] = v;
  }
  return bad;
}

struct Lane {
  u32 input;     // address of this lane's ldmatrix row for input row 0, window column 0
  int filter;    // element of the filter row where this lane's pair for window column 0 starts
  int out[2];    // elements of the plane where its two accumulator pairs go
};

__device__ __forceinline__ Lane make_lane(int lane, int set) {
  auto block = [&](int m, int row_step, int row_pitch, int image_pitch, int column_step) {
    int b = m % BLOCKS, g = m / BLOCKS % GROUPS, n = m / (BLOCKS * GROUPS);
    return n * image_pitch + (set * GROUPS + g) * row_step * row_pitch + b * column_step;
  };
  int m = lane & 15, g = lane >> 2, t = lane & 3;
  Lane l;
  l.input = 2 * (block(m, GROUP_STEP, ROW_PITCH, IMAGE_PITCH, 8 * SW) + 8 * (lane >> 4));
  l.filter = FRONT + (2 * t - LEAD) * UW + PHASE_W - g * SW;
  if (COPIES && l.filter % 2) l.filter += FILTER_ROW + 1;
  for (int h = 0; h < 2; ++h) l.out[h] = block(g + 8 * h, ROWS, OUT_COLUMNS, OUT_IMAGE_PITCH, 8 * UW) + 2 * t;
  return l;
}

__device__ __forceinline__ u32 filter_pair(const u16* row, int at) {
  if constexpr (PAIRS) return *reinterpret_cast<const u32*>(row + at);
  else return row[at] | u32(row[at + UW]) << 16;
}

// Accumulates HEIGHT filter rows over a k16 (or, HALF, k8) step of the window.
template <int HEIGHT, bool HALF>
__device__ __forceinline__ void accumulate_step(float (&acc)[UW][ROWS][4], u32 input, const u16* filter) {
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
        if constexpr (HALF) load_matrix2(a, input + 2 * y * ROW_PITCH);
        else load_matrix4(a, input + 2 * y * ROW_PITCH);
        loaded = true;
      }
      const bool first = rs < (UH > SH ? UH : SH);  // no earlier input row meets this filter row: fetch it now
#pragma unroll
      for (int v = 0; v < UW; ++v) {
        if (first) {
          const u16* row = filter + kh * FILTER_PITCH;
          b[v][kh][0] = filter_pair(row, -8 * v * SW);
          if constexpr (!HALF) b[v][kh][1] = filter_pair(row, 8 * UW - 8 * v * SW);
        }
        if constexpr (HALF) mma8(acc[v][r], a, b[v][kh][0]);
        else mma16(acc[v][r], a, b[v][kh][0], b[v][kh][1]);
      }
    }
  }
}

template <int HEIGHT> __device__ __forceinline__ void accumulate(float (&acc)[UW][ROWS][4], u32 input, const u16* filter) {
#pragma unroll 1
  for (int s = 0; s < K16; ++s) accumulate_step<HEIGHT, false>(acc, input + 32 * s, filter + 16 * s * UW);
  if constexpr (TAIL) accumulate_step<HEIGHT, true>(acc, input + 32 * K16, filter + 16 * K16 * UW);
}

template <class Epilogue>
__device__ __forceinline__ void stage(u16* plane, const float (&acc)[UW][ROWS][4], const Lane& lane, int channel, Epilogue epilogue) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r)
#pragma unroll
    for (int v = 0; v < UW; ++v)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        *reinterpret_cast<u32*>(plane + lane.out[h] + r * OUT_COLUMNS + 8 * v) =
            pack(epilogue(acc[v][r][2 * h], channel), epilogue(acc[v][r][2 * h + 1], channel));
}

template <class Epilogue> __device__ __noinline__ void tile_by_taps(const Params& p, const Origin& out, Epilogue epilogue) {
  for (int i = threadIdx.x; i < CHANNELS * IMAGES * OUT_ROWS * OUT_COLUMNS; i += THREADS) {
    int channel = out.channel + i % CHANNELS, r = i / CHANNELS, column = out.column + r % OUT_COLUMNS;
    r /= OUT_COLUMNS;
    int row = out.row + r % OUT_ROWS;
    if constexpr (LINEAR) {
      column += (row - out.row) * OUT_COLUMNS;
      row = 0;
    }
    int image = out.image + r / OUT_ROWS;
    if (channel >= p.channels || image >= p.images || row >= p.out_rows || column >= p.out_columns) continue;
    float sum = by_taps(p, image, channel, row, column);
    p.y.data[image * p.y.image + channel * p.y.channel + row * p.y.row + column * p.y.column] = from_float(epilogue(sum, channel));
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) depthwise_conv(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) u16 shared[];
  u16 *tile = shared, *filters = shared + Input::size;
  unsigned b = blockIdx.x, t = b / p.channel_blocks;
  Origin out, in;
  out.channel = b % p.channel_blocks * CHANNELS;
  out.column = t % p.tiles_across * OUT_COLUMNS;
  t /= p.tiles_across;
  out.row = t % p.tiles_down * OUT_ROWS;
  out.image = t / p.tiles_down * IMAGES;
  if constexpr (LINEAR) {
    out.column = out.row * OUT_COLUMNS;
    out.row = 0;
  }
  out.images = p.images, out.rows = p.out_rows, out.columns = p.out_columns, out.channels = p.channels;
  in = out;
  in.row = out.row / UH * SH - FIRST_H, in.column = out.column / UW * SW - FIRST_W - LEAD;
  in.rows = p.rows, in.columns = p.columns;

  const int warp = threadIdx.x / 32;
  AddBias epilogue{p.bias};
  float acc[UW][ROWS][4];
  auto clear = [&] {
#pragma unroll
    for (int i = 0; i < UW * ROWS * 4; ++i) acc[i / (4 * ROWS)][i / 4 % ROWS][i % 4] = 0.f;
  };
  if constexpr (STAY) clear();

  bool bad = false;
#pragma unroll 1
  for (int part = 0; part < SUM; ++part) {
    if (part) __syncthreads();
    auto source = [=](int channel) { return source_channel(channel, part); };
    u32 bits = load_tile<Input, (SUM > 1 || SPREAD > 1), THREADS>(tile, p.x, in, source, Identity{});
#pragma unroll 1
    for (int first = 0; first < KH; first += CHUNK) {
      if (first) __syncthreads();
      bits |= load_filters(filters, p, out.channel, part, first);
      bad |= __syncthreads_or(bits & NON_FINITE_BITS);
      constexpr int HEIGHT = CHUNK < KH ? CHUNK : KH;
      for (int item = warp; item < ITEMS; item += WARPS) {
        int c = item / SETS;
        Lane lane = make_lane(threadIdx.x % 32, item % SETS);
        u16* plane = tile + Input::plane(c);
        if constexpr (!STAY) clear();
        u32 input = shared_address(plane) + lane.input + 2 * (first * DH / UH) * ROW_PITCH;
        const u16* filter = filters + c * HEIGHT * FILTER_PITCH + lane.filter;
        if constexpr (KH % HEIGHT == 0) accumulate<HEIGHT>(acc, input, filter);
        else if (first + HEIGHT <= KH) accumulate<HEIGHT>(acc, input, filter);
        else accumulate<KH % HEIGHT>(acc, input, filter);
        if constexpr (!STAY) {
          __syncwarp();
          stage(plane, acc, lane, min(out.channel + c, p.channels - 1), epilogue);
        }
      }
    }
  }
  if (bad) return tile_by_taps(p, out, epilogue);
  if constexpr (STAY) {
    __syncthreads();  // other warps may still read the plane
    int c = warp / SETS;
    stage(tile + Input::plane(c), acc, make_lane(threadIdx.x % 32, warp % SETS), min(out.channel + c, p.channels - 1), epilogue);
  }
  __syncthreads();
  store_tile<Output, THREADS>(tile, p.y, out);
}
