// Mixtures of experts of a prompt's tokens: gate, up and their product, then down, weights and sum. Read engine/kernels/experts.py
// first. experts.cu stands in front of it. A pair is a token and one of its K experts. Pairs are sorted by their
// experts; a block has 64 pairs of one expert and 64 of its rows, and tensor cores multiply them, 64 columns at a time. A weight is
// rounded to the model's type, as its format's own library rounds it.
#define TILE 64
#define STEP 64      // columns at once
#define STRIDE 72    // of a row in shared memory, in values: 8 rows of a fragment fall on different banks
#define MANY_THREADS 128  // a warp has 16 pairs of a tile
#define SORT_THREADS 1024
#define LOW_THREADS 256
#define LOW_PAIRS 4  // of a warp, which read A together
#define LOW_RANKS 8

// One expert of a stack: eight neighbours of a row at a time.
struct Unpacker {
  typedef Unpacked<NESTED != 0> Own;
  typedef typename Own::Word Word;
  typedef typename Own::Scale Scale;
  const u8* from;
  Own own;
  __device__ __forceinline__ Unpacker(const Stack& s, int expert, int width) : Unpacker(s, s.of(expert), expert, width) {}
  __device__ __forceinline__ Unpacker(const Stack& s, const Parts& at, int expert, int width)
      : from(at.weight), own(at.scale, at.second, s.offset ? s.offset + expert : nullptr, s.code2, s.code, UNPACKED_BY(width)) {}
  __device__ __forceinline__ Word word_at(i64 at) const { return word_once<Own>(from, at); }
  __device__ __forceinline__ Scale scale_at(i64 at) const { return own.scale_at(at); }
  __device__ __forceinline__ void values(float* v, Word word, Scale scale) const { own.values(v, word, scale, HALF); }
};

// order [pairs]: the pairs of each expert side by side, first [count + 1]: where those of each begin. Pairs without an expert are left
// out. Within an expert the order is any: no result depends on it. Shared: count + 1 ints. Grid: [1].
extern "C" __global__ void __launch_bounds__(SORT_THREADS) experts_sort(const i64* index, int pairs, int count, int* order, int* first) {
  extern __shared__ __align__(16) int places[];
  const int tid = threadIdx.x;
  let_next_start();
  for (int e = tid; e <= count; e += blockDim.x) places[e] = 0;
  wait_for_previous();
  __syncthreads();
  const auto expert_of = [&](int pair) {
    const i64 number = __ldcg(index + pair);
    return number < 0 || number >= count ? -1 : (int)number;
  };
  for (int pair = tid; pair < pairs; pair += blockDim.x) {
    const int e = expert_of(pair);
    if (e >= 0) atomicAdd(places + e, 1);
  }
  __syncthreads();
  if (tid < 32) {  // the sum of all before
    int before = 0;
    for (int from = 0; from <= count; from += 32) {
      const int e = from + tid, own = e < count ? places[e] : 0;
      int sum = own;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const int other = __shfl_up_sync(ALL, sum, d);
        if (tid >= d) sum += other;
      }
      if (e <= count) places[e] = first[e] = before + sum - own;
      before += __shfl_sync(ALL, sum, 31);
    }
  }
  __syncthreads();
  for (int pair = tid; pair < pairs; pair += blockDim.x) {
    const int e = expert_of(pair);
    if (e >= 0) order[atomicAdd(places + e, 1)] = pair;
  }
}

// The expert of the block's tile, -1 past the last one, and which of its pairs are the tile's.
struct Tile {
  int expert, first, pairs;
};
__device__ __forceinline__ Tile tile_of(const int* first, int count, int number) {
  __shared__ int found[3];
  const int lane = threadIdx.x;
  if (lane == 0) found[0] = -1;
  __syncthreads();
  if (lane < 32) {
    int before = 0;
    for (int from = 0; from < count; from += 32) {
      const int e = from + lane, begins = e < count ? __ldcg(first + e) : 0, own = e < count ? __ldcg(first + e + 1) - begins : 0;
      const int tiles = (own + TILE - 1) / TILE;
      int sum = tiles;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const int other = __shfl_up_sync(ALL, sum, d);
        if (lane >= d) sum += other;
      }
      const int at = number - (before + sum - tiles);
      if (at >= 0 && at < tiles) found[0] = e, found[1] = begins + at * TILE, found[2] = min(own - at * TILE, TILE);
      before += __shfl_sync(ALL, sum, 31);
    }
  }
  __syncthreads();
  return {found[0], found[1], found[2]};
}

// c [8][4]: sums of a warp's 16 pairs and the tile's 64 rows, as the instruction lays them out. row_of(pair): its row of x, row(r): the
// stack's r-th row of the tile.
template <typename RowOf, typename Row>
__device__ __forceinline__ void product(
    float (*c)[4], const Unpacker& expert, const u16* x, int x_stride, int width, int pairs, const int* here, RowOf row_of, Row row) {
  __shared__ __align__(16) u16 xs[TILE * STRIDE], ws[TILE * STRIDE];
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, t = lane & 3;
  uint4 some_x[4];
  typename Unpacker::Word words[4];
  typename Unpacker::Scale scales[4];
  const auto ask = [&](int from) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int r = (tid >> 3) + 16 * i, column = from + (tid & 7) * 8;
      const i64 at = (i64)row(r) * width + column;
      words[i] = expert.word_at(at);
      scales[i] = expert.scale_at(at);
      some_x[i] = make_uint4(0, 0, 0, 0);
      if (r < pairs) some_x[i] = __ldcg((const uint4*)(x + (size_t)row_of(here[r]) * x_stride + column));
    }
  };
  ask(0);
#pragma unroll 1
  for (int from = 0; from < width; from += STEP) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int at = ((tid >> 3) + 16 * i) * STRIDE + (tid & 7) * 8;
      float v[8];
      expert.values(v, words[i], scales[i]);
      *(uint4*)(xs + at) = some_x[i];
      *(uint4*)(ws + at) = make_uint4(pack(v, HALF), pack(v + 2, HALF), pack(v + 4, HALF), pack(v + 6, HALF));
    }
    __syncthreads();
    if (from + STEP < width) ask(from + STEP);
    if (16 * warp >= pairs) continue;
#pragma unroll
    for (int k = 0; k < STEP; k += 16) {
      const u16* a = xs + (16 * warp + g) * STRIDE + k + 2 * t;
      const u32 a0 = *(const u32*)a, a1 = *(const u32*)(a + 8 * STRIDE), a2 = *(const u32*)(a + 8), a3 = *(const u32*)(a + 8 * STRIDE + 8);
#pragma unroll
      for (int j = 0; j < 8; j++) {
        const u16* b = ws + (8 * j + g) * STRIDE + k + 2 * t;
        if (HALF) mma_m16n8k16(c[j], a0, a1, a2, a3, *(const u32*)b, *(const u32*)(b + 8));
        else mma_m16n8k16_bf16(c[j], a0, a1, a2, a3, *(const u32*)b, *(const u32*)(b + 8));
      }
    }
  }
}

// Values of A or B from `at` on: eight of a row, which is aligned to 16 bytes, and one that the other warps of a block read too.
__device__ __forceinline__ void lora_8(float* v, const u8* values, u32 at, int wide) {
  if (!wide) return unpack_8(v, __ldcg((const uint4*)(values + (size_t)at * 2)), HALF);
#pragma unroll
  for (int k = 0; k < 8; k += 4) {
    const float4 four = __ldg((const float4*)(values + (size_t)at * 4) + k / 4);
    v[k] = four.x, v[k + 1] = four.y, v[k + 2] = four.z, v[k + 3] = four.w;
  }
}
__device__ __forceinline__ float lora_shared(const u8* values, u32 at, int wide) {
  return wide ? __ldg((const float*)values + at) : value(__ldg((const u16*)values + at), HALF);
}

// low [pairs, members, low_stride], as `experts_low` writes it. The pairs of a warp with one A read it together; lanes have eight columns
// each, so a pair's bits do not depend on the others. Grid: [ranks / LOW_RANKS, members, tiles].
extern "C" __global__ void __launch_bounds__(LOW_THREADS) experts_many_low(
    const u16* x, int x_stride, int width, int is_pair, const int* order, const int* first, int chosen, int count, int member,
    LORA_PARAMETERS, float* low, int low_stride) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, begins = blockIdx.x * LOW_RANKS;
  let_next_start();
  wait_for_previous();
  const Tile tile = tile_of(first, count, blockIdx.z);
  for (int from = warp * LOW_PAIRS; tile.expert >= 0 && from < tile.pairs; from += (LOW_THREADS / 32) * LOW_PAIRS) {
    const u8* A[LOW_PAIRS];
    const u16* rows[LOW_PAIRS];
    float* to[LOW_PAIRS];
    int ranks_of[LOW_PAIRS];
#pragma unroll
    for (int i = 0; i < LOW_PAIRS; i++) {
      A[i] = nullptr, rows[i] = x, to[i] = low, ranks_of[i] = 0;
      if (from + i >= tile.pairs) continue;
      const int pair = __ldcg(order + tile.first + from + i);
      Change own;
      A[i] = found(own, LORA_GIVEN, pair / chosen, tile.expert, count, member + blockIdx.y, width);
      to[i] = low + ((size_t)pair * gridDim.y + blockIdx.y) * low_stride;
      rows[i] = x + (size_t)(is_pair ? pair : pair / chosen) * x_stride, ranks_of[i] = min(own.rank - begins, LOW_RANKS);
      if (blockIdx.x == 0 && lane == 0) *(Change*)to[i] = own;
    }
#pragma unroll
    for (int i = 0; i < LOW_PAIRS; i++) {
      bool is_done = !A[i];
#pragma unroll
      for (int j = 0; j < i; j++) is_done = is_done || A[j] == A[i];
      if (is_done || ranks_of[i] <= 0) continue;
      float sums[LOW_PAIRS][LOW_RANKS] = {};
#pragma unroll 1
      for (int column = lane * 8; column < width; column += CHUNK) {
        float v[LOW_PAIRS][8];
#pragma unroll
        for (int j = 0; j < LOW_PAIRS; j++) unpack_8(v[j], __ldcg((const uint4*)(rows[j] + column)), HALF);
#pragma unroll
        for (int r = 0; r < LOW_RANKS; r++) {
          if (r >= ranks_of[i]) break;
          float a[8];
          lora_8(a, A[i], (u32)(begins + r) * width + column, wide);
#pragma unroll
          for (int j = 0; j < LOW_PAIRS; j++)
#pragma unroll
            for (int k = 0; k < 8; k++) sums[j][r] = fmaf(v[j][k], a[k], sums[j][r]);
        }
      }
#pragma unroll
      for (int j = 0; j < LOW_PAIRS; j++) {
        const float sum = scattered_sums<LOW_RANKS>(sums[j]);
        if (A[j] == A[i] && lane < ranks_of[i]) to[j][CHANGE_WORDS + begins + lane] = lora_rounded(sum, wide);
      }
    }
  }
}

// v [NUMBER]: outputs of a pair, with what its adapter changes in them; rounded as torch rounds. low: of the pair and member.
template <int NUMBER, typename Output>
__device__ __forceinline__ void add_change(float* v, const float* low, int wide, Output output) {
  Change own;
  ((uint4*)&own)[0] = __ldcg((const uint4*)low), ((uint4*)&own)[1] = __ldcg((const uint4*)low + 1);
  if (!own.B) return;
  float sums[NUMBER] = {};
#pragma unroll 2
  for (int r = 0; r < own.rank; r++) {
    const float a = __ldcg(low + CHANGE_WORDS + r);
#pragma unroll
    for (int i = 0; i < NUMBER; i++) {
      const int o = output(i);
      if (o >= own.first && o < own.end) sums[i] = fmaf(a, lora_shared(own.B, (u32)(o - own.first) * own.rank + r, wide), sums[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < NUMBER; i++) v[i] = rounded(v[i] + lora_rounded(lora_rounded(sums[i], wide) * own.factor, wide), HALF);
}

// turns: null, or which of several launches computes an expert; turn: this one.
#define MANY_PARAMETERS                                                                                                        \
  const u16 *x, int x_stride, const int *order, const int *first, int chosen, int count, STACK_PARAMETERS, const int *turns, int turn, int width
#define BEGIN                                                                     \
  __shared__ int here[TILE];                                                      \
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3; \
  let_next_start();                                                               \
  wait_for_previous();                                                            \
  const Tile tile = tile_of(first, count, blockIdx.y);                            \
  if (tile.expert < 0 || (turns && __ldcg(turns + tile.expert) != turn)) return;  \
  if (threadIdx.x < TILE && threadIdx.x < tile.pairs) here[threadIdx.x] = __ldcg(order + tile.first + threadIdx.x); \
  __syncthreads();                                                                \
  float c[8][4] = {};                                                             \
  const Stack stack = STACK_GIVEN;                                                \
  const Unpacker expert(stack, tile.expert, width);

// h [pairs, inner] = act(gate) up, by pairs as they are numbered. Grid: [inner / 32, tiles].
extern "C" __global__ void __launch_bounds__(MANY_THREADS) experts_many_gate_up(
    MANY_PARAMETERS, int inner, int kind, u16* h, const float* low, int low_stride, int wide) {
  BEGIN
  const int begins = blockIdx.x * (TILE / 2);
  product(c, expert, x, x_stride, width, tile.pairs, here, [&](int pair) { return pair / chosen; },
          [&](int r) { return begins + r + (r < TILE / 2 ? 0 : inner - TILE / 2); });
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int r = 16 * warp + g + 8 * half;
    if (r >= tile.pairs) continue;
    float own[16];  // of gate, then of up
#pragma unroll
    for (int i = 0; i < 16; i++) own[i] = rounded(c[i / 2][2 * half + i % 2], HALF);
    for (int m = 0; m < 2 && low; m++)
      add_change<16>(own, low + ((size_t)here[r] * 2 + m) * low_stride, wide, [&](int i) {
        return begins + 8 * (i / 2 % 4) + 2 * t + i % 2 + (i < 8 ? 0 : inner);
      });
#pragma unroll
    for (int j = 0; j < 4; j++) {
      float v[2];
#pragma unroll
      for (int i = 0; i < 2; i++) v[i] = rounded(activated(own[2 * j + i], kind), HALF) * own[8 + 2 * j + i];
      *(u32*)(h + (size_t)here[r] * inner + begins + 8 * j + 2 * t) = pack(v, HALF);
    }
  }
}

// parts [pairs, outputs] float32 = (down h) weight. wide_weights: they are float32, else of the model's type. Grid: [outputs / 64, tiles].
extern "C" __global__ void __launch_bounds__(MANY_THREADS) experts_many_down(
    MANY_PARAMETERS, const void* weights, int wide_weights, int outputs, float* parts, const float* low, int low_stride, int wide) {
  BEGIN
  const int begins = blockIdx.x * TILE;
  product(c, expert, x, x_stride, width, tile.pairs, here, [](int pair) { return pair; }, [&](int r) { return begins + r; });
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int r = 16 * warp + g + 8 * half;
    if (r >= tile.pairs) continue;
    const int pair = here[r];
    const float factor = wide_weights ? __ldcg((const float*)weights + pair) : value(__ldcg((const u16*)weights + pair), HALF);
    float own[16];
#pragma unroll
    for (int i = 0; i < 16; i++) own[i] = rounded(c[i / 2][2 * half + i % 2], HALF);
    if (low) add_change<16>(own, low + (size_t)pair * low_stride, wide, [&](int i) { return begins + 8 * (i / 2) + 2 * t + i % 2; });
#pragma unroll
    for (int j = 0; j < 8; j++) {
      float v[2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        v[i] = __fmul_rn(own[2 * j + i], factor);
        if (!wide_weights) v[i] = rounded(v[i], HALF);
      }
      *(float2*)(parts + (size_t)pair * outputs + begins + 8 * j + 2 * t) = make_float2(v[0], v[1]);
    }
  }
}

// out [n, outputs] = the sum of a token's parts, in the order of K. Grid: [outputs / 512, n].
extern "C" __global__ void __launch_bounds__(128) experts_many_sum(
    const float* parts, const i64* index, int chosen, int count, int outputs, u16* out, int out_stride) {
  const int token = blockIdx.y, at = (blockIdx.x * 128 + threadIdx.x) * 4;
  let_next_start();
  wait_for_previous();
  if (at >= outputs) return;
  float sum[4] = {};
  bool is_known = true;
  for (int k = 0; k < chosen; k++) {
    const size_t pair = (size_t)token * chosen + k;
    const i64 number = __ldcg(index + pair);
    is_known = is_known && number >= 0 && number < count;
    if (!is_known) break;
    const float4 v = __ldcg((const float4*)(parts + pair * outputs + at));
    sum[0] = __fadd_rn(sum[0], v.x), sum[1] = __fadd_rn(sum[1], v.y), sum[2] = __fadd_rn(sum[2], v.z), sum[3] = __fadd_rn(sum[3], v.w);
  }
#pragma unroll
  for (int i = 0; i < 4; i++) sum[i] = is_known ? sum[i] : __uint_as_float(0x7fc00000u);
  store<4>(out + (size_t)token * out_stride + at, sum, HALF);
}
