// Gemma 4's mobile weights: BITS of 2, 4 or 8 a value as its file has them, the first in the lowest bits, plus half the range; or signed
// bytes. A float32 scale for each GROUP values of a row (0: the whole row), rounded to the type of x, which is fp16 (SCALE_HALF) or bf16.
// `offset` of a member: the static scales of its inputs and of its outputs, 0 for no rounding; inputs are those of the first member.
#if FORMAT == 4
// As torch rounds in a type of 16 bits: the quotient, the whole number, the product. NaN stays.
__device__ __forceinline__ float rounded_8(float v, float scale, int half) {
  const float q = rintf(rounded(__fdiv_rn(v, scale), half));
  return scale == 0.f || q != q ? v : rounded(fminf(fmaxf(q, -128.f), 127.f) * scale, half);
}
template <>
struct Lanes<2> {
  typedef uint2 Lane;
  template <bool FEW, typename From>
  static __device__ __forceinline__ Lane lane(const u8* p, int) {
    return FEW ? From::read_8(p) : make_uint2(From::read_4(p), From::read_4(p + 16));
  }
  // Values 0 to 3 and 8 to 11 of 16, then the others.
  static __device__ __forceinline__ u32 word(const Lane& v, int i) { return (i < 2 ? v.x : v.y) >> (8 * (i & 1)); }
};
#ifdef WHOLE
struct Format : Values<BITS> {
  static constexpr bool ROUNDS_INPUT = true;
  template <typename Word, typename Z>
  static __device__ __forceinline__ u32 pair(Word word, int k, u32, const Z&, int) {
    if constexpr (BITS == 8)
      return two_bytes(word.x, word.y, k);
    else if constexpr (BITS == 4)
      return two_nibbles(k < 2 ? word : word >> 8, k & 1);
    else
      return halves_add((word >> (2 * k) & 0x00030003u) | 0x64006400u, 0xe402e402u);
  }
  static __device__ __forceinline__ float rounded_to_8(float v, float scale) { return rounded_8(v, scale, HALF); }
  static __device__ __forceinline__ float static_scale(const float* scales, int which) {
    return scales ? rounded(__ldg(scales + which), HALF) : 0.f;
  }
  struct Four : FourOf<float, 0> {
    __device__ __forceinline__ void ask(Stored from, int m, int row, int, int, int) { found[0] = __ldg((const float*)of(from.scale, m) + row); }
    __device__ __forceinline__ float4 all(Stored) {
      const float v = rounded(found[0], HALF);
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
template <>
struct Eights<2> {
  typedef u32 Word;
  static __device__ __forceinline__ Word word_at(const u8* packed, i64 at) { return __ldcg((const u16*)packed + at / 8); }
};
struct One {
  static constexpr bool IS_CAST = false;
  typedef float Scale;
  template <typename Word>
  static __device__ __forceinline__ float one(Word word, int i, Scale scale) {
    if constexpr (BITS == 8) return byte_value(word.x, word.y, i) * scale;
    else return less(word >> (BITS * i) & ((1 << BITS) - 1), 8388608.f + (1 << (BITS - 1))) * scale;
  }
};
template <bool>
struct Unpacked : EightOf<One>, Eights<BITS> {
  const void* scales;
  u32 each;
  __device__ __forceinline__ Unpacked(const void* scale, const void*, const float*, const float*, const float*, int width, int)
      : scales(scale), each((GROUP ? GROUP : width) / 8) {}
  __device__ __forceinline__ float scale_at(i64 at) const { return row_scale(scales, (at >> 3) / each); }
};
// The scale of a row is read as it is needed.
struct Many : PiecesOf<BITS, One> {
  using PiecesOf::PiecesOf;
  static __device__ __forceinline__ void words(Word* to, uint4 v, int high, const u8* scales, int row, int piece) {
    const uint4 own = BITS == 2 ? make_uint4(v.x, v.x >> 16, v.y, v.y >> 16) : v;
    PiecesOf::words(to, own, high, scales, row, piece);
  }
  __device__ __forceinline__ float outer(Member own, int row, int, int, int) const { return row_scale(own.scale, row); }
};
#endif
