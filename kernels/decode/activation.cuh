// Activations in fp32. A NaN stays one.
#pragma once

#include "decode.h"

__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + __expf(-x)); }

__device__ __forceinline__ float relu(float x) { return x < 0.f ? 0.f : x; }

__device__ __forceinline__ float clamp_above(float x, float limit) { return x > limit ? limit : x; }

__device__ __forceinline__ float activate(float x, const Activation &a) {
  constexpr float SQRT_HALF = 0.70710678f, TANH_SCALE = 1.59576912f, TANH_CUBIC = 0.044715f;
  switch (a.kind) {
    case ActivationKind::silu:
      return x * sigmoid(a.alpha * x);
    case ActivationKind::gelu:
      return 0.5f * x * (1.f + erff(x * SQRT_HALF));
    case ActivationKind::gelu_tanh:  // 1 + tanh(x) = 2 sigmoid(2 x); the scale is 2 sqrt(2 / pi)
      return x * sigmoid(TANH_SCALE * (x + TANH_CUBIC * x * x * x));
    case ActivationKind::relu:
      return relu(x);
    default:
      return relu(x) * relu(x);
  }
}

__device__ __forceinline__ float gated(float gate, float up, const Activation &a) {
  const float factor = up < -a.limit ? -a.limit : clamp_above(up, a.limit);
  return activate(clamp_above(gate, a.limit), a) * (factor + a.up_offset);
}
