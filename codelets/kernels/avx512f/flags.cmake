# No SLP: see avx512_bf16/flags.cmake.
set(ISA_FLAGS -mavx512f -mavx512bw -mavx512dq -mavx512vl -fno-tree-slp-vectorize)
