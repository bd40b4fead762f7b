// What the XLA FFI handlers share: errors, and operands checked against what is expected of them.

#ifndef JGG_XLA_BORDER_H_
#define JGG_XLA_BORDER_H_

#include <algorithm>
#include <initializer_list>
#include <string>

#include "error.h"
#include "problem.h"
#include "xla/ffi/api/ffi.h"

namespace jgg {

// Runs a handler's body; what it throws becomes the handler's error.
template <typename Body>
xla::ffi::Error AtBorder(Body body) {
  try {
    body();
    return xla::ffi::Error::Success();
  } catch (const Error& error) {
    switch (error.code()) {
      case ErrorCode::kInvalidArgument:
        return {xla::ffi::ErrorCode::kInvalidArgument, error.what()};
      case ErrorCode::kFailedPrecondition:
        return {xla::ffi::ErrorCode::kFailedPrecondition, error.what()};
      case ErrorCode::kInternal:
        break;
    }
    return {xla::ffi::ErrorCode::kInternal, error.what()};
  } catch (const std::exception& error) {
    return {xla::ffi::ErrorCode::kInternal, error.what()};
  }
}

template <typename Dims>
std::string DescribeShape(const Dims& dims) {
  std::ostringstream text;
  const char* separator = "";
  text << "(";
  for (int64_t dim : dims) {
    text << separator << dim;
    separator = ", ";
  }
  text << ")";
  return text.str();
}

inline Address AddressOf(const xla::ffi::AnyBuffer& buffer) {
  return reinterpret_cast<Address>(buffer.untyped_data());
}

[[noreturn]] inline void Mismatch(const xla::ffi::AnyBuffer& buffer, const std::string& name,
                                  const std::string& expected) {
  InvalidArgument(name, " must be ", expected, "; got ", buffer.element_type(), " ",
                  DescribeShape(buffer.dimensions()),
                  "; call it through jax_grouped_gemm, which prepares the operands");
}

inline bool HasShape(const xla::ffi::AnyBuffer& buffer, std::initializer_list<int64_t> dims) {
  const auto found = buffer.dimensions();
  return found.size() == dims.size() && std::equal(dims.begin(), dims.end(), found.begin());
}

// The operand's address; an error unless it has this dtype and shape. `axes` names the dimensions,
// for instance "(L, N, K)".
inline Address Expect(const xla::ffi::AnyBuffer& buffer, const char* name, xla::ffi::DataType dtype,
                      const char* axes, std::initializer_list<int64_t> dims) {
  if (buffer.element_type() != dtype || !HasShape(buffer, dims)) {
    Mismatch(buffer, name, Text(dtype, " ", axes, " = ", DescribeShape(dims)));
  }
  return AddressOf(buffer);
}

// The same for addresses of L weights: int64, or their little-endian bytes where JAX has no int64.
inline Address ExpectPointers(const xla::ffi::AnyBuffer& buffer, int64_t l) {
  const bool int64 = buffer.element_type() == xla::ffi::S64 && HasShape(buffer, {l});
  const bool bytes = buffer.element_type() == xla::ffi::U8 && HasShape(buffer, {8 * l});
  if (!int64 && !bytes) {
    Mismatch(buffer, "b_ptrs", Text("S64 (L,) = (", l, ",) or U8 (8 L,) = (", 8 * l, ",)"));
  }
  return AddressOf(buffer);
}

}  // namespace jgg

#endif  // JGG_XLA_BORDER_H_
