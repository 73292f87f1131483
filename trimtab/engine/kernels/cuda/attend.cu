// Attention of one token a row over its keys and values. Read engine/kernels/attention_and_norms.py first. values.cuh stands in front of this.
// Compiled for one kind of layer: DIM (128, 256 or 512: the head's size or more), HEAD (its size), GROUP (queries that share a
// head of keys), HALF (1: fp16, 0: bf16), ROTATES (1: q is what the products made; each block norms and turns the queries that it
// needs, and the block whose share has the new place makes the new key and value as well, and writes them into the cache), NORMS
// (where the norms of queries and keys round, as values.cuh has it; 3: there are none), VALUES (1: values are normed, without a
// weight), ROTARY (the first values of a head, which turn), SINKS (each head of queries has a score without a value), GROWTH and
// GROWS_AT (queries are multiplied by 1 + GROWTH log(1 + floor(position / GROWS_AT)), rounded to their type).
//
// A launch is a chain of waits, not of bytes. Positions and places stand since before the step, and so do keys and values of all
// places but the newest: with ROTATES these are asked for before the kernel in front has ended. Then four round trips to L2 are
// left: the products and cos and sin; that the parts are written; the count of blocks; the parts and sums.
//
// With PAGE a row's places lie in pages of so many places: `table` [rows][table_stride] says which page of the head's pool holds
// places i PAGE and following. Page 0 stands for none and reads as zeros; what would be written there goes to page 1. A tile lies in
// one page, so that order and grouping of all sums are those of a row in one piece.
//
// A block looks at its share of the places of one row and one head of keys, for the group of queries that use it, in tiles
// of 32 places. Both products are tensor core instructions m16n8k16 whose 8 columns are the queries of the group.
//   scores: 16 rows are places, k runs along the head; a warp takes 16 places and 128 values of the head. As in matvec4,
//     any order along k will do as long as both sides agree: a lane reads 8 neighbours at once.
//   output: 16 rows are values of the head, k runs along the places; a warp takes 64 values and all 32 places. Two
//     neighbours along k lie in different rows of memory: PRMT puts them into one register.
// The weights of the softmax enter as the sum of two rounded numbers, so that they count as in float32.
#define TILE 32
#define MAX_SPLITS 128
#define SCORE_STRIDE 36   // 8 rows of 2 x 36 fall on different banks
#define WEIGHT_STRIDE 48  // so do 8-byte reads of 8 rows of 96 bytes
#define MAX_SHARES 512    // splits x queries that one block may combine
#define AT_ONCE 16        // splits whose parts a thread asks for before it uses one
#ifndef NORMS
#define NORMS 0
#endif
#ifndef VALUES
#define VALUES 1
#endif
#ifndef Q_STEP
#define Q_STEP 1  // heads' sizes from one head of queries to the next: 2 where each has a gate behind it
#endif
#ifndef ROTARY
#define ROTARY HEAD
#endif
#define EARLY 1           // 0: ROTATES too asks for keys and values when the kernel in front has ended
constexpr int TILES = GROUP <= 8 ? 1 : 2;  // of 8 queries
#ifndef PAGE
#define PAGE 0  // places of a page, a multiple of TILE; 0: a row's places lie in one piece
#endif
#if PAGE
#define PAGE_PARAMETERS const int *table, int table_stride, i64 pool_places,
#else
#define PAGE_PARAMETERS
#endif
#ifdef SINKS
#define SINK_PARAMETERS const u16 *sinks,
#else
#define SINK_PARAMETERS
#endif
__device__ __forceinline__ constexpr bool has_value(int d) { return HEAD == DIM || d < HEAD; }

// Which splits have places to look at, from the position.
struct Share {
  int places, tiles, splits;  // of the row; tiles of one split; splits that have any
};
__device__ __forceinline__ Share share_of(const i64* positions, int row, int places, int splits) {
  const i64 seen = __ldcg(positions + row) + 1;
  Share s;
  s.places = seen < 1 ? 1 : seen > places ? places : (int)seen;
  const int tiles = (s.places + TILE - 1) / TILE;
  s.tiles = (tiles + splits - 1) / splits;
  s.splits = (tiles + s.tiles - 1) / s.tiles;
  return s;
}

__device__ __forceinline__ void product(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  if constexpr (HALF != 0)
    mma_m16n8k16(c, a0, a1, a2, a3, b0, b1);
  else
    mma_m16n8k16_bf16(c, a0, a1, a2, a3, b0, b1);
}

// The factor of each split's part of one query: e^(its maximum - the largest) / the sum of all; 0 for those up to a multiple of
// AT_ONCE. One warp; sums [splits][GROUP], read once: MOST splits a lane.
template <int MOST>
__device__ __forceinline__ void shares(const float2* sums, int head, int splits, float* to) {
  const int lane = threadIdx.x & 31, padded = (splits + AT_ONCE - 1) / AT_ONCE * AT_ONCE;
  float2 v[MOST];
  float most = -__uint_as_float(0x7f800000), all = 0.f;
#pragma unroll
  for (int i = 0; i < MOST; i++) {
    const int s = lane + i * 32;
    v[i] = s < splits ? __ldcg(sums + s * GROUP + head) : make_float2(-__uint_as_float(0x7f800000), 0.f);
  }
#pragma unroll
  for (int i = 0; i < MOST; i++) most = fmaxf(most, v[i].x);
  most = warp_max(most);
#pragma unroll
  for (int i = 0; i < MOST; i++) v[i].x = __expf(v[i].x - most), all += v[i].x * v[i].y;
  all = warp_sum(all);
#pragma unroll
  for (int i = 0; i < MOST; i++)
    if (lane + i * 32 < padded) to[lane + i * 32] = v[i].x / all;
}

#if ROTATES
constexpr int V = DIM / 64;
constexpr int TURNING = ROTARY / 2;
// Where a lane's values of a head begin: those from l V on and their partners half of ROTARY up, or two pieces of what does not turn.
__device__ __forceinline__ int first_at() {
  const int at = (threadIdx.x & 31) * V;
  return at < TURNING ? at : at + TURNING;
}
__device__ __forceinline__ int second_at() {
  const int at = (threadIdx.x & 31) * V;
  return at < TURNING ? at + TURNING : at + HEAD / 2;
}
// A lane's values of a head, two a register.
struct Part {
  u32 a[V / 2], b[V / 2];
};
__device__ __forceinline__ void take(u32* to, const u16* from) {
  if constexpr (V == 8) {
    const uint4 v = __ldcg((const uint4*)from);
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
  } else if constexpr (V == 4) {
    const uint2 v = __ldcg((const uint2*)from);
    to[0] = v.x, to[1] = v.y;
  } else {
    to[0] = __ldcg((const u32*)from);
  }
}
// Zeros where a head has no such values, or `from` is null.
__device__ __forceinline__ Part part(const u16* from) {
  const int at = (threadIdx.x & 31) * V;
  Part p = {};
  if (from && has_value(at * 2)) take(p.a, from + first_at()), take(p.b, from + second_at());
  return p;
}
// The same of cos or sin, which have ROTARY values.
__device__ __forceinline__ Part turning_part(const u16* from) {
  const int at = (threadIdx.x & 31) * V;
  Part p = {};
  if (at < TURNING) take(p.a, from + at), take(p.b, from + TURNING + at);
  return p;
}
__device__ __forceinline__ void unpack_part(float* to, const u32* from) {
#pragma unroll
  for (int i = 0; i < V; i += 2) unpack(to + i, from[i / 2], HALF);
}
// Two values as they are once stored: one conversion of both takes a fraction of two of one.
__device__ __forceinline__ void round_both(float& a, float& b) {
  const u32 p = HALF ? two_halves(a, b) : two_bf16(a, b);
  a = low_value(p, HALF), b = high_value(p, HALF);
}
// One head of a row: norm, rotation as rope_write in fused.cu. A warp. turns: what came of it goes to `to`, and to the cache for a
// key; is_plain: what it is before the weight and the rotation goes to `plain` and its place in the cache.
__device__ __forceinline__ void turn_head(
    const Part& x, const Part& weight, const Part& cos, const Part& sin, float eps, bool turns, u16* to, bool is_key, u16* key,
    bool is_plain, u16* plain, u16* plain_cache) {
  const int at = (threadIdx.x & 31) * V, at0 = first_at(), at1 = second_at();
  float a[V], b[V], r = 1.f;
  unpack_part(a, x.a), unpack_part(b, x.b);
  if (NORMS != 3 || VALUES) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < V; i++) sum = fmaf(a[i], a[i], fmaf(b[i], b[i], sum));
    r = rsqrtf(warp_sum(sum) * (1.f / HEAD) + eps);
  }
  if (!has_value(at * 2)) return;
  if (is_plain) {
    float p0[V], p1[V];
#pragma unroll
    for (int i = 0; i < V; i++) p0[i] = VALUES ? a[i] * r : a[i], p1[i] = VALUES ? b[i] * r : b[i];
    store<V>(plain + at0, p0, HALF), store<V>(plain + at1, p1, HALF);
    store<V>(plain_cache + at0, p0, HALF), store<V>(plain_cache + at1, p1, HALF);
  }
  if (!turns) return;
  float w0[V], w1[V], c0[V], c1[V], s0[V], s1[V];
  unpack_part(w0, weight.a), unpack_part(w1, weight.b);
  unpack_part(c0, cos.a), unpack_part(c1, cos.b);
  unpack_part(s0, sin.a), unpack_part(s1, sin.b);
#pragma unroll
  for (int i = 0; i < V; i++) {
    float x = a[i], y = b[i];
    if (NORMS != 3) {
      x = weighted(x * r, w0[i], NORMS, HALF), y = weighted(y * r, w1[i], NORMS, HALF);
      round_both(x, y);
    }
    float x0 = x * c0[i], y0 = -y * s0[i], y1 = y * c1[i], x1 = x * s1[i];
    round_both(x0, y0), round_both(y1, x1);
    a[i] = ROTARY == HEAD || at < TURNING ? x0 + y0 : x, b[i] = ROTARY == HEAD || at < TURNING ? y1 + x1 : y;
  }
  store<V>(to + at0, a, HALF), store<V>(to + at1, b, HALF);
  if (is_key) store<V>(key + at0, a, HALF), store<V>(key + at1, b, HALF);
}
#endif

// mode (ROTATES): 0 the cache belongs to another layer, 1 own keys and values, 2 the values are the keys before their weight.
// Grid: [splits, kv heads, n].
extern "C" __global__ void __launch_bounds__(DIM / 2, DIM == 256 && TILES == 1 ? 3 : 1) attend(
    const u16* q, int q_stride, const u16* q_weight, const u16* k_weight, float eps, const u16* cos, int cos_stride,
    const u16* sin, int sin_stride, int mode, u16* keys, u16* values, const i64* positions, float* parts,
    float2* sums, u32* arrived, u16* out, int places, float scaling, float softcap, int combine_here,
    PAGE_PARAMETERS SINK_PARAMETERS AHEAD_PARAMETERS) {
  constexpr int WARPS = DIM / 64, SLICES = DIM / 128, HEADS = 8 * TILES, OWN = (GROUP + WARPS - 1) / WARPS;
  __shared__ float scores[SLICES][HEADS][SCORE_STRIDE];
  __shared__ __align__(16) u16 high[HEADS][WEIGHT_STRIDE], low[HEADS][WEIGHT_STRIDE];
  __shared__ float factor[HEADS], part_of[MAX_SHARES + GROUP * AT_ONCE];
  const int split = blockIdx.x, kv = blockIdx.y, row = blockIdx.z, splits = gridDim.x, kv_heads = gridDim.y;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, t = lane & 3;
  const uint4 none = make_uint4(0, 0, 0, 0);
  let_next_start();
  // What is brought ahead comes behind our own keys and values, where these are asked for first.
  const auto wait = [&] {
    const int block = (row * kv_heads + kv) * splits + split, blocks = gridDim.z * kv_heads * splits;
    if (tid == 0) bring_ahead(Ahead AHEAD_GIVEN, block, blocks);
    wait_for_previous();
  };
#if ROTATES
  // Of the newest key and value: a ring is written round and round. What the same step computes is not there yet.
  const int place = (int)((u64)__ldcg(positions + row) % (u32)places);
#endif
  const Share share = share_of(positions, row, places, splits);
  if (split >= share.splits) return wait();
  const int first = split * share.tiles * TILE, end = min(share.places, first + share.tiles * TILE);
#if PAGE
  const int* pages = table + (size_t)row * table_stride;
  const auto page_of = [&](int at) { return at < end ? __ldcg(pages + at / PAGE) : 0; };
  const auto in_page = [](int page, int at) { return ((size_t)page * PAGE + at % PAGE) * HEAD; };
  const size_t cache = (size_t)kv * pool_places * HEAD, tile = in_page(page_of(first), first);
  int next_page = page_of(first + TILE);  // asked for a tile ahead
#else
  const size_t cache = ((size_t)row * kv_heads + kv) * places * HEAD, tile = (size_t)first * HEAD;
#endif
  keys += cache;
  values += cache;

  // What is past the row's places is not read: nobody knows what lies there.
  const int slice = warp / 2, mine = (warp & 1) * 16 + g, d_k = slice * 128 + t * 8, d_v = warp * 64 + g * 8;
  const u16 *k_at = keys + tile + mine * HEAD + d_k, *v_at = values + tile + t * 4 * HEAD + d_v;
  int score_at = (slice * HEADS + 2 * t) * SCORE_STRIDE + mine, weight_at = g * WEIGHT_STRIDE + t * 4;
  uint4 k0[4], k1[4], v[2][4], qs[4][TILES];
#define LOAD_K(at, without)                                                                                              \
  _Pragma("unroll") for (int i = 0; i < 4; i++) {                                                                        \
    const int one = (at) + mine, two = one + 8;                                                                          \
    const bool is_one = one < end && one != (without), is_two = two < end && two != (without);                           \
    k0[i] = is_one && has_value(d_k + i * 32) ? __ldcg((const uint4*)(k_at + i * 32)) : none;                            \
    k1[i] = is_two && has_value(d_k + i * 32) ? __ldcg((const uint4*)(k_at + 8 * HEAD + i * 32)) : none;                 \
  }
#define LOAD_V(at, without)                                                                                              \
  _Pragma("unroll") for (int s = 0; s < 2; s++) _Pragma("unroll") for (int i = 0; i < 4; i++) {                          \
    const int one = (at) + s * 16 + t * 4 + i;                                                                           \
    const bool is_one = one < end && one != (without) && has_value(d_v);                                                 \
    v[s][i] = is_one ? __ldcg((const uint4*)(v_at + (s * 16 + i) * HEAD)) : none;                                        \
  }
#if ROTATES
  constexpr int ROW = DIM + 8;  // 8 rows of 16 bytes fall on different banks
  __shared__ __align__(16) u16 turned[HEADS + 2][ROW];  // queries, the new key, the new value
  int query_at = g * ROW + d_k;
  const int newest = place >= first && place < end ? place : -1;  // of the row, if this block looks at it
  const bool writes = mode && newest >= 0;
  // A warp turns queries, then the new key, then the new value: it reads all (or two) before it turns one.
  constexpr int EACH = GROUP + 2 > WARPS ? 2 : 1;
  const int jobs = GROUP + (!writes ? 0 : mode == 1 ? 2 : 1);
  const u16* head_at[EACH];
  Part x[EACH], weight[EACH];
#define TAKE_JOBS(from)                                                                                                      \
  _Pragma("unroll") for (int i = 0; i < EACH; i++) {                                                                         \
    const int job = (from) + i * WARPS, behind = kv_heads * GROUP * Q_STEP + kv + (job - GROUP) * kv_heads;                  \
    const int head = job < GROUP ? (kv * GROUP + job) * Q_STEP : behind;                                                     \
    head_at[i] = job < jobs ? q + (size_t)row * q_stride + head * HEAD : nullptr;                                            \
    weight[i] = part(job < GROUP ? q_weight : job == GROUP && writes ? k_weight : nullptr);                                  \
  }
  if (!EARLY) wait();
  LOAD_K(first, newest)
  LOAD_V(first, newest)
  TAKE_JOBS(warp)
  cos += (size_t)row * cos_stride, sin += (size_t)row * sin_stride;
  as_is(k_at), as_is(v_at), as_is(score_at), as_is(weight_at), as_is(query_at);
  if (EARLY) wait();
#pragma unroll
  for (int i = 0; i < EACH; i++) x[i] = part(head_at[i]);
  const Part c = turning_part(cos), s = turning_part(sin);
#define NEW_PLACE(from_k, from_v)                                                                      \
  {                                                                                                    \
    const int of_k = newest - first - mine, of_v = newest - first - t * 4;                             \
    _Pragma("unroll") for (int i = 0; i < 4; i++) {                                                    \
      if (of_k == 0 && has_value(d_k + i * 32)) k0[i] = from_k(d_k + i * 32);                          \
      if (of_k == 8 && has_value(d_k + i * 32)) k1[i] = from_k(d_k + i * 32);                          \
    }                                                                                                  \
    _Pragma("unroll") for (int s = 0; s < 2; s++) _Pragma("unroll") for (int i = 0; i < 4; i++)        \
      if (of_v == s * 16 + i && has_value(d_v)) v[s][i] = from_v(d_v);                                 \
  }
#if PAGE
  const size_t new_at = newest < 0 ? 0 : in_page(max(page_of(newest), 1), newest);
#else
  const size_t new_at = (size_t)max(newest, 0) * HEAD;
#endif
  u16 *const new_key = keys + new_at, *const new_value = values + new_at;
  if (newest >= 0 && !mode) {  // an earlier layer of this step wrote it
#define FROM_K(d) __ldcg((const uint4*)(new_key + (d)))
#define FROM_V(d) __ldcg((const uint4*)(new_value + (d)))
    NEW_PLACE(FROM_K, FROM_V)
  }
#pragma unroll 1
  for (int from = warp; from < jobs; from += EACH * WARPS) {
    if (GROUP + 2 > EACH * WARPS && from != warp) {
      TAKE_JOBS(from)
#pragma unroll
      for (int i = 0; i < EACH; i++) x[i] = part(head_at[i]);
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int job = from + i * WARPS;
      if (job >= jobs) continue;
      const bool is_key = job == GROUP, is_value = job > GROUP, is_both = is_key && mode == 2;
      turn_head(x[i], weight[i], c, s, eps, !is_value, turned[is_key ? HEADS : is_value ? 0 : job], is_key, new_key,
                is_value || is_both, turned[HEADS + 1], new_value);
    }
  }
  __syncthreads();
  if (writes) {
#define TURNED_K(d) (*(const uint4*)&turned[HEADS][d])
#define TURNED_V(d) (*(const uint4*)&turned[HEADS + 1][d])
    NEW_PLACE(TURNED_K, TURNED_V)
  }
#define QUERY(n, i) (*(const uint4*)&turned[0][query_at + (n) * 8 * ROW + (i) * 32])
#else
  wait();
  LOAD_K(first, -1)
  LOAD_V(first, -1)
#define QUERY(n, i) __ldcg((const uint4*)(q + (size_t)row * q_stride + (kv * GROUP + (n) * 8 + g) * HEAD + d_k + (i) * 32))
#endif
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int n = 0; n < TILES; n++) {
      const int head = n * 8 + g, d = d_k + i * 32;
      qs[i][n] = (ROTATES || head < GROUP) && has_value(d) ? QUERY(n, i) : none;  // other columns are nobody's
    }
  float most[OWN], total[OWN], sum[4][TILES][4];
#pragma unroll
  for (int j = 0; j < OWN; j++) most[j] = -__uint_as_float(0x7f800000), total[j] = 0.f;
#ifdef SINKS
#pragma unroll
  for (int j = 0; j < OWN; j++)  // the first split counts it
    if (split == 0 && warp + j * WARPS < GROUP) most[j] = value(__ldg(sinks + kv * GROUP + warp + j * WARPS), HALF), total[j] = 1.f;
#endif
#ifdef GROWTH
  scaling *= rounded(1.f + GROWTH * logf(1.f + floorf((float)__ldcg(positions + row) / GROWS_AT)), HALF);
#endif
#pragma unroll
  for (int w = 0; w < 4; w++)
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) sum[w][n][i] = 0.f;

#if PAGE
  const u16* v_next = v_at;
#endif
#pragma unroll 1
  for (int at = first; at < end; at += TILE) {
    float c[TILES][4];
#pragma unroll
    for (int n = 0; n < TILES; n++) {
      c[n][0] = c[n][1] = c[n][2] = c[n][3] = 0.f;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        product(c[n], k0[i].x, k1[i].x, k0[i].y, k1[i].y, qs[i][n].x, qs[i][n].y);
        product(c[n], k0[i].z, k1[i].z, k0[i].w, k1[i].w, qs[i][n].z, qs[i][n].w);
      }
      float* to = &scores[0][0][score_at + n * 8 * SCORE_STRIDE];
      to[0] = c[n][0];
      to[SCORE_STRIDE] = c[n][1];
      to[8] = c[n][2];
      to[SCORE_STRIDE + 8] = c[n][3];
    }
    const bool goes_on = at + TILE < end;
    if (goes_on) {
#if PAGE
      const size_t to = in_page(next_page, at + TILE);
      k_at = keys + to + mine * HEAD + d_k, v_next = values + to + t * 4 * HEAD + d_v;
      next_page = page_of(at + 2 * TILE);
#else
      k_at += TILE * HEAD;
#endif
      LOAD_K(at + TILE, -1)
    }
    __syncthreads();
    // A warp is a query here, a lane a place.
    float weight[OWN], down[OWN];
#pragma unroll
    for (int j = 0; j < OWN; j++) {
      const int head = warp + j * WARPS;
      if (GROUP % WARPS && head >= GROUP) continue;
      float s = 0.f;
#pragma unroll
      for (int k = 0; k < SLICES; k++) s += scores[k][head][lane];
      s *= scaling;
      if (softcap > 0.f) s = softcap * tanhf(s / softcap);
      if (at + lane >= end) s = -__uint_as_float(0x7f800000);
      const float larger = fmaxf(most[j], warp_max(s));
      weight[j] = __expf(s - larger), down[j] = __expf(most[j] - larger);
      most[j] = larger;
      const u16 h = stored(weight[j], HALF);
      high[head][lane] = h;
      low[head][lane] = stored(weight[j] - value(h, HALF), HALF);
      if (lane == 0) factor[head] = down[j];
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < OWN; j++)  // nobody waits for it
      if (GROUP % WARPS == 0 || warp + j * WARPS < GROUP) total[j] = total[j] * down[j] + warp_sum(weight[j]);
#pragma unroll
    for (int n = 0; n < TILES && at > first; n++) {
      const float even = factor[n * 8 + 2 * t], odd = factor[n * 8 + 2 * t + 1];
#pragma unroll
      for (int w = 0; w < 4; w++) sum[w][n][0] *= even, sum[w][n][1] *= odd, sum[w][n][2] *= even, sum[w][n][3] *= odd;
    }
#pragma unroll
    for (int s = 0; s < 2; s++)
#pragma unroll
      for (int n = 0; n < TILES; n++) {
        const uint2 h = *(const uint2*)&high[n * 8][weight_at + s * 16], l = *(const uint2*)&low[n * 8][weight_at + s * 16];
#define OUTPUT(w, field)                                                                                                 \
  {                                                                                                                      \
    const u32 a0 = __byte_perm(v[s][0].field, v[s][1].field, 0x5410), a1 = __byte_perm(v[s][0].field, v[s][1].field, 0x7632); \
    const u32 a2 = __byte_perm(v[s][2].field, v[s][3].field, 0x5410), a3 = __byte_perm(v[s][2].field, v[s][3].field, 0x7632); \
    product(sum[w][n], a0, a1, a2, a3, h.x, h.y);                                                                  \
    product(sum[w][n], a0, a1, a2, a3, l.x, l.y);                                                                  \
  }
        OUTPUT(0, x) OUTPUT(1, y) OUTPUT(2, z) OUTPUT(3, w)
      }
    if (goes_on) {
#if PAGE
      v_at = v_next;
#else
      v_at += TILE * HEAD;
#endif
      LOAD_V(at + TILE, -1)
    }
  }

  // sum[w][n]: values d_v + 2 w and d_v + 2 w + 1 (then [2], [3]) of queries n 8 + 2 t and one more ([0], [1]).
  const bool alone = share.splits == 1;
  const int own = ((row * kv_heads + kv) * splits + split) * GROUP;
#pragma unroll
  for (int j = 0; j < OWN; j++) {
    const int head = warp + j * WARPS;
    if (head >= GROUP || lane) continue;
    part_of[head] = total[j];
    if (!alone) sums[own + head] = make_float2(most[j], total[j]);
  }
  if (alone) __syncthreads();
#pragma unroll
  for (int n = 0; n < TILES; n++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int head = n * 8 + 2 * t + i;
      if (head >= GROUP || !has_value(d_v)) continue;
      float o[8] = {sum[0][n][i], sum[0][n][2 + i], sum[1][n][i], sum[1][n][2 + i],
                    sum[2][n][i], sum[2][n][2 + i], sum[3][n][i], sum[3][n][2 + i]};
      if (alone) {
        const float whole = part_of[head];
#pragma unroll
        for (int e = 0; e < 8; e++) o[e] /= whole;
        store<8>(out + (size_t)((row * kv_heads + kv) * GROUP + head) * HEAD + d_v, o, HALF);
      } else {
        float4* to = (float4*)(parts + (size_t)(own + head) * HEAD + d_v);
        __stcg(to, make_float4(o[0], o[1], o[2], o[3]));
        __stcg(to + 1, make_float4(o[4], o[5], o[6], o[7]));
      }
    }
  if (alone || !combine_here) return;

  // The block that arrives last adds the parts, always in the same order. Thread 0 speaks for the block: what the others wrote
  // before the barrier is seen by whoever arrives later, and by all its threads behind its barrier.
  __syncthreads();
  if (!__syncthreads_or(tid == 0 && count_up(arrived + row * kv_heads + kv, share.splits - 1) == share.splits - 1)) return;
  constexpr int THREADS = WARPS * 32, QUADS = HEAD / 4, COUNT = GROUP * QUADS, EACH_ADDS = COUNT > THREADS ? 2 : 1;
  const size_t all = (size_t)(row * kv_heads + kv) * splits * GROUP;
  const int padded = (share.splits + AT_ONCE - 1) / AT_ONCE * AT_ONCE;
  const float4* from_parts = (const float4*)(parts + all * HEAD) + tid;
  out += (size_t)(row * kv_heads + kv) * GROUP * HEAD;
#pragma unroll 1
  for (int e = 0; e < COUNT; e += EACH_ADDS * THREADS) {
    float4 o[EACH_ADDS] = {};
#pragma unroll 1
    for (int from = 0; from < share.splits; from += AT_ONCE) {
      // All that a thread reads is asked for before anything is used: four values of up to 16 splits, twice.
      float4 p[EACH_ADDS][AT_ONCE];
      const float4* one = from_parts + from * COUNT + e;
      const int left = share.splits - from;
#define TAKE_PARTS(condition)                                                                               \
  _Pragma("unroll") for (int k = 0; k < AT_ONCE; k++) _Pragma("unroll") for (int i = 0; i < EACH_ADDS; i++) { \
    const bool is_there = COUNT % (EACH_ADDS * THREADS) == 0 || e + i * THREADS + tid < COUNT;              \
    p[i][k] = is_there && (condition) ? __ldcg(one + k * COUNT + i * THREADS) : make_float4(0.f, 0.f, 0.f, 0.f); \
  }
      if (left >= AT_ONCE) {
        TAKE_PARTS(true)
      } else {
        TAKE_PARTS(k < left)
      }
      if (e == 0 && from == 0) {
#pragma unroll 1
        for (int head = warp; head < GROUP; head += WARPS)
          if (share.splits <= 32)
            shares<1>(sums + all, head, share.splits, part_of + head * padded);
          else
            shares<MAX_SPLITS / 32>(sums + all, head, share.splits, part_of + head * padded);
        __syncthreads();
      }
#pragma unroll
      for (int i = 0; i < EACH_ADDS; i++) {
        const float* factors = part_of + min((e + i * THREADS + tid) / QUADS, GROUP - 1) * padded + from;
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
          const float f = factors[k];
          o[i].x = fmaf(f, p[i][k].x, o[i].x), o[i].y = fmaf(f, p[i][k].y, o[i].y);
          o[i].z = fmaf(f, p[i][k].z, o[i].z), o[i].w = fmaf(f, p[i][k].w, o[i].w);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < EACH_ADDS; i++)
      if (e + i * THREADS + tid < COUNT) store<4>(out + (e + i * THREADS + tid) * 4, &o[i].x, HALF);
  }
}

// The splits of one query of one row, where `attend` does not add them itself. A block is 128 values of the head; its four
// warps take every fourth split. Grid: [pieces of a head, heads, n].
extern "C" __global__ void __launch_bounds__(128) attend_combine(
    const i64* positions, const float* parts, const float2* sums, u16* out, int places, int splits) {
  __shared__ float part_of[MAX_SPLITS];
  __shared__ __align__(16) float found[4][128];
  const int head = blockIdx.y, heads = gridDim.y, row = blockIdx.z, kv = head / GROUP, of_group = head - kv * GROUP;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, at = blockIdx.x * 128 + lane * 4;
  let_next_start();
  const Share share = share_of(positions, row, places, splits);
  wait_for_previous();
  if (share.splits == 1) return;
  const size_t all = (size_t)(row * (heads / GROUP) + kv) * splits * GROUP;
  const float4* from_parts = (const float4*)(parts + (all + of_group) * HEAD + at);
  float4 o = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
  for (int from = 0; from < share.splits; from += 4 * AT_ONCE) {
    float4 p[AT_ONCE];
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++) {
      const int s = from + warp + 4 * k;
      p[k] = at < HEAD && s < share.splits ? __ldcg(from_parts + s * (GROUP * HEAD / 4)) : make_float4(0.f, 0.f, 0.f, 0.f);
    }
    if (from == 0) {
      if (warp == 0) shares<MAX_SPLITS / 32>(sums + all, of_group, share.splits, part_of);
      __syncthreads();
    }
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++) {
      const int s = from + warp + 4 * k;
      const float f = s < share.splits ? part_of[s] : 0.f;
      o.x = fmaf(f, p[k].x, o.x), o.y = fmaf(f, p[k].y, o.y), o.z = fmaf(f, p[k].z, o.z), o.w = fmaf(f, p[k].w, o.w);
    }
  }
  *(float4*)&found[warp][lane * 4] = o;
  __syncthreads();
  const int d = blockIdx.x * 128 + tid;
  if (d < HEAD)
    out[((size_t)row * heads + head) * HEAD + d] = stored(found[0][tid] + found[1][tid] + found[2][tid] + found[3][tid], HALF);
}
