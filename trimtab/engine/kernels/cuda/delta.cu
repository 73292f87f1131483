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

// The recurrence of one head's columns over a row's tokens. A warp has COLUMNS columns of the matrix, a lane OWN rows of them.
// Grid: [DV / (4 COLUMNS), value heads, rows].
extern "C" __global__ void __launch_bounds__(128) delta_rule(
    const u16* mixed, const u16* b, int b_stride, const u16* a, int a_stride, const float* A_log, int half_A, const u16* dt_bias,
    float* state, u16* out, int tokens, const int* count, const int* live) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, head = blockIdx.y, row = blockIdx.z;
  const int column = (blockIdx.x * 4 + warp) * COLUMNS, key_head = head / (V_HEADS / K_HEADS);
  let_next_start();
  const float rate = -expf(half_A ? value(((const u16*)A_log)[head], HALF) : A_log[head]), bias = value(dt_bias[head], HALF);
  float S[OWN][COLUMNS];
  float* own = state + (((size_t)row * V_HEADS + head) * DK + lane * OWN) * DV + column;
  wait_for_previous();
#pragma unroll
  for (int r = 0; r < OWN; r++)
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) S[r][c] = __ldcg(own + (size_t)r * DV + c);
  const int all = count_of(count, tokens);
  mixed += (size_t)row * tokens * CHANNELS, out += (size_t)row * tokens * V_HEADS * DV + head * DV + column;
  b += (size_t)row * tokens * b_stride + head, a += (size_t)row * tokens * a_stride + head;
  float q[OWN], k[OWN], v[COLUMNS], open, step;
  const auto take = [&](int t) {
    const u16* from = mixed + (size_t)t * CHANNELS;
#pragma unroll
    for (int r = 0; r < OWN; r++) {
      q[r] = value(__ldcg(from + key_head * DK + lane * OWN + r), HALF);
      k[r] = value(__ldcg(from + KEYS + key_head * DK + lane * OWN + r), HALF);
    }
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) v[c] = value(__ldcg(from + 2 * KEYS + head * DV + column + c), HALF);
    open = value(__ldcg(b + (size_t)t * b_stride), HALF), step = value(__ldcg(a + (size_t)t * a_stride), HALF);
  };
  if (all > 0) take(0);
  for (int t = 0; t < all; t++) {
    float qs = 0.f, ks = 0.f, qn[OWN], kn[OWN], vn[COLUMNS];
#pragma unroll
    for (int r = 0; r < OWN; r++) qn[r] = q[r], kn[r] = k[r], qs = fmaf(q[r], q[r], qs), ks = fmaf(k[r], k[r], ks);
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) vn[c] = v[c];
    const float beta = rounded(1.f / (1.f + expf(-open)), HALF), x = step + bias;
    const float decay = expf(rate * (x > 20.f ? x : log1pf(expf(x))));
    if (t + 1 < all) take(t + 1);
    qs = rsqrtf(warp_sum(qs) + 1e-6f) * rsqrtf((float)DK), ks = rsqrtf(warp_sum(ks) + 1e-6f);
    float told[COLUMNS] = {}, seen[COLUMNS] = {};
#pragma unroll
    for (int r = 0; r < OWN; r++) {
      kn[r] *= ks, qn[r] *= qs;
#pragma unroll
      for (int c = 0; c < COLUMNS; c++) S[r][c] *= decay, told[c] = fmaf(S[r][c], kn[r], told[c]);
    }
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
      const float delta = (vn[c] - warp_sum(told[c])) * beta;
#pragma unroll
      for (int r = 0; r < OWN; r++) S[r][c] = fmaf(kn[r], delta, S[r][c]), seen[c] = fmaf(S[r][c], qn[r], seen[c]);
    }
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) seen[c] = warp_sum(seen[c]);
    if (lane == 0)
#pragma unroll
      for (int c = 0; c < COLUMNS; c++) out[(size_t)t * V_HEADS * DV + c] = stored(seen[c], HALF);
  }
  for (int t = all; t < tokens; t++)  // nobody reads them, but zero times NaN is NaN
    if (lane < COLUMNS) out[(size_t)t * V_HEADS * DV + lane] = 0;
  if (row >= count_of(live, gridDim.z)) return;
#pragma unroll
  for (int r = 0; r < OWN; r++)
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) own[(size_t)r * DV + c] = S[r][c];
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
