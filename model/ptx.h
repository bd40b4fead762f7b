// PTX text as a list of statements: labels resolved, inline-assembly scopes renamed apart.

#ifndef MODEL_PTX_H_
#define MODEL_PTX_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace model {

struct Parameter {
  std::string name;
  uint32_t offset, size, align;
};

struct Statement {
  int line = 0;
  std::string text;  // as written, blanks squeezed
  std::string guard;
  bool guard_negated = false;
  std::string opcode;                  // "mbarrier.init.shared.b64"
  std::vector<std::string> modifiers;  // of the opcode, its first word left out
  std::vector<std::string> operands;
  uint64_t used_bytes = ~uint64_t{0};  // of a vector load: the others may hold anything
};

struct Program {
  std::string name;
  int arch = 0;  // 90, 100
  std::vector<Parameter> parameters;
  uint32_t parameter_bytes = 0;
  uint32_t threads = 0;                      // .reqntid
  std::string shared_symbol;                 // of the dynamic shared memory
  std::map<std::string, int> register_bits;  // of a vector v: "v.x", "v.y", ...
  std::map<std::string, uint32_t> labels;    // -> index of the statement that follows
  std::vector<Statement> statements;
};

// The one kernel of a module. Throws std::runtime_error.
Program ParsePtx(const std::string& source);

}  // namespace model

#endif  // MODEL_PTX_H_
