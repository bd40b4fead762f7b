    .section .note.GNU-stack,"",%progbits
    .section .rodata
    .balign 64
    .globl jgg_cubin_sm90_dense_bk_bf16_plain
    .hidden jgg_cubin_sm90_dense_bk_bf16_plain
jgg_cubin_sm90_dense_bk_bf16_plain:
    .asciz "sm90_dense_bk_bf16_plain"
    .globl jgg_cubin_sm90_dense_bk_bf16_plain_end
    .hidden jgg_cubin_sm90_dense_bk_bf16_plain_end
jgg_cubin_sm90_dense_bk_bf16_plain_end:
    .balign 64
    .globl jgg_cubin_sm90_dense_bn_f32_scaled
    .hidden jgg_cubin_sm90_dense_bn_f32_scaled
jgg_cubin_sm90_dense_bn_f32_scaled:
    .asciz "sm90_dense_bn_f32_scaled"
    .globl jgg_cubin_sm90_dense_bn_f32_scaled_end
    .hidden jgg_cubin_sm90_dense_bn_f32_scaled_end
jgg_cubin_sm90_dense_bn_f32_scaled_end:
    .balign 64
    .globl jgg_cubin_sm90_pointers_bk_f16_scaled
    .hidden jgg_cubin_sm90_pointers_bk_f16_scaled
jgg_cubin_sm90_pointers_bk_f16_scaled:
    .asciz "sm90_pointers_bk_f16_scaled"
    .globl jgg_cubin_sm90_pointers_bk_f16_scaled_end
    .hidden jgg_cubin_sm90_pointers_bk_f16_scaled_end
jgg_cubin_sm90_pointers_bk_f16_scaled_end:
    .balign 64
    .globl jgg_cubin_sm90_dense_bk_bf16_bias
    .hidden jgg_cubin_sm90_dense_bk_bf16_bias
jgg_cubin_sm90_dense_bk_bf16_bias:
    .asciz "sm90_dense_bk_bf16_bias"
    .globl jgg_cubin_sm90_dense_bk_bf16_bias_end
    .hidden jgg_cubin_sm90_dense_bk_bf16_bias_end
jgg_cubin_sm90_dense_bk_bf16_bias_end:
    .balign 64
    .globl jgg_cubin_sm90_dense_bk_f32_c_16bit
    .hidden jgg_cubin_sm90_dense_bk_f32_c_16bit
jgg_cubin_sm90_dense_bk_f32_c_16bit:
    .asciz "sm90_dense_bk_f32_c_16bit"
    .globl jgg_cubin_sm90_dense_bk_f32_c_16bit_end
    .hidden jgg_cubin_sm90_dense_bk_f32_c_16bit_end
jgg_cubin_sm90_dense_bk_f32_c_16bit_end:
    .balign 64
    .globl jgg_cubin_sm90_pointers_bk_16bit_c_f32
    .hidden jgg_cubin_sm90_pointers_bk_16bit_c_f32
jgg_cubin_sm90_pointers_bk_16bit_c_f32:
    .asciz "sm90_pointers_bk_16bit_c_f32"
    .globl jgg_cubin_sm90_pointers_bk_16bit_c_f32_end
    .hidden jgg_cubin_sm90_pointers_bk_16bit_c_f32_end
jgg_cubin_sm90_pointers_bk_16bit_c_f32_end:
    .balign 64
    .globl jgg_cubin_sm90_maps_from_memory
    .hidden jgg_cubin_sm90_maps_from_memory
jgg_cubin_sm90_maps_from_memory:
    .asciz "sm90_maps_from_memory"
    .globl jgg_cubin_sm90_maps_from_memory_end
    .hidden jgg_cubin_sm90_maps_from_memory_end
jgg_cubin_sm90_maps_from_memory_end:
    .balign 64
    .globl jgg_cubin_sm90_maps_by_value
    .hidden jgg_cubin_sm90_maps_by_value
jgg_cubin_sm90_maps_by_value:
    .asciz "sm90_maps_by_value"
    .globl jgg_cubin_sm90_maps_by_value_end
    .hidden jgg_cubin_sm90_maps_by_value_end
jgg_cubin_sm90_maps_by_value_end:
    .balign 64
    .globl jgg_cubin_sm100_dense_bk_bf16_plain
    .hidden jgg_cubin_sm100_dense_bk_bf16_plain
jgg_cubin_sm100_dense_bk_bf16_plain:
    .asciz "sm100_dense_bk_bf16_plain"
    .globl jgg_cubin_sm100_dense_bk_bf16_plain_end
    .hidden jgg_cubin_sm100_dense_bk_bf16_plain_end
jgg_cubin_sm100_dense_bk_bf16_plain_end:
    .balign 64
    .globl jgg_cubin_sm100_dense_bn_f32_scaled
    .hidden jgg_cubin_sm100_dense_bn_f32_scaled
jgg_cubin_sm100_dense_bn_f32_scaled:
    .asciz "sm100_dense_bn_f32_scaled"
    .globl jgg_cubin_sm100_dense_bn_f32_scaled_end
    .hidden jgg_cubin_sm100_dense_bn_f32_scaled_end
jgg_cubin_sm100_dense_bn_f32_scaled_end:
    .balign 64
    .globl jgg_cubin_sm100_pointers_bk_f16_scaled
    .hidden jgg_cubin_sm100_pointers_bk_f16_scaled
jgg_cubin_sm100_pointers_bk_f16_scaled:
    .asciz "sm100_pointers_bk_f16_scaled"
    .globl jgg_cubin_sm100_pointers_bk_f16_scaled_end
    .hidden jgg_cubin_sm100_pointers_bk_f16_scaled_end
jgg_cubin_sm100_pointers_bk_f16_scaled_end:
    .balign 64
    .globl jgg_cubin_sm100_maps_from_memory
    .hidden jgg_cubin_sm100_maps_from_memory
jgg_cubin_sm100_maps_from_memory:
    .asciz "sm100_maps_from_memory"
    .globl jgg_cubin_sm100_maps_from_memory_end
    .hidden jgg_cubin_sm100_maps_from_memory_end
jgg_cubin_sm100_maps_from_memory_end:
    .balign 64
    .globl jgg_cubin_sm100_maps_by_value
    .hidden jgg_cubin_sm100_maps_by_value
jgg_cubin_sm100_maps_by_value:
    .asciz "sm100_maps_by_value"
    .globl jgg_cubin_sm100_maps_by_value_end
    .hidden jgg_cubin_sm100_maps_by_value_end
jgg_cubin_sm100_maps_by_value_end:
    .balign 64
    .globl jgg_cubin_sm90_wgrad_bf16
    .hidden jgg_cubin_sm90_wgrad_bf16
jgg_cubin_sm90_wgrad_bf16:
    .asciz "sm90_wgrad_bf16"
    .globl jgg_cubin_sm90_wgrad_bf16_end
    .hidden jgg_cubin_sm90_wgrad_bf16_end
jgg_cubin_sm90_wgrad_bf16_end:
    .balign 64
    .globl jgg_cubin_sm90_wgrad_f32
    .hidden jgg_cubin_sm90_wgrad_f32
jgg_cubin_sm90_wgrad_f32:
    .asciz "sm90_wgrad_f32"
    .globl jgg_cubin_sm90_wgrad_f32_end
    .hidden jgg_cubin_sm90_wgrad_f32_end
jgg_cubin_sm90_wgrad_f32_end:
    .balign 64
    .globl jgg_cubin_sm90_wgrad_f32_accumulate
    .hidden jgg_cubin_sm90_wgrad_f32_accumulate
jgg_cubin_sm90_wgrad_f32_accumulate:
    .asciz "sm90_wgrad_f32_accumulate"
    .globl jgg_cubin_sm90_wgrad_f32_accumulate_end
    .hidden jgg_cubin_sm90_wgrad_f32_accumulate_end
jgg_cubin_sm90_wgrad_f32_accumulate_end:
    .balign 64
    .globl jgg_cubin_sm100_wgrad_bf16
    .hidden jgg_cubin_sm100_wgrad_bf16
jgg_cubin_sm100_wgrad_bf16:
    .asciz "sm100_wgrad_bf16"
    .globl jgg_cubin_sm100_wgrad_bf16_end
    .hidden jgg_cubin_sm100_wgrad_bf16_end
jgg_cubin_sm100_wgrad_bf16_end:
    .balign 64
    .globl jgg_cubin_sm100_wgrad_f32_accumulate
    .hidden jgg_cubin_sm100_wgrad_f32_accumulate
jgg_cubin_sm100_wgrad_f32_accumulate:
    .asciz "sm100_wgrad_f32_accumulate"
    .globl jgg_cubin_sm100_wgrad_f32_accumulate_end
    .hidden jgg_cubin_sm100_wgrad_f32_accumulate_end
jgg_cubin_sm100_wgrad_f32_accumulate_end:
