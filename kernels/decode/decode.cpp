#include "decode.h"

#include "launches.h"

cudaError_t decode_experts(const DecodeArgs &args, bool dependent, cudaStream_t stream) {
  const cudaError_t error = launch_up_proj(args, dependent, stream);
  return error == cudaSuccess ? launch_down_proj(args, dependent, stream) : error;
}
