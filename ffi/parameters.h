// A kernel's parameter buffer, filled field by field as the table says.

#ifndef JGG_PARAMETERS_H_
#define JGG_PARAMETERS_H_

#include <cuda.h>

#include <cstdint>
#include <vector>

#include "kernel_table.h"
#include "problem.h"

namespace jgg {

// The value of every field; a kernel takes those that it lists.
struct FieldValues {
  // Those that every call has, from the problem; the rest, maps too, are for the caller to set.
  explicit FieldValues(const Problem& problem);

  CUtensorMap map_a = {}, map_b = {}, map_d = {}, map_c = {};
  Address maps = 0, pointers = 0, offsets = 0, counter = 0, experts = 0;
  Address alpha = 0, prob = 0, bias = 0;
  int32_t m = 0, n = 0, k = 0, l = 0, groups = 0, load_rows = 0, d_rows = 0;
  int32_t first = 0, count = 0;
  int32_t type_bias = NONE, type_c = NONE, type_d = NONE;
  const Address* addresses = nullptr;  // `count` of them; ADDRESS_i past it are zero
};

class Parameters {
 public:
  Parameters(const Kernel& kernel, const FieldValues& values);

  // As cuLaunchKernelEx takes them: the address of each parameter.
  void** pointers() { return pointers_.data(); }

 private:
  std::vector<unsigned char> bytes_;
  std::vector<void*> pointers_;
};

}  // namespace jgg

#endif  // JGG_PARAMETERS_H_
