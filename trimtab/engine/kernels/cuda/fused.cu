// What lies between the products of a decode step: norms, rotation and cache writes, gates. Read engine/kernels/attention_and_norms.py first: it
// says what each kernel computes and in which shapes. n rows, one token each. values.cuh stands in front of this.
//
// Values are bf16 or fp16 in memory and float32 in registers; `rounded` stands where transformers' modules round between
// two operations, so that only the order of a sum tells the two apart.

// h = (residual + norm(y) post) scalar, x = norm(h) next; without post: h = (residual + y) scalar. form: where a norm rounds
// (values.cuh). A block is a row, a thread 8 values.
extern "C" __global__ void __launch_bounds__(1024) add_norm(
    const u16* y, int y_stride, const u16* residual, int residual_stride, const u16* post, const u16* next,
    const u16* scalar, u16* out_h, int h_stride, u16* out_x, int x_stride, int width, float eps, int form, int half) {
  __shared__ float first[32], second[32];
  const int row = blockIdx.x, at = threadIdx.x * 8;
  const bool live = at < width;
  float h[8] = {}, post_weight[8], next_weight[8];
  let_next_start();
  // Weights do not come from the kernel in front.
#pragma unroll
  for (int i = 0; i < 8; i++) post_weight[i] = next_weight[i] = form == 2 ? 0.f : 1.f;
  if (live && post) load<8>(post_weight, post + at, half);
  if (live && next) load<8>(next_weight, next + at, half);
  const float factor = scalar ? value(__ldcg(scalar), half) : 1.f;
  wait_for_previous();
  if (live) load<8>(h, residual + (size_t)row * residual_stride + at, half);
  if (y) {
    float v[8] = {}, sum = 0.f;
    if (live) load<8>(v, y + (size_t)row * y_stride + at, half);
#pragma unroll
    for (int i = 0; i < 8; i++) sum = fmaf(v[i], v[i], sum);
    if (post) {
      const float r = rsqrtf(block_sum(sum, first) / width + eps);
#pragma unroll
      for (int i = 0; i < 8; i++) v[i] = rounded(weighted(v[i] * r, post_weight[i], form, half), half);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) h[i] = rounded(h[i] + v[i], half);
  }
  if (scalar) {
#pragma unroll
    for (int i = 0; i < 8; i++) h[i] = rounded(h[i] * factor, half);
  }
  if (out_h && live) store<8>(out_h + (size_t)row * h_stride + at, h, half);
  if (out_x) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < 8; i++) sum = fmaf(h[i], h[i], sum);
    const float r = rsqrtf(block_sum(sum, second) / width + eps);
#pragma unroll
    for (int i = 0; i < 8; i++) h[i] = weighted(h[i] * r, next_weight[i], form, half);
    if (live) store<8>(out_x + (size_t)row * x_stride + at, h, half);
  }
}

// x = norm(h) scale factor, rounded behind each: the input of a router (engine/kernels/routers.py). A block is a row, a thread 8 values.
extern "C" __global__ void __launch_bounds__(1024) route_input(
    const u16* h, int h_stride, const u16* scale, float factor, u16* x, int width, float eps, int half) {
  __shared__ float sums[32];
  const int row = blockIdx.x, at = threadIdx.x * 8;
  const bool live = at < width;
  float v[8] = {}, own[8] = {}, sum = 0.f;
  let_next_start();
  if (live) load<8>(own, scale + at, half);
  wait_for_previous();
  if (live) load<8>(v, h + (size_t)row * h_stride + at, half);
#pragma unroll
  for (int i = 0; i < 8; i++) sum = fmaf(v[i], v[i], sum);
  const float r = rsqrtf(block_sum(sum, sums) / width + eps);
#pragma unroll
  for (int i = 0; i < 8; i++) v[i] = rounded(rounded(v[i] * r, half) * own[i], half) * factor;
  if (live) store<8>(x + (size_t)row * width + at, v, half);
}

// index, weights [n, chosen]: the most likely of softmax(logits [n, count]), by their chances; equal ones by their numbers. is_normed:
// weights add up to 1; scales [count] or null: a factor of each expert's. wide: weights are float32, else of the logits' type. A row
// that is no number chooses -1. A block is a row.
#define ROUTE_MOST 512
extern "C" __global__ void __launch_bounds__(32) route_choose(
    const u16* logits, int stride, int count, int chosen, int is_normed, const u16* scales, int wide, i64* index, void* weights, int half) {
  const int row = blockIdx.x, lane = threadIdx.x;
  float v[ROUTE_MOST / 32], most = __uint_as_float(0xff800000u), sum = 0.f;
  let_next_start();
  wait_for_previous();
#pragma unroll
  for (int i = 0; i < ROUTE_MOST / 32; i++) {
    const int e = lane + 32 * i;
    v[i] = e < count ? value(__ldcg(logits + (size_t)row * stride + e), half) : most;
    most = fmaxf(most, v[i]);
  }
  most = warp_max(most);
#pragma unroll
  for (int i = 0; i < ROUTE_MOST / 32; i++) {
    if (lane + 32 * i < count) v[i] = expf(v[i] - most), sum += v[i];
    else v[i] = -1.f;
  }
  sum = warp_sum(sum);
  float weight = 0.f;
  int number = -1;
  for (int k = 0; k < chosen; k++) {
    float best = -1.f;
    int at = -1;
#pragma unroll
    for (int i = 0; i < ROUTE_MOST / 32; i++)
      if (v[i] > best) best = v[i], at = lane + 32 * i;
#pragma unroll
    for (int d = 16; d; d /= 2) {
      const float other = __shfl_xor_sync(ALL, best, d);
      const int there = __shfl_xor_sync(ALL, at, d);
      if (there >= 0 && (at < 0 || other > best || (other == best && there < at))) best = other, at = there;
    }
#pragma unroll
    for (int i = 0; i < ROUTE_MOST / 32; i++)
      if (lane + 32 * i == at) v[i] = -1.f;
    if (lane == k) weight = best / sum, number = at;
  }
  if (sum != sum) number = -1;
  const float total = warp_sum(lane < chosen ? weight : 0.f);
  if (lane >= chosen) return;
  if (is_normed) weight = weight / total;
  if (scales && number >= 0) weight *= value(__ldcg(scales + number), half);
  const size_t place = (size_t)row * chosen + lane;
  index[place] = number;
  if (wide) ((float*)weights)[place] = weight;
  else ((u16*)weights)[place] = stored(weight, half);
}

// out = act(gate) up. kind 0: gelu by tanh, 1: silu, 2: gelu by erf. Grid: [pieces of a row, n].
template <int V>
__device__ __forceinline__ void gated(
    const u16* gate, int gate_stride, const u16* up, int up_stride, u16* out, int out_stride, int width, int kind, int half) {
  const int at = (blockIdx.x * blockDim.x + threadIdx.x) * V;
  const size_t row = blockIdx.y;
  let_next_start();
  wait_for_previous();
  if (at >= width) return;
  float a[V], b[V];
  load<V>(a, gate + row * gate_stride + at, half);
  load<V>(b, up + row * up_stride + at, half);
#pragma unroll
  for (int i = 0; i < V; i++) {
    a[i] = rounded(activated(a[i], kind), half) * b[i];
  }
  store<V>(out + row * out_stride + at, a, half);
}
#define GATED(name, V)                                                                                       \
  extern "C" __global__ void __launch_bounds__(128) name(                                                    \
      const u16* gate, int gate_stride, const u16* up, int up_stride, u16* out, int out_stride, int width,   \
      int kind, int half) {                                                                                  \
    gated<V>(gate, gate_stride, up, up_stride, out, out_stride, width, kind, half);                          \
  }
GATED(gated_8, 8)
GATED(gated_1, 1)

// y += made, or, with a gate (a value a row), sigmoid(gate) made. Grid: [pieces of a row, n].
template <int V>
__device__ __forceinline__ void add_gated(
    u16* y, int y_stride, const u16* made, int made_stride, const u16* gate, int gate_stride, int width, int half) {
  const int at = (blockIdx.x * blockDim.x + threadIdx.x) * V;
  const size_t row = blockIdx.y;
  let_next_start();
  wait_for_previous();
  if (at >= width) return;
  float sum[V], a[V];
  load<V>(sum, y + row * y_stride + at, half);
  load<V>(a, made + row * made_stride + at, half);
  if (gate) {
    const float share = rounded(1.f / (1.f + expf(-value(__ldcg(gate + row * gate_stride), half))), half);
#pragma unroll
    for (int i = 0; i < V; i++) a[i] = rounded(share * a[i], half);
  }
#pragma unroll
  for (int i = 0; i < V; i++) sum[i] += a[i];
  store<V>(y + row * y_stride + at, sum, half);
}
#define ADD_GATED(name, V)                                                                                     \
  extern "C" __global__ void __launch_bounds__(128) name(                                                      \
      u16* y, int y_stride, const u16* made, int made_stride, const u16* gate, int gate_stride, int width, int half) { \
    add_gated<V>(y, y_stride, made, made_stride, gate, gate_stride, width, half);                              \
  }
ADD_GATED(add_gated_8, 8)
ADD_GATED(add_gated_1, 1)

// A warp is a head of a row: queries first, then keys, then (own_values) values. Lane l holds V values from l V on in the
// lower half of the head and their partners in the upper half. Keys and values go to place_of[row] of the row and head, 0 without
// place_of; row_step, head_step: values from one to the next. The first `rotary` values of a head turn: a lane has partners among
// them, or values behind them. PAIRS: partners are neighbours. T: of cos and sin; with float only the sums are rounded. form:
// where a norm rounds (values.cuh), 3: there is none. q_step: from one head of queries to the next. Grid: [heads of all kinds, n].
template <int V>
__device__ __forceinline__ void load(float* to, const float* from, int) {
#pragma unroll
  for (int i = 0; i < V; i++) to[i] = __ldcg(from + i);
}
template <int V, bool PAIRS>
__device__ __forceinline__ void load_both(float* a, float* b, const u16* from, int at0, int at1, bool turns, int half) {
  load<V>(a, from + at0, half);
  load<V>(b, from + at1, half);
  if (!PAIRS || !turns) return;
  float both[2 * V];
#pragma unroll
  for (int i = 0; i < V; i++) both[i] = a[i], both[V + i] = b[i];
#pragma unroll
  for (int i = 0; i < V; i++) a[i] = both[2 * i], b[i] = both[2 * i + 1];
}
template <int V, bool PAIRS>
__device__ __forceinline__ void store_both(u16* to, float* a, float* b, int at0, int at1, bool turns, int half) {
  if (PAIRS && turns) {
    float both[2 * V];
#pragma unroll
    for (int i = 0; i < V; i++) both[2 * i] = a[i], both[2 * i + 1] = b[i];
#pragma unroll
    for (int i = 0; i < V; i++) a[i] = both[i], b[i] = both[V + i];
  }
  store<V>(to + at0, a, half);
  store<V>(to + at1, b, half);
}
template <int V, bool PAIRS, typename T>
__device__ __forceinline__ void rope_write(
    const u16* q, int q_stride, const u16* k, const u16* v, int kv_stride, int heads, int kv_heads, int dim, const u16* q_weight,
    const u16* k_weight, float eps, const T* cos, int cos_stride, const T* sin, int sin_stride, u16* keys, u16* values,
    i64 row_step, i64 head_step, int places, const i64* place_of, u16* q_out, int k_is_v, int rotary, int form,
    int norms_values, int q_step, int half) {
  const int head = blockIdx.x, row = blockIdx.y, h = dim / 2, turning = rotary / 2, at = threadIdx.x * V;
  const bool turns = at < turning;
  const int at0 = turns ? (PAIRS ? 2 * at : at) : at + turning, at1 = turns ? (PAIRS ? 2 * at + V : at + turning) : at + h;
  const bool live = at < h, is_q = head < heads, is_v = head >= heads + kv_heads;
  const u16* weight = is_q ? q_weight : is_v ? nullptr : k_weight;
  float w0[V], w1[V];
  let_next_start();
#pragma unroll
  for (int i = 0; i < V; i++) w0[i] = w1[i] = form == 2 ? 0.f : 1.f;
  if (live && weight) load_both<V, PAIRS>(w0, w1, weight, at0, at1, turns, half);
  wait_for_previous();
  float a[V] = {}, b[V] = {}, c0[V] = {}, c1[V] = {}, s0[V] = {}, s1[V] = {}, sum = 0.f;
  if (live) {
    const u16* from = (is_q ? q : is_v ? v : k) + (size_t)row * (is_q ? q_stride : kv_stride);
    from += is_q ? head * q_step : (head - heads) % kv_heads * dim;
    load_both<V, PAIRS>(a, b, from, at0, at1, turns, half);
    if (!is_v && turns) {
      load<V>(c0, cos + (size_t)row * cos_stride + at, half);
      load<V>(c1, cos + (size_t)row * cos_stride + turning + at, half);
      load<V>(s0, sin + (size_t)row * sin_stride + at, half);
      load<V>(s1, sin + (size_t)row * sin_stride + turning + at, half);
    }
  }
#pragma unroll
  for (int i = 0; i < V; i++) sum = fmaf(a[i], a[i], fmaf(b[i], b[i], sum));
  const float r = rsqrtf(warp_sum(sum) / dim + eps);
  if (!live) return;
  u16* to = q_out + ((size_t)row * heads + head) * dim;
  if (!is_q) {
    const i64 place = place_of ? __ldcg(place_of + row) : 0;
    if (place < 0 || place >= places) return;
    const i64 cell = row * row_step + (head - heads) % kv_heads * head_step + place * dim;
    if (is_v || k_is_v) {
      float v0[V], v1[V];
#pragma unroll
      for (int i = 0; i < V; i++) v0[i] = norms_values ? a[i] * r : a[i], v1[i] = norms_values ? b[i] * r : b[i];
      store_both<V, PAIRS>(values + cell, v0, v1, at0, at1, turns, half);
      if (is_v) return;
    }
    to = keys + cell;
  }
#pragma unroll
  for (int i = 0; i < V; i++) {
    const float x = form == 3 ? a[i] : rounded(weighted(a[i] * r, w0[i], form, half), half);
    const float y = form == 3 ? b[i] : rounded(weighted(b[i] * r, w1[i], form, half), half);
    float x0 = x * c0[i], y0 = -y * s0[i], y1 = y * c1[i], x1 = x * s1[i];
    if (sizeof(T) == 2) x0 = rounded(x0, half), y0 = rounded(y0, half), y1 = rounded(y1, half), x1 = rounded(x1, half);
    a[i] = turns ? x0 + y0 : x;
    b[i] = turns ? y1 + x1 : y;
  }
  store_both<V, PAIRS>(to, a, b, at0, at1, turns, half);
}
#define ROPE(name, V, PAIRS, T)                                                                                               \
  extern "C" __global__ void __launch_bounds__(32) name(                                                                      \
      const u16* q, int q_stride, const u16* k, const u16* v, int kv_stride, int heads, int kv_heads, int dim,                \
      const u16* q_weight, const u16* k_weight, float eps, const T* cos, int cos_stride, const T* sin, int sin_stride,        \
      u16* keys, u16* values, i64 row_step, i64 head_step, int places, const i64* place_of, u16* q_out, int k_is_v,           \
      int rotary, int form, int norms_values, int q_step, int half) {                                                         \
    rope_write<V, PAIRS, T>(q, q_stride, k, v, kv_stride, heads, kv_heads, dim, q_weight, k_weight, eps, cos, cos_stride, sin, \
                            sin_stride, keys, values, row_step, head_step, places, place_of, q_out, k_is_v, rotary, form,     \
                            norms_values, q_step, half);                                                                      \
  }
#define ROPES(V) ROPE(rope_write_##V, V, false, u16) ROPE(rope_pairs_##V, V, true, u16) ROPE(rope_wide_##V, V, false, float)
ROPES(1)
ROPES(2)
ROPES(4)
ROPES(8)

// cos and sin of the angles of a position, for up to two kinds of layers: (position inv_freq) for both halves of a head, times
// the kind's factor. Grid: [kinds, n].
extern "C" __global__ void __launch_bounds__(256) turns(
    const i64* positions, const float* inv_freq0, int half0, float factor0, u16* cos0, u16* sin0, const float* inv_freq1,
    int half1, float factor1, u16* cos1, u16* sin1, int half) {
  const int kind = blockIdx.x, row = blockIdx.y, i = threadIdx.x, h = kind ? half1 : half0;
  let_next_start();
  wait_for_previous();
  if (i >= h) return;
  const float angle = (float)__ldcg(positions + row) * __ldg((kind ? inv_freq1 : inv_freq0) + i);
  const float factor = kind ? factor1 : factor0;
  const u16 c = stored(cosf(angle) * factor, half), s = stored(sinf(angle) * factor, half);
  u16 *to_cos = (kind ? cos1 : cos0) + (size_t)row * 2 * h, *to_sin = (kind ? sin1 : sin0) + (size_t)row * 2 * h;
  to_cos[i] = to_cos[h + i] = c;
  to_sin[i] = to_sin[h + i] = s;
}
