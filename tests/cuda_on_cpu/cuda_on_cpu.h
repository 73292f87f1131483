// What a CUDA source finds when g++ compiles it: threads, barriers, warp operations, vector types, number formats.
//
// Every CUDA thread is a fiber with a stack of its own; one OS thread runs them in turn, warp by warp, block by block. A
// fiber runs until it waits (a barrier, a warp operation) or ends. If all wait and no barrier is complete, the launch
// ends with an error that says where they wait: a barrier in a branch that not every thread takes is found here.
// Threads run in order 0 (as numbered), 1 (backwards) or a shuffled one, so that a missing barrier gives other numbers.
// What is not here: blocks at the same time (a block that waits for a later one never ends), the order of memory, speed.
#pragma once
#include <cmath>
#include <csetjmp>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>
#include <sys/mman.h>
#include <ucontext.h>

#define __device__
#define __host__
#define __global__
#define __constant__ static const
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static  // blocks run one after the other; `extern __shared__` is rewritten before this is read
#define warpSize 32

// Vector types ----------------------------------------------------------------------------------------------------------
#define VECTOR2(name, T, bytes)                        \
  struct __align__(bytes) name { T x, y; };            \
  static inline name make_##name(T x, T y) { return {x, y}; }
#define VECTOR4(name, T, bytes)                        \
  struct __align__(bytes) name { T x, y, z, w; };      \
  static inline name make_##name(T x, T y, T z, T w) { return {x, y, z, w}; }
VECTOR2(uint2, unsigned, 8)
VECTOR2(int2, int, 8)
VECTOR2(float2, float, 8)
VECTOR2(ushort2, unsigned short, 4)
VECTOR2(double2, double, 16)
VECTOR2(ulonglong2, unsigned long long, 16)
VECTOR4(uint4, unsigned, 16)
VECTOR4(int4, int, 16)
VECTOR4(float4, float, 16)
VECTOR4(ushort4, unsigned short, 8)
VECTOR4(uchar4, unsigned char, 4)
struct uint3 { unsigned x, y, z; };
struct dim3 { unsigned x, y, z; };

// Fibers ----------------------------------------------------------------------------------------------------------------
namespace cuda_on_cpu {
enum Wait { RUNS, BLOCK, WARP, TURN, DONE };  // TURN: until all others have had one
constexpr size_t STACK_BYTES = (256 << 10) + 832;  // of a power of two all tops would share a few lines of the cache
constexpr int GUARD_BYTES = 256;
inline const char* const ENDED = "its end";

struct Fiber {
  jmp_buf here;
  bool started = false;  // on its stack; between two blocks it waits in `entry`
  Wait wait = DONE;
  uint3 thread;
  int lane, warp;
  unsigned mask;
  const char* at = nullptr;
};
struct Warp {
  alignas(16) unsigned long long slot[32];
  float a[32][8], b[32][4];
};

inline std::vector<Fiber> fibers;
inline std::vector<Warp> warps;
inline Fiber* now;
inline jmp_buf scheduler;
inline uint3 block_index;
inline dim3 block_size, grid_size;
inline unsigned char* shared_memory;
inline int votes;
inline bool postponed;
inline std::string error;
inline void (*body)(void*);
inline void* body_args;
inline char* stacks;
inline size_t stack_count;

__attribute__((noinline)) inline void pause(Wait wait, unsigned mask, const char* at) {
  now->wait = wait;
  now->mask = mask;
  now->at = at;
  if (!_setjmp(now->here)) _longjmp(scheduler, 1);
}
inline void entry() {  // a fiber goes on with the next block's thread: to begin one takes calls of the system
  for (;;) {
    body(body_args);
    pause(DONE, 0, ENDED);
  }
}
__attribute__((noinline)) inline void resume(Fiber& fiber) {
  now = &fiber;
  fiber.wait = RUNS;
  if (_setjmp(scheduler)) return;
  if (fiber.started) _longjmp(fiber.here, 1);
  fiber.started = true;
  static ucontext_t first;
  getcontext(&first);
  first.uc_stack.ss_sp = stacks + (&fiber - fibers.data()) * STACK_BYTES;
  first.uc_stack.ss_size = STACK_BYTES;
  first.uc_link = nullptr;
  makecontext(&first, entry, 0);
  setcontext(&first);
}

// Whether every thread of a warp that has not ended waits at one place, as in most programs.
inline bool is_together(int first, int count) {
  const Fiber* one = nullptr;
  for (int l = 0; l < count; l++) {
    const Fiber& mine = fibers[first + l];
    if (mine.wait == DONE) continue;
    if (!one) one = &mine;
    if (mine.wait != WARP || mine.mask != one->mask || mine.at != one->at || !(mine.mask >> l & 1)) return false;
  }
  return one;
}
inline bool release_warp(int first, int count) {
  bool any = false;
  if (is_together(first, count)) {
    for (int l = 0; l < count; l++)
      if (fibers[first + l].wait == WARP) fibers[first + l].wait = RUNS;
    return true;
  }
  unsigned here[32] = {};
  for (int l = 0; l < count; l++) {
    Fiber& mine = fibers[first + l];
    if (mine.wait != WARP) continue;
    bool complete = mine.mask >> l & 1;
    for (int k = 0; k < count && complete; k++) {
      if (!(mine.mask >> k & 1) || fibers[first + k].wait == DONE) continue;
      const Fiber& other = fibers[first + k];
      complete = other.wait == WARP && other.mask == mine.mask && !strcmp(other.at, mine.at);
    }
    here[l] = complete;
  }
  for (int l = 0; l < count; l++)
    if (here[l]) fibers[first + l].wait = RUNS, any = true;
  return any;
}

inline bool run_block(const std::vector<int>& warp_order, const std::vector<int>& lane_order) {
  const int count = (int)fibers.size();
  for (;;) {
    for (int w : warp_order) {
      const int first = w * 32, lanes = count - first < 32 ? count - first : 32;
      do
        for (int l : lane_order)
          if (l < lanes && fibers[first + l].wait == RUNS) {
            resume(fibers[first + l]);
            if (postponed) return true;
          }
      while (release_warp(first, lanes));
    }
    bool any = false;
    for (Fiber& fiber : fibers)
      if (fiber.wait == TURN) fiber.wait = RUNS, any = true;
    if (any) continue;
    int at_block = 0, done = 0;
    for (const Fiber& fiber : fibers) at_block += fiber.wait == BLOCK, done += fiber.wait == DONE;
    if (done == count) return true;
    if (at_block + done < count) {
      char text[256];
      std::string places;
      for (const Fiber& fiber : fibers) {
        const std::string place = std::string(fiber.at);
        if (fiber.wait != DONE && places.find(place) == std::string::npos) places += (places.empty() ? "" : ", ") + place;
      }
      snprintf(text, sizeof text, "block (%u, %u, %u) hangs: %d of %d threads wait at the block's barrier, %d have ended, "
               "the rest waits within a warp; waits: ", block_index.x, block_index.y, block_index.z, at_block, count, done);
      error = text + places;
      return false;
    }
    for (Fiber& fiber : fibers)
      if (fiber.wait == BLOCK) fiber.wait = RUNS;
  }
}

// shared_memory holds shared_bytes between two guards. Returns 0, or 1 with `error` set.
inline int launch(const unsigned* grid, const unsigned* block, int shared_bytes, int order) {
  error.clear();
  block_size = {block[0], block[1], block[2]};
  grid_size = {grid[0], grid[1], grid[2]};
  const size_t count = (size_t)block[0] * block[1] * block[2], blocks = (size_t)grid[0] * grid[1] * grid[2];
  if (!count || count > 1024) return error = "a block has 1 to 1024 threads, not " + std::to_string(count), 1;
  if (!blocks || grid[1] > 65535 || grid[2] > 65535) return error = "a grid of no block, or too many in y or z", 1;
  if (shared_bytes > 227 * 1024) return error = "more than 227 KiB of shared memory", 1;
  if (stack_count < count) {
    if (stacks) munmap(stacks, stack_count * STACK_BYTES);
    stacks = (char*)mmap(nullptr, count * STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    stack_count = stacks == MAP_FAILED ? 0 : count;
    if (!stack_count) return stacks = nullptr, error = "no memory for the threads' stacks", 1;
    fibers.clear();
  }
  std::vector<unsigned char> memory(shared_bytes + 2 * GUARD_BYTES + 256);
  shared_memory = (unsigned char*)(((uintptr_t)memory.data() + GUARD_BYTES + 255) & ~(uintptr_t)255);
  fibers.resize(count);
  for (size_t i = 0; i < count; i++) {
    Fiber& fiber = fibers[i];
    fiber.thread = {(unsigned)(i % block[0]), (unsigned)(i / block[0] % block[1]), (unsigned)(i / block[0] / block[1])};
    fiber.lane = (int)(i % 32);
    fiber.warp = (int)(i / 32);
  }
  warps.assign((count + 31) / 32, Warp());
  std::vector<int> warp_order, lane_order;
  std::mt19937 random((unsigned)order);
  for (size_t w = 0; w < warps.size(); w++) warp_order.push_back((int)w);
  for (int l = 0; l < 32; l++) lane_order.push_back(l);
  const auto mix = [&](std::vector<int>& numbers) {
    const size_t length = numbers.size();
    for (size_t i = 0; i < length; i++) numbers[i] = (int)(order == 1 ? length - 1 - i : i);
    for (size_t i = length; order > 1 && i-- > 1;) std::swap(numbers[i], numbers[random() % (i + 1)]);
  };
  std::vector<size_t> left;
  for (size_t turn = 0; turn < blocks; turn++) left.push_back(order == 1 ? blocks - 1 - turn : turn);
  size_t in_vain = 0;
  for (size_t turn = 0; turn < left.size(); turn++) {
    const size_t b = left[turn];
    postponed = false;
    block_index = {(unsigned)(b % grid[0]), (unsigned)(b / grid[0] % grid[1]), (unsigned)(b / grid[0] / grid[1])};
    memset(shared_memory - GUARD_BYTES, 0xff, shared_bytes + 2 * GUARD_BYTES);  // not a number, until written
    mix(warp_order);
    mix(lane_order);
    for (size_t i = 0; i < count; i++) {
      Fiber& fiber = fibers[i];
      if (fiber.wait != DONE || fiber.at != ENDED) fiber.started = false;  // left in the midst of an earlier block
      fiber.wait = RUNS;
      fiber.at = "its start";
    }
    if (!run_block(warp_order, lane_order)) return 1;
    if (postponed) {
      left.push_back(b);
      if (++in_vain > blocks) return error = "blocks wait for a value that no other makes", 1;
      continue;
    }
    in_vain = 0;
    for (int i = 0; i < GUARD_BYTES; i++)
      if (shared_memory[-1 - i] != 0xff || shared_memory[shared_bytes + i] != 0xff)
        return error = "a block wrote outside of its shared memory", 1;
  }
  return 0;
}

// A kernel's parameters: what each is ("p" pointer, "i" int32, "l" int64, "f" float32), and a call with their addresses.
template <typename T>
constexpr char kind() {
  return std::is_pointer<T>::value ? 'p' : std::is_floating_point<T>::value && sizeof(T) == 4 ? 'f'
         : std::is_integral<T>::value && sizeof(T) == 4 ? 'i' : std::is_integral<T>::value && sizeof(T) == 8 ? 'l' : '?';
}
template <typename... A>
const char* signature(void (*)(A...)) {
  static const char text[] = {kind<A>()..., 0};
  return text;
}
template <typename... A, size_t... I>
void call(void (*kernel)(A...), void** args, std::index_sequence<I...>) { kernel(*(std::remove_reference_t<A>*)args[I]...); }
template <typename... A>
struct Bound {
  void (*kernel)(A...);
  void** args;
  static void run(void* self) {
    const Bound* bound = (const Bound*)self;
    call(bound->kernel, bound->args, std::index_sequence_for<A...>());
  }
};
template <typename... A>
int start(void (*kernel)(A...), void** args, const unsigned* grid, const unsigned* block, int shared_bytes, int order) {
  Bound<A...> bound = {kernel, args};
  body = Bound<A...>::run;
  body_args = &bound;
  return launch(grid, block, shared_bytes, order);
}

inline Warp& warp() { return warps[now->warp]; }
template <typename T>
T exchange(unsigned mask, T value, int source, const char* at) {
  static_assert(sizeof(T) <= 8, "a shuffle moves up to 8 bytes");
  if (source < 0 || source > 31 || (size_t)(now->warp * 32 + source) >= fibers.size()) source = now->lane;
  Warp& mine = warp();
  memcpy(&mine.slot[now->lane], &value, sizeof(T));
  pause(WARP, mask, at);
  T got;
  memcpy(&got, &mine.slot[source], sizeof(T));
  pause(WARP, mask, at);
  return got;
}
}  // namespace cuda_on_cpu

extern "C" inline __attribute__((used)) const char* cpu_error() { return cuda_on_cpu::error.c_str(); }

#define threadIdx (cuda_on_cpu::now->thread)
#define blockIdx (cuda_on_cpu::block_index)
#define blockDim (cuda_on_cpu::block_size)
#define gridDim (cuda_on_cpu::grid_size)

// Barriers, warp operations, atomics ------------------------------------------------------------------------------------
static inline void __syncthreads() { cuda_on_cpu::pause(cuda_on_cpu::BLOCK, 0, "__syncthreads"); }
static inline int __syncthreads_count(int yes) {
  __syncthreads();
  cuda_on_cpu::votes = 0;
  __syncthreads();
  cuda_on_cpu::votes += yes != 0;
  __syncthreads();
  return cuda_on_cpu::votes;
}
static inline int __syncthreads_or(int yes) { return __syncthreads_count(yes) != 0; }
static inline int __syncthreads_and(int yes) { return __syncthreads_count(!yes) == 0; }
static inline void __syncwarp(unsigned mask = ~0u) { cuda_on_cpu::pause(cuda_on_cpu::WARP, mask, "__syncwarp"); }
template <typename T>
T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
  const int first = cuda_on_cpu::now->lane & ~(width - 1);
  return cuda_on_cpu::exchange(mask, value, first + (lane & (width - 1)), "__shfl_sync");
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int other, int width = 32) {
  const int lane = cuda_on_cpu::now->lane, from = lane ^ other;
  return cuda_on_cpu::exchange(mask, value, from / width > lane / width ? lane : from, "__shfl_xor_sync");
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, int step, int width = 32) {
  const int lane = cuda_on_cpu::now->lane;
  return cuda_on_cpu::exchange(mask, value, lane % width + step < width ? lane + step : lane, "__shfl_down_sync");
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, int step, int width = 32) {
  const int lane = cuda_on_cpu::now->lane;
  return cuda_on_cpu::exchange(mask, value, lane % width >= step ? lane - step : lane, "__shfl_up_sync");
}
static inline unsigned __ballot_sync(unsigned mask, int yes) {
  unsigned all = 0;
  for (int l = 0; l < 32; l++)
    if (mask >> l & 1 && (size_t)(cuda_on_cpu::now->warp * 32 + l) < cuda_on_cpu::fibers.size() &&
        cuda_on_cpu::fibers[cuda_on_cpu::now->warp * 32 + l].wait != cuda_on_cpu::DONE)
      all |= (unsigned)(__shfl_sync(mask, yes != 0, l) != 0) << l;
  return all;
}
static inline int __any_sync(unsigned mask, int yes) { return __ballot_sync(mask, yes) != 0; }
static inline int __all_sync(unsigned mask, int yes) { return __ballot_sync(mask, !yes) == 0; }
static inline void __threadfence() {}
static inline void __threadfence_block() {}

template <typename T, typename U>
T atomicAdd(T* p, U v) { const T old = *p; *p = (T)(old + (T)v); return old; }
template <typename T, typename U>
T atomicSub(T* p, U v) { const T old = *p; *p = (T)(old - (T)v); return old; }
template <typename T, typename U>
T atomicMax(T* p, U v) { const T old = *p; if ((T)v > old) *p = (T)v; return old; }
template <typename T, typename U>
T atomicMin(T* p, U v) { const T old = *p; if ((T)v < old) *p = (T)v; return old; }
template <typename T, typename U>
T atomicExch(T* p, U v) { const T old = *p; *p = (T)v; return old; }
template <typename T, typename U>
T atomicOr(T* p, U v) { const T old = *p; *p = old | (T)v; return old; }
template <typename T, typename U>
T atomicAnd(T* p, U v) { const T old = *p; *p = old & (T)v; return old; }
template <typename T, typename U, typename V>
T atomicCAS(T* p, U want, V v) { const T old = *p; if (old == (T)want) *p = (T)v; return old; }
static inline unsigned atomicInc(unsigned* p, unsigned most) { const unsigned old = *p; *p = old >= most ? 0 : old + 1; return old; }

// Loads, bits, arithmetic ------------------------------------------------------------------------------------------------
// A vector load that is not aligned is an error on a GPU.
template <typename T>
inline T cpu_load(const T* p) {
  if ((uintptr_t)p % alignof(T)) { fprintf(stderr, "a load of %zu bytes at an address that is not aligned\n", sizeof(T)); abort(); }
  return *p;
}
#define CPU_LOAD(name) template <typename T> inline T name(const T* p) { return cpu_load(p); }
CPU_LOAD(__ldg) CPU_LOAD(__ldcg) CPU_LOAD(__ldca) CPU_LOAD(__ldcs) CPU_LOAD(__ldlu) CPU_LOAD(__ldcv)
#define CPU_STORE(name) template <typename T> inline void name(T* p, T v) { cpu_load(p); *p = v; }
CPU_STORE(__stcg) CPU_STORE(__stcs) CPU_STORE(__stwb) CPU_STORE(__stwt)

static inline float __uint_as_float(unsigned v) { float f; memcpy(&f, &v, 4); return f; }
static inline unsigned __float_as_uint(float f) { unsigned v; memcpy(&v, &f, 4); return v; }
static inline float __int_as_float(int v) { return __uint_as_float((unsigned)v); }
static inline int __float_as_int(float f) { return (int)__float_as_uint(f); }
static inline int __popc(unsigned v) { return __builtin_popcount(v); }
static inline int __clz(int v) { return v ? __builtin_clz((unsigned)v) : 32; }
static inline int __ffs(int v) { return __builtin_ffs(v); }
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned which) {
  const unsigned long long both = (unsigned long long)b << 32 | a;
  unsigned out = 0;
  for (int i = 0; i < 4; i++) {
    const unsigned selector = which >> 4 * i & 15, byte = (unsigned)(both >> 8 * (selector & 7)) & 255;
    out |= (selector & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
  }
  return out;
}
#define CPU_MIN_MAX(T) \
  static inline T min(T a, T b) { return b < a ? b : a; } \
  static inline T max(T a, T b) { return a < b ? b : a; }
CPU_MIN_MAX(int) CPU_MIN_MAX(unsigned) CPU_MIN_MAX(long) CPU_MIN_MAX(long long) CPU_MIN_MAX(unsigned long)
CPU_MIN_MAX(unsigned long long)
static inline float min(float a, float b) { return fminf(a, b); }
static inline float max(float a, float b) { return fmaxf(a, b); }
static inline unsigned min(int a, unsigned b) { return min((unsigned)a, b); }
static inline unsigned min(unsigned a, int b) { return min(a, (unsigned)b); }
static inline unsigned max(int a, unsigned b) { return max((unsigned)a, b); }
static inline unsigned max(unsigned a, int b) { return max(a, (unsigned)b); }
static inline float rsqrtf(float x) { return (float)(1. / sqrt((double)x)); }
static inline float __frsqrt_rn(float x) { return rsqrtf(x); }
static inline float __fsqrt_rn(float x) { return sqrtf(x); }
static inline float __frcp_rn(float x) { return 1.f / x; }
static inline float cpu_expf(float x) { return expf(x); }
#define __expf cpu_expf  // the C library has these names too
static inline float cpu_logf(float x) { return logf(x); }
#define __logf cpu_logf
static inline float __fdividef(float a, float b) { return a / b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }

// What our sources write in assembly, `#ifndef TRIMTAB_CPU` ---------------------------------------------------------------
// The nearest fp16, ties to even; what is too large becomes infinite.
static inline unsigned short to_half(float f) {
  const unsigned v = __float_as_uint(f), sign = v >> 16 & 0x8000, magnitude = v & 0x7fffffff;
  if (magnitude > 0x7f800000) return 0x7fff;
  if (magnitude >= 0x477ff000) return (unsigned short)(sign | 0x7c00);  // 65520 and above
  if (magnitude < 0x38800000) {  // below 2^-14: steps of 2^-24
    return (unsigned short)(sign | (unsigned)std::nearbyint(std::ldexp((double)__uint_as_float(magnitude), 24)));
  }
  const unsigned rest = magnitude & 0x1fff, whole = (magnitude - 0x38000000) >> 13;
  return (unsigned short)(sign | (whole + (rest > 0x1000 || (rest == 0x1000 && whole & 1))));
}
static inline float from_half(unsigned short h) {
  const unsigned sign = (unsigned)(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 0x3ff;
  if (exponent == 31) return __uint_as_float(sign | 0x7f800000 | fraction << 13);
  if (exponent) return __uint_as_float(sign | (exponent + 112) << 23 | fraction << 13);
  return sign ? -(float)std::ldexp((double)fraction, -24) : (float)std::ldexp((double)fraction, -24);
}
static inline unsigned short to_bf16(float f) {
  const unsigned v = __float_as_uint(f);
  if ((v & 0x7fffffff) > 0x7f800000) return 0x7fff;
  return (unsigned short)((v + 0x7fff + (v >> 16 & 1)) >> 16);
}
static inline unsigned two_halves(float low, float high) { return to_half(low) | (unsigned)to_half(high) << 16; }
static inline unsigned halves_fma(unsigned a, unsigned b, unsigned c) {
  return two_halves(from_half(a) * from_half(b) + from_half(c), from_half(a >> 16) * from_half(b >> 16) + from_half(c >> 16));
}
static inline unsigned halves_add(unsigned a, unsigned b) { return halves_fma(a, 0x3c003c00, b); }
static inline unsigned two_bf16(float low, float high) { return to_bf16(low) | (unsigned)to_bf16(high) << 16; }
static inline unsigned add_bf16x2(unsigned a, unsigned b) {
  const float low = __uint_as_float(a << 16) + __uint_as_float(b << 16);
  const float high = __uint_as_float(a & 0xffff0000u) + __uint_as_float(b & 0xffff0000u);
  return two_bf16(low, high);
}
static inline uint2 load_once(const unsigned char* p) { return cpu_load((const uint2*)p); }
static inline uint4 load_once_16(const void* p) { return cpu_load((const uint4*)p); }
static inline void publish(unsigned* p, unsigned v) { *p = v; }
static inline unsigned look(const unsigned* p) {  // others of the block may be about to write it
  if (*p == 0xffffffffu) cuda_on_cpu::pause(cuda_on_cpu::TURN, 0, "look");
  return cpu_load(p);
}
// As on a GPU, whose first KiB of a block is the system's.
static inline unsigned shared_address(const void* p) { return (unsigned)((const unsigned char*)p - cuda_on_cpu::shared_memory) + 1024; }
static inline unsigned shared_word(unsigned offset) { return cpu_load((const unsigned*)(cuda_on_cpu::shared_memory + offset)); }
template <typename T> inline void as_is(T&) {}
static inline void prefetch(const void*) {}
// A copy is done when it is asked for.
template <int BYTES> inline void copy_async(void* to, const void* from) {
  if (((uintptr_t)to | (uintptr_t)from) % BYTES) { fprintf(stderr, "a copy that is not aligned\n"); abort(); }
  memcpy(to, from, BYTES);
}
static inline void commit_copies() {}
template <int PENDING> inline void wait_for_copies() {}
// Reads what would be brought: a page that is not there is found.
static inline void bring_near(const unsigned char* p, int bytes) {
  if ((uintptr_t)p % 16 || bytes % 16) { fprintf(stderr, "a piece that is not aligned\n"); abort(); }
  volatile unsigned char seen = p[0];
  seen = p[bytes - 1];
}
static inline uint4 streamed_16(const unsigned char* p) { return cpu_load((const uint4*)p); }
static inline uint2 streamed_8(const unsigned char* p) { return cpu_load((const uint2*)p); }
static inline unsigned streamed_4(const unsigned char* p) { return cpu_load((const unsigned*)p); }
static inline unsigned count_up(unsigned* p, unsigned last) { return atomicInc(p, last); }
// A copy is done when it is asked for; a barrier counts how many phases are complete. Threads that wait let others go on.
#define FILLERS 1
struct CpuBarrier { unsigned short count, arrived; unsigned phases; };  // in the barrier's own 64 bits
static inline void barrier_init(unsigned long long* p, int count) { *(CpuBarrier*)p = {(unsigned short)count, 0, 0}; }
static inline void barrier_arrive(unsigned long long* p) {
  CpuBarrier& b = *(CpuBarrier*)p;
  if (++b.arrived == b.count) b.arrived = 0, b.phases++;
}
static inline void barrier_wait(unsigned long long* p, int parity) {
  for (int turns = 0; ((((CpuBarrier*)p)->phases - 1) & 1) != (unsigned)parity; turns++) {
    if (turns > 100000) { fprintf(stderr, "a barrier that nobody completes\n"); abort(); }
    cuda_on_cpu::pause(cuda_on_cpu::TURN, 0, "barrier_wait");
  }
}
static inline void barriers_are_made() {}
static inline void fill(unsigned char* to, int stride, const unsigned char* from, int bytes, unsigned long long* barrier) {
  const int lane = cuda_on_cpu::now->lane;
  if (lane < 16) {
    if (((uintptr_t)from | (uintptr_t)(to + lane * stride) | bytes) & 15) { fprintf(stderr, "a copy that is not aligned\n"); abort(); }
    memcpy(to + lane * stride, from, bytes);
  }
  __syncwarp();
  if (lane == 0) barrier_arrive(barrier);
}
#define SPINS 8  // whoever runs later does not run meanwhile
// A block that waits for another one begins anew when others have run: until then it must have changed nothing.
static inline void __trap() {
  cuda_on_cpu::postponed = true;
  cuda_on_cpu::pause(cuda_on_cpu::DONE, 0, "__trap");
}
static inline void wait_for_previous() {}
static inline void let_next_start() {}

// c [16, 8] += a [16, 16] b [16, 8] of a warp, in the registers' layout of mma.sync.m16n8k16 (PTX ISA, 9.7.14): lane
// 4 g + t has rows g and g + 8 of a, column g of b, and columns 2 t, 2 t + 1 of c. Summed in float64, rounded once.
static inline void cpu_mma(float* c, const float* a, const float* b) {
  using namespace cuda_on_cpu;
  Warp& mine = warp();
  const int lane = now->lane, g = lane >> 2, t = lane & 3;
  memcpy(mine.a[lane], a, 32);
  memcpy(mine.b[lane], b, 16);
  pause(WARP, ~0u, "mma");
  for (int i = 0; i < 4; i++) {
    const int row = i >> 1, column = 2 * t + (i & 1);
    double sum = c[i];
    for (int k = 0; k < 4; k++) {  // lane k of the row holds k = 2k, 2k + 1, 2k + 8, 2k + 9
      const float *pa = mine.a[4 * g + k], *pb = mine.b[4 * column + k];
      sum += (double)pa[2 * row] * pb[0] + (double)pa[2 * row + 1] * pb[1];
      sum += (double)pa[4 + 2 * row] * pb[2] + (double)pa[5 + 2 * row] * pb[3];
    }
    c[i] = (float)sum;
  }
  pause(WARP, ~0u, "mma");
}
#define CPU_MMA(name, value)                                                                                          \
  static inline void name(float* c, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {   \
    const unsigned words[6] = {a0, a1, a2, a3, b0, b1};                                                               \
    float v[12];                                                                                                      \
    for (int i = 0; i < 6; i++) v[2 * i] = value(words[i] & 0xffff), v[2 * i + 1] = value(words[i] >> 16);            \
    cpu_mma(c, v, v + 8);                                                                                             \
  }
static inline float cpu_from_bf16(unsigned v) { return __uint_as_float(v << 16); }
static inline float cpu_from_half(unsigned v) { return from_half((unsigned short)v); }
CPU_MMA(mma_m16n8k16, cpu_from_half)
CPU_MMA(mma_m16n8k16_bf16, cpu_from_bf16)
