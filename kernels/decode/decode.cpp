#include "decode.h"

#include "launches.h"

cudaError_t decode_experts(const DecodeArgs &args, cudaStream_t stream) {
  const cudaError_t error = launch_up_proj(args, stream);
  return error == cudaSuccess ? launch_down_proj(args, stream) : error;
}
