// Depthwise convolution of stride 1, forward or input gradient, 16 bit, channels_last, small filters: on tensor cores, with nothing
// transposed between global memory and the mma.
//
// A cell is 16 bytes: 2 neighbouring pixels x 4 channels, a quad. For a quad and a filter row, two neighbouring outputs are
//   Y[m][(o, c)] += sum_{j, c'} X[m][(j, c')] T[(j, c')][(o, c)],   T = filter[c][j - o] where c' = c, else 0:
// m numbers pairs of outputs, X[m] is the window of cells from cell m on, which ldmatrix reads where windows of neighbours overlap. Of
// T's elements one in four is no zero, but of few filter columns few are wasted: a k16 step serves 2 + 2 columns less one.
//
// A block takes CHANNELS channels and a part of all strips. A strip is COLUMNS columns of an image; each step down a strip gives ROWS
// rows. The input is a ring of slots of ROWS rows, filled by asynchronous copies STAGES steps ahead. A warp has one quad, whose T it
// keeps in registers. Between two barriers it starts copies, stores outputs of the step before, and multiplies.
//
// 0 * inf in T makes NaN of an output that never meets the inf: outputs that are not finite are computed again, tap by tap.
#include "by_taps.cuh"
#include "strips.cuh"

constexpr int PAIRS = (KW + 2) / 2, STEPS = PAIRS / 2;  // cells of a window; k16 steps, and a k8 step where one is left
constexpr bool TAIL = PAIRS % 2;
constexpr int QUADS = CHANNELS / 4, TILES = COLUMNS / 32, WARPS = THREADS / 32;
constexpr int HALO = KH - 1, HALO_SLOTS = (HALO + ROWS - 1) / ROWS, SLOTS = HALO_SLOTS + 1 + STAGES;
constexpr int CELLS = COLUMNS / 2 + PAIRS - 1, ROW_BYTES = 16 * CELLS;
constexpr int PLANE_BYTES = (SLOTS * ROWS * ROW_BYTES + 111) / 128 * 128 + 16;  // 8 quads then fill the 32 banks
constexpr int PIXEL_BYTES = 2 * CHANNELS + 8, OUTPUT_BYTES = ROWS * COLUMNS * PIXEL_BYTES;
constexpr int WARPS_IN_ROW = WARPS / ROWS;  // for copies
static_assert(QUADS % 16 == 0 && WARPS % QUADS == 0 && COLUMNS % 32 == 0 && WARPS % ROWS == 0);

struct Params {
  Tensor4 x, y;
  const u16 *weight, *bias;
  int images, channels, rows, columns, out_rows, out_columns, strips_across, strips_down, strip_steps, channel_blocks, strips, splits;
};

__device__ __forceinline__ void advance(Step& s, const Params& p) {
  s = following<ROWS, COLUMNS, HALO_SLOTS>(s, p, [](int slot) { return slot + 1 == SLOTS ? 0 : slot + 1; });
}

// Which pixel of a cell comes first: the second in every other 8 quads, so that 16 quads of a pixel fill the 32 banks.
__device__ __forceinline__ int pixel_of_cell(int quad, int place) { return place ^ quad / 8 % 2; }

// Starts copies of the newest rows of a step. A warp takes cells of one row: the 16 quads of a cell's two pixels are 32 lanes.
__device__ __forceinline__ void fetch_rows(u32 ring, const Step& s, int channel, const Params& p) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = warp / WARPS_IN_ROW, cell = warp % WARPS_IN_ROW;
  const int quad = lane % 16, side = lane / 16;
  const int y = s.row - PAD_H + HALO_SLOTS * ROWS + row, x = s.column - PAD_W + 2 * cell + side, c = channel + 4 * quad;
  const u16* from = p.x.data + s.image * p.x.image + y * p.x.row + x * p.x.column + c;
  const i64 next = 2 * WARPS_IN_ROW * p.x.column;
  const bool inside = unsigned(y) < unsigned(p.rows);
#pragma unroll
  for (int q = 0; q < QUADS / 16; ++q) {
    const u32 to = ring + (quad + 16 * q) * PLANE_BYTES + (s.fresh * ROWS + row) * ROW_BYTES + cell * 16 + pixel_of_cell(quad, side) * 8;
    const bool channel_inside = inside && c + 64 * q < p.channels;
#pragma unroll
    for (int i = 0; i < (CELLS + WARPS_IN_ROW - 1) / WARPS_IN_ROW; ++i)
      if (i < CELLS / WARPS_IN_ROW || cell + i * WARPS_IN_ROW < CELLS)
        copy_async<8>(to + i * WARPS_IN_ROW * 16, from + 64 * q + i * next, channel_inside && unsigned(x + 2 * WARPS_IN_ROW * i) < unsigned(p.columns));
  }
}

struct Filter {  // a lane's part of T
  u32 b[KH][2 * ((PAIRS + 1) / 2)];
};

__device__ __forceinline__ Filter load_filter(const Params& p, int quad, int channel0) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int channel = channel0 + g % 4;
  const bool meets = g / 2 % 2 == t % 2 && channel < p.channels;  // this lane's two elements of a column have the column's channel
  Filter f;
#pragma unroll
  for (int kh = 0; kh < KH; ++kh)
#pragma unroll
    for (int j = 0; j < 2 * ((PAIRS + 1) / 2); ++j) {
      const int kw = 2 * j + pixel_of_cell(quad, t / 2) - g / 4;
      u32 v = 0;
      if (meets && 0 <= kw && kw < KW) v = filter_element(p, channel, 0, kh * KW + kw);
      f.b[kh][j] = v << g % 2 * 16;
    }
  return f;
}

// ROWS rows x 32 columns of the warp's quad. window(slot): address of the lane's ldmatrix row in a slot, counted from the window's first.
template <class Window>
__device__ __forceinline__ void multiply(const Filter& f, const Window& window, const float (&start)[2], char* out, u32& watched) {
  float acc[ROWS][4];
  u32 a[2][STEPS + 1][4];
  auto load = [&](int y) {  // ahead of what is written to shared memory, which the compiler takes for the same
    const u32 at = window(y / ROWS) + y % ROWS * ROW_BYTES;
#pragma unroll
    for (int s = 0; s < STEPS; ++s) load_matrix4(a[y % 2][s], at + s * 32);
    if constexpr (TAIL) load_matrix2(a[y % 2][STEPS], at + STEPS * 32);
  };
  load(0);
#pragma unroll
  for (int y = 0; y < ROWS + HALO; ++y) {
    if (y + 1 < ROWS + HALO) load(y + 1);
#pragma unroll
    for (int s = 0; s < STEPS + TAIL; ++s)
#pragma unroll
      for (int kh = 0; kh < KH; ++kh) {
        const int r = y - kh;
        if (r < 0 || r >= ROWS) continue;
        if (kh == 0 && s == 0) acc[r][0] = acc[r][2] = start[0], acc[r][1] = acc[r][3] = start[1];
        if (s < STEPS) mma16(acc[r], a[y % 2][s], f.b[kh][2 * s], f.b[kh][2 * s + 1]);
        else mma8(acc[r], a[y % 2][s], f.b[kh][2 * s]);
      }
    if (y >= HALO) {
      const int r = y - HALO;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const u32 packed = pack(acc[r][2 * h], acc[r][2 * h + 1]);
        watch(watched, packed);
        *reinterpret_cast<u32*>(out + (r * COLUMNS + 16 * h) * PIXEL_BYTES) = packed;
      }
    }
  }
}

__device__ __forceinline__ void store_rows(const char* outputs, int image, int row0, int column0, int channel, const Params& p) {
  constexpr int OCTETS = CHANNELS / 8, PIXELS_AT_ONCE = THREADS / OCTETS;
  const int octet = threadIdx.x % OCTETS, pixel = threadIdx.x / OCTETS, row = pixel / COLUMNS, column = pixel % COLUMNS;
  constexpr int ROWS_AT_ONCE = PIXELS_AT_ONCE / COLUMNS;
  static_assert(PIXELS_AT_ONCE % COLUMNS == 0 && ROWS % ROWS_AT_ONCE == 0);
  if (channel + 8 * octet >= p.channels || column0 + column >= p.out_columns) return;
  u16* to = p.y.data + image * p.y.image + (row0 + row) * p.y.row + (column0 + column) * p.y.column + channel + 8 * octet;
  const int rows = p.out_rows - row0 - row;
  outputs += pixel * PIXEL_BYTES + octet * 16;
#pragma unroll
  for (int i = 0; i < ROWS / ROWS_AT_ONCE; ++i, to += ROWS_AT_ONCE * p.y.row) {
    const uint2 *from = reinterpret_cast<const uint2*>(outputs + i * PIXELS_AT_ONCE * PIXEL_BYTES), low = from[0], high = from[1];
    if (i * ROWS_AT_ONCE < rows) *reinterpret_cast<uint4*>(to) = make_uint4(low.x, low.y, high.x, high.y);
  }
}

__device__ __noinline__ void rows_by_taps(const Params& p, int image, int row0, int column0, int channel) {
#pragma unroll 1
  for (int i = threadIdx.x; i < ROWS * COLUMNS * CHANNELS; i += THREADS) {
    const int c = channel + i % CHANNELS, column = column0 + i / CHANNELS % COLUMNS, row = row0 + i / CHANNELS / COLUMNS;
    if (c < p.channels && row < p.out_rows && column < p.out_columns) output_by_taps(p, image, c, row, column);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) depthwise_pairs(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) u16 shared[];
  char* outputs = reinterpret_cast<char*>(shared) + QUADS * PLANE_BYTES;
  const u32 ring = shared_address(shared);
  const int channel = blockIdx.x % p.channel_blocks * CHANNELS;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, quad = warp % QUADS, own = channel + 4 * quad + lane % 2 * 2;

  Step now, ahead;
  now.strip = blockIdx.x / p.channel_blocks, now.fresh = 0;
  enter_strip<ROWS, COLUMNS, HALO_SLOTS>(now, p);
  ahead = now;
#pragma unroll
  for (int i = 0; i < STAGES; ++i) {
    if (ahead.strip >= 0) fetch_rows(ring, ahead, channel, p);
    copy_async_commit();
    advance(ahead, p);
  }
  const Filter filter = load_filter(p, quad, channel + 4 * quad);
  const AddBias epilogue{p.bias};
  const float start[2] = {own < p.channels ? epilogue.start(own) : 0.f, own + 1 < p.channels ? epilogue.start(own + 1) : 0.f};
  copy_async_wait<STAGES - 1>();
  __syncthreads();

  int image = 0, row = 0, column = 0;  // of the outputs that wait in shared memory
  bool staged = false, bad = false;    // are there such, and some that are not finite
  int half = 0;
  while (now.strip >= 0 || staged) {
    if (ahead.strip >= 0) fetch_rows(ring, ahead, channel, p);
    copy_async_commit();
    if (staged) {
      if (bad) rows_by_taps(p, image, row, column, channel);
      else store_rows(outputs + (half ^ 1) * OUTPUT_BYTES, image, row, column, channel, p);
    }
    u32 watched = 0;
    staged = now.number >= 0;
    if (staged) {
      const int newest = now.fresh;
#pragma unroll 1
      for (int tile = warp / QUADS; tile < TILES; tile += WARPS / QUADS) {
        const u32 here = ring + quad * PLANE_BYTES + (16 * tile + lane % 16 + lane / 16) * 16;
        auto window = [=](int i) {
          const int slot = newest - HALO_SLOTS + i;
          return here + (slot < 0 ? slot + SLOTS : slot) * ROWS * ROW_BYTES;
        };
        char* out = outputs + half * OUTPUT_BYTES + (32 * tile + lane / 4 * 2 + lane % 4 / 2) * PIXEL_BYTES + quad * 8 + lane % 2 * 4;
        multiply(filter, window, start, out, watched);
      }
    }
    image = now.image, row = now.row, column = now.column;
    copy_async_wait<STAGES - 1>();
    bad = __syncthreads_or(watched_non_finite(watched));
    advance(now, p);
    advance(ahead, p);
    half ^= 1;
  }
}
