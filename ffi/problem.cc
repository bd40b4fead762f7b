#include "problem.h"

#include "error.h"

namespace jgg {

Weights ParseWeights(std::string_view word) {
  if (word == "dense") return Weights::kDense;
  if (word == "pointers") return Weights::kPointers;
  if (word == "tuple") return Weights::kTuple;
  InvalidArgument("weights must be 'dense', 'pointers' or 'tuple'; got '", word, "'");
}

Major ParseMajor(std::string_view word) {
  if (word == "k") return K_MAJOR;
  if (word == "n") return N_MAJOR;
  InvalidArgument("b_major must be 'k' or 'n'; got '", word, "'");
}

Element ParseElement(const char* name, std::string_view word) {
  if (word == "bfloat16") return BF16;
  if (word == "float16") return F16;
  if (word == "float32") return F32;
  InvalidArgument(name, " must be 'bfloat16', 'float16' or 'float32'; got '", word, "'");
}

}  // namespace jgg
