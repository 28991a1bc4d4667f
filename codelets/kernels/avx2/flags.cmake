# No SLP: see avx512_bf16/flags.cmake.
set(ISA_FLAGS -mavx2 -mfma -mf16c -fno-tree-slp-vectorize)
