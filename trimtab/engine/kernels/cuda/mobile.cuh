// Gemma 4's mobile weights to a product of few rows: BITS of 2, 4 or 8 a value as its file has them, the first in the lowest bits, plus half
// the range; or signed bytes. A float32 scale a row, rounded to the type of x. `offset` of a member: the static scales of its inputs and of
// its outputs, 0 for no rounding; inputs are those of the first member.
#if FORMAT == 4
#ifdef WHOLE
struct Format {
  static constexpr int BYTES = BITS * 8, LANE_BYTES = BYTES, PAD_FEW = 64, PAD = BITS == 8 ? 64 : 32, FEW_ROWS = BITS == 8 ? 0 : 4;
  static constexpr int SCALES = 1, QUADS = 1, FIRST_BYTES = 32768;
  static constexpr bool HAS_GROUPS = false, HAS_TABLE = false, HAS_ZERO = false, ROUNDS_CHANGE = false;
  static constexpr bool IS_CROSSED = BITS == 4, IS_CROSSED_WIDE = BITS == 2, ROUNDS_INPUT = true;
  template <bool FEW>
  using Groups = NoGroups<FEW>;
  // Four times 8 values of a pair of blocks.
  struct Lane {
    uint4 a, b;
  };
  typedef uint2 Word;
  template <bool FEW>
  static __device__ __forceinline__ Lane streamed(const u8* p, int) {
    Lane v;
    v.b = make_uint4(0, 0, 0, 0);
    if constexpr (BITS == 8) {
      v.a = streamed_16(p), v.b = streamed_16(p + 64);
    } else if constexpr (BITS == 4) {
      v.a = FEW ? streamed_16(p) : streamed_8_8(p);
    } else {
      const uint2 own = FEW ? streamed_8(p) : make_uint2(streamed_4(p), streamed_4(p + 16));
      v.a = make_uint4(own.x, own.y, 0, 0);
    }
    return v;
  }
  template <bool FEW>
  static __device__ __forceinline__ Lane near(const u8* p, int) {
    Lane v;
    v.b = make_uint4(0, 0, 0, 0);
    if constexpr (BITS == 8) {
      v.a = *(const uint4*)p, v.b = *(const uint4*)(p + 64);
    } else if constexpr (BITS == 4 && FEW) {
      v.a = *(const uint4*)p;
    } else if constexpr (BITS == 4) {
      const uint2 even = *(const uint2*)p, odd = *(const uint2*)(p + 32);
      v.a = make_uint4(even.x, even.y, odd.x, odd.y);
    } else if constexpr (FEW) {
      const uint2 own = *(const uint2*)p;
      v.a = make_uint4(own.x, own.y, 0, 0);
    } else {
      v.a = make_uint4(*(const u32*)p, *(const u32*)(p + 16), 0, 0);
    }
    return v;
  }
  static __device__ __forceinline__ Word word(const Lane& v, int i) {
    if constexpr (BITS == 8) {
      const uint4 own = i < 2 ? v.a : v.b;
      return i & 1 ? make_uint2(own.z, own.w) : make_uint2(own.x, own.y);
    } else if constexpr (BITS == 4) {
      return make_uint2(i == 0 ? v.a.x : i == 1 ? v.a.y : i == 2 ? v.a.z : v.a.w, 0);
    } else {  // values 0 to 3 and 8 to 11 of 16, then the others
      return make_uint2((i < 2 ? v.a.x : v.a.y) >> (8 * (i & 1)), 0);
    }
  }
  template <typename Z>
  static __device__ __forceinline__ u32 pair(Word word, int k, u32, const Z&, int) {
    if constexpr (BITS == 8)
      return halves_add(__byte_perm((k < 2 ? word.x : word.y) ^ 0x80808080u, 0x64646464u, k & 1 ? 0x4342 : 0x4140), 0xe480e480u);
    if constexpr (BITS == 2) return halves_add((word.x >> (2 * k) & 0x00030003u) | 0x64006400u, 0xe402e402u);
    const u32 w = k < 2 ? word.x : word.x >> 8;
    return k & 1 ? halves_fma((w & 0x00f000f0u) | 0x64006400u, 0x2c002c00u, 0xd480d480u)
                 : halves_add((w & 0x000f000fu) | 0x64006400u, 0xe408e408u);
  }
  static __device__ __forceinline__ float scale_of(float scale) { return scale; }
  static __device__ __forceinline__ float zero_of(float) { return 0.f; }
  // As torch rounds in the type of x: the quotient, the whole number, the product.
  static __device__ __forceinline__ float rounded_to_8(float v, float scale) {
    return scale == 0.f ? v : rounded(fminf(fmaxf(rintf(rounded(__fdiv_rn(v, scale), HALF)), -128.f), 127.f) * scale, HALF);
  }
  static __device__ __forceinline__ float static_scale(const float* scales, int which) {
    return scales ? rounded(__ldg(scales + which), HALF) : 0.f;
  }
  struct Near {
    __device__ __forceinline__ void ask(Stored) {}
    __device__ __forceinline__ void keep() {}
  };
  struct Four {
    float found;
    __device__ __forceinline__ void none() { found = 0.f; }
    __device__ __forceinline__ void ask(Stored from, int m, int row, int, int, int) { found = __ldg((const float*)of(from.scale, m) + row); }
    __device__ __forceinline__ float4 all(Stored) {
      const float v = rounded(found, HALF);
      return make_float4(v, v, v, v);
    }
  };
};
#endif
#endif
