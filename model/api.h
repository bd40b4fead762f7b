/* What the harness uses, beside the driver's own entry points. Plain C: Python opens the library
 * with ctypes. */

#ifndef MODEL_API_H_
#define MODEL_API_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The device: compute capability, and how many clusters of any kernel run on it at once. */
void model_device(int major, int minor, int max_clusters);

/* How the next launches run. policy: "random", "eager", "lazy", "hold_loads", "hold_stores",
   "hold_matrix" or "starve<warp>". Null, or an error text. */
const char* model_schedule(const char* policy, uint64_t seed, uint64_t max_statements);

/* From now on the module of this cubin runs this PTX. Null, or an error text: what could not be
 * decoded. */
const char* model_register(const char* name, const void* cubin, size_t bytes, const char* ptx);

/* Runs a registered kernel by itself. dims: grid, block, cluster, three each. Null, or the fault.
 */
const char* model_launch(const char* name, const uint32_t* dims, uint32_t shared_bytes,
                         const void* parameters, size_t parameter_bytes);

/* Device memory. Bytes that were never written have no value. */
uint64_t model_alloc(const char* name, size_t bytes, size_t align, int writable);
void model_free(uint64_t address);
int model_write(uint64_t address, const void* from, size_t bytes);
/* written: a byte each, 1 where there is a value; may be null. */
int model_read(uint64_t address, void* into, uint8_t* written, size_t bytes);

/* The fault of the last launch, "kind\nreport"; empty if there was none. */
const char* model_fault(void);

/* Of a registered kernel: statements, the source line of each, and how often each was executed
 * since it was registered. */
size_t model_statements(const char* name);
void model_coverage(const char* name, int32_t* lines, uint64_t* executed);

/* Statistics of all launches since the last call, a line "key value" each; clears them. */
const char* model_statistics(void);

/* The matrix unit by itself. */
void model_multiply_add(const uint16_t* a, int m, const uint16_t* b, int n, float* d, int add_d);

#ifdef __cplusplus
}
#endif

#endif /* MODEL_API_H_ */
