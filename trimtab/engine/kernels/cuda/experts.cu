// Mixtures of experts of few rows: gate, up and their product, then down, weights and sum, with adapters of rows inside. Read
// engine/kernels/experts.py first: it says what is computed and where it rounds. values.cuh and the formats' headers stand in front.
//
// A pair is a row and one of its K experts. Compiled for one stack's format; FORMAT 16: not packed. HALF: 1 fp16, 0 bf16. A warp has a
// chunk of 256 columns of some outputs and asks for all of it before it uses the first word. Chunks are added in shared memory, in
// their order, so a row's bits depend on nothing but its own inputs. Outputs of a block divide 64, those of FORMAT 16 divide 8.
#ifndef HALF
#define HALF 0
#endif
#define MOST_THREADS 768
#define CHUNK 256

// One stack as it lies in memory; *_bytes: of one expert.
#define STACK_PARAMETERS                                                                                                       \
  const u8 *weight, i64 weight_bytes, const u8 *scale, i64 scale_bytes, const u8 *second, i64 second_bytes, const float *offset, \
      const float *code2, const float *code
#define STACK_GIVEN {weight, scale, second, offset, code2, weight_bytes, scale_bytes, second_bytes}
struct Stack {
  const u8 *weight, *scale, *second;
  const float *offset, *code2;
  i64 weight_bytes, scale_bytes, second_bytes;
};

// One expert of a stack, and what a warp asked for of ROWS of its rows: `row(r)` [., width], in one chunk. `sums` writes the rows' sums.
#if FORMAT == 0
struct Expert {
  static constexpr int UP_ROWS = 32, DOWN_ROWS = 16;
  const u8 *weight, *scale;
  const float *outer, *code2;
  float offset;
  __device__ __forceinline__ Expert(const Stack& s, int expert, int)
      : weight(s.weight + expert * s.weight_bytes), scale(s.scale + expert * s.scale_bytes),
        outer((const float*)(s.second + expert * s.second_bytes)), code2(s.code2), offset(NESTED ? __ldg(s.offset + expert) : 0.f) {}
  __device__ __forceinline__ float scale_at(i64 block) const {
    if constexpr (!NESTED) return __ldg((const float*)scale + block);
    return __fadd_rn(__fmul_rn(__ldg(code2 + __ldg(scale + block)), __ldg(outer + (block >> 8))), offset);
  }
};
// The two codes of each byte in fp16, a copy for each lane: no two lanes meet in a bank. Needs a barrier before it is read.
__device__ __forceinline__ const u8* table_of(const float* code) {
  __shared__ __align__(16) u32 table[256 * 32];
  const int lane = threadIdx.x & 31;
  for (int byte = threadIdx.x; byte < 256; byte += blockDim.x) {
    const u32 two = two_halves(__ldg(code + (byte >> 4)), __ldg(code + (byte & 15)));
#pragma unroll
    for (int k = 0; k < 8; k++) *(uint4*)(table + byte * 32 + ((k + lane) & 7) * 4) = make_uint4(two, two, two, two);
  }
  return (const u8*)table;
}
// By tensor cores, codes times x in fp16, sums of 64 columns times their scale. x is fp16 times a power of two of the chunk: what that
// cannot hold is 2^-39 of the largest. Lane 4 g + t has of the rows g + 8 j the 32 columns from 32 t on in either half of the chunk;
// column n of the second matrix is x in the n-th quarter and zero elsewhere, but for columns of the other half, whose sums nobody reads.
template <int ROWS>
struct Asked {
  static constexpr int OWN = ROWS / 8;
  uint4 words[OWN][2], x[4];
  float scales[OWN][2];
  template <typename Row>
  __device__ __forceinline__ void ask(const Expert& expert, const u16* from, int width, int chunk, Row row) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, first = chunk * CHUNK;
#pragma unroll
    for (int j = 0; j < OWN; j++)
#pragma unroll
      for (int p = 0; p < 2; p++) {
        const int column = first + p * 128 + t * 32;
        words[j][p] = make_uint4(0, 0, 0, 0);
        if (column < width) words[j][p] = streamed_16(expert.weight + (((i64)row(g + 8 * j) * width + column) >> 1));
      }
#pragma unroll
    for (int j = 0; j < OWN; j++)
#pragma unroll
      for (int s = 0; s < 2; s++) {
        const int column = first + t * 128 + s * 64;
        scales[j][s] = 0.f;
        if (t < 2 && column < width) scales[j][s] = expert.scale_at(((i64)row(g + 8 * j) * width + column) >> 6);
      }
    const int column = first + (g >> 1) * 128 + t * 32;
    const bool is_mine = g < 4 && (t >> 1) == (g & 1) && column < width;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      x[i] = make_uint4(0, 0, 0, 0);
      if (is_mine) x[i] = __ldcg((const uint4*)(from + column + 8 * i));
    }
  }
  __device__ __forceinline__ void sums(const Expert&, const u8* table, float* to) const {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    u32 halves[16];
    float most = 0.f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float v[8];
      unpack_8(v, x[i], HALF);
#pragma unroll
      for (int k = 0; k < 8; k++) most = fmaxf(most, fabsf(v[k]));
    }
    most = warp_max(most);
    // 2^14 over the largest, or 1 where that is no number; both are powers of two.
    const int exponent = max((int)(__float_as_uint(most) >> 23), 15);
    const bool is_plain = exponent == 255 || most == 0.f;
    const float up = is_plain ? 1.f : __uint_as_float((u32)(268 - exponent) << 23);
    const float down = is_plain ? 1.f : __uint_as_float((u32)(exponent - 14) << 23);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float v[8];
      unpack_8(v, x[i], HALF);
#pragma unroll
      for (int k = 0; k < 4; k++) halves[4 * i + k] = two_halves(v[2 * k] * up, v[2 * k + 1] * up);
    }
    const auto codes = [&](const uint4& own, int byte) {
      const u32 word = byte < 4 ? own.x : byte < 8 ? own.y : byte < 12 ? own.z : own.w;
      const u32 shifted = byte % 4 ? word >> (8 * (byte % 4) - 7) : word << 7;
      return *(const u32*)(table + ((shifted & 0x7f80u) | (lane * 4)));
    };
#pragma unroll
    for (int j = 0; j < OWN; j += 2) {
      float c[2][4] = {};
#pragma unroll
      for (int p = 0; p < 2; p++)
#pragma unroll
        for (int m = 0; m < 8; m++)
          mma_m16n8k16(c[p], codes(words[j][p], 2 * m), codes(words[j + 1][p], 2 * m), codes(words[j][p], 2 * m + 1),
                       codes(words[j + 1][p], 2 * m + 1), halves[2 * m], halves[2 * m + 1]);
#pragma unroll
      for (int k = 0; k < 2; k++) {
        const float a = t ? c[1][2 * k] : c[0][2 * k], b = t ? c[1][2 * k + 1] : c[0][2 * k + 1];
        float sum = fmaf(a, scales[j + k][0], b * scales[j + k][1]);
        sum += __shfl_xor_sync(ALL, sum, 1);
        if (t == 0) to[g + 8 * (j + k)] = sum * down;
      }
    }
  }
};
#else
#if FORMAT == 16
struct Expert {
  typedef uint4 Word;
  struct Scale {};
  static constexpr int UP_ROWS = 8, DOWN_ROWS = 8;
  const u8* weight;
  __device__ __forceinline__ Expert(const Stack& s, int expert, int) : weight(s.weight + expert * s.weight_bytes) {}
  __device__ __forceinline__ Word word_at(i64 at) const { return streamed_16(weight + at * 2); }
  __device__ __forceinline__ Scale scale_at(i64) const { return {}; }
  __device__ __forceinline__ void values(float* v, Word word, Scale) const { unpack_8(v, word, HALF); }
};
#else
struct Expert {
  typedef Unpacked<false> Own;
  typedef typename Own::Word Word;
  typedef typename Own::Scale Scale;
  static constexpr int UP_ROWS = 16, DOWN_ROWS = 16;
  const u8* weight;
  Own own;
  __device__ __forceinline__ Expert(const Stack& s, int expert, int width)
      : weight(s.weight + expert * s.weight_bytes),
        own(s.scale + expert * s.scale_bytes, s.second + expert * s.second_bytes, nullptr, nullptr, nullptr, width, 0) {}
  __device__ __forceinline__ Word word_at(i64 at) const { return Own::word_at(weight, at); }
  __device__ __forceinline__ Scale scale_at(i64 at) const { return own.scale_at(at); }
  __device__ __forceinline__ void values(float* v, Word word, Scale scale) const { own.values(v, word, scale, HALF); }
};
#endif
__device__ __forceinline__ const u8* table_of(const float*) { return nullptr; }
// v[r] of all lanes, added: lane l has that of r = l % ROWS.
template <int ROWS>
__device__ __forceinline__ float scattered_sums(float* v) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int d = ROWS / 2; d; d /= 2)
#pragma unroll
    for (int i = 0; i < d; i++) {
      const bool is_high = lane & d;
      const float kept = is_high ? v[i + d] : v[i], given = is_high ? v[i] : v[i + d];
      v[i] = kept + __shfl_xor_sync(ALL, given, d);
    }
#pragma unroll
  for (int d = 16; d >= ROWS; d /= 2) v[0] += __shfl_xor_sync(ALL, v[0], d);
  return v[0];
}
// Eight neighbours of each row a lane, in float32.
template <int ROWS>
struct Asked {
  typename Expert::Word words[ROWS];
  typename Expert::Scale scales[ROWS];
  uint4 x;
  template <typename Row>
  __device__ __forceinline__ void ask(const Expert& expert, const u16* from, int width, int chunk, Row row) {
    const int column = chunk * CHUNK + (threadIdx.x & 31) * 8;
    const bool is_there = column < width;
    x = make_uint4(0, 0, 0, 0);
    if (is_there) x = __ldcg((const uint4*)(from + column));
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      words[r] = {};
      if (is_there) words[r] = expert.word_at((i64)row(r) * width + column);
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      scales[r] = {};
      if (is_there) scales[r] = expert.scale_at((i64)row(r) * width + column);
    }
  }
  __device__ __forceinline__ void sums(const Expert& expert, const u8*, float* to) const {
    float given[8], sum[ROWS];
    unpack_8(given, x, HALF);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      float v[8];
      expert.values(v, words[r], scales[r]);
      sum[r] = 0.f;
#pragma unroll
      for (int i = 0; i < 8; i++) sum[r] = fmaf(v[i], given[i], sum[r]);
    }
    const float own = scattered_sums<ROWS>(sum);
    if ((threadIdx.x & 31) < ROWS) to[threadIdx.x & 31] = own;
  }
};
#endif

// The adapters of rows (`ExpertLora`); low: [pairs, members, largest_rank] float32. wide: A and B are float32, else of the model's type.
#define LORA_PARAMETERS                                                                                                       \
  const i64 *lora_ptr, const int *ranks, const float *factors, const int *outputs, const int *places, const int *row_slots, \
      int slots, int wide, float *low, int largest_rank
#define LORA_GIVEN {lora_ptr, ranks, outputs, places, row_slots, factors, slots, wide, low, largest_rank}
struct Lora {
  const i64* pointers;
  const int *ranks, *outputs, *places, *row_slots;
  const float* factors;
  int slots, wide;
  float* low;
  int largest_rank;
};
struct Adapter {
  const u8* values;  // of the expert, null without
  int rank, first, end;
  float factor;
};
// Of one member of a pair. is_B: whether its values are those of B, else of A [rank, width].
__device__ __forceinline__ Adapter adapter_of(const Lora& lora, int member, int row, i64 expert, int count, bool is_B, int width) {
  Adapter found = {nullptr, 0, 0, 0, 0.f};
  const int slot = __ldcg(lora.row_slots + row);
  if (slot < 0 || slot >= lora.slots || expert < 0 || expert >= count) return found;
  const int at = member * lora.slots + slot, place = __ldcg(lora.places + (size_t)at * count + expert);
  const u8* values = (const u8*)__ldcg(lora.pointers + at);
  if (!values || place < 0) return found;
  found.rank = __ldcg(lora.ranks + at), found.factor = __ldcg(lora.factors + at);
  found.first = __ldcg(lora.outputs + 2 * at), found.end = __ldcg(lora.outputs + 2 * at + 1);
  const i64 each = (i64)found.rank * (is_B ? found.end - found.first : width);
  found.values = values + place * each * (lora.wide ? 4 : 2);
  return found;
}
__device__ __forceinline__ float lora_value(const u8* values, i64 at, int wide) {
  return wide ? __ldcg((const float*)values + at) : value(__ldcg((const u16*)values + at), HALF);
}
__device__ __forceinline__ float lora_rounded(float v, int wide) { return wide ? v : rounded(v, HALF); }
// An adapter's change of one output, to every lane of a warp; 0 without.
__device__ __forceinline__ float change_of(const Lora& lora, const Adapter& adapter, const float* low, int output) {
  if (!adapter.values || output < adapter.first || output >= adapter.end) return 0.f;
  const i64 from = (i64)(output - adapter.first) * adapter.rank;
  float sum = 0.f;
#pragma unroll 2
  for (int r = threadIdx.x & 31; r < adapter.rank; r += 32) sum = fmaf(__ldcg(low + r), lora_value(adapter.values, from + r, lora.wide), sum);
  return lora_rounded(lora_rounded(warp_sum(sum), lora.wide) * adapter.factor, lora.wide);
}

// low = A x of every pair's adapter; places that nothing reads are left. members: from `member` on. is_pair: x has a row for each pair.
// Grid: [largest rank, pairs, members].
extern "C" __global__ void __launch_bounds__(256) experts_low(
    const u16* x, int x_stride, int width, int is_pair, const i64* index, int chosen, int count, int member, LORA_PARAMETERS) {
  const Lora lora = LORA_GIVEN;
  __shared__ float sums[8];
  const int r = blockIdx.x, pair = blockIdx.y, row = pair / chosen;
  let_next_start();
  wait_for_previous();
  const Adapter own = adapter_of(lora, member + blockIdx.z, row, __ldcg(index + pair), count, false, width);
  if (!own.values || r >= own.rank) return;
  x += (size_t)(is_pair ? pair : row) * x_stride;
  float sum = 0.f;
#pragma unroll 8
  for (int c = threadIdx.x; c < width; c += 256) sum = fmaf(value(__ldcg(x + c), HALF), lora_value(own.values, (i64)r * width + c, lora.wide), sum);
  sum = block_sum(sum, sums);
  if (threadIdx.x == 0) lora.low[((size_t)pair * gridDim.z + blockIdx.z) * largest_rank + r] = lora_rounded(sum, lora.wide);
}

// h [pairs, inner] = act(gate) up. Grid: [tiles of UP_ROWS / 2 outputs, pairs]. Shared: [chunks + 2, UP_ROWS] floats.
extern "C" __global__ void __launch_bounds__(MOST_THREADS) experts_gate_up(
    const u16* x, int x_stride, const i64* index, int chosen, int count, STACK_PARAMETERS, int inner, int width, int kind, u16* h,
    LORA_PARAMETERS) {
  constexpr int ROWS = Expert::UP_ROWS, OUTPUTS = ROWS / 2;
  extern __shared__ __align__(16) float parts[];
  const Stack stack = STACK_GIVEN;
  const Lora lora = LORA_GIVEN;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5, chunks = (width + CHUNK - 1) / CHUNK;
  const int pair = blockIdx.y, row = pair / chosen, first = blockIdx.x * OUTPUTS;
  let_next_start();
  const u8* table = table_of(code);
  wait_for_previous();
  const i64 number = __ldcg(index + pair);
  const Expert expert(stack, (int)(number < 0 ? 0 : number >= count ? count - 1 : number), width);
  const auto output = [&](int r) { return first + r + (r < OUTPUTS ? 0 : inner - OUTPUTS); };
  Asked<ROWS> asked;
  asked.ask(expert, x + (size_t)row * x_stride, width, warp, output);
  float* changes = parts + chunks * ROWS;
  if (low) {
#pragma unroll 1
    for (int m = 0; m < 2; m++) {
      const Adapter own = adapter_of(lora, m, row, number, count, true, width);
#pragma unroll 1
      for (int r = warp; r < ROWS; r += warps) {
        const float change = change_of(lora, own, low + ((size_t)pair * 2 + m) * largest_rank, output(r));
        if (lane == 0) changes[m * ROWS + r] = change;
      }
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int chunk = warp;;) {
    asked.sums(expert, table, parts + chunk * ROWS);
    chunk += warps;
    if (chunk >= chunks) break;
    asked.ask(expert, x + (size_t)row * x_stride, width, chunk, output);
  }
  __syncthreads();
  const int r = threadIdx.x;
  if (r >= OUTPUTS) return;
  float two[2] = {};
#pragma unroll
  for (int half = 0; half < 2; half++) {
    for (int chunk = 0; chunk < chunks; chunk++) two[half] += parts[chunk * ROWS + half * OUTPUTS + r];
    two[half] = rounded(two[half], HALF);
    for (int m = 0; m < 2 && low; m++) two[half] = rounded(two[half] + changes[m * ROWS + half * OUTPUTS + r], HALF);
  }
  h[(size_t)pair * inner + first + r] = stored(rounded(activated(two[0], kind), HALF) * two[1], HALF);
}

// out [n, outputs] = the sum over a row's experts of (down h) weight. wide_weights: they are float32, else of the model's type. Grid:
// [tiles of DOWN_ROWS outputs, n]. Shared: [K (chunks + 1), DOWN_ROWS] floats.
extern "C" __global__ void __launch_bounds__(MOST_THREADS) experts_down(
    const u16* h, const i64* index, const void* weights, int wide_weights, int chosen, int count, STACK_PARAMETERS, int width,
    u16* out, int out_stride, LORA_PARAMETERS) {
  constexpr int ROWS = Expert::DOWN_ROWS;
  extern __shared__ __align__(16) float parts[];
  const Stack stack = STACK_GIVEN;
  const Lora lora = LORA_GIVEN;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5, chunks = (width + CHUNK - 1) / CHUNK;
  const int row = blockIdx.y, first = blockIdx.x * ROWS, units = chosen * chunks;
  let_next_start();
  const u8* table = table_of(code);
  wait_for_previous();
  index += (size_t)row * chosen, h += (size_t)row * chosen * width;
  const auto output = [&](int r) { return first + r; };
  const auto expert_of = [&](int k) {
    const i64 number = __ldcg(index + k);
    return Expert(stack, (int)(number < 0 ? 0 : number >= count ? count - 1 : number), width);
  };
  Asked<ROWS> asked;
  Expert expert = expert_of(warp / chunks);
  asked.ask(expert, h + (size_t)(warp / chunks) * width, width, warp % chunks, output);
  float* changes = parts + units * ROWS;
  if (low) {
#pragma unroll 1
    for (int at = warp; at < chosen * ROWS; at += warps) {
      const int k = at / ROWS;
      const Adapter own = adapter_of(lora, 2, row, __ldcg(index + k), count, true, width);
      const float change = change_of(lora, own, low + ((size_t)row * chosen + k) * largest_rank, output(at % ROWS));
      if (lane == 0) changes[at] = change;
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int unit = warp;;) {
    asked.sums(expert, table, parts + unit * ROWS);
    unit += warps;
    if (unit >= units) break;
    expert = expert_of(unit / chunks);
    asked.ask(expert, h + (size_t)(unit / chunks) * width, width, unit % chunks, output);
  }
  __syncthreads();
  const int r = threadIdx.x;
  if (r >= ROWS) return;
  float total = 0.f;
  bool is_known = true;
  for (int k = 0; k < chosen; k++) {
    float y = 0.f;
    for (int chunk = 0; chunk < chunks; chunk++) y += parts[(k * chunks + chunk) * ROWS + r];
    y = rounded(y, HALF);
    if (low) y = rounded(y + changes[k * ROWS + r], HALF);
    const size_t at = (size_t)row * chosen + k;
    const float factor = wide_weights ? __ldcg((const float*)weights + at) : value(__ldcg((const u16*)weights + at), HALF);
    y = __fmul_rn(y, factor);
    total = __fadd_rn(total, wide_weights ? y : rounded(y, HALF));
    const i64 number = __ldcg(index + k);
    is_known = is_known && number >= 0 && number < count;
  }
  out[(size_t)row * out_stride + first + r] = stored(is_known ? total : __uint_as_float(0x7fc00000u), HALF);
}
