# Zen 4, Cooper Lake, Sapphire Rapids and later. 512-bit vectors also for the elementwise sources.
# No SLP: it stores the pointers of a tile through vector registers, where they queue behind the previous tile's products, and so does
# every load and prefetch of the next one (3 % of a forward of 8 rows and k = 768).
set(ISA_FLAGS -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512bf16 -mfma -mprefer-vector-width=512 -fno-tree-slp-vectorize)
