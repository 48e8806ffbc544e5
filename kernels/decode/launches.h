// The two launches of `decode_experts`, in this order: of plain weights, and of those with scales.
#pragma once

#include "decode.h"

cudaError_t launch_up_proj(const DecodeArgs &args, bool dependent, cudaStream_t stream);
cudaError_t launch_down_proj(const DecodeArgs &args, bool dependent, cudaStream_t stream);
cudaError_t launch_scaled_up_proj(const DecodeArgs &args, bool dependent, cudaStream_t stream);
cudaError_t launch_scaled_down_proj(const DecodeArgs &args, bool dependent, cudaStream_t stream);
