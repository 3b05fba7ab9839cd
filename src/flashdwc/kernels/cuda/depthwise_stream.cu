// Depthwise convolution of stride 1, forward or input gradient, 16 bit, for filters that move more bytes than they multiply: as
// depthwise_conv.cu (toeplitz.cuh), but a block stays and streams the tensor through its planes, so that memory never waits.
//
// A block takes CHANNELS channels and a part of all strips. A strip is one column of tiles of an image; each step down a strip gives
// OUT_ROWS rows. The planes are rings of rows: a row is read from memory once.
//
// Between two barriers every warp does two things that do not depend on each other, half of the warps in the one order, half in the
// other, so that memory, shared memory and tensor cores are busy at the same time:
//   multiply:  step s from the ring into one of two output tiles
//   move:      store the outputs of step s - 1; place the rows of step s + 1, fetched an interval ago; fetch those of step s + 2.
//              The second half of the threads starts on the outputs, the first on the rows, as neither is work for all.
#include "strips.cuh"
#include "toeplitz.cuh"

constexpr int OUT_ROWS = GROUPS * ROWS, HALO = (KH - 1) * DH, RING_ROWS = 2 * OUT_ROWS + HALO;
constexpr int LEADING_STEPS = (HALO + OUT_ROWS - 1) / OUT_ROWS;  // of a strip, that load only
constexpr int TILE_COLUMNS = (BLOCKS - 1) * 8 + 8 * K8;

using Input = Tile<IN_NHWC, IN_VEC, SHIFT, CHANNELS, IMAGES, OUT_ROWS, TILE_COLUMNS, ROW_PITCH, IMAGE_PITCH, PLANE_PITCH, OCTET_PITCH, 0>;
using Output = Tile<OUT_NHWC, OUT_VEC, 0, CHANNELS, IMAGES, OUT_ROWS, OUT_COLUMNS, OUT_COLUMNS, OUT_IMAGE_PITCH, OUT_PLANE_PITCH,
                    OUT_OCTET_PITCH, 0>;
constexpr int UNITS = Input::units<8>, PER_THREAD = (UNITS + THREADS - 1) / THREADS;
static_assert(CHANNELS % WARPS == 0 && IMAGES == 1 && SH * SW * UH * UW == 1 && SUM * SPREAD == 1);

struct Params {
  Tensor4 x, y;
  const u16 *weight, *bias;
  int images, channels, rows, columns, out_rows, out_columns, strips_across, strips_down, strip_steps, channel_blocks, strips, splits;
};

__device__ __forceinline__ int in_ring(int row) { return row >= RING_ROWS ? row - RING_ROWS : row; }

__device__ __forceinline__ Step following(Step s, const Params& p) {
  return following<OUT_ROWS, OUT_COLUMNS, LEADING_STEPS>(s, p, [](int row) { return in_ring(row + OUT_ROWS); });
}

__device__ __forceinline__ Origin fresh_origin(const Step& s, int channel, const Params& p) {
  return {s.image, s.row - PAD_H + HALO, s.column - PAD_W - LEAD, channel, p.images, p.rows, p.columns, p.channels};
}

__device__ __forceinline__ void fetch_fresh(Raw<Input> (&raw)[PER_THREAD], const Origin& at, const Params& p) {
#pragma unroll
  for (int i = 0; i < PER_THREAD; ++i) {
    int u = threadIdx.x + i * THREADS;
    if (u < UNITS) raw[i] = fetch<Input, false>(Unit<Input>(u, at), p.x, at, [](int c) { return c; });
  }
}

__device__ __forceinline__ void place_fresh(u16* planes, Raw<Input> (&raw)[PER_THREAD], int fresh, const Origin& at) {
#pragma unroll
  for (int i = 0; i < PER_THREAD; ++i) {
    int u = threadIdx.x + i * THREADS;
    if (u >= UNITS) continue;
    Unit<Input> unit(u, at);
    place(planes, unit, raw[i], in_ring(unit.row + fresh), at, Identity{});
  }
}

__device__ __forceinline__ void multiply(
    const u16* planes, u16* outputs, const u16* filters, const float* starts, int first_row, int channel, const Params& p, u32& watched) {
  const Lane lane = make_lane(0);
  const int row = in_ring(first_row + lane.group * ROWS), left = RING_ROWS - row;  // rows to the end of the ring
#pragma unroll 1
  for (int c = threadIdx.x / 32; c < CHANNELS; c += WARPS) {
    const u32 here = shared_address(planes + Input::plane(c) + lane.input + row * ROW_PITCH), wrapped = here - 2 * RING_ROWS * ROW_PITCH;
    auto input = [=](int y) { return (y < left ? here : wrapped) + 2 * y * ROW_PITCH; };
    Accumulators acc;
    acc.start(starts[c]);
    accumulate<KH>(acc, input, filters + c * KH * FILTER_PITCH + lane.filter);
    stage(outputs + Output::plane(c), acc, lane, min(channel + c, p.channels - 1), AddBias{p.bias}, watched);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) depthwise_stream(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) u16 shared[];
  u16 *planes = shared, *outputs = planes + Input::size, *filters = outputs + 2 * Output::size;
  float* starts = reinterpret_cast<float*>(filters + CHANNELS * KH * FILTER_PITCH);
  const int channel = blockIdx.x % p.channel_blocks * CHANNELS;

  Raw<Input> raw[PER_THREAD];
  Step now, next;
  now.strip = blockIdx.x / p.channel_blocks, now.fresh = HALO;
  enter_strip<OUT_ROWS, OUT_COLUMNS, LEADING_STEPS>(now, p);
  fetch_fresh(raw, fresh_origin(now, channel, p), p);
  load_filters<KH>(filters, p, channel, 0, 0);
  for (int c = threadIdx.x; c < CHANNELS; c += THREADS) starts[c] = AddBias{p.bias}.start(min(channel + c, p.channels - 1));
  place_fresh(planes, raw, now.fresh, fresh_origin(now, channel, p));
  next = following(now, p);
  if (next.strip >= 0) fetch_fresh(raw, fresh_origin(next, channel, p), p);
  __syncthreads();

  __shared__ int places[2][3];  // of the outputs in the two halves: registers are dear
  int staged = -1;   // number of the last step: has it outputs?
  bool bad = false;  // it has such as are not finite
  int half = 0;      // for the outputs of the present step
  while (now.strip >= 0 || staged >= 0) {
    if (threadIdx.x == 0) places[half][0] = now.image, places[half][1] = now.row, places[half][2] = now.column;
    u32 watched = 0;
#pragma unroll 1
    for (int turn = 0; turn < 2; ++turn) {
      if ((turn ^ threadIdx.x / 32) & 1) {
        if (now.number >= 0)
          multiply(planes, outputs + half * Output::size, filters, starts, in_ring(now.fresh + 2 * OUT_ROWS), channel, p, watched);
      } else {
        if (staged >= 0) {
          const auto [image, row, column] = places[half ^ 1];
          const Origin out = {image, row, column, channel, p.images, p.out_rows, p.out_columns, p.channels};
          if (bad) tile_by_taps<Output>(p, image, row, column, channel);
          else store_tile<Output, THREADS, true, THREADS / 2>(outputs + (half ^ 1) * Output::size, p.y, out);
        }
        if (next.strip >= 0) place_fresh(planes, raw, next.fresh, fresh_origin(next, channel, p));
        const Step after = following(next, p);  // found again below: kept until there, it would not fit the registers
        if (after.strip >= 0) fetch_fresh(raw, fresh_origin(after, channel, p), p);
      }
    }
    bad = __syncthreads_or(watched_non_finite(watched));
    staged = now.number, now = next, next = following(next, p);
    half ^= 1;
  }
}
