// CUDA C++ on a CPU, for tests: every thread of a block is a fiber, blocks run one after the other, in shared memory of exact size.
//
// The kernels are compiled by a host compiler with this header in front, and with host.cuh in place of their mma.cuh. Fibers change at barriers and at
// what a warp does together, in an order that differs from barrier to barrier, so that a missing barrier shows. AddressSanitizer and
// UndefinedBehaviorSanitizer find accesses outside of tensors or shared memory and misaligned ones.
#pragma once
#include <sanitizer/common_interface_defs.h>
#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static

struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
template <class T> T __ldg(const T* p) { return *p; }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned long long)a * b >> 32; }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned s) {
  std::uint64_t bytes = a | std::uint64_t(b) << 32;
  unsigned r = 0;
  for (int i = 0; i < 4; ++i) r |= unsigned(bytes >> 8 * (s >> 4 * i & 7) & 255) << 8 * i;
  return r;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned n) { return unsigned((low | std::uint64_t(high) << 32) >> (n & 31)); }

namespace emulator {
struct Index { unsigned x; };

struct Barrier {  // of the threads of a block or a warp that have not ended
  int waiting = 0, members = 0, passed = 0;
  bool any = false, result = false;
};

struct Warp {
  Barrier barrier;
  std::uint64_t words[2][32][8];  // what lanes show each other; two, so that one barrier a time is enough
  int turn[32];
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool ended = false;
  Barrier* at = nullptr;
  int passed = 0;
};

inline Index thread, block, grid;
inline char* shared = nullptr;
inline std::vector<Fiber> fibers;
inline std::vector<Warp> warps;
inline Barrier whole, some[16];
inline ucontext_t scheduler;
inline void* scheduler_stack;
inline size_t scheduler_size;
inline void (*kernel)(const void*);
inline const void* parameters;
constexpr size_t STACK = 1 << 16;

inline Warp& warp() { return warps[thread.x / 32]; }

inline void release(Barrier& b) {
  if (b.waiting == 0 || b.waiting < b.members) return;
  b.result = b.any, b.any = false, b.waiting = 0, ++b.passed;
}

inline void yield() {
  Fiber& f = fibers[thread.x];
  void* fake;
  __sanitizer_start_switch_fiber(&fake, scheduler_stack, scheduler_size);
  swapcontext(&f.context, &scheduler);
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
}

inline bool wait(Barrier& b, bool value = false) {
  Fiber& f = fibers[thread.x];
  b.any |= value, ++b.waiting;
  f.at = &b, f.passed = b.passed;
  release(b);
  while (b.passed == f.passed) yield();
  f.at = nullptr;
  return b.result;
}

// Shows other lanes some words; returns all lanes' words.
template <int n> std::uint64_t (*show(const std::uint64_t (&mine)[n]))[8] {
  Warp& w = warp();
  const int lane = thread.x % 32, turn = w.turn[lane] ^= 1;
  for (int i = 0; i < n; ++i) w.words[turn][lane][i] = mine[i];
  wait(w.barrier);
  return w.words[turn];
}

inline void enter() {
  __sanitizer_finish_switch_fiber(nullptr, const_cast<const void**>(&scheduler_stack), &scheduler_size);
  kernel(parameters);
  Fiber& f = fibers[thread.x];
  f.ended = true;
  --whole.members, --warp().barrier.members;
  release(whole), release(warp().barrier);
  __sanitizer_start_switch_fiber(nullptr, scheduler_stack, scheduler_size);
  swapcontext(&f.context, &scheduler);
}

inline void run_block(unsigned threads) {
  fibers = std::vector<Fiber>(threads);
  warps = std::vector<Warp>((threads + 31) / 32);
  whole = Barrier{};
  for (Barrier& b : some) b = Barrier{};
  for (unsigned t = 0; t < threads; ++t) {
    Fiber& f = fibers[t];
    f.stack = std::make_unique<char[]>(STACK);
    getcontext(&f.context);
    f.context.uc_stack = {f.stack.get(), 0, STACK};
    f.context.uc_link = nullptr;
    makecontext(&f.context, enter, 0);
    ++whole.members, ++warps[t / 32].barrier.members;
    warps[t / 32].turn[t % 32] = 0;
  }
  unsigned order = 1, running = threads;
  while (running) {
    bool moved = false;
    order = order * 1664525u + 1013904223u;
    const unsigned first = order >> 8, step = order >> 31 ? 1 : threads - 1;
    for (unsigned i = 0; i < threads; ++i) {
      const unsigned t = (first + std::uint64_t(i) * step) % threads;
      Fiber& f = fibers[t];
      if (f.ended || (f.at && f.at->passed == f.passed)) continue;
      moved = true, thread.x = t;
      void* fake;
      __sanitizer_start_switch_fiber(&fake, f.stack.get(), STACK);
      swapcontext(&scheduler, &f.context);
      __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
      running -= f.ended;
    }
    if (!moved) std::fprintf(stderr, "emulator: threads wait at different barriers\n"), std::abort();
  }
}
}  // namespace emulator

#define threadIdx emulator::thread
#define blockIdx emulator::block
#define gridDim emulator::grid
inline void __syncthreads() { emulator::wait(emulator::whole); }
inline int __syncthreads_or(int value) { return emulator::wait(emulator::whole, value != 0); }
template <int threads> void sync_threads(int id) { emulator::some[id].members = threads, emulator::wait(emulator::some[id]); }
inline void __syncwarp() { emulator::wait(emulator::warp().barrier); }
inline int __any_sync(unsigned, int value) { return emulator::wait(emulator::warp().barrier, value != 0); }
template <class T> T __shfl_sync(unsigned, T value, int lane) {
  std::uint64_t word = 0;
  std::memcpy(&word, &value, sizeof(T));
  word = emulator::show({word})[lane % 32][0];
  std::memcpy(&value, &word, sizeof(T));
  return value;
}
template <class T> T __shfl_xor_sync(unsigned mask, T value, int bits) { return __shfl_sync(mask, value, threadIdx.x % 32 ^ bits); }
