// Norms and rotations of rows: one pass over each row, one call for what torch does in several. bfloat16 is widened
// on the way, and everything computed in float32. A rotation may end in pages of keys and values.
//
// A row's sums are taken in one order whatever stands beside it, so a row gives the same bits in every batch.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <optional>
#include <type_traits>
#include <vector>

#include "append.h"
#include "memory.h"
#include "norms.h"

namespace {

constexpr int64_t WORK = int64_t(1) << 15;  // elements that are worth a thread

template <typename Row>
void each_row(int64_t rows, int64_t width, Row&& row) {
  at::parallel_for(0, rows, std::max<int64_t>(1, WORK / std::max<int64_t>(1, width)), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) row(i);
  });
}

// Numbers in memory as float32, written as they are or rounded to the nearest, ties to even.
struct Single {
  using Stored = float;
  static float wide(float x) { return x; }
  static float narrow(float x) { return x; }
};
struct Brain {
  using Stored = uint16_t;
  static float wide(uint16_t x) { return std::bit_cast<float>(uint32_t(x) << 16); }
  static uint16_t narrow(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return uint16_t(x == x ? rounded : 0x7fc0u);
  }
};

template <typename Form>
void norm_rows(const at::Tensor& out, const at::Tensor& x, const std::optional<at::Tensor>& residual,
               const std::optional<at::Tensor>& total, const float* by, float eps) {
  using Stored = typename Form::Stored;
  const auto data = [](const at::Tensor& t) { return static_cast<Stored*>(t.mutable_data_ptr()); };
  const int64_t width = x.size(-1), rows = x.numel() / width;
  const auto* from = static_cast<const Stored*>(x.const_data_ptr());
  const auto* beside = residual ? static_cast<const Stored*>(residual->const_data_ptr()) : nullptr;
  Stored *to = data(out), *sum = total ? data(*total) : nullptr;
  constexpr bool DIRECT = std::is_same_v<Stored, float>;
  each_row(rows, width, [&](int64_t i) {
    const Stored* row = from + i * width;
    if (beside != nullptr) {
      const Stored* other = beside + i * width;
      Stored* added = sum + i * width;
      for (int64_t j = 0; j < width; ++j) added[j] = Form::narrow(Form::wide(row[j]) + Form::wide(other[j]));
      row = added;
    }
    if constexpr (DIRECT) {
      norm_row(row, by, to + i * width, width, eps);
    } else {
      thread_local std::vector<float> room;
      if (int64_t(room.size()) < width) room.resize(width);
      float* widened = room.data();
      for (int64_t j = 0; j < width; ++j) widened[j] = Form::wide(row[j]);
      norm_row(widened, by, widened, width, eps);
      Stored* narrowed = to + i * width;
      for (int64_t j = 0; j < width; ++j) narrowed[j] = Form::narrow(widened[j]);
    }
  });
}

// out = norm(x) or, with a residual, total = x + residual and out = norm(total); all of one dense shape.
void norm(
    const at::Tensor& out, const at::Tensor& x, const std::optional<at::Tensor>& residual,
    const std::optional<at::Tensor>& total, const std::optional<at::Tensor>& weight, double eps) {
  // Memory is read: what only a flag negates is negated before.
  const at::Tensor rows = x.resolve_neg();
  const auto beside = residual ? std::optional(residual->resolve_neg()) : std::nullopt;
  const auto by = weight ? std::optional(weight->to(at::kFloat).resolve_neg()) : std::nullopt;
  const float* factors = by ? by->const_data_ptr<float>() : nullptr;
  pybind11::gil_scoped_release release;
  if (x.scalar_type() == at::kBFloat16)
    norm_rows<Brain>(out, rows, beside, total, factors, float(eps));
  else
    norm_rows<Single>(out, rows, beside, total, factors, float(eps));
}

template <typename Stored>
struct Heads {  // (T, H, D), the last axis dense
  const Stored* from;
  int64_t heads, token, head;  // strides of what is read
};

template <typename Form>
Heads<typename Form::Stored> heads_of(const at::Tensor& x) {
  return {static_cast<const typename Form::Stored*>(x.const_data_ptr()), x.size(1), x.stride(0), x.stride(1)};
}

// A token's heads turned by halves into `to`, whose heads are `step` apart; what follows the halves passes.
template <typename Form, typename Stored = typename Form::Stored>
void turn(
    const Heads<Stored>& of, int64_t token, Stored* to, int64_t step, int64_t width, const float* cos,
    const float* sin, int64_t half) {
  for (int64_t h = 0; h < of.heads; ++h, to += step) {
    const Stored* from = of.from + token * of.token + h * of.head;
    for (int64_t j = 0; j < half; ++j) {
      const float first = Form::wide(from[j]), second = Form::wide(from[j + half]);
      to[j] = Form::narrow(first * cos[j] - second * sin[j]);
      to[j + half] = Form::narrow(second * cos[j] + first * sin[j]);
    }
    std::copy(from + 2 * half, from + width, to + 2 * half);
  }
}

// The angles of each token, as the rows of the tables that its position names; false where they lack one.
struct Angles {
  Angles(const at::Tensor& positions, const at::Tensor& cos_in, const at::Tensor& sin_in)
      : cos_table(cos_in.resolve_neg()), sin_table(sin_in.resolve_neg()), half(cos_table.size(1)),
        cos(cos_table.const_data_ptr<float>()), sin(sin_table.const_data_ptr<float>()), starts(positions.size(0)) {
    fits = positions.scalar_type() == at::kLong ? read(positions.const_data_ptr<int64_t>(), positions.stride(0))
                                                : read(positions.const_data_ptr<int32_t>(), positions.stride(0));
  }
  template <typename Index>
  bool read(const Index* at, int64_t step) {
    for (size_t i = 0; i < starts.size(); ++i) {
      const int64_t row = at[int64_t(i) * step];
      if (row < 0 || row >= cos_table.size(0)) return false;
      starts[i] = row * half;
    }
    return true;
  }
  at::Tensor cos_table, sin_table;
  int64_t half;
  const float *cos, *sin;
  std::vector<int64_t> starts;  // where a token's angles begin
  bool fits = false;
};

template <typename Form>
void rotate(
    const at::Tensor& q_out, const at::Tensor& k_out, const at::Tensor& q_in, const at::Tensor& k_in,
    const Angles& angles) {
  using Stored = typename Form::Stored;
  const auto queries = heads_of<Form>(q_in), keys = heads_of<Form>(k_in);
  auto* const q_to = static_cast<Stored*>(q_out.mutable_data_ptr());
  auto* const k_to = static_cast<Stored*>(k_out.mutable_data_ptr());
  const int64_t width = q_in.size(2);
  each_row(q_in.size(0), (queries.heads + keys.heads) * width, [&](int64_t i) {
    const float *cos = angles.cos + angles.starts[i], *sin = angles.sin + angles.starts[i];
    turn<Form>(queries, i, q_to + i * queries.heads * width, width, width, cos, sin, angles.half);
    turn<Form>(keys, i, k_to + i * keys.heads * width, width, width, cos, sin, angles.half);
  });
}

// q and k (T, H, D) turned by halves into dense outputs; False where the tables lack a position.
bool rope(
    const at::Tensor& q_out, const at::Tensor& k_out, const at::Tensor& q_in, const at::Tensor& k_in,
    const at::Tensor& positions, const at::Tensor& cos, const at::Tensor& sin) {
  const at::Tensor q = q_in.resolve_neg(), k = k_in.resolve_neg();
  const Angles angles(positions, cos, sin);
  if (!angles.fits) return false;
  pybind11::gil_scoped_release release;
  if (q.scalar_type() == at::kBFloat16)
    rotate<Brain>(q_out, k_out, q, k, angles);
  else
    rotate<Single>(q_out, k_out, q, k, angles);
  return true;
}

template <typename Form>
bool rotate_into(
    const at::Tensor& q_out, const at::Tensor& q, const at::Tensor& k, const at::Tensor& k_cache,
    const append::Target& values, const Angles& angles, const at::Tensor& slot_mapping, bool heads_first) {
  using Stored = typename Form::Stored;
  const auto queries = heads_of<Form>(q), keys = heads_of<Form>(k);
  auto* const q_to = static_cast<Stored*>(q_out.mutable_data_ptr());
  auto* const pool = static_cast<Stored*>(k_cache.mutable_data_ptr());
  const int token = heads_first ? 2 : 1, head = heads_first ? 1 : 2;
  const int64_t page_step = k_cache.stride(0), token_step = k_cache.stride(token), head_step = k_cache.stride(head);
  const int64_t width = q.size(2), page_size = k_cache.size(token);
  const int64_t bytes = keys.heads * width * int64_t(sizeof(Stored)) + values.heads * values.bytes;
  // Queries first: with both in one loop a thousand tokens take a quarter longer than two kernels do.
  {
    pybind11::gil_scoped_release release;
    each_row(q.size(0), queries.heads * width, [&](int64_t i) {
      const float *cos = angles.cos + angles.starts[i], *sin = angles.sin + angles.starts[i];
      turn<Form>(queries, i, q_to + i * queries.heads * width, width, width, cos, sin, angles.half);
    });
  }
  const auto put = [&](int64_t row, int64_t page, int64_t at) {
    const float *cos = angles.cos + angles.starts[row], *sin = angles.sin + angles.starts[row];
    turn<Form>(keys, row, pool + page * page_step + at * token_step, head_step, width, cos, sin, angles.half);
    append::write(values, row, page, at);
  };
  return append::put_all(slot_mapping, bytes, page_size, k_cache.size(0) * page_size, put);
}

// The same with the turned k and v written into the pools; False where a position or a slot does not fit.
bool rope_append(
    const at::Tensor& q_out, const at::Tensor& q_in, const at::Tensor& k_in, const at::Tensor& v_in,
    const at::Tensor& positions, const at::Tensor& cos, const at::Tensor& sin, const at::Tensor& k_pool,
    const at::Tensor& v_pool, const at::Tensor& slot_mapping, bool heads_first) {
  const Angles angles(positions, cos, sin);
  if (!angles.fits) return false;
  const at::Tensor k_cache = append::plain(k_pool), v_cache = append::plain(v_pool);
  const append::Span first(k_cache), second(v_cache);
  const at::Tensor q = append::ready(q_in, q_out, first, second);
  const at::Tensor k = append::ready(k_in, k_pool, first, second), v = append::ready(v_in, v_pool, first, second);
  const append::Target values = append::target_of(v, v_cache, heads_first);
  const bool done = q.scalar_type() == at::kBFloat16
      ? rotate_into<Brain>(q_out, q, k, k_cache, values, angles, slot_mapping, heads_first)
      : rotate_into<Single>(q_out, q, k, k_cache, values, angles, slot_mapping, heads_first);
  if (done) append::note_changes({&k_pool, &v_pool});
  return done;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("norm", reading(&norm));
  m.def("rope", reading(&rope));
  m.def("rope_append", reading(&rope_append));
}
