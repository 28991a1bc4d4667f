# Sapphire Rapids and later. 512-bit vectors also for the elementwise sources.
# No SLP: see avx512_bf16/flags.cmake.
set(ISA_FLAGS -mamx-tile -mamx-bf16 -mamx-int8 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512bf16 -mfma
	-mprefer-vector-width=512 -mtune=sapphirerapids -fno-tree-slp-vectorize)
