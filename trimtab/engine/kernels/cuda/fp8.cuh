// float8 (e4m3) with a float32 scale for HIGH rows (0: all) and GROUP values of a row (0: the whole row). SCALE_HALF: the weight's own type
// is fp16, not bf16.
#if FORMAT == 2
// Two bytes of a word as fp16, exact: on compute capability 8.9 and newer by one instruction, else from their bits, which are a number
// smaller by 2^8. NaN stays NaN.
#if !defined(TRIMTAB_CPU) && __CUDA_ARCH__ >= 890
#define SMALLER 1.f
__device__ __forceinline__ u32 two_float8(u32 word, int high) {
  const u16 both = (u16)(high ? word >> 16 : word);
  u32 v;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(v) : "h"(both));
  return v;
}
#else
#define SMALLER 256.f
__device__ __forceinline__ u32 two_float8(u32 word, int high) {
  const u32 v = __byte_perm(word, 0, high ? 0x3424 : 0x1404), bits = v >> 1 & 0x3f803f80u;
  return (v & 0x80008000u) | bits | ((bits + 0x00800080u) & 0x40004000u);
}
#endif
// Where the scales of a row begin.
__device__ __forceinline__ u32 scale_row(u32 row, int columns) { return HIGH ? row / (HIGH ? HIGH : 1) * (u32)groups_of(columns) : 0; }
#ifdef WHOLE
struct Format : Values<8> {
  template <typename Z>
  static __device__ __forceinline__ u32 pair(uint2 word, int k, u32, const Z&, int) { return two_float8(k < 2 ? word.x : word.y, k & 1); }
  struct Four : FourOf<float, GROUP> {
    __device__ __forceinline__ void ask(Stored from, int m, int row, int blocks, int first, int end) {
      const float* own = (const float*)of(from.scale, m) + scale_row(row, blocks * 64) + group_at(first * 64);
      const int there = count(first, end);
#pragma unroll
      for (int i = 0; i < FOUR; i++) found[i] = WHOLE || i < there ? __ldg(own + i) : 0.f;
    }
    __device__ __forceinline__ float4 all(Stored) {
      return make_float4(found[0] * SMALLER, found[FOUR / 4] * SMALLER, found[FOUR / 2] * SMALLER, found[3 * FOUR / 4] * SMALLER);
    }
  };
};
#endif
template <bool>
struct Unpacked : Eights<8> {
  typedef float Scale;
  const float* scales;
  int width;
  __device__ __forceinline__ Unpacked(const void* scale, const void*, const float*, const float*, const float*, int width, int)
      : scales((const float*)scale), width(width) {}
  __device__ __forceinline__ float scale_at(i64 at) const {
    const u32 piece = (u32)(at >> 3), each = (u32)width >> 3, row = piece / each, column = (piece - row * each) * 8;
    return __ldg(scales + scale_row(row, width) + group_at(column)) * SMALLER;
  }
  __device__ __forceinline__ void values(float* v, Word word, Scale scale, int half) const {
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const u32 two = two_float8(k < 2 ? word.x : word.y, k & 1);
      v[2 * k] = as_weight(from_half((u16)two) * scale, half), v[2 * k + 1] = as_weight(from_half((u16)(two >> 16)) * scale, half);
    }
  }
};
// Scales of a block are few: they are read as they are needed.
struct Many : Pieces<8> {
  using Pieces::Pieces;
  __device__ __forceinline__ float outer(Member own, int row, int columns, int chunk, int piece) const {
    return __ldg((const float*)own.scale + scale_row(row, columns) + group_at(chunk * 128 + piece * 16)) * SMALLER;
  }
  __device__ __forceinline__ void values(float& v0, float& v1, Word word, int k, Scale scale, int half) const {
    const u32 two = two_float8(k < 2 ? word.x : word.y, k & 1);
    v0 = as_weight(from_half((u16)two) * scale, half), v1 = as_weight(from_half((u16)(two >> 16)) * scale, half);
  }
};
#endif
