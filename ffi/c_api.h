/* What the shared library exports. Plain C: Python opens it with ctypes. */

#ifndef JGG_C_API_H_
#define JGG_C_API_H_

#include <stdint.h>

#define JGG_EXPORT __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

/* XLA FFI handlers, one per stage of a custom call. */
struct XLA_FFI_Error;
struct XLA_FFI_CallFrame;
JGG_EXPORT struct XLA_FFI_Error* jgg_forward_instantiate(struct XLA_FFI_CallFrame*);
JGG_EXPORT struct XLA_FFI_Error* jgg_forward_initialize(struct XLA_FFI_CallFrame*);
JGG_EXPORT struct XLA_FFI_Error* jgg_forward_execute(struct XLA_FFI_CallFrame*);
JGG_EXPORT struct XLA_FFI_Error* jgg_wgrad_instantiate(struct XLA_FFI_CallFrame*);
JGG_EXPORT struct XLA_FFI_Error* jgg_wgrad_initialize(struct XLA_FFI_CallFrame*);
JGG_EXPORT struct XLA_FFI_Error* jgg_wgrad_execute(struct XLA_FFI_CallFrame*);
JGG_EXPORT struct XLA_FFI_Error* jgg_gather_weights(struct XLA_FFI_CallFrame*);

JGG_EXPORT const char* jgg_build_id(void);

/* The XLA FFI API that the library was built against: runtimes of this version or newer run it. */
JGG_EXPORT void jgg_ffi_api_version(int* major, int* minor);

JGG_EXPORT int jgg_kernel_count(void);
JGG_EXPORT const char* jgg_kernel_name(int index); /* null: no such index */

/* Null if the CUDA driver could be opened, else why not. */
JGG_EXPORT const char* jgg_driver_status(void);

/* One forward call on the caller's stream and device addresses. */
typedef struct jgg_call {
  int64_t struct_size; /* sizeof(jgg_call) */
  const char* sm90;    /* names of the forward kernels; null or "": none for that architecture */
  const char* sm100;
  const char* weights;    /* "dense", "pointers" or "tuple" */
  const char* b_major;    /* "k" or "n" */
  const char* d_dtype;    /* "bfloat16", "float16" or "float32" */
  const char* c_dtype;    /* the same; null: no C */
  const char* bias_dtype; /* the same; null: no bias */
  int64_t m, n, k, l;
  int64_t groups;                   /* l, unless there are experts */
  int64_t dynamic;                  /* 1: CTAs take tiles from a counter in scratch; 0: static */
  int64_t overlap_margin;           /* SMs left free, 0 or more */
  uint64_t a;                       /* BF16 (m, k) */
  uint64_t offsets;                 /* int32 (groups,) ends of the groups */
  uint64_t experts;                 /* int32 (groups,) of each group; 0: group g is expert g's */
  uint64_t alpha;                   /* float32 (groups,); 0: ones */
  uint64_t prob;                    /* float32 (m,); 0: ones */
  uint64_t bias;                    /* (groups, n); 0: no bias */
  uint64_t b;                       /* dense: BF16 weights; pointers: int64 (l,); tuple: 0 */
  const uint64_t* weight_addresses; /* tuple: l device addresses in host memory; else null */
  uint64_t d;                       /* (m, n) */
  uint64_t c;                       /* (m, n); 0: no C */
  uint64_t scratch; /* 128 l bytes unless dense, then 128 if dynamic; aligned to 128; alive until
                       the stream is past the call; 0 if it has no bytes */
  uint64_t stream;  /* CUstream; 0: legacy default stream of the current context */
} jgg_call;

/* One call for weight gradients, likewise: d[experts[g]] = alpha[g] * x^T y over the rows of group
   g, or that added to it. */
typedef struct jgg_wgrad_call {
  int64_t struct_size; /* sizeof(jgg_wgrad_call) */
  const char* sm90;    /* names of the wgrad kernels; null or "": none for that architecture */
  const char* sm100;
  const char* d_dtype; /* "bfloat16" or "float32" */
  int64_t m, n, k, l;
  int64_t groups;         /* l, unless there are experts */
  int64_t dynamic;        /* 1: CTAs take tiles from a counter in scratch; 0: static */
  int64_t accumulate;     /* 1: adds to what d, of float32, holds; 0: overwrites it */
  int64_t overlap_margin; /* SMs left free, 0 or more */
  uint64_t x;             /* BF16 (m, n) */
  uint64_t y;             /* BF16 (m, k) */
  uint64_t offsets;       /* int32 (groups,) ends of the groups */
  uint64_t experts;       /* int32 (groups,) of each group, none twice; 0: group g is expert g's */
  uint64_t alpha;         /* float32 (groups,); 0: ones */
  uint64_t d;             /* (l, n, k) */
  uint64_t scratch;       /* 128 bytes if dynamic, as in jgg_call; else 0 */
  uint64_t stream;        /* CUstream; 0: legacy default stream of the current context */
} jgg_wgrad_call;

/* These enqueue the call, and load its kernels at first use on a device, which must not be under
   stream capture. Null, or an error text that is valid until the thread's next call. */
JGG_EXPORT const char* jgg_forward(const jgg_call* call);
JGG_EXPORT const char* jgg_wgrad(const jgg_wgrad_call* call);

/* Test hook. While on, counts calls launched, of either kind, and those launched into a stream
 * capture. */
JGG_EXPORT void jgg_count_launches(int on); /* also resets the counts */
JGG_EXPORT void jgg_launch_counts(int64_t* launches, int64_t* captured);

#ifdef __cplusplus
}
#endif

#endif /* JGG_C_API_H_ */
