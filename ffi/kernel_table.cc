#include "kernel_table.h"

#include <algorithm>
#include <sstream>
#include <unordered_map>

// Every cubin's bytes, embedded by the generated cubins.S.
#define JGG_BUILD_ID(id)
#define JGG_KERNEL(name, ...) \
  extern "C" const unsigned char jgg_cubin_##name[], jgg_cubin_##name##_end[];
#include "kernel_table.inc"
#undef JGG_KERNEL
#undef JGG_BUILD_ID

namespace jgg {

std::string_view BuildId() {
#define JGG_BUILD_ID(id) return id;
#define JGG_KERNEL(name, ...)
#include "kernel_table.inc"
#undef JGG_KERNEL
#undef JGG_BUILD_ID
}

const std::vector<Kernel>& Kernels() {
  static const std::vector<Kernel> kernels = {
#define JGG_BUILD_ID(id)
#define JGG_KERNEL(name, ...) {#name, jgg_cubin_##name, jgg_cubin_##name##_end, __VA_ARGS__},
#include "kernel_table.inc"
#undef JGG_KERNEL
#undef JGG_BUILD_ID
  };
  return kernels;
}

const Kernel* FindKernel(std::string_view name) {
  static const auto by_name = [] {
    std::unordered_map<std::string_view, const Kernel*> map;
    for (const Kernel& kernel : Kernels()) map[kernel.name] = &kernel;
    return map;
  }();
  auto found = by_name.find(name);
  return found == by_name.end() ? nullptr : found->second;
}

const Kernel* FindPrologue(int32_t arch, Kind kind) {
  for (const Kernel& kernel : Kernels()) {
    if (kernel.arch == arch && kernel.kind == kind) return &kernel;
  }
  return nullptr;
}

bool Kernel::Takes(Field field) const {
  return std::any_of(fields.begin(), fields.end(),
                     [field](const FieldSlot& slot) { return slot.field == field; });
}

const MapSpec* Kernel::FindMap(Field field) const {
  for (const MapSpec& map : maps) {
    if (map.field == field) return &map;
  }
  return nullptr;
}

size_t Kernel::AddressCount() const {
  return std::count_if(fields.begin(), fields.end(),
                       [](const FieldSlot& slot) { return slot.field >= ADDRESS_0; });
}

uint32_t FieldBytes(Field field) {
  if (field <= MAP_C) return 128;
  if (field <= PTR_BIAS || field >= ADDRESS_0) return 8;
  return 4;
}

uint32_t ElementBytes(Element element) { return element == F32 ? 4 : 2; }

std::string Inconsistency(const Kernel& kernel) {
  std::ostringstream problem;
  for (const Param& param : kernel.params) {
    if (param.offset + param.size > kernel.param_bytes) {
      problem << "parameter at offset " << param.offset << " ends past " << kernel.param_bytes;
    }
  }
  for (const FieldSlot& slot : kernel.fields) {
    if (slot.size != FieldBytes(slot.field)) {
      problem << "field " << slot.field << " has " << slot.size << " bytes, expected "
              << FieldBytes(slot.field);
    }
    // A field may span several parameters, as the words of a template map do.
    size_t inside = 0;
    for (const Param& param : kernel.params) {
      size_t begin = std::max<size_t>(param.offset, slot.offset);
      size_t end = std::min<size_t>(param.offset + param.size, slot.offset + slot.size);
      inside += end > begin ? end - begin : 0;
    }
    if (inside != slot.size) {
      problem << "field " << slot.field << " at offset " << slot.offset
              << " lies outside the parameters";
    }
  }
  auto expect_map = [&](Field field, uint32_t rank, Element element) {
    const MapSpec* map = kernel.FindMap(field);
    if (map == nullptr || map->rank != rank) {
      problem << "no map of rank " << rank << " for field " << field;
    } else if (map->element != element) {
      problem << "the map for field " << field << " has element " << map->element << ", expected "
              << element;
    }
  };
  auto expect_together = [&](Field field, bool other, const char* what) {
    if (kernel.Takes(field) != other) {
      problem << "field " << field << " and " << what << " must come together";
    }
  };
  if (kernel.Persistent() &&
      (kernel.tile.m < 1 || kernel.tile.n < 1 || kernel.cluster.m < 1 || kernel.cluster.n < 1)) {
    problem << "tile and cluster must be positive";
  }
  if (kernel.kind == FORWARD) {
    expect_map(MAP_A, kernel.Takes(DIM_LOAD_ROWS) ? 4 : 2, BF16);
    expect_map(MAP_B, 3, BF16);
    if (kernel.Takes(MAP_D)) expect_map(MAP_D, 3, kernel.d_element);
    if (kernel.Takes(MAP_C)) expect_map(MAP_C, 3, kernel.c_element);
    expect_together(MAP_C, kernel.c_element != NONE, "an element of C");
    expect_together(TYPE_C, kernel.c_element == ANY16, "a C of either 16-bit type");
    expect_together(TYPE_D, kernel.d_element == ANY16, "a D of either 16-bit type");
    expect_together(TYPE_BIAS, kernel.Takes(PTR_BIAS), "PTR_BIAS");
    const MapSpec* map_d = kernel.FindMap(MAP_D);
    const MapSpec* map_c = kernel.FindMap(MAP_C);
    // DIM_D_ROWS serves both.
    if (map_d != nullptr && map_c != nullptr && map_d->box[1] != map_c->box[1]) {
      problem << "the boxes of C and D differ in rows";
    }
    if (!kernel.Takes(MAP_B) && !kernel.Takes(PTR_MAPS)) {
      problem << "takes neither MAP_B nor PTR_MAPS";
    }
  }
  if (kernel.kind == WGRAD) {
    expect_map(MAP_A, 4, BF16);
    expect_map(MAP_B, 4, BF16);
    expect_map(MAP_D, 3, kernel.d_element);
    for (Field field :
         {MAP_A, MAP_B, MAP_D, PTR_OFFSETS, PTR_EXPERTS, PTR_COUNTER, PTR_ALPHA, DIM_GROUPS}) {
      if (!kernel.Takes(field)) problem << "does not take field " << field;
    }
    if (kernel.b_major != K_MAJOR) problem << "weight gradients are K_MAJOR";
    if (kernel.c_element != NONE) problem << "weight gradients have no C";
    if (kernel.d_element != F32 && (kernel.d_element != BF16 || kernel.accumulates)) {
      problem << "weight gradients are F32, or BF16 where nothing is added to";
    }
  } else if (kernel.accumulates) {
    problem << "only weight gradients accumulate";
  }
  if (kernel.kind == MAPS_BY_VALUE && kernel.AddressCount() == 0) problem << "takes no address";
  if (kernel.threads == 0) problem << "has no threads";
  return problem.str();
}

}  // namespace jgg
