// What a kernel did wrong.

#ifndef MODEL_FAULT_H_
#define MODEL_FAULT_H_

#include <sstream>
#include <stdexcept>
#include <string>

namespace model {

// Kinds by which a report is counted: docs/functional_model.md lists them.
class Fault : public std::runtime_error {
 public:
  Fault(std::string kind, const std::string& what)
      : std::runtime_error(what), kind(std::move(kind)) {}
  const std::string kind;
};

template <typename... Parts>
std::string Text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

template <typename... Parts>
[[noreturn]] void Raise(const char* kind, const Parts&... parts) {
  throw Fault(kind, Text(parts...));
}

}  // namespace model

#endif  // MODEL_FAULT_H_
