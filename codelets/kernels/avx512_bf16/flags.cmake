# Zen 4, Cooper Lake, Sapphire Rapids and later. 512-bit vectors also for the elementwise sources.
set(ISA_FLAGS -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512bf16 -mfma -mprefer-vector-width=512)
