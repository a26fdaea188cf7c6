// Products of rows with a weight matrix on the CPU, alone and as the two halves of a feed-forward block.
//
// The weight is laid out in panels. `linear` and `mlp` do so anew at every call, which costs a hundredth of a
// large product and remembers nothing of a weight that may change; `linear_kept` and `mlp_kept` take panels
// that the caller kept, and compare an element of every row with the weight before they trust them. Rows are
// cut into blocks and a free thread takes the next block, so a thread that loses its core for a while leaves
// its share to the others. A feed-forward block keeps the hidden rows of its block in the thread's cache. An
// output element is one chain of multiply-adds over ascending k whatever stands beside it, so its bits are the
// same in every batch and for any number of threads.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "memory.h"
#include "norms.h"
#include "spread.h"
#include "vectors.h"

namespace {

#if defined(__AVX512F__)
constexpr int HEIGHT = 12;  // rows of a tile: its sums, two vectors a row, fill the registers
#elif defined(__AVX2__)
constexpr int HEIGHT = 6;
#else
constexpr int HEIGHT = 8;
#endif
constexpr int WIDTH = 2 * W;    // columns of a tile, and of a panel
constexpr int64_t DEPTH = 384;  // inner length at a time: a panel's part of it stays in the first cache
constexpr int64_t BLOCK = 48;  // rows of an item of work: they and their hidden rows stay in the second cache

enum Activation : int64_t { GELU, GELU_TANH, RELU, SILU, NONE };

template <size_t N>
inline vf polynomial(vf x, const std::array<float, N>& ascending) {
  vf sum = all(ascending[N - 1]);
  for (size_t i = N - 1; i-- > 0;) sum = sum * x + ascending[i];
  return sum;
}

// erf by an odd rational function fitted to the least relative error up to where float32 has 1: within three
// units in the last place.
inline vf erf(vf x) {
  constexpr float ONE = 3.9f;
  constexpr std::array<float, 6> above{
      1.1283791f, 0.18964836f, 0.05266571f, 0.0037375821f, 2.850496e-4f, 2.0666675e-6f};
  constexpr std::array<float, 6> below{
      1.0f, 0.50140428f, 0.11381139f, 0.014912733f, 0.0011572003f, 3.827139e-5f};
  const vf square = x * x;
  const vf inside = x * polynomial(square, above) / polynomial(square, below);
  return x > ONE ? all(1.0f) : x < -ONE ? all(-1.0f) : inside;
}

// x times the logistic function of y.
inline vf gated(vf x, vf y) {
  const vf e = exponential(y < 0.0f ? y : -y);
  return x * ((y < 0.0f ? e : all(1.0f)) / (e + 1.0f));
}

inline vf activated(vf x, int64_t activation) {
  switch (activation) {
    case GELU: {
      const vf half = x * 0.5f;
      return half + half * erf(x * 0.70710678f);
    }
    case GELU_TANH:  // (1 + tanh y) / 2 is the logistic function of 2 y
      return gated(x, (x + x * x * x * 0.044715f) * 1.59576912f);
    case RELU:
      return x < 0.0f ? vf{} : x;  // keeps NaN
    case SILU:
      return gated(x, x);
    default:
      return x;
  }
}

struct Rows {
  const float* data;
  int64_t stride;
};

struct Result {
  float* data;
  int64_t stride;
};

// Room that a thread keeps from call to call: fresh pages cost more than laying out a weight.
enum Use { UP, DOWN, HIDDEN, USES };
constexpr int64_t KEPT = 8 << 20;  // elements; what is larger is given back

class Room {
 public:
  Room(Use use, int64_t size) : use_(use), held_(std::move(kept()[use])) {
    if (!held_.defined() || held_.numel() < size) held_ = at::empty({size}, at::kFloat);
  }
  Room(const Room&) = delete;
  Room& operator=(const Room&) = delete;
  ~Room() {
    if (held_.numel() <= KEPT) kept()[use_] = std::move(held_);
  }
  float* data() const { return held_.data_ptr<float>(); }

 private:
  static std::array<at::Tensor, USES>& kept() {
    thread_local std::array<at::Tensor, USES> rooms;
    return rooms;
  }
  Use use_;
  at::Tensor held_;
};

// A weight (columns, inner) in panels of WIDTH columns: all columns of one k, then those of the next.
struct Panels {
  Panels(const float* data, const at::Tensor& weight, const std::optional<at::Tensor>& bias)
      : data(data), columns(weight.size(0)), inner(weight.size(1)), count(ceil_div(columns, WIDTH)),
        bias(bias ? bias->const_data_ptr<float>() : nullptr) {}
  const float* at(int64_t panel, int64_t k) const { return data + (panel * inner + k) * WIDTH; }

  const float* const data;
  const int64_t columns, inner, count;
  const float* const bias;  // or null
};

int64_t size_of(const at::Tensor& weight) { return ceil_div(weight.size(0), WIDTH) * WIDTH * weight.size(1); }

void lay_out_panel(float* panel, const float* weight, int64_t inner, int64_t columns, int64_t down, int64_t along) {
  if (columns < WIDTH) std::fill_n(panel, inner * WIDTH, 0.0f);
  constexpr int64_t STEP = 16;  // a cache line of each row at a time
  for (int64_t k = 0; k < inner; k += STEP) {
    const int64_t end = std::min(inner, k + STEP);
    for (int64_t j = 0; j < columns; ++j)
      for (int64_t i = k; i < end; ++i) panel[i * WIDTH + j] = weight[j * down + i * along];
  }
}

// Writes the weight, whatever its strides, in panels to `to`, and returns `to`.
const float* lay_out(float* to, const at::Tensor& weight) {
  constexpr int64_t FEW = 4;  // panels at a time
  const int64_t columns = weight.size(0), inner = weight.size(1), count = ceil_div(columns, WIDTH);
  const int64_t down = weight.stride(0), along = weight.stride(1);
  const float* from = weight.const_data_ptr<float>();
  spread(ceil_div(count, FEW), [&](int64_t item) {
    for (int64_t p = item * FEW; p < std::min(count, (item + 1) * FEW); ++p)
      lay_out_panel(to + p * inner * WIDTH, from + p * WIDTH * down, inner,
                    std::min<int64_t>(WIDTH, columns - p * WIDTH), down, along);
  });
  return to;
}

template <typename Stored>
bool rows_equal(const float* panels, const at::Tensor& weight) {
  const int64_t columns = weight.size(0), inner = weight.size(1);
  const int64_t down = weight.stride(0), along = weight.stride(1);
  const auto* from = static_cast<const Stored*>(weight.const_data_ptr());
  std::atomic<bool> equal{true};
  spread(ceil_div(columns, WIDTH), [&](int64_t panel) {
    const float* kept = panels + panel * inner * WIDTH;
    const int64_t many = std::min<int64_t>(WIDTH, columns - panel * WIDTH);
    constexpr int64_t STEP = 16;  // as in laying out
    uint32_t differ = 0;
    for (int64_t first = 0; first < inner; first += STEP)
      for (int64_t j = 0; j < many; ++j)
        for (int64_t k = first; k < std::min(inner, first + STEP); ++k) {
          const auto now = static_cast<float>(from[(panel * WIDTH + j) * down + k * along]);
          differ |= std::bit_cast<uint32_t>(kept[k * WIDTH + j]) ^ std::bit_cast<uint32_t>(now);
        }
    if (differ != 0) equal.store(false, std::memory_order_relaxed);
  });
  return equal.load();
}

template <typename Stored>
bool rows_unchanged(const float* panels, const at::Tensor& weight) {
  const int64_t columns = weight.size(0), inner = weight.size(1);
  const int64_t down = weight.stride(0), along = weight.stride(1);
  const auto* from = static_cast<const Stored*>(weight.const_data_ptr());
  constexpr int64_t STRIDE = 37;  // no multiple of a cache line: neighbours of a column are looked at too
  uint32_t differ = 0;
  for (int64_t row = 0, k = 0; row < columns; ++row) {
    const float kept = panels[(row / WIDTH * inner + k) * WIDTH + row % WIDTH];
    const auto now = static_cast<float>(from[row * down + k * along]);
    differ |= std::bit_cast<uint32_t>(kept) ^ std::bit_cast<uint32_t>(now);
    if ((k += STRIDE) >= inner) k %= inner;
  }
  return differ == 0;
}

// Whether one element of every row, each at another column, is still what it was when the panels were made.
bool unchanged(const float* panels, const at::Tensor& weight) {
  switch (weight.scalar_type()) {
    case at::kBFloat16:
      return rows_unchanged<at::BFloat16>(panels, weight);
    case at::kHalf:
      return rows_unchanged<at::Half>(panels, weight);
    default:
      return rows_unchanged<float>(panels, weight);
  }
}

// Whether every element is what it was when the panels were made.
bool equal(const at::Tensor& kept, const at::Tensor& weight) {
  const pybind11::gil_scoped_release released;
  const float* panels = kept.const_data_ptr<float>();
  if (weight.is_neg() || size_of(weight) != kept.numel()) return false;
  switch (weight.scalar_type()) {
    case at::kBFloat16:
      return rows_equal<at::BFloat16>(panels, weight);
    case at::kHalf:
      return rows_equal<at::Half>(panels, weight);
    default:
      return rows_equal<float>(panels, weight);
  }
}

// One part of a panel times HEIGHT rows or fewer. `columns` are those of the panel that are real.
template <int H>
inline __attribute__((always_inline)) void tile(
    Rows x, const float* panel, int64_t inner, Result out, int64_t columns, bool begins, const float* bias,
    int64_t activation) {
  vf sums[H][2];
  float edge[WIDTH] = {};
  for (int i = 0; i < H; ++i) {
    const float* from = out.data + i * out.stride;
    if (!begins && columns < WIDTH) from = std::copy_n(from, columns, edge) - columns;
    for (int j = 0; j < 2; ++j) sums[i][j] = begins ? vf{} : load(from + j * W);
  }
  for (int64_t k = 0; k < inner; ++k) {
    const vf low = load(panel + k * WIDTH), high = load(panel + k * WIDTH + W);
#pragma GCC unroll 16
    for (int i = 0; i < H; ++i) {
      const vf value = all(x.data[i * x.stride + k]);
      sums[i][0] += value * low;
      sums[i][1] += value * high;
    }
  }
  if (bias != nullptr) {
    const float* from = bias;
    if (columns < WIDTH) from = std::copy_n(bias, columns, edge) - columns;
    const vf low = load(from), high = load(from + W);
    for (int i = 0; i < H; ++i) {
      sums[i][0] += low;
      sums[i][1] += high;
    }
  }
  if (activation != NONE) {
    for (int i = 0; i < H; ++i)
      for (int j = 0; j < 2; ++j) sums[i][j] = activated(sums[i][j], activation);
  }
  for (int i = 0; i < H; ++i) {
    float* to = columns < WIDTH ? edge : out.data + i * out.stride;
    for (int j = 0; j < 2; ++j) store(to + j * W, sums[i][j]);
    if (columns < WIDTH) std::copy_n(edge, columns, out.data + i * out.stride);
  }
}

template <int H>
void fewer(int64_t rows, Rows x, const float* panel, int64_t inner, Result out, int64_t columns, bool begins,
           const float* bias, int64_t activation) {
  if constexpr (H > 0) {
    if (rows == H) {
      tile<H>(x, panel, inner, out, columns, begins, bias, activation);
    } else {
      fewer<H - 1>(rows, x, panel, inner, out, columns, begins, bias, activation);
    }
  }
}

// Some rows times the panels [begin, end), with the bias and then the activation.
void product(const Panels& weight, int64_t begin, int64_t end, int64_t rows, Rows x, Result out,
             int64_t activation) {
  // Beside a row or two the panels are what is read, and read best from end to end.
  const int64_t depth = rows > 2 ? DEPTH : weight.inner;
  for (int64_t from = 0; from < weight.inner; from += depth) {
    const int64_t length = std::min(depth, weight.inner - from);
    const bool ends = from + length == weight.inner;
    for (int64_t p = begin; p < end; ++p) {
      const int64_t column = p * WIDTH, columns = std::min<int64_t>(WIDTH, weight.columns - column);
      const float* panel = weight.at(p, from);
      const float* bias = ends && weight.bias != nullptr ? weight.bias + column : nullptr;
      const int64_t last = ends ? activation : NONE;
      for (int64_t row = 0; row < rows; row += HEIGHT) {
        const Rows part{x.data + row * x.stride + from, x.stride};
        const Result to{out.data + row * out.stride + column, out.stride};
        if (rows - row >= HEIGHT) {
          tile<HEIGHT>(part, panel, length, to, columns, from == 0, bias, last);
        } else {
          fewer<HEIGHT - 1>(rows - row, part, panel, length, to, columns, from == 0, bias, last);
        }
      }
    }
  }
}

// How many rows an item gets: at most BLOCK, whole tiles, and as many items for each thread.
int64_t block_of(int64_t rows, int64_t threads) {
  const int64_t blocks = ceil_div(ceil_div(rows, BLOCK), threads) * threads;
  return ceil_div(ceil_div(rows, blocks), HEIGHT) * HEIGHT;
}

// All rows times all panels; few rows are cut along the columns too.
void product_everywhere(const Panels& weight, int64_t rows, Rows x, Result out, int64_t activation = NONE) {
  const int64_t threads = at::get_num_threads(), step = block_of(rows, threads);
  const int64_t blocks = ceil_div(rows, step);
  const int64_t wide = ceil_div(weight.count, ceil_div(2 * threads, blocks));
  const int64_t cuts = ceil_div(weight.count, wide);
  spread(blocks * cuts, [&](int64_t item) {
    const int64_t row = item / cuts * step, begin = item % cuts * wide;
    product(weight, begin, std::min(weight.count, begin + wide), std::min(step, rows - row),
            {x.data + row * x.stride, x.stride}, {out.data + row * out.stride, out.stride}, activation);
  });
}

// Rows of x (..., K).
int64_t rows_of(const at::Tensor& x) {
  int64_t rows = 1;
  for (int64_t axis = 0; axis + 1 < x.dim(); ++axis) rows *= x.size(axis);
  return rows;
}

void multiply(const at::Tensor& out, const at::Tensor& x, const Panels& w) {
  product_everywhere(w, rows_of(x), {x.const_data_ptr<float>(), w.inner}, {out.data_ptr<float>(), w.columns});
}

void feed_forward(const at::Tensor& out, const at::Tensor& x, const Panels& up, const Panels& down,
                  int64_t activation) {
  const int64_t rows = rows_of(x), threads = at::get_num_threads();
  const int64_t width = up.count * WIDTH;  // of a hidden row in memory; what is behind its end means nothing
  const float* from = x.const_data_ptr<float>();
  float* to = out.data_ptr<float>();
  if (rows < BLOCK * threads) {  // too few for a block a thread
    const Room room(HIDDEN, rows * width);
    float* hidden = room.data();
    product_everywhere(up, rows, {from, up.inner}, {hidden, width}, activation);
    product_everywhere(down, rows, {hidden, width}, {to, down.columns});
    return;
  }
  const int64_t step = block_of(rows, threads);
  const Room room(HIDDEN, threads * step * width);
  float* start = room.data();
  spread(ceil_div(rows, step), [&](int64_t item, int64_t worker) {
    const int64_t row = item * step, many = std::min(step, rows - row);
    float* hidden = start + worker * step * width;
    product(up, 0, up.count, many, {from + row * up.inner, up.inner}, {hidden, width}, activation);
    product(down, 0, down.count, many, {hidden, width}, {to + row * down.columns, down.columns}, NONE);
  });
}

// As it reads: negated where only a flag says so.
std::optional<at::Tensor> plain(const std::optional<at::Tensor>& tensor) {
  return tensor ? std::optional(tensor->resolve_neg()) : std::nullopt;
}

// out (N, C) = x (N, K) weight^T + bias; all float32 and contiguous.
void linear(const at::Tensor& out, const at::Tensor& x, const at::Tensor& weight_in,
            const std::optional<at::Tensor>& bias) {
  const pybind11::gil_scoped_release released;
  const at::Tensor weight = weight_in.resolve_neg();
  const auto added = plain(bias);
  const Room room(UP, size_of(weight));
  multiply(out, x.resolve_neg(), {lay_out(room.data(), weight), weight, added});
}

// out (N, C) = down(activation(up(x))); all float32 and contiguous.
void mlp(const at::Tensor& out, const at::Tensor& x, const at::Tensor& up_in, const at::Tensor& down_in,
         const std::optional<at::Tensor>& b_up, const std::optional<at::Tensor>& b_down, int64_t activation) {
  const pybind11::gil_scoped_release released;
  const at::Tensor w_up = up_in.resolve_neg(), w_down = down_in.resolve_neg();
  const auto above = plain(b_up), below = plain(b_down);
  const Room first(UP, size_of(w_up)), second(DOWN, size_of(w_down));
  feed_forward(out, x.resolve_neg(), {lay_out(first.data(), w_up), w_up, above},
               {lay_out(second.data(), w_down), w_down, below}, activation);
}

// A weight of any strides and floating point dtype in panels of float32, to be kept.
at::Tensor pack(const at::Tensor& weight) {
  const pybind11::gil_scoped_release released;
  at::Tensor panels = at::empty({size_of(weight)}, at::kFloat);
  lay_out(panels.data_ptr<float>(), weight.to(at::kFloat).resolve_neg());
  return panels;
}

// As it reads: dense, in float32, and negated where only a flag says so.
at::Tensor dense(const at::Tensor& tensor) { return tensor.to(at::kFloat).resolve_neg().contiguous(); }
std::optional<at::Tensor> dense(const std::optional<at::Tensor>& tensor) {
  return tensor ? std::optional(dense(*tensor)) : std::nullopt;
}

// Whether there is something to multiply, and the panels are those of the weight as it is now.
bool usable(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& panels) {
  return x.numel() > 0 && weight.numel() > 0 && !weight.is_neg() &&
      unchanged(panels.const_data_ptr<float>(), weight);
}

at::Tensor result_of(const at::Tensor& x, int64_t columns) {
  c10::DimVector shape(x.sizes());
  shape.back() = columns;
  return at::empty(shape, at::kFloat);
}

// (..., C) = x (..., K) weight^T + bias with kept panels, operands of any strides and one dtype, which is rounded to
// once, at the end; nothing where these are no longer the weight's, or there is nothing to multiply.
std::optional<at::Tensor> linear_kept(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& panels,
                                      const std::optional<at::Tensor>& bias) {
  const pybind11::gil_scoped_release released;
  if (!usable(x, weight, panels)) return std::nullopt;
  const at::Tensor rows = dense(x), out = result_of(x, weight.size(0));
  const auto added = dense(bias);
  multiply(out, rows, {panels.const_data_ptr<float>(), weight, added});
  return out.to(x.scalar_type());
}

// What `linear_kept` gives for each part of x (N, K), of so many rows one behind another, with its own weight and panels,
// in one tensor (N, C); nothing where some are no longer their weight's.
std::optional<at::Tensor> linear_grouped(const at::Tensor& x, const std::vector<int64_t>& counts,
                                         const std::vector<at::Tensor>& weights, const std::vector<at::Tensor>& panels) {
  const pybind11::gil_scoped_release released;
  TORCH_CHECK(!counts.empty() && counts.size() == weights.size() && counts.size() == panels.size() && x.dim() == 2,
              "linear_grouped needs rows and as many counts, weights and panels as there are parts");
  std::vector<int64_t> starts{0};
  for (size_t i = 0; i < counts.size(); ++i) {
    need_memory(weights[i]);
    if (weights[i].sizes() != weights[0].sizes() || !usable(x, weights[i], panels[i])) return std::nullopt;
    starts.push_back(starts.back() + counts[i]);
  }
  TORCH_CHECK(starts.back() == x.size(0) && weights[0].size(1) == x.size(1), "linear_grouped needs rows for its weights");
  const at::Tensor rows = dense(x), out = result_of(x, weights[0].size(0));
  const float* from = rows.const_data_ptr<float>();
  float* to = out.data_ptr<float>();
  spread(int64_t(counts.size()), [&](int64_t i) {
    const Panels w{panels[i].const_data_ptr<float>(), weights[i], std::nullopt};
    product(w, 0, w.count, counts[i], {from + starts[i] * w.inner, w.inner}, {to + starts[i] * w.columns, w.columns}, NONE);
  });
  return out.to(x.scalar_type());
}

// `linear_kept` of rows that are normed first, which stay in float32.
std::optional<at::Tensor> norm_linear_kept(const at::Tensor& x, const std::optional<at::Tensor>& norm_weight,
                                           const at::Tensor& weight, const at::Tensor& panels,
                                           const std::optional<at::Tensor>& bias, double eps) {
  const pybind11::gil_scoped_release released;
  if (!usable(x, weight, panels)) return std::nullopt;
  const at::Tensor rows = dense(x), out = result_of(x, weight.size(0));
  const auto by = dense(norm_weight), added = dense(bias);
  const int64_t width = weight.size(1), count = rows_of(rows);
  const float *from = rows.const_data_ptr<float>(), *factors = by ? by->const_data_ptr<float>() : nullptr;
  const Room room(HIDDEN, count * width);
  float* normed = room.data();
  spread(ceil_div(count, HEIGHT), [&](int64_t item) {
    for (int64_t i = item * HEIGHT; i < std::min(count, (item + 1) * HEIGHT); ++i)
      norm_row(from + i * width, factors, normed + i * width, width, float(eps));
  });
  const Panels w{panels.const_data_ptr<float>(), weight, added};
  product_everywhere(w, count, {normed, width}, {out.data_ptr<float>(), w.columns});
  return out.to(x.scalar_type());
}

// The product for both halves of a feed-forward block.
std::optional<at::Tensor> mlp_kept(const at::Tensor& x, const at::Tensor& w_up, const at::Tensor& w_down,
                                   const at::Tensor& p_up, const at::Tensor& p_down,
                                   const std::optional<at::Tensor>& b_up, const std::optional<at::Tensor>& b_down,
                                   int64_t activation) {
  const pybind11::gil_scoped_release released;
  if (!usable(x, w_up, p_up) || !usable(x, w_down, p_down)) return std::nullopt;
  const at::Tensor rows = dense(x), out = result_of(x, w_down.size(0));
  const auto first = dense(b_up), second = dense(b_down);
  feed_forward(out, rows, {p_up.const_data_ptr<float>(), w_up, first},
               {p_down.const_data_ptr<float>(), w_down, second}, activation);
  return out.to(x.scalar_type());
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("linear", reading(&linear));
  m.def("mlp", reading(&mlp));
  m.def("pack", reading(&pack));
  m.def("equal", reading(&equal));
  m.def("linear_kept", reading(&linear_kept));
  m.def("linear_grouped", reading(&linear_grouped));
  m.def("norm_linear_kept", reading(&norm_linear_kept));
  m.def("mlp_kept", reading(&mlp_kept));
}
