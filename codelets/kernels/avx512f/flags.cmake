# No SLP: see avx512_bf16/flags.cmake.
set(ISA_FLAGS -mavx512f -mavx512bw -mavx512dq -mavx512vl -fno-tree-slp-vectorize)
# gcc 14 takes the last step out of the backward's loop, and then keeps half of the sums on the stack.
if(CMAKE_C_COMPILER_ID STREQUAL GNU AND CMAKE_C_COMPILER_VERSION VERSION_GREATER_EQUAL 13)
	list(APPEND ISA_FLAGS -fno-split-loops)
endif()
