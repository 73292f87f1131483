// Mixtures of experts of few rows: gate, up and their product, then down, weights and sum, with adapters of rows inside. Read
// engine/kernels/experts.py first: it says what is computed and where it rounds. values.cuh and the formats' headers stand in front.
//
// A pair is a row and one of its K experts. Compiled for one stack's format; FORMAT 16: not packed. HALF: 1 fp16, 0 bf16. A warp has a
// chunk of 256 columns of some outputs and asks for all of it before it uses the first word. Chunks are added in shared memory, in
// their order, so a row's bits depend on nothing but its own inputs. Outputs of a block divide 64, those of FORMAT 16 divide 8.
#define MOST_THREADS 768
#define CHUNK EXPERT_COLUMNS

// One stack as it lies in memory; *_bytes: of one expert. where: null, or the number of an expert among those that are near, -1 without.
#define STACK_PARAMETERS                                                                                                       \
  const u8 *weight, int weight_bytes, const u8 *scale, int scale_bytes, const u8 *second, int second_bytes, const float *offset, \
      const float *code2, const float *code, const int *where, const u8 *near_weight, const u8 *near_scale, const u8 *near_second
#define STACK_GIVEN                                                                                                            \
  {{weight, scale, second}, {near_weight, near_scale, near_second}, where, offset, code2, code, weight_bytes, scale_bytes, second_bytes}
struct Parts {
  const u8 *weight, *scale, *second;
};
struct Stack {
  Parts far, near;
  const int* where;
  const float *offset, *code2, *code;
  int weight_bytes, scale_bytes, second_bytes;
  // The parts of one expert.
  __device__ __forceinline__ Parts of(u32 expert) const {
    const int slot = where ? __ldcg(where + expert) : -1;
    const Parts& own = slot < 0 ? far : near;
    const u32 n = slot < 0 ? expert : (u32)slot;
    return {nth(own.weight, weight_bytes, n), nth(own.scale, scale_bytes, n), nth(own.second, second_bytes, n)};
  }
  static __device__ __forceinline__ const u8* nth(const u8* first, int bytes, u32 n) { return first + (u64)(u32)bytes * n; }
};

__device__ __forceinline__ u32 clamped(i64 number, int count) { return number < 0 ? 0 : number >= count ? count - 1 : (u32)number; }

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

// One expert of a stack, and what a warp asked for of ROWS of its rows: `row(r)` [., width], in one chunk. `sums` writes the rows' sums.
// Codes of a table have their own (nf4.cuh).
#if !IS_CODED
struct Expert {
  typedef Unpacked<false> Own;
  typedef typename Own::Word Word;
  typedef typename Own::Scale Scale;
  static constexpr int UP_ROWS = EXPERT_ROWS, DOWN_ROWS = EXPERT_ROWS;
  const u8* weight;
  Own own;
  __device__ __forceinline__ Expert(const Stack& s, u32 expert, int width) : Expert(s.of(expert), width) {}
  __device__ __forceinline__ Expert(const Parts& at, int width)
      : weight(at.weight), own(at.scale, at.second, nullptr, nullptr, nullptr, width, 0) {}
  __device__ __forceinline__ Word word_at(u32 at) const { return Own::word_at(weight, at); }
  __device__ __forceinline__ Scale scale_at(u32 at) const { return own.scale_at(at); }
  __device__ __forceinline__ void values(float* v, Word word, Scale scale) const { own.values(v, word, scale, HALF); }
  static __device__ __forceinline__ void prepare(u32*, const float*) {}
  static __device__ __forceinline__ float* behind(u32* shared) { return (float*)shared; }
};
// Eight neighbours of each row a lane, in float32.
template <int ROWS>
struct Asked {
  typename Expert::Word words[ROWS];
  typename Expert::Scale scales[ROWS];
  uint4 x;
  bool is_there;  // whether the row has these columns; else they are read from its beginning, and left out
  template <typename Row>
  __device__ __forceinline__ void ask(const Expert& expert, const u16* from, int width, int chunk, Row row) {
    const int lane_column = chunk * CHUNK + (threadIdx.x & 31) * 8;
    is_there = lane_column < width;
    const int column = is_there ? lane_column : 0;
    x = __ldcg((const uint4*)(from + column));
#pragma unroll
    for (int r = 0; r < ROWS; r++) words[r] = expert.word_at((u32)row(r) * width + column);
#pragma unroll
    for (int r = 0; r < ROWS; r++) scales[r] = expert.scale_at((u32)row(r) * width + column);
  }
  __device__ __forceinline__ void sums(const Expert& expert, u32*, float* to) const {
    float given[8], sum[ROWS];
    unpack_8(given, x, HALF);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      float v[8];
      expert.values(v, words[r], scales[r]);
      sum[r] = 0.f;
#pragma unroll
      for (int i = 0; i < 8; i++) sum[r] = fmaf(v[i], given[i], sum[r]);
      if (!is_there) sum[r] = 0.f;
    }
    const float own = scattered_sums<ROWS>(sum);
    if ((threadIdx.x & 31) < ROWS) to[threadIdx.x & 31] = own;
  }
};
#endif

// An adapter's change of a member of a pair, to `experts_gate_up` and `experts_down`: it stands in front of its A x in float32.
struct Change {
  const u8* B;  // of the expert, [end - first, rank]; null without
  int rank, first, end;
  float factor;
  int empty[2];
};
#define CHANGE_WORDS 8
__device__ __forceinline__ float lora_value(const u8* values, u32 at, int wide) {
  return wide ? __ldcg((const float*)values + at) : value(__ldcg((const u16*)values + at), HALF);
}
__device__ __forceinline__ float lora_rounded(float v, int wide) { return wide ? v : rounded(v, HALF); }
// What is changed in one output, to every lane of a warp. wide: A and B are float32, else of the model's type.
__device__ __forceinline__ float change_of(const Change& own, const float* low, int output, int wide) {
  if (!own.B || output < own.first || output >= own.end) return 0.f;
  const u32 from = (u32)(output - own.first) * own.rank;
  float sum = 0.f;
#pragma unroll 1
  for (int r = threadIdx.x & 31; r < own.rank; r += 32) sum = fmaf(__ldcg(low + r), lora_value(own.B, from + r, wide), sum);
  return lora_rounded(lora_rounded(warp_sum(sum), wide) * own.factor, wide);
}
// The changes of `count` (change, output) of a block, by its warps; all that they read is in L2 (`bring_changes`).
template <int ROWS, typename Row>
__device__ __forceinline__ void change_all(float* to, const Change* changes, int count, const float* low, int low_stride, int wide, Row row) {
  const int warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
#pragma unroll 4
  for (int at = warp; at < count * ROWS; at += warps) {
    const float change = change_of(changes[at / ROWS], low + (size_t)(at / ROWS) * low_stride + CHANGE_WORDS, row(at % ROWS), wide);
    if ((threadIdx.x & 31) == 0) to[at] = change;
  }
}
template <int ROWS, typename Row>
__device__ __forceinline__ void bring_changes(const Change* changes, int count, int wide, Row row) {
  for (int at = threadIdx.x; at < count * ROWS; at += blockDim.x) {
    const Change& own = changes[at / ROWS];
    const int output = row(at % ROWS);
    if (own.B && output >= own.first && output < own.end) prefetch(own.B + (size_t)(output - own.first) * own.rank * (wide ? 4 : 2));
  }
}
__device__ __forceinline__ void read_changes(Change* to, int count, const float* low, int low_stride) {
  for (int at = threadIdx.x; at < count * CHANGE_WORDS; at += blockDim.x)
    ((u32*)to)[at] = __ldcg((const u32*)low + (size_t)(at / CHANGE_WORDS) * low_stride + at % CHANGE_WORDS);
}

// The tables of `ExpertLora`, of which a row has `tokens` tokens.
#define LORA_PARAMETERS                                                                                                     \
  const i64 *A_ptr, const i64 *B_ptr, const int *ranks, const float *factors, const int *outputs, const int *places, \
      const int *row_slots, int tokens, int slots, int wide
#define LORA_GIVEN A_ptr, B_ptr, ranks, factors, outputs, places, row_slots, tokens, slots, wide
// What the adapter of a token's row changes of an expert and member, and its A; both null without.
__device__ __forceinline__ const u8* found(Change& own, LORA_PARAMETERS, int token, i64 expert, int count, int member, int width) {
  own = {nullptr, 0, 0, 0, 0.f, {0, 0}};
  const int slot = __ldcg(row_slots + token / tokens), at = member * slots + slot;
  if (slot < 0 || slot >= slots || expert < 0 || expert >= count) return nullptr;
  const int place = __ldcg(places + (size_t)at * count + expert);
  const u8* A = (const u8*)__ldcg(A_ptr + at);
  if (place < 0 || !A) return nullptr;
  own.B = (const u8*)__ldcg(B_ptr + at), own.rank = __ldcg(ranks + at), own.factor = __ldcg(factors + at);
  own.first = __ldcg(outputs + 2 * at), own.end = __ldcg(outputs + 2 * at + 1);
  const i64 each = (i64)own.rank * (wide ? 4 : 2) * place;
  own.B += each * (own.end - own.first);
  return A + each * width;
}

// low [pairs, members, low_stride]: of every pair the `Change` of its row's adapter and A x, members from `member` on. is_pair: x has a
// row for each pair. Grid: [largest rank, K members, n].
extern "C" __global__ void __launch_bounds__(256) experts_low(
    const u16* x, int x_stride, int width, int is_pair, const i64* index, int chosen, int count, int member, LORA_PARAMETERS, float* low,
    int low_stride) {
  __shared__ float sums[8];
  const int r = blockIdx.x, row = blockIdx.z, m = blockIdx.y / chosen, pair = row * chosen + blockIdx.y - m * chosen;
  let_next_start();
  wait_for_previous();
  Change own;
  const u8* A = found(own, LORA_GIVEN, row, __ldcg(index + pair), count, member + m, width);
  low += ((size_t)pair * (gridDim.y / chosen) + m) * low_stride;
  if (r == 0 && threadIdx.x == 0) *(Change*)low = own;
  if (!own.B || r >= own.rank) return;
  x += (size_t)(is_pair ? pair : row) * x_stride;
  float sum = 0.f;
#pragma unroll 8
  for (int c = threadIdx.x; c < width; c += 256) sum = fmaf(value(__ldcg(x + c), HALF), lora_value(A, (u32)r * width + c, wide), sum);
  sum = block_sum(sum, sums);
  if (threadIdx.x == 0) low[CHANGE_WORDS + r] = lora_rounded(sum, wide);
}

// h [pairs, inner] = act(gate) up. Grid: [tiles of UP_ROWS / 2 outputs, K, n]. Shared: what is in front, then [chunks
// + 2, UP_ROWS] floats and two `Change`.
extern "C" __global__ void __launch_bounds__(MOST_THREADS) experts_gate_up(
    const u16* x, int x_stride, const i64* index, int count, STACK_PARAMETERS, int inner, int width, int kind, u16* h,
    const float* low, int low_stride, int wide) {
  constexpr int ROWS = Expert::UP_ROWS, OUTPUTS = ROWS / 2;
  extern __shared__ __align__(16) u32 shared[];
  float* parts = Expert::behind(shared);
  const Stack stack = STACK_GIVEN;
  const int warp = threadIdx.x >> 5, warps = blockDim.x >> 5, chunks = (width + CHUNK - 1) / CHUNK;
  const int row = blockIdx.z, pair = row * gridDim.y + blockIdx.y, first = blockIdx.x * OUTPUTS;
  let_next_start();
  Expert::prepare(shared, code);
  wait_for_previous();
  const i64 number = __ldcg(index + pair);
  const Expert expert(stack, clamped(number, count), width);
  const auto output = [&](int r) { return first + r + (r < OUTPUTS ? 0 : inner - OUTPUTS); };
  float* changed = parts + chunks * ROWS;
  Change* changes = (Change*)(changed + 2 * ROWS);
  x += (size_t)row * x_stride, low += low ? (size_t)pair * 2 * low_stride : 0;
  if (low) read_changes(changes, 2, low, low_stride);
  __syncthreads();
  if (low) bring_changes<ROWS>(changes, 2, wide, output);
#pragma unroll 1
  for (int chunk = warp; chunk < chunks; chunk += warps) {
    Asked<ROWS> asked;
    asked.ask(expert, x, width, chunk, output);
    asked.sums(expert, shared, parts + chunk * ROWS);
  }
  if (low) change_all<ROWS>(changed, changes, 2, low, low_stride, wide, output);
  __syncthreads();
  const int r = threadIdx.x;
  if (r >= OUTPUTS) return;
  float two[2] = {};
#pragma unroll
  for (int half = 0; half < 2; half++) {
    for (int chunk = 0; chunk < chunks; chunk++) two[half] += parts[chunk * ROWS + half * OUTPUTS + r];
    two[half] = rounded(two[half], HALF);
    for (int m = 0; m < 2 && low; m++) two[half] = rounded(two[half] + changed[m * ROWS + half * OUTPUTS + r], HALF);
  }
  h[(size_t)pair * inner + first + r] = stored(rounded(activated(two[0], kind), HALF) * two[1], HALF);
}

// out [n, outputs] = the sum over a row's experts of (down h) weight. wide_weights: they are float32, else of the model's type. Grid:
// [tiles of DOWN_ROWS outputs, n]. Shared: what is in front, then [K (chunks + 1), DOWN_ROWS] floats, K `Change`, K weights and K numbers.
extern "C" __global__ void __launch_bounds__(MOST_THREADS) experts_down(
    const u16* h, const i64* index, const void* weights, int wide_weights, int chosen, int count, STACK_PARAMETERS, int width,
    u16* out, int out_stride, const float* low, int low_stride, int wide) {
  constexpr int ROWS = Expert::DOWN_ROWS;
  extern __shared__ __align__(16) u32 shared[];
  float* parts = Expert::behind(shared);
  const Stack stack = STACK_GIVEN;
  const int warp = threadIdx.x >> 5, warps = blockDim.x >> 5, chunks = (width + CHUNK - 1) / CHUNK;
  const int row = blockIdx.y, first = blockIdx.x * ROWS, units = chosen * chunks;
  let_next_start();
  Expert::prepare(shared, code);
  wait_for_previous();
  h += (size_t)row * chosen * width;
  const auto output = [&](int r) { return first + r; };
  float* changed = parts + units * ROWS;
  Change* changes = (Change*)(changed + chosen * ROWS);
  float* factors = (float*)(changes + chosen);
  u32* numbers = (u32*)(factors + chosen);
  for (int k = threadIdx.x; k < chosen; k += blockDim.x) {
    const size_t at = (size_t)row * chosen + k;
    const i64 number = __ldcg(index + at);
    const float factor = wide_weights ? __ldcg((const float*)weights + at) : value(__ldcg((const u16*)weights + at), HALF);
    numbers[k] = clamped(number, count), factors[k] = number >= 0 && number < count ? factor : __uint_as_float(0x7fc00000u);
  }
  low += low ? (size_t)row * chosen * low_stride : 0;
  if (low) read_changes(changes, chosen, low, low_stride);
  __syncthreads();
  if (low) bring_changes<ROWS>(changes, chosen, wide, output);
#pragma unroll 1
  for (int unit = warp; unit < units; unit += warps) {
    const int k = unit / chunks;
    const Expert expert(stack, numbers[k], width);
    Asked<ROWS> asked;
    asked.ask(expert, h + (size_t)k * width, width, unit - k * chunks, output);
    asked.sums(expert, shared, parts + unit * ROWS);
  }
  if (low) change_all<ROWS>(changed, changes, chosen, low, low_stride, wide, output);
  __syncthreads();
  const int r = threadIdx.x;
  if (r >= ROWS) return;
  float total = 0.f;
  for (int k = 0; k < chosen; k++) {
    float y = 0.f;
    for (int chunk = 0; chunk < chunks; chunk++) y += parts[(k * chunks + chunk) * ROWS + r];
    y = rounded(y, HALF);
    if (low) y = rounded(y + changed[k * ROWS + r], HALF);
    y = __fmul_rn(y, factors[k]);
    total = __fadd_rn(total, wide_weights ? y : rounded(y, HALF));
  }
  out[(size_t)row * out_stride + first + r] = stored(total, HALF);
}
