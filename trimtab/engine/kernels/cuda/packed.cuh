// What stored forms of weights share. One header for each format stands behind this one, chosen by FORMAT; the products know no other.
// Names of options (BITS, GROUP, ROWS, ...) are no names here: W is the bits of a value.
#ifndef FORMAT
#define FORMAT 0  // 0: nf4.cuh, 1: int4.cuh, 2: fp8.cuh, 3: ggml.cuh, 4: mobile.cuh, 5: fp4.cuh, 16: values of 16 bits, of experts
#endif
#ifndef NESTED
#define NESTED 0
#endif
#ifndef HALF
#define HALF 0
#endif
// What the sources ask of a layout. IS_CODED: values are codes of a table, two in a byte, and each 64 of them have a scale wherever a row
// begins; else scales are of rows. IS_FIRST: kernels that know no weights are compiled with this layout alone. UNPACKED_BY: what `Unpacked`
// takes, log2 of the values with a scale and of scales with one of theirs; else the width of a row.
// EXPERT_ROWS: of a block of experts.cu, of either stack. EXPERT_COLUMNS: of a row that a warp has there at a time.
#define EXPERT_ROWS (FORMAT == 16 ? 8 : 16)
#define EXPERT_COLUMNS 256
#if FORMAT == 0
#define IS_CODED 1
#define IS_FIRST 1
#define UNPACKED_BY(width) 6, 8
#else
#define IS_CODED 0
#define IS_FIRST 0
#define UNPACKED_BY(width) width, 0
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
// One weight to a product of many rows (rows.cu). second: scales of scales, or zero points.
struct Member {
  const u8* weight;
  const void *scale, *second;
  const float* offset;
  const u16* bias;
  int rows;
};

// Values -----------------------------------------------------------------------------------------------------------------------------
// A value in the weight's own type where the model computes in another. SCALE_HALF: the own one is fp16, not bf16. WIDE_SCALE: it is the
// model's.
#ifdef SCALE_HALF
#ifndef WIDE_SCALE
#define WIDE_SCALE 0
#endif
__device__ __forceinline__ float as_weight(float v, int half) { return WIDE_SCALE || SCALE_HALF == half ? v : rounded(v, SCALE_HALF); }
#endif
// Of GROUP values of a row with a scale, 0: the whole row. The groups of a row, and the group of a column.
#ifdef GROUP
__device__ __forceinline__ int groups_of(int columns) { return GROUP ? (columns + GROUP - 1) / (GROUP ? GROUP : 1) : 1; }
template <typename Number>
__device__ __forceinline__ Number group_at(Number column) { return GROUP ? column / (GROUP ? GROUP : 1) : 0; }
#endif
// Four low or high halves of bytes less 8, as fp16: 1024 + q or 1024 + 16 q is an exponent and these bits.
__device__ __forceinline__ u32 two_nibbles(u32 w, bool is_high) {
  return is_high ? halves_fma((w & 0x00f000f0u) | 0x64006400u, 0x2c002c00u, 0xd480d480u)
                 : halves_add((w & 0x000f000fu) | 0x64006400u, 0xe408e408u);
}
// A value q of a few bits as float32: 2^23 + q is an exponent and these bits. least: 2^23 and what is taken from q.
__device__ __forceinline__ float less(u32 q, float least) { return __uint_as_float(0x4b000000u | q) - least; }
// Signed bytes 2 k and the next of eight as fp16, and one of them.
__device__ __forceinline__ u32 two_bytes(u32 low, u32 high, int k) {
  return halves_add(__byte_perm((k < 2 ? low : high) ^ 0x80808080u, 0x64646464u, k & 1 ? 0x4342 : 0x4140), 0xe480e480u);
}
__device__ __forceinline__ float byte_value(u32 low, u32 high, int i) { return (float)(signed char)(u8)((i < 4 ? low : high) >> (8 * (i & 3))); }

// x [n, columns] with the columns `index`: what a weight multiplies whose columns lie in another order. Grid: [n, columns / 1024].
#if IS_FIRST && !defined(WHOLE)
extern "C" __global__ void __launch_bounds__(256) in_order(
    const u16* x, int x_stride, const int* index, u16* out, int out_stride, int columns) {
  const int at = (blockIdx.y * 256 + threadIdx.x) * 4;
  let_next_start();
  const uint4 from = at < columns ? __ldg((const uint4*)(index + at)) : make_uint4(0, 0, 0, 0);
  wait_for_previous();
  if (at >= columns) return;
  const u16* row = x + (size_t)blockIdx.x * x_stride;
  const u32 a = __ldcg(row + from.x), b = __ldcg(row + from.y), c = __ldcg(row + from.z), d = __ldcg(row + from.w);
  *(uint2*)(out + (size_t)blockIdx.x * out_stride + at) = make_uint2(a | b << 16, c | d << 16);
}
#endif

// Products of few rows (matvec4.cu) -----------------------------------------------------------------------------------------------------
// Of formats whose scales multiply sums.
template <bool>
struct NoGroups {
  __device__ __forceinline__ float read(const float*, int, int) { return 0.f; }
};
// From memory that is read once, or from shared memory.
struct Once {
  static __device__ __forceinline__ uint4 read_16(const u8* p) { return streamed_16(p); }
  static __device__ __forceinline__ uint2 read_8(const u8* p) { return streamed_8(p); }
  static __device__ __forceinline__ u32 read_4(const u8* p) { return streamed_4(p); }
};
struct Shared {
  static __device__ __forceinline__ uint4 read_16(const u8* p) { return *(const uint4*)p; }
  static __device__ __forceinline__ uint2 read_8(const u8* p) { return *(const uint2*)p; }
  static __device__ __forceinline__ u32 read_4(const u8* p) { return *(const u32*)p; }
};
// What a lane has of a pair of blocks of 64 values in a row, four times 8 values. FEW: 32 neighbours, lanes 0 and 1 of the even block; else
// 16 of each block.
template <int W>
struct Lanes;
template <>
struct Lanes<4> {
  typedef uint4 Lane;
  template <bool FEW, typename From>
  static __device__ __forceinline__ Lane lane(const u8* p, int) {
    if constexpr (FEW) return From::read_16(p);
    const uint2 even = From::read_8(p), odd = From::read_8(p + 32);
    return make_uint4(even.x, even.y, odd.x, odd.y);
  }
  static __device__ __forceinline__ u32 word(const Lane& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
};
template <>
struct Lanes<8> {
  struct Lane {
    uint4 a, b;
  };
  template <bool FEW, typename From>
  static __device__ __forceinline__ Lane lane(const u8* p, int) { return {From::read_16(p), From::read_16(p + 64)}; }
  static __device__ __forceinline__ uint2 word(const Lane& v, int i) {
    const uint4 own = i < 2 ? v.a : v.b;
    return i & 1 ? make_uint2(own.z, own.w) : make_uint2(own.x, own.y);
  }
};
template <int W>
struct Values : Lanes<W> {
  static constexpr int BYTES = 8 * W, LANE_BYTES = 8 * W;              // of 64 values, and those of them that lanes share evenly
  static constexpr int PAD_FEW = 64, PAD = W == 8 ? 64 : 32;           // behind each row of a stage, against meeting in a bank
  static constexpr int FEW_ROWS = W == 8 ? 0 : 4;                      // of x, up to which a row of it has several columns
  static constexpr int SCALES = 1, QUADS = 1;  // of 64 values; of what is kept of scales, 16 bytes each, of 256
  static constexpr int FIRST_BYTES = 32768;    // of shared memory in front: A x, where there is no other room
  static constexpr bool HAS_TABLE = false, HAS_ZERO = false, HAS_GROUPS = false, ROUNDS_CHANGE = false, ROUNDS_INPUT = false;
  static constexpr bool IS_CROSSED = W == 4, IS_CROSSED_WIDE = W == 2;
  static __device__ __forceinline__ float of_weight(float y, Stored, int) { return y; }  // a sum, with a scale that a whole weight has
  static __device__ __forceinline__ float rounded_to_8(float v, float) { return v; }
  static __device__ __forceinline__ float static_scale(const float*, int) { return 0.f; }
  // What a scale is, as `Four` gave it, and the zero point of its group less the one that `pair` takes away.
  static __device__ __forceinline__ float scale_of(float scale) { return scale; }
  static __device__ __forceinline__ float zero_of(float) { return 0.f; }
  template <bool FEW>
  using Groups = NoGroups<FEW>;
  // What a block has near before it needs it.
  struct Near {
    __device__ __forceinline__ void ask(Stored) {}
    __device__ __forceinline__ void keep() {}
  };
};
// Scales of a byte for 16 values each: that of group k of the two that a lane has of a pair of blocks. A lane's 32 neighbours (FEW) are
// groups 2 t and the next; or 16 of each block, t and 4 + t. own: of 256 values, of which this is pair `odd`.
template <bool FEW>
__device__ __forceinline__ u32 byte_of_16(uint4 own, int odd, int t, int k) {
  const u32 low = odd ? own.z : own.x, high = odd ? own.w : own.y;
  return FEW ? (t & 2 ? high : low) >> (16 * (t & 1) + 8 * k) : (k ? high : low) >> (8 * t);
}
// Four scales of a row at once: of groups of SIZE values (0: of the whole row).
template <typename Scale, int SIZE>
struct FourOf {
  static constexpr int FOUR = SIZE == 32 || SIZE == 64 ? 4 : SIZE == 128 ? 2 : 1;  // of four (32: two) blocks of 64
  Scale found[FOUR];
  __device__ __forceinline__ void none() {
#pragma unroll
    for (int i = 0; i < FOUR; i++) found[i] = 0;
  }
  static __device__ __forceinline__ int count(int first, int end) { return FOUR == 4 ? end - first : FOUR == 2 ? (end - first + 1) / 2 : 1; }
};
// 16 bytes of scales as they are.
struct FourWords {
  uint4 found;
  __device__ __forceinline__ void none() { found = make_uint4(0, 0, 0, 0); }
  __device__ __forceinline__ void read(const u32* own, int count) {
#if WHOLE
    found = __ldg((const uint4*)own);
#else
    found.x = __ldg(own), found.y = count > 1 ? __ldg(own + 1) : 0;
    found.z = count > 2 ? __ldg(own + 2) : 0, found.w = count > 3 ? __ldg(own + 3) : 0;
#endif
  }
  __device__ __forceinline__ float4 all(Stored) {
    return make_float4(__uint_as_float(found.x), __uint_as_float(found.y), __uint_as_float(found.z), __uint_as_float(found.w));
  }
};

// Weights as they are unpacked into memory (prompt.cu, experts.cu) -----------------------------------------------------------------------
// Eight neighbours a thread, exact in float32, rounded where they are stored.
template <int W>
struct Eights;
template <>
struct Eights<4> {
  typedef u32 Word;
  static __device__ __forceinline__ Word word_at(const u8* packed, i64 at) { return __ldcg((const u32*)packed + at / 8); }
};
template <>
struct Eights<8> {
  typedef uint2 Word;
  static __device__ __forceinline__ Word word_at(const u8* packed, i64 at) { return __ldcg((const uint2*)(packed + at)); }
};
// One: `Scale`, `one` of (a word, which of eight, a scale), and IS_CAST: whether it is rounded to the weight's own type.
template <typename One, typename Word>
__device__ __forceinline__ float cast_one(Word word, int i, const typename One::Scale& scale, int half) {
#ifdef SCALE_HALF
  if constexpr (One::IS_CAST) return as_weight(One::one(word, i, scale), half);
#endif
  return One::one(word, i, scale);
}
template <typename One>
struct EightOf {
  typedef typename One::Scale Scale;
  template <typename Word>
  __device__ __forceinline__ void values(float* v, Word word, Scale scale, int half) const {
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = cast_one<One>(word, i, scale, half);
  }
};
// Of a model that is not packed, for experts.
#if FORMAT == 16
template <bool>
struct Unpacked {
  typedef uint4 Word;
  struct Scale {};
  __device__ __forceinline__ Unpacked(const void*, const void*, const float*, const float*, const float*, int, int) {}
  static __device__ __forceinline__ Word word_at(const u8* values, i64 at) { return __ldcg((const uint4*)(values + at * 2)); }
  __device__ __forceinline__ Scale scale_at(i64) const { return {}; }
  __device__ __forceinline__ void values(float* v, Word word, Scale, int half) const { unpack_8(v, word, half); }
};
#endif
// A word that no other block reads soon.
template <typename Own>
__device__ __forceinline__ auto word_once(const u8* packed, i64 at) {
#if FORMAT == 16
  return streamed_16(packed + at * 2);
#else
  return Own::word_at(packed, at);
#endif
}

// Products of many rows (rows.cu) ----------------------------------------------------------------------------------------------------
// Of COLUMNS columns of a row at a time, as a stage has them. A lane has 32 neighbours (of 8 bits 16), piece `piece` of 8. shared: from a
// multiple of 2048 on, what is in front of the stages.
template <int W>
struct Pieces {
  static constexpr int COLUMNS = W == 8 ? 128 : 256, FRONT = 16 * 32 + 256;  // floats in front of the stages
  static constexpr int PIECE_BYTES = W == 2 ? 8 : 16, CHUNK_BYTES = 8 * PIECE_BYTES, ROW_BYTES = 0;  // of scales of a row in a stage
  typedef typename Eights<W>::Word Word;  // of eight values
  typedef float Scale;
  __device__ __forceinline__ Pieces() {}
  __device__ __forceinline__ Pieces(const Member&, float*) {}
  __device__ __forceinline__ void prepare(const float*, const float*) const {}
  __device__ __forceinline__ void copy_scales(u8*, int, Member, int, int, int) const {}
  // The member of the next pieces.
  __device__ __forceinline__ void begin(Member) const {}
  // Of a scale: asked for before the stage is there.
  __device__ __forceinline__ float outer(Member, int, int, int, int) const { return 0.f; }
  __device__ __forceinline__ Scale scale(const u8*, int, int, float outer) const { return outer; }
  static __device__ __forceinline__ int place(int piece) { return piece * PIECE_BYTES; }
  // A lane's words, as the banks of x want them.
  static __device__ __forceinline__ void words(Word* to, uint4 v, int high, const u8*, int, int) {
    if constexpr (W == 8)
      to[0] = high ? make_uint2(v.z, v.w) : make_uint2(v.x, v.y), to[1] = high ? make_uint2(v.x, v.y) : make_uint2(v.z, v.w);
    else
      to[0] = high ? v.y : v.x, to[1] = high ? v.x : v.y, to[2] = high ? v.w : v.z, to[3] = high ? v.z : v.w;
  }
};
// Two of eight values, k of four.
template <int W, typename One>
struct PiecesOf : Pieces<W> {
  using Pieces<W>::Pieces;
  typedef typename One::Scale Scale;
  template <typename Word>
  __device__ __forceinline__ void values(float& v0, float& v1, Word word, int k, const Scale& scale, int half) const {
    v0 = cast_one<One>(word, 2 * k, scale, half), v1 = cast_one<One>(word, 2 * k + 1, scale, half);
  }
};
