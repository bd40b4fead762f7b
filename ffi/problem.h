// A call: extents, operands and results by address, and how its tiles are scheduled.

#ifndef JGG_PROBLEM_H_
#define JGG_PROBLEM_H_

#include <cstdint>
#include <string_view>

#include "kernel_table.h"

namespace jgg {

using Address = uint64_t;  // of device memory

enum class Weights { kDense, kPointers, kTuple };

// What every call has. M rows in G groups, which end at offsets (G,), of L experts.
struct Problem {
  int64_t m = 0, n = 0, k = 0, l = 0, groups = 0;
  Address offsets = 0;
  Address experts = 0;  // of each group; 0: group g is expert g's, and G is L
  Address alpha = 0;    // of each group; 0: ones
  Address d = 0;
  Element d_element = BF16;
  Address scratch = 0;         // ScratchBytes(), 0 if that is 0
  bool dynamic = false;        // CTAs take tiles from a counter instead of striding over them
  int64_t overlap_margin = 0;  // SMs left to others

  int64_t CounterBytes() const { return dynamic ? 128 : 0; }
};

// D (M, N) = rows of A (M, K), in groups, times B of each one's expert, scaled, plus each group's
// bias. C (M, N), if asked for, is D before `prob` (with a bias: D itself) in a type of its own.
struct ForwardProblem : Problem {
  Weights weights = Weights::kDense;
  Major b_major = K_MAJOR;
  Element c_element = NONE;     // NONE: no C
  Element bias_element = NONE;  // NONE: no bias
  Address a = 0;
  Address b = 0;                              // dense: the weights; pointers: their L addresses
  const Address* weight_addresses = nullptr;  // tuple: the L addresses, in host memory
  Address prob = 0;                           // 0: ones
  Address bias = 0;                           // 0: no bias
  Address c = 0;                              // 0: no C

  // Scratch holds L tensor maps of B, not for dense weights, then the counter, for a dynamic
  // schedule.
  int64_t MapsBytes() const { return weights == Weights::kDense ? 0 : 128 * l; }
  int64_t ScratchBytes() const { return MapsBytes() + CounterBytes(); }
};

// D (L, N, K): each group's X^T Y, over its rows of X (M, N) and Y (M, K), scaled, is the matrix of
// its expert. Those of experts without a group are not written.
struct WgradProblem : Problem {
  Address x = 0;
  Address y = 0;
  bool accumulate = false;  // adds to what D holds

  int64_t ScratchBytes() const { return CounterBytes(); }
};

// The words that the borders use for them; anything else is an error that lists the choices.
Weights ParseWeights(std::string_view word);
Major ParseMajor(std::string_view word);
Element ParseElement(const char* name, std::string_view word);

}  // namespace jgg

#endif  // JGG_PROBLEM_H_
