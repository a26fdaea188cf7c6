// One panel of quantized weights times a few rows, for one kind of vectors: included once for each, inside its
// namespace and under its target, with the primitives that it needs defined before.
//
// A panel is 16 columns. Four codes of one column, of four k that follow each other, are one dword of each of its
// lanes; of four-bit codes its high halves hold the next four. Codes of float8 stand column after column.

constexpr int HALVES = 16 / LANES;

inline int32_t dword(const int8_t* p) {
  int32_t value;
  std::memcpy(&value, p, 4);
  return value;
}

// Digits of rows times whole numbers: `D` digits of base 256 for each element. Sums of a chunk are exact, so that
// the vectors' width decides nothing.
template <int R, int D, bool WIDE, bool LOOKUP>
__attribute__((always_inline)) inline void whole(
    const Weight& w, const Digits& x, int64_t panel, int64_t row, float* out) {
  const int64_t per_group = w.group / w.chunk;
  const float* scale = w.scale_of(panel);
  const float* zero = w.zero_of(panel);
  const vi table = LOOKUP ? table_of(w.table) : vi{};
  for (int half = 0; half < HALVES; ++half) {
    const uint8_t* from = w.codes_of(panel) + half * LANES * 4;
    vf totals[R] = {};
    for (int64_t chunk = 0; chunk < w.chunks; ++chunk) {
      const int64_t begin = chunk * w.chunk, length = std::min(w.chunk, w.padded - begin);
      const int8_t* digits[R][D];
      vi sums[R][D];
      for (int r = 0; r < R; ++r)
        for (int d = 0; d < D; ++d) {
          digits[r][d] = x.at(row + r, d) + begin;
          sums[r][d] = vi{};
        }
      for (int64_t k = 0; k < length; k += WIDE ? 4 : 8, from += 64) {
        const vi both = load_codes(from);
        const vi low = WIDE ? both : LOOKUP ? looked_up(table, low_half(both)) : low_half(both);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 3
          for (int d = 0; d < D; ++d) sums[r][d] = dot<WIDE>(sums[r][d], low, every(dword(digits[r][d] + k)));
        if constexpr (!WIDE) {
          const vi high = LOOKUP ? looked_up(table, high_half(both)) : high_half(both);
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r)
#pragma GCC unroll 3
            for (int d = 0; d < D; ++d)
              sums[r][d] = dot<false>(sums[r][d], high, every(dword(digits[r][d] + k + 4)));
        }
      }
      const int64_t group = chunk / per_group * 16 + half * LANES;
      const vf spread = load(scale + group), shift = zero != nullptr ? load(zero + group) : all(w.shift);
      for (int r = 0; r < R; ++r) {
        vf value = vf{};
#pragma GCC unroll 3
        for (int d = D - 1; d >= 0; --d)
          value = value * 256.0f + (to_float(sums[r][d]) - shift * x.sum(row + r, d, chunk));
        totals[r] += value * (spread * x.step(row + r, chunk));
      }
    }
    for (int r = 0; r < R; ++r) store(out + r * 16 + half * LANES, totals[r]);
  }
}

// Rows in float32 times numbers that are no whole ones.
template <int R, int KIND>
__attribute__((always_inline)) inline void real(
    const Weight& w, const Floats& x, int64_t panel, int64_t row, float* out) {
  const int64_t per_group = w.group / w.chunk;
  const float* scale = w.scale_of(panel);
  const Numbers numbers(w.numbers);
  for (int half = 0; half < HALVES; ++half) {
    const uint8_t* from = w.codes_of(panel) + half * LANES * (KIND == NORMAL ? 4 : 1);
    vf totals[R] = {};
    for (int64_t chunk = 0; chunk < w.chunks; ++chunk) {
      const int64_t begin = chunk * w.chunk, length = std::min(w.chunk, w.padded - begin);
      vf sums[R] = {};
      if constexpr (KIND == NORMAL) {
        for (int64_t k = 0; k < length; k += 8, from += 64) {
          const vi codes = load_codes(from);
#pragma GCC unroll 8
          for (int j = 0; j < 8; ++j) {
            const vf value = numbers.get(shifted(codes, (j & 3) * 8 + (j >> 2) * 4));
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) sums[r] += value * x.at(row + r)[begin + k + j];
          }
        }
      } else {
        for (int64_t k = 0; k < length; k += 2, from += 32) {
          vf values[2];
          two_columns<KIND == E4M3>(from, values);
#pragma GCC unroll 2
          for (int j = 0; j < 2; ++j)
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) sums[r] += values[j] * x.at(row + r)[begin + k + j];
        }
      }
      const vf spread = load(scale + chunk / per_group * 16 + half * LANES);
      for (int r = 0; r < R; ++r) totals[r] += sums[r] * spread;
    }
    for (int r = 0; r < R; ++r) store(out + r * 16 + half * LANES, totals[r]);
  }
}

template <int R, int D, bool WIDE, bool LOOKUP>
void whole_rows(const Weight& w, const Digits& x, int64_t panel, int64_t row, int64_t rows, float* out) {
  for (; rows >= R; rows -= R, row += R, out += R * 16) whole<R, D, WIDE, LOOKUP>(w, x, panel, row, out);
  if constexpr (R > 1) {
    if (rows > 0) whole_rows<R - 1, D, WIDE, LOOKUP>(w, x, panel, row, rows, out);
  }
}

template <int R, int KIND>
void real_rows(const Weight& w, const Floats& x, int64_t panel, int64_t row, int64_t rows, float* out) {
  for (; rows >= R; rows -= R, row += R, out += R * 16) real<R, KIND>(w, x, panel, row, out);
  if constexpr (R > 1) {
    if (rows > 0) real_rows<R - 1, KIND>(w, x, panel, row, rows, out);
  }
}

// out (rows, 16) of a panel.
void whole_panel(const Weight& w, const Digits& x, int64_t panel, int64_t row, int64_t rows, float* out) {
  const bool one = x.count == 1;
  if (w.wide) {
    one ? whole_rows<HEIGHT, 1, true, false>(w, x, panel, row, rows, out)
        : whole_rows<HEIGHT, 3, true, false>(w, x, panel, row, rows, out);
  } else if (w.table != nullptr) {
    one ? whole_rows<HEIGHT, 1, false, true>(w, x, panel, row, rows, out)
        : whole_rows<HEIGHT, 3, false, true>(w, x, panel, row, rows, out);
  } else {
    one ? whole_rows<HEIGHT, 1, false, false>(w, x, panel, row, rows, out)
        : whole_rows<HEIGHT, 3, false, false>(w, x, panel, row, rows, out);
  }
}

[[maybe_unused]] void real_panel(const Weight& w, const Floats& x, int64_t panel, int64_t row, int64_t rows, float* out) {
  switch (w.kind) {
    case NORMAL:
      return real_rows<REAL_HEIGHT, NORMAL>(w, x, panel, row, rows, out);
    case E4M3:
      return real_rows<REAL_HEIGHT, E4M3>(w, x, panel, row, rows, out);
    default:
      return real_rows<REAL_HEIGHT, E5M2>(w, x, panel, row, rows, out);
  }
}
