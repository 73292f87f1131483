// How a weight is stored: one of these headers for each format, chosen by FORMAT; the products know no other. This one: bitsandbytes'
// 4-bit codes (NF4, FP4), two in a byte, the first in the high half, with a scale for each 64 values in float32, or (NESTED) an 8-bit
// code of it with a scale for each 256 of those and one offset.
#ifndef FORMAT
#define FORMAT 0  // 0: these codes, 1: int4.cuh, 2: fp8.cuh, 3: ggml.cuh, 4: mobile.cuh, 5: fp4.cuh
#endif
#ifndef NESTED
#define NESTED 0
#endif
// What the sources ask of a layout. IS_CODED: values are codes of a table, two in a byte, and each 64 of them have a scale wherever a row
// begins; else scales are of rows. IS_PACKED: whether it is one (FORMAT 16 of experts: none). IS_FIRST: kernels that know no weights are
// compiled with this layout alone. UNPACKED_BY: what `Unpacked` takes, log2 of the values with a scale and of scales with one of theirs;
// else the width of a row.
#if FORMAT == 0
#define IS_CODED 1
#define IS_FIRST 1
#define UNPACKED_BY(width) 6, 8
#else
#define IS_CODED 0
#define IS_FIRST 0
#define UNPACKED_BY(width) width, 0
#endif
#define IS_PACKED (FORMAT != 16)
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
// One weight to a product of many rows (rows.cu). second: scales of scales, or zero points.
struct Member {
  const u8* weight;
  const void *scale, *second;
  const float* offset;
  const u16* bias;
  int rows;
};
// A lane's part of 256 columns of a row (rows.cu), as the banks of x want it.
struct FourBitWords {
  static constexpr int COLUMNS = 256, FRONT = 16 * 32 + 256;  // floats in front of the stages
  typedef u32 Word;                                           // of eight values
  static constexpr int CHUNK_BYTES = 128, PIECE_BYTES = 16;   // of a row, and of 32 neighbours
  static __device__ __forceinline__ int place(int piece) { return piece * 16; }  // of a piece in them
  static __device__ __forceinline__ void words(Word* to, uint4 v, int high, const u8*, int, int) {
    to[0] = high ? v.y : v.x, to[1] = high ? v.x : v.y, to[2] = high ? v.w : v.z, to[3] = high ? v.z : v.w;
  }
};
// What a lane has of a pair of blocks of 64 values in a row, four times 8 values. FEW: 32 neighbours, lanes 0 and 1 of the even block; else
// 16 of each block. From memory that is read once, or from shared memory.
// Of formats whose scales multiply sums.
template <bool>
struct NoGroups {
  __device__ __forceinline__ float read(const float*, int, int) { return 0.f; }
};
struct FourBits {
  static constexpr int BYTES = 32, LANE_BYTES = 32;  // of 64 values, and those of them that lanes share evenly
  static constexpr int PAD_FEW = 64, PAD = 32;       // behind each row of a stage, against meeting in a bank
  static constexpr int FEW_ROWS = 4;                        // of x, up to which a row of it has several columns
  typedef uint4 Lane;
  static constexpr bool HAS_GROUPS = false, IS_CROSSED_WIDE = false, ROUNDS_INPUT = false;
  static __device__ __forceinline__ float of_weight(float y, Stored, int) { return y; }  // a sum, with a scale that a whole weight has
  static __device__ __forceinline__ float rounded_to_8(float v, float) { return v; }
  static __device__ __forceinline__ float static_scale(const float*, int) { return 0.f; }
  template <bool FEW>
  using Groups = NoGroups<FEW>;
  template <bool FEW>
  static __device__ __forceinline__ Lane streamed(const u8* p, int) { return FEW ? streamed_16(p) : streamed_8_8(p); }
  template <bool FEW>
  static __device__ __forceinline__ Lane near(const u8* p, int) {
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
  static constexpr int SCALES = 1, QUADS = 1;  // of 64 values; of what is kept of scales, 16 bytes each, of 256
  static constexpr bool HAS_TABLE = true, HAS_ZERO = false, IS_CROSSED = false, ROUNDS_CHANGE = true;
  static constexpr int FIRST_BYTES = 65536;  // of shared memory in front: the two weights of each byte, for every lane
#ifdef WHOLE
  // Two of eight values as fp16.
  template <typename Z>
  static __device__ __forceinline__ u32 pair(u32 w, int k, u32 lane4, const Z&, int) { return shared_word(__byte_perm(w, lane4, 0x5504 + k * 16)); }
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
  static __device__ __forceinline__ Word word_at(const u8* packed, i64 at) { return __ldcg((const u32*)packed + at / 8); }
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
// What a block of rows.cu needs to make weights of bytes: of 256 columns of a row at a time, as a stage has them. A lane has 32
// neighbours, piece `piece` of 8. shared: from a multiple of 2048 on, codes of each lane's own so that no two lanes meet in a bank,
// then codes of scales.
struct Many : FourBitWords {
  static constexpr int ROW_BYTES = 16;  // of scales of a row in a stage
  typedef float Scale;
  float *table, *codes;
  bool nested;
  u32 mine;
  float offset;
  __device__ __forceinline__ Many(const Member& first, float* shared)
      : table(shared), codes(shared + 16 * 32), nested(first.second != nullptr), mine(0), offset(0.f) {
#ifndef TRIMTAB_CPU
    mine = shared_address(table) + (threadIdx.x & 31) * 4;
#endif
  }
  __device__ __forceinline__ void prepare(const float* code, const float* nested_code) {
    for (int i = threadIdx.x; i < 16 * 32; i += blockDim.x) table[i] = __ldg(code + (i >> 5));
    if (nested)
      for (int i = threadIdx.x; i < 256; i += blockDim.x) codes[i] = __ldg(nested_code + i);
  }
  __device__ __forceinline__ void copy_scales(u8* to, int place, Member own, int row, int columns, int chunk) const {
    const size_t at = (size_t)row * (columns / 64) + chunk * 4;
    if (nested)
      copy_async<4>(to + place * 4, (const u8*)own.scale + at);
    else
      copy_async<16>(to + place * 16, (const u8*)own.scale + at * 4);
  }
  // The member of the next pieces.
  __device__ __forceinline__ void begin(Member own) { offset = nested ? __ldg(own.offset) : 0.f; }
  // Of a scale: asked for before the stage is there.
  __device__ __forceinline__ float outer(Member own, int row, int columns, int chunk, int piece) const {
    const int block = piece >> 1;
    return nested ? __ldg((const float*)own.second + (int)(((i64)row * (columns / 64) + chunk * 4 + block) >> 8)) : 0.f;
  }
  __device__ __forceinline__ Scale scale(const u8* scales, int place, int piece, float outer) const {
    const int block = piece >> 1;
    const u8* own = scales + place * (nested ? 4 : 16);
    return nested ? __fadd_rn(__fmul_rn(codes[own[block]], outer), offset) : *(const float*)(own + block * 4);
  }
  // The code of a nibble, from the lane's own copy: nibble times 128 bytes, then the lane's 4. The table begins at a multiple of 2048, so
  // that nothing is added.
  __device__ __forceinline__ float code_of(u32 shifted) const {
#ifndef TRIMTAB_CPU
    float v;
    asm("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"((shifted & 0x780u) | mine));
    return v;
#else
    return table[(threadIdx.x & 31) + (shifted & 0x780u) / 4];
#endif
  }
  // The two values of byte k of a word. Byte 0 comes with what is above it: shifting it left then is another unit's work than masking it.
  __device__ __forceinline__ void values(float& v0, float& v1, u32 word, int k, Scale scale, int) const {
    const u32 byte = k ? __byte_perm(word, 0, 0x4440 + k) : word;
    v0 = code_of(byte << 3) * scale, v1 = code_of(byte << 7) * scale;
  }
};
#endif
