// Division by a number that the launch knows: integer division takes some 100 cycles, which count where a thread has little to do.
#pragma once
#include "tile.cuh"

using u64 = unsigned long long;

struct Divisor {
  unsigned n;
  u32 low, high;  // of 2^64 / n, rounded up
};

// t becomes t / n; the remainder is returned.
__device__ __forceinline__ int divide(unsigned& t, Divisor d) {
  const unsigned whole = t;
  if (d.n > 1) t = (u64(t) * d.high + (u64(t) * d.low >> 32)) >> 32;
  return whole - t * d.n;
}
