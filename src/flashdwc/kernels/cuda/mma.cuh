// Element types, conversions and tensor-core instructions. No header of the CUDA toolkit is needed, which keeps compilation fast.
#pragma once

using u16 = unsigned short;
using u32 = unsigned int;
using i64 = long long;

#if BF16
#define ELEMENT "bf16"
#else
#define ELEMENT "f16"
#endif

__device__ __forceinline__ float to_float(u16 v) {
#if BF16
  return __uint_as_float(u32(v) << 16);
#else
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v));
  return f;
#endif
}

__device__ __forceinline__ u32 pack(float low, float high) {
  u32 v;
  asm("cvt.rn." ELEMENT "x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  return v;
}

__device__ __forceinline__ u16 from_float(float v) { return u16(pack(v, 0.f)); }

// Adds 0 to each half of the sum where v is finite, and makes it NaN for good where v is inf or NaN.
__device__ __forceinline__ void watch(u32& sum, u32 v) { asm("fma.rn." ELEMENT "x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(v), "r"(0)); }
__device__ __forceinline__ bool watched_non_finite(u32 sum) { return sum & 0x7fff7fffu; }

__device__ __forceinline__ u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }

// Four (two) 8x8 matrices of 16-bit elements: lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrix4(u32 (&a)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void load_matrix2(u32 (&a)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1},[%2];" : "=r"(a[0]), "=r"(a[1]) : "r"(address) : "memory");
}
__device__ __forceinline__ void load_matrix4_transposed(u32 (&a)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void load_matrix2_transposed(u32 (&a)[2], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1},[%2];" : "=r"(a[0]), "=r"(a[1]) : "r"(address) : "memory");
}

// d[16x8] += a[16x16] b[16x8]; lane (g, t) = (lane / 4, lane % 4) holds d[g][2t, 2t+1] and d[g+8][2t, 2t+1].
__device__ __forceinline__ void mma16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32." ELEMENT "." ELEMENT ".f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// d = start + a b, start in every element
__device__ __forceinline__ void mma16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, float start) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32." ELEMENT "." ELEMENT ".f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%10,%10,%10};"
               : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(start));
}
__device__ __forceinline__ void mma8(float (&d)[4], const u32 (&a)[4], u32 b0) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32." ELEMENT "." ELEMENT ".f32 {%0,%1,%2,%3},{%4,%5},{%6},{%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(b0));
}

// Keeps the compiler from computing an address anew for each access that depends on a condition.
__device__ __forceinline__ const u16* pinned(const u16* p) {
  asm("" : "+l"(p));
  return p;
}

__device__ __forceinline__ int pinned(int v) {
  asm("" : "+r"(v));
  return v;
}
__device__ __forceinline__ i64 pinned(i64 v) {
  asm("" : "+l"(v));
  return v;
}

// A number that the compiler takes for another one each time: what follows from it is not kept in registers from one time to the next.
__device__ __forceinline__ int anew(int v) {
  asm volatile("" : "+r"(v));
  return v;
}
// A barrier of some warps of a block: those that call it with the same id from 1 to 15.
template <int threads> __device__ __forceinline__ void sync_threads(int id) { asm volatile("bar.sync %0, %1;" :: "r"(id), "n"(threads) : "memory"); }

// What is computed from v begins when what is written to memory before has been computed.
__device__ __forceinline__ void fence(float& v) { asm volatile("" : "+f"(v) :: "memory"); }

// Asks for the line of memory of an address, so that it waits beside another and not after it.
__device__ __forceinline__ void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" :: "l"(p)); }

__device__ __forceinline__ void store_if(bool inside, u16* p, u32 v) {  // without a branch
  asm volatile("{.reg .pred inside; setp.ne.b32 inside, %2, 0; @inside st.global.b32 [%0], %1;}" :: "l"(p), "r"(v), "r"(int(inside)) : "memory");
}

// bytes (4, 8 or 16) from global to shared memory, past the registers; zeros where not inside.
template <int bytes> __device__ __forceinline__ void copy_async(u32 to, const void* from, bool inside = true) {
  asm volatile("cp.async.ca.shared.global [%0],[%1],%2,%3;" :: "r"(to), "l"(from), "n"(bytes), "r"(inside ? bytes : 0) : "memory");
}
// 16 bytes, past the first-level cache too
__device__ __forceinline__ void copy_async_once(u32 to, const void* from, bool inside) {
  asm volatile("cp.async.cg.shared.global [%0],[%1],16,%2;" :: "r"(to), "l"(from), "r"(inside ? 16 : 0) : "memory");
}
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most `pending` groups of this thread's copies are under way.
template <int pending> __device__ __forceinline__ void copy_async_wait() { asm volatile("cp.async.wait_group %0;" :: "n"(pending) : "memory"); }
