// What every source here begins with: number formats, loads of several values, sums over a warp or block.
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// What the machine does; the CPU's version (tests) brings its own of these.
#ifndef TRIMTAB_CPU
#if __CUDA_ARCH__ >= 800
__device__ __forceinline__ void mma_m16n8k16(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_m16n8k16_bf16(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
#else
// Compute capability 7.5 multiplies halves in steps of 8 and has no bf16 at all: what would need it gives NaN, which every check of a
// kernel finds before it is used.
__device__ __forceinline__ void mma_m16n8k8(float* c, u32 a0, u32 a1, u32 b0) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5},{%6},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(b0));
}
__device__ __forceinline__ void mma_m16n8k16(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  mma_m16n8k8(c, a0, a1, b0);
  mma_m16n8k8(c, a2, a3, b1);
}
__device__ __forceinline__ void mma_m16n8k16_bf16(float* c, u32, u32, u32, u32, u32, u32) {
  c[0] = c[1] = c[2] = c[3] = __uint_as_float(0x7fffffffu);
}
#endif
__device__ __forceinline__ u16 to_half(float f) {
  u16 v;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(v) : "f"(f));
  return v;
}
__device__ __forceinline__ float from_half(u16 h) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
  return f;
}
// Two halves at once: a b + c, rounded once, and a + b.
__device__ __forceinline__ u32 halves_fma(u32 a, u32 b, u32 c) {
  u32 v;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(b), "r"(c));
  return v;
}
__device__ __forceinline__ u32 halves_add(u32 a, u32 b) {
  u32 v;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
  return v;
}
#if __CUDA_ARCH__ >= 800
__device__ __forceinline__ u16 to_bf16(float f) {
  u16 v;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(v) : "f"(f));
  return v;
}
// The first value goes to the low half.
__device__ __forceinline__ u32 two_halves(float low, float high) {
  u32 v;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  return v;
}
__device__ __forceinline__ u32 two_bf16(float low, float high) {
  u32 v;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  return v;
}
#else
__device__ __forceinline__ u16 to_bf16(float f) {
  const u32 v = __float_as_uint(f);
  if ((v & 0x7fffffffu) > 0x7f800000u) return 0x7fff;  // NaN stays NaN
  return (u16)((v + 0x7fffu + ((v >> 16) & 1u)) >> 16);  // to the nearest, ties to even
}
__device__ __forceinline__ u32 two_halves(float low, float high) { return to_half(low) | (u32)to_half(high) << 16; }
__device__ __forceinline__ u32 two_bf16(float low, float high) { return to_bf16(low) | (u32)to_bf16(high) << 16; }
#endif
// The compiler takes this value as it is here: it is not computed again, or later.
__device__ __forceinline__ void as_is(int& v) { asm volatile("" : "+r"(v)); }
template <typename T>
__device__ __forceinline__ void as_is(T*& p) { asm volatile("" : "+l"(p)); }
// Weights, read once: not kept in L1. 16 bytes; 8; 4.
__device__ __forceinline__ uint4 streamed_16(const u8* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
__device__ __forceinline__ uint2 streamed_8(const u8* p) {
  uint2 v;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  return v;
}
__device__ __forceinline__ u32 streamed_4(const u8* p) {
  u32 v;
  asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}
// Into L2, and nobody waits for it. bytes: a multiple of 16, from a multiple of 16 on.
__device__ __forceinline__ void bring_near(const u8* p, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(bytes) : "memory");
#endif
}
__device__ __forceinline__ void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
// One value from a block to others: it says itself whether it is there, being something else than EMPTY.
__device__ __forceinline__ u32 look(const u32* p) {
  u32 v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void publish(u32* p, u32 v) { asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
// Count up, and from `last` back to zero; returns what it was. Releases what this thread wrote or saw (behind a barrier: its whole
// block), acquires what those that counted before released.
__device__ __forceinline__ u32 count_up(u32* p, u32 last) {
  u32 was;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(was) : "l"(p), "r"(last) : "memory");
  return was;
}
#define SPINS (1 << 22)  // seconds

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
// A word of the block's own shared memory, so many bytes from its beginning on. Where that begins is known when this is compiled
// (where_shared told the caller), so that nothing is added at run time.
#ifdef SHARED_BASE
__device__ __forceinline__ u32 shared_word(u32 offset) {
  u32 v;
  asm("ld.shared.u32 %0, [%1 + %2];" : "=r"(v) : "r"(offset), "n"(SHARED_BASE));
  return v;
}
#endif

// A stage of shared memory that one warp fills and others read: a barrier of 64 bits counts who has arrived, and on 9.0 and
// newer the bytes that the copy engine has brought.
#if __CUDA_ARCH__ >= 800
__device__ __forceinline__ void barrier_init(u64* barrier, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u64* barrier) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(shared_address(barrier)) : "memory");
}
// Until the phase of this parity is complete.
__device__ __forceinline__ void barrier_wait(u64* barrier, int parity) {
  u32 done = 0;
  while (!done) {
#if __CUDA_ARCH__ >= 900
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done) : "r"(shared_address(barrier)), "r"(parity) : "memory");
#else
    asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done) : "r"(shared_address(barrier)), "r"(parity) : "memory");
#endif
  }
}
#else
// Compute capability 7.5 has no such barriers: the low word counts arrivals, the high one says how many make a phase.
__device__ __forceinline__ void barrier_init(u64* barrier, int count) { *barrier = (u64)(u32)count << 32; }
__device__ __forceinline__ void barrier_arrive(u64* barrier) {
  __threadfence_block();
  atomicAdd((u32*)barrier, 1u);
}
__device__ __forceinline__ void barrier_wait(u64* barrier, int parity) {
  const volatile u32* words = (const volatile u32*)barrier;
  while ((int)(words[0] / words[1] & 1u) == parity) {
  }
  __threadfence_block();
}
#endif
#if __CUDA_ARCH__ >= 900
#define FILLERS 1  // one thread says how many bytes are to come
__device__ __forceinline__ void barriers_are_made() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// A warp copies 16 rows of `bytes` (a multiple of 16) to rows that are `stride` apart.
__device__ __forceinline__ void fill(u8* to, int stride, const u8* from, int bytes, u64* barrier) {
  const int lane = threadIdx.x & 31;
  if (lane == 0)
    asm volatile("{ .reg .b64 state; mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1; }"
                 ::"r"(shared_address(barrier)), "r"(16 * bytes) : "memory");
  __syncwarp();
  if (lane < 16)
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(shared_address(to + lane * stride)), "l"(from), "r"(bytes), "r"(shared_address(barrier)) : "memory");
}
#else
#define FILLERS 32  // every lane's copies arrive on their own
__device__ __forceinline__ void barriers_are_made() {}
__device__ __forceinline__ void fill(u8* to, int stride, const u8* from, int bytes, u64* barrier) {
  const int lane = threadIdx.x & 31;
  for (int row = 0; row < 16; row++) {
    const u8* own = (const u8*)__shfl_sync(0xffffffffu, (u64)from, row);
    for (int at = lane * 16; at < bytes; at += 512)
#if __CUDA_ARCH__ >= 800
      asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;"
                   ::"r"(shared_address(to + row * stride + at)), "l"(own + at) : "memory");
#else
      *(uint4*)(to + row * stride + at) = __ldcg((const uint4*)(own + at));
#endif
  }
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
#else
  barrier_arrive(barrier);
#endif
}
#endif
#if __CUDA_ARCH__ >= 900
// Programmatic dependent launch; without that launch attribute both do nothing. Every thread waits, and before it reads what
// another kernel made or writes at all: so the next one may start at once, and waits in turn.
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
#else
__device__ __forceinline__ void wait_for_previous() {}
__device__ __forceinline__ void let_next_start() {}
#endif
#endif

#define ALL 0xffffffffu
#define EMPTY 0xffffffffu  // what a place holds until its value is there: a NaN that no operation makes
__device__ __forceinline__ u32 not_empty(u32 bits) { return bits == EMPTY ? EMPTY - 1 : bits; }
#define AHEAD_BYTES 8192
// This block's share of weights that a kernel behind this one reads, while this one leaves the memory to them: by few
// instructions of one thread, 64 KiB each (the most is 1 MiB).
struct Ahead {
  const u8* from[4];
  int pieces[4];
};
#define AHEAD_PARAMETERS \
  const u8 *ahead0, int pieces0, const u8 *ahead1, int pieces1, const u8 *ahead2, int pieces2, const u8 *ahead3, int pieces3
#define AHEAD_GIVEN {{ahead0, ahead1, ahead2, ahead3}, {pieces0, pieces1, pieces2, pieces3}}
__device__ __forceinline__ void bring_ahead(const u8* from, int pieces, int block, int blocks) {
  const int each = (pieces + blocks - 1) / blocks, first = block * each, end = min(first + each, pieces);
#pragma unroll 1
  for (int i = first; i < end; i += 8) bring_near(from + (size_t)i * AHEAD_BYTES, min(8, end - i) * AHEAD_BYTES);
}
__device__ __forceinline__ void bring_ahead(const Ahead& ahead, int block, int blocks) {
#pragma unroll
  for (int k = 0; k < 4; k++) bring_ahead(ahead.from[k], ahead.pieces[k], block, blocks);
}
__device__ __forceinline__ float from_bf16(u16 v) { return __uint_as_float((u32)v << 16); }
__device__ __forceinline__ float value(u16 v, int half) { return half ? from_half(v) : from_bf16(v); }
__device__ __forceinline__ u16 stored(float f, int half) { return half ? to_half(f) : to_bf16(f); }
__device__ __forceinline__ float rounded(float f, int half) { return value(stored(f, half), half); }
// A normed value times its weight, as transformers' families round it. form 0: once, behind the product (Gemma 4); 1: in front of it
// too (Llama, Qwen); 2: as 0, the weight is how much more than 1 (Gemma 2 and 3).
__device__ __forceinline__ float weighted(float normed, float weight, int form, int half) {
  return form == 1 ? rounded(normed, half) * weight : normed * (form == 2 ? 1.f + weight : weight);
}
__device__ __forceinline__ void unpack(float* to, u32 v, int half) {
  to[0] = value((u16)v, half);
  to[1] = value((u16)(v >> 16), half);
}
__device__ __forceinline__ float low_value(u32 v, int half) { return value((u16)v, half); }
__device__ __forceinline__ float high_value(u32 v, int half) {
  return half ? from_half((u16)(v >> 16)) : __uint_as_float(v & 0xffff0000u);
}
__device__ __forceinline__ u32 pack(const float* v, int half) { return stored(v[0], half) | (u32)stored(v[1], half) << 16; }

__device__ __forceinline__ void unpack_8(float* to, uint4 v, int half) {
  unpack(to, v.x, half), unpack(to + 2, v.y, half), unpack(to + 4, v.z, half), unpack(to + 6, v.w, half);
}
// V neighbours, V 1, 2, 4 or 8, at an address that is a multiple of their size.
template <int V>
__device__ __forceinline__ void load(float* to, const u16* from, int half) {
  if constexpr (V == 8) {
    unpack_8(to, __ldcg((const uint4*)from), half);
  } else if constexpr (V == 4) {
    const uint2 v = __ldcg((const uint2*)from);
    unpack(to, v.x, half), unpack(to + 2, v.y, half);
  } else if constexpr (V == 2) {
    unpack(to, __ldcg((const u32*)from), half);
  } else {
    to[0] = value(__ldcg(from), half);
  }
}
template <int V>
__device__ __forceinline__ void store(u16* to, const float* v, int half) {
  if constexpr (V == 8)
    *(uint4*)to = make_uint4(pack(v, half), pack(v + 2, half), pack(v + 4, half), pack(v + 6, half));
  else if constexpr (V == 4)
    *(uint2*)to = make_uint2(pack(v, half), pack(v + 2, half));
  else if constexpr (V == 2)
    *(u32*)to = pack(v, half);
  else
    *to = stored(v[0], half);
}

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int d = 16; d; d /= 2) v += __shfl_xor_sync(ALL, v, d);
  return v;
}
__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
  for (int d = 16; d; d /= 2) v = fmaxf(v, __shfl_xor_sync(ALL, v, d));
  return v;
}
// One barrier: `sums` (a place a warp) must not be in use by an earlier sum.
__device__ __forceinline__ float block_sum(float v, float* sums) {
  v = warp_sum(v);
  if ((threadIdx.x & 31) == 0) sums[threadIdx.x >> 5] = v;
  __syncthreads();
  float all = 0.f;
  for (int w = 0; w < (int)blockDim.x / 32; w++) all += sums[w];
  return all;
}

// act(x), kind 0: gelu by tanh, 1: silu, 2: gelu by erf.
__device__ __forceinline__ float activated(float x, int kind) {
  if (kind == 0) return 0.5f * x * (1.f + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x)));
  if (kind == 1) return x / (1.f + expf(-x));
  return 0.5f * x * (1.f + erff(x * 0.7071067811865476f));
}

// 4, 8 or 16 bytes to shared memory; the copies between two commits are a group. Compute capability 7.5 copies at once: a stage that is
// being filled is read behind the next barrier at the earliest.
#ifndef TRIMTAB_CPU
#if __CUDA_ARCH__ >= 800
template <int BYTES>
__device__ __forceinline__ void copy_async(void* to, const void* from) {
  if constexpr (BYTES == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(to)), "l"(from), "n"(BYTES) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until all groups but the last PENDING are there.
template <int PENDING>
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }
#else
template <int BYTES>
__device__ __forceinline__ void copy_async(void* to, const void* from) {
  if constexpr (BYTES == 16)
    *(uint4*)to = __ldcg((const uint4*)from);
  else if constexpr (BYTES == 8)
    *(uint2*)to = __ldcg((const uint2*)from);
  else
    *(u32*)to = __ldcg((const u32*)from);
}
__device__ __forceinline__ void commit_copies() {}
template <int PENDING>
__device__ __forceinline__ void wait_for_copies() {}
#endif
#endif
// Of any size, a power of two up to 32: what is too small for such a copy is read at once.
template <int BYTES>
__device__ __forceinline__ void copy_few(void* to, const void* from) {
  if constexpr (BYTES == 32)
    copy_async<16>(to, from), copy_async<16>((u8*)to + 16, (const u8*)from + 16);
  else if constexpr (BYTES >= 4)
    copy_async<BYTES>(to, from);
  else if constexpr (BYTES == 2)
    *(u16*)to = __ldg((const u16*)from);
  else if constexpr (BYTES == 1)
    *(u8*)to = __ldg((const u8*)from);
}
