// How a weight is stored: one of these headers for each format, chosen by FORMAT; the products know no other. This one: bitsandbytes'
// 4-bit codes (NF4, FP4), two in a byte, the first in the high half, with a scale for each 64 values in float32, or (NESTED) an 8-bit
// code of it with a scale for each 256 of those and one offset.
#ifndef FORMAT
#define FORMAT 0  // 0: these codes, 1: integers in groups (int4.cuh), 2: float8 (fp8.cuh)
#endif
#ifndef NESTED
#define NESTED 0
#endif
// The parts of up to three weights over one input. scale, second: scales, and scales of scales or zero points.
#define MEMBERS 3
struct Stored {
  const void* scale[MEMBERS];
  const void* second[MEMBERS];
  const float* offset[MEMBERS];
  const float* nested_code;
};
template <typename T>
__device__ __forceinline__ T of(const T* member, int m) {
  return m == 0 ? member[0] : m == 1 ? member[1] : member[2];
}
// What a lane has of a pair of blocks of 64 values in a row, four times 8 values. FEW: 32 neighbours, lanes 0 and 1 of the even block; else
// 16 of each block. From memory that is read once, or from shared memory.
struct FourBits {
  static constexpr int BYTES = 32, PAD_FEW = 64, PAD = 32;  // of 64 values; behind each row of a stage, against meeting in a bank
  typedef uint4 Lane;
  template <bool FEW>
  static __device__ __forceinline__ Lane streamed(const u8* p) { return FEW ? streamed_16(p) : streamed_8_8(p); }
  template <bool FEW>
  static __device__ __forceinline__ Lane near(const u8* p) {
    if constexpr (FEW) return *(const uint4*)p;
    const uint2 a = *(const uint2*)p, b = *(const uint2*)(p + 32);
    return make_uint4(a.x, a.y, b.x, b.y);
  }
  // What a scale is, as `Four` gave it, and the zero point of its group less the one that `pairs` takes away.
  static __device__ __forceinline__ float scale_of(float scale) { return scale; }
  static __device__ __forceinline__ float zero_of(float) { return 0.f; }
  static __device__ __forceinline__ u32 word(const Lane& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
};
#if FORMAT == 0
struct Format : FourBits {
  static constexpr int SCALES = 1;  // of 64 values
  static constexpr bool HAS_TABLE = true, HAS_ZERO = false, IS_CROSSED = false, ROUNDS_CHANGE = true;
  static constexpr int FIRST_BYTES = 65536;  // of shared memory in front: the two weights of each byte, for every lane
#ifdef WHOLE
  // Two of eight values as fp16.
  static __device__ __forceinline__ u32 pair(u32 w, int k, u32 lane4) { return shared_word(__byte_perm(w, lane4, 0x5504 + k * 16)); }
  // Codes of scales: all of them are in L1 when they are looked up.
  struct Near {
#if NESTED && WHOLE
    int code;
    __device__ __forceinline__ void ask(Stored from) { code = __ldg((const int*)from.nested_code + (threadIdx.x & 255)); }
    __device__ __forceinline__ void keep() { as_is(code); }
#else
    __device__ __forceinline__ void ask(Stored) {}
    __device__ __forceinline__ void keep() {}
#endif
  };
  // Four scales of a row at once, as they were stored until `all`.
  struct Four {
    float4 found;
#if NESTED && WHOLE
    u32 codes;
    float outer, offset;
#endif
    __device__ __forceinline__ void none() {
      found = make_float4(0.f, 0.f, 0.f, 0.f);
#if NESTED && WHOLE
      codes = 0;
      outer = offset = 0.f;
#endif
    }
    // Of row `row` of member m, whose rows have `blocks` of 64 values, from scale `first` on; there are scales up to `end`.
    __device__ __forceinline__ void ask(Stored from, int m, int row, int blocks, int first, int end) {
      const size_t at = (size_t)row * blocks + first;
      const void* scale = of(from.scale, m);
#if NESTED && WHOLE
      codes = __ldg((const u32*)((const u8*)scale + at));
      outer = __ldg((const float*)of(from.second, m) + (at >> 8));
      offset = __ldg(of(from.offset, m));
#elif WHOLE
      found = __ldg((const float4*)((const float*)scale + at));
#else
      float one[4];
#pragma unroll
      for (int u = 0; u < 4; u++) {
        one[u] = 0.f;
        if (first + u >= end) continue;
        one[u] = NESTED ? fmaf(__ldg(from.nested_code + __ldg((const u8*)scale + at + u)),
                               __ldg((const float*)of(from.second, m) + ((at + u) >> 8)), __ldg(of(from.offset, m)))
                        : __ldg((const float*)scale + at + u);
      }
      found = make_float4(one[0], one[1], one[2], one[3]);
#endif
    }
    __device__ __forceinline__ float4 all(Stored from) {
#if NESTED && WHOLE
      found.x = fmaf(__ldg(from.nested_code + (codes & 255)), outer, offset);
      found.y = fmaf(__ldg(from.nested_code + (codes >> 8 & 255)), outer, offset);
      found.z = fmaf(__ldg(from.nested_code + (codes >> 16 & 255)), outer, offset);
      found.w = fmaf(__ldg(from.nested_code + (codes >> 24)), outer, offset);
#endif
      return found;
    }
  };
#endif
};
// Weights as they are unpacked into memory, eight neighbours a thread, rounded as bitsandbytes rounds: code * scale once, and with
// SCALES_OF_SCALES the scale after each of its two operations. shift: of values that share a scale.
template <bool SCALES_OF_SCALES>
struct Unpacked {
  typedef u32 Word;  // of eight values
  const void* scale;
  const float *outer, *offset, *code2;
  int shift, outer_shift;
  const float* own;  // of each lane's own: no two lanes meet in a bank
  __device__ __forceinline__ Unpacked(const void* scale, const void* second, const float* offset, const float* code2, const float* code,
                                      int shift, int outer_shift)
      : scale(scale), outer((const float*)second), offset(offset), code2(code2), shift(shift), outer_shift(outer_shift) {
    __shared__ float table[16 * 32];
    for (int i = threadIdx.x; i < 16 * 32; i += blockDim.x) table[i] = code[i >> 5];
    __syncthreads();
    own = table + (threadIdx.x & 31);
  }
  struct Scale {
    float scale;
  };
  __device__ __forceinline__ Scale scale_at(i64 at) const {
    const i64 block = at >> shift;
    if (!SCALES_OF_SCALES) return {__ldg((const float*)scale + block)};
    return {__fadd_rn(__fmul_rn(__ldg(code2 + ((const u8*)scale)[block]), __ldg(outer + (block >> outer_shift))), __ldg(offset))};
  }
  __device__ __forceinline__ void values(float* v, Word word, Scale scale, int) const {
#pragma unroll
    for (int b = 0; b < 4; b++) {
      const u32 byte = word >> (8 * b) & 255;
      v[2 * b] = own[(byte >> 4) * 32] * scale.scale;
      v[2 * b + 1] = own[(byte & 15) * 32] * scale.scale;
    }
  }
};
#endif
