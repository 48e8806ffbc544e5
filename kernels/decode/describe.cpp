#include "describe.h"

#include <algorithm>
#include <limits>

#include "../routing/routing.h"

namespace {

constexpr int64_t MAX_SLOTS = 65535;  // of a grid's second dimension
constexpr int64_t MAX_RANK = 256;
constexpr int64_t MAX_WIDTH = 1 << 28;  // of H and I: kernels count what the slots of a token have in 32 bits

bool as_scalar(int32_t dtype, Scalar *scalar) {
  if (dtype == aoti_torch_dtype_bfloat16())
    *scalar = Scalar::bfloat16;
  else if (dtype == aoti_torch_dtype_float16())
    *scalar = Scalar::float16;
  else if (dtype == aoti_torch_dtype_float32())
    *scalar = Scalar::float32;
  else
    return false;
  return true;
}

bool is_index(const Operand &index, bool *wide) {
  *wide = index.dtype == aoti_torch_dtype_int64();
  return *wide || index.dtype == aoti_torch_dtype_int32();
}

bool has_shape(const Operand &tensor, std::initializer_list<int64_t> shape) {
  return std::equal(tensor.sizes, tensor.sizes + tensor.dim, shape.begin(), shape.end());
}

// Whether elements lie side by side along a dimension, and rows begin at multiples of 16 bytes, of so many elements.
bool has_pieces(const Operand &tensor, int64_t along, int64_t piece = PIECE) {
  if (tensor.strides[along] != 1 || reinterpret_cast<uintptr_t>(tensor.data) % 16) return false;
  for (int64_t i = 0; i < tensor.dim; ++i)
    if (i != along && tensor.strides[i] % piece) return false;
  return true;
}

bool is_like(const Operand &tensor, const Operand &x) { return tensor.dtype == x.dtype && tensor.device == x.device; }

// Whether a weight is of so many elements to a piece, plain ones as x or codes, in whole pieces along a dimension.
bool is_weight(const Operand &weight, const Operand &x, int64_t along, int64_t piece) {
  const int32_t dtype = piece == CODES ? aoti_torch_dtype_float8_e4m3fn() : x.dtype;
  return weight.dtype == dtype && weight.device == x.device && weight.sizes[along] % piece == 0 &&
         has_pieces(weight, along, piece);
}

// The sizes and the tensors of a call but its biases; false if the kernels are not for it.
bool describe_rows(const Operand &x, const Operand &ids, const Operand &weights, DecodeArgs *a) {
  if (x.dim != 2 || ids.dim != 2 || !as_scalar(x.dtype, &a->dtype) || a->dtype == Scalar::float32) return false;
  const int64_t tokens = x.sizes[0], hidden = x.sizes[1], top_k = ids.sizes[1];
  if (tokens < 1 || top_k < 1 || top_k > MAX_TOP_K || tokens * top_k > MAX_SLOTS || hidden < 1 || hidden > MAX_WIDTH ||
      hidden % PIECE || !is_index(ids, &a->wide_ids) || !has_shape(ids, {tokens, top_k}) ||
      !has_shape(weights, {tokens, top_k}) || !as_scalar(weights.dtype, &a->weights_dtype) || !has_pieces(x, 1) ||
      ids.device != x.device || weights.device != x.device)
    return false;
  a->num_tokens = static_cast<int>(tokens);
  a->top_k = static_cast<int>(top_k);
  a->hidden = static_cast<int>(hidden);
  a->x = x.data;
  a->stride_xt = x.strides[0];
  a->ids = ids.data;
  a->stride_it = ids.strides[0];
  a->stride_ik = ids.strides[1];
  a->weights = weights.data;
  a->stride_wt = weights.strides[0];
  a->stride_wk = weights.strides[1];
  return true;
}

// n: the dimension of the outputs of both weights, 1 or 2; the other one is K. piece: elements of 16 bytes of either.
bool describe_experts(const Operand &x, const Operand &up, const Operand &down, int64_t n, int64_t piece,
                      DecodeArgs *a) {
  if (up.dim != 3 || down.dim != 3) return false;
  const int64_t k = 3 - n, experts = up.sizes[0], intermediate = down.sizes[k], hidden = a->hidden;
  a->transposed = piece == PIECE && up.strides[n] == 1 && up.strides[k] != 1;
  const int64_t along = a->transposed ? n : k, across = 3 - along;
  if (experts < 1 || experts > MAX_EXPERTS || intermediate < 1 || intermediate > MAX_WIDTH ||
      up.sizes[n] != (a->gated ? 2 * intermediate : intermediate) || up.sizes[k] != hidden ||
      down.sizes[0] != experts || down.sizes[n] != hidden ||
      !is_weight(up, x, along, piece) || !is_weight(down, x, along, piece) || (a->transposed && intermediate % PIECE))
    return false;
  a->num_experts = static_cast<int>(experts);
  a->intermediate = static_cast<int>(intermediate);
  a->up = up.data;
  a->stride_ue = up.strides[0];
  a->stride_un = up.strides[across];
  a->down = down.data;
  a->stride_de = down.strides[0];
  a->stride_dn = down.strides[across];
  return true;
}

// Of a weight (E, rows, K) in so many parts with blocks of their own.
bool describe_scales(const Operand &scales, const Operand &weight, int64_t parts, bool exponents, Scales *s) {
  const auto blocks = [](int64_t extent) { return (extent + SCALE_BLOCK - 1) / SCALE_BLOCK; };
  const int64_t part_rows = weight.sizes[1] / parts;
  if (exponents && aoti_torch_dtype_element_size(scales.dtype) == 1)
    s->type = ScaleType::exponent;
  else if (!exponents && scales.dtype == aoti_torch_dtype_float32())
    s->type = ScaleType::float32;
  else if (!exponents && scales.dtype == aoti_torch_dtype_bfloat16())
    s->type = ScaleType::bfloat16;
  else
    return false;
  if (!has_shape(scales, {weight.sizes[0], parts * blocks(part_rows), blocks(weight.sizes[2])}) ||
      weight.sizes[1] % parts || scales.device != weight.device)
    return false;
  const int64_t bytes = static_cast<int64_t>(s->type);
  s->data = scales.data;
  s->stride_e = bytes * scales.strides[0];
  s->stride_n = bytes * scales.strides[1];
  s->stride_k = bytes * scales.strides[2];
  s->part_rows = static_cast<int>(part_rows);
  return true;
}

bool describe_biases(const Operand &x, const std::optional<Operand> &up, const std::optional<Operand> &down,
                     DecodeArgs *a) {
  if (a->gated && up.has_value() != down.has_value()) return false;
  if (up) {
    if (!has_shape(*up, {a->num_experts, a->gated ? 2 * a->intermediate : a->intermediate}) || !is_like(*up, x))
      return false;
    a->up_bias = up->data;
    a->stride_ube = up->strides[0];
    a->stride_ubn = up->strides[1];
  }
  if (down) {
    if (!has_shape(*down, {a->num_experts, a->hidden}) || !is_like(*down, x)) return false;
    a->down_bias = down->data;
    a->stride_dbe = down->strides[0];
    a->stride_dbn = down->strides[1];
  }
  return true;
}

// A factor (E or 1, rows, columns) or (L, E or 1, rows, columns); L: 0 for no such dimension.
bool describe_factor(const Operand &factor, const Operand &x, int64_t adapters, int64_t experts, int64_t rows,
                     int64_t columns, Factor *f) {
  const int64_t d = adapters ? 1 : 0;
  if (factor.dim != 3 + d || (adapters && factor.sizes[0] != adapters) || factor.sizes[d + 1] != rows ||
      (factor.sizes[d] != 1 && factor.sizes[d] != experts) || factor.sizes[d + 2] != columns ||
      !as_scalar(factor.dtype, &f->dtype) || factor.device != x.device)
    return false;
  const int64_t bytes = f->dtype == Scalar::float32 ? 4 : 2;
  const auto step = [&](int64_t dim) { return factor.sizes[dim] == 1 ? 0 : bytes * factor.strides[dim]; };
  f->data = factor.data;
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
bool describe_pair(const Operand &x, const std::optional<Operand> &a, const std::optional<Operand> &b, double scaling,
                   int64_t adapters, int64_t experts, int64_t n, int64_t k, LowRank *pair) {
  if (a.has_value() != b.has_value()) return false;
  if (!a) return true;
  const int64_t rank = a->dim < 3 ? 0 : a->sizes[a->dim - 2];
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

bool describe_loras(const Operand &x, const std::optional<Operand> &up_a, const std::optional<Operand> &up_b,
                    const std::optional<Operand> &down_a, const std::optional<Operand> &down_b, double up_scaling,
                    double down_scaling, const std::optional<Operand> &adapters, DecodeArgs *a) {
  if (!up_a && !down_a) return false;
  int64_t count = 0;
  if (adapters) {
    const Operand &some = up_a ? *up_a : *down_a;
    count = some.dim == 4 ? some.sizes[0] : 0;
    if (!is_index(*adapters, &a->wide_adapters) || !has_shape(*adapters, {a->num_tokens}) || count < 1 ||
        count > std::numeric_limits<int>::max() || adapters->device != x.device)
      return false;
    a->adapters = adapters->data;
    a->stride_adapters = adapters->strides[0];
    a->num_adapters = static_cast<int>(count);
  }
  const int64_t up_rows = a->gated ? 2 * int64_t{a->intermediate} : a->intermediate;
  return describe_pair(x, up_a, up_b, up_scaling, count, a->num_experts, up_rows, a->hidden, &a->up_lora) &&
         describe_pair(x, down_a, down_b, down_scaling, count, a->num_experts, a->hidden, a->intermediate,
                       &a->down_lora);
}

bool describe(const Operand &x, const Operand &ids, const Operand &weights, const Operand &up, const Operand &down,
              int64_t kind, const std::optional<Operand> &up_scales, const std::optional<Operand> &down_scales,
              const std::optional<Operand> &up_bias, const std::optional<Operand> &down_bias, double alpha,
              double limit, double up_offset, DecodeArgs *a) {
  if (kind < 0 || kind / Kind::ACTIVATION > static_cast<int64_t>(ActivationKind::relu2)) return false;
  a->gated = kind & Kind::GATED;
  a->interleaved = kind & Kind::INTERLEAVED;
  a->activation = {static_cast<ActivationKind>(kind / Kind::ACTIVATION), static_cast<float>(alpha),
                  static_cast<float>(limit), static_cast<float>(up_offset)};
  const bool scaled = up_scales.has_value(), exchanged = kind & Kind::EXCHANGED;
  if (scaled != down_scales.has_value() || (scaled && exchanged) || !describe_rows(x, ids, weights, a) ||
      !describe_experts(x, up, down, exchanged ? 2 : 1, scaled ? CODES : PIECE, a) ||
      !describe_biases(x, up_bias, down_bias, a))
    return false;
  const int64_t parts = kind & Kind::HALVES_APART ? 2 : 1;
  return !scaled || (describe_scales(*up_scales, up, parts, kind & Kind::UP_EXPONENTS, &a->up_scales) &&
                     describe_scales(*down_scales, down, 1, kind & Kind::DOWN_EXPONENTS, &a->down_scales));
}
