// One forward call: D (M, N) = rows of A (M, K), grouped by offsets (L,), times each group's B.

#ifndef JGG_PROBLEM_H_
#define JGG_PROBLEM_H_

#include <cstdint>
#include <string_view>

#include "kernel_table.h"

namespace jgg {

using Address = uint64_t;  // of device memory

enum class Weights { kDense, kPointers, kTuple };

struct Problem {
  Weights weights = Weights::kDense;
  Major b_major = K_MAJOR;
  Element d_element = BF16;
  int64_t m = 0, n = 0, k = 0, l = 0;
  Address a = 0;
  Address b = 0;                              // dense: the weights; pointers: their L addresses
  const Address* weight_addresses = nullptr;  // tuple: the L addresses, in host memory
  Address offsets = 0;
  Address alpha = 0;  // 0: ones
  Address prob = 0;   // 0: ones
  Address d = 0;
  Address scratch = 0;  // pointers and tuple: L tensor maps
};

// The words that the borders use for them; anything else is an error that lists the choices.
Weights ParseWeights(std::string_view word);
Major ParseMajor(std::string_view word);
Element ParseElement(std::string_view word);

}  // namespace jgg

#endif  // JGG_PROBLEM_H_
