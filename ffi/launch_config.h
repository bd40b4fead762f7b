// How a kernel is launched: the same for the occupancy query and for the launch itself.

#ifndef JGG_LAUNCH_CONFIG_H_
#define JGG_LAUNCH_CONFIG_H_

#include <cuda.h>

#include <cstdint>

#include "kernel_table.h"

namespace jgg {

// A one-dimensional grid of clusters.
struct LaunchConfig {
  LaunchConfig(const Kernel& kernel, int64_t clusters, CUstream stream) {
    const unsigned cluster = kernel.cluster.m * kernel.cluster.n;
    attribute.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    attribute.value.clusterDim = {cluster, 1, 1};
    config.gridDimX = static_cast<unsigned>(clusters) * cluster;
    config.gridDimY = config.gridDimZ = 1;
    config.blockDimX = kernel.threads;
    config.blockDimY = config.blockDimZ = 1;
    config.sharedMemBytes = kernel.shared_bytes;
    config.hStream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
  }
  LaunchConfig(const LaunchConfig&) = delete;  // config points into this object
  LaunchConfig& operator=(const LaunchConfig&) = delete;

  CUlaunchAttribute attribute = {};
  CUlaunchConfig config = {};
};

}  // namespace jgg

#endif  // JGG_LAUNCH_CONFIG_H_
