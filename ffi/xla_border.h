// What the XLA FFI handlers share: errors, operands and attributes checked against what is expected
// of them, how stages are bound.

#ifndef JGG_XLA_BORDER_H_
#define JGG_XLA_BORDER_H_

#include <cuda.h>

#include <algorithm>
#include <initializer_list>
#include <string>
#include <string_view>

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

// Operands and results by position; as many as there must be are there.
inline xla::ffi::AnyBuffer Operand(const xla::ffi::RemainingArgs& args, size_t i) {
  return *args.get<xla::ffi::AnyBuffer>(i);
}

inline xla::ffi::AnyBuffer ResultOf(const xla::ffi::RemainingRets& rets, size_t i) {
  return **rets.get<xla::ffi::AnyBuffer>(i);
}

inline Element ElementOf(xla::ffi::DataType dtype) {
  switch (dtype) {
    case xla::ffi::BF16:
      return BF16;
    case xla::ffi::F16:
      return F16;
    case xla::ffi::F32:
      return F32;
    default:
      return NONE;
  }
}

// The same for a buffer of one of several element types; which one goes to `element`.
inline Address ExpectOneOf(const xla::ffi::AnyBuffer& buffer, const char* name,
                           std::initializer_list<xla::ffi::DataType> dtypes, const char* axes,
                           std::initializer_list<int64_t> dims, Element* element) {
  const xla::ffi::DataType found = buffer.element_type();
  if (std::find(dtypes.begin(), dtypes.end(), found) == dtypes.end()) {
    std::ostringstream expected;
    for (auto dtype = dtypes.begin(); dtype != dtypes.end(); ++dtype) {
      if (dtype != dtypes.begin()) expected << (dtype + 1 == dtypes.end() ? " or " : ", ");
      expected << *dtype;
    }
    Mismatch(buffer, name, Text(expected.str(), " ", axes));
  }
  *element = ElementOf(found);
  return Expect(buffer, name, found, axes, dims);
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

inline void ExpectCount(const char* what, size_t found, size_t expected) {
  if (found != expected) {
    InvalidArgument("the call must have ", expected, " ", what, " for its attributes; got ", found,
                    "; call it through jax_grouped_gemm, which prepares the operands");
  }
}

// An error unless the program was lowered for this library.
inline void ExpectBuild(std::string_view build_id) {
  if (build_id != BuildId()) {
    FailedPrecondition("the program was lowered for build ", build_id, ", this library is build ",
                       BuildId(), "; trace it again with the installed jax_grouped_gemm");
  }
}

// How the stages of a call with these attributes are bound. Every stage takes operands and results,
// whether or not a runtime passes them that early.
template <typename Attributes>
auto BindInstantiate() {
  return xla::ffi::Ffi::BindInstantiate().RemainingArgs().RemainingRets().Attrs<Attributes>();
}

template <typename Attributes, xla::ffi::ExecutionStage stage>
auto BindOnStream() {
  return xla::ffi::Ffi::Bind<stage>()
      .template Ctx<xla::ffi::PlatformStream<CUstream>>()
      .RemainingArgs()
      .RemainingRets()
      .template Attrs<Attributes>();
}

}  // namespace jgg

#endif  // JGG_XLA_BORDER_H_
