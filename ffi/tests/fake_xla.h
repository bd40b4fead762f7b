// A stand-in for XLA's side of the FFI: builds call frames and takes errors.

#ifndef JGG_TESTS_FAKE_XLA_H_
#define JGG_TESTS_FAKE_XLA_H_

#include <cuda.h>

#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "xla/ffi/api/c_api.h"

namespace jgg {

constexpr auto kInstantiate = XLA_FFI_ExecutionStage_INSTANTIATE;
constexpr auto kInitialize = XLA_FFI_ExecutionStage_INITIALIZE;
constexpr auto kExecute = XLA_FFI_ExecutionStage_EXECUTE;
constexpr auto kBf16 = XLA_FFI_DataType_BF16, kF16 = XLA_FFI_DataType_F16;
constexpr auto kF32 = XLA_FFI_DataType_F32, kS32 = XLA_FFI_DataType_S32;
constexpr auto kS64 = XLA_FFI_DataType_S64, kU8 = XLA_FFI_DataType_U8;

struct FakeBuffer {
  XLA_FFI_DataType dtype;
  std::vector<int64_t> dims;
  uint64_t address;
};

using FakeAttribute = std::variant<std::string, bool, int64_t>;

struct FakeCall {
  CUstream stream = nullptr;
  std::vector<FakeBuffer> args, rets;
  std::map<std::string, FakeAttribute> attributes;  // sorted, as XLA passes them
};

// Runs a handler. Its error's text, prefixed by its code ("3: ..."), or "" on success.
std::string Call(XLA_FFI_Handler* handler, XLA_FFI_ExecutionStage stage, FakeCall call);

// A way to spoil a call, and a part of the error that it then gets.
struct Refusal {
  void (*spoil)(FakeCall&);
  const char* part;
};

// Checks that the handler refuses the call in each of these ways.
void CheckRefusals(XLA_FFI_Handler* handler, XLA_FFI_ExecutionStage stage, const FakeCall& call,
                   const std::vector<Refusal>& refusals);

// The handler's traits and API version, read as XLA reads them at registration.
XLA_FFI_Metadata MetadataOf(XLA_FFI_Handler* handler);

}  // namespace jgg

#endif  // JGG_TESTS_FAKE_XLA_H_
