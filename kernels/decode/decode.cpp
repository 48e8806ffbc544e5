#include "decode.h"

#include "launches.h"

cudaError_t decode_experts(const DecodeArgs &args, bool dependent, cudaStream_t stream) {
  const bool scaled = args.up_scales.data;
  cudaError_t error = launch_project_tokens(args, dependent, stream);
  if (error == cudaSuccess) error = (scaled ? launch_scaled_up_proj : launch_up_proj)(args, dependent, stream);
  if (error == cudaSuccess) error = launch_project_act(args, nullptr, dependent, stream);
  if (error == cudaSuccess) error = (scaled ? launch_scaled_down_proj : launch_down_proj)(args, dependent, stream);
  return error;
}
