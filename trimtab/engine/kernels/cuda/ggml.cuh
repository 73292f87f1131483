// ggml's blocks as engine/formats/ggml.py arranges them. TYPE: 40 and 41 Q4_0 and Q4_1, 80 Q8_0, 4, 5 and 6 Q4_K, Q5_K and Q6_K. Bytes of
// 128 values: 64 of 4 bits, two in a byte, the first in the high half; then the bits above, 2 (Q6_K) or 1 (Q5_K) of a value, see `above`.
// Q8_0: signed bytes. Scales: of 256 values 16 bytes; 32 in Q4_1; Q6_K has a scale more in `second`. SCALE_HALF: the weight's own type is
// fp16, not bf16.
#if FORMAT == 3
#define IS_K (TYPE < 10)
#define BITS_ABOVE (TYPE == 6 ? 2 : TYPE == 5 ? 1 : 0)
#define WIDTH (TYPE == 80 ? 8 : 4)
#define PAIR_OF_BLOCKS (TYPE == 80 ? 128 : 64 + 16 * BITS_ABOVE)  // bytes of 128 values
// The scale and the minimum, 6 bits each, of group j of 8 of a Q4_K or Q5_K block: its bytes 4 to 15 as three words.
__device__ __forceinline__ void six_bits(u32& scale, u32& minimum, u32 low, u32 middle, u32 high, int j) {
  const int shift = 8 * (j & 3);
  low >>= shift, middle >>= shift, high >>= shift;
  scale = j < 4 ? low & 63 : (high & 15) | (low >> 2 & 48);
  minimum = j < 4 ? middle & 63 : (high >> 4 & 15) | (middle >> 2 & 48);
}
// The same of group i of half `odd` of a block, as fp16: the scale and, in the high half, the minimum.
__device__ __forceinline__ u32 six_bits(uint4 own, int odd, int i) {
  const u32 two = __byte_perm(own.y, own.z, i * 0x1111 + 0x4400), high = __byte_perm(own.w, 0, i * 0x1111);
  const u32 later = (high & 15u) | (high >> 4 & 0x000f0000u) | (two >> 2 & 0x00300030u);
  return halves_add((odd ? later : two & 0x003f003fu) | 0x64006400u, 0xe400e400u);
}
// The bits above of values k and k + 4 of eight, from bit `to` of either half on. bits: of values 0 to 3 and 4 to 7, from the beginning of
// either half on.
__device__ __forceinline__ u32 above(u32 bits, int k, int to) {
  const int at = BITS_ABOVE * k;
  return (at < to ? bits << (to - at) : bits >> (at - to)) & ((BITS_ABOVE == 2 ? 0x00030003u : 0x00010001u) << to);
}
__device__ __forceinline__ int above_one(u32 bits, int i) {
  return (int)(bits >> (BITS_ABOVE * (i & 3) + (i & 4 ? 16 : 0)) & ((1 << BITS_ABOVE) - 1)) << 4;
}
// Eight values with their bits above, and the parts of a word of either kind.
struct WithAbove {
  u32 low, above;
};
__device__ __forceinline__ u32 low_of(u32 word) { return word; }
__device__ __forceinline__ u32 low_of(WithAbove word) { return word.low; }
template <typename Word>
__device__ __forceinline__ u32 above_of(Word) { return 0; }
__device__ __forceinline__ u32 above_of(WithAbove word) { return word.above; }
// Of one value: q a - b in float32, where the products are exact.
struct Group {
  float a, b;
};
#define LEAST (TYPE == 40 ? 8.f : TYPE == 6 ? 32.f : 0.f)
__device__ __forceinline__ float value_of(float q, Group group) { return fmaf(q - LEAST, group.a, -group.b); }
// Group j of 32 values (Q6_K: of 16) in 256. scales: of the 256; second: their scale (Q6_K).
__device__ __forceinline__ Group group_of(const u8* scales, u16 second, int j) {
#if IS_K && TYPE != 6
  const u32* words = (const u32*)scales;
  u32 scale, minimum;
  six_bits(scale, minimum, words[1], words[2], words[3], j);
  return {from_half((u16)words[0]) * (float)scale, from_half((u16)(words[0] >> 16)) * (float)minimum};
#elif TYPE == 6
  return {from_half(second) * (float)(signed char)scales[j], 0.f};
#elif TYPE == 41
  const u32 both = *((const u32*)scales + j);
  return {from_half((u16)both), -from_half((u16)(both >> 16))};
#else
  return {from_half(*((const u16*)scales + j)), 0.f};
#endif
}
#ifdef WHOLE
struct Format : Values<WIDTH> {
  static constexpr int BYTES = PAIR_OF_BLOCKS / 2, QUADS = TYPE == 6 || TYPE == 41 ? 2 : 1;
  static constexpr bool HAS_GROUPS = true;
#if BITS_ABOVE
  // The bits above are a word for 16 values (Q6_K) or 32 (Q5_K).
  struct Lane {
    uint4 low;
    uint2 above;
  };
  template <bool FEW, typename From>
  static __device__ __forceinline__ Lane lane(const u8* p, int t) {
    const uint4 low = Values::lane<FEW, From>(p, t);
    const u8* own = p - t * (FEW ? 16 : 8) + 64;
    if constexpr (FEW && BITS_ABOVE == 2) return {low, From::read_8(own + t * 8)};
    if constexpr (BITS_ABOVE == 2) return {low, make_uint2(From::read_4(own + t * 4), From::read_4(own + 16 + t * 4))};
    const int at = FEW ? t * 4 : (t >> 1) * 4, shift = FEW ? 0 : 8 * (t & 1);
    const u32 bits = From::read_4(own + at);
    return {low, make_uint2(bits >> shift, FEW ? bits >> 8 : From::read_4(own + 8 + at) >> shift)};
  }
  static __device__ __forceinline__ WithAbove word(const Lane& v, int i) {
    const u32 bits = i < 2 ? v.above.x : v.above.y;
    return {Values::word(v.low, i), i & 1 ? bits >> (4 * BITS_ABOVE) : bits};
  }
#endif
  // Of a lane's values: each is (q - LEAST) a + b as fp16, rounded once, and then times `read`'s float32. Two groups where a lane has values
  // of two. Q4_K and Q5_K: a is the scale of 6 bits, b the minimum of 6 bits in units of the block's scale; the other way round where that
  // scale is almost nothing against the minima's. Of these and Q6_K q is read as the fp16 number that its bits are, q 2^-24, or 2^-20 where
  // it is 4 bits higher, so that a is 2^10 (Q6_K: 2^8) times as large, `high` 2^6 (2^4), and what they give 2^-14 (2^-16) of the value.
  template <bool FEW>
  struct Groups {
    u32 a[2], b[2], high[2];
    // from: of the 256 values of a row, of which this is pair `odd`.
    __device__ __forceinline__ float read(const float* from, int odd, int t) {
      const uint4 own = *(const uint4*)from;
#if IS_K && TYPE != 6
      const float d = from_half((u16)own.x), least = from_half((u16)(own.x >> 16));
      const bool is_usual = fabsf(least) <= 64.f * fabsf(d);
      const float unit = is_usual ? d : least, ratio = unit == 0.f ? 0.f : __fdividef(is_usual ? least : d, unit);
      const float of_scale = is_usual ? 1024.f : ratio * 1024.f, of_minimum = is_usual ? ratio * -0x1p-14f : -0x1p-14f;
#pragma unroll
      for (int k = 0; k < (FEW ? 1 : 2); k++) {
        const u32 both = six_bits(own, odd, FEW ? t : 2 * k + (t >> 1));
        const float one = from_half((u16)both) * of_scale, other = from_half((u16)(both >> 16)) * of_minimum;
        a[k] = two_halves(one, one), b[k] = two_halves(other, other), high[k] = halves_fma(a[k], 0x2c002c00u, 0);
      }
      if (FEW) a[1] = a[0], b[1] = b[0], high[1] = high[0];
      return unit * 0x1p14f;
#elif TYPE == 6
#pragma unroll
      for (int k = 0; k < 2; k++) {
        const float scale = (float)(signed char)(u8)byte_of_16<FEW>(own, odd, t, k);
        a[k] = two_halves(scale * 256.f, scale * 256.f), b[k] = two_halves(scale * -0x1p-11f, scale * -0x1p-11f);
        high[k] = halves_fma(a[k], 0x2c002c00u, 0);
      }
      return from_half((u16)__float_as_uint(from[4])) * 0x1p16f;
#elif TYPE == 41
      const uint4 mine = odd ? *(const uint4*)(from + 4) : own;
#pragma unroll
      for (int k = 0; k < 2; k++) {
        const int j = FEW ? t : 2 * k + (t >> 1);
        const u32 both = j == 0 ? mine.x : j == 1 ? mine.y : j == 2 ? mine.z : mine.w;
        a[k] = __byte_perm(both, 0, 0x1010), b[k] = __byte_perm(both, 0, 0x3232);
      }
      return 1.f;
#else
#pragma unroll
      for (int k = 0; k < 2; k++) {
        const int j = FEW ? t : 2 * k + (t >> 1);
        const u32 two = j < 2 ? (odd ? own.z : own.x) : (odd ? own.w : own.y);
        a[k] = __byte_perm(two, 0, j & 1 ? 0x3232 : 0x1010), b[k] = 0;
      }
      return 1.f;
#endif
    }
  };
  // Values k and k + 4 of eight (Q8_0: 2 k and the next), q of four.
  template <typename Word, typename Z>
  static __device__ __forceinline__ u32 pair(Word word, int k, u32, const Z& z, int q) {
    const u32 a = z.a[q >> 1], b = z.b[q >> 1];
#if TYPE == 80
    return halves_fma(two_bytes(word.x, word.y, k), a, b);
#elif IS_K
    u32 bits = (k < 2 ? low_of(word) : low_of(word) >> 8) & (k & 1 ? 0x000f000fu : 0x00f000f0u);
    if constexpr (BITS_ABOVE > 0) bits |= above(above_of(word), k, k & 1 ? 4 : 8);
    return halves_fma(bits, k & 1 ? a : z.high[q >> 1], b);
#else
    const u32 w = k < 2 ? word : word >> 8;
    return halves_fma(halves_add(((k & 1 ? w : w >> 4) & 0x000f000fu) | 0x64006400u, TYPE == 40 ? 0xe408e408u : 0xe400e400u), a, b);  // 1024 + q
#endif
  }
  // first: 4 QUADS for each 256 values.
  struct Four : FourWords {
    __device__ __forceinline__ void ask(Stored from, int m, int row, int blocks, int first, int end) {
      const u8* scale = (const u8*)of(from.scale, m);
#if TYPE == 6
      const size_t at = (size_t)row * (blocks / 4) + (first >> 3);
      if (first & 4)
        found.x = __ldg((const u16*)of(from.second, m) + at);
      else
        found = __ldg((const uint4*)scale + at);
#elif WHOLE
      found = __ldg((const uint4*)scale + (size_t)row * (blocks / 4) * QUADS + (first >> 2));
#else
      read((const u32*)scale + (size_t)row * blocks * QUADS + first, end - first);
#endif
    }
  };
};
#endif
struct One {
  static constexpr bool IS_CAST = true;
  typedef Group Scale;
  template <typename Word>
  static __device__ __forceinline__ float one(Word word, int i, Scale group) {
#if TYPE == 80
    return value_of(byte_value(word.x, word.y, i), group);
#else
    return value_of((float)((int)(low_of(word) >> (4 * (i ^ 1)) & 15) | above_one(above_of(word), i)), group);
#endif
  }
};
// width: of a row, whole groups.
template <bool>
struct Unpacked : EightOf<One>, Eights<WIDTH> {
  const u8* scale;
  const u16* second;
  __device__ __forceinline__ Unpacked(const void* scale, const void* second, const float*, const float*, const float*, int, int)
      : scale((const u8*)scale), second((const u16*)second) {}
#if BITS_ABOVE
  typedef WithAbove Word;
  static __device__ __forceinline__ Word word_at(const u8* packed, i64 at) {
    const u8* own = packed + (at >> 7) * PAIR_OF_BLOCKS;
    const int inside = (int)(at & 127), place = inside >> 3, each = 4 / BITS_ABOVE;  // eights of values that share a word of bits above
    const u32 bits = __ldcg((const u32*)(own + 64) + place / each);
    return {__ldcg((const u32*)(own + inside / 2)), bits >> (4 * BITS_ABOVE * (place % each))};
  }
#endif
  __device__ __forceinline__ Scale scale_at(i64 at) const {
    const i64 block = at >> 8;
#if TYPE == 6
    return group_of(scale + block * 16, __ldg(second + block), (int)(at >> 4 & 15));
#else
    return group_of(scale + block * (TYPE == 41 ? 32 : 16), 0, (int)(at >> 5 & 7));
#endif
  }
};
// In a stage the scales of 128 rows, then their bits above, then (Q6_K) a scale more.
struct Many : PiecesOf<WIDTH, One> {
  static constexpr int HEAD = TYPE == 41 ? 32 : TYPE == 80 ? 8 : 16, ABOVE = BITS_ABOVE * 32, OWN = TYPE == 6 ? 2 : 1;
  static constexpr int ROW_BYTES = HEAD + ABOVE + (TYPE == 6 ? 2 : 0), CHUNK_BYTES = 128 + ABOVE;
  using PiecesOf::PiecesOf;
  struct Scale {
    Group group[OWN];
  };
  static __device__ __forceinline__ int place(int piece) { return piece * 16 + (piece & 4 ? ABOVE / 2 : 0); }
#if BITS_ABOVE
  typedef WithAbove Word;  // of Q6_K bit 15 above says which of two groups it is of
  static __device__ __forceinline__ void words(Word* to, uint4 v, int high, const u8* scales, int row, int piece) {
    u32 low[4];
    PiecesOf::words(low, v, high, scales, row, piece);
    const u32* own = (const u32*)(scales + 128 * HEAD + row * ABOVE + piece * (ABOVE / 8));
    const u32 bits[2] = {own[0], BITS_ABOVE == 2 ? own[1] : own[0] >> 8};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u32 both = bits[i >> 1] >> (4 * BITS_ABOVE * ((high ? i ^ 1 : i) & 1));
      to[i] = {low[i], BITS_ABOVE == 2 ? (both & 0x00ff00ffu) | (u32)(i >> 1) << 15 : both};
    }
  }
#endif
  __device__ __forceinline__ void copy_scales(u8* to, int place, Member own, int row, int columns, int chunk) const {
    const size_t block = (size_t)row * (columns / COLUMNS) + chunk;
    copy_few<HEAD>(to + place * HEAD, (const u8*)own.scale + block * HEAD);
    if constexpr (ABOVE > 0) {
      const u8* from = own.weight + block * CHUNK_BYTES;
      u8* above = to + 128 * HEAD + place * ABOVE;
      copy_few<ABOVE / 2>(above, from + 64), copy_few<ABOVE / 2>(above + ABOVE / 2, from + 128 + ABOVE / 2);
    }
    if constexpr (TYPE == 6) copy_few<2>(to + 128 * (HEAD + ABOVE) + place * 2, (const u16*)own.second + block);
  }
  __device__ __forceinline__ Scale scale(const u8* scales, int place, int piece, float) const {
    const u16 second = TYPE == 6 ? *((const u16*)(scales + 128 * (HEAD + ABOVE)) + place) : 0;
    Scale found;
#pragma unroll
    for (int i = 0; i < OWN; i++) found.group[i] = group_of(scales + place * HEAD, second, TYPE == 80 ? piece >> 1 : piece * OWN + i);
    return found;
  }
  __device__ __forceinline__ void values(float& v0, float& v1, Word word, int k, const Scale& scale, int half) const {
    PiecesOf::values(v0, v1, word, k, TYPE == 6 && above_of(word) & 0x8000u ? scale.group[OWN - 1] : scale.group[0], half);
  }
};
#endif
