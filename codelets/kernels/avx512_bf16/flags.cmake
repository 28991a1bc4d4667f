# Zen 4, Cooper Lake, Sapphire Rapids and later. 512-bit vectors also for the elementwise sources.
# No SLP: it stores the pointers of a tile through vector registers, where they queue behind the previous tile's products, and so does
# every load and prefetch of the next one (3 % of a forward of 8 rows and k = 768).
set(ISA_FLAGS -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512bf16 -mfma -mprefer-vector-width=512 -fno-tree-slp-vectorize)
# gcc 14 keeps a sum of coded forwards of 6 rows on the stack unless it looks at each loop as a region of its own.
if(CMAKE_C_COMPILER_ID STREQUAL GNU AND CMAKE_C_COMPILER_VERSION VERSION_GREATER_EQUAL 13)
	list(APPEND ISA_FLAGS -fira-region=all)
endif()
