#include "matrix.h"

#include <algorithm>
#include <cmath>

#include "floats.h"
#include "tensor_map.h"

namespace model {
namespace {

uint32_t Field(uint64_t descriptor, int bit, int bits) {
  return descriptor >> bit & ((uint64_t{1} << bits) - 1);
}

SharedMatrix Common(uint64_t descriptor, bool mn_major) {
  if (Field(descriptor, 49, 3) != 0) Raise("unknown", "a matrix descriptor with a base offset");
  if (Field(descriptor, 14, 2) || Field(descriptor, 30, 2)) {
    Raise("unknown", "a matrix descriptor with bits set that have no meaning");
  }
  return {Field(descriptor, 0, 14) << 4, Field(descriptor, 16, 14) << 4,
          Field(descriptor, 32, 14) << 4, 0, mn_major};
}

// Where the swizzle's pattern does not start at a multiple of its size, a base offset says so; none
// is modelled.
void CheckPattern(const SharedMatrix& matrix) {
  if (matrix.start >> 7 & ((1u << matrix.swizzle) - 1)) {
    Raise("unknown", "a matrix at 0x", std::hex, matrix.start, ", off the pattern of its swizzle");
  }
}

// Byte offset of element (row, k) from the matrix's start, before the swizzle. An atom of the
// swizzle is 8 rows of 16 << swizzle bytes; along the major dimension one row of it, across the
// other 8.
uint32_t OffsetOf(const SharedMatrix& matrix, uint32_t row, uint32_t k) {
  const uint32_t width = 16u << matrix.swizzle;  // bytes
  if (!matrix.mn_major) return row % 8 * width + row / 8 * matrix.stride + k * 2;
  return row % (width / 2) * 2 + row / (width / 2) * matrix.leading + k % 8 * width +
         k / 8 * matrix.stride;
}

constexpr int kNoExponent = -100000;

// frexp's, less one: 1 <= |x| / 2^e < 2; subnormals too.
int Exponent(float x) { return x == 0 ? kNoExponent : std::ilogb(x); }

double PowerOfTwo(int e) {
  const uint64_t bits = static_cast<uint64_t>(e + 1023) << 52;
  double value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Toward zero; to infinity beyond the largest float.
float Cut(double value) {
  if (std::fabs(value) >= 0x1p128) return std::copysign(INFINITY, static_cast<float>(value));
  // What is cut to zero is +0: the sum of the machine's has no sign then.
  if (std::fabs(value) < 0x1p-126)
    return static_cast<float>(std::trunc(value * 0x1p149) * 0x1p-149) + 0.0f;
  uint64_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  bits &= ~uint64_t{0} << 29;
  std::memcpy(&value, &bits, sizeof(bits));
  return static_cast<float>(value);
}

struct Columns {  // B, one array per k
  int n;
  std::vector<double> values[kK];
  std::vector<int> exponents[kK];
  std::vector<uint8_t> special;  // a NaN or an infinity in the column
};

bool Finite(float x) { return std::isfinite(x); }

// With a NaN or an infinity among the terms.
float SpecialSum(const float* a, const Columns& b, int j, float d) {
  bool plus = false, minus = false;
  auto term = [&](double x) {
    plus = plus || x == INFINITY || std::isnan(x);
    minus = minus || x == -INFINITY || std::isnan(x);
  };
  for (int k = 0; k < kK; ++k) term(a[k] * b.values[k][j]);
  term(d);
  if (plus && minus) return FloatOfBits(0x7fffffff);
  return plus ? INFINITY : -INFINITY;
}

#if defined(__x86_64__) && defined(__GNUC__)
__attribute__((target_clones("avx2", "default")))
#endif
void RowOf(const double* a, const int* exponents, const Columns& b, float* d, bool add_d) {
  const int n = b.n;
  int greatest[256];
  double scale[256], sum[256];
  for (int j = 0; j < n; ++j) greatest[j] = add_d ? Exponent(d[j]) : kNoExponent;
  for (int k = 0; k < kK; ++k) {
    const int* e = b.exponents[k].data();
    for (int j = 0; j < n; ++j) greatest[j] = std::max(greatest[j], exponents[k] + e[j]);
  }
  constexpr int kFraction = 25;
  for (int j = 0; j < n; ++j) {
    greatest[j] = std::max(greatest[j], -1000);  // all terms are zero
    scale[j] = PowerOfTwo(kFraction - greatest[j]);
    sum[j] = add_d ? static_cast<double>(static_cast<int32_t>(d[j] * scale[j])) : 0.0;
  }
  for (int k = 0; k < kK; ++k) {
    const double* v = b.values[k].data();
    for (int j = 0; j < n; ++j)
      sum[j] += static_cast<double>(static_cast<int32_t>(a[k] * v[j] * scale[j]));
  }
  for (int j = 0; j < n; ++j) d[j] = Cut(sum[j] * PowerOfTwo(greatest[j] - kFraction));
}

}  // namespace

SharedMatrix WgmmaMatrix(uint64_t descriptor, bool mn_major) {
  SharedMatrix matrix = Common(descriptor, mn_major);
  if (Field(descriptor, 46, 3) || Field(descriptor, 52, 10))
    Raise("unknown", "a wgmma matrix descriptor with bits set that have no meaning");
  const uint32_t mode = Field(descriptor, 62, 2);
  if (mode == 0) Raise("unknown", "a matrix without swizzle");
  matrix.swizzle = 4 - mode;  // 1: 128 bytes, 2: 64, 3: 32
  CheckPattern(matrix);
  return matrix;
}

SharedMatrix Tcgen05Matrix(uint64_t descriptor, bool mn_major) {
  SharedMatrix matrix = Common(descriptor, mn_major);
  if (Field(descriptor, 46, 3) != 1)
    Raise("unknown", "a tcgen05 matrix descriptor without its version");
  if (Field(descriptor, 52, 9) != 0)
    Raise("unknown", "a tcgen05 matrix descriptor with bits 52 to 60 set");
  switch (Field(descriptor, 61, 3)) {
    case 2:
      matrix.swizzle = 3;
      break;
    case 4:
      matrix.swizzle = 2;
      break;
    case 6:
      matrix.swizzle = 1;
      break;
    default:
      Raise("unknown", "a tcgen05 matrix of this swizzle");
  }
  CheckPattern(matrix);
  return matrix;
}

std::vector<uint16_t> Fetch(Cta& cta, const SharedMatrix& matrix, uint32_t first, uint32_t rows,
                            const std::vector<Actor>& actors) {
  std::vector<uint16_t> elements(size_t{rows} * kK);
  uint16_t chunk[8];  // 16 bytes stay together under the swizzle
  auto read = [&](uint32_t row, uint32_t k) {
    // The swizzle works on bits of the whole address.
    const uint32_t address = Swizzled(matrix.start + OffsetOf(matrix, row, k), matrix.swizzle);
    for (const Actor& actor : actors) cta.ReadShared(address, 16, chunk, actor);
  };
  if (!matrix.mn_major) {
    for (uint32_t r = 0; r < rows; ++r) {
      for (uint32_t k = 0; k < kK; k += 8) {
        read(first + r, k);
        std::copy_n(chunk, 8, &elements[r * kK + k]);
      }
    }
  } else {
    for (uint32_t k = 0; k < kK; ++k) {
      for (uint32_t r = 0; r < rows; r += 8) {
        read(first + r, k);
        for (uint32_t i = 0; i < 8; ++i) elements[(r + i) * kK + k] = chunk[i];
      }
    }
  }
  return elements;
}

void MultiplyAdd(const uint16_t* a, int m, const uint16_t* b, int n, float* d, bool add_d) {
  Columns columns;
  columns.n = n;
  columns.special.assign(n, 0);
  for (int k = 0; k < kK; ++k) {
    columns.values[k].resize(n);
    columns.exponents[k].resize(n);
    for (int j = 0; j < n; ++j) {
      const float x = FromBfloat16(b[j * kK + k]);
      columns.values[k][j] = x;
      columns.exponents[k][j] = Exponent(x);
      columns.special[j] |= !Finite(x);
    }
  }
  for (int i = 0; i < m; ++i) {
    float row[kK];
    double values[kK];
    int exponents[kK];
    bool special_row = false;
    for (int k = 0; k < kK; ++k) {
      row[k] = FromBfloat16(a[i * kK + k]);
      special_row = special_row || !Finite(row[k]);
      values[k] = row[k];
      exponents[k] = Exponent(row[k]);
    }
    float* out = d + size_t(i) * n;
    std::vector<std::pair<int, float>> special;
    for (int j = 0; j < n; ++j) {
      if (special_row || columns.special[j] || (add_d && !Finite(out[j]))) {
        special.emplace_back(j, SpecialSum(row, columns, j, add_d ? out[j] : 0.0f));
        out[j] = 0;
      }
    }
    // Special columns and rows would only disturb the arithmetic below, whose results are replaced.
    if (!special_row) RowOf(values, exponents, columns, out, add_d);
    for (const auto& [j, value] : special) out[j] = value;
  }
}

}  // namespace model
