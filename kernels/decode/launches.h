// The two launches of `decode_experts`, in this order.
#pragma once

#include "decode.h"

cudaError_t launch_up_proj(const DecodeArgs &args, bool dependent, cudaStream_t stream);
cudaError_t launch_down_proj(const DecodeArgs &args, bool dependent, cudaStream_t stream);
