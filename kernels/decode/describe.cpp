#include "describe.h"

#include <algorithm>
#include <limits>

#include "../routing/routing.h"

using torch::headeronly::ScalarType;

namespace {

constexpr int64_t MAX_SLOTS = 65535;  // of a grid's second dimension
constexpr int64_t MAX_RANK = 256;

bool as_scalar(ScalarType type, Scalar *scalar) {
  switch (type) {
    case ScalarType::BFloat16:
      *scalar = Scalar::bfloat16;
      return true;
    case ScalarType::Half:
      *scalar = Scalar::float16;
      return true;
    case ScalarType::Float:
      *scalar = Scalar::float32;
      return true;
    default:
      return false;
  }
}

bool has_shape(const Tensor &tensor, std::initializer_list<int64_t> shape) {
  const auto sizes = tensor.sizes();
  return std::equal(sizes.begin(), sizes.end(), shape.begin(), shape.end());
}

// Whether elements lie side by side along a dimension, and rows begin at multiples of 16 bytes, of so many elements.
bool has_pieces(const Tensor &tensor, int64_t along, int64_t piece = PIECE) {
  const auto strides = tensor.strides();
  if (strides[along] != 1 || reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16) return false;
  for (int64_t i = 0; i < tensor.dim(); ++i)
    if (i != along && strides[i] % piece) return false;
  return true;
}

bool is_like(const Tensor &tensor, const Tensor &x) {
  return tensor.scalar_type() == x.scalar_type() && tensor.get_device_index() == x.get_device_index();
}

// Whether a weight is of so many elements to a piece, plain ones as x or codes, in whole pieces along a dimension.
bool is_weight(const Tensor &weight, const Tensor &x, int64_t along, int64_t piece) {
  const ScalarType type = piece == CODES ? ScalarType::Float8_e4m3fn : x.scalar_type();
  return weight.scalar_type() == type && weight.get_device_index() == x.get_device_index() &&
         weight.size(along) % piece == 0 && has_pieces(weight, along, piece);
}

// The sizes and the tensors of a call but its biases; false if the kernels are not for it.
bool describe_rows(const Tensor &x, const Tensor &ids, const Tensor &weights, DecodeArgs *a) {
  if (x.dim() != 2 || ids.dim() != 2 || !as_scalar(x.scalar_type(), &a->dtype) || a->dtype == Scalar::float32)
    return false;
  const int64_t tokens = x.size(0), top_k = ids.size(1);
  const ScalarType id_type = ids.scalar_type();
  a->wide_ids = id_type == ScalarType::Long;
  if (tokens < 1 || top_k < 1 || top_k > MAX_TOP_K || tokens * top_k > MAX_SLOTS || x.size(1) % PIECE ||
      !(a->wide_ids || id_type == ScalarType::Int) || !has_shape(ids, {tokens, top_k}) ||
      !has_shape(weights, {tokens, top_k}) || !as_scalar(weights.scalar_type(), &a->weights_dtype) ||
      !has_pieces(x, 1) || ids.get_device_index() != x.get_device_index() ||
      weights.get_device_index() != x.get_device_index())
    return false;
  a->num_tokens = static_cast<int>(tokens);
  a->top_k = static_cast<int>(top_k);
  a->hidden = static_cast<int>(x.size(1));
  a->x = x.data_ptr();
  a->stride_xt = x.stride(0);
  a->ids = ids.data_ptr();
  a->stride_it = ids.stride(0);
  a->stride_ik = ids.stride(1);
  a->weights = weights.data_ptr();
  a->stride_wt = weights.stride(0);
  a->stride_wk = weights.stride(1);
  return true;
}

// n: the dimension of the outputs of both weights, 1 or 2; the other one is K. piece: elements of 16 bytes of either.
bool describe_experts(const Tensor &x, const Tensor &up, const Tensor &down, int64_t n, int64_t piece, DecodeArgs *a) {
  if (up.dim() != 3 || down.dim() != 3) return false;
  const int64_t k = 3 - n, experts = up.size(0), intermediate = down.size(k), hidden = a->hidden;
  a->transposed = piece == PIECE && up.stride(n) == 1 && up.stride(k) != 1;
  const int64_t along = a->transposed ? n : k, across = 3 - along;
  if (experts < 1 || experts > MAX_EXPERTS || hidden < 1 || intermediate < 1 || down.size(0) != experts ||
      up.size(n) != (a->gated ? 2 * intermediate : intermediate) || up.size(k) != hidden || down.size(n) != hidden ||
      !is_weight(up, x, along, piece) || !is_weight(down, x, along, piece) || (a->transposed && intermediate % PIECE))
    return false;
  a->num_experts = static_cast<int>(experts);
  a->intermediate = static_cast<int>(intermediate);
  a->up = up.data_ptr();
  a->stride_ue = up.stride(0);
  a->stride_un = up.stride(across);
  a->down = down.data_ptr();
  a->stride_de = down.stride(0);
  a->stride_dn = down.stride(across);
  return true;
}

// Of a weight (E, rows, K) in so many parts with blocks of their own.
bool describe_scales(const Tensor &scales, const Tensor &weight, int64_t parts, Scales *s) {
  const auto blocks = [](int64_t extent) { return (extent + SCALE_BLOCK - 1) / SCALE_BLOCK; };
  const int64_t part_rows = weight.size(1) / parts;
  switch (scales.scalar_type()) {
    case ScalarType::Float:
      s->type = ScaleType::float32;
      break;
    case ScalarType::BFloat16:
      s->type = ScaleType::bfloat16;
      break;
    case ScalarType::Byte:  // exponents: the stable ABI has no name for their dtype
      s->type = ScaleType::exponent;
      break;
    default:
      return false;
  }
  if (!has_shape(scales, {weight.size(0), parts * blocks(part_rows), blocks(weight.size(2))}) ||
      weight.size(1) % parts || scales.get_device_index() != weight.get_device_index())
    return false;
  const int64_t bytes = static_cast<int64_t>(s->type);
  s->data = scales.data_ptr();
  s->stride_e = bytes * scales.stride(0);
  s->stride_n = bytes * scales.stride(1);
  s->stride_k = bytes * scales.stride(2);
  s->part_rows = static_cast<int>(part_rows);
  return true;
}

bool describe_biases(const Tensor &x, const std::optional<Tensor> &up, const std::optional<Tensor> &down,
                     DecodeArgs *a) {
  if (a->gated && up.has_value() != down.has_value()) return false;
  if (up) {
    if (!has_shape(*up, {a->num_experts, a->gated ? 2 * a->intermediate : a->intermediate}) || !is_like(*up, x))
      return false;
    a->up_bias = up->data_ptr();
    a->stride_ube = up->stride(0);
    a->stride_ubn = up->stride(1);
  }
  if (down) {
    if (!has_shape(*down, {a->num_experts, a->hidden}) || !is_like(*down, x)) return false;
    a->down_bias = down->data_ptr();
    a->stride_dbe = down->stride(0);
    a->stride_dbn = down->stride(1);
  }
  return true;
}

// A factor (E or 1, rows, columns) or (L, E or 1, rows, columns); L: 0 for no such dimension.
bool describe_factor(const Tensor &factor, const Tensor &x, int64_t adapters, int64_t experts, int64_t rows,
                     int64_t columns, Factor *f) {
  const int64_t d = adapters ? 1 : 0;
  if (factor.dim() != 3 + d || (adapters && factor.size(0) != adapters) || factor.size(d + 1) != rows ||
      (factor.size(d) != 1 && factor.size(d) != experts) || factor.size(d + 2) != columns ||
      !as_scalar(factor.scalar_type(), &f->dtype) || factor.get_device_index() != x.get_device_index())
    return false;
  const int64_t bytes = f->dtype == Scalar::float32 ? 4 : 2;
  const auto step = [&](int64_t dim) { return factor.size(dim) == 1 ? 0 : bytes * factor.stride(dim); };
  f->data = factor.data_ptr();
  f->stride_l = adapters ? step(0) : 0;
  f->stride_e = step(d);
  f->stride_n = step(d + 1);
  f->stride_k = step(d + 2);
  return true;
}

// Whether rows of a factor begin at multiples of so many bytes, with their elements side by side.
bool is_aligned(const Factor &f, int64_t alignment) {
  const int64_t bytes = f.dtype == Scalar::float32 ? 4 : 2;
  return f.stride_k == bytes && reinterpret_cast<uintptr_t>(f.data) % alignment == 0 && f.stride_l % alignment == 0 &&
         f.stride_e % alignment == 0 && f.stride_n % alignment == 0;
}

// The pair of a weight (E, n, k); false as well if there is only one factor.
bool describe_pair(const Tensor &x, const std::optional<Tensor> &a, const std::optional<Tensor> &b, double scaling,
                   int64_t adapters, int64_t experts, int64_t n, int64_t k, LowRank *pair) {
  if (a.has_value() != b.has_value()) return false;
  if (!a) return true;
  const int64_t rank = a->dim() < 3 ? 0 : a->size(a->dim() - 2);
  pair->rank = static_cast<int>(rank);
  pair->scaling = static_cast<float>(scaling);
  if (rank < 1 || rank > MAX_RANK || !describe_factor(*a, x, adapters, experts, rank, k, &pair->a) ||
      !describe_factor(*b, x, adapters, experts, n, rank, &pair->b))
    return false;
  const int64_t bytes = pair->b.dtype == Scalar::float32 ? 4 : 2;
  pair->b_in_runs = rank % RANKS == 0 && is_aligned(pair->b, RANKS * bytes);
  return is_aligned(pair->a, 16);
}

}  // namespace

bool describe_loras(const Tensor &x, const std::optional<Tensor> &up_a, const std::optional<Tensor> &up_b,
                    const std::optional<Tensor> &down_a, const std::optional<Tensor> &down_b, double up_scaling,
                    double down_scaling, const std::optional<Tensor> &adapters, DecodeArgs *a) {
  if (!up_a && !down_a) return false;
  int64_t count = 0;
  if (adapters) {
    const ScalarType type = adapters->scalar_type();
    a->wide_adapters = type == ScalarType::Long;
    const Tensor &some = up_a ? *up_a : *down_a;
    count = some.dim() == 4 ? some.size(0) : 0;
    if (!(a->wide_adapters || type == ScalarType::Int) || !has_shape(*adapters, {a->num_tokens}) || count < 1 ||
        count > std::numeric_limits<int>::max() || adapters->get_device_index() != x.get_device_index())
      return false;
    a->adapters = adapters->data_ptr();
    a->stride_adapters = adapters->stride(0);
    a->num_adapters = static_cast<int>(count);
  }
  const int64_t up_rows = a->gated ? 2 * int64_t{a->intermediate} : a->intermediate;
  return describe_pair(x, up_a, up_b, up_scaling, count, a->num_experts, up_rows, a->hidden, &a->up_lora) &&
         describe_pair(x, down_a, down_b, down_scaling, count, a->num_experts, a->hidden, a->intermediate,
                       &a->down_lora);
}

bool describe(const Tensor &x, const Tensor &ids, const Tensor &weights, const Tensor &up, const Tensor &down,
              int64_t kind, const std::optional<Tensor> &up_scales, const std::optional<Tensor> &down_scales,
              const std::optional<Tensor> &up_bias, const std::optional<Tensor> &down_bias, double alpha, double limit,
              double up_offset, DecodeArgs *a) {
  a->gated = kind & 2;
  a->interleaved = kind & 1;
  a->activation = {static_cast<ActivationKind>(kind / 32), static_cast<float>(alpha), static_cast<float>(limit),
                  static_cast<float>(up_offset)};
  const bool scaled = up_scales.has_value(), exchanged = kind & 16;
  if (scaled != down_scales.has_value() || (scaled && exchanged) || !describe_rows(x, ids, weights, a) ||
      !describe_experts(x, up, down, exchanged ? 2 : 1, scaled ? CODES : PIECE, a) ||
      !describe_biases(x, up_bias, down_bias, a))
    return false;
  if (scaled && (!describe_scales(*up_scales, up, kind & 4 ? 2 : 1, &a->up_scales) ||
                 !describe_scales(*down_scales, down, 1, &a->down_scales)))
    return false;
  return true;
}
