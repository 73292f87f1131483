// Attention of one token a row over its keys and values. Read runtime/fused.py first. values.cuh stands in front of this.
// Compiled for one shape: DIM (128, 256 or 512: the head's size or more), TILES (1 or 2: of 8 queries that share a head of
// keys), HALF (1: fp16, 0: bf16), ROTATES (1: q is what the products made; each block norms and turns the queries that it needs,
// and the block whose share has the new place writes the new key and value into the cache first).
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
#define MAX_SHARES 512    // splits x heads that one block may combine

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

// The factor of each split's part: e^(its maximum - the largest) / the sum of all. One warp; sums [splits][heads].
__device__ __forceinline__ void shares(const float2* sums, int heads, int head, int splits, float* to) {
  const int lane = threadIdx.x & 31;
  float most = -__uint_as_float(0x7f800000), all = 0.f;
  for (int s = lane; s < splits; s += 32) most = fmaxf(most, __ldcg(sums + s * heads + head).x);
  most = warp_max(most);
  for (int s = lane; s < splits; s += 32) {
    const float2 v = __ldcg(sums + s * heads + head);
    all += __expf(v.x - most) * v.y;
  }
  all = warp_sum(all);
  for (int s = lane; s < splits; s += 32) to[s] = __expf(__ldcg(sums + s * heads + head).x - most) / all;
}

#if ROTATES
// One head of a row: norm, rotation (cos null: none) as rope_write in fused.cu. A warp; `dim` values to `to`, and before the
// weight and the rotation to `plain`, where these are given. Lane l has V values from l V on and their partners half a head up.
__device__ __forceinline__ void turn_head(
    const u16* from, const u16* weight, float eps, const u16* cos, const u16* sin, int dim, u16* to, u16* plain) {
  constexpr int V = DIM / 64;
  const int h = dim / 2, at = (threadIdx.x & 31) * V;
  float a[V] = {}, b[V] = {}, w0[V], w1[V], c0[V], c1[V], s0[V], s1[V], sum = 0.f;
  if (at < h) {
    load<V>(a, from + at, HALF);
    load<V>(b, from + h + at, HALF);
    if (to) {
      load<V>(w0, weight + at, HALF), load<V>(w1, weight + h + at, HALF);
      load<V>(c0, cos + at, HALF), load<V>(c1, cos + h + at, HALF);
      load<V>(s0, sin + at, HALF), load<V>(s1, sin + h + at, HALF);
    }
  }
#pragma unroll
  for (int i = 0; i < V; i++) sum = fmaf(a[i], a[i], fmaf(b[i], b[i], sum));
  const float r = rsqrtf(warp_sum(sum) / dim + eps);
  if (at >= h) return;
  if (plain) {
    float p0[V], p1[V];
#pragma unroll
    for (int i = 0; i < V; i++) p0[i] = a[i] * r, p1[i] = b[i] * r;
    store<V>(plain + at, p0, HALF);
    store<V>(plain + h + at, p1, HALF);
  }
  if (!to) return;
#pragma unroll
  for (int i = 0; i < V; i++) {
    const float x = rounded(a[i] * r * w0[i], HALF), y = rounded(b[i] * r * w1[i], HALF);
    a[i] = rounded(x * c0[i], HALF) + rounded(-y * s0[i], HALF);
    b[i] = rounded(y * c1[i], HALF) + rounded(x * s1[i], HALF);
  }
  store<V>(to + at, a, HALF);
  store<V>(to + h + at, b, HALF);
}
#endif

// mode (ROTATES): 0 the cache belongs to another layer, 1 own keys and values, 2 the values are the keys before their weight.
extern "C" __global__ void __launch_bounds__(DIM / 2) attend(
    const u16* q, int q_stride, const u16* q_weight, const u16* k_weight, float eps, const u16* cos, int cos_stride,
    const u16* sin, int sin_stride, const i64* place_of, int mode, u16* keys, u16* values, const i64* positions, float* parts, float2* sums, u32* arrived,
    u16* out, int heads, int kv_heads, int dim, int places, int splits, float scaling, float softcap, int combine_here,
    const u8* ahead0, int pieces0, const u8* ahead1, int pieces1) {
  constexpr int WARPS = DIM / 64, SLICES = DIM / 128, HEADS = 8 * TILES, OWN = HEADS / WARPS > 0 ? HEADS / WARPS : 1;
  __shared__ float scores[SLICES][HEADS][SCORE_STRIDE];
  __shared__ __align__(16) u16 high[HEADS][WEIGHT_STRIDE], low[HEADS][WEIGHT_STRIDE];
  __shared__ float factor[HEADS], part_of[MAX_SHARES];
  __shared__ int is_last;
  const int split = blockIdx.x, kv = blockIdx.y, row = blockIdx.z, group = heads / kv_heads;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, t = lane & 3;
  const uint4 none = make_uint4(0, 0, 0, 0);
  let_next_start();
  bring_ahead(ahead0, pieces0, ahead1, pieces1, (row * kv_heads + kv) * splits + split, gridDim.z * kv_heads * splits);
  wait_for_previous();
  const Share share = share_of(positions, row, places, splits);
  if (split >= share.splits) return;
  const int first = split * share.tiles * TILE, end = min(share.places, first + share.tiles * TILE);
  const size_t cache = ((size_t)row * kv_heads + kv) * places * dim;
  keys += cache;
  values += cache;

  // What is past the row's places is not read: nobody knows what lies there.
  const int slice = warp / 2, mine = (warp & 1) * 16 + g, d_k = slice * 128 + t * 8, d_v = warp * 64 + g * 8;
  uint4 k0[4], k1[4], v[2][4], qs[4][TILES];
#define LOAD_K(at)                                                                                                       \
  _Pragma("unroll") for (int i = 0; i < 4; i++) {                                                                        \
    const int d = d_k + i * 32;                                                                                          \
    k0[i] = (at) + mine < end && d < dim ? __ldcg((const uint4*)(keys + (size_t)((at) + mine) * dim + d)) : none;         \
    k1[i] = (at) + mine + 8 < end && d < dim ? __ldcg((const uint4*)(keys + (size_t)((at) + mine + 8) * dim + d)) : none; \
  }
#define LOAD_V(at)                                                                                          \
  _Pragma("unroll") for (int s = 0; s < 2; s++) _Pragma("unroll") for (int i = 0; i < 4; i++) {             \
    const int place = (at) + s * 16 + t * 4 + i;                                                            \
    v[s][i] = place < end && d_v < dim ? __ldcg((const uint4*)(values + (size_t)place * dim + d_v)) : none; \
  }
#if ROTATES
  constexpr int ROW = DIM + 8;  // 8 rows of 16 bytes fall on different banks
  __shared__ __align__(16) u16 turned[HEADS][ROW];
  const i64 place = mode ? __ldcg(place_of + row) : -1;
  const bool has_place = place >= first && place < end;  // of the row's new key and value
  if (!has_place) {
    LOAD_K(first)
    LOAD_V(first)
  }
  q += (size_t)row * q_stride;
  cos += (size_t)row * cos_stride;
  sin += (size_t)row * sin_stride;
  for (int head = warp; head < group + 2 * has_place; head += WARPS) {
    if (head < group) {
      turn_head(q + (size_t)(kv * group + head) * dim, q_weight, eps, cos, sin, dim, turned[head], nullptr);
    } else if (head == group) {
      u16 *key = keys + (size_t)place * dim, *value = values + (size_t)place * dim;
      turn_head(q + (size_t)(heads + kv) * dim, k_weight, eps, cos, sin, dim, key, mode == 2 ? value : nullptr);
    } else if (mode == 1) {
      turn_head(q + (size_t)(heads + kv_heads + kv) * dim, nullptr, eps, cos, sin, dim, nullptr, values + (size_t)place * dim);
    }
  }
  __syncthreads();
  if (has_place) {
    LOAD_K(first)
    LOAD_V(first)
  }
#define QUERY(head, d) (*(const uint4*)&turned[head][d])
#else
  LOAD_K(first)
  LOAD_V(first)
#define QUERY(head, d) __ldcg((const uint4*)(q + (size_t)row * q_stride + (size_t)(kv * group + (head)) * dim + (d)))
#endif
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int n = 0; n < TILES; n++) {
      const int head = n * 8 + g, d = d_k + i * 32;
      qs[i][n] = head < group && d < dim ? QUERY(head, d) : none;
    }
  float most[OWN], total[OWN], sum[4][TILES][4];
#pragma unroll
  for (int j = 0; j < OWN; j++) most[j] = -__uint_as_float(0x7f800000), total[j] = 0.f;
#pragma unroll
  for (int w = 0; w < 4; w++)
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) sum[w][n][i] = 0.f;

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
      float* to = scores[slice][n * 8 + 2 * t] + mine;
      to[0] = c[n][0];
      to[SCORE_STRIDE] = c[n][1];
      to[8] = c[n][2];
      to[SCORE_STRIDE + 8] = c[n][3];
    }
    LOAD_K(at + TILE)
    __syncthreads();
    // A warp is a query here, a lane a place.
#pragma unroll
    for (int j = 0; j < OWN; j++) {
      const int head = warp + j * WARPS;
      if (head >= group) continue;
      float s = 0.f;
#pragma unroll
      for (int k = 0; k < SLICES; k++) s += scores[k][head][lane];
      s *= scaling;
      if (softcap > 0.f) s = softcap * tanhf(s / softcap);
      if (at + lane >= end) s = -__uint_as_float(0x7f800000);
      const float larger = fmaxf(most[j], warp_max(s)), weight = __expf(s - larger), down = __expf(most[j] - larger);
      total[j] = total[j] * down + warp_sum(weight);
      most[j] = larger;
      const u16 h = stored(weight, HALF);
      high[head][lane] = h;
      low[head][lane] = stored(weight - value(h, HALF), HALF);
      if (lane == 0) factor[head] = down;
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < TILES; n++) {
      const float even = factor[n * 8 + 2 * t], odd = factor[n * 8 + 2 * t + 1];
#pragma unroll
      for (int w = 0; w < 4; w++) sum[w][n][0] *= even, sum[w][n][1] *= odd, sum[w][n][2] *= even, sum[w][n][3] *= odd;
    }
#pragma unroll
    for (int s = 0; s < 2; s++)
#pragma unroll
      for (int n = 0; n < TILES; n++) {
        const uint2 h = *(const uint2*)&high[n * 8 + g][s * 16 + t * 4], l = *(const uint2*)&low[n * 8 + g][s * 16 + t * 4];
#define OUTPUT(w, field)                                                                                                 \
  {                                                                                                                      \
    const u32 a0 = __byte_perm(v[s][0].field, v[s][1].field, 0x5410), a1 = __byte_perm(v[s][0].field, v[s][1].field, 0x7632); \
    const u32 a2 = __byte_perm(v[s][2].field, v[s][3].field, 0x5410), a3 = __byte_perm(v[s][2].field, v[s][3].field, 0x7632); \
    product(sum[w][n], a0, a1, a2, a3, h.x, h.y);                                                                  \
    product(sum[w][n], a0, a1, a2, a3, l.x, l.y);                                                                  \
  }
        OUTPUT(0, x) OUTPUT(1, y) OUTPUT(2, z) OUTPUT(3, w)
      }
    LOAD_V(at + TILE)
  }

  // sum[w][n]: values d_v + 2 w and d_v + 2 w + 1 (then [2], [3]) of queries n 8 + 2 t and one more ([0], [1]).
  const bool alone = share.splits == 1;
  const size_t own = ((size_t)(row * kv_heads + kv) * splits + split) * group;
#pragma unroll
  for (int j = 0; j < OWN; j++) {
    const int head = warp + j * WARPS;
    if (head >= group || lane) continue;
    part_of[head] = total[j];
    if (!alone) sums[own + head] = make_float2(most[j], total[j]);
  }
  if (alone) __syncthreads();
#pragma unroll
  for (int n = 0; n < TILES; n++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int head = n * 8 + 2 * t + i;
      if (head >= group || d_v >= dim) continue;
      float o[8] = {sum[0][n][i], sum[0][n][2 + i], sum[1][n][i], sum[1][n][2 + i],
                    sum[2][n][i], sum[2][n][2 + i], sum[3][n][i], sum[3][n][2 + i]};
      if (alone) {
        const float whole = part_of[head];
#pragma unroll
        for (int e = 0; e < 8; e++) o[e] /= whole;
        store<8>(out + ((size_t)row * heads + kv * group + head) * dim + d_v, o, HALF);
      } else {
        float4* to = (float4*)(parts + (own + head) * dim + d_v);
        __stcg(to, make_float4(o[0], o[1], o[2], o[3]));
        __stcg(to + 1, make_float4(o[4], o[5], o[6], o[7]));
      }
    }
  if (alone || !combine_here) return;

  // The block that arrives last adds the parts, always in the same order, and leaves the counter at zero.
  __threadfence();
  __syncthreads();
  if (tid == 0) {
    is_last = atomicAdd(arrived + row * kv_heads + kv, 1u) == share.splits - 1;
    if (is_last) arrived[row * kv_heads + kv] = 0;
  }
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  const size_t all = (size_t)(row * kv_heads + kv) * splits * group;
  for (int head = warp; head < group; head += WARPS) shares(sums + all, group, head, share.splits, part_of + head * splits);
  __syncthreads();
  const int quads = dim / 4;
#pragma unroll 1
  for (int e = tid; e < group * quads; e += WARPS * 32) {
    const int head = e / quads;
    const float* from = parts + (all + head) * dim + (e - head * quads) * 4;
    float o[4] = {};
#pragma unroll 16
    for (int s = 0; s < share.splits; s++) {
      const float4 p = __ldcg((const float4*)(from + (size_t)s * group * dim));
      const float f = part_of[head * splits + s];
      o[0] = fmaf(f, p.x, o[0]), o[1] = fmaf(f, p.y, o[1]), o[2] = fmaf(f, p.z, o[2]), o[3] = fmaf(f, p.w, o[3]);
    }
    store<4>(out + ((size_t)row * heads + kv * group) * dim + e * 4, o, HALF);
  }
}

// The splits of one query of one row, where `attend` does not add them itself. A block is 128 values of the head; its four
// warps take every fourth split. Grid: [pieces of a head, heads, n].
extern "C" __global__ void __launch_bounds__(128) attend_combine(
    const i64* positions, const float* parts, const float2* sums, u16* out, int heads, int kv_heads, int dim, int places,
    int splits, int half) {
  __shared__ float part_of[MAX_SPLITS];
  __shared__ __align__(16) float found[4][128];
  const int head = blockIdx.y, row = blockIdx.z, group = heads / kv_heads, kv = head / group, of_group = head - kv * group;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, at = blockIdx.x * 128 + lane * 4;
  let_next_start();
  wait_for_previous();
  const Share share = share_of(positions, row, places, splits);
  if (share.splits == 1) return;
  const size_t all = (size_t)(row * kv_heads + kv) * splits * group;
  if (warp == 0) shares(sums + all, group, of_group, share.splits, part_of);
  __syncthreads();
  float4 o = make_float4(0.f, 0.f, 0.f, 0.f);
  if (at < dim) {
    const float* from = parts + (all + of_group) * dim + at;
#pragma unroll 8
    for (int s = warp; s < share.splits; s += 4) {
      const float4 p = __ldcg((const float4*)(from + (size_t)s * group * dim));
      const float f = part_of[s];
      o.x = fmaf(f, p.x, o.x), o.y = fmaf(f, p.y, o.y), o.z = fmaf(f, p.z, o.z), o.w = fmaf(f, p.w, o.w);
    }
  }
  *(float4*)&found[warp][lane * 4] = o;
  __syncthreads();
  const int d = blockIdx.x * 128 + tid;
  if (d < dim)
    out[((size_t)row * heads + head) * dim + d] = stored(found[0][tid] + found[1][tid] + found[2][tid] + found[3][tid], half);
}
