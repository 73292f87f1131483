// 4-bit integers with one scale for each GROUP values of a row (0: the whole row), 16 bits wide or (WIDE_SCALE) float32: q - 8, or with
// ZERO q - zero, a byte a group. Two values in a byte, the first in the high half. SCALE_HALF: scales are fp16, not bf16.
#if FORMAT == 1
#ifndef ZERO
#define ZERO 0
#endif
#ifndef WIDE_SCALE
#define WIDE_SCALE 0
#endif
__device__ __forceinline__ u32 scale_bits(const void* scale, size_t at) {
  return WIDE_SCALE ? __float_as_uint(__ldg((const float*)scale + at)) : (u32)__ldg((const u16*)scale + at);
}
__device__ __forceinline__ float scale_value(u32 bits) { return WIDE_SCALE ? __uint_as_float(bits) : value((u16)bits, SCALE_HALF); }
// A value in the type of 16-bit scales, which is the weight's own, where the model computes in another.
__device__ __forceinline__ float as_weight(float v, int half) { return WIDE_SCALE || SCALE_HALF == half ? v : rounded(v, SCALE_HALF); }
#ifdef WHOLE
struct Format : FourBits {
  static constexpr int SCALES = GROUP == 32 ? 2 : 1, QUADS = SCALES;
  static constexpr bool HAS_TABLE = false, HAS_ZERO = ZERO, IS_CROSSED = true, ROUNDS_CHANGE = false;
  static constexpr int FIRST_BYTES = 32768;  // of shared memory in front: A x, where there is no other room
  static constexpr int FOUR = GROUP == 32 || GROUP == 64 ? 4 : GROUP == 128 ? 2 : 1;  // scales of four (32: two) blocks of 64
  static __device__ __forceinline__ int groups(int blocks) {
    return GROUP == 0 ? 1 : GROUP == 32 ? blocks * 2 : (blocks * 64 + GROUP - 1) / (GROUP ? GROUP : 1);
  }
  // Values 0 and 4, 1 and 5, 2 and 6, 3 and 7, as fp16: 1024 + q or 1024 + 16 q is an exponent and these bits.
  template <typename Z>
  static __device__ __forceinline__ u32 pair(u32 word, int k, u32, const Z&, int) {
    const u32 w = k < 2 ? word : word >> 8;
    return k & 1 ? halves_add((w & 0x000f000fu) | 0x64006400u, 0xe408e408u)
                 : halves_fma((w & 0x00f000f0u) | 0x64006400u, 0x2c002c00u, 0xd480d480u);
  }
  struct Near {
    __device__ __forceinline__ void ask(Stored) {}
    __device__ __forceinline__ void keep() {}
  };
  // A scale whose lowest byte, which 16 bits leave empty, is the zero point.
  static __device__ __forceinline__ float with_zero(u32 bits, u32 zero) {
    return ZERO ? __uint_as_float(__float_as_uint(scale_value(bits)) | zero) : scale_value(bits);
  }
  struct Four {
    u32 bits[FOUR], zeros;  // zeros: a byte each
    __device__ __forceinline__ void none() {
#pragma unroll
      for (int i = 0; i < FOUR; i++) bits[i] = 0;
      zeros = 0;
    }
    __device__ __forceinline__ void ask(Stored from, int m, int row, int blocks, int first, int end) {
      const void* scale = of(from.scale, m);
      const size_t at = (size_t)row * groups(blocks) + (FOUR == 4 ? first : GROUP ? first * 64 / (GROUP ? GROUP : 1) : 0);
      const int count = FOUR == 4 ? end - first : FOUR == 2 ? (end - first + 1) / 2 : 1;
#if WHOLE && !WIDE_SCALE
      if constexpr (FOUR == 4) {
        const uint2 v = __ldg((const uint2*)((const u16*)scale + at));
        bits[0] = v.x, bits[1] = v.x >> 16, bits[2] = v.y, bits[3] = v.y >> 16;
      } else if constexpr (FOUR == 2) {
        const u32 v = __ldg((const u32*)((const u16*)scale + at));
        bits[0] = v, bits[1] = v >> 16;
      } else {
        bits[0] = scale_bits(scale, at);
      }
#else
#pragma unroll
      for (int i = 0; i < FOUR; i++) bits[i] = i < count ? scale_bits(scale, at + i) : 0;
#endif
      if constexpr (ZERO) {
        const u8* own = (const u8*)of(from.second, m) + at;
        if constexpr (WHOLE && FOUR == 4) {
          zeros = __ldg((const u32*)own);
        } else if constexpr (WHOLE && FOUR == 2) {
          zeros = __ldg((const u16*)own);
        } else {
#pragma unroll
          for (int i = 0; i < FOUR; i++) zeros |= i < count ? (u32)__ldg(own + i) << (8 * i) : 0;
        }
      }
    }
    __device__ __forceinline__ float4 all(Stored) {
      float v[4];
#pragma unroll
      for (int i = 0; i < 4; i++) v[i] = with_zero(bits[i * FOUR / 4], zeros >> (8 * (i * FOUR / 4)) & 255);
      return make_float4(v[0], v[1], v[2], v[3]);
    }
  };
  static __device__ __forceinline__ float zero_of(float scale) { return (float)((int)(__float_as_uint(scale) & 255u) - 8); }
  static __device__ __forceinline__ float scale_of(float scale) {
    return ZERO ? __uint_as_float(__float_as_uint(scale) & ~255u) : scale;
  }
};
#endif
// Weights as they are unpacked into memory, eight neighbours a thread: exact in float32, rounded where they are stored. width: of a row,
// whole groups. The parameters are those of bitsandbytes' formats.
template <bool>
struct Unpacked {
  typedef u32 Word;
  static __device__ __forceinline__ Word word_at(const u8* packed, i64 at) { return __ldcg((const u32*)packed + at / 8); }
  const void* scale;
  const u8* zero;
  u32 each;
  __device__ __forceinline__ Unpacked(const void* scale, const void* second, const float*, const float*, const float*, int width, int)
      : scale(scale), zero((const u8*)second), each((GROUP ? GROUP : width) / 8) {}
  struct Scale {
    float scale, bias;
  };
  __device__ __forceinline__ Scale scale_at(i64 at) const {
    const u32 group = (u32)(at >> 3) / each;
    return {scale_value(scale_bits(scale, group)), 8388608.f + (ZERO ? (float)__ldg(zero + group) : 8.f)};
  }
  // 2^23 + q is an exponent and these bits.
  __device__ __forceinline__ void values(float* v, Word word, Scale scale, int half) const {
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = as_weight((__uint_as_float(0x4b000000u | (word >> (4 * (i ^ 1)) & 15)) - scale.bias) * scale.scale, half);
  }
};
// As in nf4.cuh: in a stage the scales of 128 rows, then their zero points.
struct Many : FourBitWords {
  static constexpr int COUNT = GROUP == 32 || GROUP == 64 || GROUP == 128 ? 256 / (GROUP ? GROUP : 1) : 1;  // of 256 columns
  static constexpr int EACH = COUNT * (WIDE_SCALE ? 4 : 2), ROW_BYTES = EACH + (ZERO ? COUNT : 0);
  struct Scale {
    float scale, bias;
  };
  __device__ __forceinline__ Many(const Member&, float*) {}
  __device__ __forceinline__ void prepare(const float*, const float*) const {}
  __device__ __forceinline__ void begin(Member) const {}
  __device__ __forceinline__ float outer(Member, int, int, int, int) const { return 0.f; }
  __device__ __forceinline__ void copy_scales(u8* to, int place, Member own, int row, int columns, int chunk) const {
    const int groups = GROUP ? (columns + GROUP - 1) / (GROUP ? GROUP : 1) : 1;
    const size_t at = (size_t)row * groups + (GROUP ? chunk * 256 / (GROUP ? GROUP : 1) : 0);
    copy_few<EACH>(to + place * EACH, (const u8*)own.scale + at * (WIDE_SCALE ? 4 : 2));
    if constexpr (ZERO) copy_few<COUNT>(to + 128 * EACH + place * COUNT, (const u8*)own.second + at);
  }
  __device__ __forceinline__ Scale scale(const u8* scales, int place, int piece, float) const {
    const int which = piece * COUNT / 8;
    const u8* own = scales + place * EACH;
    const u32 bits = WIDE_SCALE ? *((const u32*)own + which) : (u32) * ((const u16*)own + which);
    return {scale_value(bits), 8388608.f + (ZERO ? (float)scales[128 * EACH + place * COUNT + which] : 8.f)};
  }
  __device__ __forceinline__ void values(float& v0, float& v1, u32 word, int k, Scale scale, int half) const {
    const u32 byte = word >> (8 * k);
    v0 = as_weight((__uint_as_float(0x4b000000u | (byte >> 4 & 15)) - scale.bias) * scale.scale, half);
    v1 = as_weight((__uint_as_float(0x4b000000u | (byte & 15)) - scale.bias) * scale.scale, half);
  }
};
#endif
