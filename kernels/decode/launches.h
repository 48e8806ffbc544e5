// The two launches of `decode_experts`, in this order: of plain weights, and of those with scales. Before each comes
// the projection of its rows by a LoRA, which launches nothing where there is none. slot_to_row: where slots have their
// rows of act; null where these are in the order of slots.
#pragma once

#include "decode.h"

cudaError_t launch_project_tokens(const DecodeArgs &args, bool dependent, cudaStream_t stream);
cudaError_t launch_project_act(const DecodeArgs &args, const int *slot_to_row, bool dependent, cudaStream_t stream);
cudaError_t launch_up_proj(const DecodeArgs &args, bool dependent, cudaStream_t stream);
cudaError_t launch_down_proj(const DecodeArgs &args, bool dependent, cudaStream_t stream);
cudaError_t launch_scaled_up_proj(const DecodeArgs &args, bool dependent, cudaStream_t stream);
cudaError_t launch_scaled_down_proj(const DecodeArgs &args, bool dependent, cudaStream_t stream);
