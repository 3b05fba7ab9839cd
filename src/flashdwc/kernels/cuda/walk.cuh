// How a block or a warp walks through its part of a tensor: a strip is some columns of an image, a step goes some rows down it. A strip
// starts with steps that only load, until the rows above its first outputs are there.
#pragma once

struct Walk {
  int left;    // steps with outputs from here on
  int number;  // < 0: of a step that only loads
  int slot, row, column, image, channel;
};

// first: number of the first of `left` steps, in the order channel, image, strip, row. Params: images, strips_across, steps_down.
template <int step_rows, int strip_columns, int leading, class Params> __device__ __forceinline__ Walk start_walk(int first, int left, const Params& p) {
  unsigned t = first;
  Walk s;
  s.left = left, s.number = -leading, s.slot = 0;
  s.row = (int(t % p.steps_down) - leading) * step_rows, t /= p.steps_down;
  s.column = t % p.strips_across * strip_columns, t /= p.strips_across;
  s.image = t % p.images, s.channel = t / p.images;
  return s;
}

template <int step_rows, int strip_columns, int leading, int slots, class Params> __device__ __forceinline__ void advance(Walk& s, const Params& p) {
  s.slot = s.slot + 1 == slots ? 0 : s.slot + 1;
  s.row += step_rows;
  if (++s.number <= 0) return;
  --s.left;
  if (s.row < p.steps_down * step_rows) return;
  s.number = -leading, s.row = -leading * step_rows;
  if ((s.column += strip_columns) < p.strips_across * strip_columns) return;
  s.column = 0;
  if (++s.image < p.images) return;
  s.image = 0, ++s.channel;
}

// The row of the ring where a step's window starts: that of the oldest slot.
template <int leading, int slots, int slot_rows> __device__ __forceinline__ int oldest_row(const Walk& s) {
  return (s.slot < leading ? s.slot + slots - leading : s.slot - leading) * slot_rows;
}

// Where a lane finds rows of its window: those of group j of group_rows rows, which never lie across the end of a ring of ring_rows.
template <int count, int group_rows, int ring_rows, int pitch> struct Window {
  u32 group[count];
  __device__ __forceinline__ Window(u32 ring, int first_row) {  // first_row < 2 * ring_rows
#pragma unroll
    for (int j = 0; j < count; ++j) {
      const int row = first_row + j * group_rows;
      group[j] = ring + 2 * pitch * (row < ring_rows ? row : row - ring_rows);
    }
  }
  __device__ __forceinline__ u32 operator()(int y) const { return group[y / group_rows] + y % group_rows * 2 * pitch; }
};
