// NVFP4: 4-bit floats (e2m1), two in a byte, the first in the low half, with a float8 (e4m3) scale for each 16 values of a row. `second` of a
// member: two float32, by the first of which scales are divided and by the second multiplied. SCALE_HALF: the weight's own type is fp16, not
// bf16.
#if FORMAT == 5
// A float8 as float32, and a value of 4 bits smaller by 2^14: fp16 has their bits in the same order.
__device__ __forceinline__ float of_float8(u32 byte) { return from_half((u16)((byte & 0x80) << 8 | (byte & 0x7f) << 7)) * 256.f; }
__device__ __forceinline__ float smaller_value(u32 code) { return from_half((u16)((code & 8) << 12 | (code & 7) << 9)); }
// What a scale is to `smaller_value`, as torch rounds it.
__device__ __forceinline__ float scale_of_group(u32 byte, float divisor, float factor) {
  return __fmul_rn(__fdiv_rn(of_float8(byte), divisor), factor) * 16384.f;
}
#ifdef WHOLE
struct Format : Values<4> {
  static constexpr bool HAS_GROUPS = true;
  // Values and scales multiply as fp16, smaller by 2^14 and by 2: exact.
  template <bool FEW>
  struct Groups {
    u32 a[2];
    __device__ __forceinline__ float read(const float* from, int odd, int t) {
#pragma unroll
      for (int k = 0; k < 2; k++) {
        const u32 byte = byte_of_16<FEW>(*(const uint4*)from, odd, t, k), one = (byte & 0x80) << 8 | (byte & 0x7f) << 7;
        a[k] = halves_fma(one | one << 16, 0x78007800u, 0);
      }
      return 128.f;
    }
  };
  template <typename Z>
  static __device__ __forceinline__ u32 pair(u32 word, int k, u32, const Z& z, int q) {
    const u32 w = word << (12 - 4 * k);
    return halves_fma((w & 0x80008000u) | (w >> 3 & 0x0e000e00u), z.a[q >> 1], 0);
  }
  struct Four : FourWords {
    __device__ __forceinline__ void ask(Stored from, int m, int row, int blocks, int first, int end) {
      read((const u32*)of(from.scale, m) + (size_t)row * blocks + first, end - first);
    }
  };
  static __device__ __forceinline__ float of_weight(float y, Stored from, int m) {
    const float* own = (const float*)of(from.second, m);
    return y * __fdiv_rn(__ldg(own + 1), __ldg(own));
  }
};
#endif
struct One {
  static constexpr bool IS_CAST = true;
  typedef float Scale;
  static __device__ __forceinline__ float one(u32 word, int i, Scale scale) { return smaller_value(word >> (4 * i)) * scale; }
};
// width: of a row, whole groups.
template <bool>
struct Unpacked : EightOf<One>, Eights<4> {
  const u8* scale;
  float divisor, factor;
  __device__ __forceinline__ Unpacked(const void* scale, const void* second, const float*, const float*, const float*, int, int)
      : scale((const u8*)scale), divisor(__ldg((const float*)second)), factor(__ldg((const float*)second + 1)) {}
  __device__ __forceinline__ float scale_at(i64 at) const { return scale_of_group(__ldg(scale + (at >> 4)), divisor, factor); }
};
// In a stage the 16 scales of each of 128 rows.
struct Many : PiecesOf<4, One> {
  static constexpr int ROW_BYTES = 16;
  struct Word {
    u32 low;
    int group;  // of the two that a lane has
  };
  struct Scale {
    float of[2];
  };
  float divisor, factor;
  __device__ __forceinline__ Many(const Member&, float*) : divisor(1.f), factor(1.f) {}
  __device__ __forceinline__ void begin(Member own) {
    divisor = __ldg((const float*)own.second), factor = __ldg((const float*)own.second + 1);
  }
  static __device__ __forceinline__ void words(Word* to, uint4 v, int high, const u8* scales, int row, int piece) {
    u32 low[4];
    PiecesOf::words(low, v, high, scales, row, piece);
#pragma unroll
    for (int i = 0; i < 4; i++) to[i] = {low[i], i >> 1};
  }
  __device__ __forceinline__ void copy_scales(u8* to, int place, Member own, int row, int columns, int chunk) const {
    copy_async<16>(to + place * 16, (const u8*)own.scale + (size_t)row * (columns / 16) + chunk * 16);
  }
  __device__ __forceinline__ Scale scale(const u8* scales, int place, int piece, float) const {
    const u8* own = scales + place * 16 + 2 * piece;
    return {{scale_of_group(own[0], divisor, factor), scale_of_group(own[1], divisor, factor)}};
  }
  __device__ __forceinline__ void values(float& v0, float& v1, Word word, int k, const Scale& scale, int half) const {
    PiecesOf::values(v0, v1, word.low, k, word.group ? scale.of[1] : scale.of[0], half);
  }
};
#endif
