// 4-bit integers with one scale for each GROUP values of a row (0: the whole row), 16 bits wide or (WIDE_SCALE) float32: q - 8, or with
// ZERO q - zero, a byte a group. Two values in a byte, the first in the high half. SCALE_HALF: scales are fp16, not bf16.
#if FORMAT == 1
#ifndef ZERO
#define ZERO 0
#endif
#define SCALE_BYTES (WIDE_SCALE ? 4 : 2)
__device__ __forceinline__ u32 scale_bits(const void* scale, size_t at) {
  return WIDE_SCALE ? __float_as_uint(__ldg((const float*)scale + at)) : (u32)__ldg((const u16*)scale + at);
}
__device__ __forceinline__ float scale_value(u32 bits) { return WIDE_SCALE ? __uint_as_float(bits) : value((u16)bits, SCALE_HALF); }
#ifdef WHOLE
struct Format : Values<4> {
  static constexpr int SCALES = GROUP == 32 ? 2 : 1, QUADS = SCALES;
  static constexpr bool HAS_ZERO = ZERO;
  // Values 0 and 4, 1 and 5, 2 and 6, 3 and 7.
  template <typename Z>
  static __device__ __forceinline__ u32 pair(u32 word, int k, u32, const Z&, int) { return two_nibbles(k < 2 ? word : word >> 8, !(k & 1)); }
  struct Four : FourOf<u32, GROUP> {
    u32 zeros;  // a byte each
    __device__ __forceinline__ void none() { FourOf<u32, GROUP>::none(), zeros = 0; }
    __device__ __forceinline__ void ask(Stored from, int m, int row, int blocks, int first, int end) {
      const void* scale = of(from.scale, m);
      const size_t at = (size_t)row * (GROUP == 32 ? blocks * 2 : groups_of(blocks * 64)) + (FOUR == 4 ? first : group_at(first * 64));
      const int there = count(first, end);
#if WHOLE && !WIDE_SCALE
      if constexpr (FOUR == 4) {
        const uint2 v = __ldg((const uint2*)((const u16*)scale + at));
        found[0] = v.x, found[1] = v.x >> 16, found[2] = v.y, found[3] = v.y >> 16;
      } else if constexpr (FOUR == 2) {
        const u32 v = __ldg((const u32*)((const u16*)scale + at));
        found[0] = v, found[1] = v >> 16;
      } else {
        found[0] = scale_bits(scale, at);
      }
#else
#pragma unroll
      for (int i = 0; i < FOUR; i++) found[i] = i < there ? scale_bits(scale, at + i) : 0;
#endif
      if constexpr (ZERO) {
        const u8* own = (const u8*)of(from.second, m) + at;
        if constexpr (WHOLE && FOUR == 4) {
          zeros = __ldg((const u32*)own);
        } else if constexpr (WHOLE && FOUR == 2) {
          zeros = __ldg((const u16*)own);
        } else {
#pragma unroll
          for (int i = 0; i < FOUR; i++) zeros |= i < there ? (u32)__ldg(own + i) << (8 * i) : 0;
        }
      }
    }
    // A scale whose lowest byte, which 16 bits leave empty, is the zero point.
    __device__ __forceinline__ float4 all(Stored) {
      float v[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float own = scale_value(found[i * FOUR / 4]);
        v[i] = ZERO ? __uint_as_float(__float_as_uint(own) | (zeros >> (8 * (i * FOUR / 4)) & 255)) : own;
      }
      return make_float4(v[0], v[1], v[2], v[3]);
    }
  };
  static __device__ __forceinline__ float zero_of(float scale) { return (float)((int)(__float_as_uint(scale) & 255u) - 8); }
  static __device__ __forceinline__ float scale_of(float scale) { return ZERO ? __uint_as_float(__float_as_uint(scale) & ~255u) : scale; }
};
#endif
struct One {
  static constexpr bool IS_CAST = true;
  struct Scale {
    float scale, least;
  };
  static __device__ __forceinline__ float one(u32 word, int i, Scale scale) { return less(word >> (4 * (i ^ 1)) & 15, scale.least) * scale.scale; }
};
// width: of a row, whole groups.
template <bool>
struct Unpacked : EightOf<One>, Eights<4> {
  const void* scale;
  const u8* zero;
  u32 each;
  __device__ __forceinline__ Unpacked(const void* scale, const void* second, const float*, const float*, const float*, int width, int)
      : scale(scale), zero((const u8*)second), each((GROUP ? GROUP : width) / 8) {}
  __device__ __forceinline__ One::Scale scale_at(i64 at) const {
    const u32 group = (u32)(at >> 3) / each;
    return {scale_value(scale_bits(scale, group)), 8388608.f + (ZERO ? (float)__ldg(zero + group) : 8.f)};
  }
};
// In a stage the scales of 128 rows, then their zero points.
struct Many : PiecesOf<4, One> {
  static constexpr int COUNT = GROUP == 32 || GROUP == 64 || GROUP == 128 ? 256 / (GROUP ? GROUP : 1) : 1;  // of 256 columns
  static constexpr int EACH = COUNT * SCALE_BYTES, ROW_BYTES = EACH + (ZERO ? COUNT : 0);
  using PiecesOf::PiecesOf;
  __device__ __forceinline__ void copy_scales(u8* to, int place, Member own, int row, int columns, int chunk) const {
    const size_t at = (size_t)row * groups_of(columns) + group_at(chunk * 256);
    copy_few<EACH>(to + place * EACH, (const u8*)own.scale + at * SCALE_BYTES);
    if constexpr (ZERO) copy_few<COUNT>(to + 128 * EACH + place * COUNT, (const u8*)own.second + at);
  }
  __device__ __forceinline__ Scale scale(const u8* scales, int place, int piece, float) const {
    const int which = piece * COUNT / 8;
    const u8* own = scales + place * EACH;
    const u32 bits = WIDE_SCALE ? *((const u32*)own + which) : (u32) * ((const u16*)own + which);
    return {scale_value(bits), 8388608.f + (ZERO ? (float)scales[128 * EACH + place * COUNT + which] : 8.f)};
  }
};
#endif
