#include "decode.h"

#include "launches.h"

cudaError_t decode_experts(const DecodeArgs &args, bool dependent, cudaStream_t stream) {
  const bool scaled = args.up_scales.data;
  const cudaError_t error = (scaled ? launch_scaled_up_proj : launch_up_proj)(args, dependent, stream);
  if (error != cudaSuccess) return error;
  return (scaled ? launch_scaled_down_proj : launch_down_proj)(args, dependent, stream);
}
