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
__device__ __forceinline__ float as_weight(float v, int half) { return SCALE_HALF == half ? v : rounded(v, SCALE_HALF); }
__device__ __forceinline__ u32 scale_row(u32 row, int blocks) {
  const u32 groups = GROUP ? (blocks * 64 + GROUP - 1) / (GROUP ? GROUP : 1) : 1;
  return HIGH ? row / (HIGH ? HIGH : 1) * groups : 0;
}
#ifdef WHOLE
struct Format {
  static constexpr int BYTES = 64, LANE_BYTES = 64, PAD_FEW = 64, PAD = 64, SCALES = 1, QUADS = 1, FEW_ROWS = 0, FIRST_BYTES = 32768;
  static constexpr bool IS_CROSSED_WIDE = false, ROUNDS_INPUT = false;
  static __device__ __forceinline__ float of_weight(float y, Stored, int) { return y; }
  static __device__ __forceinline__ float rounded_to_8(float v, float) { return v; }
  static __device__ __forceinline__ float static_scale(const float*, int) { return 0.f; }
  static constexpr bool HAS_GROUPS = false, HAS_TABLE = false, HAS_ZERO = false, IS_CROSSED = false, ROUNDS_CHANGE = false;
  static constexpr int FOUR = GROUP == 64 ? 4 : GROUP == 128 ? 2 : 1;  // scales of four blocks of 64
  // 16 neighbours of each block.
  struct Lane {
    uint4 a, b;
  };
  template <bool FEW>
  static __device__ __forceinline__ Lane streamed(const u8* p, int) { return {streamed_16(p), streamed_16(p + 64)}; }
  template <bool FEW>
  static __device__ __forceinline__ Lane near(const u8* p, int) { return {*(const uint4*)p, *(const uint4*)(p + 64)}; }
  static __device__ __forceinline__ uint2 word(const Lane& v, int i) {
    const uint4 own = i < 2 ? v.a : v.b;
    return i & 1 ? make_uint2(own.z, own.w) : make_uint2(own.x, own.y);
  }
  template <bool FEW>
  using Groups = NoGroups<FEW>;
  template <typename Z>
  static __device__ __forceinline__ u32 pair(uint2 word, int k, u32, const Z&, int) { return two_float8(k < 2 ? word.x : word.y, k & 1); }
  static __device__ __forceinline__ float scale_of(float scale) { return scale; }
  static __device__ __forceinline__ float zero_of(float) { return 0.f; }
  struct Near {
    __device__ __forceinline__ void ask(Stored) {}
    __device__ __forceinline__ void keep() {}
  };
  struct Four {
    float found[FOUR];
    __device__ __forceinline__ void none() {
#pragma unroll
      for (int i = 0; i < FOUR; i++) found[i] = 0.f;
    }
    __device__ __forceinline__ void ask(Stored from, int m, int row, int blocks, int first, int end) {
      const float* own = (const float*)of(from.scale, m) + scale_row(row, blocks) + (GROUP ? first * 64 / (GROUP ? GROUP : 1) : 0);
      const int count = FOUR == 4 ? end - first : FOUR == 2 ? (end - first + 1) / 2 : 1;
#pragma unroll
      for (int i = 0; i < FOUR; i++) found[i] = WHOLE || i < count ? __ldg(own + i) : 0.f;
    }
    __device__ __forceinline__ float4 all(Stored) {
      return make_float4(found[0] * SMALLER, found[FOUR / 4] * SMALLER, found[FOUR / 2] * SMALLER, found[3 * FOUR / 4] * SMALLER);
    }
  };
};
#endif
template <bool>
struct Unpacked {
  typedef uint2 Word;
  static __device__ __forceinline__ Word word_at(const u8* packed, i64 at) { return __ldcg((const uint2*)packed + at / 8); }
  const float* scales;
  int width;
  __device__ __forceinline__ Unpacked(const void* scale, const void*, const float*, const float*, const float*, int width, int)
      : scales((const float*)scale), width(width) {}
  struct Scale {
    float scale;
  };
  __device__ __forceinline__ Scale scale_at(i64 at) const {
    const u32 piece = (u32)(at >> 3), each = (u32)width >> 3, row = piece / each, column = (piece - row * each) * 8;
    const u32 groups = GROUP ? (width + GROUP - 1) / (GROUP ? GROUP : 1) : 1;
    return {__ldg(scales + (HIGH ? row / (HIGH ? HIGH : 1) * groups : 0) + (GROUP ? column / (GROUP ? GROUP : 1) : 0)) * SMALLER};
  }
  __device__ __forceinline__ void values(float* v, Word word, Scale scale, int half) const {
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const u32 two = two_float8(k < 2 ? word.x : word.y, k & 1);
      v[2 * k] = as_weight(from_half((u16)two) * scale.scale, half);
      v[2 * k + 1] = as_weight(from_half((u16)(two >> 16)) * scale.scale, half);
    }
  }
};
// As in nf4.cuh, of 128 columns. Scales of a block are few: they are read as they are needed.
struct Many {
  static constexpr int COLUMNS = 128, FRONT = 16 * 32 + 256, ROW_BYTES = 0, CHUNK_BYTES = 128, PIECE_BYTES = 16;
  typedef uint2 Word;
  typedef float Scale;
  __device__ __forceinline__ Many(const Member&, float*) {}
  __device__ __forceinline__ void prepare(const float*, const float*) const {}
  __device__ __forceinline__ void begin(Member) const {}
  static __device__ __forceinline__ int place(int piece) { return piece * 16; }
  static __device__ __forceinline__ void words(Word* to, uint4 v, int high, const u8*, int, int) {
    to[0] = high ? make_uint2(v.z, v.w) : make_uint2(v.x, v.y), to[1] = high ? make_uint2(v.x, v.y) : make_uint2(v.z, v.w);
  }
  __device__ __forceinline__ void copy_scales(u8*, int, Member, int, int, int) const {}
  __device__ __forceinline__ float outer(Member own, int row, int columns, int chunk, int piece) const {
    const int at = chunk * 128 + piece * 16;
    return __ldg((const float*)own.scale + scale_row(row, columns / 64) + (GROUP ? at / (GROUP ? GROUP : 1) : 0)) * SMALLER;
  }
  __device__ __forceinline__ Scale scale(const u8*, int, int, float outer) const { return outer; }
  __device__ __forceinline__ void values(float& v0, float& v1, Word word, int k, Scale scale, int half) const {
    const u32 two = two_float8(k < 2 ? word.x : word.y, k & 1);
    v0 = as_weight(from_half((u16)two) * scale, half), v1 = as_weight(from_half((u16)(two >> 16)) * scale, half);
  }
};
#endif
