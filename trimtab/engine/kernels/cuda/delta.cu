// The gated delta rule between a layer's products: convolution, recurrence, gated norm. Read engine/kernels/delta_rule.py first: it
// says what each kernel computes and in which shapes. values.cuh stands in front of this.
//
// Compiled for one kind of layer: DK, DV (sizes of a head's keys and values, multiples of 32 and 16), K_HEADS, V_HEADS, TAPS (of the
// convolution), HALF (1: fp16, 0: bf16). Rows have `tokens` tokens each, of which the first `*count` are there; states of rows from
// `*live` on are left as they are. `rounded` stands where transformers' modules round.
#define COLUMNS 4  // of a head's matrix that a warp has
constexpr int KEYS = K_HEADS * DK, CHANNELS = 2 * KEYS + V_HEADS * DV, OWN = DK / 32, PART = 32;

__device__ __forceinline__ int count_of(const int* count, int tokens) { return count ? min(__ldcg(count), tokens) : tokens; }

// out = silu(convolution of the last TAPS inputs); the window of a row is its last TAPS inputs. A thread is a channel, for PART tokens.
// Grid: [channels / 128, pieces of the tokens, rows].
extern "C" __global__ void __launch_bounds__(128) delta_conv(
    const u16* mixed, int stride, const u16* weight, u16* window, u16* out, int tokens, const int* count, const int* live) {
  const int channel = blockIdx.x * 128 + threadIdx.x, row = blockIdx.z, first = blockIdx.y * PART;
  const bool is_there = channel < CHANNELS;
  let_next_start();
  float w[TAPS], seen[TAPS];
  u16* own = window + ((size_t)row * CHANNELS + channel) * TAPS;
#pragma unroll
  for (int i = 0; i < TAPS; i++) w[i] = is_there ? value(weight[channel * TAPS + i], HALF) : 0.f;
  wait_for_previous();
  if (!is_there) return;
  const int all = count_of(count, tokens), last = min(first + PART, tokens);
  mixed += (size_t)row * tokens * stride + channel, out += (size_t)row * tokens * CHANNELS + channel;
  const auto input = [&](int t) { return t >= 0 ? value(__ldcg(mixed + (size_t)t * stride), HALF) : value(own[TAPS + t], HALF); };
#pragma unroll
  for (int i = 1; i < TAPS; i++) seen[i] = input(first - TAPS + i);
  for (int t = first; t < last; t++) {
    float sum = 0.f;
#pragma unroll
    for (int i = 1; i < TAPS; i++) seen[i - 1] = seen[i];
    seen[TAPS - 1] = input(t);
#pragma unroll
    for (int i = 0; i < TAPS; i++) sum = fmaf(seen[i], w[i], sum);
    out[(size_t)t * CHANNELS] = stored(activated(rounded(sum, HALF), 1), HALF);
  }
  if (first || row >= count_of(live, gridDim.z)) return;
#pragma unroll
  for (int i = 0; i < TAPS; i++) seen[i] = input(all - TAPS + i);
#pragma unroll
  for (int i = 0; i < TAPS; i++) own[i] = stored(seen[i], HALF);
}

// What a lane needs of one token: its part of query and key, its columns' values, how much the head takes and forgets.
struct Token {
  u32 q[OWN / 2 + OWN % 2], k[OWN / 2 + OWN % 2], v[COLUMNS / 2];
  u16 open, step;
};
template <int N>
__device__ __forceinline__ void take(u32* to, const u16* from) {
  if constexpr (N == 1) {
    to[0] = __ldcg(from);
  } else if constexpr (N == 4) {
    const uint2 v = __ldcg((const uint2*)from);
    to[0] = v.x, to[1] = v.y;
  } else {
#pragma unroll
    for (int i = 0; i < N / 2; i++) to[i] = __ldcg((const u32*)from + i);
  }
}
template <int N>
__device__ __forceinline__ void taken(float* to, const u32* from) {
#pragma unroll
  for (int i = 0; i < N; i++) to[i] = value((u16)(from[i / 2] >> (i & 1) * 16), HALF);
}

// The recurrence of one head's columns over a row's tokens. A warp has COLUMNS columns of the matrix, a lane OWN rows of them. Tokens
// are asked for GROUP at a time, one group ahead: what depends on the matrix is a short chain, and loads are longer than it.
// Grid: [DV / (4 COLUMNS), value heads, rows].
#define GROUP 4
extern "C" __global__ void __launch_bounds__(128) delta_rule(
    const u16* mixed, const u16* b, int b_stride, const u16* a, int a_stride, const float* A_log, int half_A, const u16* dt_bias,
    float* state, u16* out, int tokens, const int* count, const int* live) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, head = blockIdx.y, row = blockIdx.z;
  const int column = (blockIdx.x * 4 + warp) * COLUMNS, key_head = head / (V_HEADS / K_HEADS);
  let_next_start();
  const float rate = -expf(half_A ? value(((const u16*)A_log)[head], HALF) : A_log[head]), bias = value(dt_bias[head], HALF);
  float S[OWN][COLUMNS];
  // An earlier step or chunk wrote it: nothing in front of this kernel does.
  float* own = state + (((size_t)row * V_HEADS + head) * DK + lane * OWN) * DV + column;
#pragma unroll
  for (int r = 0; r < OWN; r++) {
    const float4 v = __ldcg((const float4*)(own + (size_t)r * DV));
    S[r][0] = v.x, S[r][1] = v.y, S[r][2] = v.z, S[r][3] = v.w;
  }
  wait_for_previous();
  const int all = count_of(count, tokens);
  mixed += (size_t)row * tokens * CHANNELS, out += (size_t)row * tokens * V_HEADS * DV + head * DV + column;
  b += (size_t)row * tokens * b_stride + head, a += (size_t)row * tokens * a_stride + head;
  Token now[GROUP], next[GROUP];
  const auto ask = [&](Token* to, int from) {
#pragma unroll
    for (int i = 0; i < GROUP; i++) {
      const int t = min(from + i, all - 1);
      const u16* at = mixed + (size_t)t * CHANNELS;
      take<OWN>(to[i].q, at + key_head * DK + lane * OWN), take<OWN>(to[i].k, at + KEYS + key_head * DK + lane * OWN);
      take<COLUMNS>(to[i].v, at + 2 * KEYS + head * DV + column);
      to[i].open = __ldcg(b + (size_t)t * b_stride), to[i].step = __ldcg(a + (size_t)t * a_stride);
    }
  };
  if (all > 0) ask(now, 0);
#pragma unroll 1
  for (int from = 0; from < all; from += GROUP) {
    if (from + GROUP < all) ask(next, from + GROUP);
    float q[GROUP][OWN], k[GROUP][OWN], beta[GROUP], decay[GROUP];
    // What does not depend on the matrix, of all tokens at once.
#pragma unroll
    for (int i = 0; i < GROUP; i++) {
      float qs = 0.f, ks = 0.f;
      taken<OWN>(q[i], now[i].q), taken<OWN>(k[i], now[i].k);
#pragma unroll
      for (int r = 0; r < OWN; r++) qs = fmaf(q[i][r], q[i][r], qs), ks = fmaf(k[i][r], k[i][r], ks);
      qs = rsqrtf(warp_sum(qs) + 1e-6f) * rsqrtf((float)DK), ks = rsqrtf(warp_sum(ks) + 1e-6f);
#pragma unroll
      for (int r = 0; r < OWN; r++) q[i][r] *= qs, k[i][r] *= ks;
      const float x = value(now[i].step, HALF) + bias;
      beta[i] = rounded(1.f / (1.f + expf(-value(now[i].open, HALF))), HALF);
      decay[i] = expf(rate * (x > 20.f ? x : log1pf(expf(x))));
    }
#pragma unroll
    for (int i = 0; i < GROUP; i++) {
      if (from + i >= all) break;
      float v[COLUMNS], told[COLUMNS] = {}, seen[COLUMNS] = {};
      taken<COLUMNS>(v, now[i].v);
#pragma unroll
      for (int r = 0; r < OWN; r++)
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) S[r][c] *= decay[i], told[c] = fmaf(S[r][c], k[i][r], told[c]);
#pragma unroll
      for (int d = 16; d; d /= 2)
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) told[c] += __shfl_xor_sync(ALL, told[c], d);
#pragma unroll
      for (int c = 0; c < COLUMNS; c++) {
        const float delta = (v[c] - told[c]) * beta[i];
#pragma unroll
        for (int r = 0; r < OWN; r++) S[r][c] = fmaf(k[i][r], delta, S[r][c]), seen[c] = fmaf(S[r][c], q[i][r], seen[c]);
      }
#pragma unroll
      for (int d = 16; d; d /= 2)
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) seen[c] += __shfl_xor_sync(ALL, seen[c], d);
      if (lane == 0)
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) out[(size_t)(from + i) * V_HEADS * DV + c] = stored(seen[c], HALF);
    }
#pragma unroll
    for (int i = 0; i < GROUP; i++) now[i] = next[i];
  }
  for (int t = all; t < tokens; t++)  // nobody reads them, but zero times NaN is NaN
    if (lane < COLUMNS) out[(size_t)t * V_HEADS * DV + lane] = 0;
  if (row >= count_of(live, gridDim.z)) return;
#pragma unroll
  for (int r = 0; r < OWN; r++) *(float4*)(own + (size_t)r * DV) = make_float4(S[r][0], S[r][1], S[r][2], S[r][3]);
}

// out = (norm(x) weight) silu(z), of each head. A warp is a head of a token, a lane DV / 32 values. Grid: [heads / 4, tokens of all rows].
extern "C" __global__ void __launch_bounds__(128) delta_norm(
    const u16* x, const u16* z, int z_stride, const u16* weight, float eps, u16* out) {
  constexpr int V = DV / 32;
  const int lane = threadIdx.x & 31, head = blockIdx.x * 4 + (threadIdx.x >> 5), token = blockIdx.y;
  float w[V], v[V], sum = 0.f;
  let_next_start();
#pragma unroll
  for (int i = 0; i < V; i++) w[i] = value(weight[lane * V + i], HALF);
  wait_for_previous();
  const size_t at = ((size_t)token * V_HEADS + head) * DV + lane * V;
#pragma unroll
  for (int i = 0; i < V; i++) v[i] = head < V_HEADS ? value(__ldcg(x + at + i), HALF) : 0.f, sum = fmaf(v[i], v[i], sum);
  const float r = rsqrtf(warp_sum(sum) / DV + eps);
  if (head >= V_HEADS) return;
#pragma unroll
  for (int i = 0; i < V; i++) {
    const float gate = value(__ldcg(z + (size_t)token * z_stride + head * DV + lane * V + i), HALF);
    out[at + i] = stored(rounded(rounded(v[i] * r, HALF) * w[i], HALF) * (gate / (1.f + expf(-gate))), HALF);
  }
}
