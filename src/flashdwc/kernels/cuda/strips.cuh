// How a block that stays walks through its part of a tensor, for depthwise_stream.cu and depthwise_pairs.cu: from strip to strip, and in
// steps of some rows down each. A strip starts with steps that only load, until the rows above its first outputs are there.
#pragma once

struct Step {
  int strip, number;       // number < 0: loads only; strip < 0: no step
  int image, row, column;  // of its first output
  int fresh;               // place in the ring of the rows that it is the first to need
};

template <int step_rows, int strip_columns, int leading, class Params> __device__ __forceinline__ void enter_strip(Step& s, const Params& p) {
  unsigned t = s.strip;
  s.number = -leading;
  s.column = t % p.strips_across * strip_columns;
  t /= p.strips_across;
  s.row = (t % p.strips_down * p.strip_steps - leading) * step_rows;
  s.image = t / p.strips_down;
}

// next(place): of the step after in the ring.
template <int step_rows, int strip_columns, int leading, class Params, class Next>
__device__ __forceinline__ Step following(Step s, const Params& p, Next next) {
  if (s.strip < 0) return s;
  s.fresh = next(s.fresh);
  s.row += step_rows;
  if (++s.number < p.strip_steps && s.row < p.out_rows) return s;
  s.strip += p.splits;
  if (s.strip >= p.strips) s.strip = s.number = -1;
  else enter_strip<step_rows, strip_columns, leading>(s, p);
  return s;
}
