// What needs no instruction of its own: included where a width of vectors is named, in its namespace.

typedef uint32_t lanes __attribute__((vector_size(LANES * 4)));

inline vi every(int32_t value) { return vi(lanes{} + static_cast<uint32_t>(value)); }
inline vi shifted(vi codes, int by) { return vi(lanes(codes) >> by); }
inline vi low_half(vi codes) { return codes & every(0x0F0F0F0F); }
inline vi high_half(vi codes) { return low_half(shifted(codes, 4)); }
inline vf all(float x) { return x - vf{}; }
inline vf to_float(vi sums) {
  typedef int32_t whole_numbers __attribute__((vector_size(LANES * 4)));
  return __builtin_convertvector(whole_numbers(sums), vf);
}

template <typename Vector>
inline Vector read(const void* from) {
  Vector value;
  std::memcpy(&value, from, sizeof value);
  return value;
}
inline vi load_codes(const uint8_t* p) { return read<vi>(p); }
inline vf load(const float* p) { return read<vf>(p); }
inline void store(float* p, vf v) { std::memcpy(p, &v, sizeof v); }

// Four products a lane without VNNI. Two codes above 127 times two digits may leave 16 bits: such go in halves.
template <bool WIDE>
inline vi dot_by_pairs(vi sum, vi codes, vi digits) {
  const auto added = [](vi a, vi b) { return vi(lanes(a) + lanes(b)); };
  if constexpr (!WIDE) return added(sum, products(codes, digits));
  const vi high = vi(lanes(products(high_half(codes), digits)) << 4);
  return added(sum, added(high, products(low_half(codes), digits)));
}
