// Errors travel as exceptions inside the library and are turned into an XLA FFI error, or a C
// string, at its two borders (xla_border.h, c_api.cc).

#ifndef JGG_ERROR_H_
#define JGG_ERROR_H_

#include <sstream>
#include <stdexcept>
#include <string>

namespace jgg {

enum class ErrorCode {
  kInvalidArgument,     // the caller's mistake
  kFailedPrecondition,  // the machine, driver or build cannot
  kInternal,            // the driver failed
};

class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& text)
      : std::runtime_error("jax_grouped_gemm: " + text), code_(code) {}

  ErrorCode code() const { return code_; }

 private:
  ErrorCode code_;
};

template <typename... Parts>
std::string Text(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

template <typename... Parts>
[[noreturn]] void InvalidArgument(const Parts&... parts) {
  throw Error(ErrorCode::kInvalidArgument, Text(parts...));
}

template <typename... Parts>
[[noreturn]] void FailedPrecondition(const Parts&... parts) {
  throw Error(ErrorCode::kFailedPrecondition, Text(parts...));
}

}  // namespace jgg

#endif  // JGG_ERROR_H_
