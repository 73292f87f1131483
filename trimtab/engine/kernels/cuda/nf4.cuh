// bitsandbytes' 4-bit codes (NF4, FP4), two in a byte, the first in the high half, with a scale for each 64 values in float32, or (NESTED)
// an 8-bit code of it with a scale for each 256 of those and one offset.
#if FORMAT == 0
struct Format : Values<4> {
  static constexpr bool HAS_TABLE = true, IS_CROSSED = false, ROUNDS_CHANGE = true;
  static constexpr int FIRST_BYTES = 65536;  // of shared memory in front: the two weights of each byte, for every lane
#ifdef WHOLE
  // Two of eight values as fp16.
  template <typename Z>
  static __device__ __forceinline__ u32 pair(u32 w, int k, u32 lane4, const Z&, int) { return shared_word(__byte_perm(w, lane4, 0x5504 + k * 16)); }
#if NESTED && WHOLE
  // Codes of scales: all of them are in L1 when they are looked up.
  struct Near {
    int code;
    __device__ __forceinline__ void ask(Stored from) { code = __ldg((const int*)from.nested_code + (threadIdx.x & 255)); }
    __device__ __forceinline__ void keep() { as_is(code); }
  };
#endif
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
struct Unpacked : Eights<4> {
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
// In front of the stages: codes of each lane's own so that no two lanes meet in a bank, then codes of scales.
struct Many : Pieces<4> {
  static constexpr int ROW_BYTES = 16;  // of scales of a row in a stage
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
  __device__ __forceinline__ void begin(Member own) { offset = nested ? __ldg(own.offset) : 0.f; }
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
// One expert of a stack (experts.cu), and what a warp asked for of COUNT of its rows.
struct Expert {
  static constexpr int UP_ROWS = 32, DOWN_ROWS = 16;
  const u8 *weight, *scale;
  const float *outer, *code2, *offset;
  template <typename Stack>
  __device__ __forceinline__ Expert(const Stack& s, u32 expert, int) : code2(s.code2), offset(s.offset + expert) {
    const auto own = s.of(expert);
    weight = own.weight, scale = own.scale, outer = (const float*)own.second;
  }
  // A scale as it is stored, and what it is.
  struct Scale {
    u32 bits;
    float outer;
  };
  __device__ __forceinline__ Scale scale_at(u32 block) const {
    if constexpr (!NESTED) return {__ldcg((const u32*)scale + block), 0.f};
    return {__ldcg(scale + block), __ldcg(outer + (block >> 8))};
  }
  __device__ __forceinline__ float scale_of(Scale own) const {
    return NESTED ? __fadd_rn(__fmul_rn(__ldg(code2 + own.bits), own.outer), __ldg(offset)) : __uint_as_float(own.bits);
  }
  // In front of a block's sums: the two codes of each byte in fp16, a copy for each lane so that no two lanes meet in a bank, then zeros,
  // then each warp's x, 32 columns on 72 bytes for the same reason. Needs a barrier before it is read.
  static constexpr int CODE_WORDS = 256 * 32, ZERO_WORDS = 20, X_WORDS = 8 * 18;
  static __device__ __forceinline__ void prepare(u32* shared, const float* code) {
    const int lane = threadIdx.x & 31;
    for (int byte = threadIdx.x; byte < 256; byte += blockDim.x) {
      const u32 two = two_halves(__ldg(code + (byte >> 4)), __ldg(code + (byte & 15)));
#pragma unroll
      for (int k = 0; k < 8; k++) *(uint4*)(shared + byte * 32 + ((k + lane) & 7) * 4) = make_uint4(two, two, two, two);
    }
    if (threadIdx.x < ZERO_WORDS) shared[CODE_WORDS + threadIdx.x] = 0;
  }
  static __device__ __forceinline__ float* behind(u32* shared) {
    return (float*)(shared + CODE_WORDS + ZERO_WORDS + (blockDim.x >> 5) * X_WORDS);
  }
};
// By tensor cores, codes times x in fp16, sums of 64 columns times their scale. x is fp16 times a power of two of the chunk: what that
// cannot hold is 2^-39 of the largest. Lane 4 g + t has of the rows g + 8 j the 32 columns from 32 t on in either half of the chunk;
// column n of the second matrix is x in the n-th quarter and zero elsewhere, but for columns of the other half, whose sums nobody reads.
template <int COUNT>
struct Asked {
  static constexpr int OWN = COUNT / 8;
  uint4 words[OWN][2], x;
  Expert::Scale scales[OWN];  // of the t-th quarter
  template <typename Row>
  __device__ __forceinline__ void ask(const Expert& expert, const u16* from, int width, int chunk, Row row) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, first = chunk * EXPERT_COLUMNS;
    // What lies behind a row is multiplied by zeros: the row's own words stand there.
    const int low = first + t * 32 < width ? first + t * 32 : first, high = first + 128 + t * 32 < width ? 64 : 0;
    const int quarter = first + t * 64 < width ? first + t * 64 : first;
#pragma unroll
    for (int j = 0; j < OWN; j++) {
      const u8* here = expert.weight + (((u32)row(g + 8 * j) * width + low) >> 1);
      words[j][0] = __ldcg((const uint4*)here), words[j][1] = __ldcg((const uint4*)(here + high));
    }
#pragma unroll
    for (int j = 0; j < OWN; j++) scales[j] = expert.scale_at(((u32)row(g + 8 * j) * width + quarter) >> 6);
    x = make_uint4(0, 0, 0, 0);
    if (first + lane * 8 < width) x = __ldcg((const uint4*)(from + first + lane * 8));
  }
  __device__ __forceinline__ void sums(const Expert& expert, u32* shared, float* to) const {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, warp = threadIdx.x >> 5;
    float v[8], most = 0.f;
    unpack_8(v, x, HALF);
#pragma unroll
    for (int k = 0; k < 8; k++) most = fmaxf(most, fabsf(v[k]));
    most = warp_max(most);
    // 2^14 over the largest, or 1 where that is no number; both are powers of two.
    const int exponent = max((int)(__float_as_uint(most) >> 23), 15);
    const bool is_plain = exponent == 255 || most == 0.f;
    const float up = is_plain ? 1.f : __uint_as_float((u32)(268 - exponent) << 23);
    const float down = is_plain ? 1.f : __uint_as_float((u32)(exponent - 14) << 23);
    u32* own = shared + Expert::CODE_WORDS + Expert::ZERO_WORDS + warp * Expert::X_WORDS;
    __syncwarp();
#pragma unroll
    for (int k = 0; k < 4; k += 2)
      *(uint2*)(own + g * 18 + t * 4 + k) =
          make_uint2(two_halves(v[2 * k] * up, v[2 * k + 1] * up), two_halves(v[2 * k + 2] * up, v[2 * k + 3] * up));
    __syncwarp();
    const bool is_mine = g < 4 && (t >> 1) == (g & 1);
    const u32* given = is_mine ? own + ((g >> 1) * 4 + t) * 18 : shared + Expert::CODE_WORDS;
    float c[OWN / 2][2][4] = {};
#pragma unroll
    for (int m = 0; m < 8; m++) {
      const uint2 b = *(const uint2*)(given + 2 * m);
      const auto codes = [&](const uint4& four, int byte) {
        const u32 word = byte < 4 ? four.x : byte < 8 ? four.y : byte < 12 ? four.z : four.w;
        const u32 shifted = byte % 4 ? word >> (8 * (byte % 4) - 7) : word << 7;
        return *(const u32*)((const u8*)shared + ((shifted & 0x7f80u) | (lane * 4)));
      };
#pragma unroll
      for (int j = 0; j < OWN; j += 2)
#pragma unroll
        for (int p = 0; p < 2; p++)
          mma_m16n8k16(c[j / 2][p], codes(words[j][p], 2 * m), codes(words[j + 1][p], 2 * m), codes(words[j][p], 2 * m + 1),
                       codes(words[j + 1][p], 2 * m + 1), b.x, b.y);
    }
#pragma unroll
    for (int j = 0; j < OWN; j++) {
      const float* pair = c[j / 2][0] + 2 * (j & 1);
      const float a = t ? pair[4] : pair[0], b = t ? pair[5] : pair[1], factor = expert.scale_of(scales[j]);
      const float even = __shfl_sync(ALL, factor, (lane & 28) | (2 * t & 3)), odd = __shfl_sync(ALL, factor, (lane & 28) | (2 * t + 1 & 3));
      float sum = fmaf(a, even, b * odd);
      sum += __shfl_xor_sync(ALL, sum, 1);
      if (t == 0) to[g + 8 * j] = sum * down;
    }
  }
};
#endif
