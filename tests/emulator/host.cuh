// The element types and tensor-core instructions of mma.cuh, as PTX defines them, in plain C++.
#pragma once

using u16 = unsigned short;
using u32 = unsigned int;
using i64 = long long;

inline float to_float(u16 v) {
#if BF16
  u32 bits = u32(v) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
#else
  _Float16 h;
  std::memcpy(&h, &v, 2);
  return float(h);
#endif
}
inline u16 from_float(float f) {
#if BF16
  u32 bits;
  std::memcpy(&bits, &f, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return u16((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
#else
  _Float16 h = _Float16(f);
  u16 v;
  std::memcpy(&v, &h, 2);
  return v;
#endif
}
inline u32 pack(float low, float high) { return from_float(low) | u32(from_float(high)) << 16; }

inline bool is_finite(u16 v) { return to_float(v) - to_float(v) == 0.f; }
inline void watch(u32& sum, u32 v) {
  if (!is_finite(u16(v))) sum |= 0x7fffu;
  if (!is_finite(u16(v >> 16))) sum |= 0x7fff0000u;
}
inline bool watched_non_finite(u32 sum) { return sum & 0x7fff7fffu; }
inline u32 non_finite(u32 v) { return (is_finite(u16(v)) ? 0 : 0x8000u) | (is_finite(u16(v >> 16)) ? 0 : 0x80000000u); }
constexpr u32 NON_FINITE_BITS = 0x80008000u;

inline u32 shared_address(const void* p) { return u32(static_cast<const char*>(p) - emulator::shared); }

// Row r of matrix m comes from the address that lane 8 m + r gives; a lane gets the elements (2t, 2t + 1) of row g, or of column g.
template <int matrices, bool transposed> void load_matrices(u32* a, u32 address) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  auto words = emulator::show({address});
  for (int m = 0; m < matrices; ++m) {
    auto element = [&](int row, int column) {
      return reinterpret_cast<const uint4*>(emulator::shared + words[8 * m + row][0]), // aligned to 16 bytes, or the sanitizer says so
             reinterpret_cast<const u16*>(emulator::shared + words[8 * m + row][0])[column];
    };
    if (words[8 * m + g][0] % 16) std::fprintf(stderr, "emulator: ldmatrix at a misaligned address\n"), std::abort();
    a[m] = transposed ? element(2 * t, g) | u32(element(2 * t + 1, g)) << 16 : element(g, 2 * t) | u32(element(g, 2 * t + 1)) << 16;
  }
}
inline void load_matrix4(u32 (&a)[4], u32 address) { load_matrices<4, false>(a, address); }
inline void load_matrix2(u32 (&a)[4], u32 address) { load_matrices<2, false>(a, address); }
inline void load_matrix4_transposed(u32 (&a)[4], u32 address) { load_matrices<4, true>(a, address); }
inline void load_matrix2_transposed(u32 (&a)[2], u32 address) { load_matrices<2, true>(a, address); }

inline float half_of(std::uint64_t word, int i) { return to_float(u16(word >> 16 * i)); }

template <int depth> void multiply_matrices(float (&d)[4], const u32* a, u32 b0, u32 b1) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  auto words = emulator::show({a[0], a[1], depth > 8 ? a[2] : 0, depth > 8 ? a[3] : 0, b0, b1});
  for (int e = 0; e < 4; ++e) {
    const int row = g + e / 2 * 8, column = 2 * t + e % 2;
    float sum = 0.f;
    for (int k = 0; k < depth; ++k)
      sum += half_of(words[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], k % 2) * half_of(words[column * 4 + k % 8 / 2][4 + k / 8], k % 2);
    d[e] += sum;
  }
}
inline void mma16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { multiply_matrices<16>(d, a, b0, b1); }
inline void mma16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, float start) { d[0] = d[1] = d[2] = d[3] = start, mma16(d, a, b0, b1); }
inline void mma8(float (&d)[4], const u32 (&a)[4], u32 b0) { multiply_matrices<8>(d, a, b0, 0); }

inline const u16* pinned(const u16* p) { return p; }
inline int pinned(int v) { return v; }
inline int anew(int v) { return v; }
inline void fence(float&) {}
inline i64 pinned(i64 v) { return v; }
inline void prefetch(const void* p) { static_cast<void>(*static_cast<const volatile u16*>(p)); }  // outside of a tensor it shows

inline void store_if(bool inside, u16* p, u32 v) {
  if (inside) *reinterpret_cast<u32*>(p) = v;
}

// Copies happen as late as they may: when they are waited for.
struct PendingCopy {
  u32 to;
  const void* from;
  int bytes;
  bool inside;
};
inline std::vector<std::vector<std::vector<PendingCopy>>> pending_copies;  // of each thread, in groups; the last is open
inline std::vector<std::vector<PendingCopy>>& my_copies() {
  if (pending_copies.size() <= threadIdx.x) pending_copies.resize(threadIdx.x + 1);
  auto& mine = pending_copies[threadIdx.x];
  if (mine.empty()) mine.emplace_back();
  return mine;
}
template <int bytes> void copy_async(u32 to, const void* from, bool inside = true) {
  if (to % bytes || reinterpret_cast<std::uintptr_t>(from) % bytes) std::fprintf(stderr, "emulator: cp.async at a misaligned address\n"), std::abort();
  my_copies().back().push_back({to, from, bytes, inside});
}
inline void copy_async_once(u32 to, const void* from, bool inside) { copy_async<16>(to, from, inside); }
inline void copy_async_commit() { my_copies().emplace_back(); }
template <int pending> void copy_async_wait() {
  auto& mine = my_copies();
  while (mine.size() > pending + 1) {
    for (auto& copy : mine.front()) {
      char* to = emulator::shared + copy.to;
      if (copy.inside) std::memcpy(to, copy.from, copy.bytes);
      else std::memset(to, 0, copy.bytes);
    }
    mine.erase(mine.begin());
  }
}
