// A stand-in for the CUDA driver: it runs nothing and records everything.

#ifndef JGG_TESTS_FAKE_DRIVER_H_
#define JGG_TESTS_FAKE_DRIVER_H_

#include <cuda.h>

#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "driver.h"
#include "kernel_table.h"

namespace jgg {

struct EncodedMap {
  CUtensorMapDataType type;
  uint64_t address;
  std::vector<uint64_t> dims, strides;
  std::vector<uint32_t> box, element_strides;
  CUtensorMapInterleave interleave;
  CUtensorMapSwizzle swizzle;
  CUtensorMapL2promotion l2_promotion;
  CUtensorMapFloatOOBfill fill;
};

struct Launched {
  const Kernel* kernel;
  uint64_t context;  // current at the launch
  CUstream stream;
  unsigned grid, block, shared_bytes, cluster;
  std::vector<unsigned char> bytes;  // the parameter buffer

  template <typename T>
  T At(uint32_t offset) const {
    T value;
    std::memcpy(&value, &bytes.at(offset), sizeof(T));
    return value;
  }
  // The value of the kernel's n-th field of this kind; checks that it is there.
  template <typename T>
  T Value(Field field, int occurrence = 0) const {
    for (const FieldSlot& slot : kernel->fields) {
      if (slot.field == field && occurrence-- == 0) return At<T>(slot.offset);
    }
    throw std::runtime_error("kernel has no such field");
  }
};

struct Memset {
  uint64_t address;
  unsigned value;
  size_t count;
  CUstream stream;
  size_t launches_before;
};

struct Loaded {
  std::string cubin;  // the fake table's cubins hold their kernel's name
  uint64_t context;
};

class FakeDriver {
 public:
  FakeDriver();  // GetDriver() returns this from now on
  ~FakeDriver();

  // A context on a new device, and a stream in it.
  CUstream AddDevice(int major, int minor, const char* name = "Fake GPU");
  CUstream AddStream(CUstream sibling);  // in the same context
  uint64_t ContextOf(CUstream stream) const;

  // The map that a parameter holds: the stand-in writes an index into it.
  const EncodedMap& MapIn(const Launched& launch, Field field) const;

  // `call` fails from now on; or no call at all does.
  void FailAt(const std::string& call, CUresult result = CUDA_ERROR_UNKNOWN);

  std::vector<EncodedMap> encoded;
  std::vector<Launched> launched;
  std::vector<Memset> memsets;
  std::vector<Loaded> loads;
  std::map<std::string, int> calls;  // by entry point
  std::set<CUmodule> live_modules;
  std::set<CUstream> capturing;
  std::set<std::string> illegal_under_capture;  // calls seen while any stream was capturing
  int max_clusters = 60;
  int extra_params = 0;              // that a cubin has beyond the table's
  size_t param_padding = 0;          // before a cubin's first parameter
  size_t second_param_shift = 0;     // by which a cubin's second parameter is off
  std::atomic<int> load_barrier{0};  // threads that wait for each other in cuModuleLoadData
};

// Depth of the calling thread's context stack.
size_t ContextDepth();

}  // namespace jgg

#endif  // JGG_TESTS_FAKE_DRIVER_H_
