// How launchers choose a kernel: they call `call` with values whose types are its template's arguments.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "decode.h"

template <int VALUE>
using Int = std::integral_constant<int, VALUE>;

// call(element), of the type of x and out.
template <typename Call>
cudaError_t choose_element(const DecodeArgs &a, const Call &call) {
  return a.dtype == Scalar::bfloat16 ? call(__nv_bfloat16()) : call(__half());
}

// call(element, gated)
template <typename Call>
cudaError_t choose_gated(const DecodeArgs &a, const Call &call) {
  return choose_element(a, [&](auto element) {
    return a.gated ? call(element, std::true_type()) : call(element, std::false_type());
  });
}

// call(element, choices, pieces) for a down-projection by token: six to eight pieces in the registers of a lane, as
// more leave too few warps to a multiprocessor, and as few as possible of them past the end of a row. elements: of a
// row, in one piece of each lane along it.
template <typename Call>
cudaError_t choose_pieces(const DecodeArgs &a, int elements, const Call &call) {
  const auto steps = [&](int pieces) { return (a.intermediate + pieces * elements - 1) / (pieces * elements); };
  return choose_element(a, [&](auto element) {
    if (steps(2) == 1) return call(element, Int<4>(), Int<2>());
    return 3 * steps(3) <= 4 * steps(4) ? call(element, Int<2>(), Int<3>()) : call(element, Int<2>(), Int<4>());
  });
}
