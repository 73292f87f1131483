// Gemma 4's mobile weights: BITS of 2, 4 or 8 a value as its file has them, the first in the lowest bits, plus half the range; or signed
// bytes. A float32 scale for each GROUP values of a row (0: the whole row), rounded to the type of x, which is fp16 (SCALE_HALF) or bf16.
// `offset` of a member: the static scales of its inputs and of its outputs, 0 for no rounding; inputs are those of the first member.
#if FORMAT == 4
// As torch rounds in a type of 16 bits: the quotient, the whole number, the product. NaN stays.
__device__ __forceinline__ float rounded_8(float v, float scale, int half) {
  const float q = rintf(rounded(__fdiv_rn(v, scale), half));
  return scale == 0.f || q != q ? v : rounded(fminf(fmaxf(q, -128.f), 127.f) * scale, half);
}
#ifdef WHOLE
struct Format {
  static constexpr int BYTES = BITS * 8, LANE_BYTES = BYTES, PAD_FEW = 64, PAD = BITS == 8 ? 64 : 32, FEW_ROWS = BITS == 8 ? 0 : 4;
  static constexpr int SCALES = 1, QUADS = 1, FIRST_BYTES = 32768;
  static constexpr bool HAS_GROUPS = false, HAS_TABLE = false, HAS_ZERO = false, ROUNDS_CHANGE = false;
  static constexpr bool IS_CROSSED = BITS == 4, IS_CROSSED_WIDE = BITS == 2, ROUNDS_INPUT = true;
  static __device__ __forceinline__ float of_weight(float y, Stored, int) { return y; }
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
  static __device__ __forceinline__ float rounded_to_8(float v, float scale) { return rounded_8(v, scale, HALF); }
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
#else
// Inputs or outputs of up to three layers side by side, each with its static scale, in place or elsewhere. A thread is 8 neighbours.
// Grid: [all values of a row / 2048, rows].
extern "C" __global__ void __launch_bounds__(256) round_to_8(
    const u16* from, int from_stride, u16* to, int to_stride, int rows0, int rows1, int rows2, const float* scale0, const float* scale1,
    const float* scale2, int half) {
  const int first = (blockIdx.x * 256 + threadIdx.x) * 8, total = rows0 + rows1 + rows2;
  let_next_start();
  wait_for_previous();
  for (int at = first; at < min(first + 8, total); at++) {
    const float* scale = at < rows0 ? scale0 : at < rows0 + rows1 ? scale1 : scale2;
    const float v = value(from[(size_t)blockIdx.y * from_stride + at], half);
    to[(size_t)blockIdx.y * to_stride + at] = stored(rounded_8(v, scale ? rounded(__ldg(scale), half) : 0.f, half), half);
  }
}
#endif
__device__ __forceinline__ float row_scale(const void* scales, size_t at) { return rounded(__ldg((const float*)scales + at), SCALE_HALF); }
// As in nf4.cuh.
template <bool>
struct Unpacked {
  struct Word {
    u32 low, high;  // of 8 values; of 8 bits the first four and the others
  };
  struct Scale {
    float scale;
  };
  const void* scales;
  u32 each;
  __device__ __forceinline__ Unpacked(const void* scale, const void*, const float*, const float*, const float*, int width, int)
      : scales(scale), each((GROUP ? GROUP : width) / 8) {}
  static __device__ __forceinline__ Word word_at(const u8* packed, i64 at) {
    if constexpr (BITS == 8) {
      const uint2 v = __ldcg((const uint2*)(packed + at));
      return {v.x, v.y};
    } else {
      return {BITS == 4 ? __ldcg((const u32*)packed + at / 8) : (u32)__ldcg((const u16*)packed + at / 8), 0};
    }
  }
  __device__ __forceinline__ Scale scale_at(i64 at) const { return {row_scale(scales, (at >> 3) / each)}; }
  __device__ __forceinline__ void values(float* v, Word word, Scale scale, int) const {
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const int q = BITS == 8 ? (int)(signed char)(u8)((i < 4 ? word.low : word.high) >> (8 * (i & 3)))
                              : (int)(word.low >> (BITS * i % 32) & ((1 << BITS % 8) - 1)) - (1 << (BITS - 1));
      v[i] = (float)q * scale.scale;
    }
  }
};
// As in nf4.cuh. The scale of a row is read as it is needed.
struct Many {
  static constexpr int COLUMNS = BITS == 8 ? 128 : 256, FRONT = 16 * 32 + 256, ROW_BYTES = 0, PIECE_BYTES = BITS == 2 ? 8 : 16;
  static constexpr int CHUNK_BYTES = 8 * PIECE_BYTES;
  struct Word {
    u32 low, high;
  };
  typedef float Scale;
  __device__ __forceinline__ Many(const Member&, float*) {}
  __device__ __forceinline__ void prepare(const float*, const float*) const {}
  __device__ __forceinline__ void begin(Member) const {}
  static __device__ __forceinline__ int place(int piece) { return piece * PIECE_BYTES; }
  static __device__ __forceinline__ void words(Word* to, uint4 v, int high, const u8*, int, int) {
    if constexpr (BITS == 8) {
      to[high] = {v.x, v.y}, to[high ^ 1] = {v.z, v.w};
    } else {
      const u32 eights[4] = {v.x, BITS == 4 ? v.y : v.x >> 16, BITS == 4 ? v.z : v.y, BITS == 4 ? v.w : v.y >> 16};
#pragma unroll
      for (int i = 0; i < 4; i++) to[i] = {high ? eights[i ^ 1] : eights[i], 0};
    }
  }
  __device__ __forceinline__ void copy_scales(u8*, int, Member, int, int, int) const {}
  __device__ __forceinline__ float outer(Member own, int row, int, int, int) const { return row_scale(own.scale, row); }
  __device__ __forceinline__ Scale scale(const u8*, int, int, float outer) const { return outer; }
  // 2^23 + q is an exponent and these bits.
  __device__ __forceinline__ void values(float& v0, float& v1, Word word, int k, Scale scale, int) const {
    if constexpr (BITS == 8) {
      const u32 two = (k < 2 ? word.low : word.high) >> (16 * (k & 1));
      v0 = (float)(int)(signed char)(u8)two * scale, v1 = (float)(int)(signed char)(u8)(two >> 8) * scale;
    } else {
      const u32 two = word.low >> (2 * BITS * k % 32), mask = (1 << BITS % 8) - 1;
      const float least = 8388608.f + (1 << (BITS - 1));
      v0 = (__uint_as_float(0x4b000000u | (two & mask)) - least) * scale;
      v1 = (__uint_as_float(0x4b000000u | (two >> BITS % 8 & mask)) - least) * scale;
    }
  }
};
#endif
