// Depthwise convolution, forward or input gradient, 16 bit, as products with small Toeplitz matrices on tensor cores (toeplitz.cuh).
//
//   tile (one block):  CHANNELS planes, each IMAGES x TILE_ROWS x TILE_COLUMNS; item = (channel, set of GROUPS row groups), one a warp
//
// Filters taller than CHUNK rows pass through shared memory in parts. LINEAR: a tensor of one row; the rows of a tile are parts of it,
// one behind the other.
#include "toeplitz.cuh"

constexpr int HEIGHT = CHUNK < KH ? CHUNK : KH;
constexpr int GROUP_STEP = ROWS / UH * SH;  // input rows between row groups
constexpr int SPAN = ((KH - 1) * DH + (ROWS - 1) * SH - PHASE_H) / UH + 1;
constexpr int TILE_ROWS = (SETS * GROUPS - 1) * GROUP_STEP + SPAN;
constexpr int TILE_COLUMNS = (BLOCKS - 1) * 8 * SW + 8 * K8;
constexpr int OUT_ROWS = SETS * GROUPS * ROWS, ITEMS = CHANNELS * SETS;
constexpr bool STAY = KH > CHUNK || SUM > 1 || SETS > 1;  // accumulators stay with their warp until the block is done

using Input = Tile<IN_NHWC, IN_VEC, SHIFT, CHANNELS, IMAGES, TILE_ROWS, TILE_COLUMNS, ROW_PITCH, IMAGE_PITCH, PLANE_PITCH, OCTET_PITCH,
                   LINEAR ? OUT_COLUMNS / UW * SW : 0>;
using Output = Tile<OUT_NHWC, OUT_VEC, 0, CHANNELS, IMAGES, OUT_ROWS, OUT_COLUMNS, OUT_COLUMNS, OUT_IMAGE_PITCH, PLANE_PITCH, OCTET_PITCH,
                    LINEAR ? OUT_COLUMNS : 0>;

static_assert((CHUNK * DH) % UH == 0 && (STAY ? ITEMS == WARPS : CHANNELS % WARPS == 0));
static_assert(OUT_ROWS * OUT_COLUMNS <= OUT_IMAGE_PITCH && IMAGES * OUT_IMAGE_PITCH <= PLANE_PITCH);

struct Params {
  Tensor4 x, y;
  const u16 *weight, *bias;
  int images, channels, rows, columns, out_rows, out_columns, tiles_across, tiles_down, channel_blocks;
};

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
  __shared__ int place[3];  // of the outputs, until they are stored: registers are dear
  if (threadIdx.x == 0) place[0] = out.image, place[1] = out.row, place[2] = out.column;
  out.images = p.images, out.rows = p.out_rows, out.columns = p.out_columns, out.channels = p.channels;
  in = out;
  in.row = out.row / UH * SH - FIRST_H, in.column = out.column / UW * SW - FIRST_W - LEAD;
  in.rows = p.rows, in.columns = p.columns;

  const int warp = threadIdx.x / 32;
  AddBias epilogue{p.bias};
  Accumulators acc;
  auto channel_of = [&](int item) { return min(out.channel + item / SETS, p.channels - 1); };

  u32 watched = 0;
#pragma unroll 1
  for (int part = 0; part < SUM; ++part) {
    if (part) __syncthreads();
    auto source = [=](int channel) { return source_channel(channel, part); };
    load_tile<Input, (SUM > 1 || SPREAD > 1), THREADS>(tile, p.x, in, source, Identity{});
    if (STAY && part == 0) acc.start(epilogue.start(channel_of(warp)));
#pragma unroll 1
    for (int first = 0; first < KH; first += CHUNK) {
      if (first) __syncthreads();
      load_filters<HEIGHT>(filters, p, out.channel, part, first);
      __syncthreads();
      for (int item = warp; item < ITEMS; item += WARPS) {
        int c = item / SETS;
        Lane lane = make_lane(item % SETS);
        u16* plane = tile + Input::plane(c);
        if constexpr (!STAY) acc.start(epilogue.start(channel_of(item)));
        const u32 base = shared_address(plane + lane.input + (lane.group * GROUP_STEP + first * DH / UH) * ROW_PITCH);
        auto input = [=](int y) { return base + 2 * y * ROW_PITCH; };
        const u16* filter = filters + c * HEIGHT * FILTER_PITCH + lane.filter;
        if constexpr (KH % HEIGHT == 0) accumulate<HEIGHT>(acc, input, filter);
        else if (first + HEIGHT <= KH) accumulate<HEIGHT>(acc, input, filter);
        else accumulate<KH % HEIGHT>(acc, input, filter);
        if constexpr (!STAY) {
          __syncwarp();
          stage(plane, acc, lane, channel_of(item), epilogue, watched);
        }
      }
    }
  }
  if constexpr (STAY) {
    __syncthreads();  // other warps may still read the plane
    stage(tile + Input::plane(warp / SETS), acc, make_lane(warp % SETS), channel_of(warp), epilogue, watched);
  }
  const bool bad = __syncthreads_or(watched_non_finite(watched));
  out.image = place[0], out.row = place[1], out.column = place[2];
  if (bad) tile_by_taps<Output>(p, out.image, out.row, out.column, out.channel);
  else store_tile<Output, THREADS>(tile, p.y, out);
}
