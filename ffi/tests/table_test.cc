// The table that the library is built with, fake or real: consistent, complete, with cubins in it.

#include <set>

#include "check.h"
#include "error.h"
#include "kernel_table.h"

namespace jgg {
namespace {

TEST(EveryKernelIsConsistent) {
  for (const Kernel& kernel : Kernels()) {
    const std::string problem = Inconsistency(kernel);
    if (!problem.empty()) check::Fail(__FILE__, __LINE__, Text(kernel.name, ": ", problem));
  }
}

TEST(NamesAndBuildId) {
  std::set<std::string_view> names;
  for (const Kernel& kernel : Kernels()) {
    CHECK(names.insert(kernel.name).second);
    CHECK_EQ(FindKernel(kernel.name), &kernel);
    CHECK(kernel.cubin_end > kernel.cubin);
  }
  CHECK(!BuildId().empty());
  CHECK(FindKernel("no such kernel") == nullptr);
}

TEST(PointerKernelsHaveTheirPrologues) {
  for (const Kernel& kernel : Kernels()) {
    if (kernel.kind != FORWARD || !kernel.Takes(PTR_MAPS)) continue;
    for (Kind kind : {MAPS_FROM_MEMORY, MAPS_BY_VALUE}) {
      const Kernel* prologue = FindPrologue(kernel.arch, kind);
      CHECK(prologue != nullptr && prologue->Takes(MAP_B) && prologue->Takes(PTR_MAPS) &&
            prologue->Takes(COUNT));
    }
  }
}

}  // namespace
}  // namespace jgg

TEST_MAIN
