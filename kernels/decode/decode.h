// The experts block for a few tokens, whose time is that of reading weights.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

constexpr int PIECE = 8;          // elements of two bytes that 16 bytes hold
constexpr int CODES = 16;         // the same, of 8-bit floats
constexpr int SCALE_BLOCK = 128;  // both extents of the block of a scale
constexpr int RANKS = 4;          // neighbours of a low-rank pair that a lane takes at a time

enum class Scalar : int { bfloat16, float16, float32 };

// In the order of the package's ACTIVATION_NAMES.
enum class ActivationKind : int { silu, gelu, gelu_tanh, relu, relu2 };

// a(gate, up) = act(min(gate, limit)) * (clamp(up, -limit, limit) + up_offset), with x sigmoid(alpha x) as silu; the
// first factor alone if not gated. limit: infinite for none.
struct Activation {
  ActivationKind kind;
  float alpha, limit, up_offset;
};

// By the bytes of a scale. An exponent is a byte b that stands for 2^(b - 127), 255 for NaN.
enum class ScaleType : int { exponent = 1, bfloat16 = 2, float32 = 4 };

// The scales (E, blocks of rows, blocks of K) of a weight (E, rows, K) of e4m3 codes, in blocks of 128 x 128. Strides
// count bytes. part_rows: rows of a part that has blocks of its own, all or half of them. data: null for plain weights.
struct Scales {
  const void *data;
  int64_t stride_e, stride_n, stride_k;
  int part_rows;
  ScaleType type;
};

// A factor of low-rank pairs, (L, E, n, k): of L adapters, for E experts. Strides count bytes; they are 0 along L and E
// where there is one for all.
struct Factor {
  const void *data;
  int64_t stride_l, stride_e, stride_n, stride_k;
  Scalar dtype;
};

// A low-rank pair (LoRA) of a weight (E, N, K): scaling b[l, e] a[l, e] is added to that of expert e for tokens with
// adapter l.
struct LowRank {
  Factor a;  // (L, E, r, K), with rows as those of a weight
  Factor b;  // (L, E, N, r)
  bool b_in_runs;  // whether each RANKS neighbours of a row of b lie side by side, from a multiple of their size on
  float scaling;
  int rank;  // r; 0 for no pair
};

// Strides count elements. The inner dimension of x, up and down is contiguous; their rows begin at multiples of 16
// bytes and have multiples of 16 bytes. Transposed weights are (E, H, 2 I), or (E, H, I) if not gated, and (E, I, H);
// stride_un and stride_dn are the strides of their rows. S = num_tokens * top_k slots; a slot whose id is outside of
// [0, num_experts) is a sentinel: nothing of it but the id is read.
struct DecodeArgs {
  const void *x;  // (T, H)
  int64_t stride_xt;
  const void *ids;  // (T, top_k), int32 or int64
  int64_t stride_it, stride_ik;
  const void *weights;  // (T, top_k), of routing
  int64_t stride_wt, stride_wk;
  const void *up;  // (E, 2 I, H), or (E, I, H) if not gated
  int64_t stride_ue, stride_un;
  const void *down;  // (E, H, I)
  int64_t stride_de, stride_dn;
  const void *up_bias;  // (E, 2 I) or (E, I), or null
  int64_t stride_ube, stride_ubn;
  const void *down_bias;  // (E, H), or null
  int64_t stride_dbe, stride_dbn;
  const void *adapters;  // (T,), int32 or int64, outside of [0, num_adapters) for none; or null: 0 for all tokens
  int64_t stride_adapters;
  void *act;  // (S, I), scratch: rows of sentinels stay unwritten
  float *z;   // (S, r), scratch, of one pair after the other: rows without an expert or an adapter stay unwritten
  void *out;  // (T, H), contiguous
  int num_tokens, top_k, num_experts, num_adapters, hidden, intermediate;
  bool wide_ids, wide_adapters, gated, interleaved, transposed;
  Scalar dtype;          // of x, plain weights, biases, act and out: bfloat16 or float16
  Scalar weights_dtype;  // any
  Activation activation;
  Scales up_scales, down_scales;  // of both weights or of none
  LowRank up_lora, down_lora;
};

constexpr int MAX_TOP_K = 32;  // one choice of a token for each lane of a warp

// out[t] = sum over the routed slots s of token t, with expert e, of weights[s] (down[e] act[s] + down_bias[e]),
// act[s] = a(up[e] x[t] + up_bias[e]), in two launches and one for each low-rank pair. T and top_k from 1 on, top_k up
// to MAX_TOP_K, S up to 65535. dependent: whether the device has dependent launches.
cudaError_t decode_experts(const DecodeArgs &args, bool dependent, cudaStream_t stream);
