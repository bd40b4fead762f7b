#include "parameters.h"

#include <cstring>

namespace jgg {
namespace {

const int32_t kOne = 1;
const Address kNull = 0;

const void* ValueOf(Field field, const FieldValues& values) {
  switch (field) {
    case MAP_A:
      return &values.map_a;
    case MAP_B:
      return &values.map_b;
    case MAP_D:
      return &values.map_d;
    case MAP_C:
      return &values.map_c;
    case PTR_MAPS:
      return &values.maps;
    case PTR_POINTERS:
      return &values.pointers;
    case PTR_OFFSETS:
      return &values.offsets;
    case PTR_COUNTER:
      return &values.counter;
    case PTR_EXPERTS:
      return &values.experts;
    case PTR_ALPHA:
      return &values.alpha;
    case PTR_PROB:
      return &values.prob;
    case PTR_BIAS:
      return &values.bias;
    case DIM_M:
      return &values.m;
    case DIM_N:
      return &values.n;
    case DIM_K:
      return &values.k;
    case DIM_L:
      return &values.l;
    case DIM_GROUPS:
      return &values.groups;
    case DIM_LOAD_ROWS:
      return &values.load_rows;
    case DIM_ONE:
      return &kOne;
    case DIM_D_ROWS:
      return &values.d_rows;
    case FIRST:
      return &values.first;
    case COUNT:
      return &values.count;
    case TYPE_BIAS:
      return &values.type_bias;
    case TYPE_C:
      return &values.type_c;
    case TYPE_D:
      return &values.type_d;
    case ADDRESS_0:
      break;
  }
  const int32_t index = field - ADDRESS_0;
  return index < values.count ? &values.addresses[index] : &kNull;
}

}  // namespace

FieldValues::FieldValues(const Problem& problem)
    : offsets(problem.offsets),
      experts(problem.experts),
      alpha(problem.alpha),
      m(static_cast<int32_t>(problem.m)),
      n(static_cast<int32_t>(problem.n)),
      k(static_cast<int32_t>(problem.k)),
      l(static_cast<int32_t>(problem.l)),
      groups(static_cast<int32_t>(problem.groups)) {}

Parameters::Parameters(const Kernel& kernel, const FieldValues& values)
    : bytes_(kernel.param_bytes) {
  for (const FieldSlot& slot : kernel.fields) {
    std::memcpy(&bytes_[slot.offset], ValueOf(slot.field, values), slot.size);
  }
  pointers_.reserve(kernel.params.size());
  for (const Param& param : kernel.params) pointers_.push_back(&bytes_[param.offset]);
}

}  // namespace jgg
